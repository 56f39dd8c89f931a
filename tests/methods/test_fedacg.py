"""FedACG against the formulas, its degenerate case and by hand."""

from __future__ import annotations

import pytest
import torch
from federation.tiny import same
from methods.plain import World, by_hand, close

from fl_lightning.methods import FedACG, FedNesterov


def test_equals_a_plain_loop() -> None:
    world = World()
    theta, m = world.theta, torch.zeros_like(world.theta)
    for t in range(1, 6):
        phi = theta + 0.8 * m
        pull = lambda y, g, phi=phi: g(y) + 0.7 * (y - phi)  # noqa: E731
        m = 0.8 * m + world.mean({i: world.local(t, i, phi, pull) - phi for i in world.cohort(t)})
        theta = theta + m
    close(world.run(FedACG(momentum=0.8, beta=0.7, rounds=5)).method, theta)


def test_two_clients_by_hand() -> None:
    # Two steps of 0.5 with beta 1, momentum 0.5. From phi = 1, x = 0: 0.5, then 0.5 - 0.5 (0.5 - 0.5) = 0.5.
    # x = 4: 2.5, then 2.5 - 0.5 (-1.5 + 1.5) = 2.5. m = 0.5, w = 1.5. Then as FedNesterov's: the second step stands still.
    assert by_hand(FedACG(momentum=0.5, beta=1.0, rounds=2), steps=2) == [1.5, 1.875]


def test_no_pull_is_fednesterov_bit_for_bit() -> None:
    plain, ours = World().run(FedNesterov(rounds=4)), World().run(FedACG(beta=0.0, rounds=4))
    assert same(plain.method.state(), ours.method.state())


def test_wrong_beta() -> None:
    with pytest.raises(ValueError, match="beta is -1; it must be at least 0"):
        FedACG(beta=-1)
