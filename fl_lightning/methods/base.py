"""The interface of a federated method: two halves that share nothing but messages.

The client's half (`ClientProgram`) sees the message, its own data and its memory. The server's half (`Method`) holds state
and decides. Neither writes a training loop: both ask for local trainings (`Fit`) and forward passes (`Predict`), which a
participant carries out with Lightning.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback
from torch import Tensor

from fl_lightning.callbacks.cosine_rate import CosineRate
from fl_lightning.data.examples import DataInfo, Examples
from fl_lightning.message import Group, Groups, Message, Tensors
from fl_lightning.rules.base import LocalRule
from fl_lightning.tasks.base import FederatedTask, Picture

SERVER = "server"
UNLIMITED = 10**9  # epochs where the budget is one of steps, steps where it is one of epochs


@dataclass(frozen=True)
class Fit:
    """One local training, as data.

    Attributes:
        task: Name of the task to train, from ``tasks()`` of the program or the method.
        data: Training examples.
        start: Trainable parameters (and buffers) to start from, by name; None continues from what the task holds.
        given: Groups of tensors that the task, its rules or callbacks need.
        rules: Gradient transformations, innermost first.
        callbacks: Lightning callbacks of this fit; new ones for every fit, since they may hold state. What one carries to a
            later fit, its ``state_dict`` must hold (tensors and JSON values): a resumed round restores it from there.
        overrides: ``max_epochs``, ``max_steps``, ``batch_size`` in place of the configured ones; ``lr`` in place of the
            optimizer's; ``lr_scale`` multiplies it.
        key: Who owns the randomness of this fit within the round; two fits of one client and round need different keys.
        poisson: Draw every example into every batch by itself, with probability batch size over number of examples. Batches
            may be empty, so a callback must see to the loss.
    """

    task: str
    data: Examples
    start: Tensors | None = None
    given: Groups = field(default_factory=dict)
    rules: tuple[LocalRule, ...] = ()
    callbacks: tuple[Callback, ...] = ()
    overrides: Mapping[str, float] = field(default_factory=dict)
    key: tuple[object, ...] = ("fit",)
    poisson: bool = False


@dataclass(frozen=True)
class Predict:
    """One forward pass over examples, in their order.

    Attributes:
        task: Name of the task.
        data: Examples; None only in `Method.evaluations`, where the loop fills in each test set.
        start: Parameters and buffers to load first; None keeps what the task holds.
        given: Groups of tensors that the task needs.
        output: The task's method to call on a batch of inputs.
        key: Who owns the randomness.
    """

    task: str
    data: Examples | None
    start: Tensors | None = None
    given: Groups = field(default_factory=dict)
    output: str = "logits"
    key: tuple[object, ...] = ("predict",)


@dataclass(frozen=True)
class Result:
    """What a `Fit` or `Predict` came to. All tensors are CPU copies, not to be changed in place.

    Attributes:
        params: Trainable parameters after a fit.
        buffers: Persistent buffers after a fit (BatchNorm statistics).
        outputs: (N, ...) outputs of a `Predict`.
        num_steps: Optimizer steps taken.
        lr_sum: Sum of the learning rate over these steps.
        metrics: Means over the fit.
        num_gradients: Backward passes taken.
        outcome: Groups of tensors that the rules hand back; see `LocalRule.outcome`.
        pictures: What callbacks have drawn.
    """

    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None
    num_steps: int = 0
    lr_sum: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_gradients: int = 0
    outcome: Groups = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Training:
    """The budget of a local training.

    Attributes:
        steps: Optimizer steps, at least 1.
        batch_size: Images a step, at least 1; never more than there are.
        cosine: Let the learning rate fall along a cosine to 0.
        lr: Learning rate in place of the optimizer's, at least 0; None keeps that.
    """

    steps: int
    batch_size: int
    cosine: bool = False
    lr: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("batch_size", self.batch_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.lr is not None and not self.lr >= 0:
            raise ValueError(f"lr is {self.lr}; it must be at least 0")

    def fit(
        self,
        task: str,
        data: Examples,
        start: Tensors | None,
        key: tuple[object, ...],
        callbacks: Sequence[Callback] = (),
        given: Groups = MappingProxyType({}),
        **overrides: float,
    ) -> Fit:
        """The request. Callbacks are copied, since they may hold state; ``overrides`` are further ones of the fit."""
        own = (*map(copy.deepcopy, callbacks), *((CosineRate(self.steps),) if self.cosine else ()))
        budget = {"max_steps": self.steps, "max_epochs": UNLIMITED, "batch_size": min(self.batch_size, len(data))}
        rate = {} if self.lr is None else {"lr": self.lr}
        return Fit(task, data, start, given, callbacks=own, overrides={**budget, **rate, **overrides}, key=key)


Steps = Generator[Fit | Predict, Result, Any]


@dataclass(frozen=True)
class Reply:
    """A client's answer: the message, and the memory that is committed when the message is accepted.

    Attributes:
        message: What crosses the wire.
        memory: The client's new memory by group; None keeps the old one.
        metrics: Numbers for the round's record; they do not cross the wire in a deployment and are not counted.
        pictures: Likewise pictures; they may show the client's own images.
    """

    message: Message
    memory: Groups | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Client:
    """What the client's half may see: its data, its memory, nothing else.

    Attributes:
        key: The client's name.
        round: Current round.
        seed: The run's seed, for draws of the client's own (owner: round, key, purpose).
        train: Training examples.
        val: Validation examples.
        test: The client's share of the test set.
        shared_test: Test examples of all clients, a simulation's privilege for judging personal models.
        memory: What this client kept from its last accepted reply, read-only.
    """

    key: str
    round: int
    seed: int
    train: Examples
    val: Examples
    test: Examples
    shared_test: Examples
    memory: Groups

    @property
    def num_examples(self) -> int:
        return len(self.train)

    def reply(
        self,
        groups: Groups,
        *,
        scalars: Mapping[str, float] | None = None,
        memory: Groups | None = None,
        metrics: Mapping[str, float] | None = None,
        pictures: Sequence[Picture] = (),
    ) -> Reply:
        """Answer with groups of tensors; ``memory`` replaces the client's memory once the reply is accepted."""
        message = Message(self.round, self.key, groups, scalars or {}, self.num_examples)
        return Reply(message, memory, metrics or {}, tuple(pictures))


