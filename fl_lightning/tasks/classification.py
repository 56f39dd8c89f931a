"""Image classification by cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from fl_lightning.data.examples import DataInfo
from fl_lightning.models.mlp import MLP
from fl_lightning.rng import owned_global_rng
from fl_lightning.tasks.base import Batch, FederatedTask


class ClassificationTask(FederatedTask):
    """Cross-entropy classification with any network.

    Args:
        network: Builds the network from ``(input_shape, num_classes)``; a class from `fl_lightning.models` or your own
            whose first two arguments are these.
        optimizer: Builds the local optimizer.
        mean: Subtracted from pixels in [0, 1], one value for all channels or one each.
        std: Divides after, likewise; above 0.
    """

    resumes = True

    def __init__(
        self,
        network: Callable[[tuple[int, int, int], int], nn.Module] = MLP,
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.1),
        mean: list[float] = [0.5],  # noqa: B006  (read only)
        std: list[float] = [0.5],  # noqa: B006
    ) -> None:
        super().__init__(optimizer)
        self.mean: Tensor
        self.std: Tensor
        if min(std) <= 0:
            raise ValueError(f"std is {std}; every value must be above 0")
        self.make_network = network
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def build(self, info: DataInfo, seed: int) -> None:
        with owned_global_rng(seed, "model", "init"):
            self.network = self.make_network(info.input_shape, info.num_classes)

    def logits(self, inputs: Tensor, **options: Any) -> Tensor:
        """Class scores (B, C) of images (B, channels, H, W) in [0, 1]; options go to the network (``keep``)."""
        return self.network((inputs - self.mean) / self.std, **options)

    def tokens(self, inputs: Tensor, **options: Any) -> Tensor:
        """Class scores (B, P, C) of the images' patch tokens, where the network has such; options are the network's."""
        network: Any = self.network
        return network.tokens((inputs - self.mean) / self.std, **options)

    def forward(self, inputs: Tensor, **options: Any) -> Tensor:
        return self.logits(inputs, **options)

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(batch.inputs), batch.labels)

    def example_losses(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(batch.inputs), batch.labels, reduction="none")
