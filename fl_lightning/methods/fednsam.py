"""FedNSAM (Liu et al., 2025): global Nesterov momentum steers each client's sharpness-aware step.

Two forms, since the paper's summary and the released program differ. Written here with m downhill, like the clients'
displacements; "form A" and "form B" of ``docs/methods/fednsam.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fl_lightning.message import Message
from fl_lightning.methods.averaging import AveragingClient
from fl_lightning.methods.base import Client, ClientProgram, at_least_0
from fl_lightning.methods.fednesterov import FedNesterov
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.sharpness import SAM, NesterovPerturbation


@dataclass(frozen=True)
class FedNSAMClient(AveragingClient):
    """K local steps.

    paper: w <- w - eta grad F_i(w + lambda m - rho m / ||m||), from theta. One backward pass a step.
    local: w <- w - eta grad F_i(w + rho g / ||g||), from theta + lambda m, g the batch's own gradient. Two.
    """

    form: Literal["paper", "local"] = "paper"
    look_ahead: float = 0.85
    rho: float = 0.05

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (NesterovPerturbation(self.look_ahead, self.rho) if self.form == "paper" else SAM(self.rho),)


class FedNSAM(FedNesterov):
    """m <- lambda m + mean_i Delta_i; theta <- theta + m.

    Args:
        form: "paper": theta and m are broadcast, and every step's gradient is taken at w + (lambda - rho / ||m||) m.
            "local": theta + lambda m is broadcast, and every step is local SAM (what the released program runs).
        momentum: lambda, in [0, 1). 0.85 in the released program.
        rho: Radius of the perturbation, at least 0. 0.05 in the released client, 0.01 in its command lines.
        **kwargs: Arguments of `FedNesterov`.
    """

    def __init__(
        self, form: Literal["paper", "local"] = "paper", momentum: float = 0.85, rho: float = 0.05, **kwargs: Any
    ) -> None:
        super().__init__(momentum=momentum, **kwargs)
        if form not in ("paper", "local"):
            raise ValueError(f"form is {form!r}; allowed: 'paper', 'local'")
        at_least_0(rho=rho)
        if form == "paper" and momentum == 0 and rho > 0:
            raise ValueError(
                f"rho is {rho} and momentum 0; the perturbation is along the momentum, so rho must be 0 too"
            )
        self.form, self.rho = form, rho

    def client(self) -> ClientProgram:
        return FedNSAMClient(self.buffer_policy, self.form, self.look_ahead, self.rho)

    def broadcast(self, round: int) -> Message:
        if self.form == "local":
            return super().broadcast(round)
        return super(FedNesterov, self).broadcast(round).plus({"momentum": self.momentum() or self.zeros()})
