"""The proximal term of FedProx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fl_lightning.rules.base import LocalRule, Oracle, Tensors, tree_add_scaled, tree_sub


@dataclass(frozen=True)
class Proximal(LocalRule):
    """Adds the gradient of (mu / 2) ||w - w_start||^2 (Li et al., 2020, Eq. 2), outside gradient clipping.

    Attributes:
        mu: Strength, at least 0.
    """

    mu: float = 0.01

    def constants(self, start: Tensors, given: Mapping[str, Tensors]) -> dict[str, Any]:
        return {"start": start}

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        return tree_add_scaled(oracle(params), tree_sub(params, constants["start"]), self.mu), carry
