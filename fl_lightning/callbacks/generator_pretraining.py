"""What training a generator needs beside its loss: averaged weights, normalised weights, a schedule, an end, pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.data.examples import Examples
from fl_lightning.models.edm2 import normalise_weights
from fl_lightning.optim.ema import PowerEMA, lr_factor
from fl_lightning.synthesis.samplers import latents, sample_seeds
from fl_lightning.tasks.base import Picture
from fl_lightning.tasks.diffusion import DiffusionTask

# Takes the task, holding its averaged weights, and the number of steps taken.
Criterion = Callable[[DiffusionTask, int], bool]
# Noise levels at which denoised images are shown, from a breath to more than the data.
LEVELS = (0.05, 0.2, 0.8, 3.2, 12.8)
_COUNTED = ("seen", "_step", "_full", "_since")


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
            in place. It must not draw from the global generators. A killed fit that has one starts over: what it remembers
            is not known.
        every: Steps between, at least 1.
        grid: Samples (of each class, where the network is conditional) to draw every ``every`` steps and at the end, from
            the same latents each time, and training images to show at the end, as they are and denoised from five levels
            of noise; 0 draws nothing. They go into ``task.pictures``. The weights do not notice.
    """

    runs_lean = resumes = True

    def __init__(
        self,
        ema_std: float | None = 0.05,
        ramp_images: float = 1e7,
        ramp_steps: float | None = None,
        reference_batches: float | None = 35_000,
        normalise: bool = True,
        stop: Criterion | None = None,
        every: int = 100,
        grid: int = 0,
    ) -> None:
        for name, value in (("ramp_images", ramp_images), ("ramp_steps", ramp_steps or 0)):
            if not value >= 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        if reference_batches is not None and not reference_batches > 0:
            raise ValueError(f"reference_batches is {reference_batches}; it must be above 0")
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1")
        if grid < 0:
            raise ValueError(f"grid is {grid}; it must be at least 0")
        self.ema_std, self.normalise = ema_std, normalise
        self.ramp_images, self.ramp_steps, self.reference_batches = ramp_images, ramp_steps, reference_batches
        self.stop, self.every, self.grid = stop, every, grid
        self.resumes = stop is None
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

    def fit_state(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in _COUNTED}
        return {**counts, "average": {} if self.ema is None else self.ema.values}

    def load_fit_state(self, state: dict[str, Any]) -> None:
        for name in _COUNTED:
            setattr(self, name, state[name])
        if self.ema is not None:
            self.ema.values = state["average"]

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
        if self._step % self.every == 0 and (self.grid or self.stop):
            with torch.no_grad(), self._averaged(task):
                if self.grid:
                    self._draw_samples(task)
                if self.stop is not None and self.stop(task, self._step):
                    self.stopped_at, trainer.should_stop = self._step, True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        task = _diffusion(pl_module)
        if self.ema is not None and self.seen:
            task.load(self.ema.values)
        if self.grid and self.seen:
            with torch.no_grad(), self._averaged(task):
                if self._step % self.every:
                    self._draw_samples(task)
                self._draw_denoised(task)

    def _draw_samples(self, task: DiffusionTask) -> None:
        """A row of samples; of every class that there is, where the network is conditional."""
        examples = _examples(task)
        classes = examples.labels.unique().tolist() if task.conditional else [0]
        seeds = [sample_seeds(task.request_seed, "grid", label, range(self.grid)) for label in classes]
        rows = torch.arange(len(classes)).repeat_interleave(self.grid)
        images = task.sample(torch.cat(seeds), torch.tensor(classes)[rows])
        names = tuple(f"class {label}" for label in classes) if task.conditional else ("samples",)
        task.pictures.append(Picture("samples", self._step, _grey_levels(images), rows, names))

    def _draw_denoised(self, task: DiffusionTask) -> None:
        """Training images x, and D(x + sigma n; sigma) below them, a row for each noise level."""
        examples = _examples(task)
        chosen = torch.linspace(0, len(examples) - 1, min(self.grid, len(examples))).long()
        x = (examples.fetch(chosen) * 2 - 1).to(task.device)
        noise = latents(sample_seeds(task.request_seed, "denoised", 0, range(len(x))), x.shape[1:]).to(x)
        labels = examples.labels[chosen].to(task.device) if task.conditional else None
        shown = [x, *(task(x + sigma * noise, torch.tensor(sigma), labels) for sigma in LEVELS)]
        names = ("image", *(f"sigma {sigma}" for sigma in LEVELS))
        rows = torch.arange(len(shown)).repeat_interleave(len(x))
        images = _grey_levels((torch.cat(shown) + 1) / 2)
        task.pictures.append(Picture("denoised", self._step, images, rows, names))

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


def _examples(task: DiffusionTask) -> Examples:
    assert task.examples is not None  # the participant's
    return task.examples


def _grey_levels(images: Tensor) -> Tensor:
    return (images.nan_to_num() * 255).round().clamp(0, 255).to("cpu", torch.uint8)


def _diffusion(module: LightningModule) -> DiffusionTask:
    if not isinstance(module, DiffusionTask):
        raise ValueError(f"GeneratorPretraining was given a {type(module).__name__}; it must be a DiffusionTask")
    return module
