"""FedDTL: decoupled training with local reinforcement fine-tuning (Ma, Cheng, Xu, ICML 2026, arXiv 2605.27900).

The image encoder's LoRA is trained on clients, the text encoder's on the server, from the clients' unit image embeddings.
Clients fine-tune by supervised learning for the first M rounds, then by GRPO with noise in the embedding space.
What no public text of the paper states is an option; the defaults are reasoned in ``docs/methods/feddtl.md``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.accounting import gaussian_epsilon, gaussian_noise, randomised_response
from fl_lightning.aggregation import Concatenate, Mean
from fl_lightning.callbacks.grpo_stage_switch import GRPOStageSwitch, Mix, OldPolicy
from fl_lightning.data.examples import DataInfo, TensorExamples
from fl_lightning.losses.grpo import GRPO
from fl_lightning.message import Group, Message, Tensors
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
    at_least_0,
    client_drift,
    clone,
    difference,
    passes,
    square_norm,
)
from fl_lightning.rng import derive_seed, torch_generator
from fl_lightning.tasks.base import FederatedTask
from fl_lightning.tasks.clip import ClipTask, Objective

SFT, RL = 0.0, 1.0  # the stage, as the message's scalar
SENSITIVITY = 2.0  # largest distance of two rows of norm 1 at most: of an image's row when another takes its place


@dataclass(frozen=True)
class FedDTLClient(ClientProgram):
    """A client's round: fine-tune the vision LoRA, then embed its images for the server.

    Attributes are the options of `FedDTL` of the same names.
    """

    decoupled: bool = True
    schedule: Literal["rounds", "within_round"] = "rounds"
    second_stage: Objective = "grpo"
    sft_epochs: int = 2
    rl_epochs: int = 3
    grpo: GRPO = field(default_factory=GRPO)
    old_policy: OldPolicy = "epoch"
    mix: Mix = "parameters"
    anchor_weight: float = 0.5
    sft_anchor: Literal["global", "client"] = "global"
    upload_limit: int | None = None
    embedding_noise: float = 0.0
    label_epsilon: float | None = None

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        assert isinstance(model, ClipTask)
        return {"policy": model.vision_half() if self.decoupled else model}

    def update(self, client: Client, message: Message) -> Steps:
        received = message.tensors
        reinforced = message.scalars["stage"] == RL
        within = self.schedule == "within_round"
        epochs = self.sft_epochs + self.rl_epochs if within else self.rl_epochs if reinforced else self.sft_epochs
        given = {"text": received["text"]} if self.decoupled else {}
        result = yield Fit(
            "policy",
            data=client.train,
            start=received["lora"],
            given=given,
            callbacks=(self.stage_switch(client, message),) if reinforced or within else (),
            overrides={"max_epochs": epochs},
        )
        update = difference(result.params, received["lora"])
        groups: dict[str, Tensors] = {"lora": update}
        if self.decoupled:
            # Embeddings come from the client's own fine-tuned encoder; class tokens only, L2-normalised (section 2).
            chosen = self.chosen(client)
            embedded = yield Predict(
                "policy", client.train.select(chosen), result.params, given, "unit_embeddings", ("embed",)
            )
            assert embedded.outputs is not None
            groups["embeddings"] = {
                "embedding": self.blurred(embedded.outputs, client),
                "label": self.answered(client, len(received["text"]["embeddings"]))[chosen],
            }
        keep = self.sft_anchor == "client" and not reinforced
        return client.reply(
            groups,
            memory={"anchor": result.params} if keep else None,
            metrics={**result.metrics, "update_square": square_norm(update)},
        )

    def stage_switch(self, client: Client, message: Message) -> GRPOStageSwitch:
        """The callback that turns a fit, or the rest of it, to the second stage."""
        received = message.tensors
        anchor = received.get("anchor", received["lora"])
        if self.sft_anchor == "client":
            anchor = client.memory.get("anchor", received["lora"])
        return GRPOStageSwitch(
            self.sft_epochs if self.schedule == "within_round" else 0,
            self.second_stage,
            self.grpo,
            anchor,
            received["lora"],
            received["anchor_text"]["embeddings"] if "anchor_text" in received else None,
            self.anchor_weight,
            self.mix,
            self.old_policy,
            derive_seed(client.seed, client.round, client.key, "grpo"),
        )

    def chosen(self, client: Client) -> Tensor:
        """Indices of the training examples whose embeddings are uploaded: all, or a random subset."""
        count = client.num_examples
        if self.upload_limit is None or count <= self.upload_limit:
            return torch.arange(count)
        draw = torch_generator(client.seed, client.round, client.key, "upload")
        return torch.randperm(count, generator=draw)[: self.upload_limit].sort().values

    def blurred(self, embeddings: Tensor, client: Client) -> Tensor:
        """Rows of norm 1 at most with Gaussian noise, brought back to unit length, which reads nothing but the noisy row.
        Drawn from the run's seed, which only a client at a site of its own could keep from the server."""
        if self.embedding_noise == 0:
            return embeddings
        draw = torch_generator(client.seed, client.round, client.key, "embedding_noise")
        clipped = embeddings / embeddings.norm(dim=-1, keepdim=True).clamp(min=1.0)
        return F.normalize(clipped + self.embedding_noise * torch.randn(embeddings.shape, generator=draw), dim=-1)

    def answered(self, client: Client, num_classes: int) -> Tensor:
        """The labels that are uploaded. The draw has no round, so an image's answer is the same every time, and all of its
        uploads tell of its label what one does."""
        labels = client.train.labels
        if self.label_epsilon is None:
            return labels
        draw = torch_generator(client.seed, client.key, "label")
        return randomised_response(labels, num_classes, self.label_epsilon, draw)


