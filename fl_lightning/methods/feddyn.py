"""FedDyn (Acar et al., 2021): dynamic regularisation, so that the clients' optima agree with the global one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fl_lightning.data.examples import DataInfo
from fl_lightning.message import Groups, Message, Tensors
from fl_lightning.methods.averaging import AveragingClient, FedAvg
from fl_lightning.methods.base import Client, ClientProgram, Reduced, Result
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.correction import Correction
from fl_lightning.rules.proximal import Proximal
from fl_lightning.tasks.base import FederatedTask


@dataclass(frozen=True)
class FedDynClient(AveragingClient):
    """w <- w - eta (g - h_i + alpha (w - theta)); then h_i <- h_i - alpha (w - theta) (Algorithm 1)."""

    alpha: float = 0.1

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return Correction((("memory/dual", -1.0),)), Proximal(self.alpha)

    def remember(self, client: Client, message: Message, result: Result, update: Tensors, uploaded: Groups) -> Groups:
        own = client.memory.get("dual")
        moved = {name: -self.alpha * value for name, value in update.items()}
        return {"dual": moved if own is None else {name: own[name] + value for name, value in moved.items()}}


class FedDyn(FedAvg):
    """h <- h - (alpha / N) sum_S Delta_i; theta <- mean_S w_i - h / alpha.

    Does not become FedAvg as alpha vanishes: h / alpha does not depend on alpha. Clients weigh alike.

    Args:
        alpha: Strength of the regularisation, above 0. The paper tunes it over {0.1, 0.01, 0.001}.
        rounds: Number of rounds.
        buffers: What happens to buffers; see `AveragingClient`.
        lr_schedule: See `FedAvg`.
        lr_decay: See `FedAvg`.
    """

    def __init__(self, alpha: float = 0.1, **kwargs: Any) -> None:
        super().__init__(server_optimizer=lambda p: torch.optim.SGD(p, lr=1.0), weighting="uniform", **kwargs)
        if not alpha > 0:
            raise ValueError(f"alpha is {alpha}; it must be above 0")
        self.alpha = alpha

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        super().setup(model, info, seed)
        self.num_clients = len(info.clients)
        self.dual = self.zeros()

    def client(self) -> ClientProgram:
        return FedDynClient(self.buffer_policy, self.alpha)

    def global_update(self, total: Reduced) -> Tensors:
        mean = total.groups["model"]
        share = total.participants / self.num_clients
        self.dual = {name: self.dual[name] - self.alpha * share * value for name, value in mean.items()}
        return {name: value - self.dual[name] / self.alpha for name, value in mean.items()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "dual": self.dual}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.dual = dict(state["dual"])
