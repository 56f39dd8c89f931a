"""The one place that builds a Trainer: it carries out what a method's halves ask for."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from torch import Tensor

from fl_lightning.data.augmentation import augment, draw
from fl_lightning.data.examples import Examples
from fl_lightning.federation import lean
from fl_lightning.federation.flops import FlopCount
from fl_lightning.federation.journal import SERVER_TURN, Journal, Training, client_turn, count_costs, result_of
from fl_lightning.federation.snapshot import Snapshots
from fl_lightning.message import cpu_copy
from fl_lightning.methods.base import Fit, Predict, Result, Steps
from fl_lightning.optim.rule_optimizer import RuleOptimizer
from fl_lightning.rng import derive_seed, owned_global_rng, torch_generator
from fl_lightning.rules.base import compose
from fl_lightning.tasks.base import Batch, FederatedTask

# What a client fit never does: it writes no file, draws no bar, checks no sanity.
SILENT = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # BatchLoader divides a batch among devices itself, exactly
}
ClientLoop = Literal["auto", "trainer", "lean"]
_OVERRIDES = ("max_epochs", "max_steps", "batch_size", "lr", "lr_scale")


class BatchLoader:
    """A sized iterable of batches over examples that can be fetched many at a time.

    A third of a DataLoader's cost, and under several devices each takes its share of the same batch, so that the number of
    devices does not change what is computed.

    Args:
        examples: The examples.
        batch_size: Examples per step, over all devices together.
        generator: Shuffles anew each time the loader is iterated; None keeps the order.
        rank: Number of this device.
        world_size: Number of devices.
        draws: Draws the examples' augmentation, for the whole batch on every device; None leaves the inputs as they are.
        poisson: Draw every example into every batch by itself; ``batch_size`` is then what is expected.
        check: Called before every batch.
    """

    def __init__(
        self,
        examples: Examples,
        batch_size: int,
        generator: torch.Generator | None = None,
        rank: int = 0,
        world_size: int = 1,
        draws: torch.Generator | None = None,
        poisson: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.examples, self.batch_size, self.generator = examples, batch_size, generator
        self.rank, self.world_size, self.draws, self.poisson = rank, world_size, draws, poisson
        self.served, self.check = 0, check  # examples so far
        self._first, self._order = 0, torch.empty(0, dtype=torch.int64)  # batches that a pass leaves out; its order

    def state(self, done: int) -> dict[str, Any]:
        """What the rest of a pass depends on, after so many of its batches."""
        generators = (self.generator, self.draws)
        states = [None if generator is None else generator.get_state() for generator in generators]
        return {"done": done, "order": self._order, "generators": states, "served": self.served}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass behind the batches that were done; nothing of these is fetched."""
        self._first, self._order, self.served = state["done"], state["order"], state["served"]
        for generator, own in zip((self.generator, self.draws), state["generators"], strict=True):
            if generator is not None:
                generator.set_state(own)

    def __len__(self) -> int:
        return math.ceil(len(self.examples) / self.batch_size)

    def _indices(self) -> Iterator[Tensor]:
        count = len(self.examples)
        first, self._first = self._first, 0
        if self.poisson:
            for _ in range(first, len(self)):
                drawn = torch.rand(count, generator=self.generator, dtype=torch.float64) * count < self.batch_size
                yield drawn.nonzero().flatten()
        else:
            if not first:
                shuffled = self.generator is not None
                self._order = torch.randperm(count, generator=self.generator) if shuffled else torch.arange(count)
            yield from self._order.split(self.batch_size)[first:]

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._indices():
            self.check()
            self.served += len(batch)
            scale = 1.0
            draws = None if self.draws is None else draw(self.examples.augmentation, len(batch), self.draws)
            if self.world_size > 1:
                share = torch.arange(len(batch))[self.rank :: self.world_size]
                scale = len(share) * self.world_size / len(batch)
                if not len(share):
                    share = torch.tensor([0])  # with scale 0: every device must take part in a step
                batch, draws = batch[share], draws if draws is None else draws[share]
            inputs = self.examples.fetch(batch)
            if draws is not None:
                inputs = augment(self.examples.augmentation, inputs, draws)
            yield Batch(inputs, self.examples.labels[batch], scale, self.examples.extras(batch))