class ProductMean(Mean):
    """Weighted mean of the products B A instead of the factors, brought back to rank r by a singular value decomposition.

    Args:
        start: The factors that replies are differences from.
    """

    def __init__(self, start: Tensors) -> None:
        self.start = start

    def add(self, total: Any, tensors: Mapping[str, Tensor], weight: float, sender: str) -> Any:
        products = {}
        for name, b, a in _factor_pairs(self.start):
            products[name] = (self.start[b] + tensors[b]) @ (self.start[a] + tensors[a])
        return super().add(total, products, weight, sender)

    def copies(self, replies: int) -> float | None:
        return None  # a rule over the factors would not be one over the products

    def finish(self, total: Any) -> dict[str, Tensor]:
        update = {}
        for name, product in super().finish(total).items():
            b, a = _factor_names(name)
            rank = self.start[a].shape[0]
            u, s, v = torch.linalg.svd(product, full_matrices=False)
            # The scale stays with B, so that A never vanishes and a zero product can still be trained.
            update[b] = u[:, :rank] * s[:rank] - self.start[b]
            update[a] = v[:rank] - self.start[a]
        return update


def _factor_names(name: str) -> tuple[str, str]:
    return name.replace("lora_*", "lora_B"), name.replace("lora_*", "lora_A")


def _factor_pairs(factors: Tensors) -> list[tuple[str, str, str]]:
    names = [name.replace("lora_B", "lora_*") for name in factors if "lora_B" in name]
    return [(name, *_factor_names(name)) for name in names]


