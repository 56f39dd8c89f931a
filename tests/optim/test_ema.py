"""Power-function averages and the schedule, against values of the specification and plain sums."""

from __future__ import annotations

import pytest
import torch

from fl_lightning.optim.ema import PowerEMA, exp_to_std, lr_factor, power_beta, std_to_exp


def test_exponents() -> None:
    assert std_to_exp(0.05) == pytest.approx(16.9722, abs=1e-4)
    assert std_to_exp(0.10) == pytest.approx(6.93720, abs=1e-5)
    for exponent in (0.0, 0.5, 6.9372, 16.9722, 100.0):
        assert std_to_exp(exp_to_std(exponent)) == pytest.approx(exponent, abs=1e-6)


def test_beta() -> None:
    assert power_beta(16.97, 32, 32) == 0
    assert power_beta(1.0, 64, 16) == pytest.approx(0.75**2)


def test_average_is_the_weights_after_the_first_step_and_a_power_law_after_many() -> None:
    weights = {"w": torch.tensor([3.0, -1.0], dtype=torch.float64)}
    ema = PowerEMA({"w": torch.zeros(2, dtype=torch.float64)}, exp_to_std(2.0))
    ema.update(weights, 32, 32)
    assert torch.equal(ema.values["w"], weights["w"])
    assert ema.values["w"] is not weights["w"]
    # The average of w(t) = t with a profile t^2 over [0, T] is 3/4 T; its profile's relative std is exp_to_std(2).
    count = 4000
    for step in range(1, count + 1):
        ema.update({"w": torch.full((2,), float(step), dtype=torch.float64)}, 8 * step, 8)
    assert float(ema.values["w"][0]) / count == pytest.approx(0.75, abs=1e-3)


def test_average_by_hand_with_batches_of_two_sizes() -> None:
    ema = PowerEMA({"w": torch.zeros(1)}, 0.1)
    old, seen = torch.zeros(1), 0
    for step, size in enumerate([4, 4, 2, 4]):
        new, seen = torch.tensor([float(step**2)]), seen + size
        beta = (1 - size / seen) ** (6.937203 + 1)
        old = beta * old + (1 - beta) * new
        ema.update({"w": new}, seen, size)
        assert torch.allclose(ema.values["w"], old)


def test_learning_rate() -> None:
    assert lr_factor(0, 64) == 0
    assert lr_factor(2.5e6, 4096) == pytest.approx(0.25)
    assert lr_factor(1e7, 4096) == pytest.approx(1)
    assert lr_factor(35_000 * 4096, 4096) == pytest.approx(1)
    assert lr_factor(4 * 35_000 * 4096, 4096) == pytest.approx(0.5)
    assert lr_factor(4 * 35_000 * 64, 64) == pytest.approx(0.896 * 0.5)  # small batches decay within the ramp
    assert lr_factor(1e9, 64, ramp=0, reference_batches=None) == 1
    # base 0.01, batch 64: never above 0.0047
    assert max(0.01 * lr_factor(n * 64, 64) for n in range(0, 400_000, 500)) == pytest.approx(0.0047, abs=5e-5)


def test_wrong_values_are_refused() -> None:
    for std in (0.0, 0.3):
        with pytest.raises(ValueError, match=rf"std is {std}; it must be in \(0, 0.2887\]"):
            std_to_exp(std)
    with pytest.raises(ValueError, match="exponent is -1; it must be at least 0"):
        exp_to_std(-1)
    with pytest.raises(ValueError, match=r"step is 5; it must be in \(0, 4\]"):
        power_beta(1.0, 4, 5)
