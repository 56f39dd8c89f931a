"""Record-level differential privacy: what a client's training tells of one of its examples is bounded, whoever looks.

Two clients are neighbours if one has one example more. The guarantee holds for the weights that leave a client's fits, over
all rounds in which it took part, against the server too. It covers neither the number of a client's examples, which weighs
its reply, nor the record's ``client/`` columns, a simulator's privilege. The noise is drawn from the run's seed, so that a
run can be repeated: who knows the seed can take it away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fl_lightning.accounting import Accountant, Event, epsilon_of, spend
from fl_lightning.callbacks.private_gradients import PrivateGradients, obstacle
from fl_lightning.federation.callbacks import FederationCallback, Row
from fl_lightning.message import Groups, Message
from fl_lightning.methods.base import Client, ClientProgram, Fit, Predict, Reply, Result, Steps
from fl_lightning.rules.base import compose
from fl_lightning.tasks.base import FederatedTask

if TYPE_CHECKING:
    from fl_lightning.federation.loop import FederationLoop

_SPENT = "record_privacy/spent"  # a group of a client's memory, which its program does not see


class RecordPrivacy(FederationCallback):
    """DP-SGD in every fit of the clients (Abadi et al., 2016), through Opacus.

    A batch holds every example of the client with probability q = ``batch_size`` / n, by itself, and an epoch has
    ceil(n / batch_size) of them; see `PrivateGradients`. What every client has spent is part of its memory, and the worst
    client's epsilon stands in the record as ``privacy/record_epsilon``. A reply that the server refused is not counted.

    Args:
        clip: Largest norm of an example's gradient, above 0.
        noise_multiplier: z; the noise on the sum of a batch's gradients has the standard deviation z times the norm. At
            least 0; 0 gives no privacy, and no epsilon.
        delta: In (0, 1 / examples of the client that has most).
        accountant: "rdp" (Renyi, fast) or "pld" (privacy loss distributions, tighter, seconds a round and client).
    """

    def __init__(
        self,
        clip: float = 1.0,
        noise_multiplier: float = 1.0,
        delta: float = 1e-5,
        accountant: Accountant = "rdp",
    ) -> None:
        if not (clip > 0 and math.isfinite(clip)):
            raise ValueError(f"RecordPrivacy.clip is {clip}; it must be above 0 and finite")
        if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
            raise ValueError(f"RecordPrivacy.noise_multiplier is {noise_multiplier}; it must be at least 0 and finite")
        if not 0 < delta < 1:
            raise ValueError(f"RecordPrivacy.delta is {delta}; it must be in (0, 1)")
        if accountant not in ("rdp", "pld"):
            raise ValueError(f"RecordPrivacy.accountant is {accountant!r}; allowed: 'rdp', 'pld'")
        self.clip, self.noise_multiplier, self.delta = clip, noise_multiplier, delta
        self.accountant: Accountant = accountant

    def wrap(self, program: ClientProgram, batch_size: int) -> ClientProgram:
        """The client's half with private fits."""
        return PrivateRecords(program, self.clip, self.noise_multiplier, batch_size)

    def on_start(self, loop: FederationLoop) -> None:
        """Refuse before any training what cannot be covered.

        Raises:
            ValueError: Something cannot.
        """
        trainer, clients = loop.participant.trainer, loop.data.info.clients
        for name, value, wanted in (
            ("precision", trainer.precision, "32-true"),
            ("accumulate_grad_batches", trainer.accumulate_grad_batches, 1),
            ("devices", trainer.world_size, 1),
        ):
            if value != wanted:
                raise ValueError(f"trainer.{name} is {value}; federation.record_privacy needs {wanted}")
        sizes = {client: len(loop.data.train(client)) for client in clients}
        if self.delta >= 1 / (most := max(sizes.values())):
            largest = max(sizes, key=lambda client: sizes[client])
            raise ValueError(
                f"RecordPrivacy.delta is {self.delta}; it must be in (0, 1 / {most}): client {largest} has {most} examples"
            )
        if (round := loop.round + 1) > loop.method.rounds:
            return
        if rows := [name for name, group in loop.method.uplink(round).items() if group.kind == "rows"]:
            raise ValueError(
                f"federation.record_privacy covers what trainings send; clients also send rows: {', '.join(rows)}"
            )
        # What the first client will ask for first is what every client will.
        data, message = loop.data, loop.method.broadcast(round)
        for key in (loop._cohort(round) or clients)[:1]:
            sets = data.train(key), data.val(key), data.test(key), data.test_sets()["global"]
            steps = loop.program.update(Client(key, round, loop.seed, *sets, loop.memory.get(key)), message)
            request = next(steps)
            steps.close()
            if isinstance(request, Fit) and (reason := obstacle(loop.participant.tasks[request.task])):
                raise ValueError(reason)

    def measure(self, loop: FederationLoop) -> Row:
        spent = [events for client in loop.info.clients if (events := spent_in(loop.memory.get(client)))]
        if not spent or not self.noise_multiplier:
            return {}
        return {
            "privacy/record_epsilon": max(epsilon_of(tuple(events), self.delta, self.accountant) for events in spent)
        }


