"""Federated averaging (McMahan et al., 2017) and, through a server optimizer, FedOpt (Reddi et al., 2021)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from fl_lightning.data.examples import DataInfo
from fl_lightning.message import Group, Groups, Message, Tensors
from fl_lightning.methods.base import (
    SERVER,
    Client,
    ClientProgram,
    Fit,
    Method,
    Predict,
    Reduced,
    Result,
    Server,
    Steps,
    client_drift,
    clone,
    difference,
    square_norm,
)
from fl_lightning.rules.base import LocalRule
from fl_lightning.tasks.base import FederatedTask

BufferPolicy = Literal["average", "local", "global"]
_LOADED = ("model", "buffers", "memory/buffers")  # the fit starts from them; rules get the start by itself


@dataclass(frozen=True)
class AveragingClient(ClientProgram):
    """Train from the global model and send the difference (McMahan et al., 2017, Algorithm 1, ClientUpdate).

    Attributes:
        buffers: What happens to buffers (BatchNorm statistics). "average": sent and averaged like parameters; "local":
            every client keeps its own in its memory; "global": clients start from the server's and theirs are dropped.
    """

    buffers: BufferPolicy = "average"

    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        """Gradient transformations of the local fit; the hook of this family."""
        return ()

    def update(self, client: Client, message: Message) -> Steps:
        given = {**message.tensors, **{f"memory/{group}": value for group, value in client.memory.items()}}
        result = yield Fit(
            "model",
            data=client.train,
            start={**message.tensors["model"], **message.tensors["buffers"], **client.memory.get("buffers", {})},
            given={group: value for group, value in given.items() if group not in _LOADED},
            rules=self.rules(client, message),
            overrides={"lr_scale": message.scalars["lr_scale"]},
        )
        update = difference(result.params, message.tensors["model"])
        uploaded = self.upload(client, message, result, update)
        memory = {**self.remember(client, message, result, update, uploaded)}
        groups = {"model": self.sent(update, memory), **uploaded}
        if self.buffers == "average":
            groups["buffers"] = difference(result.buffers, message.tensors["buffers"])
        elif self.buffers == "local":
            memory["buffers"] = result.buffers
        return client.reply(
            groups,
            scalars=self.scalars(result),
            memory=memory or None,
            metrics={**result.metrics, "update_square": square_norm(groups["model"])},
        )

    def upload(self, client: Client, message: Message, result: Result, update: Tensors) -> Groups:
        """Groups that the reply holds beside the update."""
        return {}

    def remember(self, client: Client, message: Message, result: Result, update: Tensors, uploaded: Groups) -> Groups:
        """The client's new memory, whole (buffers aside), given what it uploads; {} where a method needs none."""
        return {}

    def sent(self, update: Tensors, memory: Groups) -> Tensors:
        """What goes into the mean: how the model has changed. ``memory`` is the new one."""
        return update

    def scalars(self, result: Result) -> dict[str, float]:
        """Numbers that the reply holds."""
        return {}

    def evaluate(self, client: Client, message: Message) -> Steps | None:
        return self._personal(client, message) if self.buffers == "local" and client.memory else None

    def _personal(self, client: Client, message: Message) -> Steps:
        start = {**message.tensors["model"], **client.memory["buffers"]}
        own = yield Predict("model", client.test, start)
        held_out = yield Predict("model", client.val, start)
        return {"own": own.outputs, "val": held_out.outputs}


