"""What a network's BatchNorm layers remember of the images it was trained on, as a prior of images (Yin et al.,
2020)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_statistics_loss(inputs: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """||mu - mean||_2 + ||sigma^2 - variance||_2 of one layer, a scalar >= 0.

    Args:
        inputs: What enters the layer, (B, C, ...); mu and sigma^2 (divided by the count) are its moments by channel.
        mean: Running mean (C,).
        variance: Running variance (C,).
    """
    variances, means = torch.var_mean(inputs.transpose(0, 1).flatten(1), 1, correction=0)
    return torch.linalg.vector_norm(means - mean) + torch.linalg.vector_norm(variances - variance)


def statistics_layers(network: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers of a network that have running statistics."""
    return [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


@contextmanager
def watched_statistics(network: nn.Module) -> Iterator[list[Tensor]]:
    """Within, every forward pass of the network appends `batch_statistics_loss` of each of its BatchNorm layers to the
    list.

    Other weights that `torch.func.functional_call` lends to the network count with their own running statistics.
    """
    losses: list[Tensor] = []

    def watch(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        losses.append(batch_statistics_loss(inputs[0], layer.running_mean, layer.running_var))

    handles = [layer.register_forward_pre_hook(watch) for layer in statistics_layers(network)]
    try:
        yield losses
    finally:
        for handle in handles:
            handle.remove()
