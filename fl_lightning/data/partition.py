"""Who holds what: partitioners divide examples among clients, measures say how unlike the clients came out.

Everything here works on label and domain arrays and returns index lists; no image is touched.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.rng import numpy_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def apportion(total: int, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Divide ``total`` items in proportion to ``weights`` (K,), by largest remainder; ties fall to ``rng``.

    Returns:
        Counts (K,), int64, that sum to ``total``. Equal shares for weights that are all zero.
    """
    weights = np.asarray(weights, dtype=np.float64)
    quotas = total * (weights / weights.sum() if weights.sum() > 0 else np.full(len(weights), 1 / len(weights)))
    counts = np.floor(quotas + 1e-9).astype(np.int64)  # 1e-9: a quota of 2.9999999996 is a 3
    order = rng.permutation(len(weights))
    order = order[np.argsort(-(quotas - counts)[order].round(9), kind="stable")]
    counts[order[: total - counts.sum()]] += 1
    return counts


def strata(labels: np.ndarray, domains: np.ndarray) -> list[tuple[tuple[int, int], np.ndarray]]:
    """Pairs of (domain, class) and the indices of its examples, in ascending order of the pair."""
    pairs, inverse = np.unique(np.stack([domains, labels]), axis=1, return_inverse=True)
    bounds = np.cumsum(np.bincount(inverse.ravel(), minlength=pairs.shape[1]))[:-1]
    groups = np.split(np.argsort(inverse.ravel(), kind="stable"), bounds)
    return [((domain, label), indices) for (domain, label), indices in zip(pairs.T.tolist(), groups, strict=False)]


def stratified_take(
    labels: np.ndarray, domains: np.ndarray, fraction: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a share of the examples that keeps the proportions of every (domain, class) stratum.

    Args:
        labels: (N,) integers.
        domains: (N,) integers.
        fraction: Share to take, in [0, 1]; round(fraction * N) examples are taken, by largest remainder over strata.
        rng: Owner of the draw.

    Returns:
        Indices taken and indices left, both ascending.

    Raises:
        ValueError: ``fraction`` is outside [0, 1].
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"a share must be in [0, 1], got {fraction}")
    groups = [indices for _, indices in strata(labels, domains)]
    sizes = np.array([len(group) for group in groups])
    taken = np.zeros(len(labels), dtype=bool)
    if len(groups):
        counts = apportion(int(np.floor(fraction * len(labels) + 0.5)), sizes, rng)
        for group, count in zip(groups, counts, strict=True):
            taken[rng.permutation(group)[:count]] = True
    return np.flatnonzero(taken), np.flatnonzero(~taken)


# ---------------------------------------------------------------------------------------------------------------------
# Partitioners


