"""FedASAM (Caldarola et al., 2022): federated averaging of local adaptive sharpness-aware minimisation.

Their averaging of the last rounds' weights is `FedAvg`'s ``averaging``, which any method of the family takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fl_lightning.message import Message
from fl_lightning.methods.averaging import AveragingClient, FedAvg
from fl_lightning.methods.base import Client, ClientProgram, at_least_0
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.sharpness import ASAM


@dataclass(frozen=True)
class FedASAMClient(AveragingClient):
    """w <- w - eta grad F_i(w + rho T^2 g / ||T g||), T = |w| + eta_adaptive."""

    rho: float = 0.7
    eta: float = 0.2

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (ASAM(self.rho, self.eta),)


class FedASAM(FedAvg):
    """Federated averaging with local ASAM.

    Args:
        rho: Radius of the perturbation in the space scaled by T, at least 0. 0.7 for CIFAR-10 in the paper.
        eta: Added to |w| in T, at least 0. 0.2 for CIFAR-10 in the paper.
        **kwargs: Arguments of `FedAvg`.
    """

    def __init__(self, rho: float = 0.7, eta: float = 0.2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        at_least_0(rho=rho, eta=eta)
        self.rho, self.eta = rho, eta

    def client(self) -> ClientProgram:
        return FedASAMClient(self.buffer_policy, self.rho, self.eta)
