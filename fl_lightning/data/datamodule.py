"""The data of a federation: who trains on what, and what is evaluated on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning
import numpy as np
import torch

from fl_lightning.data import (
    sources,  # noqa: F401  so that the command line knows the sources by their short names
)
from fl_lightning.data.augmentation import Augmentation
from fl_lightning.data.examples import DataInfo, Examples
from fl_lightning.data.partition import (
    IID,
    Partition,
    Partitioner,
    label_counts,
    mirror,
    partition,
    stratified_take,
)
from fl_lightning.data.source import Source, Splits, check_splits
from fl_lightning.rng import numpy_generator


class FederatedDataModule(lightning.LightningDataModule):
    """A source's examples, divided among clients.

    In this order: novel classes leave the training split; ``train_fraction`` of it is kept; the validation examples are
    drawn from it (or are the source's own, where it has a validation split); ``shots`` of every class are kept of the
    rest; the partitioner divides that. Validation and test examples are then divided among the clients in the
    proportions in which they hold the training examples of every (domain, class). No example is in two of the training,
    validation and test sets.

    Args:
        source: Where the examples come from.
        partitioner: How they are divided; None for `IID`.
        num_clients: Number of clients, those that only evaluate included. 0: there are only the test examples; models come
            from elsewhere (``federation.uploads``).
        batch_size: Effective batch of a client's training step, over all devices together.
        image_size: Height and width in pixels to bring images to; None keeps the source's own.
        channels: 1 (grey) or 3 (RGB) to bring images to; None keeps the source's own.
        val_fraction: Share of the training split held out for validation, in [0, 1), where the source has no validation
            split. With ``shots``, never more validation than training examples of a class.
        shots: Training examples of every class in the whole federation; None for all. A class with fewer gives all.
        train_fraction: Share of the training split that is used, in (0, 1], stratified by domain and class.
        base_fraction: The first ceil(share * C) of the C classes are trained on, in (0, 1]; the others are novel, and
            only tested on.
        base_classes: Number of classes that are trained on, in [1, C]; instead of ``base_fraction``.
        unseen_clients: Clients that are evaluated but never trained: their number, drawn by seed, or their keys.
        min_client_size: Least number of training examples of a client; see `partition` for the repair.
        allow_empty: Leave clients without examples as they are. They take no part in training.
        augmentation: Random changes of the training images, in this order, drawn anew each time an image is trained on;
            none by default. Whatever is only predicted or evaluated is left as it is.
        seed: Owner seed of all draws; None lets the command line set the run's seed, and is 0 otherwise.
    """

    def __init__(
        self,
        source: Source,
        partitioner: Partitioner | None = None,
        num_clients: int = 10,
        batch_size: int = 32,
        image_size: int | None = None,
        channels: int | None = None,
        val_fraction: float = 0.1,
        shots: int | None = None,
        train_fraction: float = 1.0,
        base_fraction: float = 1.0,
        base_classes: int | None = None,
        unseen_clients: int | list[int | str] = 0,
        min_client_size: int = 1,
        allow_empty: bool = False,
        augmentation: list[Augmentation] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        _check("num_clients", num_clients, num_clients >= 0, "at least 0")
        _check("batch_size", batch_size, batch_size >= 1, "at least 1")
        _check("val_fraction", val_fraction, 0 <= val_fraction < 1, "in [0, 1)")
        _check("shots", shots, shots is None or shots >= 1, "at least 1, or null")
        _check("train_fraction", train_fraction, 0 < train_fraction <= 1, "in (0, 1]")
        _check("base_fraction", base_fraction, 0 < base_fraction <= 1, "in (0, 1]")
        if base_classes is not None:
            _check("base_fraction", base_fraction, base_fraction == 1, "1 (its default) when base_classes is given")
        self.source = source
        self.partitioner: Partitioner = IID() if partitioner is None else partitioner
        self.num_clients, self.batch_size = num_clients, batch_size
        self.image_size, self.channels = image_size, channels
        self.val_fraction, self.shots, self.train_fraction = val_fraction, shots, train_fraction
        self.base_fraction, self.base_classes = base_fraction, base_classes
        self.unseen_clients = unseen_clients
        self.min_client_size, self.allow_empty = min_client_size, allow_empty
        self.augmentation = tuple(augmentation or ())
        self.seed = seed
        self._ready_for: int | None = None
        self._divided: dict[str, tuple[Examples, Partition]]
        self._unseen: tuple[str, ...]

    def __getstate__(self) -> dict[str, Any]:
        """For another process: the arguments alone. It sets itself up again there, from the seed."""
        made = ("_splits", "_divided", "_unseen", "_info")
        return {name: value for name, value in vars(self).items() if name not in made} | {"_ready_for": None}

    def use_seed(self, seed: int) -> None:
        """Use the run's seed, unless one was given to the constructor."""
        if self.seed is None:
            self.seed = seed

    def setup(self, stage: str | None = None) -> None:
        """Load and divide; does nothing the second time, unless the seed has changed since.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A file is broken, or the arguments do not fit the data.
        """
        seed = 0 if self.seed is None else self.seed
        if self._ready_for == seed:
            return
        splits = self.source.load(image_size=self.image_size, channels=self.channels, seed=seed)
        check_splits(splits, type(self.source).__name__, trained=self.num_clients > 0)
        base = self._base(len(splits.class_names))
        self._splits = splits
        self._divided, self._unseen = dict.fromkeys(("train", "val", "test"), (splits.test, Partition({}))), ()
        if self.num_clients:
            self._divide(splits, base, seed)
        division = self._divided["train"][1]
        own = zip(division.clients, division.sizes.tolist(), strict=True)
        clients = tuple(key for key, size in own if size and key not in self._unseen)
        if self.num_clients and not clients:
            raise ValueError(f"no client is left to train: {self.num_clients} clients, unseen {list(self._unseen)}")
        novel = tuple(range(len(base), len(splits.class_names)))
        _, *shape = (splits.train if self.num_clients else splits.test).fetch(torch.tensor([0])).shape
        self._info = DataInfo(
            splits.class_names,
            (shape[0], shape[1], shape[2]),
            tuple(base.tolist()),
            novel,
            splits.domain_names,
            clients,
        )
        self._ready_for = seed

    def _divide(self, splits: Splits, base: np.ndarray, seed: int) -> None:
        """Give every client its training, validation and test examples."""
        pool, val, val_pool = self._pools(splits, base, seed)
        labels, domains = splits.train.labels.numpy(), splits.train.domains.numpy()
        division = partition(
            self.partitioner,
            labels[pool],
            domains[pool],
            self.num_clients,
            seed,
            self.min_client_size,
            self.allow_empty,
        ).through(pool)
        everything = np.arange(len(splits.test))
        self._divided = {
            "train": (splits.train, division),
            "val": (val, self._mirrored(division, val, val_pool, seed, "val")),
            "test": (splits.test, self._mirrored(division, splits.test, everything, seed, "test")),
        }
        self._unseen = self._draw_unseen(division.clients, seed)

    # What a run asks for. Each sets the data up if that has not been done.

    @property
    def info(self) -> DataInfo:
        """Names, shapes and the keys of the clients that train."""
        self.setup()
        return self._info

    @property
    def num_classes(self) -> int:
        return self.info.num_classes

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.info.class_names

    @property
    def unseen(self) -> tuple[str, ...]:
        """Keys of the clients that are evaluated but never trained."""
        self.setup()
        return self._unseen

    @property
    def partition(self) -> Partition:
        """Which example of the source's training split every client trains on (the unseen ones would)."""
        self.setup()
        return self._divided["train"][1]

    def train(self, client: str) -> Examples:
        """Training examples of a client. An unseen client has some too, for evaluations that adapt first."""
        examples = self._share("train", client)
        examples.augmentation = self.augmentation
        return examples

    def val(self, client: str) -> Examples:
        """Validation examples of a client; there may be none."""
        return self._share("val", client)

    def test(self, client: str) -> Examples:
        """A client's share of the test set, with its training proportions; there may be none."""
        return self._share("test", client)

    def server_val(self) -> Examples:
        """Validation examples of all training clients, one after the other."""
        clients = self.info.clients
        examples, division = self._divided["val"]
        return examples.select(np.concatenate([division.flat[:0], *(division.indices[key] for key in clients)]))

    def test_sets(self) -> dict[str, Examples]:
        """Test sets by name.

        Returns:
            ``global``: all test examples of base classes. ``base`` (the same) and ``novel`` if classes are held out.
            ``domain/<name>``: those of base classes in a domain, if there are several domains.
        """
        whole = self._of_base(self.info, self._splits.test)
        sets = {"global": whole}
        if self.info.novel_classes:
            sets |= {"base": whole, "novel": self._splits.test.of_classes(self.info.novel_classes)}
        return sets | self._by_domain(whole)

    def val_sets(self) -> dict[str, Examples]:
        """As `test_sets`, of the validation examples of training clients, for tuning; there is no ``novel``."""
        whole = self.server_val()
        sets = {"global": whole} | ({"base": whole} if self.info.novel_classes else {})
        return sets | self._by_domain(whole)

    def counts(self) -> np.ndarray:
        """Training examples by client (all keys of `partition`, in order) and class, (clients, classes) int64."""
        return label_counts(self.partition, self._splits.train.labels.numpy(), self.info.num_classes)

    # How it is set up.

    def _base(self, num_classes: int) -> np.ndarray:
        if self.base_classes is None:
            return np.arange(math.ceil(self.base_fraction * num_classes - 1e-9))  # 0.28 * 25 is 7.000000000000001
        _check("base_classes", self.base_classes, 1 <= self.base_classes <= num_classes, f"in [1, {num_classes}]")
        return np.arange(self.base_classes)

    def _pools(self, splits: Splits, base: np.ndarray, seed: int) -> tuple[np.ndarray, Examples, np.ndarray]:
        """Indices of the training examples; the set with the validation examples, and their indices in it."""
        labels, domains = splits.train.labels.numpy(), splits.train.domains.numpy()

        def take(pool: np.ndarray, fraction: float, purpose: str) -> tuple[np.ndarray, np.ndarray]:
            taken, left = stratified_take(labels[pool], domains[pool], fraction, numpy_generator(seed, "data", purpose))
            return pool[taken], pool[left]

        pool, _ = take(np.flatnonzero(np.isin(labels, base)), self.train_fraction, "train_fraction")
        if splits.val is None:
            val = splits.train
            val_pool, pool = take(pool, self.val_fraction, "val")
        else:
            val = splits.val
            val_pool = np.arange(len(val))  # its novel classes fall out when it is mirrored: no client holds them
        if self.shots is not None:
            pool = _shots(pool, labels, self.shots, numpy_generator(seed, "data", "shots"))
            val_pool = _shots(val_pool, val.labels.numpy(), self.shots, numpy_generator(seed, "data", "val_shots"))
        return pool, val, val_pool

    def _mirrored(self, division: Partition, other: Examples, pool: np.ndarray, seed: int, split: str) -> Partition:
        train = self._splits.train
        return mirror(
            train.labels.numpy(),
            train.domains.numpy(),
            division,
            other.labels.numpy()[pool],
            other.domains.numpy()[pool],
            numpy_generator(seed, "data", "mirror", split),
        ).through(pool)

    def _draw_unseen(self, keys: Sequence[str], seed: int) -> tuple[str, ...]:
        if isinstance(self.unseen_clients, int):
            count = self.unseen_clients
            _check("unseen_clients", count, 0 <= count < len(keys), f"in [0, {len(keys) - 1}]")
            drawn = numpy_generator(seed, "data", "unseen").permutation(len(keys))[:count]
            return tuple(keys[number] for number in np.sort(drawn))
        wanted = set(map(str, self.unseen_clients))
        _check("unseen_clients", self.unseen_clients, wanted <= set(keys), f"keys from '0' to '{len(keys) - 1}'")
        return tuple(key for key in keys if key in wanted)

    def _share(self, split: str, client: str) -> Examples:
        self.setup()
        examples, division = self._divided[split]
        if (indices := division.indices.get(client)) is None:
            keys = f"keys go from '0' to '{self.num_clients - 1}'" if self.num_clients else "num_clients is 0"
            raise ValueError(f"unknown client {client!r}; {keys}")
        return examples.select(indices)

    @staticmethod
    def _of_base(info: DataInfo, examples: Examples) -> Examples:
        return examples.of_classes(info.base_classes) if info.novel_classes else examples

    def _by_domain(self, whole: Examples) -> dict[str, Examples]:
        names = self.info.domain_names
        return {f"domain/{name}": whole.of_domain(n) for n, name in enumerate(names)} if len(names) > 1 else {}


def _shots(pool: np.ndarray, labels: np.ndarray, shots: int, rng: np.random.Generator) -> np.ndarray:
    """At most ``shots`` examples of every class, drawn; ascending."""
    drawn = [rng.permutation(pool[labels[pool] == label])[:shots] for label in np.unique(labels[pool])]
    return np.sort(np.concatenate([pool[:0], *drawn]))


def _check(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value}")
