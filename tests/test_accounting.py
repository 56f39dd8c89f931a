"""Mechanisms on single rows, against formulas and frequencies of this file's own."""

from __future__ import annotations

import math

import pytest
import torch

from fl_lightning.accounting import gaussian_epsilon, gaussian_noise, randomised_response, spend


def delta_of(epsilon: float, z: float) -> float:
    """The excess of N(1, z^2) over e^epsilon N(0, z^2), integrated on a grid."""
    x = torch.linspace(-12 * z, 12 * z + 1, 400_001, dtype=torch.float64)
    density = torch.exp(-((x - torch.tensor([[1.0], [0.0]])) ** 2) / (2 * z * z)) / (z * math.sqrt(2 * math.pi))
    excess = (density[0] - math.exp(epsilon) * density[1]).clamp(min=0)
    return float(torch.trapezoid(excess, x))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.2, 1e-3), (1.0, 1e-5), (8.0, 1e-5), (40.0, 1e-6)])
def test_gaussian_noise_has_the_delta_that_it_promises(epsilon: float, delta: float) -> None:
    z = gaussian_noise(epsilon, delta)
    assert delta_of(epsilon, z) == pytest.approx(delta, rel=1e-3)
    assert gaussian_epsilon(z, delta) == pytest.approx(epsilon, rel=1e-9)


def test_gaussian_epsilon_is_the_librarys() -> None:
    library = pytest.importorskip("dp_accounting.gaussian_mechanism")
    for z in (0.01, 0.3, 1.0, 20.0):
        assert gaussian_epsilon(z, 1e-5) == pytest.approx(library.get_epsilon_gaussian(z, 1e-5), rel=1e-9)
    assert gaussian_epsilon(1e6, 1e-5) == 0  # delta alone pays for it
    assert gaussian_noise(3.0, 1e-6) == pytest.approx(library.get_sigma_gaussian(3.0, 1e-6), rel=1e-9)


@pytest.mark.parametrize(("epsilon", "classes"), [(0.5, 3), (2.0, 10), (1.0, 1)])
def test_randomised_response_has_its_probabilities(epsilon: float, classes: int) -> None:
    count = 200_000
    labels = torch.full((count,), classes - 1)
    found = randomised_response(labels, classes, epsilon, torch.Generator().manual_seed(0))
    shares = torch.bincount(found, minlength=classes).double() / count
    stays = math.exp(epsilon) / (math.exp(epsilon) + classes - 1)
    expected = torch.tensor([(1 - stays) / max(classes - 1, 1)] * (classes - 1) + [stays], dtype=torch.float64)
    assert len(shares) == classes
    assert torch.allclose(shares, expected, atol=5 * math.sqrt(0.25 / count))


def test_events_of_one_kind_are_kept_as_one() -> None:
    spent = spend(spend([], 0.1, 2.0, 3), 0.1, 2.0)
    assert spent == [(0.1, 2.0, 4)]
    assert spend(spent, 0.2, 2.0) == [(0.1, 2.0, 4), (0.2, 2.0, 1)]
