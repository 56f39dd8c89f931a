"""FedACG (Kim et al., 2024): accelerated client gradient, a look-ahead by the global momentum and a pull towards it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fl_lightning.message import Message
from fl_lightning.methods.averaging import AveragingClient
from fl_lightning.methods.base import Client, ClientProgram, at_least_0
from fl_lightning.methods.fednesterov import FedNesterov
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.proximal import Proximal


@dataclass(frozen=True)
class FedACGClient(AveragingClient):
    """Local training on F_i(w) + (beta / 2) ||w - phi||^2 from the look-ahead phi (Algorithm 1)."""

    beta: float = 0.002

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (Proximal(self.beta),)


class FedACG(FedNesterov):
    """FedNesterov with a proximal term at the clients.

    Args:
        momentum: lambda, in [0, 1). 0.85 in the authors' code.
        beta: Gradient beta (w - phi), at least 0; 0 is FedNesterov. The authors' code has 0.001 ||w - phi||^2, so 0.002.
        **kwargs: Arguments of `FedNesterov`.
    """

    def __init__(self, momentum: float = 0.85, beta: float = 0.002, **kwargs: Any) -> None:
        super().__init__(momentum=momentum, **kwargs)
        at_least_0(beta=beta)
        self.beta = beta

    def client(self) -> ClientProgram:
        return FedACGClient(self.buffer_policy, self.beta)
