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
            return {name: _wide(value) * factor for name, value in tensors.items()}, factor, dtypes
        sums, weights, dtypes = total
        _check_names(sums, tensors, sender)
        for name, value in tensors.items():
            sums[name].add_(_wide(value), alpha=factor)
        return sums, weights + factor, dtypes

    def merge(self, total: Any, block: Any) -> Any:
        if total is None:
            return block
        sums, weights, dtypes = total
        for name, value in block[0].items():
            sums[name].add_(value)
        return sums, weights + block[1], dtypes

    def finish(self, total: Any) -> dict[str, Tensor]:
        sums, _, dtypes = total
        return {name: _narrow(value, dtypes[name]) for name, value in sums.items()}


class Mean(Sum):
    """Weighted mean over clients, sum_k w_k x_k / sum_k w_k; by number of examples unless the method says otherwise."""

    weighted = True

    def finish(self, total: Any) -> dict[str, Tensor]:
        sums, weights, dtypes = total
        if weights <= 0:
            raise ValueError(f"the weights of a mean sum to {weights}; at least one client must hold an example")
        return {name: _narrow(value / weights, dtypes[name]) for name, value in sums.items()}


class Concatenate(Reducer):
    """Rows of all clients one below the other, in the order of the clients."""

    def add(self, total: Any, tensors: Mapping[str, Tensor], weight: float, sender: str) -> Any:
        total = {name: [] for name in tensors} if total is None else total
        _check_names(total, tensors, sender)
        for name, value in tensors.items():
            total[name].append(value)
        return total

    def merge(self, total: Any, block: Any) -> Any:
        return block if total is None else {name: rows + block[name] for name, rows in total.items()}

    def finish(self, total: Any) -> dict[str, Tensor]:
        return {name: torch.cat(rows) for name, rows in total.items()}


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