@dataclass(frozen=True)
class PrivateRecords(ClientProgram):
    """A client's half whose fits are private, and which remembers what they have cost.

    Attributes:
        inner: What it does otherwise.
        clip: See `RecordPrivacy`.
        noise_multiplier: Likewise.
        batch_size: Expected examples of a batch, where a fit asks for no other number.
    """

    inner: ClientProgram
    clip: float
    noise_multiplier: float
    batch_size: int

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        return self.inner.tasks(model)

    def update(self, client: Client, message: Message) -> Steps:
        spent = spent_in(client.memory)
        plain = _plain(client)
        steps, result = self.inner.update(plain, message), None
        while True:
            try:
                request: Fit | Predict = next(steps) if result is None else steps.send(result)
            except StopIteration as end:
                reply: Reply = end.value
                break
            if isinstance(request, Fit):
                fit, rate = self._private(request, client)
                done: Result = yield fit
                spent, result = spend(spent, rate, self.noise_multiplier, done.num_steps), done
            else:
                result = yield request
        kept = plain.memory if reply.memory is None else reply.memory
        events = torch.tensor(spent, dtype=torch.float64).reshape(-1, 3)
        return replace(reply, memory={**kept, _SPENT: {"events": events}})

    def _private(self, fit: Fit, client: Client) -> tuple[Fit, float]:
        """The fit with private gradients, and with which probability an example is in a batch."""
        if fit.callbacks:
            raise ValueError(
                f"record-level privacy cannot serve a fit with the callback {type(fit.callbacks[0]).__name__}: it may use "
                "the examples beside the gradient"
            )
        if compose(fit.rules).perturbs:
            raise ValueError(
                f"record-level privacy cannot serve {type(fit.rules[0]).__name__}: it takes gradients at other parameters"
            )
        count, wanted = len(fit.data), fit.overrides.get("batch_size", self.batch_size)
        expected = min(wanted, count)
        owner = client.seed, client.round, client.key, "record privacy", *fit.key
        callback = PrivateGradients(self.clip, self.noise_multiplier, expected, owner)
        return replace(fit, callbacks=(callback,), poisson=True), expected / count

    def evaluate(self, client: Client, message: Message) -> Steps | None:
        return self.inner.evaluate(_plain(client), message)


def spent_in(memory: Groups) -> list[Event]:
    """What a client's trainings have cost so far."""
    rows: Sequence[Sequence[float]] = memory[_SPENT]["events"].tolist() if _SPENT in memory else []
    return [(rate, z, int(times)) for rate, z, times in rows]


def _plain(client: Client) -> Client:
    return replace(client, memory={group: value for group, value in client.memory.items() if group != _SPENT})
