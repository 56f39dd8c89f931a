"""What inverting a model needs beside its loss: which patches go on, where they are after a shift, priors of images, labels.

Sparse model inversion (SMI) stops patches that the model does not look at while their pixels are being optimised; FedMITR
adopts it. Shapes: B images of N patches, of which k go on; patches are numbered row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LabelSource = Literal["uniform", "balanced", "client_head", "client_counts"]
Combine = Literal["logits", "probs"]


# ---------------------------------------------------------------------------------------------------------------------
# The schedule


def check_schedule(events: Sequence[int], ratios: Sequence[float]) -> None:
    """Refuse a schedule of stop events: iterations and the share of the living patches that each stops.

    Raises:
        ValueError: Not as many ratios as events, an event before iteration 1 or not after the last one, or a ratio outside
            [0, 1).
    """
    if len(events) != len(ratios):
        raise ValueError(f"events are {list(events)} and ratios {list(ratios)}; there must be a ratio for every event")
    if any(later <= event for event, later in zip([0, *events], events, strict=False)):
        raise ValueError(
            f"events are {list(events)}; they must be at least 1 and rise: the score is read an iteration ahead"
        )
    if any(not 0 <= ratio < 1 for ratio in ratios):
        raise ValueError(f"ratios are {list(ratios)}; each must be in [0, 1)")


def survivors(num_patches: int, ratios: Sequence[float]) -> list[int]:
    """Patches alive after each event: k_j = floor(k_{j-1} (1 - r_j)). DeiT at 0.3 four times: 137, 95, 66, 46 of 196.

    Raises:
        ValueError: No patch would be left.
    """
    counts, alive = [], num_patches
    for ratio in ratios:
        alive = math.floor(alive * (1 - ratio) + 1e-9)  # 100 * (1 - 0.9) is 9.999999999999998
        counts.append(alive)
    if counts and counts[-1] < 1:
        raise ValueError(
            f"ratios are {list(ratios)}; of {num_patches} patches they leave {counts}, at least 1 must stay"
        )
    return counts


def top_patches(scores: Tensor, kept: Tensor | None, count: int) -> Tensor:
    """The patches of the highest scores among those that are alive, (B, count) ascending; absolute numbers.

    Args:
        scores: (B, k) of the living patches.
        kept: (B, k) their numbers; None where all are alive, in their order.
        count: In [1, k].
    """
    best = scores.topk(count, 1).indices
    return (best if kept is None else kept.gather(1, best)).sort(1).values


# ---------------------------------------------------------------------------------------------------------------------
# Jitter


@dataclass(frozen=True)
class Shift:
    """A roll of images, then a reflection.

    Attributes:
        down: Pixels, cyclic.
        right: Pixels, cyclic.
        mirrored: Left and right exchanged.
    """

    down: int
    right: int
    mirrored: bool

    def images(self, images: Tensor) -> Tensor:
        """Shifted images (B, C, H, W)."""
        if self.down or self.right:
            images = images.roll((self.down, self.right), (2, 3))
        return images.flip(3) if self.mirrored else images

    def patches(self, kept: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
        """Where patches (B, k) of a grid (rows, columns) are then; the roll is rounded to whole patches (height, width)."""
        rows, columns = grid
        row = (kept // columns + round(self.down / patch[0])) % rows
        column = (kept % columns + round(self.right / patch[1])) % columns
        return row * columns + (columns - 1 - column if self.mirrored else column)


def pixel_mask(mask: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """(B, 1, H, W) of a mask (B, N) of the patches (height, width) of a grid (rows, columns)."""
    return mask.unflatten(1, (1, *grid)).repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3)


# ---------------------------------------------------------------------------------------------------------------------
# Pixels


def pixel_range(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised values of black and white, -mean / std and (1 - mean) / std, of the shape of both."""
    return -mean / std, (1 - mean) / std


