"""What a run computes, in floating-point operations."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.tasks.base import Batch, FederatedTask


class FlopCount:
    """Floating-point operations of fits and forward passes: those of one example by torch's counter, which counts matrix
    products, convolutions and attention (two for a multiplication and an addition), times the examples.

    Attributes:
        total: So far.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._known: dict[tuple[Any, ...], float] = {}

    def fit(self, name: str, task: FederatedTask, batch: Batch, examples: float) -> None:
        """Count a training, forward and backward; ``examples`` as often as each was in a gradient."""
        self._add(name, task, batch, examples, train=True)

    def predict(self, name: str, task: FederatedTask, batch: Batch, examples: float) -> None:
        """Count forward passes."""
        self._add(name, task, batch, examples, train=False)

    def _add(self, name: str, task: FederatedTask, batch: Batch, examples: float, train: bool) -> None:
        key = (name, task.output, train, task.inputs_are_cached, batch.inputs.shape[1:], len(task.given))
        if key not in self._known:
            twin = copy.deepcopy(task)  # neither its buffers nor its gradients may change
            counter = FlopCounterMode(display=False)
            counter.mod_tracker = _NoModules()  # type: ignore[assignment]
            with counter:
                if train:
                    (twin.loss(batch) if twin.criterion is None else twin.criterion(twin, batch)).backward()
                else:
                    one = {column: value[:1] for column, value in batch.extras.items()}  # drawing a sample is dear
                    with torch.no_grad():
                        twin.predict_step(Batch(batch.inputs[:1], batch.labels[:1], extras=one), 0)
            self._known[key] = counter.get_total_flops() / (len(batch.labels) if train else 1)
        self.total += self._known[key] * examples


class _NoModules:
    """In place of the counter's bookkeeping by module, whose hooks forbid `torch.autograd.grad` within a loss."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...
