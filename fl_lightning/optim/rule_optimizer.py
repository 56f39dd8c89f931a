"""The one adapter between local rules and Lightning's automatic optimisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
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
    elsewhere: Callable[[], AbstractContextManager[Any]] = nullcontext,
    unvisited: Callable[[], None] = lambda: None,
) -> Any:
    """Run a rule eagerly and leave its direction in the parameters' ``.grad``; returns the new carry.

    Whatever parameters the rule asks gradients at, the parameters' own values are back, bit for bit, when this returns or
    raises: they are lent other storage, never written. Every gradient of the step sees the same random numbers (dropout).

    Args:
        parameters: Trainable parameters by name.
        closure: Zeroes gradients, computes the loss, calls backward.
        rule: The rule.
        constants: From ``rule.constants``.
        carry: From the last step.
        step: Steps taken before this one.
        elsewhere: Entered around gradients at other parameters than the current ones, and around repeated ones.
        unvisited: Called at the end of a step that asked for no gradient at the current parameters.
    """
    live = {name: parameter.detach() for name, parameter in parameters.items()}
    device = next(iter(live.values())).device
    randomness: list[Tensor] = []
    visited = False

    def oracle(at: Tensors) -> dict[str, Tensor]:
        nonlocal visited
        moved = {name: value for name, value in at.items() if value is not live[name]}
        repeated, visited = visited, visited or not moved
        _replay(randomness, device)
        try:
            for name, value in moved.items():
                parameters[name].data = value
            with torch.enable_grad(), elsewhere() if moved or repeated else nullcontext():
                closure()
        finally:
            for name in moved:
                parameters[name].data = live[name]
        found = {
            name: torch.zeros_like(live[name]) if parameter.grad is None else parameter.grad.detach()
            for name, parameter in parameters.items()
        }
        for parameter in parameters.values():
            parameter.grad = None  # what is handed out belongs to the rule: a later backward must not write into it
        return found

    direction, carry = rule.direction(oracle, live, constants, carry, step)
    if not visited:
        _replay(randomness, device)
        unvisited()
    for name, parameter in parameters.items():
        parameter.grad = direction[name].detach()
    return carry


def _replay(state: list[Tensor], device: torch.device) -> None:
    """Keep the state of the global generators the first time; go back to it afterwards."""
    get, put = (torch.cuda.get_rng_state, torch.cuda.set_rng_state) if device.type == "cuda" else (None, None)
    if not state:
        state += [torch.get_rng_state(), *([get(device)] if get else [])]
        return
    torch.set_rng_state(state[0])
    if put:
        put(state[1], device)


class RuleOptimizer(Optimizer):
    """Runs a `LocalRule` around any torch optimizer; the optimizer sees the rule's direction as the gradient.

    Lightning clips gradients inside the closure, so a rule acts on clipped gradients and its corrections are not clipped.

    Args:
        base: Optimizer over the same parameters.
        parameters: Trainable parameters by name.
        rule: The rule.
        given: Groups for ``rule.constants``, on the parameters' device.
        elsewhere: Entered around gradients at other parameters than the current ones, to leave no trace of them.
        unvisited: Called at the end of a step that asked for no gradient at the current parameters.
    """

    def __init__(
        self,
        base: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        rule: LocalRule,
        given: Mapping[str, Tensors],
        elsewhere: Callable[[], AbstractContextManager[Any]] = nullcontext,
        unvisited: Callable[[], None] = lambda: None,
    ) -> None:
        self.base, self.parameters, self.rule = base, dict(parameters), rule
        self.elsewhere, self.unvisited = elsewhere, unvisited
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
            self.parameters,
            lambda: results.append(closure()),
            self.rule,
            self.constants,
            self.carry,
            self.num_steps,
            self.elsewhere,
            self.unvisited,
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
