"""FedCM (Xu et al., 2021): the server's momentum enters every local step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.data.examples import DataInfo
from fl_lightning.message import Message
from fl_lightning.methods.averaging import AveragingClient, FedAvg
from fl_lightning.methods.base import Client, ClientProgram, Reduced, Result, Server
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.correction import ClientMomentum
from fl_lightning.tasks.base import FederatedTask


@dataclass(frozen=True)
class FedCMClient(AveragingClient):
    """w <- w - eta (alpha g + (1 - alpha) M) (Algorithm 2)."""

    alpha: float = 0.1

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (ClientMomentum(self.alpha),)

    def scalars(self, result: Result) -> dict[str, float]:
        return {"lr_sum": result.lr_sum}


class FedCM(FedAvg):
    """M <- -mean_i Delta_i / (K eta), zero at the start: the mean direction of the round before.

    K eta is the mean over the clients of their summed learning rates.

    Args:
        alpha: Weight of the client's own gradient, in (0, 1]; 1 is FedAvg. 0.1 in the paper.
        **kwargs: Arguments of `FedAvg`.
    """

    def __init__(self, alpha: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha is {alpha}; it must be in (0, 1]")
        self.alpha = alpha

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        super().setup(model, info, seed)
        self.gradient = self.zeros()

    def client(self) -> ClientProgram:
        return FedCMClient(self.buffer_policy, self.alpha)

    def broadcast(self, round: int) -> Message:
        return super().broadcast(round).plus({"momentum": self.gradient})

    def numbers(self, round: int) -> tuple[str, ...]:
        return ("lr_sum",)

    def server_update(self, round: int, total: Reduced, server: Server) -> Mapping[str, float]:
        self.gradient = {n: -value / total.scalars["lr_sum"] for n, value in total.groups["model"].items()}
        return super().server_update(round, total, server)

    def momentum(self) -> dict[str, Tensor] | None:
        return (
            {name: -value for name, value in self.gradient.items()}
            if any(map(torch.any, self.gradient.values()))
            else None
        )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "gradient": self.gradient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.gradient = dict(state["gradient"])
