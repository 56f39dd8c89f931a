"""Federations without the package: flat float64 vectors, plain loops, the update rules as the papers print them.

A reference in a test is a loop over rounds that uses `World.local` for K steps along a direction; what it shares with the
package is the data, the initial weights, the cohorts and the order of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from federation.tiny import CPU, Consecutive, Given, examples, federation, sgd, task
from torch import Tensor, nn

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.examples import DataInfo, TensorExamples
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.sampling import UniformSampler
from fl_lightning.rng import torch_generator
from fl_lightning.tasks import Batch, FederatedTask

SIZES = (7, 12, 5)
Direction = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


class World:
    """Three clients, two a round, linear classifier, two epochs of batches of four, learning rate 0.1."""

    def __init__(
        self, *, sizes: Sequence[int] = SIZES, per_round: int = 2, decay: float = 0.0, lr: float = 0.1
    ) -> None:
        self.sizes, self.per_round, self.decay, self.lr, self.epochs = tuple(sizes), per_round, decay, lr, 2
        built = task()
        built.build(DataInfo(("a", "b", "c"), (1, 2, 2), (0, 1, 2)), 0)
        self.shapes = {name: p.shape for name, p in built.trainable().items()}
        self.theta = torch.cat([p.detach().flatten() for p in built.trainable().values()])
        self.data, self.offsets = examples(sum(sizes), 1), torch.tensor([0, *sizes]).cumsum(0)
        self.num_clients = len(sizes)
        self.gradients = 0

    def cohort(self, round: int) -> list[int]:
        keys = tuple(map(str, range(self.num_clients)))
        return sorted(int(key) for key in UniformSampler(size=self.per_round).cohort(round, keys, 0))

    def loss(self, theta: Tensor, batch: Tensor) -> Tensor:
        weight, bias = (
            part.view(shape)
            for part, shape in zip(
                theta.split([s.numel() for s in self.shapes.values()]), self.shapes.values(), strict=True
            )
        )
        return F.cross_entropy(F.linear(self.data.inputs[batch].flatten(1), weight, bias), self.data.labels[batch])

    def local(self, round: int, client: int, start: Tensor, direction: Direction) -> Tensor:
        """y_K: y <- y - lr (direction + decay * y) over all batches of the round."""
        shuffle = torch_generator(0, round, str(client), "fit", "shuffle")
        y = start.clone()
        for _ in range(self.epochs):
            for batch in torch.randperm(self.sizes[client], generator=shuffle).split(4):

                def gradient(at: Tensor, rows: Tensor = self.offsets[client] + batch) -> Tensor:
                    self.gradients += 1
                    leaf = at.detach().requires_grad_()
                    return torch.autograd.grad(self.loss(leaf, rows), leaf)[0]

                y = y - self.lr * (direction(y, gradient) + self.decay * y)
        return y

    def steps(self, client: int) -> int:
        return self.epochs * -(-self.sizes[client] // 4)

    def mean(self, values: dict[int, Any], uniform: bool = False) -> Any:
        weights = {i: 1.0 if uniform else float(self.sizes[i]) for i in values}
        return sum(weights[i] * value for i, value in values.items()) / sum(weights.values())

    def run(self, method: Any, **options: Any) -> Any:
        """The same federation by the package; returns the finished loop."""
        loop = federation(
            method,
            self.sizes,
            optimizer=sgd(self.lr, weight_decay=self.decay),
            sampler=UniformSampler(size=self.per_round),
            **{"trainer": {"max_epochs": self.epochs}, **options},
        )
        loop.fit()
        return loop

    @staticmethod
    def flat(tensors: Any) -> Tensor:
        return torch.cat([value.detach().flatten() for value in tensors.values()])


def close(method: Any, theta: Tensor, tolerance: float = 1e-12) -> None:
    """The package's global model is the reference's."""
    torch.testing.assert_close(World.flat(method.parameters), theta, rtol=0, atol=tolerance)


def sam(y: Tensor, gradient: Callable[[Tensor], Tensor], rho: float) -> Tensor:
    """grad F(y + rho g / ||g||)."""
    g = gradient(y)
    return gradient(y + rho * g / g.norm())


class Quadratic(FederatedTask):
    """F(w) = (w - x)^2 / 2 for a client whose examples are all x: the gradient is w - x."""

    def build(self, info: DataInfo, seed: int) -> None:
        self.w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))

    def loss(self, batch: Batch) -> Tensor:
        return 0.5 * (self.w - batch.inputs.flatten()).square().mean()

    def logits(self, inputs: Tensor) -> Tensor:
        return torch.zeros(len(inputs), 2, dtype=torch.float64) + self.w * 0


class Trajectory(FederationCallback):
    """The single weight after every round, the start included."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_round_end(self, loop: FederationLoop, row: Any) -> None:
        self.values.append(float(loop.method.parameters["w"].detach()))  # type: ignore[attr-defined]


def by_hand(method: Any, *, steps: int = 1, lr: float = 0.5, sampler: Any = None) -> list[float]:
    """w after each round, from 1: two clients, x = 0 and x = 4, one example each, ``steps`` steps of ``lr`` a round."""
    points = torch.tensor([0.0, 4.0], dtype=torch.float64).view(2, 1, 1, 1)
    held = TensorExamples(points, torch.tensor([0, 1]))
    module = FederatedDataModule(Given(held, held, 2), Consecutive((1, 1)), 2, batch_size=4, val_fraction=0.0)
    trajectory = Trajectory()
    loop = FederationLoop(progress=False, validate=False, callbacks=[trajectory], sampler=sampler)
    loop.assemble(method, Quadratic(sgd(lr)), module, {**CPU, "max_epochs": steps}, 0)
    loop.fit()
    return trajectory.values[1:]
