"""FedGloSS against the formulas, its degenerate case and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federation.tiny import same
from methods.plain import World, by_hand, close, sam

from fl_lightning.methods import FedDyn, FedGloSS


@pytest.mark.parametrize("local_rho", [0.0, 0.2])
def test_equals_a_plain_loop(local_rho: float) -> None:
    world, beta = World(), 4.0
    zero = torch.zeros_like(world.theta)
    theta, sigma, last, own = world.theta, zero, zero, [zero] * 3
    for t in range(1, 6):
        rho = 0.1 + (t - 1) / 4 * 0.4  # from 0.1 to 0.5 in four rounds
        shifted = theta - rho * last / last.norm() if last.any() else theta
        ends = {}
        for i in world.cohort(t):
            ends[i] = world.local(
                t,
                i,
                shifted,
                lambda y, g, i=i, at=shifted: (sam(y, g, local_rho) if local_rho else g(y)) - own[i] + (y - at) / beta,
            )
        updates = {i: y - shifted for i, y in ends.items()}
        own = [own[i] - updates[i] / beta if i in updates else own[i] for i in range(3)]
        sigma = sigma - sum(updates.values()) / (beta * 3)
        last = world.mean(updates, uniform=True)
        theta = theta + last - beta * sigma
    method = FedGloSS(rho=0.5, local_rho=local_rho, beta=beta, warmup_rounds=4, warmup_start=0.1, rounds=5)
    loop = world.run(method)
    close(loop.method, theta)
    assert loop.history[5]["round/gradients"] == (2 if local_rho else 1) * sum(map(world.steps, world.cohort(5)))


def test_two_clients_by_hand() -> None:
    # beta 1, no local perturbation, rho 0.5: round 1 is FedDyn's: w = 2, Delta = -0.5, 1.5, sigma_i = (0.5, -1.5),
    # sigma = -0.5, mean Delta = 0.5.
    # Round 2 starts from 2 - 0.5: directions 1.5 - 0.5, -2.5 + 1.5: Delta = -0.5, 0.5: w = 2 + 0 + 0.5.
    assert by_hand(FedGloSS(rho=0.5, local_rho=0.0, beta=1.0, rounds=2)) == [2.0, 2.5]


def test_without_perturbations_it_is_feddyn() -> None:
    plain, ours = (World().run(m) for m in (FedDyn(alpha=0.25, rounds=4), FedGloSS(0.0, 0.0, beta=4.0, rounds=4)))
    assert same(plain.method.state(), ours.method.state())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rho": -1}, "rho is -1; it must be at least 0"),
        ({"local_rho": -1}, "local_rho is -1; it must be at least 0"),
        ({"warmup_rounds": -1}, "warmup_rounds is -1; it must be at least 0"),
        ({"beta": 0}, "beta is 0; it must be above 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FedGloSS(**arguments)
