"""FedCM against the formulas, its degenerate case and by hand."""

from __future__ import annotations

import pytest
import torch
from federation.tiny import same
from methods.plain import World, by_hand, close

from fl_lightning.methods import FedAvg, FedCM


def test_equals_a_plain_loop() -> None:
    world, alpha = World(decay=0.05), 0.3
    theta, m = world.theta, torch.zeros_like(world.theta)
    for t in range(1, 6):
        cohort = world.cohort(t)
        rate = world.lr * 0.9 ** (t - 1)
        plain, world.lr = world.lr, rate
        updates = {i: world.local(t, i, theta, lambda y, g: alpha * g(y) + (1 - alpha) * m) - theta for i in cohort}
        world.lr = plain
        m = -world.mean(updates) / (rate * world.mean({i: float(world.steps(i)) for i in cohort}))
        theta = theta + world.mean(updates)
    loop = world.run(FedCM(alpha=alpha, rounds=5, lr_decay=0.9))
    close(loop.method, theta)
    torch.testing.assert_close(World.flat(loop.method.momentum()), -m, rtol=0, atol=1e-12)


def test_two_clients_by_hand() -> None:
    # One step of 0.5, alpha 0.5. Round 1: M = 0: Delta = -0.25 and 0.75: w = 1.25, M = -0.25 / 0.5 = -0.5.
    # Round 2: 0.5 * (1.25 - 2) - 0.25 = -0.625 in the mean: w = 1.5625, M = -0.625. Round 3: -0.21875 - 0.3125.
    assert by_hand(FedCM(alpha=0.5, rounds=3)) == [1.25, 1.5625, 1.828125]


def test_alpha_one_is_fedavg_bit_for_bit() -> None:
    plain, ours = World().run(FedAvg(rounds=4)), World().run(FedCM(alpha=1.0, rounds=4))
    assert same(plain.method.state(), ours.method.state())


def test_there_is_no_momentum_before_the_first_round() -> None:
    assert World().run(FedCM(rounds=1)).method.momentum() is not None
    fresh = FedCM(rounds=1)
    fresh.gradient = {"w": torch.zeros(2)}
    assert fresh.momentum() is None


def test_wrong_alpha() -> None:
    with pytest.raises(ValueError, match=r"alpha is 0; it must be in \(0, 1\]"):
        FedCM(alpha=0)
