"""What a generator of images must be able to do to be a factory, and two that need no diffusion."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from fl_lightning.data.examples import DataInfo
from fl_lightning.rng import owned_global_rng
from fl_lightning.synthesis.samplers import latents
from fl_lightning.tasks.base import Batch, FederatedTask


class GeneratorTask(FederatedTask):
    """A task that learns to draw images.

    `Predict` with ``output="sample"`` takes seeds as examples: inputs (N, 1) int64, labels the classes.

    Attributes:
        conditional: Whether one generator serves all classes, told which; otherwise labels are ignored.
    """

    conditional = False

    def fresh(self, seed: int, *owner: object) -> dict[str, Tensor]:
        """Parameters and persistent buffers as first drawn, of this owner's own: the start of a factory, which so depends on
        no factory that was trained before."""
        with owned_global_rng(seed, *owner, "init"):
            drawn = self.make()
        return {name: value.detach() for name, value in drawn.state_dict().items()}

    @abstractmethod
    def make(self) -> nn.ModuleDict:
        """The networks, by the names of the attributes that hold them; initialised from the global generator."""

    def shipped(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of a trained state (parameters and buffers) that sampling needs."""
        return dict(state)

    @abstractmethod
    def sample(self, seeds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images (N, C, H, W) float32 in [0, 1], one for each seed, whichever others are drawn beside it.

        Args:
            seeds: (N, 1) int64 in [0, 2^63).
            labels: (N,) int64 classes.
        """

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.output == "sample":
            return self.sample(batch.inputs, batch.labels)
        return super().predict_step(batch, batch_idx)


class GaussianTask(GeneratorTask):
    """A Gaussian of the pixels: mean and covariance, summed up over the first epoch, as far as the budget of steps goes. The
    factory that costs nothing.

    Args:
        ridge: Added to the variances before they are factorised, above 0; an eighth of a grey level by default.
        optimizer: Has nothing to do.
    """

    resumes = True

    def __init__(
        self,
        ridge: float = (0.5 / 255) ** 2,
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.0),
    ) -> None:
        super().__init__(optimizer)
        if not ridge > 0:
            raise ValueError(f"ridge is {ridge}; it must be above 0")
        self.ridge = ridge

    def build(self, info: DataInfo, seed: int) -> None:
        self.input_shape = info.input_shape
        pixels = math.prod(info.input_shape)
        self.idle: nn.Linear = self.make()["idle"]  # type: ignore[assignment]  # a fit needs something to train
        self.count: Tensor
        self.total: Tensor
        self.outer: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("total", torch.zeros(pixels, dtype=torch.float64))
        self.register_buffer("outer", torch.zeros(pixels, pixels, dtype=torch.float64))

    def make(self) -> nn.ModuleDict:
        return nn.ModuleDict({"idle": nn.Linear(1, 1, bias=False)})

    def on_fit_start(self) -> None:
        super().on_fit_start()
        for buffer in (self.count, self.total, self.outer):
            buffer.zero_()
        self._epoch_of_moments = self.current_epoch

    def loss(self, batch: Batch) -> Tensor:
        if self.current_epoch == self._epoch_of_moments:  # a second look at the same images adds nothing
            pixels = batch.inputs.flatten(1).double()
            self.count += len(pixels)
            self.total += pixels.sum(0)
            self.outer += pixels.T @ pixels
        return self.idle.weight.sum() * 0

    def shipped(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in state.items() if not name.startswith("idle")}

    @torch.no_grad()
    def sample(self, seeds: Tensor, labels: Tensor | None = None) -> Tensor:
        mean = self.total / self.count
        covariance = self.outer / self.count - torch.outer(mean, mean)
        # An eigen-decomposition takes a covariance of fewer images than pixels, which rounding makes slightly indefinite.
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * (values.clamp_min(0) + self.ridge).sqrt()
        noise = latents(seeds, (len(mean),)).to(root)
        images = torch.stack([mean + root @ row for row in noise])  # row by row: the same bits in every batch
        return images.float().clamp_(0, 1).view(-1, *self.input_shape)


class CVAETask(GeneratorTask):
    """A conditional variational autoencoder of two-layer perceptrons, of which the decoder is shipped (FedCVAE:
    Heinbaugh et al., 2023).

    Args:
        latent: Dimensions of z, at least 1.
        hidden: Width of the hidden layers, at least 1.
        beta: Weight of the KL term, above 0.
        optimizer: Builds the local optimizer.
    """

    conditional = True
    resumes = True

    def __init__(
        self,
        latent: int = 10,
        hidden: Sequence[int] = (256,),
        beta: float = 1.0,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=1e-3),
    ) -> None:
        super().__init__(optimizer)
        if latent < 1 or not hidden or min(hidden) < 1:
            raise ValueError(f"latent is {latent} and hidden {list(hidden)}; widths must be at least 1")
        if not beta > 0:
            raise ValueError(f"beta is {beta}; it must be above 0")
        self.latent, self.hidden, self.beta = latent, tuple(hidden), beta

    def build(self, info: DataInfo, seed: int) -> None:
        self.input_shape, self.num_classes = info.input_shape, info.num_classes
        with owned_global_rng(seed, "model", "init"):
            made = self.make()
        self.encoder, self.decoder = made["encoder"], made["decoder"]

    def make(self) -> nn.ModuleDict:
        pixels = math.prod(self.input_shape)
        return nn.ModuleDict(
            {
                "encoder": _perceptron(pixels + self.num_classes, self.hidden, 2 * self.latent),
                "decoder": _perceptron(self.latent + self.num_classes, self.hidden[::-1], pixels),
            }
        )

    def loss(self, batch: Batch) -> Tensor:
        """Negative evidence lower bound: Bernoulli pixels, unit Gaussian prior; sum over pixels, mean over the batch."""
        pixels = batch.inputs.flatten(1).clamp(0, 1)
        told = F.one_hot(batch.labels, self.num_classes).to(pixels)
        mean, log_variance = self.encoder(torch.cat([pixels, told], 1)).chunk(2, 1)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        logits = self.decoder(torch.cat([z, told], 1))
        reconstruction = F.binary_cross_entropy_with_logits(logits, pixels, reduction="sum")
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
        return (reconstruction + self.beta * kl) / len(pixels)

    def shipped(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in state.items() if name.startswith("decoder.")}

    @torch.no_grad()
    def sample(self, seeds: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        told = F.one_hot(labels, self.num_classes).float()
        rows = torch.cat([latents(seeds, (self.latent,)).to(told), told], 1)
        images = torch.cat([self.decoder(row[None]) for row in rows])  # one by one: the same bits in every batch
        return images.sigmoid().view(-1, *self.input_shape)


def _perceptron(width: int, hidden: Sequence[int], out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, out))
