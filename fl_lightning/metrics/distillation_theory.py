"""What the theory of one-shot distillation speaks of, as numbers: Lipschitz and smoothness constants, gradient variance,
stability, the spectrum of images. Nothing here knows data, a task or a federation.

FedMITR (arXiv 2605.10748) argues by algorithmic stability. Its theorem and constants were not found; `stability_bound` is
that of Hardt, Recht and Singer (2016), which its text suggests, and the rest measures what its three claims are about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.metrics.flatness import Loss, Params, dot, gradient, moved, norm, scaled_to

# ---- gradients of a loss over mini-batches


@dataclass(frozen=True)
class BatchGradients:
    """Gradients g_b of the losses of mini-batches at one point.

    Attributes:
        mean_norm: Mean of ||g_b||.
        max_norm: Their maximum: the empirical Lipschitz constant.
        spread: mean_b ||g_b - g||^2 around the mean gradient g.
        variance: The same relative to ||g||^2; nan where g is zero.
        mean: g.
    """

    mean_norm: float
    max_norm: float
    spread: float
    variance: float
    mean: dict[str, Tensor]


def batch_gradients(losses: Sequence[Loss], params: Params) -> BatchGradients:
    """Gradients of mini-batches of one size, one after the other: memory holds two of them.

    Args:
        losses: Mean loss of each of the B >= 1 batches.
        params: The point.
    """
    mean, squares = {name: torch.zeros_like(p) for name, p in params.items()}, []
    for loss in losses:
        slope = gradient(loss, params)
        squares.append(dot(slope, slope))
        mean = moved(mean, slope, 1 / len(losses))
    norms, square = [math.sqrt(s) for s in squares], dot(mean, mean)
    spread = max(sum(squares) / len(squares) - square, 0.0)  # mean ||g_b - g||^2 = mean ||g_b||^2 - ||g||^2
    variance = spread / square if square > 0 else math.nan
    return BatchGradients(sum(norms) / len(norms), max(norms), spread, variance, mean)


def smoothness(loss: Loss, params: Params, direction: Params, radius: float, slope: Params | None = None) -> float:
    """||grad(w + d) - grad(w)|| / ||d||, a lower estimate of the gradient's Lipschitz constant.

    Args:
        loss: The loss.
        params: The point w.
        direction: Direction of d.
        radius: ||d||, above 0.
        slope: grad(w), where it is known.

    Returns:
        The quotient; nan where the direction is zero.
    """
    if not radius > 0:
        raise ValueError(f"radius is {radius}; it must be above 0")
    if not norm(direction) > 0:
        return math.nan
    there = gradient(loss, moved(params, scaled_to(direction, radius)))
    return norm(moved(there, gradient(loss, params) if slope is None else slope, -1.0)) / radius


# ---- hard and soft labels


def hard_label_variance(q: Tensor) -> Tensor:
    """E ||(p - e_y) - (p - q)||^2 = 1 - ||q||^2 for a label y drawn from q, whatever the student's p.

    By so much does a hard label make the gradient of the scores vary around that of the soft label, whose mean it shares.

    Args:
        q: Probabilities (..., C).

    Returns:
        (...), in [0, 1 - 1/C]: 0 where q is certain.
    """
    return 1 - q.square().sum(-1)


def sampled_hard_label_variance(p: Tensor, q: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """What `hard_label_variance` says, from labels that are drawn: a check of it.

    Args:
        p: The student's probabilities (N, C).
        q: The soft labels (N, C).
        draws: Labels for each, at least 1.
        generator: Draws them.

    Returns:
        (N,), in the mean over draws.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; it must be at least 1")
    labels = torch.multinomial(q, draws, replacement=True, generator=generator)
    hard = p[:, None] - F.one_hot(labels, q.shape[-1])
    return (hard - (p - q)[:, None]).square().sum(-1).mean(-1)


def covariance_trace(gradients: Tensor) -> float:
    """Trace of the covariance of vectors (N, C), the mean of ||g_i - g||^2 (divisor N)."""
    gradients = gradients.double()
    return float((gradients - gradients.mean(0)).square().sum(-1).mean())


# ---- stability


def largest_loss_change(scores: Tensor, others: Tensor, labels: Tensor) -> float:
    """max_z |l(w; z) - l(w'; z)| of the cross-entropy.

    Args:
        scores: Scores of w (N, C), N >= 1.
        others: Scores of w' (N, C).
        labels: (N,).
    """
    losses = [F.cross_entropy(s.double(), labels, reduction="none") for s in (scores, others)]
    return float((losses[0] - losses[1]).abs().max())


def stability_bound(lipschitz: float, smoothness: float, step_constant: float, steps: int, examples: int) -> float:
    """Hardt, Recht and Singer (2016), theorem 3.12: uniform stability of SGD on a loss that is not convex.

        (1 + 1/(beta c)) / (n - 1) * (2 c L^2)^(1 / (beta c + 1)) * tau^(beta c / (beta c + 1))

    It holds for losses in [0, 1], one example a step, step sizes of at most c / t in step t, and for constants that hold
    everywhere; with measured constants, mini-batches and cross-entropy it is an indication. It bounds the gap on the
    *synthetic* distribution only: it says nothing about the shift from synthetic to real images, which dominates here.
    Say so beside every plot. It rises with L, but only as L^(2 / (beta c + 1)): where beta c is large, L hardly matters.

    Args:
        lipschitz: L, above 0.
        smoothness: beta, above 0.
        step_constant: c, above 0.
        steps: tau, at least 1.
        examples: n, at least 2.
    """
    positive = {"lipschitz": lipschitz, "smoothness": smoothness, "step_constant": step_constant}
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    if steps < 1 or examples < 2:
        raise ValueError(f"steps {steps} must be at least 1, examples {examples} at least 2")
    rate = smoothness * step_constant
    growth = (2 * step_constant * lipschitz**2) ** (1 / (rate + 1)) * steps ** (rate / (rate + 1))
    return (1 + 1 / rate) / (examples - 1) * growth


# ---- images


def high_frequency_share(images: Tensor, patch: tuple[int, int], keep: Tensor | None = None) -> float:
    """Share of the energy of patches that lies above half of the Nyquist frequency, of a patch's own Fourier transform.

    Energy is that around the mean of the patch, so brightness does not count; the share is of all patches' energy together.
    A frequency is as high as its distance from 0; half of Nyquist is a quarter of a period per pixel.

    Args:
        images: (N, C, H, W).
        patch: (height, width) of a patch in pixels; divides the image.
        keep: (N, k) int64, the patches to look at, numbered row by row; None for all.

    Returns:
        In [0, 1]; 0 where all patches are flat.

    Raises:
        ValueError: Patches do not divide the image.
    """
    height, width = patch
    if images.shape[2] % height or images.shape[3] % width:
        raise ValueError(f"patch is {patch}; it must divide images of {tuple(images.shape[2:])}")
    cells = images.double().unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (N, C, rows, height, columns, width)
    cells = cells.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (N, P, C, height, width)
    if keep is not None:
        cells = cells.take_along_dim(keep.view(*keep.shape, 1, 1, 1), 1)
    power = torch.fft.fft2(cells).abs().square().sum((0, 1, 2))
    here = power.device
    radius = torch.hypot(torch.fft.fftfreq(height, device=here)[:, None], torch.fft.fftfreq(width, device=here))
    total = float(power[radius > 0].sum())
    if total <= 1e-24 * float(power.sum()):  # rounding of the mean
        return 0.0
    return float(power[radius > 0.25].sum()) / total
