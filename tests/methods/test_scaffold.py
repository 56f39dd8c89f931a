"""SCAFFOLD against the formulas, by hand, and its invariants."""

from __future__ import annotations

import torch
from federation.tiny import same
from methods.plain import World, by_hand, close

from fl_lightning.federation.sampling import UniformSampler
from fl_lightning.methods import SCAFFOLD, FedAvg
from fl_lightning.rules.correction import Correction


def test_equals_a_plain_loop_and_its_controls_average_to_the_servers() -> None:
    world, n = World(decay=0.05), 3
    theta, c, own = world.theta, torch.zeros_like(world.theta), [torch.zeros_like(world.theta)] * 3
    for t in range(1, 7):
        updates, changes = {}, []
        for i in world.cohort(t):
            updates[i] = world.local(t, i, theta, lambda y, g, i=i: g(y) - own[i] + c) - theta
            new = own[i] - c - updates[i] / (world.steps(i) * world.lr)
            changes.append((i, new))
        theta = theta + world.mean(updates)
        for i, new in changes:
            c = c + (new - own[i]) / n
            own[i] = new
    loop = world.run(SCAFFOLD(rounds=6))
    close(loop.method, theta)
    torch.testing.assert_close(World.flat(loop.method.control), c, rtol=0, atol=1e-12)
    held = [World.flat(loop.memory.get(key)["control"]) for key in "012" if loop.memory.get(key)]
    torch.testing.assert_close(sum(held) / n, World.flat(loop.method.control), rtol=0, atol=1e-12)
    assert any(bool(value.any()) for value in held)


def test_two_clients_by_hand() -> None:
    # One step of 0.5. Round 1 is FedAvg's: w = 1 - 0.5 (1 - 2) = 1.5; c_0 = g_0 = 1, c_1 = g_1 = -3, c = -1.
    # Round 2, each client steps along g - c_i + c: (1.5 - 1 - 1), (-2.5 + 3 - 1): -0.5 both, w = 1.75.
    assert by_hand(SCAFFOLD(rounds=2)) == [1.5, 1.75]
    # Two steps: x = 0: 1, .5, .25; x = 4: 1, 2.5, 3.25: w = 1.75, c_i = (0.75, -2.25), c = -0.75.
    # x = 0: g - c_0 + c = y - 1.5: 1.75 - .125 = 1.625, then 1.5625; x = 4: y - 4 + 1.5: 2.125, 2.3125. w = 1.9375.
    assert by_hand(SCAFFOLD(rounds=2), steps=2) == [1.75, 1.9375]


def test_alone_it_is_fedavg_in_the_first_round() -> None:
    plain, ours = World().run(FedAvg(rounds=1)), World().run(SCAFFOLD(rounds=1))
    assert same(plain.method.state(), ours.method.state())
    assert not same(World().run(FedAvg(rounds=3)).method.state(), World().run(SCAFFOLD(rounds=3)).method.state())


def test_the_correction_carries_gradient() -> None:
    now = {"w": torch.tensor([1.0, 2.0])}
    rule = Correction((("control", 1.0), ("memory/control", -1.0), ("absent", 5.0)))
    given = {"control": {"w": torch.tensor([3.0, 0.0])}, "memory/control": {"w": torch.tensor([1.0, 1.0])}}
    direction, _ = rule.direction(lambda p: dict(p), now, rule.constants(now, given), {}, 0)
    assert direction["w"].tolist() == [1 + 2, 2 - 1]


def test_a_client_that_sits_out_keeps_its_control() -> None:
    loop = World(per_round=1).run(SCAFFOLD(rounds=1))
    (key,) = UniformSampler(size=1).cohort(1, loop.info.clients, 0)
    kept = World.flat(loop.memory.get(key)["control"])
    longer = World(per_round=1)
    rounds = next(t for t in range(2, 30) if str(longer.cohort(t)[0]) == key) - 1
    assert rounds >= 2
    after = longer.run(SCAFFOLD(rounds=rounds))
    assert torch.equal(World.flat(after.memory.get(key)["control"]), kept)
