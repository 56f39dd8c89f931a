"""Who takes part in a round: decided by seed and round alone, so that every method meets the same cohorts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from fl_lightning.rng import numpy_generator


class CohortSampler(ABC):
    """Draws the cohort of a round.

    Attributes:
        rate: With which probability every client takes part, independently of the others; None: it is not so.
        draws_somebody: Whether every cohort has a client; otherwise all are looked at before a run.
    """

    rate: float | None = None
    draws_somebody = False

    @abstractmethod
    def cohort(self, round: int, clients: Sequence[str], seed: int) -> tuple[str, ...]:
        """Keys of the clients of this round, in the order of ``clients``."""


class AllClients(CohortSampler):
    """Everybody, every round."""

    rate, draws_somebody = 1.0, True

    def cohort(self, round: int, clients: Sequence[str], seed: int) -> tuple[str, ...]:
        return tuple(clients)


class UniformSampler(CohortSampler):
    """Uniform without replacement.

    Args:
        size: Clients per round, at least 1; at most all of them take part.
        fraction: Or a share of all clients, in (0, 1]; at least one client.
    """

    draws_somebody = True

    def __init__(self, size: int | None = None, fraction: float | None = None) -> None:
        if (size is None) == (fraction is None):
            raise ValueError(f"give either size or fraction; got size={size}, fraction={fraction}")
        if size is not None and size < 1:
            raise ValueError(f"size is {size}; it must be at least 1")
        if fraction is not None and not 0 < fraction <= 1:
            raise ValueError(f"fraction is {fraction}; it must be in (0, 1]")
        self.size, self.fraction = size, fraction

    def cohort(self, round: int, clients: Sequence[str], seed: int) -> tuple[str, ...]:
        wanted = self.size if self.size is not None else max(1, round_half_up(len(clients) * (self.fraction or 0)))
        chosen = numpy_generator(seed, round, "cohort").permutation(len(clients))[:wanted]
        return tuple(clients[i] for i in sorted(chosen.tolist()))


class PoissonSampler(CohortSampler):
    """Every client with the same probability, independently of the others; a cohort may be empty.

    Args:
        probability: q, in (0, 1].
    """

    def __init__(self, probability: float = 0.1) -> None:
        if not 0 < probability <= 1:
            raise ValueError(f"PoissonSampler.probability is {probability}; it must be in (0, 1]")
        self.probability = self.rate = probability

    def cohort(self, round: int, clients: Sequence[str], seed: int) -> tuple[str, ...]:
        drawn = numpy_generator(seed, round, "cohort").random(len(clients)) < self.probability
        return tuple(client for client, chosen in zip(clients, drawn, strict=True) if chosen)


class FixedCohort(CohortSampler):
    """The same named clients, every round.

    Args:
        clients: Their keys.
    """

    draws_somebody = True

    def __init__(self, clients: list[str]) -> None:
        if not clients:
            raise ValueError("FixedCohort needs at least one client key")
        self.clients = [str(client) for client in clients]

    def cohort(self, round: int, clients: Sequence[str], seed: int) -> tuple[str, ...]:
        unknown = sorted(set(self.clients) - set(clients))
        if unknown:
            raise ValueError(f"FixedCohort names {unknown}, who hold no training data; clients: {', '.join(clients)}")
        return tuple(client for client in clients if client in self.clients)


def round_half_up(value: float) -> int:
    """Nearest integer, halves up (Python's own rounds halves to even)."""
    return int(value + 0.5)
