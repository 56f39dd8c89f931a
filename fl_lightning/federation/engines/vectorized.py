"""Many small clients as one batched computation: the same rules, mapped over a leading axis of clients.

Clients advance side by side. Fits of one kind (task, rules, budget, groups given) are stacked and taken together, step by
step; anything else a client asks for is done one by one. The optimizer is torch's own, on stacked parameters: those that
are allowed act on every element by itself. A client with fewer steps, or a shorter last batch, is masked exactly.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.examples import Examples, TensorExamples, View
from fl_lightning.federation import lean
from fl_lightning.federation.engines.base import Addressed, addressed_part
from fl_lightning.federation.engines.serial import SerialEngine
from fl_lightning.federation.incoming import Guard
from fl_lightning.federation.participant import Participant, check
from fl_lightning.federation.state import MemoryStore
from fl_lightning.message import Message
from fl_lightning.methods.base import ClientProgram, Fit, Reply, Result, Steps
from fl_lightning.rng import torch_generator
from fl_lightning.rules.base import LocalRule, Tensors, compose, tree_map, tree_norm, tree_scale
from fl_lightning.tasks.base import Batch, FederatedTask

# Optimizers that treat every element by itself, so that a stack of clients' parameters is as good as each alone.
ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Adagrad)


# What a fit alone calls and stacked fits do not.
_NOT_CALLED = (
    *lean.HOOKS,
    "training_step",
    "optimizer_step",
    "setup",
    "on_fit_start",
    "on_train_batch_start",
    "fit_metrics",
    "cached",
)


@dataclass
class Turn:
    """A client's turn as far as it has come."""

    key: str
    steps: Steps
    request: Any = None
    reply: Reply | None = None

    def advance(self, result: Result | None) -> None:
        """Hand the last request's result over and take the next request, or the reply."""
        try:
            self.request = next(self.steps) if result is None else self.steps.send(result)
        except StopIteration as end:
            self.request, self.reply = None, end.value


