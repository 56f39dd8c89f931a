"""Several models of one kind that answer together. Nothing here is trained."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call

from fl_lightning.metrics.experts import mean_of_experts, product_of_experts
from fl_lightning.tasks.base import Batch, FederatedTask

Combine = Literal["product", "mean", "mean_logits"]
EXPERT = "expert/"


class EnsembleTask(FederatedTask):
    """Class scores of an ensemble whose members come as given groups ``expert/<name>``, in the order of their names.

    A given group ``priors`` with a tensor ``shares`` (E, C) corrects a product for what each expert trained on; a group
    ``mask`` with a tensor ``logits`` (C,) is added to the result (minus infinity for a class that must not be named).

    Args:
        member: A model of the members' kind; its own weights are not used.
        combine: "product": of the members' probabilities; "mean": of their probabilities; "mean_logits": of their scores.
        normalize: The geometric mean instead of the product.
    """

    def __init__(self, member: FederatedTask, combine: Combine = "product", normalize: bool = False) -> None:
        super().__init__()
        if combine not in ("product", "mean", "mean_logits"):
            raise ValueError(f"combine is {combine!r}; allowed: 'product', 'mean', 'mean_logits'")
        self.member, self.combine, self.normalize = member, combine, normalize

    def loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError("an ensemble is not trained")

    def members(self, inputs: Tensor) -> Tensor:
        """Scores (E, N, C) of the members."""
        self.member.eval()
        groups = sorted(group for group in self.given if group.startswith(EXPERT))
        if not groups:
            raise ValueError(f"an ensemble was asked without members; given: {', '.join(self.given) or 'nothing'}")
        return torch.stack([functional_call(self.member, dict(self.given[g]), (inputs,)) for g in groups])

    def logits(self, inputs: Tensor) -> Tensor:
        """Class scores (N, C) of images (N, channels, H, W) in [0, 1]."""
        scores = self.members(inputs)
        if self.combine == "mean_logits":
            total = scores.mean(0)
        elif self.combine == "mean":
            total = mean_of_experts(scores)
        else:
            priors = self.given["priors"]["shares"] if "priors" in self.given else None
            total = product_of_experts(scores, normalize=self.normalize, priors=priors)
        return total + self.given["mask"]["logits"] if "mask" in self.given else total
