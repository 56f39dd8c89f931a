"""Activations of a frozen prefix, computed once per example and kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fl_lightning.data.examples import Concatenated, Examples, View

# Images per forward pass of the prefix, always just so many: a matrix product's last bits may depend on how many rows it
# has, and which examples are missing depends on what ran before (a resumed run, another process).
ENCODE_BATCH = 16


class PrefixCache:
    """Turns examples into examples of activations that are computed the first time they are fetched.

    Args:
        encode: Inputs (B, ...) to activations (B, ...), float32 on the CPU; must not depend on anything that trains.
        limit_bytes: A set whose activations would need more is left as it is.
    """

    def __init__(self, encode: Callable[[Tensor], Tensor], limit_bytes: int) -> None:
        self.encode, self.limit_bytes = encode, limit_bytes
        self.stores: dict[int, _Activations | None] = {}

    def wrap(self, examples: Examples) -> Examples | None:
        """The same examples with activations for inputs, or None where they would not fit."""
        if isinstance(examples, Concatenated):
            parts = [self.wrap(part) for part in examples.parts if len(part)]
            return None if not parts or None in parts else Concatenated([part for part in parts if part is not None])
        root = examples.source if isinstance(examples, View) else examples
        if id(root) not in self.stores:
            self.stores[id(root)] = self._open(root)
        store = self.stores[id(root)]
        if store is None:
            return None
        return store.select(examples.indices) if isinstance(examples, View) else store

    def _open(self, root: Examples) -> _Activations | None:
        one = self.encode(root.fetch(torch.zeros(1, dtype=torch.int64)))
        return _Activations(root, self.encode, one) if one.nbytes * len(root) <= self.limit_bytes else None


class _Activations(Examples):
    def __init__(self, root: Examples, encode: Callable[[Tensor], Tensor], one: Tensor) -> None:
        self.root, self.encode = root, encode  # holding the root keeps its id taken
        self.labels, self.domains = root.labels, root.domains
        self.kept = one.new_empty((len(root), *one.shape[1:]))
        self.known = torch.zeros(len(root), dtype=torch.bool)

    def fetch(self, indices: Tensor) -> Tensor:
        missing = indices[~self.known[indices]].unique()
        for part in missing.split(ENCODE_BATCH) if len(missing) else ():
            padded = torch.cat([part, part[:1].expand(ENCODE_BATCH - len(part))])
            self.kept[part] = self.encode(self.root.fetch(padded))[: len(part)]
            self.known[part] = True
        return self.kept[indices]
