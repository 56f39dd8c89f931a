"""FedSMOO against the formulas, its degenerate case and by hand."""

from __future__ import annotations

import pytest
import torch
from federation.tiny import same
from methods.plain import World, by_hand, close

from fl_lightning.methods import FedDyn, FedSMOO


def test_equals_a_plain_loop() -> None:
    world, alpha, rho = World(), 0.5, 0.2
    zero = torch.zeros_like(world.theta)
    theta, h, s, own, dual = world.theta, zero, zero, [zero] * 3, [zero] * 3
    for t in range(1, 6):
        ends = {}
        for i in world.cohort(t):

            def direction(y: torch.Tensor, g: object, i: int = i, at: torch.Tensor = theta) -> torch.Tensor:
                ascent = g(y) - dual[i] - s  # type: ignore[operator]
                epsilon = rho * ascent / ascent.norm()
                dual[i] = dual[i] + epsilon - s
                return g(y + epsilon) - own[i] + alpha * (y - at)  # type: ignore[operator]

            ends[i] = world.local(t, i, theta, direction)
        own = [own[i] - alpha * (ends[i] - theta) if i in ends else own[i] for i in range(3)]
        h = h - alpha / 3 * sum(y - theta for y in ends.values())
        mean = world.mean({i: dual[i] for i in ends}, uniform=True)
        theta, s = world.mean(ends, uniform=True) - h / alpha, rho * mean / mean.norm()
    loop = world.run(FedSMOO(alpha=alpha, rho=rho, rounds=5))
    close(loop.method, theta)
    torch.testing.assert_close(World.flat(loop.method.perturbation), s, rtol=0, atol=1e-12)
    for i in range(3):
        if loop.memory.get(str(i)):
            torch.testing.assert_close(
                World.flat(loop.memory.get(str(i))["perturbation_dual"]), dual[i], rtol=0, atol=1e-12
            )


def test_two_clients_by_hand() -> None:
    # alpha 1, rho 1, one step of 0.5. Round 1: g = 1, -3, epsilon = 1, -1: gradients 2, -4: Delta = -1, 2;
    # mean y = 1.5, h = -0.5, w = 2; h_i = (1, -2); mu = (1, -1), their mean 0, so s = 0.
    # Round 2: g - mu = 1, -1: epsilon = 1, -1: gradients 3, -3; directions 3 - 1, -3 + 2: Delta = -1, 0.5.
    # mean y = 1.75, h = -0.5 + 0.25, w = 2.
    assert by_hand(FedSMOO(alpha=1.0, rho=1.0, rounds=2)) == [2.0, 2.0]
    assert by_hand(FedSMOO(alpha=1.0, rho=0.0, rounds=1), lr=0.25) == by_hand(FedDyn(alpha=1.0, rounds=1), lr=0.25)


def test_no_radius_is_feddyn_bit_for_bit() -> None:
    plain, ours = World().run(FedDyn(rounds=4)), World().run(FedSMOO(rho=0.0, rounds=4))
    assert same(plain.method.state(), ours.method.state())


def test_wrong_radius() -> None:
    with pytest.raises(ValueError, match="rho is -1; it must be at least 0"):
        FedSMOO(rho=-1)