class ClientProgram(ABC):
    """The client's half: hyper-parameters only (a frozen dataclass), rebuilt from the configuration wherever it runs."""

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        """The tasks that this program names, made from the configured model once per worker."""
        return {"model": model}

    @abstractmethod
    def update(self, client: Client, message: Message) -> Steps:
        """Yield `Fit`s and `Predict`s, receive `Result`s, return a `Reply`."""

    def evaluate(self, client: Client, message: Message) -> Steps | None:
        """Personalised evaluation: yield requests, return ``{"own": logits, "val": logits, "global": logits}`` (each
        optional) for the client's share of the test set, its validation examples, and the test set of all. None: nothing is
        personal."""
        return None


class Reduced(Protocol):
    """What the server sees of a round's replies: groups as their reducers left them, who replied, training examples
    of each, and the means of the messages' scalars and of the clients' metrics, weighted as replies are. ``participants`` is
    their number for the server's arithmetic, which a private rule does not let see the real one."""

    groups: dict[str, Any]
    clients: tuple[str, ...]

    @property
    def participants(self) -> float: ...

    examples: dict[str, int]
    scalars: dict[str, float]
    metrics: dict[str, float]


class Server(Protocol):
    """The means that `Method.server_update` has: trainings and forward passes on the server."""

    seed: int
    round: int

    def fit(self, request: Fit) -> Result: ...

    def predict(self, request: Predict) -> Result: ...


@dataclass(frozen=True)
class Distillation:
    """How a server has trained a student on what its teachers say.

    Attributes:
        fit: The request for the student's training, as `unused` keeps it.
        teacher: The request for the teachers' scores of examples, without the examples.
    """

    fit: Fit
    teacher: Predict


def unused(fit: Fit) -> Fit:
    """The request as it is now: what a training does to callbacks, even to memories that copies share, does not reach it."""
    return replace(fit, callbacks=tuple(copy.deepcopy(copy.copy(callback)) for callback in fit.callbacks))


