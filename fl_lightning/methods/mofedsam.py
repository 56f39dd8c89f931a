"""MoFedSAM (Qu et al., 2022): FedCM's momentum around local sharpness-aware steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fl_lightning.message import Message
from fl_lightning.methods.base import Client, ClientProgram, at_least_0
from fl_lightning.methods.fedcm import FedCM, FedCMClient
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.sharpness import SAM


@dataclass(frozen=True)
class MoFedSAMClient(FedCMClient):
    """w <- w - eta (alpha grad F_i(w + rho g / ||g||) + (1 - alpha) M)."""

    rho: float = 0.1

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (SAM(self.rho), *super().rules(client, message))


class MoFedSAM(FedCM):
    """FedCM with local SAM.

    Args:
        alpha: Weight of the client's own gradient, in (0, 1]; 1 is FedSAM. 0.1 in FL-Simulator.
        rho: Radius of the local perturbation, at least 0; 0 is FedCM at the price of two backward passes. 0.1 in
            FL-Simulator, 0.05 in FedNSAM's code.
        **kwargs: Arguments of `FedCM`.
    """

    def __init__(self, alpha: float = 0.1, rho: float = 0.1, **kwargs: Any) -> None:
        super().__init__(alpha=alpha, **kwargs)
        at_least_0(rho=rho)
        self.rho = rho

    def client(self) -> ClientProgram:
        return MoFedSAMClient(self.buffer_policy, self.alpha, self.rho)
