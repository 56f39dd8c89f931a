"""What comes in from clients: every reply is checked, and who fails is dealt with as ``federation.on_client_error`` says."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fl_lightning.federation.state import CheckpointError
from fl_lightning.message import Group, Tensors
from fl_lightning.methods.base import Reply

OnClientError = Literal["raise", "skip", "retry"]
ATTEMPTS = 2  # of a client under "retry"
MAX_REPLY_BYTES = 2**32


class BadReply(ValueError):
    """A client's reply does not fit what the method expects."""


class TooFewReplies(RuntimeError):
    """Fewer clients have replied than ``federation.min_clients``."""


@dataclass(frozen=True)
class Failure:
    """A client that failed.

    Attributes:
        round: Round number.
        client: Its key.
        attempt: 1 for the first.
        error: What went wrong, in a line.
        refused: Whether it replied, with something that does not fit.
        traceback: Where.
    """

    round: int
    client: str
    attempt: int
    error: str
    refused: bool
    traceback: str


class Guard:
    """Asks clients for their replies, checks these, and keeps account of failures.

    Args:
        policy: "raise" ends the run at the first failure; "skip" goes on without the client for the round; "retry" asks it
            once more first.
        min_clients: Fewest replies of a round with clients, at least 0.
        max_bytes: Largest serialised reply, at least 1.
        record: Called with every failure.

    Attributes:
        numbers: Names of the numbers that a reply must hold beside its groups, in the rounds to come.
        failures: Those of the round.
        turn: Entered around every attempt to get a client's reply.
    """

    def __init__(
        self,
        policy: OnClientError = "raise",
        min_clients: int = 1,
        max_bytes: int = MAX_REPLY_BYTES,
        record: Callable[[Failure], None] = lambda failure: None,
    ) -> None:
        self.numbers: Sequence[str] = ()
        self.policy, self.min_clients, self.max_bytes, self.record = policy, min_clients, max_bytes, record
        self.turn: Callable[[], AbstractContextManager[None]] = nullcontext
        self.begin(0, {})

    def begin(self, round: int, uplink: Mapping[str, Group]) -> None:
        """A new round."""
        self.round, self.uplink = round, uplink
        self.failures: list[Failure] = []
        self.lost: dict[str, Failure] = {}

    @property
    def refused(self) -> int:
        """Clients of the round whose replies did not fit."""
        return sum(failure.refused for failure in self.lost.values())

    def ask(self, client: str, *ways: Callable[[], Reply]) -> Reply | None:
        """A client's reply, or None where the round goes on without it.

        Args:
            client: Its key.
            *ways: How to get the reply: what to call first, and what to call where it is asked again (the same by default).
        """
        for attempt in range(1, (ATTEMPTS if self.policy == "retry" else 1) + 1):
            try:
                with self.turn():
                    reply = ways[min(attempt, len(ways)) - 1]()
                check_reply(reply, self.uplink, client, self.round, self.max_bytes, self.numbers)
                return reply
            except CheckpointError:  # the disk is full, which is no client's fault
                raise
            except Exception as error:
                text = "".join(traceback.format_exception(error))
                line = f"{type(error).__name__}: {error}"
                failure = Failure(self.round, client, attempt, line, isinstance(error, BadReply), text)
                self.failures.append(failure)
                self.record(failure)
                if self.policy == "raise":
                    raise
        self.lost[client] = failure
        return None

    def take_over(self, failures: Sequence[Failure], lost: Mapping[str, Failure]) -> None:
        """Count failures of the round that another guard has met as this one's own.

        Args:
            failures: In the order in which they happened.
            lost: The last one of every client without which the round goes on.
        """
        for failure in failures:
            self.failures.append(failure)
            self.record(failure)
        self.lost |= lost

    def check_quorum(self, replied: Sequence[str], cohort: Sequence[str]) -> None:
        """Enough clients of a cohort have replied.

        Raises:
            TooFewReplies: They have not.
        """
        if cohort and len(replied) < self.min_clients:
            why = "; ".join(f"client {key}: {failure.error}" for key, failure in list(self.lost.items())[:3])
            raise TooFewReplies(
                f"round {self.round}: {len(replied)} of {len(cohort)} clients replied, and federation.min_clients is "
                f"{self.min_clients} ({why})"
            )


def check_reply(
    reply: Reply,
    uplink: Mapping[str, Group],
    client: str,
    round: int,
    max_bytes: int = MAX_REPLY_BYTES,
    numbers: Sequence[str] = (),
) -> None:
    """A reply is what the method expects: groups, names, shapes, dtypes, size, the numbers beside them, all finite.

    Raises:
        BadReply: It is not; names everything that is wrong.
    """
    message = reply.message
    if message.nbytes > max_bytes:
        raise BadReply(
            f"client {client} replied with {message.nbytes} bytes; federation.max_reply_bytes is {max_bytes}"
        )
    wrong = []
    if (message.sender, message.round) != (client, round):
        wrong.append(f"is of client {message.sender!r} and round {message.round}, expected {client!r} and {round}")
    if message.num_examples < 0:
        wrong.append(f"has num_examples {message.num_examples}; it must be at least 0")
    if missing := sorted(uplink.keys() - message.tensors.keys()):
        wrong.append(f"misses groups {some(missing)}")
    if over := sorted(message.tensors.keys() - uplink.keys()):
        wrong.append(f"has unexpected groups {some(over)}")
    for name, group in uplink.items():
        if name in message.tensors:
            wrong += [f"group {name!r} {what}" for what in faults(message.tensors[name], group.like)]
    if missing := sorted(set(numbers) - message.scalars.keys()):
        wrong.append(f"misses numbers {some(missing)}")
    if over := sorted(message.scalars.keys() - set(numbers)):
        wrong.append(f"has unexpected numbers {some(over)}")
    if endless := sorted(name for name, value in message.scalars.items() if not math.isfinite(value)):
        wrong.append(f"has numbers that are not finite: {some(endless)}")
    if not math.isfinite(reply.metrics.get("loss", 0.0)):
        wrong.append(f"comes from a training whose loss is {reply.metrics['loss']}")
    if wrong:
        raise BadReply(f"client {client}'s reply {'; '.join(wrong)}")


def faults(tensors: Tensors, like: Tensors | None) -> list[str]:
    """What is wrong with a group's tensors: names, shapes and dtypes where ``like`` says them, numbers that are not finite.

    A first dimension of 0 in ``like`` stands for any number of rows.
    """
    wrong = []
    if like is not None:
        if missing := [name for name in like if name not in tensors]:
            wrong.append(f"misses {some(missing)}")
        if over := [name for name in tensors if name not in like]:
            wrong.append(f"has unexpected {some(over)}")
        for name, value in tensors.items():
            if name in like and not (value.dtype == like[name].dtype and fits(value.shape, like[name].shape)):
                wanted = f"{tuple(like[name].shape)} {like[name].dtype}"
                wrong.append(f"has {name} as {tuple(value.shape)} {value.dtype}, expected {wanted}")
    if endless := [name for name, value in tensors.items() if not finite(value)]:
        wrong.append(f"is not finite: {some(endless)}")
    return wrong


def finite(value: Tensor) -> bool:
    """Whether all numbers are finite. A sum shows it at a fraction of the cost, unless it overflows."""
    return math.isfinite(value.sum().item()) or bool(value.isfinite().all())


def fits(shape: Sequence[int], like: Sequence[int]) -> bool:
    """Whether a tensor has the shape of ``like``; see `faults`."""
    rows = len(like) > 0 and like[0] == 0
    return len(shape) == len(like) and tuple(shape[rows:]) == tuple(like[rows:])


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
