"""Many small clients as one batched computation: the same rules, mapped over a leading axis of clients.

Clients advance side by side. Fits of one kind (task, rules, budget, groups given) are stacked and taken together, step by
step; anything else a client asks for is done one by one. The optimizer is torch's own, on stacked parameters: those that
are allowed act on every element by itself. A client with fewer steps, or a shorter last batch, is masked exactly.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.func import functional_call, grad_and_value, vmap
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
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
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.expand.default)
_SWAP = torch.ops.aten.transpose.int
_MOST_KINDS = 16  # kinds of inputs whose gradients are kept as lists of operations

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
        self.chunk, self.gradients = chunk, dict[str, Gradients]()
        # The C library then keeps what a round has freed for the next one: pages that are new from the system cost more than
        # the arithmetic on them. It does so up to twice the size of the largest block ever freed, 32 MiB at most.
        torch.empty(31 * 2**20, dtype=torch.uint8)
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
            recalled = self.recalled(keys)
            stacked = self._together(program, keys, received) if recalled is None else iter(recalled)
            for key, message_in in zip(keys, received, strict=True):
                try:
                    reply = next(stacked, None)  # what has failed has come to its end
                except Exception as error:
                    if self.guard.policy == "raise":
                        raise
                    print(f"stacked fits failed ({error}); clients from {key} on train one by one", file=sys.stderr)
                    reply = None
                alone = partial(self.reply, program, message_in, key)
                ready = alone if reply is None else partial(_given, reply)
                yield self.guard.ask(key, ready, alone), message_in

    def _together(self, program: ClientProgram, keys: Sequence[str], received: Sequence[Message]) -> Iterator[Reply]:
        """The replies of a chunk of clients, in order. Each is made when it is asked for, and is checked and added up before
        the next one: so a client's tensors are looked at while they are in the caches."""
        turns = [
            Turn(key, program.update(self.client(key, message.round), message))
            for key, message in zip(keys, received, strict=True)
        ]
        waiting = deque(turns)
        results: Iterator[tuple[Turn, Result | None]] = iter([(turn, None) for turn in turns])
        while waiting:
            for turn, result in results:
                turn.advance(result)
                while waiting and (reply := waiting[0].reply) is not None:
                    waiting.popleft().reply = None
                    yield reply
            results = self._results(program, received[0].round, [turn for turn in turns if turn.request is not None])

    def _results(self, program: ClientProgram, round: int, turns: list[Turn]) -> Iterator[tuple[Turn, Result | None]]:
        """What one request of every client comes to."""
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
                yield turn, self.participant.execute(turn.request, round, turn.key)
        for members in groups.values():
            self._check(program, [turn.request for turn in members])
            results = self._fit(round, members)
            with threads(1):  # what is left to do is small, client by client: threads would wait for each other
                yield from zip(members, results, strict=True)

    def _check(self, program: ClientProgram, fits: Sequence[Fit]) -> None:
        """Refuse by name what would differ from fits alone; all of one task."""
        for fit in fits:
            check(fit)
        task = self.participant.tasks[fits[0].task]
        reason = lean.obstacle(self.participant.trainer, task, [c for fit in fits for c in fit.callbacks])
        modules = list(task.modules())
        first = torch.tensor([0])
        columns = {name for fit in fits for name in fit.data.extras(first)}
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
        if (gradients := self.gradients.get(fits[0].task)) is None or gradients.task is not task:
            gradients = self.gradients[fits[0].task] = Gradients(task)
        step = VectorizedStep(gradients, rule, worker.trainer.gradient_clip_val, worker.trainer.gradient_clip_algorithm)
        steps, losses, calls, rates = schedule.steps, [], [0], [0.0]
        for number, (inputs, labels, mask) in enumerate(schedule):
            idle = [k for k in range(count) if steps[k] <= number]
            before = {n: p[idle] for n, p in params.items()} if idle else {}
            direction, moved, loss, taken = step(params, inputs, labels, mask, constants, carry, number)
            taken_up = set[int]()
            for n, parameter in zip(names, optimizer.param_groups[0]["params"], strict=True):
                gradient = direction[n].detach()
                memory = gradient.untyped_storage()
                # Optimizers may write into gradients, and an operation that gives two of them is done once.
                shared = memory.data_ptr() in taken_up or memory.nbytes() < gradient.nbytes
                taken_up.add(memory.data_ptr())
                parameter.grad = gradient.clone() if shared else gradient
            del direction, gradient, memory
            optimizer.step()
            optimizer.zero_grad()  # its memory is the next gradient's
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
        gradients: Of all clients.
        rule: How the direction comes from gradients.
        clip: ``gradient_clip_val`` of the trainer; acts on every gradient, each client's by itself.
        algorithm: ``gradient_clip_algorithm`` of the trainer.
    """

    def __init__(self, gradients: Gradients, rule: LocalRule, clip: float | None, algorithm: str | None) -> None:
        self.gradients, self.rule, self.clip = gradients, rule, clip or 0.0
        self.known: Callable[..., Sequence[Tensor]] | None = None  # all steps have inputs of one kind
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
        calls, names = 0, list(params)
        gradients = self.known = self.known or self.gradients.of(params, inputs, labels, mask)
        if type(self.rule).direction is LocalRule.direction:  # the gradient itself: there is nothing to map
            *found, losses = gradients(inputs, labels, mask, *params.values())
            plain = dict(zip(names, found, strict=True))
            return vmap(self._clipped)(plain) if self.clip else plain, carry, losses, 1

        def one(p: Tensors, x: Tensor, y: Tensor, m: Tensor, c: Any, k: Any) -> Any:
            first: list[Tensor] = []

            def oracle(at: Tensors) -> Tensors:
                nonlocal calls
                calls += 1
                *found, value = _Together.apply(gradients, x, y, m, *(at[n] for n in names))
                first.append(value)
                return self._clipped(dict(zip(names, found, strict=True)))

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


class Gradients:
    """Gradients of a task's mean losses for all clients at once, as a flat list of tensor operations.

    ``vmap`` and ``grad`` take longer over a small network's operations than these take themselves. So what they come to is
    written down once for inputs of a kind, and run from then on. Nothing but `FederatedTask.example_losses` is in it, which
    is a pure function; whatever tensors the task has are handed in each time.

    Args:
        task: Gives the losses of examples.
    """

    def __init__(self, task: FederatedTask) -> None:
        self.task, self.losses = task, _Losses(task)
        self.known: dict[Any, Callable[..., list[Tensor]]] = {}

    def of(self, params: Tensors, inputs: Tensor, labels: Tensor, mask: Tensor) -> Callable[..., Sequence[Tensor]]:
        """What gives the gradients (K, ...) by parameter, and last the losses (K,), from (K, ...) inputs, labels, mask and
        parameters of these kinds.

        Args:
            params: (K, ...) each, by name.
            inputs: (K, B, ...).
            labels: (K, B).
            mask: (K, B), 1 for an example and 0 for padding.
        """
        names, shared = list(params), self._shared(params)
        fixed = list(shared.values())
        kinds = [(v.shape, v.dtype, v.device) for v in (inputs, labels, mask, *params.values(), *fixed)]
        key = (*names, *shared, *kinds)
        if key not in self.known:
            while len(self.known) >= _MOST_KINDS:
                del self.known[next(iter(self.known))]
            self.known[key] = self._written_down(
                names, list(shared), inputs, labels, mask, list(params.values()), fixed
            )
        known = self.known[key]

        @torch.no_grad()
        def gradients(x: Tensor, y: Tensor, m: Tensor, *at: Tensor) -> Sequence[Tensor]:
            return known(x, y, m, list(at), fixed)

        return gradients

    def _shared(self, params: Tensors) -> dict[str, Tensor]:
        """The task's tensors that clients do not train."""
        own = {**dict(self.task.named_parameters()), **dict(self.task.named_buffers())}
        return {name: value.detach() for name, value in own.items() if name not in params}

    def _written_down(self, names: list[str], others: list[str], *example: Any) -> Callable[..., list[Tensor]]:
        def loss(at: Tensors, rest: Tensors, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
            everything = {f"task.{n}": v for n, v in {**rest, **at}.items()}
            return (functional_call(self.losses, everything, (x, y)) * m).sum() / m.sum()

        def flat(x: Tensor, y: Tensor, m: Tensor, at: list[Tensor], rest: list[Tensor]) -> list[Tensor]:
            stacks, fixed = dict(zip(names, at, strict=True)), dict(zip(others, rest, strict=True))
            found, values = vmap(grad_and_value(loss), in_dims=(0, None, 0, 0, 0))(stacks, fixed, x, y, m)
            return [*(found[n] for n in names), values]

        graph = make_fx(flat)(*example)
        expected = graph(*example)
        try:
            if all(map(torch.equal, direct(graph)(*example), expected)):
                return graph
        except TypeError:  # an operation's binding takes other arguments
            pass
        return make_fx(flat)(*example)


def direct(graph: GraphModule) -> GraphModule:
    """The same tensor operations without those that change nothing, each once, and called by the shortest way; in place.
    Nothing happens where an operation writes into its inputs."""
    nodes = [node for node in graph.graph.nodes if isinstance(node.target, OpOverload)]
    if any(node.target._schema.is_mutable for node in nodes):
        return graph
    seen: dict[Any, Node] = {}
    for node in nodes:
        before = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if before is not None and node.target in _VIEWS and _shape(node) == _shape(before):
            node.replace_all_uses_with(before)
        elif before is not None and (node.target, before.target) == (_SWAP, _SWAP) and node.args[1:] == before.args[1:]:
            node.replace_all_uses_with(before.args[0])
        elif (same := seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)) is not node:
            node.replace_all_uses_with(same)
    for node in nodes:  # PyTorch's own binding of an operation takes half as long as the operator object
        binding = getattr(torch, node.target.overloadpacket.__name__, None)
        node.target = binding if isinstance(binding, BuiltinFunctionType) else node.target
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _shape(node: Node) -> Any:
    return node.meta["tensor_meta"].shape


