"""FedSpeed (Sun et al., 2023): prox-correction and a gradient perturbation that allow long local training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fl_lightning.message import Groups, Message, Tensors
from fl_lightning.methods.averaging import AveragingClient, FedAvg
from fl_lightning.methods.base import Client, ClientProgram, Result, at_least_0
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.correction import Correction
from fl_lightning.rules.proximal import Proximal
from fl_lightning.rules.sharpness import SAM


@dataclass(frozen=True)
class FedSpeedClient(AveragingClient):
    """Algorithm 1: g = (1 - alpha) g_1 + alpha grad F_i(w + rho g_1), w <- w - eta (g - p_i + (w - theta) / lambda);
    then p_i <- p_i - (w - theta) / lambda, and w - lambda p_i is sent."""

    rho: float = 0.1
    alpha: float = 1.0
    prox: float = 10.0
    normalise: bool = True

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (
            SAM(self.rho, self.alpha, self.normalise),
            Correction((("memory/prox_correction", -1.0),)),
            Proximal(1 / self.prox),
        )

    def remember(self, client: Client, message: Message, result: Result, update: Tensors, uploaded: Groups) -> Groups:
        own = client.memory.get("prox_correction")
        moved = {name: -value / self.prox for name, value in update.items()}
        return {"prox_correction": moved if own is None else {n: own[n] + value for n, value in moved.items()}}

    def sent(self, update: Tensors, memory: Groups) -> Tensors:
        return {name: value - self.prox * memory["prox_correction"][name] for name, value in update.items()}


class FedSpeed(FedAvg):
    """Federated averaging of the corrected models.

    Args:
        rho: Length of the extra step, at least 0. 0.1 in FL-Simulator.
        alpha: Share of the perturbed gradient, in [0, 1]. 1 in FL-Simulator.
        prox: lambda, the inverse of the proximal strength, above 0. 10 in FL-Simulator (its 0.1).
        normalise: Perturb by rho g / ||g||, as the code does; by rho g, as the paper's algorithm has it, where false.
        **kwargs: Arguments of `FedAvg`.
    """

    def __init__(
        self, rho: float = 0.1, alpha: float = 1.0, prox: float = 10.0, normalise: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        at_least_0(rho=rho)
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is {alpha}; it must be in [0, 1]")
        if not prox > 0:
            raise ValueError(f"prox is {prox}; it must be above 0")
        self.rho, self.alpha, self.prox, self.normalise = rho, alpha, prox, normalise

    def client(self) -> ClientProgram:
        return FedSpeedClient(self.buffer_policy, self.rho, self.alpha, self.prox, self.normalise)
