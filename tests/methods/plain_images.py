"""Data-free distillation as a plain loop would write it: a generator of functions, and tiny classifiers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.methods.generator_distillation import GeneratorDistillation
from fl_lightning.rng import torch_generator


def paint(state: Mapping[str, Tensor], z: Tensor, y: Tensor | None = None, training: bool = True) -> Tensor:
    """Images (B, 1, 2, 2): sides of 1, 1 and 2 pixels."""

    def norm(x: Tensor, name: str) -> Tensor:
        statistics = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        return F.batch_norm(x, *statistics, state[f"{name}.weight"], state[f"{name}.bias"], training)

    hidden = z @ state["stem.weight"].T + state["stem.bias"]
    if y is not None:
        told = state["class_stem.weight"].T[y] + state["class_stem.bias"]
        hidden = torch.cat([hidden, told], 1)
    hidden = norm(hidden[:, :, None, None], "first")
    hidden = F.leaky_relu(norm(F.conv2d(hidden, state["second.0.weight"], padding=1), "second.1"), 0.2)
    hidden = hidden.repeat(1, 1, 2, 2)
    hidden = F.leaky_relu(norm(F.conv2d(hidden, state["third.0.weight"], padding=1), "third.1"), 0.2)
    return F.conv2d(hidden, state["third.3.weight"], state["third.3.bias"], padding=1).sigmoid()


def first_weights(method: GeneratorDistillation, epoch: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """A generator's state as it is drawn, and those of it that learn."""
    method.network.redraw(torch_generator(0, 1, "server", "generator", epoch))
    state = {name: value.detach().clone() for name, value in method.network.state_dict().items()}
    learn = [value.requires_grad_() for name, value in state.items() if "running" not in name and "num" not in name]
    return state, learn


def scores(model: Mapping[str, Tensor], x: Tensor, training: bool = False) -> tuple[Tensor, Tensor | None]:
    """Of `federation.tiny`'s linear or normalised classifier: scores, and what enters its BatchNorm."""
    hidden = x.flatten(1) @ model["network.1.weight"].T + model["network.1.bias"]
    if "network.2.weight" not in model:
        return hidden, None
    statistics = model["network.2.running_mean"], model["network.2.running_var"]
    normal = F.batch_norm(hidden, *statistics, model["network.2.weight"], model["network.2.bias"], training)
    return normal @ model["network.3.weight"].T + model["network.3.bias"], hidden


def batches(count: int, size: int, steps: int, *owner: object) -> Iterator[Tensor]:
    """Indices of the batches that a fit takes."""
    shuffle = torch_generator(0, 1, "server", *owner, "shuffle")
    done = 0
    while True:
        for batch in torch.randperm(count, generator=shuffle).split(size):
            if done == steps:
                return
            yield batch
            done += 1


def by_class(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded to 256 levels, sorted by class."""
    order = labels.argsort(stable=True)
    return (images[order] * 255).round() / 255, labels[order]


class Student:
    """A plain student with one SGD (learning rate 0.1, momentum 0.9) over all epochs."""

    def __init__(self, start: Mapping[str, Tensor]) -> None:
        self.model = {name: value.clone() for name, value in start.items()}
        self.learn = [value.requires_grad_() for n, value in self.model.items() if n.endswith(("weight", "bias"))]
        self.optimizer = torch.optim.SGD(self.learn, lr=0.1, momentum=0.9)

    def step(self, loss: Tensor, scale: float) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.1 * scale
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
