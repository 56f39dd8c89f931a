"""A virtual clock: which clients are there, how long their work would take on devices of their own, who comes too late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fl_lightning.rng import numpy_generator


@dataclass(frozen=True)
class Turn:
    """A client's turn in a round, by the virtual clock.

    Attributes:
        available: Whether it can be asked.
        seconds: Download, training and upload.
    """

    available: bool
    seconds: float


class System:
    """Availability, speed and bandwidth of the clients, drawn from the run's seed.

    A client's turn takes bytes down / bandwidth + examples * passes / speed + bytes up / bandwidth seconds. Its speed and
    bandwidth are drawn once; how both vary from round to round, and whether it is there, is drawn anew in every round. Who
    is not there, or would come after the deadline, is not asked. A round lasts until its slowest reply is there; to the
    deadline where somebody is late. The server takes no time. Of an upload counts what the method says beforehand of its
    shapes: all of an update, nothing of what has no fixed size.

    Args:
        availability: Probability that a client is there in a round, in (0, 1].
        speed: Median number of examples that clients train on in a second, above 0.
        speed_spread: Standard deviation of the logarithm of the clients' speeds, at least 0; at 1 one client in six is at
            least 2.7 times as slow as the median.
        bandwidth: Median number of bytes that clients receive, or send, in a second, above 0; null for no limit.
        bandwidth_spread: Standard deviation of the logarithm of it, at least 0.
        jitter: Standard deviation of the logarithm of what a client's turn takes from round to round, at least 0.
        deadline: Seconds of a round, above 0; null waits for all.
        passes: Passes over a client's examples in a round, above 0; null takes the trainer's epochs or steps. For methods
            with budgets of their own, and those that take several gradients a step.
    """

    def __init__(
        self,
        availability: float = 1.0,
        speed: float = 1000.0,
        speed_spread: float = 0.0,
        bandwidth: float | None = None,
        bandwidth_spread: float = 0.0,
        jitter: float = 0.0,
        deadline: float | None = None,
        passes: float | None = None,
    ) -> None:
        if not 0 < availability <= 1:
            raise ValueError(f"federation.system.availability is {availability}; it must be in (0, 1]")
        for name, value in {"speed": speed, "bandwidth": bandwidth, "deadline": deadline, "passes": passes}.items():
            if value is not None and not value > 0:
                raise ValueError(f"federation.system.{name} is {value}; it must be above 0")
        for name, value in {
            "speed_spread": speed_spread,
            "bandwidth_spread": bandwidth_spread,
            "jitter": jitter,
        }.items():
            if not value >= 0:
                raise ValueError(f"federation.system.{name} is {value}; it must be at least 0")
        self.availability, self.deadline, self.passes, self.jitter = availability, deadline, passes, jitter
        self.speed, self.speed_spread = speed, speed_spread
        self.bandwidth, self.bandwidth_spread = bandwidth, bandwidth_spread

    def turn(self, client: str, round: int, seed: int, examples: float, down: int, up: int) -> Turn:
        """What the clock says of a client in a round.

        Args:
            client: Its key.
            round: Round number.
            seed: The run's seed.
            examples: It trains on, as often as it does.
            down: Bytes that it receives.
            up: Bytes that it sends.
        """

        def lognormal(spread: float, *owner: object) -> float:
            return math.exp(spread * numpy_generator(seed, "system", client, *owner).standard_normal())

        seconds = examples / (self.speed * lognormal(self.speed_spread, "speed"))
        if self.bandwidth is not None:
            seconds += (down + up) / (self.bandwidth * lognormal(self.bandwidth_spread, "bandwidth"))
        there = numpy_generator(seed, "system", round, client, "available").random() < self.availability
        return Turn(bool(there), seconds * lognormal(self.jitter, round, "jitter"))

    def in_time(self, turn: Turn) -> bool:
        """Whether a client is asked."""
        return turn.available and (self.deadline is None or turn.seconds <= self.deadline)

    def seconds(self, turns: Sequence[Turn], replied: Sequence[Turn]) -> float:
        """How long a round lasts whose cohort has these turns, and in which those have replied."""
        slowest = max((turn.seconds for turn in replied), default=0.0)
        if self.deadline is not None and any(turn.available and turn.seconds > self.deadline for turn in turns):
            return self.deadline
        return slowest if self.deadline is None else min(slowest, self.deadline)