class Participant:
    """Executes `Fit`s and `Predict`s on resident tasks, with one Trainer whose loops start afresh each time.

    Args:
        tasks: Tasks by name.
        trainer: Keyword arguments of a Lightning Trainer, the template of every fit; what would write or draw is off.
        batch_size: Examples per step unless a request says otherwise.
        seed: The run's seed.
        eval_batch_size: Examples per forward pass of a `Predict`.
        client_loop: "trainer": every request is one of Lightning's Trainer; "lean": of the lean loop, see
            `fl_lightning.federation.lean`; "auto": lean where that is possible, and a line that says why where it is not.
        compile: Run the tasks' networks through ``torch.compile``, once: tasks stay, and clients' weights are copied in.

    Raises:
        ValueError: ``client_loop`` is unknown, or a budget of the trainer leaves nothing to train, or its gradient clipping
            is below 0.
    """

    def __init__(
        self,
        tasks: Mapping[str, FederatedTask],
        trainer: Mapping[str, Any],
        batch_size: int,
        seed: int,
        eval_batch_size: int = 512,
        client_loop: ClientLoop = "auto",
        compile: bool = False,
    ) -> None:
        if client_loop not in ("auto", "trainer", "lean"):
            raise ValueError(f"client_loop is {client_loop!r}; allowed: 'auto', 'trainer', 'lean'")
        self.client_loop, self._told = client_loop, set[str]()
        self.tasks, self.batch_size, self.seed, self.eval_batch_size = dict(tasks), batch_size, seed, eval_batch_size
        if compile:
            for network in {id(part): part for task in self.tasks.values() for part in task.children()}.values():
                network.compile()  # in place, so that parameters keep their names
        template = {**trainer, **SILENT}
        self.callbacks: list[Callback] = list(template.pop("callbacks", None) or [])
        self.trainer = Trainer(**template, callbacks=[])
        # trainer.max_time is a callback of Lightning's own making; like every limit it holds for each fit.
        self.callbacks += [c for c in self.trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
        self._max_epochs, self._max_steps = self.trainer.max_epochs, self.trainer.max_steps
        if self._max_steps < 0 and (self._max_epochs is None or self._max_epochs < 1):
            raise ValueError(f"trainer.max_epochs is {self._max_epochs}; local epochs must be at least 1")
        for name, allowed in {
            "max_epochs": "at least 1, or -1 for no limit beside max_steps",
            "max_steps": "at least 1, or -1 for no limit",
            "limit_train_batches": "at least 1, or a share in (0, 1]",
        }.items():
            if getattr(self.trainer, name) == 0:
                raise ValueError(f"trainer.{name} is 0, with which nothing is trained; it must be {allowed}")
        self._accumulate, self._clip = self.trainer.accumulate_grad_batches, self.trainer.gradient_clip_val
        if self._clip is not None and not self._clip >= 0:
            raise ValueError(f"trainer.gradient_clip_val is {self._clip}; it must be at least 0, or null")
        self._dry = bool(template.get("fast_dev_run"))
        self.num_gradients = 0  # backward passes of all fits so far
        self.flops: FlopCount | None = None  # counts where one is set
        self._limit: tuple[float, float] | None = None  # seconds of the turn at hand, and when it is over
        self.journal: Journal | None = None  # keeps what turns come to where one is set
        self._place: Training | None = None  # in the journal, of the request that is being carried out
        # A limit on forward passes would leave outputs without their examples; a dry run has fewer examples instead.
        self.trainer.limit_predict_batches = 1.0

    @property
    def trained(self) -> bool:
        """Whether a gradient has been taken, be it in a fit that failed."""
        return self.num_gradients > 0 or any(task.num_gradients > 0 for task in self.tasks.values())

    def run(self, steps: Steps, *owner: object) -> Any:
        """Drive a client program (or any generator of requests) to its end.

        Args:
            steps: The generator.
            *owner: Who owns its randomness: round and client key.

        Returns:
            What the generator returns.
        """
        ask = self.turn(client_turn(" ".join(map(str, owner[1:]))), *owner)
        try:
            request = next(steps)
            while True:
                request = steps.send(ask(request))
        except StopIteration as end:
            return end.value

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Requests of the block raise `TimeoutError` once so many seconds have passed: before they start, and before each
        batch."""
        self._limit = seconds, time.monotonic() + seconds
        try:
            yield
        finally:
            self._limit = None

    def _in_time(self) -> None:
        if self._limit is not None and time.monotonic() > self._limit[1]:
            raise TimeoutError(
                f"the client has not finished within federation.client_timeout, {self._limit[0]} seconds"
            )

    def turn(self, name: str, *owner: object) -> Callable[[Fit | Predict], Result]:
        """What carries out the requests of a client's or the server's turn one after the other, or takes their results out
        of the journal."""
        numbers = count()

        def ask(request: Fit | Predict) -> Result:
            number = next(numbers)
            if self.journal is None:
                return self.execute(request, *owner)
            if (kept := self.journal.result(name, number, request)) is not None:
                try:
                    return self._recall(request, kept)
                except (KeyError, ValueError):  # a task that does not take what it gave
                    self.journal.discard(name, number)
            before = self.flops.total if self.flops else 0.0
            self._place = self.journal.training(name, number, request)
            try:
                result = self.execute(request, *owner)
            finally:
                self._place = None
            self.journal.keep(name, number, request, result, self.flops.total - before if self.flops else 0.0)
            return result

        return ask

    def _recall(self, request: Fit | Predict, kept: Mapping[str, Any]) -> Result:
        """A result out of the journal; task and callbacks are left as the request has left them."""
        task, result = self._task(request.task), result_of(kept)
        if request.start is not None:
            task.load(request.start)
        if isinstance(request, Fit):
            task.load({**result.params, **result.buffers})
            for callback, state in zip(request.callbacks, kept["callbacks"], strict=True):
                callback.load_state_dict(state)
        count_costs(self, kept)
        return result

    def execute(self, request: Fit | Predict, *owner: object) -> Result:
        """Carry out one request."""
        self._in_time()
        task = self._task(request.task)
        if request.start is not None:
            task.load(request.start)
        task.given = request.given
        task.request_seed = derive_seed(self.seed, *owner, *request.key)
        with owned_global_rng(self.seed, *owner, *request.key):
            try:
                return self._fit(task, request, owner) if isinstance(request, Fit) else self._predict(task, request)
            finally:
                task.given, task.rule, task.criterion, task.learning_rate, task.lr_scale = {}, None, None, None, 1.0
                task.pictures, task.examples = [], None
                task._trainer = None  # else the module keeps the optimizer, its state and the loaders alive

    def _task(self, name: str) -> FederatedTask:
        if name not in self.tasks:
            raise ValueError(f"no task is called {name!r}; there are: {', '.join(sorted(self.tasks))}")
        return self.tasks[name]

    def _fit(self, task: FederatedTask, fit: Fit, owner: tuple[object, ...]) -> Result:
        check(fit)
        trainer = self.trainer
        if fit.rules:
            if trainer.precision in ("16-mixed", "16-true"):
                raise ValueError(
                    f"trainer.precision {trainer.precision} cannot run {type(fit.rules[0]).__name__}: the gradient scaler "
                    "calls a step's closure once only; use bf16-mixed or 32-true"
                )
            task.rule = compose(fit.rules)
            if task.rule.perturbs and trainer.accumulate_grad_batches != 1:
                raise ValueError(
                    f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}; it must be 1 where "
                    "gradients are taken at perturbed weights: of a step's batches only the last one would be"
                )
        if "lr" in fit.overrides:
            task.learning_rate = float(fit.overrides["lr"])
        task.lr_scale = float(fit.overrides.get("lr_scale", 1.0))
        # Callbacks of the configuration are copied per fit: one object in several fits would carry its state along.
        callbacks = [*copy.deepcopy(self.callbacks), *fit.callbacks]
        by_trainer = not self._lean(task, callbacks)
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
        generator = torch_generator(self.seed, *owner, *fit.key, "shuffle")
        batch_size = int(fit.overrides.get("batch_size", self.batch_size))
        draws = torch_generator(self.seed, *owner, *fit.key, "augment") if fit.data.augmentation else None
        data = self._inputs(task, fit.data, keep=draws is None)
        task.examples = data
        share = trainer.global_rank, trainer.world_size
        loader = BatchLoader(data, batch_size, generator, *share, draws, fit.poisson, self._in_time)
        task.train()
        try:
            epochs, steps = self._rewind(fit.overrides, by_trainer)
            if not by_trainer:
                place = self._place
                snapshots = None if place is None else Snapshots(place, trainer, task, loader, self._tell)
                optimizer, num_steps = lean.fit(trainer, task, loader, epochs, steps, snapshots)
            else:
                limit, batches = trainer.limit_train_batches, len(loader)
                if isinstance(limit, float) and limit > 0 and int(limit * batches) < 1:
                    raise ValueError(
                        f"trainer.limit_train_batches is {limit}; it must be at least {1 / batches:.4g} for a fit of "
                        f"{batches} batches, or a whole number"
                    )
                trainer.fit(task, loader)
                optimizer, num_steps = trainer.optimizers[0], trainer.global_step
            outcome = _outcome(optimizer)
            if self.flops is not None:
                often = loader.served * task.num_gradients / max(num_steps, 1)
                loader.poisson = False  # the batch that is looked at must not be empty
                self.flops.fit(fit.task, task, next(iter(loader)), often)
            self.num_gradients += task.num_gradients
        finally:
            self._release(by_trainer)
        if trainer.world_size > 1:
            task.loss_sum = trainer.strategy.reduce(task.loss_sum, reduce_op="mean")
        return Result(
            params={name: cpu_copy(p) for name, p in task.trainable().items()},
            buffers={name: cpu_copy(b) for name, b in task.persistent_buffers().items()},
            num_steps=num_steps,
            lr_sum=task.lr_sum,
            metrics=task.fit_metrics(),
            num_gradients=task.num_gradients,
            outcome=outcome,
            pictures=tuple(task.pictures),
        )

    def _lean(self, task: FederatedTask, callbacks: Sequence[Callback]) -> bool:
        """Whether the lean loop carries a request out.

        Raises:
            ValueError: It was asked for, and cannot.
        """
        if self.client_loop == "trainer":
            return False
        reason = lean.obstacle(self.trainer, task, callbacks)
        if reason and self.client_loop == "lean":
            raise ValueError(f"federation.client_loop is 'lean', but a fit needs Lightning's Trainer because {reason}")
        if reason:
            over = "; where it is killed, such a fit starts over" if self.journal is not None else ""
            self._tell(f"fits of {type(task).__name__} run under Lightning's Trainer because {reason}{over}", reason)
        return reason is None

    def _tell(self, line: str, reason: str | None = None) -> None:
        """Say a line once, or one for the same reason."""
        if (reason or line) not in self._told and self.trainer.global_rank == 0:
            self._told.add(reason or line)
            print(line, file=sys.stderr)

    def _release(self, by_trainer: bool) -> None:
        """Let go of the optimizer, its state, the examples and the callbacks, which the Trainer would keep until the next
        fit."""
        self.trainer.callbacks = []  # type: ignore[attr-defined]
        self.trainer.strategy._reset_optimizers_and_schedulers()
        self._rewind({}, by_trainer)

    @staticmethod
    def _inputs(task: FederatedTask, examples: Examples, keep: bool = True) -> Examples:
        """The examples, or what the task has kept of them; nothing of inputs that will be changed at random is kept."""
        cached = task.cached(examples) if keep else None
        task.inputs_are_cached = cached is not None
        return examples if cached is None else cached

    def _rewind(self, overrides: Mapping[str, float], by_trainer: bool) -> tuple[int, int]:
        """Give the Trainer new loops. A Trainer that has run would otherwise see its limits reached and train nothing. The
        lean loop only counts in them: there the counters go back.

        Returns:
            The limits of epochs and steps, -1 for none.
        """
        trainer = self.trainer
        epochs, steps, _ = self.budget(overrides)
        loop = trainer.fit_loop
        if by_trainer:
            trainer.fit_loop = type(loop)(trainer, min_epochs=loop.min_epochs, max_epochs=epochs)
            inner = type(loop.epoch_loop)(trainer, min_steps=loop.epoch_loop.min_steps, max_steps=steps)
            trainer.fit_loop.epoch_loop = inner
        else:
            loop.max_epochs, loop.epoch_loop.max_steps = epochs, steps
            loop.epoch_progress.reset()
            loop.epoch_loop.automatic_optimization.optim_progress.reset()
        trainer.should_stop = False
        # Callbacks change these in the middle of a fit.
        trainer.accumulate_grad_batches, trainer.gradient_clip_val = self._accumulate, self._clip
        return epochs, steps

    def passes(self, count: int) -> float:
        """Passes over so many examples that a fit takes, by the trainer's budget."""
        epochs, steps, size = self.budget({})
        by_steps = steps * min(size, count) / max(count, 1) if steps >= 0 else math.inf
        return min(by_steps, epochs if epochs >= 0 else math.inf)

    def budget(self, overrides: Mapping[str, float]) -> tuple[int, int, int]:
        """Epochs and steps, -1 for no limit, and batch size of a fit."""
        epochs, steps = self._max_epochs, self._max_steps
        if not self._dry:
            epochs = int(overrides.get("max_epochs", epochs if epochs is not None else 1))
            steps = int(overrides.get("max_steps", steps))
        return -1 if epochs is None else epochs, steps, int(overrides.get("batch_size", self.batch_size))

    @torch.no_grad()
    def _predict(self, task: FederatedTask, request: Predict) -> Result:
        if request.data is None:
            raise ValueError("a Predict was executed without data")
        if len(request.data) == 0:
            return Result(outputs=torch.empty(0))
        trainer = self.trainer
        task.output = request.output
        task.eval()
        trainer.callbacks = []  # type: ignore[attr-defined]
        loader = BatchLoader(self._inputs(task, request.data), self.eval_batch_size, check=self._in_time)
        run = lean.predict if self._lean(task, []) else Trainer.predict
        outputs: Any = run(trainer, task, loader)
        if self.flops is not None:
            self.flops.predict(request.task, task, next(iter(loader)), len(request.data))
        # Lightning predicts in inference mode; a copy outside of it can be trained on.
        return Result(outputs=torch.cat([o.detach().cpu() for o in outputs]).clone())


def _outcome(optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """What the rule hands back from its last step."""
    if not isinstance(optimizer, RuleOptimizer):
        return {}
    groups = optimizer.rule.outcome(optimizer.carry)
    return {g: {n: cpu_copy(value) for n, value in t.items()} for g, t in groups.items()}


def check(fit: Fit) -> None:
    """Refuse a fit that cannot be carried out.

    Raises:
        ValueError: An override is unknown or out of range, or there are no examples.
    """
    unknown = set(fit.overrides) - set(_OVERRIDES)
    if unknown:
        raise ValueError(f"a fit overrides {sorted(unknown)}; allowed: {', '.join(_OVERRIDES)}")
    for name, value in fit.overrides.items():
        least = 0 if name in ("lr", "lr_scale") else 1
        if value < least:
            raise ValueError(f"a fit overrides {name} with {value}; it must be at least {least}")
    if len(fit.data) == 0:
        raise ValueError(f"a fit of task {fit.task!r} was given no examples")


class ServerSide:
    """What `Method.server_update` works with: the participant, and whose randomness it is."""

    def __init__(self, participant: Participant, round: int) -> None:
        self.seed, self.round = participant.seed, round
        self._ask = participant.turn(SERVER_TURN, round, "server")

    def fit(self, request: Fit) -> Result:
        return self._ask(request)

    def predict(self, request: Predict) -> Result:
        return self._ask(request)
