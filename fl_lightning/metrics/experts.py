"""Several classifiers' predictions made one.

Everything returns log-probabilities, which :mod:`fl_lightning.metrics.evaluation` takes as logits. The mean of the
single experts' accuracies, another thing than the accuracy of their mean, is ``personal_scores`` there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOOR = math.log(1e-12)  # least log-probability of an expert; the value of the authors' code


def product_of_experts(logits: Tensor, *, normalize: bool = False, priors: Tensor | None = None) -> Tensor:
    """p(y|x) ∝ Π_k p_k(y|x), with every factor at least 1e-12, so that no single expert can rule a class out for good.

    Args:
        logits: Of E experts, (E, N, C). -inf is allowed; a NaN of a diverged expert shows as a NaN.
        normalize: Take the geometric mean, i.e. divide the sum of log-probabilities by E. Experts agree because they
            saw similar data, and a product counts that as independent evidence: the mean is less over-confident. The
            largest class stays; a ranking across examples (AUROC) may change.
        priors: Every expert's shares or counts of the classes in training, (E, C), >= 0. If given, each factor becomes
            p_k(y|x) / π_k(y), which is the prediction under balanced classes. An expert keeps its own probability of a
            class that it never saw: there is nothing to divide by. Not in the authors' code.

    Returns:
        Log-probabilities (N, C), float64.

    Raises:
        ValueError: Shapes that do not fit, no expert, or priors that are negative or all zero for an expert.
    """
    log_factors = _log_probabilities(logits).clamp_min(FLOOR)
    if priors is not None:
        log_factors = log_factors - _log_priors(priors, logits)[:, None]
    total = log_factors.sum(0)
    return (total / len(logits) if normalize else total).log_softmax(-1)


def mean_of_experts(logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """Log of the arithmetic mean of the experts' probabilities: a mixture instead of a product.

    Args:
        logits: Of E experts, (E, N, C).
        weights: Of the experts, (E,) or for each example (E, N), >= 0, in any scale; equal ones by default.

    Returns:
        Log-probabilities (N, C), float64; -inf where every expert says 0.

    Raises:
        ValueError: Another number of dimensions, or no expert.
    """
    log_factors = _log_probabilities(logits)
    if weights is None:
        return log_factors.logsumexp(0) - math.log(len(logits))
    # Not the sum of logarithms: a weight of 0 would have no gradient.
    largest = log_factors.detach().amax(0).clamp_min(torch.finfo(log_factors.dtype).min)
    return (relative(weights).to(log_factors) * (log_factors - largest).exp()).sum(0).log() + largest


def relative(weights: Tensor) -> Tensor:
    """Weights (E,) or (E, N) as shares of their sum over experts, (E, 1 or N, 1), to multiply scores (E, N, C) with."""
    shares = weights / weights.sum(0)
    return shares.view(len(shares), -1, 1)


def _log_probabilities(logits: Tensor) -> Tensor:
    if logits.ndim != 3 or len(logits) == 0:
        raise ValueError(f"logits must have shape (E >= 1, N, C), got {(*logits.shape,)}")
    return logits.double().log_softmax(-1)


def _log_priors(priors: Tensor, logits: Tensor) -> Tensor:
    """Log of the shares, (E, C), 0 where a share is 0."""
    expected = (len(logits), logits.shape[-1])
    if (*priors.shape,) != expected:
        raise ValueError(f"priors must have shape {expected}, got {(*priors.shape,)}")
    totals = priors.double().sum(1, keepdim=True)
    if not ((priors >= 0).all() and (totals > 0).all() and totals.isfinite().all()):
        raise ValueError(f"priors must be >= 0 and finite with a positive sum for every expert, got {priors.tolist()}")
    shares = (priors.double() / totals).to(logits.device)
    return torch.where(shares > 0, shares, 1.0).log()
