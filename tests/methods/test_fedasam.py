"""FedASAM against the formulas and by hand."""

from __future__ import annotations

import pytest
import torch
from federation.tiny import same
from methods.plain import World, by_hand, close

from fl_lightning.methods import FedASAM, FedAvg, FedSAM
from fl_lightning.methods.averaging import WeightAveraging
from fl_lightning.rules.sharpness import ASAM, SAM


def test_equals_a_plain_loop() -> None:
    world, rho, eta = World(), 0.7, 0.2
    theta, weights = world.theta, 12  # the first twelve are the weight matrix, the last three the bias

    def direction(y: torch.Tensor, gradient: object) -> torch.Tensor:
        g = gradient(y)  # type: ignore[operator]
        t = torch.cat([y[:weights].abs() + eta, torch.ones(3, dtype=y.dtype)])
        return gradient(y + rho * t * t * g / (t * g).norm())  # type: ignore[operator]

    for t in range(1, 5):
        theta = world.mean({i: world.local(t, i, theta, direction) for i in world.cohort(t)})
    close(world.run(FedASAM(rho=rho, eta=eta, rounds=4)).method, theta)


def test_two_clients_by_hand() -> None:
    # A vector is not scaled: FedSAM's numbers.
    assert by_hand(FedASAM(rho=1.0, rounds=2)) == [1.5, 1.75] == by_hand(FedSAM(rho=1.0, rounds=2))
    # A matrix of one weight w = 2 with gradient -3 and eta 0.5: T = 2.5, epsilon = rho * 6.25 * -3 / 7.5 = -2.5 rho.
    at = {"w": torch.tensor([[2.0]])}
    asked: list = []
    ASAM(0.4, 0.5).direction(lambda p: asked.append(p) or {"w": torch.tensor([[-3.0]])}, at, {}, {}, 0)  # type: ignore[func-returns-value]
    assert [float(p["w"]) for p in asked] == pytest.approx([2.0, 1.0])


def test_without_scaling_it_is_sam() -> None:
    """All parameters vectors, T = 1: the same points are asked for."""
    draw = torch.Generator().manual_seed(0)
    at = {n: torch.randn(4, generator=draw) for n in "ab"}
    gradient = {n: torch.randn(4, generator=draw) for n in "ab"}
    asked: list = []
    for rule in (ASAM(0.3, 0.2), SAM(0.3)):
        rule.direction(lambda p: asked.append(p) or gradient, at, {}, {}, 0)  # type: ignore[func-returns-value]
    torch.testing.assert_close(asked[1], asked[3])


def test_no_radius_is_fedavg_bit_for_bit() -> None:
    plain, ours = World().run(FedAvg(rounds=3)), World().run(FedASAM(rho=0.0, rounds=3))
    assert same(plain.method.state(), ours.method.state())


def test_averaged_weights_are_the_mean_of_the_models_at_the_ends_of_cycles() -> None:
    """Caldarola et al., section 5.2: from three quarters of the rounds on; eta falls linearly over a cycle to its end."""
    rounds, swa = 8, WeightAveraging(start=0.5, cycle=2, end=0.1)
    world, scale = World(), [1, 1, 1, 1, 0.55, 0.1, 0.55, 0.1]
    theta, ends = world.theta, []
    for t in range(1, rounds + 1):
        world.lr = 0.1 * scale[t - 1]
        theta = world.mean({i: world.local(t, i, theta, lambda y, gradient: gradient(y)) for i in world.cohort(t)})
        ends += [theta] if t in (6, 8) else []
    loop = World().run(FedASAM(rho=0.0, rounds=rounds, averaging=swa))
    close(loop.method, theta)
    evaluated = loop.method.evaluations()[""].start
    torch.testing.assert_close(world.flat(evaluated), (ends[0] + ends[1]) / 2)
    again = World().run(FedASAM(rho=0.0, rounds=4, averaging=swa))
    again.method.load_state_dict(loop.method.state_dict())
    assert same(again.method.state_dict(), loop.method.state_dict())


@pytest.mark.parametrize(
    ("argument", "allowed"), [({"start": 1.0}, "in .0, 1."), ({"cycle": 0}, "at least 1"), ({"end": 0.0}, "in .0, 1.")]
)
def test_wrong_averaging(argument: dict[str, float], allowed: str) -> None:
    with pytest.raises(ValueError, match=f"averaging.{next(iter(argument))} is .*; it must be {allowed}"):
        WeightAveraging(**argument)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rounds", "start", "left"), [(12, 0.75, 3), (9, 0.25, 7), (30, 0.75, 8)])
def test_averaging_without_a_whole_cycle_is_refused(rounds: int, start: float, left: int) -> None:
    with pytest.raises(
        ValueError, match=f"averaging.cycle is 10, and averaging.start {start} leaves {left} of {rounds}"
    ):
        FedASAM(rounds=rounds, averaging=WeightAveraging(start))
    FedASAM(rounds=rounds, averaging=WeightAveraging(start, cycle=left))


def test_cycles_begin_behind_the_share_of_the_rounds_rounded_down() -> None:
    positions = [WeightAveraging(start=0.3, cycle=2).position(t, 8) for t in range(1, 9)]  # 0.3 of 8 is 2.4
    assert positions == [0, 0, 1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("name", ["rho", "eta"])
def test_wrong_arguments(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is -1; it must be at least 0"):
        FedASAM(**{name: -1})
