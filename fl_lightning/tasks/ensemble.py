"""Several models of one kind that answer together. Nothing here is trained."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from fl_lightning.message import Groups
from fl_lightning.metrics.experts import mean_of_experts, product_of_experts, relative
from fl_lightning.tasks.asked import Asked
from fl_lightning.tasks.base import Batch, FederatedTask

Combine = Literal["product", "mean", "mean_logits"]
EXPERT = "expert/"


def check_combine(combine: str) -> None:
    """Raises ValueError for an unknown way to combine."""
    if combine not in get_args(Combine):
        raise ValueError(f"combine is {combine!r}; allowed: {', '.join(map(repr, get_args(Combine)))}")


def ask_members(asked: Asked, given: Groups, inputs: Tensor, output: str = "logits", **options: Tensor) -> Tensor:
    """Scores (E, N, ..., C) of the members ``expert/<name>`` among the given groups, in the order of their names."""
    groups = sorted(group for group in given if group.startswith(EXPERT))
    if not groups:
        raise ValueError(f"an ensemble was asked without members; given: {', '.join(given) or 'nothing'}")
    return torch.stack([asked(given[group], output, inputs, **options) for group in groups])


def combined(
    scores: Tensor,
    combine: Combine,
    temperature: float = 1.0,
    normalize: bool = False,
    priors: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Members' scores made one; gradients flow to scores and weights.

    Args:
        scores: (E, N, C).
        combine: See `EnsembleTask`, as for the next two.
        temperature: T.
        normalize: The geometric mean.
        priors: Shares of the classes (E, C), for a product.
        weights: Of the members, (E,) or for each example (E, N), >= 0, in any scale; not for a product.

    Returns:
        (N, C).
    """
    if combine == "mean_logits":
        return scores.mean(0) if weights is None else (relative(weights) * scores).sum(0)
    if combine == "mean":
        return temperature * mean_of_experts(scores / temperature, weights)
    if weights is not None:
        raise ValueError("combine is 'product'; members have weights in a 'mean' or 'mean_logits' only")
    return product_of_experts(scores, normalize=normalize, priors=priors)


class EnsembleTask(FederatedTask):
    """Class scores of an ensemble whose members come as given groups ``expert/<name>``, in the order of their names.

    A given group ``weights`` with a tensor ``weights`` (E,), or a column ``weights`` (N, E) of the examples, weighs
    members in a mean. A group ``priors`` with a tensor ``shares`` (E, C) corrects a product for what each expert
    trained on; a group ``mask`` with a tensor ``logits`` (C,) is added to the result (minus infinity for a class that
    must not be named).

    Args:
        member: A model of the members' kind; its own weights are not used.
        combine: "product": of the members' probabilities; "mean": of their probabilities; "mean_logits": of their
            scores.
        normalize: The geometric mean instead of the product.
        temperature: T, above 0. Scores are such that their softmax at T is the mean of the members' softmax at T;
            matters for "mean" alone.
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
        return ask_members(self.asked, self.given, inputs, output, **options)

    def logits(self, inputs: Tensor, weights: Tensor | None = None, **options: Tensor) -> Tensor:
        """Class scores (N, C) of images (N, channels, H, W) in [0, 1]."""
        return self._combined(self.members(inputs, "logits", **options), weights)

    def tokens(self, inputs: Tensor, **options: Tensor) -> Tensor:
        """Class scores (N, P, C) of the images' patch tokens, where members have such."""
        scores = self.members(inputs, "tokens", **options)
        return self._combined(scores.flatten(1, 2)).view(scores.shape[1:])

    def _combined(self, scores: Tensor, weights: Tensor | None = None) -> Tensor:
        """(E, N, C) -> (N, C)."""
        shared = self.given["weights"]["weights"] if "weights" in self.given else None
        priors = self.given["priors"]["shares"] if "priors" in self.given else None
        weights = shared if weights is None else weights.T
        total = combined(scores, self.combine, self.temperature, self.normalize, priors, weights)
        return total + self.given["mask"]["logits"] if "mask" in self.given else total
