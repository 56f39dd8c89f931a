"""FedNesterov against the formulas, against FedAvg and FedAvgM, and by hand."""

from __future__ import annotations

import pytest
import torch
from federation.tiny import same, sgd
from methods.plain import World, by_hand, close

from fl_lightning.methods import FedAvg, FedNesterov


def test_equals_a_plain_loop() -> None:
    world = World(decay=0.1)
    theta, m = world.theta, torch.zeros_like(world.theta)
    for t in range(1, 6):
        phi = theta + 0.8 * m
        m = 0.8 * m + world.mean({i: world.local(t, i, phi, lambda y, g: g(y)) - phi for i in world.cohort(t)})
        theta = theta + m
    close(world.run(FedNesterov(momentum=0.8, rounds=5)).method, theta)


def test_two_clients_by_hand() -> None:
    # The mean update from phi is -0.5 (phi - 2). m = 0.5, w = 1.5; phi = 1.75, m = 0.25 + 0.125, w = 1.875;
    # phi = 2.0625, m = 0.1875 - 0.03125, w = 2.03125.
    assert by_hand(FedNesterov(momentum=0.5, rounds=3)) == [1.5, 1.875, 2.03125]
    # Without the look-ahead (FedAvgM): w = 1.5; m = 0.25 + 0.25, w = 2; m = 0.25, w = 2.25.
    heavy = FedAvg(rounds=3, server_optimizer=sgd(1.0, momentum=0.5))
    assert by_hand(heavy) == [1.5, 2.0, 2.25]
    assert float(heavy.momentum()["w"]) == 0.25


def test_no_momentum_is_fedavg_bit_for_bit() -> None:
    plain, ours = World().run(FedAvg(rounds=4)), World().run(FedNesterov(momentum=0.0, rounds=4))
    assert same(plain.method.state(), ours.method.state())
    assert plain.method.momentum() is None


def test_personal_models_are_judged_at_theta_not_at_the_look_ahead() -> None:
    method = World().run(FedNesterov(momentum=0.8, rounds=3)).method
    assert same(dict(method.judged(3).tensors["model"]), {n: p.detach() for n, p in method.parameters.items()})
    assert not same(dict(method.broadcast(3).tensors["model"]), dict(method.judged(3).tensors["model"]))


def test_wrong_momentum() -> None:
    with pytest.raises(ValueError, match=r"momentum is -0.1; it must be in \[0, 1\)"):
        FedNesterov(momentum=-0.1)
