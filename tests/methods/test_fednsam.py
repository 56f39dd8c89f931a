"""FedNSAM in both forms, against the formulas, against its degenerate cases and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from federation.tiny import federation, normalised, numbers, same, sgd
from methods.plain import World, by_hand, close, sam

from fl_lightning.federation.sampling import UniformSampler
from fl_lightning.methods import FedAvg, FedNesterov, FedNSAM, FedSAM
from fl_lightning.rules.base import tree_norm
from fl_lightning.rules.sharpness import NesterovPerturbation

FORMS = ("paper", "local")


def form_a(world: World, rounds: int, lam: float, rho: float) -> list[torch.Tensor]:
    """Section 2.1 of the specification: one gradient a step, at y + lam m - rho m / ||m||."""
    theta, m, found = world.theta, torch.zeros_like(world.theta), []
    for t in range(1, rounds + 1):
        e = lam * m - (rho * m / m.norm() if m.any() else 0)
        ends = {i: world.local(t, i, theta, lambda y, g, e=e: g(y + e)) for i in world.cohort(t)}
        m = lam * m + world.mean({i: y - theta for i, y in ends.items()})
        theta = theta + m
        found.append(theta)
    return found


def form_b(world: World, rounds: int, lam: float, rho: float) -> list[torch.Tensor]:
    """Section 2.2: from the look-ahead, local SAM."""
    theta, m, found = world.theta, torch.zeros_like(world.theta), []
    for t in range(1, rounds + 1):
        phi = theta + lam * m
        ends = {i: world.local(t, i, phi, lambda y, g: sam(y, g, rho)) for i in world.cohort(t)}
        m = lam * m + world.mean({i: y - phi for i, y in ends.items()})
        theta = theta + m
        found.append(theta)
    return found


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("form", "reference"), [("paper", form_a), ("local", form_b)])
def test_equals_a_plain_loop(form: Any, reference: Callable, decay: float) -> None:
    world = World(decay=decay)
    loop = world.run(FedNSAM(form=form, momentum=0.8, rho=0.1, rounds=5))
    expected = reference(world, 5, 0.8, 0.1)
    close(loop.method, expected[-1])
    torch.testing.assert_close(World.flat(loop.method.momentum()), expected[-1] - expected[-2], rtol=0, atol=1e-12)
    assert loop.history[-1]["round/gradients"] == (1 if form == "paper" else 2) * sum(map(world.steps, world.cohort(5)))


def test_two_clients_by_hand() -> None:
    # Gradients are w and w - 4. One step of 0.5: the mean update from a point w is -0.5 (w - 2), w offset where it is taken.
    # Form A, lambda 0.5, rho 0.25. Round 1: m = 0, so m = 0.5, w = 1.5.
    # Round 2: e = 0.25 - 0.25 = 0: Delta = 0.25, m = 0.25 + 0.25 = 0.5, w = 2.
    # Round 3: e = 0 again: Delta = 0, m = 0.25, w = 2.25. Round 4: e = 0.125 - 0.25: Delta = -0.5 (2.125 - 2), m = 0.0625.
    assert by_hand(FedNSAM(rounds=4, momentum=0.5, rho=0.25)) == [1.5, 2.0, 2.25, 2.3125]
    # Form B: local gradients are pushed outwards by rho: g + rho sign(g); the two clients' pushes cancel between 0 and 4.
    # Round 1: m = 0.5, w = 1.5. Round 2: from 1.75: Delta = 0.125, m = 0.375, w = 1.875.
    # Round 3: from 2.0625: Delta = -0.03125, m = 0.15625, w = 2.03125.
    assert by_hand(FedNSAM("local", rounds=3, momentum=0.5, rho=0.25)) == [1.5, 1.875, 2.03125]
    # Beyond both optima they do not cancel: learning rate 2 puts round 1 at m = 2, w = 3, round 2 from 5 with lambda 1 - but
    # lambda < 1, so 0.75: from 4.5: gradients 4.5 + 1 and 0.5 + 1, Delta = -2 * 3.5 = -7, m = 1.5 - 7.
    assert by_hand(FedNSAM("local", rounds=2, momentum=0.75, rho=1.0), lr=2.0) == [3.0, -2.5]


@pytest.mark.parametrize("form", FORMS)
def test_without_momentum_and_radius_it_is_fedavg_bit_for_bit(form: Any) -> None:
    plain, ours = World().run(FedAvg(rounds=4)), World().run(FedNSAM(form=form, momentum=0.0, rho=0.0, rounds=4))
    assert same(plain.method.state(), ours.method.state())
    without = [{k: v for k, v in row.items() if not k.startswith(("comm/", "round/"))} for row in numbers(ours)]
    assert without == [
        {k: v for k, v in row.items() if not k.startswith(("comm/", "round/"))} for row in numbers(plain)
    ]


def test_degenerate_forms() -> None:
    a, b = (World().run(FedNSAM(form=form, rho=0.0, rounds=4)) for form in FORMS)
    close(a.method, World.flat(b.method.parameters))
    close(b.method, World.flat(World().run(FedNesterov(rounds=4)).method.parameters), 0.0)
    no_momentum = World().run(FedNSAM(form="local", momentum=0.0, rho=0.1, rounds=4))
    assert same(no_momentum.method.state(), World().run(FedSAM(rho=0.1, rounds=4)).method.state())


def test_the_first_round_knows_no_momentum() -> None:
    first = World().run(FedNSAM(rho=0.3, rounds=1)).method.state()
    assert same(first, World().run(FedAvg(rounds=1)).method.state())
    sharp = World().run(FedNSAM("local", rho=0.3, rounds=1)).method.state()
    assert same(sharp, World().run(FedSAM(rho=0.3, rounds=1)).method.state())
    assert not same(first, sharp)


def test_per_step_offset_and_shifted_start_agree() -> None:
    """Form A is plain SGD from phi = theta + (lambda - rho / ||m||) m, without weight decay."""
    world, lam, rho = World(), 0.8, 0.05
    theta, m = world.theta, torch.zeros_like(world.theta)
    for t in range(1, 31):
        phi = theta + (lam - (rho / m.norm() if m.any() else 0)) * m
        ends = {i: world.local(t, i, phi, lambda y, g: g(y)) - phi for i in world.cohort(t)}
        m = lam * m + world.mean(ends)
        theta = theta + m
    close(world.run(FedNSAM(momentum=lam, rho=rho, rounds=30)).method, theta)


@pytest.mark.parametrize("lam", [0.5, 0.9])
def test_one_client_is_stock_nesterov(lam: float) -> None:
    """The broadcast points of one client with one full batch a round are torch's Nesterov SGD."""
    world = World(sizes=(12,), per_round=1)
    start, rows = world.theta.clone().requires_grad_(), torch.arange(12)
    stock = torch.optim.SGD([start], lr=0.1, momentum=lam, nesterov=True)
    loop = federation(
        FedNSAM(momentum=lam, rho=0.0, rounds=8),
        (12,),
        optimizer=sgd(0.1),
        batch_size=12,
        sampler=UniformSampler(size=1),
    )
    loop.fit()
    for _ in range(8):
        stock.zero_grad()
        world.loss(start, rows).backward()
        stock.step()
    torch.testing.assert_close(World.flat(loop.method.ahead()), start.detach(), rtol=0, atol=1e-12)


