"""Constant corrections of the gradient: control variates, dual variables, a global momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fl_lightning.rules.base import LocalRule, Oracle, Tensors, tree_add_scaled, tree_map, tree_scale


@dataclass(frozen=True)
class Correction(LocalRule):
    """Adds sum_j factor_j * group_j to the gradient, outside gradient clipping.

    Attributes:
        terms: Pairs of a given group's name and its factor. A group that was not given counts as zero: a client has no
            control variate before its first round.
    """

    terms: tuple[tuple[str, float], ...] = ()

    def constants(self, start: Tensors, given: Mapping[str, Tensors]) -> dict[str, Any]:
        total = tree_map(lambda value: value.new_zeros(()).expand_as(value), start)
        for group, factor in self.terms:
            if group in given:
                total = tree_add_scaled(total, given[group], factor)
        return {"correction": total}

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        return tree_add_scaled(oracle(params), constants["correction"], 1.0), carry


@dataclass(frozen=True)
class ClientMomentum(LocalRule):
    """v = alpha * g + (1 - alpha) * M with the server's momentum M (FedCM: Xu et al., 2021, Algorithm 2).

    Attributes:
        alpha: Weight of the client's own gradient, in (0, 1]; 1 is the plain gradient.
        group: The given group that holds M, in units of a gradient.
    """

    alpha: float = 0.1
    group: str = "momentum"

    def constants(self, start: Tensors, given: Mapping[str, Tensors]) -> dict[str, Any]:
        return {"shared": tree_scale(given[self.group], 1 - self.alpha)}

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        return tree_add_scaled(constants["shared"], oracle(params), self.alpha), carry
