"""FedNesterov: Nesterov momentum of the server, clients start at the look-ahead. The base of FedACG and FedNSAM."""

from __future__ import annotations

from typing import Any

import torch

from fl_lightning.message import Message, Tensors
from fl_lightning.methods.averaging import FedAvg


class FedNesterov(FedAvg):
    """phi = theta + lambda m is broadcast; m <- lambda m + mean_i Delta_i; theta <- theta + m, Delta_i measured from phi.

    FedACG (Kim et al., 2024, Algorithm 1) without its proximal term, and FedNSAM with rho = 0. With one client and one
    full-batch step a round, phi runs through the iterates of torch's SGD(momentum=lambda, nesterov=True). m touches
    parameters only; buffers follow their policy.

    Args:
        momentum: lambda, in [0, 1); 0 is FedAvg.
        **kwargs: Arguments of `FedAvg`, but for ``server_optimizer``.
    """

    def __init__(self, momentum: float = 0.85, **kwargs: Any) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; it must be in [0, 1)")
        super().__init__(server_optimizer=lambda p: torch.optim.SGD(p, lr=1.0, momentum=momentum), **kwargs)
        self.look_ahead = momentum

    def broadcast(self, round: int) -> Message:
        return super().broadcast(round).plus({"model": self.ahead()})

    def ahead(self) -> Tensors:
        """The look-ahead theta + lambda m."""
        momentum = self.momentum()
        if momentum is None:
            return self.parameters
        return {name: value.detach() + self.look_ahead * momentum[name] for name, value in self.parameters.items()}
