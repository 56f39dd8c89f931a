"""The lean client loop: what Lightning's Trainer does in a client's fit, without what most of a small fit's time goes to.

The step is the same one: the task's own ``training_step`` and ``optimizer_step``, the same optimizer around the same rule,
Lightning's precision plugin, strategy and clipping, and the module's hooks where a task overrides them. What is left out are
the loops' progress tracking, the data connector, the result collection and the calls of hooks that nobody overrides. The
weights are those of the Trainer to the last bit. What it cannot do, `obstacle` names.

A callback is run where it says ``runs_lean = True``: it then uses of the trainer only its counters of steps and epochs, its
optimizers, its strategy, its precision plugin and ``should_stop`` (looked at after each step), and has no hooks but those
below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.federation.snapshot import Snapshots
from fl_lightning.tasks.base import Batch, FederatedTask

HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
# Of a callback; of a task, the first two run in any case.
_CALLBACK_HOOKS = (*HOOKS, "setup", "teardown", "on_fit_start", "on_train_batch_start", "on_exception")
# What a Trainer does for these, the lean loop does not.
_NOT_RUN = (
    "configure_gradient_clipping",
    "backward",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "transfer_batch_to_device",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "configure_callbacks",
    "configure_model",
    "teardown",
    "prepare_data",
    "on_predict_start",
    "on_predict_epoch_start",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_predict_epoch_end",
    "on_predict_end",
)
# What `FederatedTask` does itself; a task that does it otherwise may rely on the Trainer (``self.log``, skipping a batch).
_OURS = ("configure_optimizers", "training_step", "on_train_batch_start")


F = TypeVar("F", bound=Callable[..., Any])


def _cached(function: F) -> F:
    """`functools.cache` for functions of classes, which its type hints refuse."""
    return cast(F, cache(function))


def obstacle(trainer: Trainer, task: FederatedTask, callbacks: Sequence[Callback]) -> str | None:
    """Why a fit needs the Trainer, in half a sentence; None where the lean loop does."""
    if heavy := [callback for callback in callbacks if not _is_light(type(callback))]:
        return f"of the callback {type(heavy[0]).__name__}"
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        return f"of the strategy {type(trainer.strategy).__name__}"
    if trainer.precision not in ("32-true", "bf16-mixed"):  # others convert the module, or scale gradients
        return f"of precision {trainer.precision}"
    settings = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches == 1,
        "limit_train_batches": isinstance(trainer.limit_train_batches, float) and trainer.limit_train_batches == 1,
        "overfit_batches": not trainer.overfit_batches,  # type: ignore[attr-defined]
        "min_epochs": not trainer.fit_loop.min_epochs,
        "min_steps": not trainer.fit_loop.epoch_loop.min_steps,
        "detect_anomaly": not trainer._detect_anomaly,
        "profiler": isinstance(trainer.profiler, PassThroughProfiler),  # type: ignore[attr-defined]
        "fast_dev_run": not trainer.fast_dev_run,  # type: ignore[attr-defined]
    }
    if refused := [name for name, plain in settings.items() if not plain]:
        return f"of trainer.{refused[0]}"
    if not task.automatic_optimization:
        return f"{type(task).__name__} optimises by hand"
    if (own := _own(type(task))) is not None:
        return f"{type(task).__name__} has its own {own}"
    return None


@_cached
def _own(kind: type[FederatedTask]) -> str | None:
    """What a kind of task does otherwise than the lean loop; None where there is nothing."""
    own = [name for name in _OURS if getattr(kind, name) is not getattr(FederatedTask, name)]
    return next(iter(own + [name for name in _NOT_RUN if _overrides(kind, name)]), None)


def fit(
    trainer: Trainer,
    task: FederatedTask,
    batches: Iterable[Batch],
    max_epochs: int,
    max_steps: int,
    snapshots: Snapshots | None = None,
) -> tuple[Optimizer, int]:
    """Train.

    Args:
        trainer: Holds device, precision and clipping; its counters of epochs and steps are kept up.
        task: On the CPU or the trainer's device.
        batches: Anew each epoch.
        max_epochs: Epochs; -1 for no limit.
        max_steps: Optimizer steps; -1 for no limit.
        snapshots: Says where the fit goes on, and keeps where it is.

    Returns:
        The optimizer, and how many steps it took.
    """
    try:
        return _fit(trainer, task, batches, max_epochs, max_steps, snapshots)
    except BaseException as error:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            callback.on_exception(trainer, task, error)
        raise


def _fit(
    trainer: Trainer,
    task: FederatedTask,
    batches: Iterable[Batch],
    max_epochs: int,
    max_steps: int,
    snapshots: Snapshots | None,
) -> tuple[Optimizer, int]:
    hooks: dict[str, list[Callable[..., Any]]] = {name: [] for name in _CALLBACK_HOOKS}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name in _hooks(type(callback)):
            hooks[name].append(partial(getattr(callback, name), trainer, task))
    for name in _hooks(type(task)):
        hooks[name].append(getattr(task, name))

    def call(name: str, *arguments: Any) -> None:
        for hook in hooks[name]:
            hook(*arguments)

    strategy, precision = trainer.strategy, trainer.precision_plugin
    task._trainer = trainer
    on_cpu = strategy.root_device.type == "cpu"
    if not on_cpu:
        task.to(strategy.root_device)
    call("setup", "fit")
    task.setup("fit")
    optimizer: Any = task.configure_optimizers()  # `FederatedTask`'s: one optimizer, no scheduler
    if trainer.callbacks:  # type: ignore[attr-defined]
        strategy.optimizers = [optimizer]
    clip, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM
    epochs: Any = trainer.fit_loop.epoch_progress.current
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    call("on_fit_start")
    task.on_fit_start()
    call("on_train_start")
    done = snapshots.resume(optimizer) if snapshots is not None else None  # batches of the epoch, where one was begun
    with torch.enable_grad():
        while epochs.processed != max_epochs and steps.completed != max_steps and not trainer.should_stop:
            if done is None:
                call("on_train_epoch_start")
            for index, batch in enumerate(batches, done or 0):
                if not on_cpu:
                    batch = strategy.batch_to_device(batch)
                call("on_train_batch_start", batch, index)
                task.on_train_batch_start(batch, index)
                outputs: list[Tensor] = []

                def closure(batch: Batch = batch, index: int = index, outputs: list[Tensor] = outputs) -> Tensor:
                    with precision.train_step_context():
                        loss = task.training_step(batch, index)
                    outputs.append(loss)
                    call("on_before_zero_grad", optimizer)
                    optimizer.zero_grad()
                    call("on_before_backward", loss)
                    loss.backward()
                    call("on_after_backward")
                    call("on_before_optimizer_step", optimizer)
                    if clip:
                        precision.clip_gradients(optimizer, clip, GradClipAlgorithmType(algorithm))
                    return loss.detach()

                task.optimizer_step(epochs.processed, index, optimizer, closure)
                steps.completed += 1
                call("on_train_batch_end", outputs[-1].detach(), batch, index)
                if steps.completed == max_steps or trainer.should_stop:
                    break
                if snapshots is not None and snapshots.due():
                    snapshots.take(optimizer, index + 1)
            done = None
            call("on_train_epoch_end")
            epochs.processed += 1
            epochs.completed += 1
    call("on_train_end")
    call("on_fit_end")
    call("teardown", "fit")
    return optimizer, steps.completed


@torch.no_grad()
def predict(trainer: Trainer, task: FederatedTask, batches: Iterable[Batch]) -> list[Tensor]:
    """Outputs of the task's ``predict_step`` by batch."""
    strategy, precision = trainer.strategy, trainer.precision_plugin
    task._trainer = trainer
    on_cpu = strategy.root_device.type == "cpu"
    if not on_cpu:
        task.to(strategy.root_device)
    task.setup("predict")
    found = []
    for index, batch in enumerate(batches):
        with precision.predict_step_context():
            found.append(task.predict_step(batch if on_cpu else strategy.batch_to_device(batch), index))
    return found


@_cached
def _hooks(kind: type[FederatedTask] | type[Callback]) -> tuple[str, ...]:
    """The hooks that a kind of task or callback has a use for."""
    return tuple(name for name in (_CALLBACK_HOOKS if issubclass(kind, Callback) else HOOKS) if _overrides(kind, name))


def _overrides(kind: type[FederatedTask] | type[Callback], name: str) -> bool:
    base = Callback if issubclass(kind, Callback) else LightningModule
    return getattr(kind, name) is not getattr(base, name)


@_cached
def _is_light(kind: type[Callback]) -> bool:
    """Whether a kind of callback says that it can be run here, and has no hook that is not called."""
    own = [name for name in dir(Callback) if name.startswith(("on_", "setup", "teardown")) and _overrides(kind, name)]
    return getattr(kind, "runs_lean", False) and set(own) <= set(_CALLBACK_HOOKS)
