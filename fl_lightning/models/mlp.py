"""A multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn


class MLP(nn.Sequential):
    """Fully connected layers with ReLU between them.

    Args:
        input_shape: (C, H, W) of an image; flattened.
        num_classes: Width of the output.
        hidden: Widths of the hidden layers.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int, hidden: Sequence[int] = (64,)) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        super().__init__(*layers, nn.Linear(width, num_classes))

    def forward(self, input: Tensor) -> Tensor:
        """Class scores (B, num_classes) of images (B, C, H, W)."""
        return super().forward(input)
