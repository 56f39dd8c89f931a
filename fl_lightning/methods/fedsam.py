"""FedSAM (Qu et al., 2022; Caldarola et al., 2022): federated averaging of local sharpness-aware minimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fl_lightning.message import Message
from fl_lightning.methods.averaging import AveragingClient, FedAvg
from fl_lightning.methods.base import Client, ClientProgram, at_least_0
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.sharpness import SAM


@dataclass(frozen=True)
class FedSAMClient(AveragingClient):
    """w <- w - eta grad F_i(w + rho g / ||g||), both gradients of the same batch."""

    rho: float = 0.05

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (SAM(self.rho),)


class FedSAM(FedAvg):
    """Federated averaging with local SAM.

    Args:
        rho: Radius of the local perturbation, at least 0; 0 is FedAvg at the price of two backward passes. 0.1 for CIFAR-10
            in Caldarola et al.'s code, 0.05 in FedNSAM's.
        **kwargs: Arguments of `FedAvg`.
    """

    def __init__(self, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        at_least_0(rho=rho)
        self.rho = rho

    def client(self) -> ClientProgram:
        return FedSAMClient(self.buffer_policy, self.rho)