@dataclass(frozen=True)
class WeightAveraging:
    """Stochastic weight averaging on the server (Izmailov et al., 2018; as in Caldarola et al., 2022, section 5.2).

    In the last rounds the clients' learning rate falls linearly over every cycle, and the running mean of the models at the
    ends of the cycles is what is evaluated. Clients go on from the model, not from the mean.

    Attributes:
        start: Share of the rounds before the first cycle, in [0, 1).
        cycle: Rounds of a cycle, at least 1.
        end: Factor of the learning rate in the last round of a cycle, in (0, 1]. 0.01 in the paper: from 0.01 to 10^-4.
    """

    start: float = 0.75
    cycle: int = 10
    end: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.start < 1:
            raise ValueError(f"averaging.start is {self.start}; it must be in [0, 1)")
        if self.cycle < 1:
            raise ValueError(f"averaging.cycle is {self.cycle}; it must be at least 1")
        if not 0 < self.end <= 1:
            raise ValueError(f"averaging.end is {self.end}; it must be in (0, 1]")

    def before(self, rounds: int) -> int:
        """Rounds before the first cycle."""
        return math.floor(self.start * rounds)

    def position(self, round: int, rounds: int) -> int:
        """Which round of its cycle a round is, from 1 to ``cycle``; 0 before the first cycle."""
        after = round - self.before(rounds)
        return (after - 1) % self.cycle + 1 if after > 0 else 0

    def lr_scale(self, round: int, rounds: int) -> float:
        """Factor of the learning rate in a round."""
        fallen = self.position(round, rounds) / self.cycle
        return (1 - fallen) + fallen * self.end


