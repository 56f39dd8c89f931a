"""Hostile clients for experiments: a client's half that wraps an honest one and sends something else.

Who attacks is decided by the run's seed, or by name. What an attacker keeps and how it trains is as ever, labels aside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_lightning.data.examples import DataInfo, Examples
from fl_lightning.federation.sampling import round_half_up
from fl_lightning.message import Groups, Message
from fl_lightning.methods.base import Client, ClientProgram, Reply, Steps
from fl_lightning.rng import numpy_generator, torch_generator
from fl_lightning.tasks.base import FederatedTask

_SEEN = "attack/seen"  # a group of an attacker's memory, which the honest half does not see


class Attack(ABC):
    """What hostile clients do.

    Args:
        share: Share of all clients that attack, in [0, 1], drawn from the seed; those of a smaller share are among those of
            a larger one.
        clients: Or their keys.
    """

    remembers = False  # whether an attacker keeps the broadcast model that it has seen last

    def __init__(self, share: float | None = None, clients: list[str] | None = None) -> None:
        if (share is None) == (clients is None):
            raise ValueError(f"give either share or clients; got share={share}, clients={clients}")
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"share is {share}; it must be in [0, 1]")
        self.share, self.clients = share, None if clients is None else [str(client) for client in clients]

    def attackers(self, clients: Sequence[str], seed: int) -> frozenset[str]:
        """Keys of those who attack.

        Raises:
            ValueError: A key is unknown.
        """
        if self.clients is not None:
            if unknown := sorted(set(self.clients) - set(clients)):
                raise ValueError(f"federation.attack names {unknown}; clients: {', '.join(clients)}")
            return frozenset(self.clients)
        order = numpy_generator(seed, "attackers").permutation(len(clients))
        return frozenset(clients[i] for i in order[: round_half_up(len(clients) * (self.share or 0.0))])

    def wrap(self, program: ClientProgram, info: DataInfo, seed: int) -> ClientProgram:
        """The client's half of a federation with attackers in it."""
        return Attacked(program, self, self.attackers(info.clients, seed), info.num_classes)

    def data(self, examples: Examples, num_classes: int) -> Examples:
        """What an attacker trains on."""
        return examples

    @abstractmethod
    def corrupt(self, groups: Groups, client: Client, message: Message) -> Groups:
        """What an attacker sends in place of ``groups``, having received ``message``."""


class _Elementwise(Attack):
    """Changes every floating tensor by itself."""

    def corrupt(self, groups: Groups, client: Client, message: Message) -> Groups:
        draw = torch_generator(client.seed, client.round, client.key, "attack")
        return {
            group: {n: self.change(v, draw) if v.is_floating_point() else v for n, v in sorted(tensors.items())}
            for group, tensors in sorted(groups.items())
        }

    @abstractmethod
    def change(self, value: Tensor, draw: torch.Generator) -> Tensor:
        """Another tensor of the same shape and dtype."""


class Scaling(_Elementwise):
    """Send ``factor`` times the update (model replacement: Bagdasaryan et al., 2020).

    Args:
        factor: The factor; negative ones flip the sign too.
        share: See `Attack`.
        clients: See `Attack`.
    """

    def __init__(self, factor: float = 10.0, share: float | None = None, clients: list[str] | None = None) -> None:
        super().__init__(share, clients)
        self.factor = factor

    def change(self, value: Tensor, draw: torch.Generator) -> Tensor:
        return value * self.factor


class SignFlip(Scaling):
    """Send minus ``factor`` times the update.

    Args:
        factor: Above 0.
        share: See `Attack`.
        clients: See `Attack`.
    """

    def __init__(self, factor: float = 1.0, share: float | None = None, clients: list[str] | None = None) -> None:
        if not factor > 0:
            raise ValueError(f"factor is {factor}; it must be above 0")
        super().__init__(-factor, share, clients)


class GaussianNoise(_Elementwise):
    """Send noise in place of the update (Blanchard et al., 2017, section 5).

    Args:
        std: Its standard deviation, at least 0. 200 in the paper.
        share: See `Attack`.
        clients: See `Attack`.
    """

    def __init__(self, std: float = 200.0, share: float | None = None, clients: list[str] | None = None) -> None:
        super().__init__(share, clients)
        if not std >= 0:
            raise ValueError(f"std is {std}; it must be at least 0")
        self.std = std

    def change(self, value: Tensor, draw: torch.Generator) -> Tensor:
        return torch.randn(value.shape, generator=draw, dtype=value.dtype) * self.std


