"""FedProx (Li et al., 2020): a proximal term keeps clients near the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fl_lightning.message import Message
from fl_lightning.methods.averaging import AveragingClient, FedAvg
from fl_lightning.methods.base import Client, ClientProgram, at_least_0
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.proximal import Proximal


@dataclass(frozen=True)
class FedProxClient(AveragingClient):
    """Local training on F_k(w) + (mu / 2) ||w - w^t||^2 (Algorithm 2)."""

    mu: float = 0.01

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (Proximal(self.mu),)


class FedProx(FedAvg):
    """Federated averaging with a proximal term at the clients.

    Args:
        mu: Strength of the proximal term, at least 0; 0 is FedAvg. The paper tunes it over {0.001, 0.01, 0.1, 1}.
        **kwargs: Arguments of `FedAvg`.
    """

    def __init__(self, mu: float = 0.01, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        at_least_0(mu=mu)
        self.mu = mu

    def client(self) -> ClientProgram:
        return FedProxClient(self.buffer_policy, self.mu)
