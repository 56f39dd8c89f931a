"""FedSMOO (Sun et al., 2023): dynamic regularisation of the weights and of the sharpness-aware perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fl_lightning.data.examples import DataInfo
from fl_lightning.message import Group, Groups, Message, Tensors
from fl_lightning.methods.base import Client, ClientProgram, Reduced, Result, at_least_0
from fl_lightning.methods.feddyn import FedDyn, FedDynClient
from fl_lightning.rules.base import LocalRule, over_norm, tree_scale
from fl_lightning.rules.sharpness import DualSAM
from fl_lightning.tasks.base import FederatedTask


@dataclass(frozen=True)
class FedSMOOClient(FedDynClient):
    """FedDyn's steps at a perturbation that a dual variable mu_i ties to the server's s (Algorithm 1).

    epsilon = rho (g - mu_i - s) / ||.||; mu_i <- mu_i + epsilon - s;
    w <- w - eta (grad F_i(w + epsilon) - h_i + alpha (w - theta)).
    """

    rho: float = 0.1

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (DualSAM(self.rho, own="memory/perturbation_dual"), *super().rules(client, message))

    def upload(self, client: Client, message: Message, result: Result, update: Tensors) -> Groups:
        own, change = client.memory.get("perturbation_dual"), result.outcome["dual_change"]
        moved = change if own is None else {name: own[name] + value for name, value in change.items()}
        return {"perturbation": moved}

    def remember(self, client: Client, message: Message, result: Result, update: Tensors, uploaded: Groups) -> Groups:
        memory = super().remember(client, message, result, update, uploaded)
        return {**memory, "perturbation_dual": uploaded["perturbation"]}


class FedSMOO(FedDyn):
    """FedDyn whose server also keeps s = rho mean_S(mu_i) / ||mean_S(mu_i)||.

    Args:
        alpha: Strength of the regularisation, above 0. 0.1 in FL-Simulator.
        rho: Radius of the perturbation, at least 0. 0.1 in FL-Simulator.
        **kwargs: Arguments of `FedDyn`.
    """

    def __init__(self, alpha: float = 0.1, rho: float = 0.1, **kwargs: Any) -> None:
        super().__init__(alpha=alpha, **kwargs)
        at_least_0(rho=rho)
        self.rho = rho

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        super().setup(model, info, seed)
        self.perturbation: Tensors = self.zeros()

    def client(self) -> ClientProgram:
        return FedSMOOClient(self.buffer_policy, self.alpha, self.rho)

    def broadcast(self, round: int) -> Message:
        return super().broadcast(round).plus({"perturbation": self.perturbation})

    def uplink(self, round: int) -> dict[str, Group]:
        return {**super().uplink(round), "perturbation": Group("update", like=self.perturbation)}

    def global_update(self, total: Reduced) -> Tensors:
        mean = total.groups["perturbation"]
        self.perturbation = tree_scale(mean, over_norm(self.rho, mean))
        return super().global_update(total)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "perturbation": dict(self.perturbation)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.perturbation = dict(state["perturbation"])
