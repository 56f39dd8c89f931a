"""FedDyn against the formulas, by hand, and what it does in its first round."""

from __future__ import annotations

import pytest
import torch
from methods.plain import World, by_hand, close

from fl_lightning.methods import FedAvg, FedDyn


def test_equals_a_plain_loop() -> None:
    world, alpha = World(), 0.5
    theta, h, own = world.theta, torch.zeros_like(world.theta), [torch.zeros_like(world.theta)] * 3
    for t in range(1, 6):
        ends = {
            i: world.local(t, i, theta, lambda y, g, i=i, at=theta: g(y) - own[i] + alpha * (y - at))
            for i in world.cohort(t)
        }
        own = [own[i] - alpha * (ends[i] - theta) if i in ends else own[i] for i in range(3)]
        h = h - alpha / 3 * sum(y - theta for y in ends.values())
        theta = world.mean(ends, uniform=True) - h / alpha
    close(world.run(FedDyn(alpha=alpha, rounds=5)).method, theta)


@pytest.mark.parametrize("alpha", [0.01, 1e-9])
def test_the_first_round_moves_by_one_plus_the_share_of_clients(alpha: float) -> None:
    """theta_1 = theta_0 + (1 + |S| / N) Delta whatever alpha is: it does not reduce to FedAvg."""
    world = World()
    start = world.theta
    plain = World.flat(world.run(FedAvg(rounds=1, weighting="uniform")).method.parameters) - start
    ours = World.flat(world.run(FedDyn(alpha=alpha, rounds=1)).method.parameters) - start
    torch.testing.assert_close(ours, (1 + 2 / 3) * plain, rtol=0.01, atol=10 * alpha)


def test_two_clients_by_hand() -> None:
    # One step of 0.5, alpha 1. Round 1: Delta = -0.5, 1.5; h = -0.5 * 1.0 = -0.5; w = (0.5 + 2.5) / 2 + 0.5 = 2.
    # h_i = (0.5, -1.5). Round 2: directions 2 - 0.5, -2 + 1.5: Delta = -0.75, 0.25: mean y = 1.75, h = -0.5 + 0.25, w = 2.
    assert by_hand(FedDyn(alpha=1.0, rounds=2)) == [2.0, 2.0]


def test_wrong_alpha() -> None:
    with pytest.raises(ValueError, match="alpha is 0; it must be above 0"):
        FedDyn(alpha=0)
