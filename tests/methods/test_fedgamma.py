"""FedGAMMA against the formulas, its degenerate case and by hand."""

from __future__ import annotations

import pytest
import torch
from federation.tiny import same
from methods.plain import World, by_hand, close, sam

from fl_lightning.methods import SCAFFOLD, FedGAMMA


def test_equals_a_plain_loop() -> None:
    world = World()
    theta, c, own = world.theta, torch.zeros_like(world.theta), [torch.zeros_like(world.theta)] * 3
    for t in range(1, 6):
        updates = {
            i: world.local(t, i, theta, lambda y, g, i=i: sam(y, g, 0.2) - own[i] + c) - theta for i in world.cohort(t)
        }
        new = {i: own[i] - c - update / (world.steps(i) * world.lr) for i, update in updates.items()}
        theta, c = theta + world.mean(updates), c + sum(new[i] - own[i] for i in new) / 3
        own = [new.get(i, own[i]) for i in range(3)]
    close(world.run(FedGAMMA(rho=0.2, rounds=5)).method, theta)


def test_two_clients_by_hand() -> None:
    # SCAFFOLD's numbers with gradients g + rho sign(g), rho 0.25. Round 1: 1.25 and -3.25: w = 1.5, c_i = (1.25, -3.25),
    # c = -1. Round 2: 1.75 - 1.25 - 1 and -2.75 + 3.25 - 1: -0.5 both.
    assert by_hand(FedGAMMA(rho=0.25, rounds=2)) == [1.5, 1.75]


def test_no_radius_is_scaffold_bit_for_bit() -> None:
    plain, ours = World().run(SCAFFOLD(rounds=4)), World().run(FedGAMMA(rho=0.0, rounds=4))
    assert same(plain.method.state(), ours.method.state())


def test_wrong_radius() -> None:
    with pytest.raises(ValueError, match="rho is -1; it must be at least 0"):
        FedGAMMA(rho=-1)
