"""SCAFFOLD (Karimireddy et al., 2020): control variates correct the clients' drift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fl_lightning.aggregation import Sum
from fl_lightning.data.examples import DataInfo
from fl_lightning.message import Group, Groups, Message, Tensors
from fl_lightning.methods.averaging import AveragingClient, FedAvg
from fl_lightning.methods.base import Client, ClientProgram, Reduced, Result, Server
from fl_lightning.rules.base import LocalRule
from fl_lightning.rules.correction import Correction
from fl_lightning.tasks.base import FederatedTask


@dataclass(frozen=True)
class SCAFFOLDClient(AveragingClient):
    """w <- w - eta (g - c_i + c); then option II of Algorithm 1: c_i+ = c_i - c + (theta - w) / (K eta)."""

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (Correction((("control", 1.0), ("memory/control", -1.0))),)

    def upload(self, client: Client, message: Message, result: Result, update: Tensors) -> Groups:
        # c_i+ - c_i; K eta is the sum of the learning rates over the steps taken.
        shared = message.tensors["control"]
        return {"control": {name: -shared[name] - value / result.lr_sum for name, value in update.items()}}

    def remember(self, client: Client, message: Message, result: Result, update: Tensors, uploaded: Groups) -> Groups:
        change, own = uploaded["control"], client.memory.get("control")
        return {"control": change if own is None else {name: own[name] + value for name, value in change.items()}}


class SCAFFOLD(FedAvg):
    """Federated averaging with control variates, zero at the start.

    The correction assumes plain SGD as local optimizer: K eta is then how far a unit gradient moves the weights.

    Args:
        **kwargs: Arguments of `FedAvg`; the paper weighs clients alike (``weighting: uniform``).
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        super().setup(model, info, seed)
        self.num_clients = len(info.clients)
        self.control = self.zeros()

    def client(self) -> ClientProgram:
        return SCAFFOLDClient(self.buffer_policy)

    def broadcast(self, round: int) -> Message:
        return super().broadcast(round).plus({"control": self.control})

    def uplink(self, round: int) -> dict[str, Group]:
        return {**super().uplink(round), "control": Group("update", Sum(), like=self.control)}

    def server_update(self, round: int, total: Reduced, server: Server) -> Mapping[str, float]:
        # c <- c + (|S| / N) mean_S (c_i+ - c_i), so c = mean_N c_i
        for name, change in total.groups["control"].items():
            self.control[name] = self.control[name] + change / self.num_clients
        return super().server_update(round, total, server)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "control": self.control}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.control = dict(state["control"])
