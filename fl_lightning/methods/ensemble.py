"""One-shot ensembles: clients train once, upload their models, and the models answer together.

What a server can do at the price of one upload without synthesising anything; the rival that every one-shot method has to
beat, and in single-class silos the negative control: a model that has seen one class knows nothing of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fl_lightning.aggregation import Keep
from fl_lightning.data.examples import DataInfo
from fl_lightning.message import Group, Message, Tensors
from fl_lightning.methods.base import SERVER, Client, ClientProgram, Fit, Method, Predict, Reduced, Server, Steps
from fl_lightning.tasks.base import FederatedTask
from fl_lightning.tasks.ensemble import EXPERT, Combine, EnsembleTask, check_combine


@dataclass(frozen=True)
class OneShotClient(ClientProgram):
    """Train from the common initial model; send the whole model.

    Attributes:
        counts: Send the number of training images of every class too.
    """

    counts: bool = False

    def update(self, client: Client, message: Message) -> Steps:
        result = yield Fit("model", client.train, message.tensors["model"])
        groups = {"model": {**result.params, **result.buffers}}
        if self.counts:
            held = torch.bincount(client.train.labels, minlength=int(message.scalars["num_classes"]))
            groups["counts"] = {"counts": held}
        return client.reply(groups, metrics=result.metrics)


class OneShotEnsemble(Method):
    """One round of local training; the uploaded models are kept and combined.

    Args:
        combine: "mean_logits": mean of the class scores; "mean": of the probabilities; "product": product of experts.
    """

    one_model = False

    def __init__(self, combine: Combine = "mean_logits") -> None:
        super().__init__(1)
        check_combine(combine)
        self.combine: Combine = combine

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        self.initial = model.state()
        self.models: dict[str, Tensors] = {}

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        return {"ensemble": EnsembleTask(model, self.combine)}

    def client(self) -> ClientProgram:
        return OneShotClient()

    def broadcast(self, round: int) -> Message:
        return Message(round, SERVER, {"model": self.initial})

    def uplink(self, round: int) -> dict[str, Group]:
        return {"model": Group("artifact", Keep(), like=self.initial)}

    def server_update(self, round: int, total: Reduced, server: Server) -> Mapping[str, float]:
        self.models = dict(total.groups["model"])
        return {}

    def evaluations(self) -> dict[str, Predict]:
        members = self.models or {"initial": self.initial}
        return {"": Predict("ensemble", None, given={EXPERT + name: model for name, model in members.items()})}

    def state_dict(self) -> dict[str, Any]:
        return {"initial": self.initial, "models": {name: dict(model) for name, model in self.models.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.initial, self.models = dict(state["initial"]), dict(state["models"])
