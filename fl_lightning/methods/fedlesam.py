"""FedLESAM (Fan et al., 2024): the way the global model has gone estimates the global perturbation, at no extra backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fl_lightning.message import Groups, Message, Tensors
from fl_lightning.methods.averaging import AveragingClient, FedAvg
from fl_lightning.methods.base import Client, ClientProgram, Result, at_least_0
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.sharpness import StalePerturbation


@dataclass(frozen=True)
class FedLESAMClient(AveragingClient):
    """w <- w - eta grad F_i(w + delta_i), delta_i = rho (theta_old - theta) / ||theta_old - theta|| (Algorithm 1).

    theta_old is the global model of this client's previous round; it has none in its first, and takes plain steps.
    """

    rho: float = 0.1

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (StalePerturbation(self.rho),)

    def remember(self, client: Client, message: Message, result: Result, update: Tensors, uploaded: Groups) -> Groups:
        return {"model": message.tensors["model"]}


class FedLESAM(FedAvg):
    """Federated averaging with locally estimated global perturbation.

    Args:
        rho: Radius, at least 0; 0 is FedAvg. 0.1 by default in the authors' code.
        **kwargs: Arguments of `FedAvg`.
    """

    def __init__(self, rho: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        at_least_0(rho=rho)
        self.rho = rho

    def client(self) -> ClientProgram:
        return FedLESAMClient(self.buffer_policy, self.rho)
