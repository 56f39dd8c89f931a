"""How much a classifier's risk can change from generated to real data, and what of it can be measured.

A reconstruction: the theorem of FederatedFactory (Moleri et al. 2026) is known here by its summary only, "the global
risk is bounded by the local generators' training errors". What follows is a correct statement that fits, not the
paper's text.

Real data are P(x, y) = Σ_c π_c p_c(x) 1[y = c], generated ones Q the same with q_c, losses lie in [0, B]. Labels are
assigned and not estimated, so KL(P‖Q) = Σ_c π_c KL(p_c‖q_c), and by Pinsker's and Jensen's inequalities, for every
classifier h,

    |R_P(h) − R_Q(h)| ≤ B·TV(P, Q) ≤ B·Σ_c π_c √(½ KL_c) ≤ B·√(½ Σ_c π_c KL_c).

A classifier within ε of the least risk on Q is within ε plus twice that bound of the least risk on P. The divergences
of diffusion models cannot be computed (those of Gaussians can: ``torch.distributions.kl_divergence``). What can be
measured: both risks and their gap, and a lower bound on the total variation. The bound is several times larger than the
gap in examples: a check of sanity, not an explanation of an accuracy. In the peer-to-peer mode a client's own class is
real, so its divergence is 0; the bound then holds for each expert, not for their product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.metrics.evaluation import scores
from fl_lightning.rng import derive_seed


@dataclass(frozen=True)
class TransferBound:
    """Upper bounds on |R_P(h) − R_Q(h)|; not cut off at B, beyond which they say nothing.

    Attributes:
        per_class: B Σ_c π_c √(½ KL_c), the tighter one, plus the shift of priors.
        pooled: B √(½ Σ_c π_c KL_c), plus the shift of priors.
    """

    per_class: float
    pooled: float


def transfer_bound(
    divergences: Tensor, priors: Tensor, *, test_priors: Tensor | None = None, loss_bound: float = 1.0
) -> TransferBound:
    """Bound the change of risk from generated to real data.

    Args:
        divergences: KL(p_c‖q_c) of every class, real from generated, (C,), nats, >= 0; may be infinite.
        priors: π, shares or counts of the classes among the generated data, (C,), >= 0.
        test_priors: The same of the real data if they differ; adds B·TV(π′, π).
        loss_bound: B, the largest loss, positive; 1 for the 0-1 loss.

    Raises:
        ValueError: Shapes that do not fit, or values out of range.
    """
    weights = _shares(priors, divergences)
    if not (divergences >= 0).all():
        raise ValueError(f"divergences must be >= 0, got {divergences.tolist()}")
    if not 0 < loss_bound < float("inf"):
        raise ValueError(f"loss_bound must be positive and finite, got {loss_bound}")
    present = weights > 0  # 0 · ∞ is 0 here: a class that is never drawn does not count
    weights, halves = weights[present], divergences.double()[present] / 2
    shift = 0.0
    if test_priors is not None:
        shift = (_shares(test_priors, divergences) - _shares(priors, divergences)).abs().sum().item() / 2
    return TransferBound(
        per_class=loss_bound * ((weights * halves.sqrt()).sum().item() + shift),
        pooled=loss_bound * ((weights * halves).sum().sqrt().item() + shift),
    )


def total_variation_lower_bound(accuracy: float) -> float:
    """TV(P, Q) ≥ 2·accuracy − 1 for any classifier that tells real from generated, in [0, 1].

    Args:
        accuracy: Balanced accuracy (mean of both recalls) in [0, 1], on examples that the classifier was not fitted to.
            Measured on few examples, it makes the bound an estimate with twice the accuracy's standard error.

    Raises:
        ValueError: Accuracy out of range.
    """
    if not 0 <= accuracy <= 1:
        raise ValueError(f"accuracy must lie in [0, 1], got {accuracy}")
    return max(2 * accuracy - 1, 0.0)


def discriminator_accuracy(real: Tensor, generated: Tensor, *, seed: int = 0, folds: int = 5) -> float:
    """Balanced accuracy of a logistic regression that tells real from generated features, cross-validated.

    Args:
        real: (N, d), of images that the generator was not trained on.
        generated: (M, d).
        seed: Of the run; shuffles the folds.
        folds: At least 2, and at most the number of examples of either kind.

    Returns:
        Mean over the folds, in [0, 1]; about 0.5 where a linear classifier sees no difference.

    Raises:
        ValueError: Shapes or folds that do not fit.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if real.ndim != 2 or generated.ndim != 2 or real.shape[1] != generated.shape[1]:
        raise ValueError(f"features must be (N, d) and (M, d), got {(*real.shape,)} and {(*generated.shape,)}")
    if not 2 <= folds <= min(len(real), len(generated)):
        raise ValueError(f"folds must lie in [2, {min(len(real), len(generated))}], got {folds}")
    inputs = torch.cat([real, generated]).detach().cpu().double().numpy()
    kinds = [1] * len(real) + [0] * len(generated)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, class_weight="balanced"))
    splits = StratifiedKFold(folds, shuffle=True, random_state=derive_seed(seed, "discriminator") % 2**32)
    return float(cross_val_score(model, inputs, kinds, cv=splits, scoring="balanced_accuracy").mean())


def risk_gap(real: tuple[Tensor, Tensor], generated: tuple[Tensor, Tensor], num_classes: int) -> dict[str, float]:
    """One classifier's balanced 0-1 risk on real and on generated examples, neither of which it was fitted to.

    Balanced, because then a shift of priors takes no part in the gap.

    Args:
        real: Logits (N, num_classes) and labels (N,).
        generated: Logits (M, num_classes) and labels (M,).
        num_classes: Number of classes.

    Returns:
        ``risk/real`` and ``risk/generated`` in [0, 1], and ``risk/gap``, the first minus the second.

    Raises:
        ValueError: Shapes that do not fit, labels out of range, or no example.
    """
    ours, theirs = (1 - scores(logits, labels, num_classes)["balanced_acc"] for logits, labels in (real, generated))
    return {"risk/real": ours, "risk/generated": theirs, "risk/gap": ours - theirs}


def _shares(priors: Tensor, divergences: Tensor) -> Tensor:
    """Priors that sum to 1, (C,), float64."""
    if priors.ndim != 1 or priors.shape != divergences.shape:
        shapes = f"{(*priors.shape,)} and {(*divergences.shape,)}"
        raise ValueError(f"priors and divergences must both have shape (C,), got {shapes}")
    total = priors.double().sum()
    if not ((priors >= 0).all() and 0 < total < float("inf")):
        raise ValueError(f"priors must be >= 0 with a positive, finite sum, got {priors.tolist()}")
    return priors.double() / total
