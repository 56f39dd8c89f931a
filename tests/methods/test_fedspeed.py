"""FedSpeed against the formulas and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federation.tiny import same
from methods.plain import World, by_hand, close

from fl_lightning.methods import FedProx, FedSpeed


@pytest.mark.parametrize("normalise", [True, False])
def test_equals_a_plain_loop(normalise: bool) -> None:
    world, rho, alpha, lam = World(), 0.2, 0.6, 2.0
    theta, own = world.theta, [torch.zeros_like(world.theta)] * 3
    for t in range(1, 6):
        sent = {}
        for i in world.cohort(t):

            def direction(y: torch.Tensor, gradient: Any, i: int = i, at: torch.Tensor = theta) -> torch.Tensor:
                g = gradient(y)
                extra = gradient(y + rho * (g / g.norm() if normalise else g))
                return (1 - alpha) * g + alpha * extra - own[i] + (y - at) / lam

            y = world.local(t, i, theta, direction)
            own[i] = own[i] - (y - theta) / lam
            sent[i] = y - lam * own[i]
        theta = world.mean(sent)
    loop = world.run(FedSpeed(rho, alpha, lam, normalise, rounds=5))
    close(loop.method, theta)
    assert loop.history[-1]["server/client_drift"] > 0


def test_two_clients_by_hand() -> None:
    # lambda 2, alpha 1, rho 1, one step of 0.5. Round 1: gradients 2, -4: y = 0, 3; p = (0.5, -1); sent 0 - 1, 3 + 2: w = 2.
    # Round 2: gradients 3, -3, minus p: 2.5, -2: y = 0.75, 3; p = 0.5 + 0.625, -1 - 0.5; sent 0.75 - 2.25, 3 + 3: w = 2.25.
    assert by_hand(FedSpeed(rho=1.0, alpha=1.0, prox=2.0, rounds=2)) == [2.0, 2.25]


def test_the_first_round_is_fedprox_and_as_much_again() -> None:
    """p = -Delta / lambda, so what is sent is theta + 2 Delta, with Delta FedProx's for mu = 1 / lambda."""
    world = World()
    prox = World.flat(world.run(FedProx(mu=0.5, rounds=1)).method.parameters) - world.theta
    close(world.run(FedSpeed(rho=0.0, prox=2.0, rounds=1)).method, world.theta + 2 * prox)
    plain = World().run(FedSpeed(rho=0.0, alpha=0.0, rounds=3)).method  # without a radius both gradients are one
    assert same(plain.state(), World().run(FedSpeed(rho=0.0, alpha=1.0, rounds=3)).method.state())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rho": -1}, "rho is -1; it must be at least 0"),
        ({"alpha": 2}, r"alpha is 2; it must be in \[0, 1\]"),
        ({"prox": 0}, "prox is 0; it must be above 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FedSpeed(**arguments)
