"""FedLESAM against the formulas, its degenerate case and by hand."""

from __future__ import annotations

import pytest
import torch
from federation.tiny import same
from methods.plain import World, by_hand, close

from fl_lightning.methods import FedAvg, FedLESAM


def test_equals_a_plain_loop() -> None:
    world, rho = World(), 0.3
    theta, old = world.theta, {}
    for t in range(1, 7):
        ends = {}
        for i in world.cohort(t):
            way = old[i] - theta if i in old else torch.zeros_like(theta)
            delta = rho * way / way.norm() if way.any() else way
            ends[i] = world.local(t, i, theta, lambda y, g, delta=delta: g(y + delta))
            old[i] = theta
        theta = world.mean(ends)
    loop = world.run(FedLESAM(rho=rho, rounds=6))
    close(loop.method, theta)
    assert loop.history[6]["round/gradients"] == sum(map(world.steps, world.cohort(6)))  # one backward a step


def test_two_clients_by_hand() -> None:
    # Round 1 is FedAvg's, w = 1.5. Round 2: theta_old - theta = -0.5, delta = -1: gradients at 0.5: Delta = -0.5 (0.5 - 2),
    # w = 2.25.
    assert by_hand(FedLESAM(rho=1.0, rounds=2)) == [1.5, 2.25]


def test_no_radius_is_fedavg_bit_for_bit() -> None:
    plain, ours = World().run(FedAvg(rounds=5)), World().run(FedLESAM(rho=0.0, rounds=5))
    assert same(plain.method.state(), ours.method.state())


def test_wrong_radius() -> None:
    with pytest.raises(ValueError, match="rho is -1; it must be at least 0"):
        FedLESAM(rho=-1)
