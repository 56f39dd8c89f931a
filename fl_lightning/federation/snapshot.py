"""A training that was killed goes on at a step's end, to the last bit: what the rest of it depends on, taken and put back.

That is: parameters and buffers; what the optimizer says in its ``state_dict`` (around a rule, the rule's carry too); the
task's and the callbacks' ``fit_state``; the order of the epoch's examples and the loader's generators; the global generators
as they are lent to the fit; how many steps and epochs are done. All else is as a fit's start makes it, and a resumed fit
starts as the first time: constants of rules, hooks, learning rates' bases.

A task takes part if its class says ``resumes = True`` in its own body (`FederatedTask`), a callback likewise: what it
carries from step to step is then in its ``fit_state()``, which ``load_fit_state(state)`` takes back, or nothing where it has
no such method. An instance may take its class's word back. Rules carry nothing but their carry (`LocalRule`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.federation.state import CheckpointError, digest
from fl_lightning.rng import global_rng_state, load_global_rng_state
from fl_lightning.tasks.base import FederatedTask

_PLACED = "$placed"


class Place(Protocol):
    """Where the snapshot of one training is kept."""

    def due(self) -> bool:
        """Whether it is time for a new one."""
        ...

    def keep(self, state: Mapping[str, Any]) -> None:
        """In place of the last one; TypeError where a value is neither a tensor nor of a JSON type."""
        ...

    def kept(self) -> Mapping[str, Any] | None:
        """The last one, if there is one."""
        ...

    def discard(self) -> None:
        """The last one is no good."""
        ...


class Loader(Protocol):
    """What gives a training its batches, and can go on within an epoch."""

    def state(self, done: int) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


class Snapshots:
    """Of one fit by the lean loop.

    Args:
        place: Keeps them.
        trainer: Of the fit, with its callbacks.
        task: What is trained.
        loader: Its batches.
        tell: Called with a line where the fit cannot be resumed, when a snapshot would have been due.
    """

    def __init__(
        self, place: Place, trainer: Trainer, task: FederatedTask, loader: Loader, tell: Callable[[str], None]
    ) -> None:
        self._place, self._trainer, self._task, self._loader, self._tell = place, trainer, task, loader, tell
        self._callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._able = True

    def due(self) -> bool:
        """Whether it is time for one."""
        return self._able and self._place.due()

    def take(self, optimizer: Optimizer, done: int) -> None:
        """Keep one, at the end of a step and so many batches of its epoch."""
        reason = obstacle(self._task, self._callbacks)
        if reason is None:
            try:
                return self._place.keep(_parked(self._state(optimizer, done)))
            except TypeError as error:
                reason = str(error)
        self._able = False
        self._tell(f"trainings of {type(self._task).__name__} start over where they are killed because {reason}")

    def resume(self, optimizer: Optimizer) -> int | None:
        """Put a fit that has just started where the last snapshot was taken.

        Returns:
            Batches done of the epoch at hand; None where there is no snapshot.

        Raises:
            CheckpointError: A part does not come back as it was; the snapshot is gone, and the fit can be begun anew.
        """
        if (kept := self._place.kept()) is None or obstacle(self._task, self._callbacks) is not None:
            return None
        device, taken_on = self._trainer.strategy.root_device, kept["progress"]["device"]
        if taken_on != device.type:
            self._place.discard()
            self._tell(
                f"a training of {type(self._task).__name__} starts over: it was on {taken_on}, and is on {device.type}"
            )
            return None
        state = _placed(kept, device)
        done = int(state["loader"]["done"])
        try:
            before = {name: digest(part) for name, part in state.items()}  # some are changed in place from here on
            self._load(state, optimizer)
            now = self._state(optimizer, done)
            wrong = [name for name, part in before.items() if digest(now[name]) != part]
            error = f"its {wrong[0]} says something else after being loaded" if wrong else ""
        except Exception as failed:
            error = repr(failed)
        if error:
            self._place.discard()
            raise CheckpointError(
                f"a training of {type(self._task).__name__} cannot be resumed ({error}); it starts over if the run is "
                "resumed again"
            )
        return done

    def _state(self, optimizer: Optimizer, done: int) -> dict[str, Any]:
        epochs, steps = self._counters()
        return {
            "parameters": dict(self._task.trainable()),
            "buffers": _buffers(self._task),
            "task": self._task.fit_state(),
            "optimizer": optimizer.state_dict(),
            "callbacks": [c.fit_state() if hasattr(c, "fit_state") else {} for c in self._callbacks],
            "loader": self._loader.state(done),
            "generators": global_rng_state(),
            "progress": {
                "epochs": epochs.completed,
                "steps": steps.completed,
                "device": self._trainer.strategy.root_device.type,
            },
        }

    def _counters(self) -> tuple[Any, Any]:
        """Lightning's, of epochs and of steps."""
        fit = self._trainer.fit_loop
        steps = fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        return fit.epoch_progress.current, steps

    @torch.no_grad()
    def _load(self, state: Mapping[str, Any], optimizer: Optimizer) -> None:
        parameters, modules = self._task.trainable(), dict(self._task.named_modules())
        for name, value in state["parameters"].items():
            parameters[name].copy_(value)
        for name, value in state["buffers"].items():
            path, _, leaf = name.rpartition(".")
            own = modules[path]._buffers[leaf]
            if own is not None and own.shape == value.shape:
                own.copy_(value)
            else:  # a task's own, of a size that changes
                modules[path]._buffers[leaf] = value
        self._task.load_fit_state(state["task"])
        optimizer.load_state_dict(state["optimizer"])
        for callback, own in zip(self._callbacks, state["callbacks"], strict=True):
            if own:
                callback.load_fit_state(own)
        self._loader.load_state(state["loader"])
        load_global_rng_state(state["generators"])
        epochs, steps = self._counters()
        epochs.processed = epochs.completed = state["progress"]["epochs"]
        steps.completed = state["progress"]["steps"]