class FedAvg(Method):
    """Weighted mean of client updates, then one step of a server optimizer.

    With the default optimizer (SGD, learning rate 1) this is FedAvg (McMahan et al., 2017, Algorithm 1); SGD with momentum
    is FedAvgM (Hsu et al., 2019), Adam is FedAdam (Reddi et al., 2021, Algorithm 2): the optimizer sees minus the mean
    update as its gradient.

    Args:
        rounds: Number of rounds.
        server_optimizer: Builds the server's optimizer from the global parameters.
        weighting: "examples" weighs a client by its number of training examples, "uniform" all alike.
        buffers: What happens to buffers; see `AveragingClient`.
        lr_schedule: The clients' learning rate over the rounds: "constant", or "cosine" from the optimizer's own in the
            first round down towards 0 after the last.
        lr_decay: Factor of the clients' learning rate from round to round, in (0, 1].
        averaging: Average the weights of the last rounds, and evaluate the mean; null for not.
    """

    def __init__(
        self,
        rounds: int = 10,
        server_optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=1.0),
        weighting: Literal["examples", "uniform"] = "examples",
        buffers: BufferPolicy = "average",
        lr_schedule: Literal["constant", "cosine"] = "constant",
        lr_decay: float = 1.0,
        averaging: WeightAveraging | None = None,
    ) -> None:
        super().__init__(rounds)
        if averaging is not None and (left := rounds - averaging.before(rounds)) < averaging.cycle:
            raise ValueError(
                f"averaging.cycle is {averaging.cycle}, and averaging.start {averaging.start} leaves {left} of {rounds} "
                "rounds; it must leave a cycle at least"
            )
        if weighting not in ("examples", "uniform"):
            raise ValueError(f"weighting is {weighting!r}; allowed: 'examples', 'uniform'")
        if buffers not in ("average", "local", "global"):
            raise ValueError(f"buffers is {buffers!r}; allowed: 'average', 'local', 'global'")
        if lr_schedule not in ("constant", "cosine"):
            raise ValueError(f"lr_schedule is {lr_schedule!r}; allowed: 'constant', 'cosine'")
        if not 0 < lr_decay <= 1:
            raise ValueError(f"lr_decay is {lr_decay}; it must be in (0, 1]")
        self.server_optimizer, self.weighting, self.buffer_policy = server_optimizer, weighting, buffers
        self.lr_schedule, self.lr_decay, self.averaging = lr_schedule, lr_decay, averaging

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        self.parameters = {name: nn.Parameter(p.detach().cpu().clone()) for name, p in model.trainable().items()}
        self.buffers = clone({name: buffer.cpu() for name, buffer in model.persistent_buffers().items()})
        self.optimizer = self.server_optimizer(list(self.parameters.values()))
        groups = [{name: group[name] for name in group if name != "params"} for group in self.optimizer.param_groups]
        self.configured: dict[str, Any] = {"class": type(self.optimizer).__name__, "groups": copy.deepcopy(groups)}
        self.averaged: dict[str, Tensor] = {}
        self.num_averaged = 0

    def client(self) -> ClientProgram:
        return AveragingClient(self.buffer_policy)

    def broadcast(self, round: int) -> Message:
        return Message(
            round, SERVER, {"model": self.parameters, "buffers": self.buffers}, {"lr_scale": self.lr_scale(round)}
        )

    def judged(self, round: int) -> Message:
        return FedAvg.broadcast(self, round)  # the global model itself, whatever clients start from

    def lr_scale(self, round: int) -> float:
        """Factor of the clients' learning rate in a round."""
        cosine = 0.5 * (1 + math.cos(math.pi * (round - 1) / self.rounds)) if self.lr_schedule == "cosine" else 1.0
        cyclical = self.averaging.lr_scale(round, self.rounds) if self.averaging else 1.0
        return cyclical * cosine * self.lr_decay ** (round - 1)

    def uplink(self, round: int) -> dict[str, Group]:
        groups = {"model": Group("update", like=self.parameters)}
        if self.buffer_policy == "average":
            groups["buffers"] = Group("update", like=self.buffers)
        return groups

    def weight(self, message: Message) -> float:
        return 1.0 if self.weighting == "uniform" else super().weight(message)

    def server_update(self, round: int, total: Reduced, server: Server) -> Mapping[str, float]:
        mean = total.groups["model"]
        drift = client_drift(total, mean, self.parameters)
        self.step(self.global_update(total))
        for name, change in total.groups.get("buffers", {}).items():
            value = self.buffers[name] + change
            # Privacy's noise may take a variance below 0, which every evaluation would turn into NaN. Cutting it off here is
            # done to what is released already, so that it costs no privacy. No mean of variances is below 0.
            self.buffers[name] = value.clamp(min=0) if name.endswith("running_var") else value
        if self.averaging and self.averaging.position(round, self.rounds) == self.averaging.cycle:
            self._average()
        return {"server/client_drift": drift, "server/update_norm": math.sqrt(square_norm(mean))}

    def global_update(self, total: Reduced) -> Tensors:
        """What the server's optimizer follows: the mean of the clients' updates."""
        return total.groups["model"]

    def step(self, update: Tensors) -> None:
        """One step of the server's optimizer; minus the update stands for the gradient (Reddi et al., 2021)."""
        for name, parameter in self.parameters.items():
            parameter.grad = -update[name]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _average(self) -> None:
        """Take the model into the running mean."""
        self.num_averaged += 1
        for name, value in self.state().items():
            mean = self.averaged.get(name, value)  # integers (BatchNorm's counter) stay those of the newest model
            self.averaged[name] = mean + (value - mean) / self.num_averaged if value.is_floating_point() else value

    def zeros(self) -> dict[str, Tensor]:
        """A zero for every global parameter."""
        return {name: torch.zeros_like(value.detach()) for name, value in self.parameters.items()}

    def momentum(self) -> dict[str, Tensor] | None:
        """SGD's momentum as a displacement: minus learning rate times buffer."""
        rate = self.optimizer.param_groups[0]["lr"]
        state = self.optimizer.state  # a defaultdict: asking must not add to it
        buffers = {name: state[p].get("momentum_buffer") if p in state else None for name, p in self.parameters.items()}
        return {n: -rate * b for n, b in buffers.items() if b is not None} if None not in buffers.values() else None

    def state(self) -> dict[str, Tensor]:
        """The global model, which clients start from."""
        return {**clone(self.parameters), **self.buffers}

    def evaluations(self) -> dict[str, Predict]:
        return {"": Predict("model", None, self.averaged or self.state())}

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": clone(self.parameters),
            "buffers": self.buffers,
            "optimizer": self.optimizer.state_dict(),
            "configured": self.configured,
            "averaged": dict(self.averaged),
            "num_averaged": self.num_averaged,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][name])
        self.buffers = dict(state["buffers"])
        was = state.get("configured", self.configured)
        if was["class"] == self.configured["class"]:  # another optimizer starts afresh
            self.optimizer.load_state_dict(state["optimizer"])
            # That brought the old hyper-parameters too. Those that the configuration has changed since are put back; the
            # others stay, since some optimizers keep counts among them.
            for group, old, new in zip(
                self.optimizer.param_groups, was["groups"], self.configured["groups"], strict=True
            ):
                group.update({name: value for name, value in new.items() if name not in old or old[name] != value})
        self.averaged, self.num_averaged = dict(state["averaged"]), int(state["num_averaged"])
