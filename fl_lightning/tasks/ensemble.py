"""Several models of one kind that answer together. Nothing here is trained."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from fl_lightning.metrics.experts import mean_of_experts, product_of_experts
from fl_lightning.tasks.asked import Asked
from fl_lightning.tasks.base import Batch, FederatedTask

Combine = Literal["product", "mean", "mean_logits"]
EXPERT = "expert/"


def check_combine(combine: str) -> None:
    """Raises ValueError for an unknown way to combine."""
    if combine not in get_args(Combine):
        raise ValueError(f"combine is {combine!r}; allowed: {', '.join(map(repr, get_args(Combine)))}")


class EnsembleTask(FederatedTask):
    """Class scores of an ensemble whose members come as given groups ``expert/<name>``, in the order of their names.

    A given group ``priors`` with a tensor ``shares`` (E, C) corrects a product for what each expert trained on; a group
    ``mask`` with a tensor ``logits`` (C,) is added to the result (minus infinity for a class that must not be named).

    Args:
        member: A model of the members' kind; its own weights are not used.
        combine: "product": of the members' probabilities; "mean": of their probabilities; "mean_logits": of their scores.
        normalize: The geometric mean instead of the product.
        temperature: T, above 0. Scores are such that their softmax at T is the mean of the members' softmax at T; matters
            for "mean" alone.
    """

    def __init__(
        self,
        member: FederatedTask,
        combine: Combine = "product",
        normalize: bool = False,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        check_combine(combine)
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it must be above 0")
        self.asked = Asked(member)
        self.combine, self.normalize, self.temperature = combine, normalize, temperature

    def loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError("an ensemble is not trained")

    def members(self, inputs: Tensor, output: str = "logits", **options: Tensor) -> Tensor:
        """Scores (E, N, ..., C) of the members, each in evaluation mode.

        Args:
            inputs: Images (N, channels, H, W) in [0, 1].
            output: The members' method to call.
            **options: Its further arguments, such as the patches to keep.
        """
        groups = sorted(group for group in self.given if group.startswith(EXPERT))
        if not groups:
            raise ValueError(f"an ensemble was asked without members; given: {', '.join(self.given) or 'nothing'}")
        return torch.stack([self.asked(self.given[group], output, inputs, **options) for group in groups])

    def logits(self, inputs: Tensor, **options: Tensor) -> Tensor:
        """Class scores (N, C) of images (N, channels, H, W) in [0, 1]."""
        return self._combined(self.members(inputs, "logits", **options))

    def tokens(self, inputs: Tensor, **options: Tensor) -> Tensor:
        """Class scores (N, P, C) of the images' patch tokens, where members have such."""
        scores = self.members(inputs, "tokens", **options)
        return self._combined(scores.flatten(1, 2)).view(scores.shape[1:])

    def _combined(self, scores: Tensor) -> Tensor:
        """(E, N, C) -> (N, C)."""
        if self.combine == "mean_logits":
            total = scores.mean(0)
        elif self.combine == "mean":
            total = self.temperature * mean_of_experts(scores / self.temperature)
        else:
            priors = self.given["priors"]["shares"] if "priors" in self.given else None
            total = product_of_experts(scores, normalize=self.normalize, priors=priors)
        return total + self.given["mask"]["logits"] if "mask" in self.given else total
