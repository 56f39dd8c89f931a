"""Token relabel: how a student learns from images of which some patches were inverted and the others were left noise.

An image's N patches are H (high density, kept by the sparse inversion) and L (low density, its complement). y is the label
that the image was made for; z are the ensemble's scores, v the student's, T the temperature, and KL_T(z || v) is
T^2 KL(softmax(z / T) || softmax(v / T)), `distillation_kl`. No source gives the paper's equations: the readings are those of
the reconstruction in ``docs/methods/fedmitr.md``.

Everything here acts on scores; which patches a forward pass saw is the caller's affair.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from fl_lightning.losses.distillation import distillation_kl

Reading = Literal["r1", "r2", "r3"]
HardView = Literal["ce", "kd", "mix"]


def check_relabel(reading: str, hard_view: str, lam: float, beta: float, temperature: float) -> None:
    """Raises ValueError for a value out of range."""
    for name, value, allowed in (("reading", reading, Reading), ("hard_view", hard_view, HardView)):
        if value not in get_args(allowed):
            raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, get_args(allowed)))}")
    for name, number in (("lam", lam), ("beta", beta)):
        if not number >= 0:
            raise ValueError(f"{name} is {number}; it must be at least 0")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")


def labelled(
    scores: Tensor, labels: Tensor, soft: Tensor | None = None, view: HardView = "ce", temperature: float = 4.0
) -> Tensor:
    """What is learnt where the label is believed: ``ce`` CE(v, y); ``kd`` KL_T(z || v); ``mix`` the mean of both.

    Args:
        scores: v, (B, C), or (B, k, C) of k tokens each.
        labels: y, (B,).
        soft: z, of the scores' shape; unused by ``ce``.
        view: Which.
        temperature: T, above 0.

    Returns:
        A scalar, mean over images (and tokens).
    """
    if view == "kd":
        return relabelled(scores, soft, temperature)
    tokens = scores.shape[1] if scores.ndim == 3 else 1
    hard = F.cross_entropy(scores.flatten(0, -2), labels.repeat_interleave(tokens))
    return hard if view == "ce" else 0.5 * (hard + relabelled(scores, soft, temperature))


def relabelled(scores: Tensor, soft: Tensor | None, temperature: float = 4.0) -> Tensor:
    """KL_T(z || v), what is learnt where the ensemble's answer takes the label's place. Arguments as `labelled`."""
    if soft is None:
        raise ValueError("the ensemble's scores are missing; they are needed unless every label is believed")
    return distillation_kl(scores, soft, temperature)


def two_views(
    labels: Tensor,
    high: Tensor | None,
    low: Tensor | None,
    soft_high: Tensor | None = None,
    soft_low: Tensor | None = None,
    lam: float = 1.0,
    view: HardView = "ce",
    temperature: float = 4.0,
) -> Tensor:
    """R1, two sparse views: CE(f(x|H), y) + lambda KL_T(z(x|L) || f(x|L)). R3, mixed view, with the whole image for L.

    Args:
        labels: y, (B,).
        high: f(x|H), (B, C); None where H is empty, and then only the second term is left.
        low: f(x|L) (R1) or f(x) (R3), (B, C); None where L is empty or lambda 0.
        soft_high: z(x|H), (B, C); unused by view ``ce``.
        soft_low: z(x|L) or z(x), (B, C).
        lam: lambda, at least 0.
        view: What takes the place of CE on H; see `labelled`.
        temperature: T, above 0.
    """
    loss = labels.new_zeros((), dtype=(low if high is None else high).dtype)  # type: ignore[union-attr]
    if high is not None:
        loss = loss + labelled(high, labels, soft_high, view, temperature)
    if low is not None:
        loss = loss + lam * relabelled(low, soft_low, temperature)
    return loss


def token_labelling(
    labels: Tensor,
    whole: Tensor,
    high: Tensor | None,
    low: Tensor | None,
    soft: Tensor | None = None,
    soft_high: Tensor | None = None,
    soft_low: Tensor | None = None,
    lam: float = 1.0,
    beta: float = 0.5,
    view: HardView = "ce",
    temperature: float = 4.0,
) -> Tensor:
    """R2, every patch's own token has a label, after LV-ViT (Jiang et al., 2021).

    CE(f_cls(x), y) + beta [ 1/k sum_{i in H} CE(f_i(x), y) + lambda/(N-k) sum_{i in L} KL_T(q_i || f_i(x)) ]

    Args:
        labels: y, (B,).
        whole: f_cls(x), the class token's scores, (B, C).
        high: f_i(x) for the patches of H, (B, k, C); None where beta is 0.
        low: f_i(x) for those of L, (B, N - k, C); None where L is empty or lambda 0.
        soft: z(x), (B, C); unused by view ``ce``.
        soft_high: q_i for H, (B, k, C); unused by view ``ce``.
        soft_low: q_i for L, (B, N - k, C).
        lam: lambda, at least 0.
        beta: Weight of the patches beside the class token, at least 0.
        view: What takes the place of CE, of the class token and on H.
        temperature: T, above 0.
    """
    loss = labelled(whole, labels, soft, view, temperature)
    if beta and high is not None:
        loss = loss + beta * labelled(high, labels, soft_high, view, temperature)
        if low is not None and lam:
            loss = loss + beta * lam * relabelled(low, soft_low, temperature)
    return loss
