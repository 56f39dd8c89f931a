"""What an engine is, and what it hands back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fl_lightning.aggregation import BLOCK_SIZE, block_size
from fl_lightning.federation.incoming import Guard
from fl_lightning.federation.state import MemoryStore
from fl_lightning.message import Group, Groups, Message
from fl_lightning.methods.base import ClientProgram, Reply
from fl_lightning.tasks.base import Picture

Weight = Callable[[Message], float]
Addressed = Callable[[str], tuple[str, ...] | None]


@dataclass
class Total:
    """The reduced replies of a round (`fl_lightning.methods.base.Reduced`), what they cost (bytes, backward passes), and
    what the clients have drawn."""

    groups: dict[str, Any] = field(default_factory=dict)
    clients: tuple[str, ...] = ()
    examples: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_gradients: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    pictures: dict[str, tuple[Picture, ...]] = field(default_factory=dict)
    counted_as: float | None = None  # in place of the number of replies

    @property
    def participants(self) -> float:
        """How many clients the server's arithmetic may take to have replied."""
        return len(self.clients) if self.counted_as is None else self.counted_as

    def take(self, reply: Reply, received: Message | None, weight: float) -> float:
        """Count a reply, to what was received (None: to nothing), and add its numbers, weighted; returns the weight."""
        self.bytes_down += received.nbytes if received is not None else 0
        self.bytes_up += reply.message.nbytes
        self.examples[reply.message.sender] = reply.message.num_examples
        if reply.pictures:
            self.pictures[reply.message.sender] = reply.pictures
        for means, values in (self.scalars, reply.message.scalars), (self.metrics, reply.metrics):
            for name, value in values.items():
                means[name] = means.get(name, 0.0) + value * weight
        return weight

    @property
    def num_examples(self) -> int:
        """Training examples of all who replied."""
        return sum(self.examples.values())

    def average(self, weights: float) -> None:
        """Turn sums into means."""
        self.scalars = {name: value / weights for name, value in self.scalars.items()}
        self.metrics = {name: value / weights for name, value in self.metrics.items()}


class Engine(ABC):
    """Runs a cohort's programs and reduces their replies in fixed blocks."""

    memory: MemoryStore
    guard: Guard

    @abstractmethod
    def run(
        self,
        program: ClientProgram,
        message: Message,
        cohort: Sequence[str],
        uplink: Mapping[str, Group],
        weight: Weight,
        addressed: Addressed,
        progress: Callable[[str], None],
        accepted: Callable[[Reply], None] | None,
    ) -> Total:
        """One round at the clients; ``progress`` is called with each client's key as it starts, ``accepted``, where
        somebody wants that, with each reply before it is reduced. Clients are asked through the guard; who fails for good
        is in no sum, block boundaries stay."""

    @abstractmethod
    def evaluate(
        self, program: ClientProgram, message: Message, clients: Sequence[str]
    ) -> dict[str, dict[str, Tensor]] | None:
        """Personalised evaluation: each client's outputs, or None where nothing is personal."""

    def close(self) -> None:  # noqa: B027  (most have nothing to do)
        """Let go of processes; another round starts them again."""


def addressed_part(message: Message, groups: tuple[str, ...] | None) -> Message:
    """What a client receives of a broadcast; None is all of it."""
    return message if groups is None else message.only(groups)


class BlockReducer:
    """Adds replies up in the order of the cohort, in blocks of ``size`` clients, and merges the blocks in order."""

    def __init__(self, uplink: Mapping[str, Group], weight: Weight, size: int = BLOCK_SIZE) -> None:
        self.uplink, self.weight, self.size = uplink, weight, size
        self.totals: dict[str, Any] = dict.fromkeys(uplink)
        self.block: dict[str, Any] = dict.fromkeys(uplink)
        self.in_block, self.asked = 0, 0

    def add(self, message: Message | None) -> None:
        """The next client's reply, or None where it has failed."""
        if message is not None:
            weight = self.weight(message)
            for name, group in self.uplink.items():
                self.block[name] = group.reduce.add(self.block[name], message.tensors[name], weight, message.sender)
            self.in_block += 1
        self.asked += 1
        if self.asked % self.size == 0:
            self.close_block()

    def close_block(self) -> None:
        """Merge the block at hand into the total, unless nobody of it has replied."""
        if self.in_block:
            block, self.block, self.in_block = self.block, dict.fromkeys(self.uplink), 0
            self.merge(block)

    def merge(self, block: Mapping[str, Any]) -> None:
        """One more whole block, by group; it may have been added up elsewhere."""
        for name, group in self.uplink.items():
            self.totals[name] = group.reduce.merge(self.totals[name], block[name])

    def finish(self) -> dict[str, Any]:
        """The reduced groups."""
        self.close_block()
        return {
            name: self.uplink[name].reduce.finish(total) for name, total in self.totals.items() if total is not None
        }


class Intake:
    """Takes a round's replies in, in the order of the cohort: reduces and counts them."""

    def __init__(
        self,
        cohort: Sequence[str],
        uplink: Mapping[str, Group],
        weight: Weight,
        accepted: Callable[[Reply], None] | None,
    ) -> None:
        self.cohort, self.weight, self.accepted = cohort, weight, accepted
        self.total, self.reducer = Total(), BlockReducer(uplink, weight, block_size(len(cohort)))
        self.memories: dict[str, Groups] = {}
        self.weights = 0.0

    def take(self, reply: Reply | None, received: Message | None) -> None:
        """The next client's reply (None: it has failed) to what was received (None: to nothing)."""
        if reply is not None:
            if self.accepted is not None:
                self.accepted(reply)
            self.count(reply, received)
        self.reducer.add(None if reply is None else reply.message)

    def count(self, reply: Reply, received: Message | None) -> None:
        """A reply that is reduced elsewhere."""
        self.total.clients += (reply.message.sender,)
        if reply.memory is not None:
            self.memories[reply.message.sender] = reply.memory
        self.weights += self.total.take(reply, received, self.weight(reply.message))

    def finish(self, guard: Guard, memory: MemoryStore, num_gradients: int) -> Total:
        """The round's total; the memories of those who replied are committed.

        Raises:
            TooFewReplies: Fewer clients of the cohort have replied than must.
        """
        guard.check_quorum(self.total.clients, self.cohort)
        self.total.groups = self.reducer.finish()
        self.total.average(self.weights)
        self.total.num_gradients = num_gradients
        for key, groups in self.memories.items():
            memory.commit(key, groups)
        return self.total
