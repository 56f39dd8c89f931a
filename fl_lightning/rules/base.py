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
    return tree_map(torch.sub, a, b)


def tree_add_scaled(a: Tensors, b: Tensors, factor: float | Tensor) -> dict[str, Tensor]:
    """a + factor * b by name."""
    return {name: value + factor * b[name] for name, value in a.items()}


def tree_norm(tree: Tensors) -> Tensor:
    """Euclidean norm over all tensors together, a scalar tensor."""
    return torch.sqrt(sum(value.pow(2).sum() for value in tree.values()))  # type: ignore[arg-type]


@dataclass(frozen=True)
class LocalRule:
    """The plain gradient; rules override what differs."""

    def constants(self, start: Tensors, given: Mapping[str, Tensors]) -> dict[str, Any]:
        """What stays fixed during a fit, from its starting parameters and the groups it was given."""
        return {}

    def initial_carry(self, start: Tensors) -> Any:
        """What the rule remembers from step to step."""
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


@dataclass(frozen=True)
class Composed(LocalRule):
    """Several rules in one step, the first innermost: each takes the direction of the one before it as its gradient."""

    rules: tuple[LocalRule, ...] = ()

    def constants(self, start: Tensors, given: Mapping[str, Tensors]) -> dict[str, Any]:
        return {str(i): rule.constants(start, given) for i, rule in enumerate(self.rules)}

    def initial_carry(self, start: Tensors) -> Any:
        return [rule.initial_carry(start) for rule in self.rules]

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