class VectorizedEngine(SerialEngine):
    """Runs a cohort's fits together, as many clients at a time as are asked for.

    Args:
        participant: Carries out what cannot be stacked, and holds tasks, device and clipping.
        data: Holds every client's examples.
        memory: Client memories.
        chunk: Clients at a time, at least 1; memory grows with it.
        guard: Asks the clients, and checks what they send; by default one that ends the run at a failure.

    Raises:
        ValueError: The run has something that a stack of clients cannot do as each alone would.
    """

    def __init__(
        self,
        participant: Participant,
        data: FederatedDataModule,
        memory: MemoryStore,
        chunk: int = 64,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(participant, data, memory, guard)
        if chunk < 1:
            raise ValueError(f"federation.vectorized_clients is {chunk}; it must be at least 1")
        self.chunk = chunk
        trainer = participant.trainer
        reasons = {
            f"trainer.precision is {trainer.precision}; it must be 32-true": trainer.precision == "32-true",
            f"callback {type(participant.callbacks[0]).__name__ if participant.callbacks else ''} watches single fits": (
                not participant.callbacks
            ),
            "data.augmentation draws for every client by itself": not data.augmentation,
        }
        for reason, holds in reasons.items():
            if not holds:
                raise ValueError(f"federation.engine 'vectorized' cannot run this: {reason}; use engine 'serial'")

    def replies(
        self,
        program: ClientProgram,
        message: Message,
        cohort: Sequence[str],
        addressed: Addressed,
        progress: Callable[[str], None],
    ) -> Iterator[tuple[Reply | None, Message]]:
        """As the serial engine, a chunk of clients at a time; one by one where a chunk fails and the run shall go on."""
        for first in range(0, len(cohort), self.chunk):
            keys = cohort[first : first + self.chunk]
            received = []
            for key in keys:
                progress(key)
                received.append(addressed_part(message, addressed(key)))
            # A chunk is taken out of the journal as a whole: another stack could round differently.
            replies: Sequence[Reply | None] = self.recalled(keys) or [None] * len(keys)
            try:
                if replies[0] is None:
                    replies = self._together(program, keys, received)
            except Exception as error:
                if self.guard.policy == "raise":
                    raise
                print(f"stacked fits failed ({error}); their clients train one by one", file=sys.stderr)
            for key, message_in, reply in zip(keys, received, replies, strict=True):
                alone = partial(self.reply, program, message_in, key)
                ready = alone if reply is None else partial(_given, reply)
                yield self.guard.ask(key, ready, alone), message_in

    def _together(self, program: ClientProgram, keys: Sequence[str], received: Sequence[Message]) -> list[Reply | None]:
        """The replies of a chunk of clients."""
        turns = [
            Turn(key, program.update(self.client(key, message.round), message))
            for key, message in zip(keys, received, strict=True)
        ]
        for turn in turns:
            turn.advance(None)
        while any(turn.request is not None for turn in turns):
            self._step(program, received[0].round, [turn for turn in turns if turn.request is not None])
        return [turn.reply for turn in turns]

    def _step(self, program: ClientProgram, round: int, turns: list[Turn]) -> None:
        """One request of every client."""
        groups: dict[Any, list[Turn]] = {}
        for turn in turns:
            if isinstance(turn.request, Fit):
                groups.setdefault(_kind(turn.request), []).append(turn)
            elif turn.request.start is None:
                raise ValueError(
                    f"{type(program).__name__} cannot be vectorised: it asks what a task holds after a fit, and stacked "
                    "fits leave nothing there; use federation.engine serial"
                )
            else:
                turn.advance(self.participant.execute(turn.request, round, turn.key))
        for members in groups.values():
            self._check(program, [turn.request for turn in members])
            for turn, result in zip(members, self._fit(round, members), strict=True):
                turn.advance(result)

    def _check(self, program: ClientProgram, fits: Sequence[Fit]) -> None:
        """Refuse by name what would differ from fits alone; all of one task."""
        for fit in fits:
            check(fit)
        task = self.participant.tasks[fits[0].task]
        reason = lean.obstacle(self.participant.trainer, task, [c for fit in fits for c in fit.callbacks])
        modules = list(task.modules())
        columns = {name for fit in fits for name in fit.data.extras(torch.tensor([0]))}
        if reason is not None:
            reason = f"a fit needs Lightning's Trainer because {reason}"
        elif watching := [c for fit in fits for c in fit.callbacks]:
            reason = f"{type(watching[0]).__name__} watches single fits"
        elif columns:
            reason = f"examples have columns ({', '.join(sorted(columns))}), and example_losses takes images and labels"
        elif any(fit.data.augmentation for fit in fits):
            reason = "augmentation draws for every client by itself"
        elif type(task).example_losses is FederatedTask.example_losses:
            reason = f"{type(task).__name__} has no example_losses"
        elif own := [n for n in _NOT_CALLED if getattr(type(task), n) is not getattr(FederatedTask, n)]:
            reason = f"{type(task).__name__} has its own {own[0]}, which stacked fits do not call"
        elif _defined(task, "loss") < _defined(task, "example_losses"):
            reason = f"{type(task).__name__} has its own loss, but not its own example_losses"
        elif found := [m for m in modules if isinstance(m, _BatchNorm)]:
            reason = f"{type(found[0]).__name__} keeps statistics of its batches; GroupNorm does not"
        elif task.persistent_buffers():
            reason = f"{type(task).__name__} has buffers: {', '.join(task.persistent_buffers())}"
        elif drawing := [m for m in modules if isinstance(m, (_DropoutNd, nn.MultiheadAttention)) and _drops(m)]:
            reason = f"{type(drawing[0]).__name__} draws for every client by itself"
        if reason is not None:
            raise ValueError(f"{type(program).__name__} cannot be vectorised: {reason}; use federation.engine serial")

    def _fit(self, round: int, turns: list[Turn]) -> list[Result]:
        """Train all clients of a kind together."""
        worker, fits = self.participant, [turn.request for turn in turns]
        task: FederatedTask = worker.tasks[fits[0].task]
        device = worker.trainer.strategy.root_device
        task.to(device)
        task.train()
        if any(fit.start is None for fit in fits):
            raise ValueError("a vectorised fit needs a start; there is no model that clients share")
        count, names = len(fits), list(task.trainable())
        start, axis = _stacked([{n: fit.start[n] for n in names} for fit in fits], device)
        # The optimizer writes into these.
        params = {n: (p if axis == 0 else p.expand(count, *p.shape)).clone() for n, p in start.items()}
        optimizer = self._optimizer(task, params, fits[0])
        rule = compose(fits[0].rules)
        groups = {name: _stacked([fit.given[name] for fit in fits], device) for name in fits[0].given}
        given, axes = {name: g for name, (g, _) in groups.items()}, {name: a for name, (_, a) in groups.items()}
        # What all clients share is computed once: ``vmap`` hands it out as a view of K equal rows.
        each = partial(vmap, in_dims=(0, axis, axes))
        clients = torch.zeros(count, device=device)
        constants = each(lambda _, s, g: rule.constants(s, g))(clients, start, given)
        carry = each(lambda _, s, g: rule.initial_carry(s))(clients, start, given)
        schedule = Schedule(worker, round, turns, device)
        step = VectorizedStep(task, rule, worker.trainer.gradient_clip_val, worker.trainer.gradient_clip_algorithm)
        steps, losses, calls, rates = schedule.steps, [], [0], [0.0]
        for number, (inputs, labels, mask) in enumerate(schedule):
            idle = [k for k in range(count) if steps[k] <= number]
            before = {n: p[idle] for n, p in params.items()} if idle else {}
            direction, moved, loss, taken = step(params, inputs, labels, mask, constants, carry, number)
            for n, parameter in zip(names, optimizer.param_groups[0]["params"], strict=True):
                parameter.grad = direction[n].detach()
            optimizer.step()
            for n, rows in before.items():
                params[n][idle] = rows  # one who has finished computes on, to no effect
            carry = _where(torch.tensor([number < s for s in steps], device=device), moved, carry) if idle else moved
            losses.append(loss.detach())
            calls.append(calls[-1] + taken)
            rates.append(rates[-1] + optimizer.param_groups[0]["lr"])
        by_step = torch.stack(losses).float().cpu()
        done = torch.arange(len(losses))[:, None] < torch.tensor(steps)
        loss_sums = torch.where(done, by_step, 0.0).sum(0).tolist()
        worker.num_gradients += sum(calls[s] for s in steps)
        outcome = {g: _rows(tensors) for g, tensors in rule.outcome(carry).items()}
        return [
            Result(
                params=after,
                num_steps=steps[k],
                lr_sum=rates[steps[k]],
                metrics={"loss": loss_sums[k] / max(steps[k], 1)},
                num_gradients=calls[steps[k]],
                outcome={group: rows[k] for group, rows in outcome.items()},
            )
            for k, after in enumerate(_rows(params))
        ]

    def _optimizer(self, task: FederatedTask, params: dict[str, Tensor], fit: Fit) -> Optimizer:
        own = list(task.trainable().values())
        groups = task.optimizer(own).param_groups  # as a client alone would have it; a stack has one dimension more
        if len(groups) != 1 or [id(p) for p in groups[0]["params"]] != [id(p) for p in own]:
            raise ValueError(
                "an optimizer with parameter groups, or another order, cannot be vectorised; use engine serial"
            )
        optimizer = task.optimizer([nn.Parameter(p) for p in params.values()])
        if type(optimizer) not in ELEMENTWISE:
            allowed = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ValueError(
                f"{type(optimizer).__name__} cannot be vectorised: it may mix a parameter's elements; allowed: {allowed}"
            )
        for group in optimizer.param_groups:
            group["lr"] = fit.overrides.get("lr_scale", 1.0) * fit.overrides.get("lr", group["lr"])
        for n, p in zip(params, optimizer.param_groups[0]["params"], strict=True):
            params[n] = p.detach()
        return optimizer


class VectorizedStep:
    """The direction of one step for all clients, by the rule that a client alone would follow.

    Args:
        task: Gives the losses of examples.
        rule: How the direction comes from gradients.
        clip: ``gradient_clip_val`` of the trainer; acts on every gradient, each client's by itself.
        algorithm: ``gradient_clip_algorithm`` of the trainer.
    """

    def __init__(self, task: FederatedTask, rule: LocalRule, clip: float | None, algorithm: str | None) -> None:
        self.losses, self.rule, self.clip = _Losses(task), rule, clip or 0.0
        self.by_value = GradClipAlgorithmType(algorithm or "norm") == GradClipAlgorithmType.VALUE

    def __call__(
        self, params: Tensors, inputs: Tensor, labels: Tensor, mask: Tensor, constants: Any, carry: Any, number: int
    ) -> tuple[Tensors, Any, Tensor, int]:
        """Directions, new carries, losses (K,) of each client's first gradient, and gradients taken by each.

        Args:
            params: (K, ...) each.
            inputs: (K, B, ...).
            labels: (K, B).
            mask: (K, B), 1 for an example and 0 for padding.
            constants: Of the rule, (K, ...) leaves.
            carry: Of the rule, (K, ...) leaves.
            number: Steps taken before.
        """
        calls = 0

        def one(p: Tensors, x: Tensor, y: Tensor, m: Tensor, c: Any, k: Any) -> Any:
            first: list[Tensor] = []

            def loss(at: Tensors) -> Tensor:
                each = functional_call(self.losses, {f"task.{n}": v for n, v in at.items()}, (x, y))
                return (each * m).sum() / m.sum()

            def oracle(at: Tensors) -> Tensors:
                nonlocal calls
                calls += 1
                gradient, value = grad_and_value(loss)(dict(at))
                first.append(value)
                return self._clipped(gradient)

            direction, moved = self.rule.direction(oracle, p, c, k, number)
            return dict(direction), moved, first[0]

        direction, moved, losses = vmap(one)(params, inputs, labels, mask, constants, carry)
        return direction, moved, losses, calls

    def _clipped(self, gradient: Tensors) -> Tensors:
        """As `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`."""
        if not self.clip:
            return gradient
        if self.by_value:
            return tree_map(lambda value: value.clamp(-self.clip, self.clip), gradient)
        return tree_scale(gradient, (self.clip / (tree_norm(gradient) + 1e-6)).clamp(max=1.0))


class Schedule:
    """The batches of all clients, step by step: each client's own order, the one that it would have alone.

    Iterating gives inputs (K, B, ...), labels (K, B) and mask (K, B), 1 for an example and 0 for padding.

    Args:
        worker: Holds seed and budgets.
        round: Round number.
        turns: The clients, with their fits.
        device: Where the batches go.

    Attributes:
        steps: Of every client.
    """

    def __init__(self, worker: Participant, round: int, turns: list[Turn], device: torch.device) -> None:
        fits = [turn.request for turn in turns]
        epochs, steps, size = worker.budget(fits[0].overrides)
        counts = [len(fit.data) for fit in fits]
        width = min(size, max(counts))
        orders = []
        for turn, fit, count in zip(turns, fits, counts, strict=True):
            generator = torch_generator(worker.seed, round, turn.key, *fit.key, "shuffle")
            batches = math.ceil(count / width)  # of an epoch
            own = steps if epochs < 0 else epochs * batches if steps < 0 else min(steps, epochs * batches)
            order = torch.full((math.ceil(own / batches), batches * width), -1)
            for epoch in order:
                epoch[:count] = torch.randperm(count, generator=generator)
            orders.append(order.view(-1, width)[:own])
        self.steps = [len(order) for order in orders]
        order = torch.zeros(max(self.steps), len(fits), width, dtype=torch.int64)
        for k, mine in enumerate(orders):
            order[: len(mine), k] = mine
            order[len(mine) :, k] = mine[-1]  # after its last step a client goes on, masked
        self.source, rows = _together([fit.data for fit in fits], device)
        places = order.clamp(min=0)  # padding is an example of the client's own
        self.places = torch.stack([own[places[:, k]] for k, own in enumerate(rows)], 1).to(device)
        self.mask = (order >= 0).to(device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for places, mask in zip(self.places, self.mask, strict=True):
            inputs = self.source.fetch(places.flatten()).unflatten(0, places.shape)
            yield inputs, self.source.labels[places], mask.to(inputs.dtype)


def _together(data: Sequence[Examples], device: torch.device) -> tuple[Examples, list[Tensor]]:
    """Where the examples of all clients can be fetched from, and the numbers that each client's have there: the set that all
    are parts of, if it lies in this memory, or else a copy on the device."""
    parts = [part for part in data if type(part) is View and type(part.source) is TensorExamples]
    if device.type == "cpu" and len(parts) == len(data) and len({id(part.source) for part in parts}) == 1:
        return parts[0].source, [part.indices for part in parts]
    everything = [torch.arange(len(part)) for part in data]
    inputs = torch.cat([part.fetch(rows) for part, rows in zip(data, everything, strict=True)])
    copy = TensorExamples(inputs.to(device), torch.cat([part.labels for part in data]).to(device))
    return copy, list(torch.arange(len(copy)).split([len(part) for part in data]))


class _Losses(nn.Module):
    """A task's losses of examples as a module's forward pass, so that its parameters can be handed in."""

    def __init__(self, task: FederatedTask) -> None:
        super().__init__()
        self.task = task

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.task.example_losses(Batch(inputs, labels))


def _given(reply: Reply) -> Reply:
    return reply


def _defined(task: FederatedTask, name: str) -> int:
    """How far up its ancestry a task's method is defined."""
    return next(i for i, kind in enumerate(type(task).__mro__) if name in vars(kind))


def _kind(fit: Fit) -> Any:
    """Fits of one kind can be stacked."""
    return fit.task, fit.rules, tuple(sorted(fit.overrides.items())), tuple(sorted(fit.given)), fit.key


def _stacked(many: Sequence[Tensors], device: torch.device) -> tuple[dict[str, Tensor], int | None]:
    """Tensors of all clients, and the axis of the clients: None where they are the same for all (a broadcast)."""
    shared = all(other[n] is value for other in many for n, value in many[0].items())
    stack = {n: v if shared else torch.stack([other[n] for other in many]) for n, v in many[0].items()}
    return {n: v.to(device) for n, v in stack.items()}, None if shared else 0


def _rows(stack: Tensors) -> list[dict[str, Tensor]]:
    """Each client's part of a stack, as views on the CPU; of no tensors, there are none."""
    return [dict(zip(stack, row, strict=True)) for row in zip(*(v.cpu().unbind() for v in stack.values()), strict=True)]


def _where(active: Tensor, new: Any, old: Any) -> Any:
    """The new values of the clients that are active, the old ones of the others, leaf by leaf."""
    return torch.utils._pytree.tree_map(lambda a, b: torch.where(active.view(-1, *[1] * (a.ndim - 1)), a, b), new, old)


def _drops(module: nn.Module) -> bool:
    rate = getattr(module, "p", getattr(module, "dropout", 0.0))
    return not math.isclose(float(rate), 0.0)
