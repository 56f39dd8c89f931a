"""What privacy costs: mechanisms on single rows, and books over many releases.

A mechanism is (epsilon, delta)-private if, for two inputs that differ in one unit, no set of outputs is more than e^epsilon
times as probable under one as under the other, but for delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr
from torch import Tensor

Accountant = Literal["rdp", "pld"]
Event = tuple[float, float, int]  # sampling rate, noise multiplier, how often
# Whole orders have a closed form; the library's fractional ones may not converge.
_ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
_ROUNDING = 1e-3  # of noise that is solved for, relative


# ---- one release


def gaussian_epsilon(z: float, delta: float) -> float:
    """Epsilon of Gaussian noise (Balle and Wang, 2018, Theorem 8), exact.

    T releases with the same noise are one with ``z / sqrt(T)``, also where later ones depend on earlier ones (Dong et al.,
    2022, Corollary 3.3).

    Args:
        z: Noise multiplier: standard deviation over L2 sensitivity, above 0.
        delta: In (0, 1).
    """
    if _log_delta(0.0, 1 / z) <= math.log(delta):
        return 0.0
    high = 1.0
    while _log_delta(high, 1 / z) > math.log(delta):
        high *= 2
    return float(brentq(lambda epsilon: _log_delta(epsilon, 1 / z) - math.log(delta), 0.0, high, xtol=1e-12))


def gaussian_noise(epsilon: float, delta: float) -> float:
    """The least noise multiplier whose `gaussian_epsilon` is ``epsilon``, above 0."""
    low, high = -1.0, 1.0  # of log z
    while _log_delta(epsilon, math.exp(-high)) > math.log(delta):
        high += 1
    while _log_delta(epsilon, math.exp(-low)) < math.log(delta):
        low -= 1
    return math.exp(brentq(lambda x: _log_delta(epsilon, math.exp(-x)) - math.log(delta), low, high, xtol=1e-13))


def _log_delta(epsilon: float, mu: float) -> float:
    """log(Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu)), mu = sensitivity / sigma."""
    first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(first + math.log1p(-math.exp(second - first))) if second < first else -1e6  # beyond what doubles tell


def randomised_response(labels: Tensor, num_classes: int, epsilon: float, draw: torch.Generator) -> Tensor:
    """Each label with probability e^epsilon / (e^epsilon + k - 1), else one of the k - 1 others: (epsilon, 0)-private
    (Warner, 1965, for k classes).

    Args:
        labels: (N,) int64 in [0, k).
        num_classes: k, at least 1.
        epsilon: Above 0.
        draw: Whose draws these are.
    """
    others = num_classes - 1
    stays = torch.rand(len(labels), generator=draw, dtype=torch.float64) * (1 + others * math.exp(-epsilon)) < 1
    steps = torch.randint(1, max(others, 1) + 1, labels.shape, generator=draw)
    return torch.where(stays, labels, (labels + steps) % num_classes)


# ---- many releases


def spend(spent: Sequence[Event], rate: float, z: float, times: int = 1) -> list[Event]:
    """One more event, or so many of the same kind."""
    if spent and spent[-1][:2] == (rate, z):
        return [*spent[:-1], (rate, z, spent[-1][2] + times)]
    return [*spent, (rate, z, times)]


@lru_cache(maxsize=4096)
def epsilon_of(spent: tuple[Event, ...], delta: float, accountant: Accountant = "rdp") -> float:
    """What events have cost, by Google's ``dp-accounting``, adding or removing one unit: a client, or a record of one."""
    dp = _library()
    books = dp.pld.PLDAccountant() if accountant == "pld" else dp.rdp.RdpAccountant(_ORDERS)
    for rate, z, times in spent:
        event = dp.GaussianDpEvent(z)
        books.compose(event if rate == 1 else dp.PoissonSampledDpEvent(rate, event), times)
    return float(books.get_epsilon(delta))


def noise_for(
    epsilon: float,
    delta: float,
    rate: float,
    rounds: int,
    accountant: Accountant = "rdp",
    spent: Sequence[Event] = (),
) -> float:
    """The least noise multiplier, to a thousandth, with which so many rounds, after what is spent, cost no more than
    ``epsilon``.

    Raises:
        ValueError: Nothing is left of it, or no noise reaches it.
    """

    def cost(z: float) -> float:
        return epsilon_of((*spent, (rate, z, rounds)), delta, accountant)

    # Noise that was made for ``epsilon`` leaves what it was rounded up by, which nobody has meant for more rounds.
    if spent and epsilon_of(tuple((q, (1 - _ROUNDING) * z, n) for q, z, n in spent), delta, accountant) > epsilon:
        raise ValueError(
            f"epsilon is {epsilon}, and {epsilon_of(tuple(spent), delta, accountant):.6g} of it is spent; nothing is left "
            f"for {rounds} more rounds"
        )
    low, high = 0.0, 1.0
    while cost(high) > epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            raise ValueError(f"epsilon is {epsilon}; no noise reaches it with delta {delta}")
    while high - low > _ROUNDING * high:
        middle = (low + high) / 2
        low, high = (low, middle) if middle > 0.05 and cost(middle) <= epsilon else (middle, high)
    return high


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ValueError("accounting for privacy needs the extra 'dp': pip install 'fl_lightning[dp]'") from error
    return dp_accounting
