"""A generator of images: a denoiser trained by EDM's loss, and samples drawn from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from fl_lightning.data.examples import DataInfo
from fl_lightning.losses.edm import EDMLoss
from fl_lightning.models.edm2 import EDM2UNet, Precond
from fl_lightning.rng import owned_global_rng
from fl_lightning.synthesis.samplers import SAMPLERS, Sampler, sample
from fl_lightning.tasks.base import Batch
from fl_lightning.tasks.generator import GeneratorTask


def _adam(parameters: Any) -> torch.optim.Optimizer:
    # A tuple in a lambda cannot be written into a configuration: its address would stand there, new in every process.
    return torch.optim.Adam(parameters, lr=0.01, betas=(0.9, 0.99))


class DiffusionTask(GeneratorTask):
    """A diffusion model of images (FederatedFactory's generator).

    Pixels in [0, 1] outside become 2 p - 1 in [-1, 1] for the network; samples come back by (x + 1) / 2, clipped to
    [0, 1]. What is no part of the loss (average of weights, forced weight normalisation, schedule, early stop) is the
    callback's, `GeneratorPretraining`.

    `Predict` with ``output="sample"`` takes seeds as examples: inputs (N, 1) int64, labels the classes; `sample_seeds`
    makes them.

    Parameters are named ``denoiser.…`` and ``edm.…``; the latter (u(sigma), 128 numbers) serves training only.

    Args:
        network: Builds F from ``(input_shape, label_dim)``: `EDM2UNet`, `DiffusersUNet` or your own.
        optimizer: Builds the local optimizer; null is FederatedFactory's: Adam, learning rate 0.01, betas (0.9, 0.99).
        conditional: Whether one network serves all classes, told which; otherwise labels are ignored.
        p_mean: Mean of ln sigma in training.
        p_std: Standard deviation of ln sigma in training, above 0.
        sigma_data: Standard deviation of the data in [-1, 1], above 0.
        uncertainty: Whether the loss is weighted by its learned uncertainty.
        uncertainty_features: Fourier features of that, at least 1.
        sampler: "heun", "dpm++" or "euler". FederatedFactory: "heun", 50 steps.
        steps: Steps of the sampler, at least 2.
        sample_batch_size: Samples drawn at a time, at least 1.
    """

    resumes = True

    def __init__(
        self,
        network: Callable[[tuple[int, int, int], int], nn.Module] = EDM2UNet,
        optimizer: OptimizerCallable | None = None,
        conditional: bool = False,
        p_mean: float = -0.8,
        p_std: float = 1.6,
        sigma_data: float = 0.5,
        uncertainty: bool = True,
        uncertainty_features: int = 128,
        sampler: Sampler = "heun",
        steps: int = 50,
        sample_batch_size: int = 64,
    ) -> None:
        super().__init__(optimizer or _adam)
        if sampler not in SAMPLERS:
            raise ValueError(f"sampler is {sampler!r}; allowed: {', '.join(map(repr, SAMPLERS))}")
        for name, value, least in (("steps", steps, 2), ("sample_batch_size", sample_batch_size, 1)):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        self.make_network, self.conditional = network, conditional
        self.make_loss = lambda: EDMLoss(p_mean, p_std, sigma_data, uncertainty, uncertainty_features)
        self.sigma_data = sigma_data
        self.sampler, self.steps, self.sample_batch_size = sampler, steps, sample_batch_size
        self.input_shape: tuple[int, int, int] = (0, 0, 0)

    def build(self, info: DataInfo, seed: int) -> None:
        self.input_shape, self.label_dim = info.input_shape, info.num_classes if self.conditional else 0
        with owned_global_rng(seed, "model", "init"):
            made = self.make()
        self.denoiser, self.edm = made["denoiser"], made["edm"]

    def make(self) -> nn.ModuleDict:
        network = self.make_network(self.input_shape, self.label_dim)
        return nn.ModuleDict({"denoiser": Precond(network, self.sigma_data), "edm": self.make_loss()})

    def shipped(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All but u(sigma)."""
        return {name: value for name, value in state.items() if not name.startswith("edm.")}

    def loss(self, batch: Batch) -> Tensor:
        return self.edm(self.denoiser, batch.inputs * 2 - 1, batch.labels if self.conditional else None)

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor | None = None) -> Tensor:
        """The denoiser, in [-1, 1]; see `Precond.forward`."""
        return self.denoiser(x, sigma, class_labels)

    def sample(self, seeds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images (N, C, H, W) float32 in [0, 1], one for each seed.

        Args:
            seeds: (N, 1) int64 in [0, 2^63).
            labels: (N,) int64 classes; used where the network is conditional.
        """
        was_training = self.training
        self.eval()  # no dropout
        try:
            x = sample(
                self.denoiser,
                seeds,
                self.input_shape,
                labels if self.conditional else None,
                self.sampler,
                self.steps,
                self.sample_batch_size,
                self.device,
            )
        finally:
            self.train(was_training)
        return ((x + 1) / 2).clamp_(0, 1)
