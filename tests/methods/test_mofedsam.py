"""MoFedSAM against the formulas, its degenerate cases and by hand."""

from __future__ import annotations

import pytest
import torch
from federation.tiny import same
from methods.plain import World, by_hand, close, sam

from fl_lightning.methods import FedCM, FedSAM, MoFedSAM


def test_equals_a_plain_loop() -> None:
    world, alpha = World(), 0.3
    theta, m = world.theta, torch.zeros_like(world.theta)
    for t in range(1, 6):
        cohort = world.cohort(t)
        updates = {
            i: world.local(t, i, theta, lambda y, g: alpha * sam(y, g, 0.2) + (1 - alpha) * m) - theta for i in cohort
        }
        m = -world.mean(updates) / (world.lr * world.mean({i: float(world.steps(i)) for i in cohort}))
        theta = theta + world.mean(updates)
    close(world.run(MoFedSAM(alpha=alpha, rho=0.2, rounds=5)).method, theta)


def test_two_clients_by_hand() -> None:
    # FedCM's numbers: between the two optima the perturbations cancel in the mean.
    assert by_hand(MoFedSAM(alpha=0.5, rho=0.25, rounds=2)) == [1.25, 1.5625]
    # At learning rate 4 too. Round 1: w = 1 - 4 * 0.5 (1 - 2) = 3, M = -0.5. Round 2: 0.5 * 1 - 0.25 = 0.25: w = 2.
    assert by_hand(MoFedSAM(alpha=0.5, rho=0.25, rounds=2), lr=4.0) == [3.0, 2.0]


def test_degenerate_cases_bit_for_bit() -> None:
    assert same(
        World().run(FedSAM(rho=0.2, rounds=4)).method.state(),
        World().run(MoFedSAM(alpha=1.0, rho=0.2, rounds=4)).method.state(),
    )
    assert same(
        World().run(FedCM(alpha=0.3, rounds=4)).method.state(),
        World().run(MoFedSAM(alpha=0.3, rho=0.0, rounds=4)).method.state(),
    )


def test_wrong_radius() -> None:
    with pytest.raises(ValueError, match="rho is -1; it must be at least 0"):
        MoFedSAM(rho=-1)