def obstacle(task: FederatedTask, callbacks: Sequence[Callback]) -> str | None:
    """Why a fit cannot be resumed in its middle, in half a sentence; None where it can."""
    parts: Sequence[Any] = (task, *callbacks)
    for part in parts:
        if not (vars(type(part)).get("resumes", False) and part.resumes):
            return f"{type(part).__name__} does not say what it carries from step to step (`resumes`)"
    for module in task.modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            return f"{type(module).__name__} has more than parameters and buffers (`get_extra_state`)"
    return None


def _buffers(task: FederatedTask) -> dict[str, Tensor]:
    """All buffers, whether they belong to the model's state or not."""
    return {
        f"{path}.{leaf}".lstrip("."): buffer
        for path, module in task.named_modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None
    }


def _parked(value: Any) -> Any:
    """A state with what a file does not keep written beside its tensors: the kind of device, and how memory is laid out."""
    if isinstance(value, Tensor):
        strides = None if value.is_contiguous() or 0 in value.stride() else list(value.stride())
        if value.device.type == "cpu" and strides is None:
            return value
        return {_PLACED: [value.device.type, strides], "value": value}
    if isinstance(value, Mapping):
        return {name: _parked(item) for name, item in value.items()}
    if isinstance(value, tuple) and type(value) is not tuple:
        raise TypeError(f"its state holds a {type(value).__name__}; tuples with names do not come back")
    return type(value)(map(_parked, value)) if isinstance(value, (list, tuple)) else value


def _placed(value: Any, device: torch.device) -> Any:
    """The inverse, for a fit on this device."""
    if isinstance(value, Mapping):
        if _PLACED in value:
            (kind, strides), tensor = value[_PLACED], value["value"]
            on = device if kind == device.type else torch.device(kind)
            if strides is None:
                return tensor.to(on)
            return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=on).copy_(tensor)
        return {name: _placed(item, device) for name, item in value.items()}
    return type(value)(_placed(item, device) for item in value) if type(value) in (list, tuple) else value
