"""FedGloSS (Caldarola et al., 2025): global sharpness-aware minimisation at the price of one model each way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fl_lightning.data.examples import DataInfo
from fl_lightning.message import Message, Tensors
from fl_lightning.methods.base import Client, ClientProgram, Reduced, at_least_0
from fl_lightning.methods.feddyn import FedDyn, FedDynClient
from fl_lightning.rules.base import LocalRule, over_norm, tree_add_scaled
from fl_lightning.rules.sharpness import SAM
from fl_lightning.tasks.base import FederatedTask


@dataclass(frozen=True)
class FedGloSSClient(FedDynClient):
    """w <- w - eta (grad F_i(w [+ local perturbation]) - sigma_i + (w - theta~) / beta), from theta~.

    FedDyn's client with alpha = 1 / beta.
    """

    local_rho: float = 0.15

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        local = (SAM(self.local_rho),) if self.local_rho > 0 else ()
        return (*local, *super().rules(client, message))


class FedGloSS(FedDyn):
    """The server perturbs along its last pseudo-gradient G = -mean Delta: theta~ = theta + rho G / ||G|| is broadcast.

    sigma <- sigma - sum_S Delta_i / (beta N); theta <- theta + mean_S Delta_i - beta sigma, Delta_i measured from theta~.

    Args:
        rho: Radius of the server's perturbation, at least 0. 0.15 for CIFAR-10 in the paper.
        local_rho: Radius of the clients' SAM, at least 0; 0 takes plain steps, with one backward pass. 0.15 for CIFAR-10.
        beta: Inverse strength of the dynamic regularisation, above 0. 10 for CIFAR-10.
        warmup_rounds: rho grows linearly from ``warmup_start`` over so many rounds, at least 0. 2,000 for CIFAR-10.
        warmup_start: Where it begins, at least 0.
        rounds: Number of rounds.
        buffers: What happens to buffers; see `AveragingClient`.
        lr_schedule: See `FedAvg`.
        lr_decay: See `FedAvg`.
    """

    def __init__(
        self,
        rho: float = 0.15,
        local_rho: float = 0.15,
        beta: float = 10.0,
        warmup_rounds: int = 0,
        warmup_start: float = 0.001,
        **kwargs: Any,
    ) -> None:
        if not beta > 0:
            raise ValueError(f"beta is {beta}; it must be above 0")
        super().__init__(alpha=1 / beta, **kwargs)
        at_least_0(rho=rho, local_rho=local_rho, warmup_rounds=warmup_rounds, warmup_start=warmup_start)
        self.rho, self.local_rho = rho, local_rho
        self.warmup_rounds, self.warmup_start = warmup_rounds, warmup_start

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        super().setup(model, info, seed)
        self.last: Tensors = self.zeros()

    def client(self) -> ClientProgram:
        return FedGloSSClient(self.buffer_policy, self.alpha, self.local_rho)

    def broadcast(self, round: int) -> Message:
        message = super().broadcast(round)
        perturbed = tree_add_scaled(message.tensors["model"], self.last, -over_norm(self.radius(round), self.last))
        return message.plus({"model": perturbed})

    def radius(self, round: int) -> float:
        """The server's rho in a round."""
        grown = min((round - 1) / self.warmup_rounds, 1.0) if self.warmup_rounds else 1.0
        return self.warmup_start + grown * (self.rho - self.warmup_start) if grown < 1 else self.rho

    def global_update(self, total: Reduced) -> Tensors:
        self.last = total.groups["model"]
        return super().global_update(total)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last": dict(self.last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.last = dict(state["last"])
