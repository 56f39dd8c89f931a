"""Rules as pure functions: the same numbers eagerly, by hand and under vmap."""

from __future__ import annotations

import torch

from fl_lightning.rules.base import Composed, LocalRule, Tensors, tree_add_scaled, tree_map, tree_norm, tree_sub
from fl_lightning.rules.proximal import Proximal


def quadratic(params: Tensors) -> Tensors:
    """Gradient of 1/2 ||w||^2."""
    return dict(params)


def test_tree_operations() -> None:
    a = {"x": torch.tensor([3.0, 0.0]), "y": torch.tensor([[4.0]])}
    b = {"y": torch.tensor([[1.0]]), "x": torch.tensor([1.0, 2.0])}  # by name, not by position
    assert float(tree_norm(a)) == 5.0
    assert tree_sub(a, b)["y"].tolist() == [[3.0]]
    assert tree_add_scaled(a, b, 2.0)["x"].tolist() == [5.0, 4.0]
    assert list(tree_map(torch.neg, a)) == ["x", "y"]


def test_proximal_by_hand() -> None:
    start, now = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 1.0])}
    rule = Proximal(0.5)
    direction, carry = rule.direction(quadratic, now, rule.constants(start, {}), rule.initial_carry(start), 0)
    assert direction["w"].tolist() == [3.0 + 0.5 * 2.0, 1.0 - 0.5 * 1.0]
    assert carry == {}


def test_composed_rules_keep_their_own_constants_and_carry() -> None:
    start, now = {"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}
    rule = Composed((Proximal(0.5), LocalRule(), Proximal(0.25)))
    direction, carry = rule.direction(quadratic, now, rule.constants(start, {}), rule.initial_carry(start), 0)
    assert direction["w"].tolist() == [3.0 + 0.5 * 2 + 0.25 * 2]
    assert carry == [{}, {}, {}]


def test_rules_run_under_vmap() -> None:
    rule = Proximal(0.5)
    starts, nows = torch.randn(4, 3), torch.randn(4, 3)

    def one(start: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        return rule.direction(quadratic, {"w": now}, rule.constants({"w": start}, {}), {}, 0)[0]["w"]

    assert torch.equal(
        torch.func.vmap(one)(starts, nows), torch.stack([one(a, b) for a, b in zip(starts, nows, strict=True)])
    )