class _Together(torch.autograd.Function):
    """Hands a rule under ``vmap`` what is computed for all clients at once; nothing is differentiated through it."""

    generate_vmap_rule = False

    @staticmethod
    def forward(gradients: Callable[..., Sequence[Tensor]], *one: Tensor) -> tuple[Tensor, ...]:
        return tuple(value[0] for value in gradients(*(value[None] for value in one)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """There is no backward pass."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, gradients: Callable[..., Sequence[Tensor]], *values: Tensor) -> Any:
        stacked = [
            value.movedim(axis, 0) if axis is not None else value.expand(info.batch_size, *value.shape)
            for value, axis in zip(values, in_dims[1:], strict=True)
        ]
        # The list of operations takes views, as of the parameters in memory that it was written down for.
        found = tuple(gradients(*(value.contiguous() for value in stacked)))
        return found, (0,) * len(found)


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
        batches = [math.ceil(count / width) for count in counts]  # of an epoch
        self.steps = [steps if epochs < 0 else epochs * n if steps < 0 else min(steps, epochs * n) for n in batches]
        self.source, rows = _together([fit.data for fit in fits], device)
        # numpy's small arrays take a fifth of what torch's do; -1 is padding.
        order = np.zeros((len(fits), max(self.steps), width), dtype=np.int64)
        places = order.copy()
        for k, (turn, fit) in enumerate(zip(turns, fits, strict=True)):
            generator = torch_generator(worker.seed, round, turn.key, *fit.key, "shuffle")
            mine = np.full((math.ceil(self.steps[k] / batches[k]), batches[k] * width), -1)
            for epoch in mine:
                epoch[: counts[k]] = torch.randperm(counts[k], generator=generator).numpy()
            order[k, : self.steps[k]] = mine.reshape(-1, width)[: self.steps[k]]
            order[k, self.steps[k] :] = order[k, self.steps[k] - 1]  # after its last step a client goes on, masked
            places[k] = rows[k].numpy()[order[k]]  # padding is the client's own last example
        self.places = torch.from_numpy(places).transpose(0, 1).contiguous().to(device)
        self.mask = torch.from_numpy(order >= 0).transpose(0, 1).contiguous().to(device)

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


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with so many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