def test_the_perturbation_has_its_radius_and_points_uphill() -> None:
    momentum = {"a": torch.randn(3, 4, dtype=torch.float64), "b": torch.randn(5, dtype=torch.float64) * 1e-6}
    offset = NesterovPerturbation(0.0, 0.05).offset(momentum, {"momentum": momentum})
    assert float(tree_norm(offset)) == pytest.approx(0.05, abs=1e-12)
    ours, down = World.flat(offset), World.flat(momentum)
    assert float(torch.cosine_similarity(ours, down, dim=0)) == pytest.approx(-1)
    # With m along minus the gradient of a convex quadratic, the loss rises.
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    scale = torch.tensor([3.0, 1.0, 0.2], dtype=torch.float64)
    uphill = NesterovPerturbation(0.0, 0.05).offset({"w": w}, {"momentum": {"w": -scale * w}})["w"]
    assert float((scale * (w + uphill) ** 2).sum()) > float((scale * w**2).sum())


@pytest.mark.parametrize("form", FORMS)
def test_momentum_leaves_buffers_alone_and_statistics_are_of_unperturbed_weights(form: Any) -> None:
    options: dict[str, Any] = {"sizes": (6, 12, 6), "batch_size": 3, "network": normalised}
    plain, still = federation(FedAvg(rounds=1), **options), federation(FedNSAM(form=form, rounds=1, rho=0.3), **options)
    plain.fit()
    still.fit()
    if form == "paper":  # no momentum yet: the same steps, so the same statistics, taken in a forward pass of their own
        assert same(plain.method.buffers, still.method.buffers)
    ours = federation(FedNSAM(form=form, rounds=6, momentum=0.95, rho=0.3), **options)
    ours.fit()
    for name, value in ours.method.buffers.items():
        if name.endswith("running_var"):
            assert bool((value > 0).all())
        if name.endswith("num_batches_tracked"):
            assert value.dtype == torch.int64
            assert int(value) == 18  # 2, 4, 2 batches weighted by 6, 12, 6 examples, six rounds: once a batch
    assert ours.method.momentum().keys() == ours.method.parameters.keys()


def test_momentum_of_a_constant_update_is_a_geometric_series() -> None:
    method = FedNSAM(momentum=0.5, rounds=3)
    federation(method).fit()  # for a built server
    before = {name: value.detach().clone() for name, value in method.parameters.items()}
    method.optimizer.state.clear()
    one = {name: torch.ones_like(value) for name, value in before.items()}
    for expected in (1.0, 1.5, 1.75):
        method.step(one)
        assert {float(v) for value in method.momentum().values() for v in value.flatten()} == {expected}
    for name, value in method.parameters.items():
        torch.testing.assert_close(value.detach(), before[name] + 4.25, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"form": "both"}, "form is 'both'; allowed: 'paper', 'local'"),
        ({"momentum": 1.0}, r"momentum is 1.0; it must be in \[0, 1\)"),
        ({"rho": -0.1}, "rho is -0.1; it must be at least 0"),
        ({"rho": 0.1, "momentum": 0.0}, "the perturbation is along the momentum"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FedNSAM(**arguments)
