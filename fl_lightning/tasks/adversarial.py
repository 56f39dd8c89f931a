"""A generator of images that is trained against models that are only asked: teachers, and the student so far."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from fl_lightning.losses.batch_statistics import watched_statistics
from fl_lightning.models.image_generator import ImageGenerator
from fl_lightning.tasks.asked import Asked
from fl_lightning.tasks.base import Batch, FederatedTask
from fl_lightning.tasks.ensemble import Combine, ask_members, combined


class AdversarialGenerator(FederatedTask):
    """Trains ``generator`` on one batch of noise z, all of it in every step.

    Examples of a fit: inputs are the rows of z that they stand for, (B,) int64, labels the classes that the images
    shall show; the batch must hold them all, so that an epoch is a step. Given groups: ``expert/<client>``, the
    teachers; ``student``; ``weights`` of the teachers as in `EnsembleTask`. Those who are asked are never trained, and
    in evaluation mode.

    Args:
        model: A task of the teachers' and the student's kind; its own weights are not used.
        network: The generator.
        shape: (B, D) of z.
        combine: How the teachers answer together.
        temperature: T of a "mean" of the teachers' probabilities.
        optimizer: Builds the generator's optimizer.
        learn_latents: Train z too.
    """

    def __init__(
        self,
        model: FederatedTask,
        network: ImageGenerator,
        shape: tuple[int, int],
        combine: Combine,
        temperature: float,
        optimizer: OptimizerCallable,
        learn_latents: bool,
    ) -> None:
        super().__init__(optimizer)
        self.asked = Asked(model)
        self.combine: Combine = combine
        self.temperature = temperature
        self.generator = copy.deepcopy(network)
        self.latents = nn.Parameter(torch.zeros(shape), requires_grad=learn_latents)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.trainer.world_size > 1:
            raise ValueError(
                f"trainer.devices makes {self.trainer.world_size} processes; it must be 1, since BatchNorm makes a "
                "generator's batch one thing"
            )

    def images(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Images (B, C, H, W) in [0, 1] of rows of z (B,) and classes (B,)."""
        return self.generator(self.latents[rows], labels)

    def student(self, images: Tensor) -> Tensor:
        """The student's scores (B, C)."""
        return self.asked(self.given["student"], "logits", images)

    def ensemble(self, images: Tensor) -> Tensor:
        """The teachers' scores (B, C)."""
        weights = self.given["weights"]["weights"] if "weights" in self.given else None
        scores = ask_members(self.asked, self.given, images)
        return combined(scores, self.combine, self.temperature, weights=weights).to(images)

    def loss(self, batch: Batch) -> Tensor:
        return self.objective(self.images(batch.inputs, batch.labels), batch.inputs, batch.labels)

    @abstractmethod
    def objective(self, images: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        """The generator's loss, a scalar, of images (B, C, H, W), their rows of z (B,) and classes (B,)."""


class BatchSearch(AdversarialGenerator):
    """Searches for one batch of images: generator and z are trained together, and a fit hands back, as buffers,
    ``best`` (B, C, H, W), the images of the step with the lowest loss, and ``lowest``, that loss.

    Args:
        batch_statistics: Weight of the teachers' BatchNorm statistics in the loss, at least 0.
        *args: Those of `AdversarialGenerator`, but ``learn_latents``.
    """

    def __init__(
        self,
        batch_statistics: float,
        model: FederatedTask,
        network: ImageGenerator,
        shape: tuple[int, int],
        combine: Combine,
        temperature: float,
        optimizer: OptimizerCallable,
    ) -> None:
        super().__init__(model, network, shape, combine, temperature, optimizer, learn_latents=True)
        self.batch_statistics = batch_statistics
        self.best: Tensor
        self.lowest: Tensor
        self.register_buffer("best", torch.zeros(0))
        self.register_buffer("lowest", torch.zeros(()))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """As ever, and for a batch of whatever size ``best`` is."""
        if "best" in tensors:
            self.best = torch.empty_like(tensors["best"], device=self.device)
        super().load(tensors)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.best, self.lowest = torch.zeros(0, device=self.device), torch.full((), float("inf"), device=self.device)

    def watched_ensemble(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The teachers' scores (B, C), and the weighted sum over teachers and layers of `batch_statistics_loss`."""
        if not self.batch_statistics:
            return self.ensemble(images), images.new_zeros(())
        with watched_statistics(self.asked.network) as losses:
            scores = self.ensemble(images)
        return scores, self.batch_statistics * torch.stack(losses).sum()

    def loss(self, batch: Batch) -> Tensor:
        images = self.images(batch.inputs, batch.labels)
        loss = self.objective(images, batch.inputs, batch.labels)
        if loss < self.lowest or not len(self.best):
            self.lowest = loss.detach().clone()
            self.best = torch.empty_like(images).index_copy_(0, batch.inputs, images.detach())
        return loss
