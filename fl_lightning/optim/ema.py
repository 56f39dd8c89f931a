"""Power-function averages of weights, and the learning rate by images seen (EDM2, Karras et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

MAX_STD = 12**-0.5  # of exponent 0, the mean of all weights so far


def std_to_exp(std: float) -> float:
    """Exponent gamma of the power-function average whose profile has this relative standard deviation.

    The largest root of gamma^3 + 7 gamma^2 + (16 - std^-2) gamma + 12 - std^-2 = 0.

    Args:
        std: Width of the profile relative to the length of the training, in (0, 12^-1/2].

    Raises:
        ValueError: ``std`` lies outside.
    """
    if not 0 < std <= MAX_STD:
        raise ValueError(f"std is {std}; it must be in (0, {MAX_STD:.4f}]")
    roots = np.roots([1.0, 7.0, 16 - std**-2, 12 - std**-2])
    return max(float(roots[np.abs(roots.imag) < 1e-6].real.max()), 0.0)


def exp_to_std(exponent: float) -> float:
    """The inverse of `std_to_exp`, for exponents of at least 0."""
    if exponent < 0:
        raise ValueError(f"exponent is {exponent}; it must be at least 0")
    return math.sqrt((exponent + 1) / ((exponent + 2) ** 2 * (exponent + 3)))


def power_beta(exponent: float, seen: float, step: float) -> float:
    """Share (1 - step / seen)^(exponent + 1) that the old average keeps; 0 at the first step, where seen = step.

    Args:
        exponent: Of the power function, at least 0.
        seen: Images (or steps) seen after this step, above 0.
        step: Those of this step, in (0, seen].
    """
    if not 0 < step <= seen:
        raise ValueError(f"step is {step}; it must be in (0, {seen}]")
    return (1 - step / seen) ** (exponent + 1)


def lr_factor(seen: float, batch_size: float, ramp: float = 1e7, reference_batches: float | None = 35_000) -> float:
    """min(n / ramp, 1) / sqrt(max(n / (reference_batches B), 1)), which multiplies the base learning rate.

    FederatedFactory: base 0.01, ramp over 10^7 images, decay after 35,000 batches.

    Args:
        seen: n, images seen before this step, at least 0.
        batch_size: B, above 0.
        ramp: Images until the rate is full; 0 for none.
        reference_batches: Batches until the rate decays, above 0; None for never.
    """
    ramped = min(seen / ramp, 1.0) if ramp else 1.0
    return ramped if reference_batches is None else ramped / math.sqrt(max(seen / (reference_batches * batch_size), 1))


class PowerEMA:
    """A power-function average of weights. Equals the weights after the first update, whatever it started from.

    Args:
        weights: Weights by name; copied.
        std: Relative width of the profile, in (0, 12^-1/2]. FederatedFactory ships 0.05.
    """

    def __init__(self, weights: Mapping[str, Tensor], std: float = 0.05) -> None:
        self.exponent = std_to_exp(std)
        self.values = {name: value.detach().clone() for name, value in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor], seen: float, step: float) -> None:
        """Take the weights in, after ``step`` more images, ``seen`` in all."""
        keep = power_beta(self.exponent, seen, step)
        torch._foreach_lerp_(list(self.values.values()), [weights[name].detach() for name in self.values], 1 - keep)
