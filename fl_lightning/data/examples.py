"""Labelled images, as the federation hands them around: whole sets, and views of them by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.augmentation import Augmentation


class Examples(ABC):
    """A set of labelled examples that can be fetched by index, many at a time.

    Attributes:
        labels: Class of every example, (N,), int64.
        domains: Domain (or site) of every example, (N,), int64; zeros where the set has one domain.
        augmentation: Random changes that a fit makes to the inputs after fetching them; nobody else does. Views inherit
            them.
    """

    labels: Tensor
    domains: Tensor
    augmentation: tuple[Augmentation, ...] = ()

    @abstractmethod
    def fetch(self, indices: Tensor) -> Tensor:
        """Inputs at ``indices`` (B,) int64, as (B, ...) float32; images are (B, C, H, W) in [0, 1]."""

    def extras(self, indices: Tensor) -> dict[str, Tensor]:
        """Further columns at ``indices`` (B,), (B, ...) each, by name; none unless `Annotated` adds some."""
        return {}

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor | Sequence[int] | np.ndarray) -> Examples:
        """A view of some examples, in the given order; nothing is copied but the index list."""
        return View(self, torch.from_numpy(np.asarray(indices, dtype=np.int64)))

    def of_classes(self, classes: Sequence[int]) -> Examples:
        """A view of the examples whose label is in ``classes``."""
        return self.select(torch.nonzero(torch.isin(self.labels, torch.as_tensor(list(classes)))).flatten())

    def of_domain(self, domain: int) -> Examples:
        """A view of the examples of one domain."""
        return self.select(torch.nonzero(self.domains == domain).flatten())


class TensorExamples(Examples):
    """Examples whose inputs lie in memory.

    Args:
        inputs: (N, ...) tensor; uint8 images are scaled to [0, 1] float32 when fetched.
        labels: (N,) integers.
        domains: (N,) integers, or None for one domain.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, domains: Tensor | None = None) -> None:
        if len(inputs) != len(labels):
            raise ValueError(f"inputs and labels differ in length: {len(inputs)} and {len(labels)}")
        self.inputs = inputs
        self.labels = labels.to(torch.int64)
        self.domains = torch.zeros_like(self.labels) if domains is None else domains.to(torch.int64)

    def fetch(self, indices: Tensor) -> Tensor:
        batch = self.inputs.index_select(0, indices)  # copies whole rows, five times as fast as indexing
        return batch.float().div_(255) if batch.dtype == torch.uint8 else batch


class View(Examples):
    """Some examples of a set, by index. A view of a view points at the set itself. Labels are looked up when asked for: the
    views of ten thousand clients are made for each turn anew."""

    source: Examples
    indices: Tensor

    def __init__(self, source: Examples, indices: Tensor) -> None:
        self.augmentation = source.augmentation
        self.source, self.indices = source, indices
        if isinstance(source, View):
            self.source, self.indices = source.source, source.indices[indices]
        self._plain = type(self.source).extras is Examples.extras  # there are none to look for, at every batch

    @cached_property
    def labels(self) -> Tensor:  # type: ignore[override]
        return self.source.labels[self.indices]

    @cached_property
    def domains(self) -> Tensor:  # type: ignore[override]
        return self.source.domains[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Tensor) -> Tensor:
        return self.source.fetch(self.indices[indices])

    def extras(self, indices: Tensor) -> dict[str, Tensor]:
        return {} if self._plain else self.source.extras(self.indices[indices])


class Annotated(Examples):
    """Examples with further columns.

    Args:
        source: The examples; columns of theirs stay, unless one of the same name is given.
        columns: Tensors (N, ...) by name, one row for each example.
    """

    def __init__(self, source: Examples, columns: Mapping[str, Tensor]) -> None:
        for name, column in columns.items():
            if len(column) != len(source):
                raise ValueError(f"column {name!r} has {len(column)} rows; it must have {len(source)}")
        self.source, self.columns = source, dict(columns)
        self.labels, self.domains, self.augmentation = source.labels, source.domains, source.augmentation

    def fetch(self, indices: Tensor) -> Tensor:
        return self.source.fetch(indices)

    def extras(self, indices: Tensor) -> dict[str, Tensor]:
        return self.source.extras(indices) | {name: column[indices] for name, column in self.columns.items()}


class Transformed(Examples):
    """Examples whose fetched inputs pass through a function that maps a (B, ...) batch to a (B, ...) batch."""

    def __init__(self, source: Examples, transform: Callable[[Tensor], Tensor]) -> None:
        self.source, self.transform = source, transform
        self.labels, self.domains = source.labels, source.domains

    def fetch(self, indices: Tensor) -> Tensor:
        return self.transform(self.source.fetch(indices))


class Concatenated(Examples):
    """Several sets one after the other."""

    def __init__(self, parts: Sequence[Examples]) -> None:
        self.parts = list(parts)
        self.labels = torch.cat([part.labels for part in parts])
        self.domains = torch.cat([part.domains for part in parts])
        self.offsets = torch.tensor([0, *map(len, parts)]).cumsum(0)

    def fetch(self, indices: Tensor) -> Tensor:
        owner = torch.searchsorted(self.offsets, indices, right=True) - 1
        out: Tensor | None = None
        for number in owner.unique().tolist():
            at = torch.nonzero(owner == number).flatten()
            batch = self.parts[number].fetch(indices[at] - self.offsets[number])
            if out is None:
                out = batch.new_empty((len(indices), *batch.shape[1:]))
            out[at] = batch
        return self.parts[0].fetch(indices) if out is None else out


@dataclass(frozen=True)
class DataInfo:
    """What everybody in the federation may know of the data: names and shapes, no example.

    Attributes:
        class_names: Names of all classes; position = label.
        input_shape: (C, H, W) of an image.
        base_classes: Labels that the clients train on; all of them unless classes are held out as novel.
        novel_classes: Labels that nobody trains on (base-to-novel evaluation).
        domain_names: Names of the domains (or sites).
        clients: Keys of the clients that take part in training.
    """

    class_names: tuple[str, ...]
    input_shape: tuple[int, int, int]
    base_classes: tuple[int, ...]
    novel_classes: tuple[int, ...] = ()
    domain_names: tuple[str, ...] = ("all",)
    clients: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        return len(self.class_names)
