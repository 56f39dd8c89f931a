"""Sharpness-aware rules: against an independent implementation, under vmap, and what each asks the model for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.optim.rule_optimizer import RuleOptimizer, rule_step
from fl_lightning.rules.base import Composed, LocalRule, over_norm, tree_add_scaled, tree_norm, tree_scale
from fl_lightning.rules.correction import ClientMomentum, Correction
from fl_lightning.rules.proximal import Proximal
from fl_lightning.rules.sharpness import ASAM, SAM, DualSAM, NesterovPerturbation, StalePerturbation

RULES: dict[str, LocalRule] = {
    "sam": SAM(0.1),
    "mixed": SAM(0.1, 0.6, normalise=False),
    "asam": ASAM(0.5, 0.2),
    "nsam": NesterovPerturbation(0.85, 0.05),
    "lesam": StalePerturbation(0.1, "control"),
    "dual": DualSAM(0.1, "perturbation", "memory/dual"),
    "momentum": ClientMomentum(0.3),
    "control": Composed((SAM(0.1), Correction((("control", 1.0), ("memory/dual", -1.0))), Proximal(0.1))),
}
GROUPS = ("momentum", "control", "perturbation", "memory/dual")


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias)).double()


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=draw).double(), torch.randint(3, (8,), generator=draw)) for _ in range(count)]


def train(make: Callable, bias: bool = True) -> list[Tensor]:
    model = network(bias)
    optimizer = make(model)
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if not isinstance(optimizer, RuleOptimizer):
            closure()
        optimizer.step(closure)
    return [p.detach() for p in model.parameters()]


def ours(rule: LocalRule, base: Callable) -> Callable:
    return lambda model: RuleOptimizer(base(list(model.parameters())), dict(model.named_parameters()), rule, {})


@pytest.mark.parametrize(
    ("rule", "options"),
    [(SAM(0.3), {}), (ASAM(0.3, 0.0), {"adaptive": True})],
    ids=["sam", "asam with eta 0, no vectors"],
)
@pytest.mark.parametrize("base", ["sgd", "adamw"])
def test_equals_pytorch_optimizers(rule: LocalRule, options: dict[str, Any], base: str) -> None:
    from pytorch_optimizer import SAM as TheirSAM

    kind, arguments = {
        "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    }[base]
    bias = not options
    mine = train(ours(rule, lambda p: kind(p, **arguments)), bias)
    theirs = train(lambda model: TheirSAM(model.parameters(), kind, rho=0.3, **options, **arguments), bias)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    plain = train(ours(LocalRule(), lambda p: kind(p, **arguments)), bias)
    assert max(float((a - b).abs().max()) for a, b in zip(mine, plain, strict=True)) > 1e-4


def quadratic(params: Any) -> Any:
    """Gradient of a quadratic with different curvatures."""
    return {"w": params["w"] * torch.tensor([3.0, 1.0, 0.5]), "b": params["b"] * 2}


def three_steps(rule: LocalRule, w: Tensor, b: Tensor, groups: Any) -> Any:
    """The weights after three steps of SGD, and what the rule hands back."""
    params = {"w": w, "b": b}
    constants, carry = rule.constants(params, groups), rule.initial_carry(params)
    for step in range(3):
        direction, carry = rule.direction(quadratic, params, constants, carry, step)
        params = tree_add_scaled(params, direction, -0.1)
    return params, rule.outcome(carry)


@pytest.mark.parametrize("name", RULES)
def test_runs_under_vmap(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    w, b = torch.randn(4, 2, 3, generator=draw), torch.randn(4, 2, generator=draw)
    shared = {g: {"w": torch.randn(2, 3, generator=draw), "b": torch.randn(2, generator=draw)} for g in GROUPS[:3]}
    own = {"w": torch.randn(4, 2, 3, generator=draw), "b": torch.randn(4, 2, generator=draw)}
    rule = RULES[name]

    def one(w: Tensor, b: Tensor, dual: Any) -> Any:
        return three_steps(rule, w, b, {**shared, "memory/dual": dual})

    together = torch.func.vmap(one)(w, b, own)
    for k in range(4):
        alone = one(w[k], b[k], {n: v[k] for n, v in own.items()})
        for kind in range(2):
            flat = [torch.utils._pytree.tree_leaves(found[kind]) for found in (alone, together)]
            for a, t in zip(*flat, strict=True):
                torch.testing.assert_close(t[k], a, rtol=0, atol=2e-6)
    assert rule.perturbs == (name not in ("momentum",))


@pytest.mark.parametrize("name", RULES)
def test_weights_and_statistics_are_left_alone(name: str) -> None:
    """Weights are byte-identical after the gradients, and are never written while a perturbed one is taken."""
    model = network()
    parameters = dict(model.named_parameters())
    before = {n: p.detach().clone() for n, p in parameters.items()}
    storage = {n: p.data_ptr() for n, p in parameters.items()}
    given = {g: {n: 0.1 * torch.randn_like(p) for n, p in parameters.items()} for g in GROUPS}
    rule = RULES[name]
    x, y = batches(1)[0]
    places, at_home, unvisited = [], [], []

    def closure() -> None:
        model.zero_grad()
        places.append({n: p.detach().clone() for n, p in parameters.items()})
        F.cross_entropy(model(x), y).backward()

    class Elsewhere:
        def __enter__(self) -> None:
            at_home.append(len(places))

        def __exit__(self, *_: Any) -> None:
            pass

    start = {n: p.detach() for n, p in parameters.items()}
    rule_step(
        parameters,
        closure,
        rule,
        rule.constants(start, given),
        rule.initial_carry(start),
        0,
        Elsewhere,  # type: ignore[arg-type]
        lambda: unvisited.append(True),
    )
    for n, p in parameters.items():
        assert torch.equal(p.detach(), before[n])
        assert p.data_ptr() == storage[n]
    moved = [i for i, place in enumerate(places) if any(not torch.equal(place[n], before[n]) for n in before)]
    assert at_home == moved  # exactly the perturbed passes are marked
    assert bool(unvisited) == (len(moved) == len(places))
    assert len(places) == (1 if name in ("nsam", "lesam", "momentum") else 2)


def test_norms_are_over_all_parameters_together() -> None:
    tree = {"a": torch.full((3, 4), 2.0), "b": torch.full((13,), 1e-3), "c": torch.tensor(5.0)}
    assert float(tree_norm(tree)) == pytest.approx(float(torch.cat([v.flatten() for v in tree.values()]).norm()))
    assert float(tree_norm(tree_scale(tree, over_norm(0.05, tree)))) == pytest.approx(0.05, abs=1e-6)
    assert float(over_norm(0.05, {"a": torch.zeros(3)})) == 0.0
    asked: list = []
    SAM(0.1).direction(lambda p: asked.append(p) or tree, tree, {}, {}, 0)  # type: ignore[func-returns-value]
    step = tree_add_scaled(asked[1], asked[0], -1.0)
    assert float(tree_norm(step)) == pytest.approx(0.1, abs=1e-6)
    cosine = sum(float((step[n] * tree[n]).sum()) for n in tree) / (0.1 * float(tree_norm(tree)))
    assert cosine == pytest.approx(1.0, abs=1e-5)


def test_the_direction_is_of_the_last_gradient_alone() -> None:
    """SAM's first gradient leaves no residue."""
    at = {"w": torch.tensor([3.0, 4.0])}
    direction, _ = SAM(0.5).direction(lambda p: {"w": p["w"].clone()}, at, {}, {}, 0)
    torch.testing.assert_close(direction["w"], at["w"] * 1.1)
    zero, _ = SAM(0.5).direction(lambda p: {"w": torch.zeros(2)}, at, {}, {}, 0)
    assert zero["w"].tolist() == [0, 0]
