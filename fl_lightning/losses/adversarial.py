"""Losses of a generator whose images teachers shall know and a student shall not yet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def hard_cross_entropy(scores: Tensor, labels: Tensor, hardness: float = 0.0) -> Tensor:
    """mean((1 - p_y)^hardness CE): images count the more the less sure of them the scores are.

    Args:
        scores: (B, C).
        labels: (B,) int64.
        hardness: At least 0; 0 is the cross-entropy. No gradient flows through the factor.
    """
    losses = F.cross_entropy(scores, labels, reduction="none")
    return ((1 - (-losses.detach()).exp()).clamp_min(0).pow(hardness) * losses).mean()


def disagreement(teacher: Tensor, student: Tensor, temperature: float = 1.0, masked: bool = False) -> Tensor:
    """mean(T^2 KL(softmax(teacher / T) || softmax(student / T))), with gradients to both: an image changes both.

    Args:
        teacher: Scores (B, C).
        student: Scores (B, C).
        temperature: T, above 0.
        masked: Count only images where the two name different classes; the mean is over all.
    """
    own, target = ((scores / temperature).log_softmax(1) for scores in (student, teacher))
    losses = temperature**2 * F.kl_div(own, target, reduction="none", log_target=True).sum(1)
    return (losses * (teacher.argmax(1) != student.argmax(1)) if masked else losses).mean()


def diversity_loss(latents: Tensor, images: Tensor) -> Tensor:
    """exp(-mean_ij(mean((z_i - z_j)^2) mean(|x_i - x_j|))), in (0, 1]: 1 where different noise gives the same image.

    Args:
        latents: z, (B, D).
        images: x, (B, ...).
    """
    flat = images.flatten(1)
    far = torch.cdist(latents, latents).square() / latents.shape[1]
    apart = torch.cdist(flat, flat, p=1) / flat.shape[1]  # no (B, B, pixels) tensor
    return (-(far * apart).mean()).exp()