class Method(ABC):
    """The server's half: state and decisions.

    Args:
        rounds: Number of rounds, at least 1.

    Attributes:
        one_model: Whether the model whose accuracy is reported is, after the last round, one set of weights.
        makes_images: Whether `synthetic` gives a `Bank` then.
    """

    one_model, makes_images = True, False
    without: Sequence[str] = ()

    def __init__(self, rounds: int) -> None:
        if rounds < 1:
            raise ValueError(f"rounds is {rounds}; it must be at least 1")
        self.rounds = rounds

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        """The tasks that the server's requests name."""
        return {"model": model}

    def limit_rounds(self, rounds: int) -> None:
        """Run fewer rounds than configured (a dry run). Called before `setup`."""
        self.rounds = min(self.rounds, rounds)

    @abstractmethod
    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        """Make the initial server state from the built model."""

    @abstractmethod
    def client(self) -> ClientProgram:
        """The client's half."""

    @abstractmethod
    def broadcast(self, round: int) -> Message:
        """What every client of this round may receive."""

    def judged(self, round: int) -> Message:
        """What personal models are evaluated with: the broadcast, unless clients start from elsewhere than the model."""
        return self.broadcast(round)

    def addressed(self, round: int, client: str) -> tuple[str, ...] | None:
        """The groups of the broadcast that this client is sent; None is all of them."""
        return None

    def cohort(self, round: int, sampled: tuple[str, ...]) -> tuple[str, ...]:
        """Who takes part, given the sampler's draw; () makes a server-only round."""
        return sampled

    @abstractmethod
    def uplink(self, round: int) -> dict[str, Group]:
        """The groups that a reply must hold, and how they are reduced."""

    def numbers(self, round: int) -> tuple[str, ...]:
        """Names of the numbers (`Message.scalars`) that a reply must hold beside them."""
        return ()

    def weight(self, message: Message) -> float:
        """Weight of a reply in a mean, from its number of examples and its scalars. An engine may ask for it with the number
        of examples alone, and asks again when the reply is there."""
        return float(message.num_examples)

    @abstractmethod
    def server_update(self, round: int, total: Reduced, server: Server) -> Mapping[str, float]:
        """Take the reduced replies in; may train. Returns numbers for the round's record."""

    @abstractmethod
    def evaluations(self) -> dict[str, Predict]:
        """Models to score on the test sets, by prefix; "" is the model whose accuracy is reported."""

    def unlearn(self, key: str, approximate: bool = False) -> int:
        """Remove what a client (its key) or a class ("class:" and its name) left in the state.

        A method that can takes the keys of those who never take part as its argument ``without``, and adds to it here.

        Args:
            key: Who or what is to be forgotten.
            approximate: The cheap variant, where a method has one: hide the influence instead of removing it.

        Returns:
            The round to go on after: later ones are run again.

        Raises:
            ValueError: The method cannot, or the key is unknown.
        """
        raise ValueError(f"{type(self).__name__} cannot unlearn: its model mixes what all clients sent")

    def enrol(self, key: str) -> int:
        """Let a client (its key) or a class ("class:" and its name) of ``without`` take part after all.

        Rounds that are run again must ask nobody for what the state holds already, and lead to the state of a federation in
        which the key took part from the beginning, to the last bit.

        Args:
            key: Who or what is to take part.

        Returns:
            The round to go on after: later ones are run again.

        Raises:
            ValueError: The method cannot, the key is unknown, or it takes part already.
        """
        raise ValueError(
            f"{type(self).__name__} cannot enrol: whoever joins late has missed rounds that others built on"
        )

    def synthetic(self) -> Examples | None:
        """Images that the server has synthesised, if it does that and has by now. For meters."""
        return None

    def distillation(self) -> Distillation | None:
        """The last training of a student, if this process has made one: it is no part of the state. For meters."""
        return None

    def momentum(self) -> dict[str, Tensor] | None:
        """The displacement of the global parameters that the server carries from round to round, downhill; None where it
        has none (yet). For meters."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that the server must remember: nested dicts and lists of tensors, numbers and strings."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""


def judge_personal(client: Client, start: Tensors) -> Steps:
    """What `ClientProgram.evaluate` returns for a client's own model, its task called "model"."""
    own = yield Predict("model", client.test, start)
    held_out = yield Predict("model", client.val, start)
    everywhere = yield Predict("model", client.shared_test, start)
    return {"own": own.outputs, "val": held_out.outputs, "global": everywhere.outputs}


def passes(count: int) -> dict[str, float]:
    """The budget of a server's training, as overrides of its `Fit`: so many passes. The configured limit of steps is the
    clients'."""
    return {"max_epochs": count, "max_steps": UNLIMITED}


def at_least_0(**values: float) -> None:
    """Refuse arguments below 0 (or none that is a number) by name.

    Raises:
        ValueError: One is.
    """
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")


def clone(tensors: Tensors) -> dict[str, Tensor]:
    """Copies by name."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def difference(after: Tensors, before: Tensors) -> dict[str, Tensor]:
    """after - before by name; integers are differences too."""
    return {name: value - before[name] for name, value in after.items()}


def square_norm(tensors: Tensors) -> float:
    """Squared Euclidean norm over all tensors together, in float64."""
    flat = [value.detach().flatten() for value in tensors.values()]
    parts = [value for value in flat if len(value) > 4096]
    if small := [value for value in flat if len(value) <= 4096]:
        parts.append(torch.cat(small))  # each alone would cost more in calls than in arithmetic
    return sum(wide.dot(wide).item() for wide in (part.double() for part in parts))


def client_drift(total: Reduced, update: Tensors, average: Tensors) -> float:
    """sqrt(mean_k ||w_k - w||^2) / ||w||: how far the clients ended from their average w, relative to it.

    From the mean of ||u_k||^2 (the clients' metric ``update_square``) and the mean update u alone, since
    mean ||u_k - u||^2 = mean ||u_k||^2 - ||u||^2. NaN where nobody has replied.
    """
    spread = max(total.metrics.get("update_square", math.nan) - square_norm(update), 0.0)
    return math.sqrt(spread) / max(math.sqrt(square_norm(average)), 1e-12)
