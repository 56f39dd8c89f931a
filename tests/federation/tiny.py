"""Federations so small that a test can compute what they should do: tensors in, clients of given sizes, no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.examples import TensorExamples
from fl_lightning.data.partition import Partitioner
from fl_lightning.data.source import Source, Splits
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.methods.base import Method
from fl_lightning.tasks import ClassificationTask, FederatedTask

CPU: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1}
SHAPE, CLASSES = (1, 2, 2), 3


class Given(Source):
    """Training and test examples as they are."""

    def __init__(self, train: TensorExamples, test: TensorExamples, num_classes: int = CLASSES) -> None:
        self.splits = Splits(train, test, tuple(f"class {c}" for c in range(num_classes)))

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        return self.splits


@dataclass(frozen=True)
class Consecutive(Partitioner):
    """The first client gets the first examples, and so on."""

    sizes: tuple[int, ...]

    def divide(
        self, labels: np.ndarray, domains: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        return np.split(np.arange(len(labels)), np.cumsum(self.sizes)[:-1])


def examples(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> TensorExamples:
    """Random examples with labels that a linear map decides."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, *SHAPE, generator=draw, dtype=dtype)
    return TensorExamples(inputs, (inputs.flatten(1)[:, :CLASSES] + 0.5).argmax(1))


def data(sizes: Sequence[int], batch_size: int = 4, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A data module whose client k holds the next ``sizes[k]`` examples."""
    source = Given(examples(sum(sizes), 1, dtype), examples(30, 2, dtype))
    return FederatedDataModule(
        source, Consecutive(tuple(sizes)), len(sizes), batch_size=batch_size, **{"val_fraction": 0.0, **options}
    )


def linear(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """A linear classifier in float64."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, num_classes)).double()


def normalised(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """A classifier with BatchNorm, in float64."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, num_classes)).double()


def sgd(lr: float = 0.1, **options: Any) -> Callable:
    """A builder of SGD."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


def task(network: Callable = linear, optimizer: Callable | None = None) -> FederatedTask:
    """A classification task without pixel normalisation."""
    return ClassificationTask(network, optimizer or sgd(), mean=[0.0], std=[1.0])


def federation(
    method: Method,
    sizes: Sequence[int] = (7, 12, 5),
    *,
    network: Callable = linear,
    optimizer: Callable | None = None,
    trainer: Mapping[str, Any] | None = None,
    batch_size: int = 4,
    seed: int = 0,
    data_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> FederationLoop:
    """An assembled loop, ready for `fit`."""
    loop = FederationLoop(**{"progress": False, "validate": False, "num_threads": None, **options})
    module = data(sizes, batch_size, **(data_options or {}))
    loop.assemble(method, task(network, optimizer), module, {**CPU, **(trainer or {})}, seed)
    return loop


def numbers(loop: FederationLoop) -> list[dict[str, float]]:
    """The record without the clock."""
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in loop.history]


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit: nested containers of tensors, numbers and strings."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a.detach(), b.detach())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(value, b[name]) for name, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b
