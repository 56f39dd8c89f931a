"""Losses by which a student learns from teachers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def distillation_kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over the batch (Hinton et al., 2015).

    Args:
        student: Scores (..., C).
        teacher: Scores (..., C); no gradient flows to them.
        temperature: T, above 0.

    Returns:
        A scalar >= 0, in the units of nats. Its gradient with respect to the student's scores is T (p_T - q_T) / B.
    """
    target = (teacher.detach() / temperature).log_softmax(-1).flatten(0, -2)
    own = (student / temperature).log_softmax(-1).flatten(0, -2)
    return temperature**2 * F.kl_div(own, target.to(own), reduction="batchmean", log_target=True)