class FedDTL(Method):
    """Decoupled federated fine-tuning of CLIP in two stages; the model must be a `ClipTask`.

    Args:
        rounds: T. The paper: 20.
        sft_share: Share of the rounds that are supervised, in [0, 1]: the first M = ceil(sft_share * T). 1 is "decoupled
            only", 0 is "reinforcement only". M is not stated in the paper; half is ours.
        schedule: "rounds" switches by global round (the paper); "within_round" gives every round both stages, first
            ``sft_epochs``, then ``rl_epochs``.
        sft_epochs: Local epochs of a supervised round. The paper: 2.
        rl_epochs: Local epochs of a reinforcement round. The paper: 3.
        grpo: Options of the reinforcement loss.
        second_stage: "grpo" (the paper), or "sft_kl": cross-entropy with the same pull to the reference, a control.
        old_policy: When the policy of GRPO's ratios is frozen: at every "step" (the clip is then inert), local "epoch" or
            "round". Not stated in the paper; "epoch" lets the clip work.
        mix: What is mixed into the hybrid reference: "parameters", "probabilities", or the two "kl" terms. Not stated.
        anchor_weight: Weight of the supervised model in the reference, in [0, 1]. The paper: 0.5.
        sft_anchor: The supervised model of the reference: the "global" LoRA after round M, or each "client"'s own after its
            last supervised round. Not stated.
        anchor_text: Class embeddings of the reference: "current", or those of round M ("switch"). Not stated.
        aggregate: Mean of the LoRA "factors" (the paper's words suggest it), or of their "product".
        decoupled: Text LoRA on the server (the paper). False: clients hold both towers and both LoRAs are averaged, the
            paper's "two-stage only" row.
        upload_limit: Most embeddings a client uploads a round, at least 1; null uploads all. The paper: a subset on full
            data, its size not stated.
        embedding_noise: Standard deviation per coordinate of Gaussian noise on uploaded unit embeddings, at least 0.
        embedding_epsilon: Or what an upload of an image's row may cost, above 0; sets that noise. Not in the paper.
        embedding_delta: Delta of the row's guarantee, in (0, 1).
        label_epsilon: Epsilon of randomised response on the uploaded labels, above 0; null uploads them in clear. Like the
            noise it is drawn from the run's seed: who knows the seed can take it away.
        server_epochs: Passes over the embeddings when the server trains. Not stated.
        server_batch_size: Embeddings per step of it. The paper's batch: 64.
        server_lr: Learning rate of it; null takes the model's optimizer's own.
    """

    def __init__(
        self,
        rounds: int = 20,
        sft_share: float = 0.5,
        schedule: Literal["rounds", "within_round"] = "rounds",
        sft_epochs: int = 2,
        rl_epochs: int = 3,
        grpo: GRPO = GRPO(),  # noqa: B008  (frozen)
        second_stage: Literal["grpo", "sft_kl"] = "grpo",
        old_policy: OldPolicy = "epoch",
        mix: Mix = "parameters",
        anchor_weight: float = 0.5,
        sft_anchor: Literal["global", "client"] = "global",
        anchor_text: Literal["current", "switch"] = "current",
        aggregate: Literal["factors", "product"] = "factors",
        decoupled: bool = True,
        upload_limit: int | None = None,
        embedding_noise: float = 0.0,
        embedding_epsilon: float | None = None,
        embedding_delta: float = 1e-5,
        label_epsilon: float | None = None,
        server_epochs: int = 1,
        server_batch_size: int = 64,
        server_lr: float | None = None,
    ) -> None:
        super().__init__(rounds)
        for name, value in {"sft_share": sft_share, "anchor_weight": anchor_weight}.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it must be in [0, 1]")
        counts = {"sft_epochs": sft_epochs, "rl_epochs": rl_epochs, "server_epochs": server_epochs}
        counts |= {"server_batch_size": server_batch_size, "upload_limit": 1 if upload_limit is None else upload_limit}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}; it must be at least 1")
        for name, chosen, allowed in (
            ("schedule", schedule, ("rounds", "within_round")),
            ("second_stage", second_stage, ("grpo", "sft_kl")),
            ("old_policy", old_policy, get_args(OldPolicy)),
            ("mix", mix, get_args(Mix)),
            ("sft_anchor", sft_anchor, ("global", "client")),
            ("anchor_text", anchor_text, ("current", "switch")),
            ("aggregate", aggregate, ("factors", "product")),
        ):
            if chosen not in allowed:
                raise ValueError(f"{name} is {chosen!r}; allowed: {', '.join(map(repr, allowed))}")
        at_least_0(embedding_noise=embedding_noise)
        above_0 = {"embedding_epsilon": embedding_epsilon, "label_epsilon": label_epsilon, "server_lr": server_lr}
        for name, number in above_0.items():
            if number is not None and not number > 0:
                raise ValueError(f"{name} is {number}; it must be above 0")
        if not 0 < embedding_delta < 1:
            raise ValueError(f"embedding_delta is {embedding_delta}; it must be in (0, 1)")
        if embedding_noise and embedding_epsilon is not None:
            raise ValueError(
                f"give either embedding_noise or embedding_epsilon; got {embedding_noise} and {embedding_epsilon}"
            )
        if not decoupled and (embedding_noise or embedding_epsilon is not None or label_epsilon is not None):
            raise ValueError(
                "embedding_noise, embedding_epsilon and label_epsilon protect uploaded embeddings; with decoupled false "
                "there are none"
            )
        if embedding_epsilon is not None:
            embedding_noise = SENSITIVITY * gaussian_noise(embedding_epsilon, embedding_delta)
        self.embedding_delta, self.uploads, self._told = embedding_delta, dict[str, int](), False
        self.sft_share, self.aggregate, self.anchor_text_choice = sft_share, aggregate, anchor_text
        self.server_epochs, self.server_batch_size, self.server_lr = server_epochs, server_batch_size, server_lr
        self.program = FedDTLClient(
            decoupled,
            schedule,
            second_stage,
            sft_epochs,
            rl_epochs,
            grpo,
            old_policy,
            mix,
            anchor_weight,
            sft_anchor,
            upload_limit,
            embedding_noise,
            label_epsilon,
        )

    def client(self) -> ClientProgram:
        return self.program

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        assert isinstance(model, ClipTask)
        return {"text": model.text_half()} if self.program.decoupled else {}

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        if not isinstance(model, ClipTask):
            raise ValueError(f"FedDTL trains a ClipTask; the model is a {type(model).__name__}")
        self.num_base = len(info.base_classes)
        self.sft_rounds = math.ceil(self.sft_share * self.rounds)  # M
        decoupled = self.program.decoupled
        self.lora = clone((model.vision_half() if decoupled else model).trainable())  # dW_g
        self.anchor = dict(self.lora)  # dW_sft
        if decoupled:
            assert model.text is not None
            self.tokens = model.tokens
            self.text_lora = clone(model.text_half().trainable())  # dW_text
            # Round 1 uses the zero-shot embeddings, B = 0.
            with torch.no_grad():
                self.text = F.normalize(torch.cat([model.text(part) for part in self.tokens.split(256)]), dim=-1)
            self.anchor_text = self.text

    def stage(self, round: int) -> float:
        """Supervised for the first M rounds, reinforcement after."""
        return SFT if round <= self.sft_rounds or self.program.schedule == "within_round" else RL

    def broadcast(self, round: int) -> Message:
        groups: dict[str, Tensors] = {"lora": self.lora}
        reinforced = self.stage(round) == RL
        if self.program.decoupled:
            groups["text"] = {"embeddings": self.text[: self.num_base]}
            if reinforced and self.anchor_text_choice == "switch":
                groups["anchor_text"] = {"embeddings": self.anchor_text[: self.num_base]}
        if reinforced and self.program.sft_anchor == "global":
            groups["anchor"] = self.anchor
        return Message(round, SERVER, groups, {"stage": self.stage(round)})

    def uplink(self, round: int) -> dict[str, Group]:
        reducer = ProductMean(self.lora) if self.aggregate == "product" else Mean()
        groups = {"lora": Group("update", reducer, like=self.lora)}
        if self.program.decoupled:
            if self.program.label_epsilon is None and not self._told:
                print("FedDTL uploads labels in clear: label_epsilon is null", file=sys.stderr)
                self._told = True
            like = {"embedding": self.text[:0], "label": torch.zeros(0, dtype=torch.int64)}
            groups["embeddings"] = Group("rows", Concatenate(), like=like)
        return groups

    def server_update(self, round: int, total: Reduced, server: Server) -> Mapping[str, float]:
        update = total.groups["lora"]
        self.lora = {
            name: value + update[name] for name, value in self.lora.items()
        }  # section 5: dW_g = sum N_k/N dW_k
        numbers = {"server/client_drift": client_drift(total, update, self.lora), "server/stage": self.stage(round)}
        if self.program.decoupled:
            numbers |= self._train_text(total, server) | self._spent(total)
        if round <= self.sft_rounds:
            self.anchor = dict(self.lora)
            if self.program.decoupled:
                self.anchor_text = self.text
        return numbers

    def _train_text(self, total: Reduced, server: Server) -> dict[str, float]:
        """Section 2, L_srv: cross-entropy of the uploaded embeddings against the text tower's class embeddings."""
        rows = total.groups["embeddings"]
        overrides = {**passes(self.server_epochs), "batch_size": self.server_batch_size}
        if self.server_lr is not None:
            overrides["lr"] = self.server_lr
        result = server.fit(
            Fit(
                "text",
                TensorExamples(rows["embedding"], rows["label"]),
                self.text_lora,
                overrides=overrides,
                key=("text",),
            )
        )
        self.text_lora = result.params
        # Novel classes too: they are never sent, only evaluated.
        prompts = TensorExamples(self.tokens, torch.zeros(len(self.tokens)))
        embedded = server.predict(Predict("text", prompts, self.text_lora, output="embed", key=("embed",)))
        assert embedded.outputs is not None
        self.text = embedded.outputs
        return {"server/text_loss": result.metrics["loss"], "server/embeddings": float(len(rows["label"]))}

    def _spent(self, total: Reduced) -> dict[str, float]:
        """What an image's row has cost: in this upload, and in all uploads of the client that has made most. An image may be
        in every one of them."""
        for client in total.clients:
            self.uploads[client] = self.uploads.get(client, 0) + 1
        spent = {}
        if self.program.embedding_noise and self.uploads:
            z, most = self.program.embedding_noise / SENSITIVITY, max(self.uploads.values())
            spent = {
                "privacy/embedding_epsilon": gaussian_epsilon(z, self.embedding_delta),
                "privacy/embedding_epsilon_total": gaussian_epsilon(z / math.sqrt(most), self.embedding_delta),
                "privacy/embedding_delta": self.embedding_delta,
            }
        if self.program.label_epsilon is not None:
            spent["privacy/label_epsilon"] = self.program.label_epsilon
        return spent

    def evaluations(self) -> dict[str, Predict]:
        given = {"text": {"embeddings": self.text}} if self.program.decoupled else {}
        return {"": Predict("policy", None, self.lora, given)}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"lora": self.lora, "anchor": self.anchor}
        if self.program.decoupled:
            state |= {"text_lora": self.text_lora, "text": self.text, "anchor_text": self.anchor_text}
            state["uploads"] = dict(self.uploads)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lora, self.anchor = dict(state["lora"]), dict(state["anchor"])
        if self.program.decoupled:
            self.text_lora = dict(state["text_lora"])
            self.text, self.anchor_text = state["text"], state["anchor_text"]
            self.uploads = {client: int(count) for client, count in state["uploads"].items()}
