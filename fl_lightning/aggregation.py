"""How replies become one: reducers that add replies up in blocks and merge the blocks in order.

Floating-point addition depends on its order. So the loop always reduces the cohort in fixed blocks of clients, in the
order of their keys, and merges the blocks in order: how many workers computed the blocks cannot change a bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BLOCK_SIZE = 8  # clients per block; part of the arithmetic, so not an option


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

    def finish(self, total: Any) -> dict[str, Tensor]:
        sums, _, dtypes, _ = total
        return {name: _narrow(value, dtypes[name]) for name, value in sums.items()}


class Mean(Sum):
    """Weighted mean over clients, sum_k w_k x_k / sum_k w_k; by number of examples unless the method says otherwise."""

    weighted = True

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


def _narrow(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if dtype.is_floating_point else value.round().to(dtype)


def _check_names(known: Mapping[str, Any], tensors: Mapping[str, Tensor], sender: str) -> None:
    if known.keys() != tensors.keys():
        missing, extra = sorted(known.keys() - tensors.keys()), sorted(tensors.keys() - known.keys())
        raise ValueError(
            f"client {sender} sent other tensors than the clients before it: missing {missing}, extra {extra}"
        )


def _check_alike(known: Mapping[str, Tensor], tensors: Mapping[str, Tensor], sender: str) -> None:
    _check_names(known, tensors, sender)
    for name, value in tensors.items():
        if value.shape != known[name].shape:  # torch would broadcast
            raise ValueError(
                f"client {sender} sent {name!r} as {tuple(value.shape)}; the clients before it as {tuple(known[name].shape)}"
            )
