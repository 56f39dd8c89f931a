"""How replies become one: reducers that add replies up in blocks and merge the blocks in order, and rules that withstand
hostile replies.

Floating-point addition depends on its order. So the loop always reduces the cohort in fixed blocks of clients, in the
order of their keys, and merges the blocks in order: how many workers computed the blocks cannot change a bit. A robust
rule (`Aggregator`) must see all replies at once: its reducer (`Keep`) keeps them apart through the same blocks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fl_lightning.message import Group

BLOCK_SIZE, MAX_BLOCKS = 8, 32  # least clients of a block, most blocks; part of the arithmetic, so not options


def block_size(cohort: int) -> int:
    """Clients per block of a cohort of so many: the sums of a round are few, however large it is."""
    return max(BLOCK_SIZE, math.ceil(cohort / MAX_BLOCKS))


class Reducer(ABC):
    """Adds replies up. `add` may change and return its first argument; None starts a new sum."""

    @abstractmethod
    def add(self, total: Any, tensors: Mapping[str, Tensor], weight: float, sender: str) -> Any:
        """One more reply of a block."""

    @abstractmethod
    def merge(self, total: Any, block: Any) -> Any:
        """One more block."""

    @abstractmethod
    def finish(self, total: Any) -> Any:
        """What the server sees."""

    def copies(self, replies: int) -> float | None:
        """How often the result holds a value that all of so many replies agree on: 1 for a mean, ``replies`` for a sum.
        None: no `Aggregator` can stand in."""
        return None


def _wide(value: Tensor) -> Tensor:
    """float32 or wider to sum in; integers (BatchNorm's batch counter) in float64."""
    if not value.dtype.is_floating_point:
        return value.double()
    return value if value.dtype == torch.float64 else value.float()


class Sum(Reducer):
    """Sum over clients, unweighted."""

    weighted = False

    def add(self, total: Any, tensors: Mapping[str, Tensor], weight: float, sender: str) -> Any:
        factor = float(weight) if self.weighted else 1.0
        if total is None:
            dtypes = {name: value.dtype for name, value in tensors.items()}
            # Zero times a client's NaN would be NaN; who weighs nothing must not matter.
            sums = {n: _wide(v) * factor if factor else torch.zeros_like(_wide(v)) for n, v in tensors.items()}
            return sums, factor, dtypes, sender
        sums, weights, dtypes, first = total
        _check_alike(sums, tensors, sender)
        if factor:
            for name, value in tensors.items():
                sums[name].add_(_wide(value), alpha=factor)
        return sums, weights + factor, dtypes, first

    def merge(self, total: Any, block: Any) -> Any:
        if total is None:
            return block
        sums, weights, dtypes, first = total
        _check_alike(sums, block[0], block[3])  # all clients of a block sent what its first one did
        for name, value in block[0].items():
            sums[name].add_(value)
        return sums, weights + block[1], dtypes, first

    def copies(self, replies: int) -> float | None:
        return float(replies)

    def finish(self, total: Any) -> dict[str, Tensor]:
        sums, _, dtypes, _ = total
        return {name: _narrow(value, dtypes[name]) for name, value in sums.items()}


class Mean(Sum):
    """Weighted mean over clients, sum_k w_k x_k / sum_k w_k; by number of examples unless the method says otherwise."""

    weighted = True

    def copies(self, replies: int) -> float | None:
        return 1.0

    def finish(self, total: Any) -> dict[str, Tensor]:
        sums, weights, dtypes, _ = total
        if weights <= 0:
            raise ValueError(f"the weights of a mean sum to {weights}; at least one client must hold an example")
        return {name: _narrow(value / weights, dtypes[name]) for name, value in sums.items()}


class Concatenate(Reducer):
    """Rows of all clients one below the other, in the order of the clients."""

    def add(self, total: Any, tensors: Mapping[str, Tensor], weight: float, sender: str) -> Any:
        rows, first = ({name: [] for name in tensors}, sender) if total is None else total
        _check_names(rows, tensors, sender)
        for name, value in tensors.items():
            rows[name].append(value)
        return rows, first

    def merge(self, total: Any, block: Any) -> Any:
        if total is None:
            return block
        _check_names(total[0], *block)
        return {name: rows + block[0][name] for name, rows in total[0].items()}, total[1]

    def finish(self, total: Any) -> dict[str, Tensor]:
        return {name: torch.cat(rows) for name, rows in total[0].items()}


class Keep(Reducer):
    """Every client's tensors as they are, by the client's key."""

    def add(self, total: Any, tensors: Mapping[str, Tensor], weight: float, sender: str) -> Any:
        return {**(total or {}), sender: dict(tensors)}

    def merge(self, total: Any, block: Any) -> Any:
        return {**(total or {}), **block}

    def finish(self, total: Any) -> dict[str, dict[str, Tensor]]:
        return total


class Vector:
    """The updates of a reply as one vector (d,): its tensors of real numbers one behind the other, by group and name, in the
    widest of their types and at least float32.

    Args:
        like: Tensors with the names, shapes and dtypes of every reply's.
    """

    def __init__(self, like: Mapping[tuple[str, str], Tensor]) -> None:
        self.real = {key: value for key, value in like.items() if value.dtype.is_floating_point}
        double = any(value.dtype == torch.float64 for value in self.real.values())
        self.dtype = torch.float64 if double else torch.float32

    def __len__(self) -> int:
        return sum(value.numel() for value in self.real.values())

    def of(self, tensors: Mapping[tuple[str, str], Tensor]) -> Tensor:
        """A reply's vector."""
        return torch.cat([tensors[key].detach().to(self.dtype).flatten() for key in self.real])

    def parts(self, vector: Tensor) -> dict[tuple[str, str], Tensor]:
        """The tensors that a vector stands for."""
        parts = vector.split([value.numel() for value in self.real.values()])
        return {key: part.view(like.shape) for (key, like), part in zip(self.real.items(), parts, strict=True)}


class Aggregator(ABC):
    """Stands in for the mean of a round's updates, for any method: a rule over all replies at once.

    The groups of kind "update" of a reply (the model, control variates, buffers) are one vector. Integers (BatchNorm's
    counter) stand aside: the median of each. Clients weigh alike, since how many examples one has is its own claim. Groups
    of other kinds are reduced as ever.
    """

    serves_empty = False  # whether a round in which nobody takes part is one of its rounds

    def setup(self, clients: int, rounds: int, rate: float | None, seed: int) -> None:  # noqa: B027  (most need nothing)
        """Called before the first round of a fit, and after `load_state_dict` where it goes on from a checkpoint.

        Args:
            clients: Of the federation.
            rounds: Of the run.
            rate: With which every client takes part, independently of the others; None: the sampler draws otherwise.
            seed: The run's.

        Raises:
            ValueError: The rule cannot work so.
        """

    def check(self, replies: int, refused: int = 0) -> None:
        """Refuse a number of replies that the rule cannot work with.

        Args:
            replies: Number of replies.
            refused: Further replies that were refused for what they hold: hostile clients that are known.

        Raises:
            ValueError: The rule's condition fails.
        """
        if replies < 1:
            raise ValueError(f"{type(self).__name__} needs at least 1 reply; there are {replies}")

    @abstractmethod
    def combine(self, vectors: Tensor, refused: int = 0) -> Tensor:
        """One vector (d,) for the vectors (n, d) of n replies that passed `check`. float32 or float64, finite."""

    # ---- between the loop and the rule

    def gathering(self, uplink: Mapping[str, Group], numbers: Sequence[str] = ()) -> dict[str, Group]:
        """The uplink with updates kept apart; ``numbers`` names those that replies hold beside it.

        Raises:
            ValueError: There is no update, or the method reduces one in a way of its own.
        """
        updates = {name: group for name, group in uplink.items() if group.kind == "update"}
        if not updates:
            raise ValueError(f"{type(self).__name__} combines updates; this method's replies hold {sorted(uplink)}")
        for name, group in updates.items():
            if group.reduce.copies(1) is None:
                raise ValueError(
                    f"{type(self).__name__} cannot stand in for {type(group.reduce).__name__}, which reduces {name!r}"
                )
        return {**uplink, **{name: replace(group, reduce=Keep()) for name, group in updates.items()}}

    def aggregate(
        self, gathered: Mapping[str, Any], uplink: Mapping[str, Group], refused: int = 0, round: int = 0
    ) -> dict[str, Any]:
        """The groups as the method's own reducers would have left them, from what `Keep` has kept.

        Args:
            gathered: Reduced groups, those of kind "update" by `Keep`.
            uplink: The groups with the method's own reducers.
            refused: See `check`.
            round: Round number, the owner of what is drawn.

        Raises:
            ValueError: Too few replies, or one is shaped otherwise than the first, or is not finite.
        """
        groups = [name for name, group in uplink.items() if group.kind == "update"]
        senders = list(gathered[groups[0]])
        self.check(len(senders), refused)
        rows: list[dict[tuple[str, str], Tensor]] = []
        for sender in senders:
            flat = {(group, name): value for group in groups for name, value in gathered[group][sender].items()}
            if rows:
                _check_alike(rows[0], flat, sender)
            rows.append(flat)
        layout = Vector(rows[0])
        vectors = torch.stack([layout.of(row) for row in rows])
        if endless := [s for s, vector in zip(senders, vectors, strict=True) if not vector.isfinite().all()]:
            raise ValueError(f"{type(self).__name__} needs finite updates; those of {', '.join(endless)} are not")
        found = layout.parts(self.combine(vectors, refused))
        out: dict[str, Any] = {**gathered, **{group: {} for group in groups}}
        for key, like in rows[0].items():
            group, name = key
            value = found[key] if key in found else torch.stack([row[key] for row in rows]).double().quantile(0.5, 0)
            often = uplink[group].reduce.copies(len(rows)) or 1.0
            out[group][name] = _narrow(value * often, like.dtype)
        return out

    @staticmethod
    def scalars(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """The median of each number that the replies hold."""
        return {name: median(each[name] for each in values) for name in values[0]} if values else {}

    def participants(self, replies: int) -> float:
        """The number of replies as the method's arithmetic may know it."""
        return float(replies)

    def record(self) -> dict[str, float]:
        """Numbers for the line of the round that was aggregated last."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the rule must remember from round to round."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` gave; nothing, where the rounds before had no such rule."""


class CoordinateMedian(Aggregator):
    """The median of every coordinate; of an even number, the mean of the two in the middle (Yin et al., 2018,
    Definition 1)."""

    def combine(self, vectors: Tensor, refused: int = 0) -> Tensor:
        n = len(vectors)
        ordered = vectors.sort(0).values
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


class TrimmedMean(Aggregator):
    """The mean of every coordinate without its largest and its smallest values (Yin et al., 2018, Definition 2).

    Args:
        share: beta, the share of the replies to leave out at either end, rounded up to whole ones; in [0, 1/2). At least
            the share of hostile clients; 0 is the mean of all.
    """

    def __init__(self, share: float = 0.1) -> None:
        if not 0 <= share < 0.5:
            raise ValueError(f"share is {share}; it must be in [0, 0.5)")
        self.share = share

    def _cut(self, replies: int) -> int:
        return math.ceil(round(self.share * replies, 9))  # 0.07 * 100 is a little more than 7

    def check(self, replies: int, refused: int = 0) -> None:
        super().check(replies, refused)
        if 2 * self._cut(replies) >= replies:
            raise ValueError(
                f"TrimmedMean with share={self.share} leaves out {self._cut(replies)} replies at either end, "
                f"and there are {replies}; nothing would be left"
            )

    def combine(self, vectors: Tensor, refused: int = 0) -> Tensor:
        cut = self._cut(len(vectors))
        return vectors.sort(0).values[cut : len(vectors) - cut].mean(0)


class MultiKrum(Aggregator):
    """The mean of the replies whose neighbours are nearest (Blanchard et al., 2017, section 4).

    A reply's score is the sum of the squared distances to its n - f - 2 nearest others.

    Args:
        byzantine: f, the number of hostile clients in a cohort, at least 0. A cohort must have n >= 2 f + 3 replies. One
            whose reply was refused for what it held (`check`) is one of the f.
        keep: m, how many replies are averaged, at least 1, at most n; n - f where null.
    """

    def __init__(self, byzantine: int, keep: int | None = None) -> None:
        if byzantine < 0:
            raise ValueError(f"byzantine is {byzantine}; it must be at least 0")
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1")
        self.byzantine, self.keep = byzantine, keep

    def check(self, replies: int, refused: int = 0) -> None:
        left = max(self.byzantine - refused, 0)
        if replies < 2 * left + 3:
            raise ValueError(
                f"{type(self).__name__} with byzantine={self.byzantine} needs n >= 2 f + 3 = {2 * left + 3} replies; "
                f"there are {replies}"
            )
        if self.keep is not None and self.keep > replies:
            raise ValueError(f"{type(self).__name__} keeps {self.keep} replies; there are {replies}")

    def combine(self, vectors: Tensor, refused: int = 0) -> Tensor:
        n, left = len(vectors), max(self.byzantine - refused, 0)
        # One row at a time, without the products of norms that would cancel, and without (n, n, d) numbers.
        distances = torch.stack([(vectors - vector).pow(2).sum(1, dtype=torch.float64) for vector in vectors])
        distances.fill_diagonal_(math.inf)
        scores = distances.sort(1).values[:, : n - left - 2].sum(1)
        best = scores.sort(stable=True).indices[: self.keep or n - left]  # of equal ones the first
        return vectors[best.sort().values].mean(0)


class Krum(MultiKrum):
    """The one reply whose neighbours are nearest (Blanchard et al., 2017).

    Args:
        byzantine: See `MultiKrum`.
    """

    def __init__(self, byzantine: int) -> None:
        super().__init__(byzantine, keep=1)


class NormClipping(Aggregator):
    """The mean of the replies, none longer than a bound (Sun et al., 2019, section 4).

    Args:
        max_norm: The bound, above 0; null takes the median of the round's norms.
    """

    def __init__(self, max_norm: float | None = None) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; it must be above 0")
        self.max_norm = max_norm

    def combine(self, vectors: Tensor, refused: int = 0) -> Tensor:
        norms = vectors.norm(dim=1, dtype=torch.float64)
        bound = norms.quantile(0.5) if self.max_norm is None else self.max_norm
        factors = (bound / norms.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0)
        return (vectors * factors[:, None].to(vectors.dtype)).mean(0)


class GeometricMedian(Aggregator):
    """The point with the least sum of distances to the replies, by the smoothed Weiszfeld algorithm (Pillutla et al., 2022,
    Algorithm 2).

    Args:
        smoothing: nu, distances below it count as it, above 0. 1e-6 in the paper.
        steps: Most steps, at least 1. The paper finds 3 to be enough; more cost little.
        tolerance: Stop when the sum of distances falls by less than this share of it, at least 0.
    """

    def __init__(self, smoothing: float = 1e-6, steps: int = 100, tolerance: float = 1e-10) -> None:
        if not smoothing > 0:
            raise ValueError(f"smoothing is {smoothing}; it must be above 0")
        if steps < 1:
            raise ValueError(f"steps is {steps}; it must be at least 1")
        if not tolerance >= 0:
            raise ValueError(f"tolerance is {tolerance}; it must be at least 0")
        self.smoothing, self.steps, self.tolerance = smoothing, steps, tolerance

    def combine(self, vectors: Tensor, refused: int = 0) -> Tensor:
        centre = vectors.mean(0)
        before = math.inf
        for _ in range(self.steps):
            distances = (vectors - centre).norm(dim=1, dtype=torch.float64).clamp(min=self.smoothing)
            total = float(distances.sum())
            if before - total <= self.tolerance * total:
                break
            weights = 1 / distances
            centre = ((weights / weights.sum()).to(vectors.dtype)[:, None] * vectors).sum(0)
            before = total
        return centre


def _narrow(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if dtype.is_floating_point else value.round().to(dtype)


def _check_names(known: Mapping[Any, Any], tensors: Mapping[Any, Tensor], sender: str) -> None:
    if known.keys() != tensors.keys():
        missing, extra = sorted(known.keys() - tensors.keys()), sorted(tensors.keys() - known.keys())
        raise ValueError(
            f"client {sender} sent other tensors than the clients before it: missing {missing}, extra {extra}"
        )


def _check_alike(known: Mapping[Any, Tensor], tensors: Mapping[Any, Tensor], sender: str) -> None:
    _check_names(known, tensors, sender)
    for name, value in tensors.items():
        if value.shape != known[name].shape:  # torch would broadcast
            raise ValueError(
                f"client {sender} sent {name!r} as {tuple(value.shape)}; the clients before it as {tuple(known[name].shape)}"
            )
