"""FedSAM against the formulas, its degenerate case and by hand."""

from __future__ import annotations

import pytest
from federation.tiny import same
from methods.plain import World, by_hand, close, sam

from fl_lightning.methods import FedAvg, FedSAM


def test_equals_a_plain_loop() -> None:
    world = World(decay=0.1)
    theta = world.theta
    for t in range(1, 6):
        theta = world.mean({i: world.local(t, i, theta, lambda y, g: sam(y, g, 0.2)) for i in world.cohort(t)})
    loop = world.run(FedSAM(rho=0.2, rounds=5))
    close(loop.method, theta)
    assert sum(row.get("round/gradients", 0) for row in loop.history) == world.gradients


def test_two_clients_by_hand() -> None:
    # Learning rate 0.5, rho 1. x = 0: from 1 to 1 - 0.5 (1 + 1) = 0; x = 4: to 1 + 0.5 (3 + 1) = 3; w = 1.5.
    # Then 1.5 - 0.5 * 2.5 = 0.25 and 1.5 + 0.5 * 3.5 = 3.25: w = 1.75.
    assert by_hand(FedSAM(rho=1.0, rounds=2)) == [1.5, 1.75]
    # Learning rate 2 jumps over: round 1 as FedAvg's, w = 3; x = 0: 3 - 2 * 4 = -5; x = 4: 3 + 2 * 2 = 7: w = 1.
    # Two steps: x = 0 from 1: -3, then -3 + 2 * 4 = 5; x = 4: 1 + 8 = 9, then 9 - 2 * 6 = -3: w = 1.
    assert by_hand(FedSAM(rho=1.0, rounds=1), lr=2.0, steps=2) == [1.0]


def test_no_radius_is_fedavg_bit_for_bit() -> None:
    plain, ours = World().run(FedAvg(rounds=4)), World().run(FedSAM(rho=0.0, rounds=4))
    assert same(plain.method.state(), ours.method.state())
    assert ours.history[1]["round/gradients"] == 2 * plain.history[1]["round/gradients"]


def test_wrong_radius() -> None:
    with pytest.raises(ValueError, match="rho is -1; it must be at least 0"):
        FedSAM(rho=-1)
