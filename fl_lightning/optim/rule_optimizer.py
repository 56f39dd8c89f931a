"""The one adapter between local rules and Lightning's automatic optimisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.rules.base import LocalRule, Tensors


def rule_step(
    parameters: Mapping[str, nn.Parameter],
    closure: Callable[[], Any],
    rule: LocalRule,
    constants: Mapping[str, Any],
    carry: Any,
    step: int,
) -> Any:
    """Run a rule eagerly and leave its direction in the parameters' ``.grad``; returns the new carry.

    Whatever parameters the rule asks gradients at, the parameters' own values are back, bit for bit, when this returns or
    raises.

    Args:
        parameters: Trainable parameters by name.
        closure: Zeroes gradients, computes the loss, calls backward.
        rule: The rule.
        constants: From ``rule.constants``.
        carry: From the last step.
        step: Steps taken before this one.
    """
    live = {name: parameter.detach() for name, parameter in parameters.items()}

    def oracle(at: Tensors) -> dict[str, Tensor]:
        moved = {name: value for name, value in at.items() if value is not live[name]}
        kept = {name: live[name].clone() for name in moved}
        try:
            with torch.no_grad():
                for name, value in moved.items():
                    live[name].copy_(value)
            with torch.enable_grad():
                closure()
        finally:
            with torch.no_grad():
                for name, value in kept.items():
                    live[name].copy_(value)
        # A later call of the closure may write into the same .grad buffers, so what is handed out must be a copy.
        return {
            name: torch.zeros_like(live[name]) if parameter.grad is None else parameter.grad.detach().clone()
            for name, parameter in parameters.items()
        }

    direction, carry = rule.direction(oracle, live, constants, carry, step)
    for name, parameter in parameters.items():
        parameter.grad = direction[name].detach()
    return carry


class RuleOptimizer(Optimizer):
    """Runs a `LocalRule` around any torch optimizer; the optimizer sees the rule's direction as the gradient.

    Lightning clips gradients inside the closure, so a rule acts on clipped gradients and its corrections are not clipped.

    Args:
        base: Optimizer over the same parameters.
        parameters: Trainable parameters by name.
        rule: The rule.
        given: Groups for ``rule.constants``, on the parameters' device.
    """

    def __init__(
        self,
        base: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        rule: LocalRule,
        given: Mapping[str, Tensors],
    ) -> None:
        self.base, self.parameters, self.rule = base, dict(parameters), rule
        super().__init__(base.param_groups, base.defaults)
        self.param_groups, self.state = base.param_groups, base.state  # one truth, for schedulers and state dicts
        start = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.constants = rule.constants(start, given)
        self.carry = rule.initial_carry(start)
        self.num_steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the base optimizer along the rule's direction.

        Raises:
            ValueError: There is no closure; a rule must be able to ask for gradients.
        """
        if closure is None:
            raise ValueError(
                f"{type(self.rule).__name__} needs a closure that computes the loss and its gradient. Under fp16 mixed "
                "precision Lightning's gradient scaler steps without one: use trainer.precision bf16-mixed or 32-true"
            )
        results: list[Any] = []
        self.carry = rule_step(
            self.parameters, lambda: results.append(closure()), self.rule, self.constants, self.carry, self.num_steps
        )
        self.num_steps += 1
        self.base.step()
        return results[0]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "carry": self.carry, "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.param_groups, self.state = self.base.param_groups, self.base.state  # loading made new ones
        self.carry, self.num_steps = state_dict["carry"], state_dict["num_steps"]
