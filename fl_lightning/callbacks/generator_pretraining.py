"""What training a generator needs beside its loss: averaged weights, normalised weights, a schedule, and an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.models.edm2 import normalise_weights
from fl_lightning.optim.ema import PowerEMA, lr_factor
from fl_lightning.tasks.diffusion import DiffusionTask

# Takes the task, holding its averaged weights, and the number of steps taken.
Criterion = Callable[[DiffusionTask, int], bool]
Sink = Callable[[int, Tensor], None]


class GeneratorPretraining(Callback):
    """Trains a `DiffusionTask` as EDM2 does (Karras et al. 2024). New for every fit.

    At the end of the fit **the averaged weights replace the trained ones**, so that `Result.params` holds the average:
    that is what a factory ships. Forced weight normalisation runs once at the start and after every step, before the
    weights enter the average. The learning rate that the optimizer was built with (or that the fit overrides) is the base
    that the schedule multiplies. The budget of steps is the fit's: overrides ``max_steps``, with ``max_epochs`` large.

    Args:
        ema_std: Relative width of the average, in (0, 12^-1/2]; None ships the weights of the last step.
            FederatedFactory: 0.05.
        ramp_images: Images until the learning rate is full, at least 0. FederatedFactory: 10^7.
        ramp_steps: The same in steps, in place of ``ramp_images``.
        reference_batches: Batches until the rate decays as 1 / sqrt(n), above 0; None for never. FederatedFactory: 35,000.
        normalise: Whether weights are normalised; where no layer is magnitude-preserving it does nothing.
        stop: Asked every ``every`` steps whether to end the fit early (a memorisation criterion), with the averaged weights
            in place. It must not draw from the global generators.
        sink: Handed (steps, (N, C, H, W) images in [0, 1]) every ``every`` steps.
        seeds: (N, 1) int64 seeds of the images for ``sink``.
        labels: (N,) int64 classes of these, where the network is conditional.
        every: Steps between, at least 1.
    """

    def __init__(
        self,
        ema_std: float | None = 0.05,
        ramp_images: float = 1e7,
        ramp_steps: float | None = None,
        reference_batches: float | None = 35_000,
        normalise: bool = True,
        stop: Criterion | None = None,
        sink: Sink | None = None,
        seeds: Tensor | None = None,
        labels: Tensor | None = None,
        every: int = 100,
    ) -> None:
        for name, value in (("ramp_images", ramp_images), ("ramp_steps", ramp_steps or 0)):
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        if reference_batches is not None and not reference_batches > 0:
            raise ValueError(f"reference_batches is {reference_batches}; it must be above 0")
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1")
        if (sink is None) != (seeds is None):
            raise ValueError(f"seeds is {seeds} and sink is {sink}; both or neither must be given")
        self.ema_std, self.normalise = ema_std, normalise
        self.ramp_images, self.ramp_steps, self.reference_batches = ramp_images, ramp_steps, reference_batches
        self.stop, self.sink, self.seeds, self.labels, self.every = stop, sink, seeds, labels, every
        self.ema: PowerEMA | None = None
        self.seen = 0  # images
        self.stopped_at: int | None = None  # the step at which ``stop`` ended the fit
        self._started = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        task = _diffusion(pl_module)
        if self._started:
            raise ValueError("a GeneratorPretraining was given to a second fit; it holds state, so make one for each")
        self._started = True
        self._step, self._full, self._since = 0, 0, 0
        self._weights = task.trainable()
        self._base = [group["lr"] for group in trainer.optimizers[0].param_groups]
        if self.normalise:
            normalise_weights(task)
        if self.ema_std is not None:
            self.ema = PowerEMA(self._weights, self.ema_std)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        count = len(batch.inputs) * trainer.world_size
        self._full = self._full or count * trainer.accumulate_grad_batches  # the first batch is a full one
        self._since += count
        ramp = self.ramp_images if self.ramp_steps is None else self.ramp_steps * self._full
        factor = lr_factor(self.seen, self._full, ramp, self.reference_batches)
        for group, base in zip(trainer.optimizers[0].param_groups, self._base, strict=True):
            group["lr"] = base * factor

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        for parameter in self._weights.values():
            if parameter.grad is not None:
                torch.nan_to_num_(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are being accumulated
        task, self._step = _diffusion(pl_module), trainer.global_step
        self.seen, step, self._since = self.seen + self._since, self._since, 0
        if self.normalise:
            normalise_weights(task)
        if self.ema is not None:
            self.ema.update(self._weights, self.seen, step)
        if self._step % self.every == 0 and (self.sink or self.stop):
            with torch.no_grad(), self._averaged(task):
                if self.sink is not None and self.seeds is not None:
                    self.sink(self._step, task.sample(self.seeds, self.labels).cpu())
                if self.stop is not None and self.stop(task, self._step):
                    self.stopped_at, trainer.should_stop = self._step, True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.ema is not None and self.seen:
            _diffusion(pl_module).load(self.ema.values)

    @contextmanager
    def _averaged(self, task: DiffusionTask) -> Iterator[None]:
        """The task with its averaged weights, in evaluation mode."""
        own: Mapping[str, Tensor] = {name: value.detach().clone() for name, value in self._weights.items()}
        if self.ema is not None:
            task.load(self.ema.values)
        task.eval()
        try:
            yield
        finally:
            task.load(own)
            task.train()


def _diffusion(module: LightningModule) -> DiffusionTask:
    if not isinstance(module, DiffusionTask):
        raise ValueError(f"GeneratorPretraining was given a {type(module).__name__}; it must be a DiffusionTask")
    return module
