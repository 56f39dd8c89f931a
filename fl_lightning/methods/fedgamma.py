"""FedGAMMA (Dai et al., 2023): SCAFFOLD's control variates around local sharpness-aware steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fl_lightning.message import Message
from fl_lightning.methods.base import Client, ClientProgram, at_least_0
from fl_lightning.methods.scaffold import SCAFFOLD, SCAFFOLDClient
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.sharpness import SAM


@dataclass(frozen=True)
class FedGAMMAClient(SCAFFOLDClient):
    """w <- w - eta (grad F_i(w + rho g / ||g||) - c_i + c)."""

    rho: float = 0.05

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (SAM(self.rho), *super().rules(client, message))


class FedGAMMA(SCAFFOLD):
    """SCAFFOLD with local SAM.

    Args:
        rho: Radius of the local perturbation, at least 0; 0 is SCAFFOLD at the price of two backward passes. 0.01 in
            FL-Simulator, 0.05 in FedNSAM's code.
        **kwargs: Arguments of `SCAFFOLD`.
    """

    def __init__(self, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        at_least_0(rho=rho)
        self.rho = rho

    def client(self) -> ClientProgram:
        return FedGAMMAClient(self.buffer_policy, self.rho)
