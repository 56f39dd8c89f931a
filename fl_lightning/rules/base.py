"""Local rules: how a step is taken, as a pure function of parameters, gradient oracle and messages.

A rule says which direction an optimizer gets to see in place of the gradient. It is written once, over dictionaries of
tensors, and run by every loop: inside `RuleOptimizer` under a Lightning Trainer, or under `torch.func.vmap`. So rules
hold no state (what changes is the carry), do not branch in Python on tensor values, and use the operations of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Oracle = Callable[[Tensors], Tensors]


def tree_map(function: Callable[..., Tensor], *trees: Tensors) -> dict[str, Tensor]:
    """Apply a function to the tensors of the same name."""
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


def tree_sub(a: Tensors, b: Tensors) -> dict[str, Tensor]:
    """a - b by name."""
    return tree_add_scaled(a, b, -1.0)


def tree_scale(a: Tensors, factor: float | Tensor) -> dict[str, Tensor]:
    """factor * a by name; a tensor for a factor is a scalar tensor."""
    if _batched(a):
        return {name: value * factor for name, value in a.items()}
    return dict(zip(a, torch._foreach_mul(list(a.values()), factor), strict=True))


def tree_add_scaled(a: Tensors, b: Tensors, factor: float | Tensor) -> dict[str, Tensor]:
    """a + factor * b by name; a tensor for a factor is a scalar tensor."""
    if isinstance(factor, Tensor):
        scaled = tree_scale(b, factor)
        if _batched(a) or _batched(scaled):
            return {name: value + scaled[name] for name, value in a.items()}
        torch._foreach_add_([scaled[name] for name in a], list(a.values()))
        return {name: scaled[name] for name in a}
    if _batched(a) or _batched(b):
        return {name: torch.add(value, b[name], alpha=factor) for name, value in a.items()}
    return dict(zip(a, torch._foreach_add(list(a.values()), [b[name] for name in a], alpha=factor), strict=True))


def tree_norm(tree: Tensors) -> Tensor:
    """Euclidean norm over all tensors together, a scalar tensor."""
    if _batched(tree):
        return torch.sqrt(sum(value.pow(2).sum() for value in tree.values()))  # type: ignore[arg-type]
    return torch.stack(torch._foreach_norm(list(tree.values()))).norm()


def over_norm(radius: float, tree: Tensors) -> Tensor:
    """radius / ||tree||, a scalar tensor: the factor that gives ``tree`` the norm ``radius``; 0 where ``tree`` is zero."""
    norm = tree_norm(tree)
    return torch.where(norm > 0, radius / norm, torch.zeros_like(norm))


def _batched(tree: Tensors) -> bool:
    """Whether ``torch.func`` wraps a tensor of the tree: the ``_foreach`` operations know no ``vmap``."""
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tree.values()))


@dataclass(frozen=True)
class LocalRule:
    """The plain gradient; rules override what differs."""

    @property
    def perturbs(self) -> bool:
        """Whether gradients are taken at other parameters than the current ones."""
        return False

    def constants(self, start: Tensors, given: Mapping[str, Tensors]) -> dict[str, Any]:
        """What stays fixed during a fit, from its starting parameters and the groups it was given."""
        return {}

    def initial_carry(self, start: Tensors) -> Any:
        """What the rule remembers from step to step."""
        return {}

    def outcome(self, carry: Any) -> dict[str, Tensors]:
        """Groups of tensors to hand back with the fit's result, from the last carry."""
        return {}

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        """The direction handed to the optimizer as if it were the gradient.

        Args:
            oracle: Gradient of this batch's loss at any parameters (one forward and backward per call).
            params: Current parameters; do not change them in place.
            constants: From `constants`.
            carry: From the last step.
            step: Steps taken before this one in this fit.
        """
        return oracle(params), carry


def compose(rules: tuple[LocalRule, ...]) -> LocalRule:
    """Rules as one, the first innermost; none are the plain gradient."""
    return rules[0] if len(rules) == 1 else Composed(rules) if rules else LocalRule()


@dataclass(frozen=True)
class Composed(LocalRule):
    """Several rules in one step, the first innermost: each takes the direction of the one before it as its gradient."""

    rules: tuple[LocalRule, ...] = ()

    @property
    def perturbs(self) -> bool:
        return any(rule.perturbs for rule in self.rules)

    def constants(self, start: Tensors, given: Mapping[str, Tensors]) -> dict[str, Any]:
        return {str(i): rule.constants(start, given) for i, rule in enumerate(self.rules)}

    def initial_carry(self, start: Tensors) -> Any:
        return [rule.initial_carry(start) for rule in self.rules]

    def outcome(self, carry: Any) -> dict[str, Tensors]:
        return {k: v for rule, own in zip(self.rules, carry, strict=True) for k, v in rule.outcome(own).items()}

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        new = list(carry)

        def nested(depth: int) -> Oracle:
            if depth < 0:
                return oracle
            inner = nested(depth - 1)

            def at(p: Tensors) -> Tensors:
                value, new[depth] = self.rules[depth].direction(inner, p, constants[str(depth)], carry[depth], step)
                return value

            return at

        return nested(len(self.rules) - 1)(params), new