def to_images(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Images (B, C, H, W) in [0, 1] of normalised pixels."""
    return (pixels * std + mean).clamp(0, 1)


@torch.no_grad()
def hold_(pixels: Tensor, held: Tensor, alive: Tensor) -> None:
    """Put pixels (B, C, H, W) that are not alive, (B, 1, H, W), back to what is held, in place."""
    values = pixels.detach()
    torch.where(alive, values, held, out=values)


# ---------------------------------------------------------------------------------------------------------------------
# Terms of the loss


def total_variation(images: Tensor) -> Tensor:
    """TV_2: the Frobenius norms of the differences to the right, lower, lower right and lower left neighbour, summed.

    Each norm is over the whole batch (B, C, H, W), so it grows as sqrt(B H W) and its weight must be set anew where that
    changes.
    """
    return _TotalVariation.apply(images)


class _TotalVariation(torch.autograd.Function):
    """With the gradient made on the way, in a third of the time: autograd's of a slice is as large as the images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gradient, total, space = torch.zeros_like(x), x.new_zeros(()), torch.empty_like(x).flatten()
        later, earlier, every = slice(1, None), slice(None, -1), slice(None)
        for (row, column), (other_row, other_column) in (
            ((every, later), (every, earlier)),
            ((later, every), (earlier, every)),
            ((later, later), (earlier, earlier)),
            ((later, earlier), (earlier, later)),
        ):
            here, there = x[..., row, column], x[..., other_row, other_column]
            difference = torch.sub(here, there, out=space[: here.numel()].view(here.shape))
            norm = torch.linalg.vector_norm(difference)
            total += norm
            difference /= norm.clamp_min(torch.finfo(x.dtype).tiny)  # without any difference the gradient is 0
            gradient[..., row, column] += difference
            gradient[..., other_row, other_column] -= difference
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        return outer * ctx.saved_tensors[0]


def jensen_shannon(student: Tensor, teacher: Tensor, temperature: float = 3.0) -> Tensor:
    """JS(P, Q) = KL(P || M) / 2 + KL(Q || M) / 2, M = (P + Q) / 2, of class scores (B, C): the mean over the batch.

    ADI's (Yin et al., 2020): temperature 3, probabilities limited to [0.01, 0.99] (and not normalised again). The authors'
    code takes the KL divergences the other way round, from M, which is larger.
    """
    p, q = ((scores.float() / temperature).softmax(1).clamp(0.01, 0.99) for scores in (student, teacher))
    middle = ((p + q) / 2).log()
    return 0.5 * ((p * (p.log() - middle)).sum(1) + (q * (q.log() - middle)).sum(1)).mean()


def statistics_distance(inputs: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """DeepInversion's term of one BatchNorm layer: the distances of the batch's mean and variance from the running ones.

    Args:
        inputs: Of the layer, (B, C, ...).
        mean: Running mean (C,).
        variance: Running variance (C,).
    """
    over = [0, *range(2, inputs.ndim)]
    found = torch.var_mean(inputs, over, correction=0)
    return torch.linalg.vector_norm(found[1] - mean) + torch.linalg.vector_norm(found[0] - variance)


def ensemble(scores: Tensor, combine: Combine) -> Tensor:
    """Class scores (B, C) of K teachers' (K, B, C): the mean of scores, or the log of the mean of probabilities."""
    if combine == "logits":
        return scores.mean(0)
    return scores.log_softmax(2).logsumexp(0) - math.log(len(scores))


# ---------------------------------------------------------------------------------------------------------------------
# Labels


def label_plan(
    source: LabelSource,
    num_images: int,
    num_classes: int,
    generator: torch.Generator,
    *,
    logits: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """The classes of one client's synthetic images, (num_images,) int64, each drawn by itself unless they are balanced.

    Args:
        source: "uniform": every class alike; a client that never saw a class then invents it. "balanced": the classes in
            turn, as in DeepInversion's script. "client_head": by the mean softmax of the client's model on noise, which
            needs no upload beyond the model. "client_counts": by the client's label counts: an oracle, which a report must
            say.
        num_images: Images, at least 1.
        num_classes: C.
        generator: Owner of the draw.
        logits: (M, C) class scores of the client's model on M noise images, for "client_head".
        counts: (C,) at least 0, for "client_counts".

    Raises:
        ValueError: An unknown source, or what it needs is missing or has another shape.
    """
    if source not in get_args(LabelSource):
        raise ValueError(f"label source is {source!r}; allowed: {', '.join(map(repr, get_args(LabelSource)))}")
    if num_images < 1:
        raise ValueError(f"num_images is {num_images}; it must be at least 1")
    if source == "balanced":
        return torch.arange(num_images) % num_classes
    if source == "uniform":
        prior = torch.ones(num_classes)
    elif source == "client_head":
        if logits is None or logits.ndim != 2 or len(logits) < 1 or logits.shape[1] != num_classes:
            raise ValueError(f"logits are {_shape(logits)}; 'client_head' needs (M >= 1, {num_classes})")
        prior = logits.float().softmax(1).mean(0)
    else:
        if counts is None or tuple(counts.shape) != (num_classes,) or (counts < 0).any() or not counts.sum() > 0:
            raise ValueError(f"counts are {counts}; 'client_counts' needs ({num_classes},), at least 0, not all 0")
        prior = counts.float()
    return torch.multinomial(prior, num_images, replacement=True, generator=generator)


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tuple(tensor.shape)}"
