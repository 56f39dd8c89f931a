"""No federation at all: every client trains on its own. The lower end of every table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fl_lightning.data.examples import DataInfo
from fl_lightning.message import Group, Message
from fl_lightning.methods.base import (
    SERVER,
    Client,
    ClientProgram,
    Fit,
    Method,
    Predict,
    Reduced,
    Server,
    Steps,
    judge_personal,
)
from fl_lightning.tasks.base import FederatedTask


@dataclass(frozen=True)
class LocalOnlyClient(ClientProgram):
    """Train on from one's own model, kept in memory; send nothing."""

    def update(self, client: Client, message: Message) -> Steps:
        result = yield Fit("model", data=client.train, start=self._model(client, message))
        memory = {"model": {**result.params, **result.buffers}}
        return client.reply({}, memory=memory, metrics=result.metrics)

    def evaluate(self, client: Client, message: Message) -> Steps:
        return judge_personal(client, self._model(client, message))

    def _model(self, client: Client, message: Message) -> Mapping[str, Any]:
        return client.memory["model"] if "model" in client.memory else message.tensors["model"]


class LocalOnly(Method):
    """Clients train alone, from the same initial model, which is the only thing that is ever sent.

    Args:
        rounds: Number of rounds.
    """

    one_model = False

    def __init__(self, rounds: int = 10) -> None:
        super().__init__(rounds)

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        self.initial = model.state()
        self.reached: set[str] = set()

    def client(self) -> ClientProgram:
        return LocalOnlyClient()

    def broadcast(self, round: int) -> Message:
        return Message(round, SERVER, {"model": self.initial})

    def addressed(self, round: int, client: str) -> tuple[str, ...] | None:
        return () if client in self.reached else None

    def uplink(self, round: int) -> dict[str, Group]:
        return {}

    def server_update(self, round: int, total: Reduced, server: Server) -> Mapping[str, float]:
        self.reached.update(total.clients)
        return {}

    def evaluations(self) -> dict[str, Predict]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"initial": self.initial, "reached": sorted(self.reached)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.initial, self.reached = dict(state["initial"]), set(state["reached"])