class LabelFlip(Attack):
    """Train on labels c -> C - 1 - c, and send what comes of it (Fang et al., 2020, section 4)."""

    def data(self, examples: Examples, num_classes: int) -> Examples:
        return Flipped(examples, num_classes)

    def corrupt(self, groups: Groups, client: Client, message: Message) -> Groups:
        return groups


class InnerProduct(Attack):
    """Send minus ``factor`` times the mean honest update (Xie et al., 2020), so that the mean of all replies points uphill.

    The paper's attackers know the mean. Here they take the last movement of the broadcast model for it, which all of them
    see, so that they all send the same; in their first round, and for other groups, each its own update.

    Args:
        factor: epsilon, above 0. Small ones pass rules that look at distances, large ones hurt more.
        share: See `Attack`.
        clients: See `Attack`.
    """

    remembers = True

    def __init__(self, factor: float = 0.5, share: float | None = None, clients: list[str] | None = None) -> None:
        super().__init__(share, clients)
        if not factor > 0:
            raise ValueError(f"factor is {factor}; it must be above 0")
        self.factor = factor

    def corrupt(self, groups: Groups, client: Client, message: Message) -> Groups:
        seen = client.memory.get(_SEEN, {})
        out: dict[str, dict[str, Tensor]] = {}
        for group, tensors in groups.items():
            shared = message.tensors.get(group, {}) if group == "model" else {}
            out[group] = {}
            for name, value in tensors.items():
                moved = shared[name] - seen[name] if name in shared and name in seen else value
                out[group][name] = -self.factor * moved if value.is_floating_point() else value
        return out


class OneNaN(Attack):
    """Send the update with one number that is none."""

    def corrupt(self, groups: Groups, client: Client, message: Message) -> Groups:
        out = {group: dict(tensors) for group, tensors in groups.items()}
        group, name = min((g, n) for g, tensors in out.items() for n, v in tensors.items() if v.is_floating_point())
        value = out[group][name].clone()
        draw = torch_generator(client.seed, client.round, client.key, "attack")
        value.view(-1)[torch.randint(value.numel(), (1,), generator=draw)] = torch.nan
        out[group][name] = value
        return out


class Flipped(Examples):
    """Examples with labels C - 1 - c."""

    def __init__(self, source: Examples, num_classes: int) -> None:
        self.source, self.labels = source, num_classes - 1 - source.labels
        self.domains, self.augmentation = source.domains, source.augmentation

    def fetch(self, indices: Tensor) -> Tensor:
        return self.source.fetch(indices)

    def extras(self, indices: Tensor) -> dict[str, Tensor]:
        return self.source.extras(indices)


@dataclass(frozen=True)
class Attacked(ClientProgram):
    """A client's half with attackers among the clients.

    Attributes:
        honest: What the others do.
        attack: What the attackers do.
        attackers: Their keys.
        num_classes: Number of classes.
    """

    honest: ClientProgram
    attack: Attack
    attackers: frozenset[str]
    num_classes: int

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        return self.honest.tasks(model)

    def update(self, client: Client, message: Message) -> Steps:
        if client.key not in self.attackers:
            return (yield from self.honest.update(client, message))
        train = self.attack.data(client.train, self.num_classes)
        reply: Reply = yield from self.honest.update(replace(self._plain(client), train=train), message)
        sent = Message(
            message.round,
            client.key,
            self.attack.corrupt(reply.message.tensors, client, message),
            reply.message.scalars,
            reply.message.num_examples,
        )
        if not self.attack.remembers:
            return replace(reply, message=sent)
        kept = self._plain(client).memory if reply.memory is None else reply.memory
        return replace(reply, message=sent, memory={**kept, _SEEN: message.tensors.get("model", {})})

    def evaluate(self, client: Client, message: Message) -> Steps | None:
        return self.honest.evaluate(self._plain(client), message)

    @staticmethod
    def _plain(client: Client) -> Client:
        memory = {group: tensors for group, tensors in client.memory.items() if group != _SEEN}
        return replace(client, memory=memory)
