"""The adapter between rules and optimizers, against plain loops."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.optim.rule_optimizer import RuleOptimizer
from fl_lightning.rules.base import Composed, LocalRule, Oracle, Tensors, tree_add_scaled, tree_map, tree_norm
from fl_lightning.rules.proximal import Proximal

OPTIMIZERS: dict[str, Callable] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@dataclass(frozen=True)
class Sharpness(LocalRule):
    """SAM (Foret et al., 2021): the gradient at w + rho g / ||g||. Two oracle calls a step."""

    rho: float = 0.05

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        gradient = oracle(params)
        return oracle(tree_add_scaled(params, gradient, self.rho / tree_norm(gradient))), carry


@dataclass(frozen=True)
class Counting(LocalRule):
    """Remembers, in its carry, how many steps it took and the sum of the directions."""

    def initial_carry(self, start: Tensors) -> Any:
        return {"sum": tree_map(torch.zeros_like, start), "steps": 0}

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        assert carry["steps"] == step
        gradient = oracle(params)
        return gradient, {"sum": tree_add_scaled(carry["sum"], gradient, 1.0), "steps": step + 1}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=draw).double(), torch.randint(3, (8,), generator=draw)) for _ in range(count)]


def closure_of(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


def train(make: Callable, rule: LocalRule | None, count: int = 6) -> tuple[nn.Module, Any, list[float]]:
    model = network()
    named = dict(model.named_parameters())
    optimizer = make(list(named.values()))
    if rule is not None:
        optimizer = RuleOptimizer(optimizer, named, rule, {})
    losses = [float(optimizer.step(closure_of(model, optimizer, batch)).detach()) for batch in batches(count)]
    return model, optimizer, losses


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rule", [LocalRule(), Composed((LocalRule(), LocalRule())), Counting(), Proximal(0.0)])
def test_an_identity_rule_is_the_base_optimizer_bit_for_bit(name: str, rule: LocalRule) -> None:
    plain, _, losses = train(OPTIMIZERS[name], None)
    ruled, _, ruled_losses = train(OPTIMIZERS[name], rule)
    assert equal(plain, ruled)
    assert losses == ruled_losses
    assert not equal(plain, network())


def reference_sharpness(rho: float, mu: float = 0.0) -> nn.Module:
    """SAM with SGD (and the proximal gradient added after), by hand."""
    model = network()
    start = [w.clone() for w in weights(model)]
    for x, y in batches():
        gradient = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, g in zip(moved.parameters(), gradient, strict=True):
                parameter += rho * g / norm
        sharp = torch.autograd.grad(F.cross_entropy(moved(x), y), list(moved.parameters()))
        with torch.no_grad():
            for parameter, g, w in zip(model.parameters(), sharp, start, strict=True):
                parameter -= 0.1 * (g + mu * (parameter - w))
    return model


def test_two_oracle_calls_a_step_match_a_plain_loop() -> None:
    model, _, losses = train(lambda p: torch.optim.SGD(p, lr=0.1), Sharpness(0.3))
    for ours, theirs in zip(weights(model), weights(reference_sharpness(0.3)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    start = network()
    x, y = batches()[0]
    assert losses[0] == float(F.cross_entropy(start(x), y).detach())  # the loss at w, not at the perturbed point


def test_rules_compose_innermost_first() -> None:
    model, _, _ = train(lambda p: torch.optim.SGD(p, lr=0.1), Composed((Sharpness(0.3), Proximal(0.7))))
    for ours, theirs in zip(weights(model), weights(reference_sharpness(0.3, 0.7)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    other, _, _ = train(lambda p: torch.optim.SGD(p, lr=0.1), Composed((Proximal(0.7), Sharpness(0.3))))
    assert not torch.allclose(weights(other)[0], weights(model)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("failing", [1, 2])
def test_weights_are_back_bit_for_bit_even_when_the_closure_raises(failing: int) -> None:
    model = network()
    named = dict(model.named_parameters())
    optimizer = RuleOptimizer(torch.optim.SGD(list(named.values()), lr=0.1), named, Sharpness(0.3), {})
    before = [w.clone() for w in weights(model)]
    seen: list[list[Tensor]] = []

    def closure() -> Tensor:
        seen.append([w.clone() for w in weights(model)])
        if len(seen) == failing:
            raise RuntimeError("out of memory")
        return closure_of(model, optimizer, batches()[0])()

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert failing == 1 or not torch.equal(seen[1][0], before[0])  # it had been moved


def test_a_step_leaves_the_weights_alone_until_the_base_steps() -> None:
    model = network()
    named = dict(model.named_parameters())
    optimizer = RuleOptimizer(torch.optim.SGD(list(named.values()), lr=0.0), named, Sharpness(0.3), {})
    optimizer.step(closure_of(model, optimizer, batches()[0]))
    assert equal(model, network())


def test_state_goes_out_and_in() -> None:
    whole, _, _ = train(OPTIMIZERS["momentum"], Counting(), 6)
    model, optimizer, _ = train(OPTIMIZERS["momentum"], Counting(), 3)
    state = copy.deepcopy(optimizer.state_dict())
    named = dict(model.named_parameters())
    resumed = RuleOptimizer(OPTIMIZERS["momentum"](list(named.values())), named, Counting(), {})
    resumed.load_state_dict(state)
    assert resumed.state is resumed.base.state
    assert resumed.param_groups is resumed.base.param_groups
    for batch in batches()[3:]:
        resumed.step(closure_of(model, resumed, batch))
    assert equal(whole, model)
    assert resumed.carry["steps"] == resumed.num_steps == 6


def test_schedulers_change_the_rate_of_the_base() -> None:
    model, plain = network(), network()
    named = dict(model.named_parameters())
    optimizer = RuleOptimizer(torch.optim.SGD(list(named.values()), lr=0.5), named, LocalRule(), {})
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, reference)]
    for batch in batches(3):
        optimizer.step(closure_of(model, optimizer, batch))
        reference.step(closure_of(plain, reference, batch))
        for schedule in schedules:
            schedule.step()
    assert optimizer.base.param_groups[0]["lr"] == 0.0625
    assert equal(model, plain)


@dataclass(frozen=True)
class First(LocalRule):
    """Asks for a second gradient and returns the first."""

    def direction(
        self, oracle: Oracle, params: Tensors, constants: Mapping[str, Any], carry: Any, step: int
    ) -> tuple[Tensors, Any]:
        gradient = oracle(params)
        oracle(tree_map(torch.zeros_like, params))
        return gradient, carry


def test_a_gradient_that_was_handed_out_does_not_change() -> None:
    """Not even where the closure zeroes gradients in place, so that both backward passes write into one buffer."""
    model, plain = network(), network()
    named = dict(model.named_parameters())
    optimizer = RuleOptimizer(torch.optim.SGD(list(named.values()), lr=0.1), named, First(), {})
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = batches()[0]
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    reference.step(closure_of(plain, reference, (x, y)))
    assert equal(model, plain)


def test_a_rule_needs_a_closure() -> None:
    named = dict(network().named_parameters())
    optimizer = RuleOptimizer(torch.optim.SGD(list(named.values()), lr=0.1), named, Sharpness(), {})
    with pytest.raises(ValueError, match=r"Sharpness needs a closure.*bf16-mixed"):
        optimizer.step()


def test_a_parameter_without_gradient_has_gradient_zero() -> None:
    model = network()
    named = {**dict(model.named_parameters()), "unused": nn.Parameter(torch.ones(2).double())}
    optimizer = RuleOptimizer(torch.optim.SGD(list(named.values()), lr=0.1), named, Sharpness(0.3), {})
    optimizer.step(closure_of(model, optimizer, batches()[0]))
    assert named["unused"].tolist() == [1, 1]