class Partitioner(ABC):
    """Divides examples among clients."""

    @abstractmethod
    def divide(
        self, labels: np.ndarray, domains: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Give every example to exactly one client.

        Args:
            labels: Class of every example, (N,) integers.
            domains: Domain of every example, (N,) integers.
            num_clients: Number of clients, at least 1.
            rng: Owner of every draw.

        Returns:
            ``num_clients`` index arrays, disjoint and together complete; some may be empty (`partition` repairs that).

        Raises:
            ValueError: The division is impossible with this number of clients, classes or domains.
        """

    def donors(self, domains: np.ndarray, num_clients: int) -> list[Sequence[int]]:
        """For every client, the clients that the repair may take from: all, unless clients are bound to domains."""
        return [range(num_clients)] * num_clients


@dataclass(frozen=True)
class IID(Partitioner):
    """Examples shuffled and dealt out: equal sizes up to one, every client a sample of the whole."""

    def divide(
        self, labels: np.ndarray, domains: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(labels)), num_clients)


@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Every class is divided among the clients in proportions drawn from a symmetric Dirichlet; sizes come out unequal.

    Args:
        alpha: Concentration, above 0. Small (0.01): a class lies with one client; large (100): near IID.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def divide(
        self, labels: np.ndarray, domains: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        owner = np.empty(len(labels), dtype=np.int64)
        for _, indices in strata(labels, np.zeros_like(labels)):
            proportions = np.exp(_log_dirichlet(self.alpha, num_clients, rng))
            dealt, counts = _deal(indices, proportions, rng)
            owner[dealt] = np.repeat(np.arange(num_clients), counts)
        return list(_owned(owner, num_clients).values())


@dataclass(frozen=True)
class BalancedDirichlet(Partitioner):
    """Every client draws a class distribution from a symmetric Dirichlet and fills an equal share (up to one) from it.

    The clients take turns to draw one example, without replacement; a class that has run out is left out of the
    distributions. So the last draws are less skewed than asked for, but no client bears that alone.

    Args:
        alpha: Concentration, above 0, of every client's distribution over the classes present.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def divide(
        self, labels: np.ndarray, domains: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        stacks = [rng.permutation(indices).tolist() for _, indices in strata(labels, np.zeros_like(labels))]
        logits = np.stack([_log_dirichlet(self.alpha, len(stacks), rng) for _ in range(num_clients)])
        cumulative = _cumulative(logits)
        parts: list[list[int]] = [[] for _ in range(num_clients)]
        for turn, draw in enumerate(rng.random(len(labels))):
            row = cumulative[turn % num_clients]
            stack = int(np.searchsorted(row, draw * row[-1], side="right"))
            parts[turn % num_clients].append(stacks[stack].pop())
            if not stacks[stack]:
                logits[:, stack] = -np.inf
                cumulative = _cumulative(logits)
        return [np.array(part, dtype=np.int64) for part in parts]


@dataclass(frozen=True)
class Pathological(Partitioner):
    """Every client holds a fixed number of classes, and every class has equally many holders (up to one), at least one.

    A class is divided equally among its holders. With num_clients * classes_per_client = number of classes, no two
    clients share a class.

    Args:
        classes_per_client: Classes of a client, from 1 to the number of classes.
    """

    classes_per_client: int = 2

    def __post_init__(self) -> None:
        _check_count("classes_per_client", self.classes_per_client)

    def divide(
        self, labels: np.ndarray, domains: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        groups = [indices for _, indices in strata(labels, np.zeros_like(labels))]
        wanted = self.classes_per_client
        if wanted > len(groups) or num_clients * wanted < len(groups):
            raise ValueError(
                f"{num_clients} clients with classes_per_client={wanted} cannot hold {len(groups)} classes: "
                f"classes_per_client must be in [{-(-len(groups) // num_clients)}, {len(groups)}]"
            )
        held = np.zeros(len(groups), dtype=np.int64)
        holders: list[list[int]] = [[] for _ in groups]
        for client in range(num_clients):
            # The least held classes first, ties at random: distinct for a client, and balanced over clients.
            order = rng.permutation(len(groups))
            chosen = order[np.argsort(held[order], kind="stable")][:wanted]
            held[chosen] += 1
            for number in chosen.tolist():
                holders[number].append(client)
        return _share(groups, holders, num_clients, rng)


@dataclass(frozen=True)
class SingleClass(Partitioner):
    """Every client holds one class: client k the class k modulo the number of classes. A silo per class, or several."""

    def divide(
        self, labels: np.ndarray, domains: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        groups = [indices for _, indices in strata(labels, np.zeros_like(labels))]
        if num_clients % len(groups):
            raise ValueError(f"num_clients must be a multiple of the {len(groups)} classes, got {num_clients}")
        holders = [list(range(number, num_clients, len(groups))) for number in range(len(groups))]
        return _share(groups, holders, num_clients, rng)


@dataclass(frozen=True)
class Shards(Partitioner):
    """Examples sorted by class are cut into equal shards and every client is dealt some (McMahan et al. 2017).

    Args:
        shards_per_client: Shards of a client, at least 1.
    """

    shards_per_client: int = 2

    def __post_init__(self) -> None:
        _check_count("shards_per_client", self.shards_per_client)

    def divide(
        self, labels: np.ndarray, domains: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        shuffled = rng.permutation(len(labels))
        by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
        shards = np.array_split(by_class, num_clients * self.shards_per_client)
        dealt = rng.permutation(len(shards)).reshape(num_clients, self.shards_per_client)
        return [_join([shards[number] for number in row]) for row in dealt]


@dataclass(frozen=True)
class ByDomain(Partitioner):
    """Every client belongs to one domain: client k to the domain k modulo their number; IID among a domain's clients.

    With more clients than a multiple of the domains, the first domains have one client more.
    """

    def divide(
        self, labels: np.ndarray, domains: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        present = np.unique(domains)
        if num_clients < len(present):
            raise ValueError(f"num_clients must be at least the {len(present)} domains, got {num_clients}")
        parts: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * num_clients
        for number, domain in enumerate(present):
            clients = range(number, num_clients, len(present))
            inside = np.flatnonzero(domains == domain)
            pieces = self._within(labels[inside], len(clients), rng)
            for client, piece in zip(clients, pieces, strict=True):
                parts[client] = inside[piece]
        return parts

    def donors(self, domains: np.ndarray, num_clients: int) -> list[Sequence[int]]:
        step = len(np.unique(domains))
        return [range(client % step, num_clients, step) for client in range(num_clients)]

    def _within(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return IID().divide(labels, np.zeros_like(labels), num_clients, rng)


@dataclass(frozen=True)
class BySite(ByDomain):
    """One client for every site of a manifest, in the order of their names: `ByDomain`, but strict about the number."""

    def divide(
        self, labels: np.ndarray, domains: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        if num_clients != len(np.unique(domains)):
            raise ValueError(f"num_clients must equal the {len(np.unique(domains))} sites, got {num_clients}")
        return super().divide(labels, domains, num_clients, rng)


@dataclass(frozen=True)
class DomainDirichlet(ByDomain):
    """Every client belongs to one domain (see `ByDomain`), and a domain's classes are divided by a Dirichlet.

    Args:
        alpha: Concentration, above 0, as in `Dirichlet`.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def _within(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return Dirichlet(self.alpha).divide(labels, np.zeros_like(labels), num_clients, rng)


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha must be a finite number above 0, got {alpha}")


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _log_dirichlet(alpha: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """Logarithm of a draw from a symmetric Dirichlet, (size,).

    At alpha 1e-3 gamma draws underflow to zero all together and normalising gives NaN. Their logarithms do not:
    Gamma(a) is distributed as Gamma(a + 1) * U^(1/a).
    """
    logs = np.log(rng.standard_gamma(alpha + 1, size)) + np.log1p(-rng.random(size)) / alpha
    return logs - np.logaddexp.reduce(logs)


def _cumulative(logits: np.ndarray) -> np.ndarray:
    """Cumulative weights of every row, scaled by the row's largest: never all zero while one class is left."""
    top = logits.max(axis=1, keepdims=True, initial=-np.inf)
    return np.exp(logits - np.where(np.isfinite(top), top, 0)).cumsum(axis=1)


def _deal(indices: np.ndarray, weights: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Indices shuffled, and how many of them in turn everybody gets, in proportion to weights."""
    counts = apportion(len(indices), weights, rng)
    return rng.permutation(indices), counts


def _share(
    groups: Sequence[np.ndarray], holders: Sequence[Sequence[int]], num_clients: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Divide every group of examples equally among its holders; together the groups are complete."""
    owner = np.empty(sum(map(len, groups)), dtype=np.int64)
    for indices, clients in zip(groups, holders, strict=True):
        dealt, counts = _deal(indices, np.ones(len(clients)), rng)
        owner[dealt] = np.repeat(clients, counts)
    return list(_owned(owner, num_clients).values())


def _join(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *pieces])


# ---------------------------------------------------------------------------------------------------------------------
# Partitions


class Parts(Mapping[str, np.ndarray]):
    """Index arrays by client key ("0", "1", ... in order), as views on one array: ten thousand small ones cost more than
    what stands in them.

    Args:
        flat: All of them, one after the other, (N,) int64.
        sizes: Number of indices of every client, (K,).
    """

    def __init__(self, flat: np.ndarray, sizes: np.ndarray) -> None:
        self.flat, self.bounds = flat, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def __getitem__(self, key: str) -> np.ndarray:
        number = int(key) if key.isdecimal() else len(self)
        if number >= len(self) or str(number) != key:
            raise KeyError(key)
        return self.flat[self.bounds[number] : self.bounds[number + 1]]

    def __iter__(self) -> Iterator[str]:
        return map(str, range(len(self)))

    def __len__(self) -> int:
        return len(self.bounds) - 1


def _owned(owner: np.ndarray, num_clients: int) -> Parts:
    """Everybody's indices, ascending, from the owner of every index; -1 for nobody."""
    sizes = np.bincount(owner[owner >= 0], minlength=num_clients)
    return Parts(np.argsort(owner, kind="stable")[len(owner) - sizes.sum() :], sizes)


@dataclass(frozen=True)
class Partition:
    """Which examples every client holds.

    Attributes:
        indices: Ascending index array by client key; keys are "0", "1", ... in order.
        moved: Examples that the repair of `partition` moved.

    Raises:
        ValueError: Keys are others.
    """

    indices: Mapping[str, np.ndarray] = field(repr=False)
    moved: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.indices, Parts):
            if list(self.indices) != [str(number) for number in range(len(self.indices))]:
                raise ValueError(f"a partition's keys must be '0', '1', ... in order, got {list(self.indices)[:5]}")
            arrays = list(self.indices.values())
            object.__setattr__(self, "indices", Parts(_join(arrays), np.array(list(map(len, arrays)), dtype=np.int64)))

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(self.indices)

    @property
    def sizes(self) -> np.ndarray:
        """Number of examples of every client, (K,)."""
        return np.diff(self._parts.bounds)

    @property
    def flat(self) -> np.ndarray:
        """The index arrays one after the other."""
        return self._parts.flat

    @property
    def _parts(self) -> Parts:
        assert isinstance(self.indices, Parts)
        return self.indices

    @property
    def hash(self) -> str:
        """SHA-256 of the keys and index lists: equal for equal partitions, on any machine."""
        text = json.dumps({key: part.tolist() for key, part in self.indices.items()}, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def through(self, mapping: np.ndarray) -> Partition:
        """The partition with index i replaced by ``mapping[i]``: from positions in a selection to the whole set."""
        through = Parts(mapping[self.flat], self.sizes)
        for part in through.values():
            part.sort()
        return Partition(through, self.moved)

    def save(self, path: str | Path) -> None:
        """Write the partition and its hash as JSON."""
        content = {
            "hash": self.hash,
            "moved": self.moved,
            "indices": {key: part.tolist() for key, part in self.indices.items()},
        }
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Partition:
        """Read what `save` wrote.

        Raises:
            ValueError: The file is not a partition, or its lists do not have the hash that it states.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            lists = {str(key): np.array(part, dtype=np.int64) for key, part in content["indices"].items()}
            loaded, stated = cls(lists, int(content["moved"])), content["hash"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a partition file ({error!r})") from error
        if loaded.hash != stated:
            raise ValueError(f"{path}: index lists have hash {loaded.hash}, the file states {stated}")
        return loaded


def partition(
    partitioner: Partitioner,
    labels: np.ndarray,
    domains: np.ndarray | None,
    num_clients: int,
    seed: int,
    min_size: int = 1,
    allow_empty: bool = False,
) -> Partition:
    """Divide examples among clients and repair clients that came out too small.

    The repair: while a client has fewer than ``min_size`` examples, the smallest such client is given one example,
    drawn at random, of the largest client (of its domain, where the partitioner binds clients to domains). A client may
    so come to hold a class that its partitioner had not given it; `Partition.moved` counts the examples moved.

    Args:
        partitioner: The rule.
        labels: Class of every example, (N,) integers.
        domains: Domain of every example, (N,) integers; None for one domain.
        num_clients: Number of clients, at least 1.
        seed: Run seed; the draw is owned by "partition".
        min_size: Least number of examples of a client, at least 0.
        allow_empty: Leave clients without examples as they are; ``min_size`` then binds the others only.

    Raises:
        ValueError: The numbers cannot be met.
    """
    labels = np.asarray(labels)
    domains = np.zeros_like(labels) if domains is None else np.asarray(domains)
    if labels.ndim != 1 or labels.shape != domains.shape:
        raise ValueError(f"labels and domains must be two lists of one length, got {labels.shape} and {domains.shape}")
    if num_clients < 1 or min_size < 0:
        raise ValueError(f"num_clients must be at least 1 and min_size at least 0, got {num_clients} and {min_size}")
    needed = 1 if allow_empty else max(num_clients * min_size, 1)
    if len(labels) < needed:
        raise ValueError(
            f"{len(labels)} examples cannot give {num_clients} clients {min_size} each (min_size; see also allow_empty)"
        )
    rng = numpy_generator(seed, "partition")
    parts = [np.sort(part) for part in partitioner.divide(labels, domains, num_clients, rng)]
    donors, moved = partitioner.donors(domains, num_clients), 0
    while small := [k for k, part in enumerate(parts) if len(part) < min_size and (len(part) or not allow_empty)]:
        needy = min(small, key=lambda k: len(parts[k]))
        donor = max(donors[needy], key=lambda k: len(parts[k]))
        if len(parts[donor]) <= min_size:
            raise ValueError(
                f"client {needy} cannot reach min_size={min_size}: no client that may give has more than that"
            )
        drawn = int(rng.integers(len(parts[donor])))
        parts[needy] = np.append(parts[needy], parts[donor][drawn])
        parts[donor] = np.delete(parts[donor], drawn)
        moved += 1
    return Partition({str(k): np.sort(part) for k, part in enumerate(parts)}, moved)


def mirror(
    train_labels: np.ndarray,
    train_domains: np.ndarray,
    division: Partition,
    other_labels: np.ndarray,
    other_domains: np.ndarray,
    rng: np.random.Generator,
) -> Partition:
    """Divide another split (test, validation) in the proportions in which the clients hold the training split.

    Every (domain, class) stratum is divided by itself, by largest remainder. Strata that no client holds stay out; all
    others are divided completely.

    Args:
        train_labels: (N,) integers; ``division`` indexes them.
        train_domains: (N,) integers.
        division: Who holds which training example.
        other_labels: (M,) integers.
        other_domains: (M,) integers.
        rng: Owner of the draw.

    Returns:
        A partition of indices in [0, M), with the keys of ``division``.
    """
    number, flat = np.repeat(np.arange(len(division.indices)), division.sizes), division.flat
    held = {
        stratum: np.bincount(number[indices], minlength=len(division.indices))
        for stratum, indices in strata(train_labels[flat], train_domains[flat])
    }
    owner = np.full(len(other_labels), -1)
    for stratum, indices in strata(other_labels, other_domains):
        if stratum in held:
            dealt, counts = _deal(indices, held[stratum], rng)
            owner[dealt] = np.repeat(np.arange(len(counts)), counts)
    return Partition(_owned(owner, len(division.indices)))


# ---------------------------------------------------------------------------------------------------------------------
# Measures


def label_counts(division: Partition, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Examples of every client and class, (clients, classes) int64; rows in the order of the keys."""
    return np.stack([np.bincount(labels[part], minlength=num_classes) for part in division.indices.values()])


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Jensen-Shannon distance (square root of the divergence, base 2, so in [0, 1]) over the last axis."""
    middle = (p + q) / 2

    def divergence(a: np.ndarray) -> np.ndarray:
        return np.where(a > 0, a * np.log2(np.where(a > 0, a, 1) / np.where(a > 0, middle, 1)), 0).sum(-1)

    return np.sqrt(np.clip((divergence(p) + divergence(q)) / 2, 0, 1))


def effective_classes(counts: np.ndarray) -> np.ndarray:
    """Exponential of the entropy of every row of counts (K, C): 1 for one class, C for C equal ones. (K,)"""
    p = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return np.exp(-np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1))


def heterogeneity(counts: np.ndarray) -> dict[str, float]:
    """How unlike the clients are, from the table of `label_counts` (K, C). Clients without examples are left out.

    Returns:
        js_global: Mean Jensen-Shannon distance between a client's label distribution and that of all, in [0, 1].
        js_pairwise: Mean Jensen-Shannon distance between two clients, in [0, 1]; 0 for a single client.
        effective_classes: Mean of `effective_classes`, in [1, C].
        size_ratio: Largest client / smallest client, at least 1.
        size_cv: Standard deviation / mean of the client sizes.
    """
    counts = counts[counts.sum(1) > 0]
    if not len(counts):
        raise ValueError("no client holds an example")
    sizes = counts.sum(1)
    p = counts / sizes[:, None]
    rows = [jensen_shannon(p[k + 1 :], p[k]) for k in range(len(p) - 1)]  # row by row: K * K * C would not fit
    return {
        "js_global": float(jensen_shannon(p, counts.sum(0) / counts.sum()).mean()),
        "js_pairwise": float(np.concatenate(rows).mean()) if rows else 0.0,
        "effective_classes": float(effective_classes(counts).mean()),
        "size_ratio": float(sizes.max() / sizes.min()),
        "size_cv": float(sizes.std() / sizes.mean()),
    }


def plot_counts(counts: np.ndarray, class_names: Sequence[str], clients: Sequence[str]) -> Figure:
    """Draw the table of `label_counts`: a heat map of classes by clients, under the clients' sizes.

    Args:
        counts: (K, C) integers.
        class_names: C names.
        clients: K keys.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts.shape
    width = float(np.clip(2 + 0.4 * num_clients, 5, 14))
    height = float(np.clip(2.2 + 0.3 * num_classes, 4, 12))
    figure = Figure(figsize=(width, height), layout="constrained")
    bars, cells = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(height - 2, 2)])
    bars.bar(range(num_clients), counts.sum(1), color="0.4", width=0.85)
    bars.set_ylabel("examples")
    bars.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    bars.spines[["top", "right"]].set_visible(False)
    bars.tick_params(axis="x", bottom=False)
    shown = np.ma.masked_equal(counts.T, 0)  # nothing held is white, one example is not
    scale = LogNorm(vmin=0.5, vmax=max(int(counts.max()), 2))
    drawn = cells.imshow(shown, aspect="auto", cmap="YlGnBu", norm=scale, interpolation="nearest")
    figure.colorbar(drawn, ax=cells, label="examples", pad=0.01)
    for axis, names, room in ((cells.xaxis, clients, width * 2.5), (cells.yaxis, class_names, height * 4)):
        ticks = range(0, len(names), max(1, int(np.ceil(len(names) / room))))
        axis.set_ticks(ticks, [names[k] for k in ticks])
    cells.set_xlabel("client")
    if counts.size <= 150:
        for (client, label), count in np.ndenumerate(counts):
            if count:
                color = "white" if scale(count) > 0.6 else "black"
                cells.text(client, label, str(count), ha="center", va="center", fontsize=7, color=color)
    return figure
