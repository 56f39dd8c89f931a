"""Gradients at perturbed weights: the sharpness-aware family.

Norms are over all parameters together. Every perturbed gradient is of the same batch and the same dropout mask as the plain
one, and leaves no trace: whoever runs a rule restores the weights bit for bit and keeps BatchNorm's statistics out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fl_lightning.rules.base import (
    LocalRule,
    Oracle,
    Tensors,
    over_norm,
    tree_add_scaled,
    tree_map,
    tree_scale,
    tree_sub,
)


@dataclass(frozen=True)
class PerturbingRule(LocalRule):
    """A rule that takes gradients at other parameters than the current ones."""

    @property
    def perturbs(self) -> bool:
        return True


@dataclass(frozen=True)
class SAM(PerturbingRule):
    """The gradient at w + rho g / ||g|| (Foret et al., 2021, Algorithm 1). Two backward passes.

    Attributes:
        rho: Radius, at least 0; 0 is the plain gradient, at the price of two.
        mix: Share of the perturbed gradient in the direction, the rest is the plain one's; in [0, 1].
        normalise: Perturb by rho g instead where false (the extra-gradient of FedSpeed).
    """

    rho: float = 0.05
    mix: float = 1.0
    normalise: bool = True

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        gradient = oracle(params)
        radius = over_norm(self.rho, gradient) if self.normalise else self.rho
        perturbed = oracle(tree_add_scaled(params, gradient, radius))
        if self.mix < 1:
            perturbed = tree_add_scaled(tree_scale(gradient, 1 - self.mix), perturbed, self.mix)
        return perturbed, carry


@dataclass(frozen=True)
class ASAM(PerturbingRule):
    """The gradient at w + rho T^2 g / ||T g||, T = |w| + eta (Kwon et al., 2021, Eq. 14). Two backward passes.

    Attributes:
        rho: Radius in the scaled space, at least 0.
        eta: Added to |w|, at least 0.
        scale_biases: Scale vectors (biases, norm layers) too. By default T = 1 there, as in the code of Caldarola et al.
            (2022).
    """

    rho: float = 0.7
    eta: float = 0.2
    scale_biases: bool = False

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        gradient = oracle(params)
        scale = {
            name: value.abs() + self.eta if value.ndim > 1 or self.scale_biases else torch.ones_like(value)
            for name, value in params.items()
        }
        scaled = tree_map(torch.mul, scale, gradient)
        return oracle(tree_add_scaled(params, tree_map(torch.mul, scale, scaled), over_norm(self.rho, scaled))), carry


@dataclass(frozen=True)
class Offset(PerturbingRule):
    """The gradient at w + e, with e fixed over the fit. One backward pass."""

    def offset(self, start: Tensors, given: Mapping[str, Tensors]) -> Tensors:
        """e, by parameter."""
        return tree_map(torch.zeros_like, start)

    def constants(self, start: Tensors, given: Mapping[str, Tensors]) -> dict[str, Any]:
        return {"offset": self.offset(start, given)}

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        return oracle(tree_add_scaled(params, constants["offset"], 1.0)), carry


@dataclass(frozen=True)
class NesterovPerturbation(Offset):
    """NSAM: e = look_ahead * m - rho * m / ||m|| with the global momentum m (FedNSAM, form A of the paper).

    m is a displacement downhill: the first term looks ahead along it, the second climbs against it, as an estimate of the
    global ascent direction. Both are along m, so e = (look_ahead - rho / ||m||) m, and a large rho looks behind.

    Attributes:
        look_ahead: Factor of m, at least 0.
        rho: Radius of the perturbation, at least 0.
        group: The given group that holds m, in units of the weights.
    """

    look_ahead: float = 0.85
    rho: float = 0.05
    group: str = "momentum"

    def offset(self, start: Tensors, given: Mapping[str, Tensors]) -> Tensors:
        momentum = given[self.group]
        return tree_scale(momentum, self.look_ahead - over_norm(self.rho, momentum))


@dataclass(frozen=True)
class StalePerturbation(Offset):
    """e = rho (w_old - w_start) / ||w_old - w_start|| (FedLESAM: Fan et al., 2024, Eq. 7); zero without w_old.

    Attributes:
        rho: Radius, at least 0.
        group: The given group that holds w_old: the global model that this client last started from.
    """

    rho: float = 0.1
    group: str = "memory/model"

    def offset(self, start: Tensors, given: Mapping[str, Tensors]) -> Tensors:
        if self.group not in given:
            return super().offset(start, given)
        ascent = tree_sub(given[self.group], start)
        return tree_scale(ascent, over_norm(self.rho, ascent))


@dataclass(frozen=True)
class DualSAM(PerturbingRule):
    """SAM whose perturbation is tied to a global one by a dual variable (FedSMOO: Sun et al., 2023, Algorithm 1).

    epsilon = rho (g - mu - s) / ||g - mu - s||, the gradient at w + epsilon, then mu <- mu + epsilon - s. Two backward
    passes. What mu changed by is handed back as group "dual_change".

    Attributes:
        rho: Radius, at least 0.
        shared: The given group that holds s, the server's perturbation.
        own: The given group that holds mu; zero where it was not given.
    """

    rho: float = 0.1
    shared: str = "perturbation"
    own: str = "memory/dual"

    def constants(self, start: Tensors, given: Mapping[str, Tensors]) -> dict[str, Any]:
        return {"shared": given[self.shared], "dual": given.get(self.own) or tree_map(torch.zeros_like, start)}

    def initial_carry(self, start: Tensors) -> Any:
        return {"moved": tree_map(torch.zeros_like, start)}  # mu minus its value at the start of the fit

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        dual = tree_add_scaled(constants["dual"], carry["moved"], 1.0)
        ascent = tree_sub(tree_sub(oracle(params), dual), constants["shared"])
        epsilon = tree_scale(ascent, over_norm(self.rho, ascent))
        moved = tree_sub(tree_add_scaled(carry["moved"], epsilon, 1.0), constants["shared"])
        return oracle(tree_add_scaled(params, epsilon, 1.0)), {"moved": moved}

    def outcome(self, carry: Any) -> dict[str, Tensors]:
        return {"dual_change": carry["moved"]}
