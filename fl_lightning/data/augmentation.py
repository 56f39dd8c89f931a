"""Random changes of training images, as functions of a batch and of numbers drawn elsewhere.

A change draws nothing itself: it is given a row of uniform numbers for every image. So the owner of the draws, the
participant, can draw for a whole batch and hand each device the rows of its share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


class Augmentation(ABC):
    """A random change of images.

    Attributes:
        num_draws: Uniform numbers that an image takes.
    """

    num_draws: int

    @abstractmethod
    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Change images.

        Args:
            images: (B, C, H, W), in [0, 1].
            draws: (B, num_draws), uniform in [0, 1).

        Returns:
            (B, C, H, W).
        """


@dataclass(frozen=True)
class RandomCrop(Augmentation):
    """Pad with zeros (black), then cut out the image's own size at a random place.

    Args:
        padding: Pixels on every side, at least 1. CIFAR's usual value is 4.
    """

    padding: int = 4
    num_draws = 2

    def __post_init__(self) -> None:
        if self.padding < 1:
            raise ValueError(f"padding is {self.padding}; it must be at least 1")

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        # A number just below 1 may round up to the number of places when multiplied.
        rows, columns = (draws * (2 * self.padding + 1)).long().clamp_(max=2 * self.padding).T
        padded = F.pad(images, 4 * [self.padding])
        places = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view, (B, C, y, x, H, W)
        return places[torch.arange(len(images)), :, rows, columns]


@dataclass(frozen=True)
class HorizontalFlip(Augmentation):
    """Swap left and right.

    Args:
        probability: Of an image being flipped, in [0, 1].
    """

    probability: float = 0.5
    num_draws = 1

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability is {self.probability}; it must be in [0, 1]")

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        return torch.where((draws < self.probability)[:, :, None, None], images.flip(-1), images)


def draw(augmentations: Sequence[Augmentation], count: int, generator: torch.Generator) -> Tensor:
    """The numbers that all augmentations together take for ``count`` images, (count, D), uniform in [0, 1)."""
    return torch.rand(count, sum(one.num_draws for one in augmentations), generator=generator)


def augment(augmentations: Sequence[Augmentation], images: Tensor, draws: Tensor) -> Tensor:
    """Images (B, C, H, W) after all changes, one after the other; ``draws`` (B, D) as `draw` gave them."""
    for one, own in zip(augmentations, draws.split([one.num_draws for one in augmentations], dim=1), strict=True):
        images = one(images, own)
    return images
