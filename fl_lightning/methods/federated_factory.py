"""FederatedFactory (Moleri et al., 2026): clients exchange generators once, a balanced world is drawn from them.

Server mode: factories go up, the server draws as many images of every class and trains the classifier on them alone. Peer
mode: every client receives the others' factories, draws the classes that it lacks, trains an expert on real and drawn
images, and the experts vote as a product. Forgetting a client, or a class, is deleting its factories and doing again what
came after: no draw of one key depends on another's, so the result is that of a federation in which it never took part. A
late client, or class, is the reverse: its factories are trained, the others' stay, and what comes after is done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from torch import Tensor

from fl_lightning.aggregation import Keep
from fl_lightning.data.augmentation import Augmentation
from fl_lightning.data.bank import Bank, Provenance, quotas
from fl_lightning.data.examples import Concatenated, DataInfo, Examples, TensorExamples
from fl_lightning.message import Group, Message, Tensors
from fl_lightning.methods.base import (
    SERVER,
    Client,
    ClientProgram,
    Method,
    Predict,
    Reduced,
    Server,
    Steps,
    Training,
    judge_personal,
)
from fl_lightning.synthesis.samplers import sample_seeds
from fl_lightning.tasks.base import FederatedTask, Picture
from fl_lightning.tasks.ensemble import EXPERT, EnsembleTask
from fl_lightning.tasks.generator import GeneratorTask

Mode = Literal["server", "peer"]
COLLECT, USE, SHIP = 1, 2, 3  # rounds: factories go up; they are used; in peer mode, experts go to everybody
ALL = -1  # the label of a factory of all classes of a client
NEVER = -1e4  # added to the score of a class that is masked; finite, so that losses stay so


@dataclass(frozen=True)
class FactoryClient(ClientProgram):
    """Round 1: train a factory for every class (or one for all). Round 2, of peers: draw what it lacks, train an expert."""

    generator: GeneratorTask
    training: Training
    pretraining: tuple[Callback, ...]
    classifier: Training
    samples_per_class: int
    min_examples: int

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        return {"model": model, "generator": self.generator}

    def update(self, client: Client, message: Message) -> Steps:
        kept = message.tensors["kept"]["classes"]  # that are asked for: none that was withdrawn
        real = client.train.of_classes(kept.tolist())
        if client.round == COLLECT:
            return self._collect(client, real)
        if client.round == USE:
            return self._expert(client, message, real)
        return self._receive(client, message)

    def _collect(self, client: Client, real: Examples) -> Steps:
        counts = torch.bincount(real.labels, minlength=1)
        labels = [label for label, count in enumerate(counts.tolist()) if count >= self.min_examples]
        parts = {label: real.of_classes([label]) for label in labels}
        if self.generator.conditional and labels:
            parts = {ALL: real.of_classes(labels)}
        factories: dict[str, Tensor] = {}
        pictures: list[Picture] = []
        loss = 0.0
        for label, part in parts.items():
            start = self.generator.fresh(client.seed, client.key, label, "factory")
            result = yield self.training.fit("generator", part, start, ("factory", label), self.pretraining)
            shipped = self.generator.shipped({**result.params, **result.buffers})
            factories |= {f"{label}/{name}": value for name, value in shipped.items()}
            loss += result.metrics["loss"] / len(parts)
            name = "factory" if label == ALL else f"factory_{label}"
            pictures += [replace(picture, name=f"{name}_{picture.name}") for picture in result.pictures]
        held = {"labels": torch.tensor(labels, dtype=torch.int64), "counts": counts[labels]}
        groups = {"factories": factories, "held": held}
        return client.reply(groups, metrics={"factory_loss": loss}, pictures=pictures)

    def _expert(self, client: Client, message: Message, real: Examples) -> Steps:
        """Section "decentralized mode": own classes are real, the others are drawn; each peer draws images of its own."""
        received: dict[int, dict[str, Tensors]] = {}
        for group, tensors in message.tensors.items():
            if group.startswith("factory/"):
                _, owner, label = group.split("/")
                received.setdefault(int(label), {})[owner] = tensors
        counts = {
            owner: dict(zip(held["labels"].tolist(), held["counts"].tolist(), strict=True))
            for owner, held in ((g.split("/")[1], t) for g, t in message.tensors.items() if g.startswith("held/"))
        }
        own = set(real.labels.tolist())
        parts: list[tuple[Provenance, Tensor]] = []
        for lacking, maker, count in wanted(received, counts, self.samples_per_class):
            if lacking in own:
                continue
            seeds = sample_seeds(client.seed, f"{maker} for {client.key}", lacking, range(count))
            factory = (received[lacking] if lacking in received else received[ALL])[maker]
            images = yield _draw(seeds, lacking, factory, ("draw", maker, lacking))
            assert images.outputs is not None
            parts.append((Provenance(maker, lacking, tuple(range(count))), images.outputs))
        bank = [Bank(parts, client.train.augmentation)] if parts else []
        together = Concatenated([real, *bank])
        together.augmentation = client.train.augmentation
        result = yield self.classifier.fit("model", together, message.tensors["model"], ("expert",))
        expert = {**result.params, **result.buffers}
        shares = torch.bincount(together.labels, minlength=int(message.scalars["num_classes"])).float()
        return client.reply(
            {"expert": expert, "shares": {"shares": shares / shares.sum()}},
            memory={"expert": expert},
            metrics=result.metrics,
        )

    @staticmethod
    def _receive(client: Client, message: Message) -> Steps:
        """Every peer votes with every expert; what is received is counted, and nothing is left to do."""
        yield from ()
        return client.reply({}, memory=client.memory)

    def evaluate(self, client: Client, message: Message) -> Steps | None:
        return judge_personal(client, client.memory["expert"]) if "expert" in client.memory else None


def wanted(
    factories: Mapping[int, Mapping[str, Any]], counts: Mapping[str, Mapping[int, int]], samples_per_class: int
) -> list[tuple[int, str, int]]:
    """(label, client, images) to draw: every class alike, divided by training images where several clients own it.

    Args:
        factories: {label: {client: anything}}, `ALL` for factories of all classes of a client.
        counts: {client: {label: training images}}.
        samples_per_class: Images of every class.
    """
    plan = []
    for label in sorted({label for held in counts.values() for label in held}):
        owners = {
            client: held[label]
            for client, held in counts.items()
            if label in held and (client in factories.get(label, {}) or client in factories.get(ALL, {}))
        }
        if owners:
            shares = quotas(owners, samples_per_class)
            plan += [(label, client, shares[client]) for client in sorted(owners) if shares[client]]
    return plan


def _draw(seeds: Tensor, label: int, factory: Tensors, key: tuple[object, ...]) -> Predict:
    labels = torch.full((len(seeds),), label)
    return Predict("generator", TensorExamples(seeds, labels), factory, output="sample", key=key)


class FederatedFactory(Method):
    """One round of generators, then a classifier on drawn images, or peers' experts.

    Rounds: 1 collects the factories, 2 uses them, and in peer mode 3 sends every expert to every other peer.

    Args:
        mode: "server" or "peer".
        generator: The factory: `DiffusionTask`, or `GaussianTask`, `CVAETask`. One that is conditional serves all classes
            of a client; otherwise a client trains one for each of its classes.
        training: Budget of a factory. The paper's: 25 million images.
        pretraining: Lightning callbacks of a factory's training, copied for each: `GeneratorPretraining` for a
            `DiffusionTask`.
        samples_per_class: Images to draw of every class. 10,000 in the paper's code.
        classifier: Budget of the classifier or of an expert. 300 epochs at batch 64 in the paper's code.
        augmentation: Random changes of drawn images in server mode. None in the paper's code; peers use those of the data.
        min_examples: A class of which a client has fewer gets no factory, at least 1.
        normalize: The geometric mean of the experts instead of their product.
        prior_correction: Divide each expert by the shares of the classes that it trained on. Not in the paper's code.
        without: Keys that take no part: a client's key ("3"), or "class:" and a class's name ("class:cat").
    """

    def __init__(
        self,
        mode: Mode = "server",
        generator: GeneratorTask | None = None,
        training: Training = Training(390_000, 64),
        pretraining: list[Callback] | None = None,
        samples_per_class: int = 10_000,
        classifier: Training = Training(42_000, 64, cosine=True),
        augmentation: list[Augmentation] | None = None,
        min_examples: int = 1,
        normalize: bool = False,
        prior_correction: bool = False,
        without: list[str] | None = None,
    ) -> None:
        if mode not in ("server", "peer"):
            raise ValueError(f"mode is {mode!r}; allowed: 'server', 'peer'")
        super().__init__(USE if mode == "server" else SHIP)
        for name, value in (("samples_per_class", samples_per_class), ("min_examples", min_examples)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if generator is None:
            from fl_lightning.tasks.diffusion import DiffusionTask

            generator = DiffusionTask()
        self.one_model = self.makes_images = mode == "server"
        self.mode, self.training = mode, training
        self.generator: GeneratorTask = generator
        self.pretraining = tuple(pretraining or ())
        self.samples_per_class, self.classifier, self.min_examples = samples_per_class, classifier, min_examples
        self.augmentation = tuple(augmentation or ())
        self.normalize, self.prior_correction = normalize, prior_correction
        self.without = list(without or [])

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        self.info, self.seed = info, seed
        self.generator.build(info, seed)
        self.initial = model.state()
        for key in self.without:
            self._check(key)
        self.factories: dict[str, dict[int, Tensors]] = {}  # client, label
        self.held: dict[str, dict[int, int]] = {}  # client, label, training images
        self.bank: Bank | None = None
        self.model: Tensors = self.initial
        self.experts: dict[str, Tensors] = {}
        self.shares: dict[str, Tensor] = {}
        self.masked: list[int] = []
        self.newcomer: str | None = None  # the key whose factories alone are still to be collected

    def _check(self, key: str) -> None:
        name = key.removeprefix("class:")
        allowed = self.info.class_names if key.startswith("class:") else self.info.clients
        if name not in allowed:
            kind = "class" if key.startswith("class:") else "client"
            raise ValueError(f"without names {kind} {name!r}; allowed: {', '.join(allowed)}")

    def _label(self, key: str | None) -> int | None:
        """Of a class's key; None for a client's."""
        if key is None or not key.startswith("class:"):
            return None
        return self.info.class_names.index(key.removeprefix("class:"))

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        return {"ensemble": EnsembleTask(model, normalize=self.normalize)}

    def client(self) -> ClientProgram:
        return FactoryClient(
            self.generator,
            self.training,
            self.pretraining,
            self.classifier,
            self.samples_per_class,
            self.min_examples,
        )

    # ---- who and what

    @property
    def kept(self) -> list[int]:
        """Classes that have not been withdrawn."""
        return [c for c in self.info.base_classes if f"class:{self.info.class_names[c]}" not in self.without]

    def cohort(self, round: int, sampled: tuple[str, ...]) -> tuple[str, ...]:
        if round == COLLECT:
            late = self.newcomer if self._label(self.newcomer) is None else None  # all have what a late class lacks
            return tuple(client for client in sampled if client not in self.without and late in (None, client))
        # Later rounds are of those who sent a factory, whomever the sampler draws.
        return () if self.mode == "server" else tuple(client for client in self.info.clients if self.held.get(client))

    def broadcast(self, round: int) -> Message:
        return Message(round, SERVER, self._groups(round), {"num_classes": float(self.info.num_classes)})

    def _groups(self, round: int) -> dict[str, Tensors]:
        late = self._label(self.newcomer)
        groups: dict[str, Tensors] = {"kept": {"classes": torch.tensor(self.kept if late is None else [late])}}
        if round == USE and self.mode == "peer":
            groups["model"] = self.initial
            for client in sorted(self.factories):
                labels = list(self.held[client])
                counts = [self.held[client][label] for label in labels]
                groups[f"held/{client}"] = {"labels": torch.tensor(labels), "counts": torch.tensor(counts)}
                groups |= {f"factory/{client}/{label}": f for label, f in self.factories[client].items()}
        if round == SHIP:
            groups |= {EXPERT + client: expert for client, expert in self.experts.items()}
        return groups

    def addressed(self, round: int, client: str) -> tuple[str, ...] | None:
        """Peers are sent nothing of their own, and no factory of a class that they hold."""
        if self.mode == "server" or round == COLLECT:
            return None
        own = set(self.held.get(client, {}))
        names = []
        for name in self._groups(round):
            kind, *rest = name.split("/")
            if kind == "factory" and (rest[0] == client or int(rest[1]) in own):
                continue
            if name != EXPERT + client:
                names.append(name)
        return tuple(names)

    def uplink(self, round: int) -> dict[str, Group]:
        if round == COLLECT:
            return {"factories": Group("artifact", reduce=Keep()), "held": Group("rows", reduce=Keep())}
        if round == USE and self.mode == "peer":
            return {"expert": Group("artifact", reduce=Keep()), "shares": Group("rows", reduce=Keep())}
        return {}

    # ---- the server

    def server_update(self, round: int, total: Reduced, server: Server) -> Mapping[str, float]:
        if round == COLLECT:
            return self._register(total)
        if self.mode == "server" and round == USE:
            return self._synthesise(server)
        if round == USE:
            self.experts = dict(total.groups.get("expert", {}))
            self.shares = {client: groups["shares"] for client, groups in total.groups.get("shares", {}).items()}
        return {}

    def _register(self, total: Reduced) -> Mapping[str, float]:
        late, kept = self.newcomer is not None, set(self.kept)
        factories, counts = (self.factories, self.held) if late else ({}, {})
        for client, tensors in total.groups.get("factories", {}).items():
            held = total.groups["held"][client]
            found = dict(zip(held["labels"].tolist(), held["counts"].tolist(), strict=True))
            own: dict[int, dict[str, Tensor]] = {}
            for name, value in sorted(tensors.items()):
                label, _, parameter = name.partition("/")
                own.setdefault(int(label), {})[parameter] = value
            # A client that is there trains nothing for a withdrawn class; an upload may be older than the withdrawal.
            if not kept.issuperset(found) and ALL in own:
                raise ValueError(
                    f"client {client}'s generator draws all of its classes, and one of them is withdrawn: {self.without}"
                )
            found, own = ({k: v for k, v in part.items() if k in {*kept, ALL}} for part in (found, own))
            counts[client] = {**counts.get(client, {}), **found}
            factories[client] = {**factories.get(client, {}), **own}
        # In an order of their own, so that it does not matter who came late.
        clients = [client for client in self.info.clients if client in factories]
        self.factories = {client: dict(sorted(factories[client].items())) for client in clients}
        self.held = {client: dict(sorted(counts[client].items())) for client in clients}
        self.newcomer = None
        if not any(self.factories.values()):
            raise ValueError("no client sent a factory; every class was withdrawn or is smaller than min_examples")
        return {"server/factories": float(sum(map(len, self.factories.values())))}

    def plan(self) -> list[tuple[int, str, int]]:
        """(label, client, images) to draw on the server."""
        by_label: dict[int, dict[str, Tensors]] = {}
        for client, own in self.factories.items():
            for label, factory in own.items():
                by_label.setdefault(label, {})[client] = factory
        return wanted(by_label, self.held, self.samples_per_class)

    def draw(self, server: Server, label: int, client: str, count: int) -> Tensor:
        """Images (count, C, H, W) in [0, 1] of a class by a client's factory: always the same."""
        own = self.factories[client]
        factory = own[label] if label in own else own[ALL]  # a KeyError where it was forgotten
        seeds = sample_seeds(server.seed, client, label, range(count))
        outputs = server.predict(_draw(seeds, label, factory, ("draw", client, label))).outputs
        assert outputs is not None
        return outputs

    def _synthesise(self, server: Server) -> Mapping[str, float]:
        """Section "central synthesis": a balanced set, then the classifier from its first weights on it alone."""
        parts = (
            (Provenance(client, label, tuple(range(count))), self.draw(server, label, client, count))
            for label, client, count in self.plan()
        )
        self.bank = Bank(parts, self.augmentation)
        result = server.fit(self.classifier.fit("model", self.bank, self.initial, ("classifier",)))
        self.model = {**result.params, **result.buffers}
        return {"server/bank": float(len(self.bank)), "server/classifier_loss": result.metrics["loss"]}

    # ---- forgetting and coming late

    def unlearn(self, key: str, approximate: bool = False) -> int:
        """Delete what a key left; see `Method.unlearn`.

        A client: its factories and its expert. A class: all its factories. With ``approximate`` a class is only never named
        again: its influence on the weights stays.
        """
        self._check(key)
        if key in self.without:
            raise ValueError(f"{key!r} has been forgotten already")
        if approximate:
            if not key.startswith("class:"):
                raise ValueError(f"only a class can be masked, and {key!r} is a client")
            self.masked.append(self.info.class_names.index(key.removeprefix("class:")))
            return self.rounds
        label = self._label(key)
        self._refuse_shared(label, "deleted from it")
        owners = [client for client in self.factories if client != key]
        factories = {c: {k: v for k, v in self.factories[c].items() if k != label} for c in owners}
        held = {c: {k: v for k, v in self.held[c].items() if k != label} for c in owners}
        if self.factories and not any(factories.values()):
            raise ValueError(f"without {key!r} no factory would be left to train on")
        back = COLLECT if self.factories else COLLECT - 1  # of a run that has collected none yet
        self.without, self.factories, self.held = [*self.without, key], factories, held
        self.newcomer = None if self.newcomer == key else self.newcomer
        self._drop_what_depends()
        return back

    def enrol(self, key: str) -> int:
        """Collect the factories that a key lacks; see `Method.enrol`.

        A client: it trains all of its factories. A class: every client trains the one of that class.
        """
        self._check(key)
        if key not in self.without:
            raise ValueError(f"{key!r} takes part already; left out are: {', '.join(self.without) or 'none'}")
        if self.newcomer is not None:
            raise ValueError(f"{self.newcomer!r} is not done with coming in; enrol it again, to finish that first")
        label = self._label(key)
        self._refuse_shared(label, "added to it")
        self.without = [other for other in self.without if other != key]
        self.masked = [other for other in self.masked if other != label]
        self.newcomer = key if self.factories else None  # where nobody has sent any, all are still to be collected
        self._drop_what_depends()
        return COLLECT - 1

    def _refuse_shared(self, label: int | None, what: str) -> None:
        if label is not None and any(ALL in own for own in self.factories.values()):
            raise ValueError(f"a conditional generator draws all classes of a client: one class cannot be {what}")

    def _drop_what_depends(self) -> None:
        """What was made of the factories."""
        self.bank, self.model, self.experts, self.shares = None, self.initial, {}, {}

    # ---- scoring and state

    def synthetic(self) -> Examples | None:
        return self.bank

    def evaluations(self) -> dict[str, Predict]:
        mask: dict[str, Tensors] = {}
        if self.masked:
            logits = torch.zeros(self.info.num_classes)
            logits[self.masked] = NEVER
            mask = {"mask": {"logits": logits}}
        if self.mode == "server":
            if not mask:
                return {"": Predict("model", None, self.model)}
            return {"": Predict("ensemble", None, given={EXPERT + "0": self.model, **mask})}
        if not self.experts:
            return {"": Predict("model", None, self.initial)}
        given: dict[str, Tensors] = {EXPERT + client: expert for client, expert in self.experts.items()} | mask
        if self.prior_correction:
            names = sorted(self.experts, key=lambda client: EXPERT + client)
            given["priors"] = {"shares": torch.stack([self.shares[client] for client in names])}
        return {"": Predict("ensemble", None, given=given)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "factories": {c: {str(k): dict(v) for k, v in own.items()} for c, own in self.factories.items()},
            "held": {c: {str(k): v for k, v in own.items()} for c, own in self.held.items()},
            "bank": self.bank.state_dict() if self.bank is not None else None,
            "model": dict(self.model),
            "experts": {client: dict(expert) for client, expert in self.experts.items()},
            "shares": dict(self.shares),
            "without": list(self.without),
            "masked": list(self.masked),
            "newcomer": self.newcomer,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.factories = {c: {int(k): v for k, v in own.items()} for c, own in state["factories"].items()}
        self.held = {c: {int(k): int(v) for k, v in own.items()} for c, own in state["held"].items()}
        self.bank = Bank.from_state(state["bank"], self.augmentation) if state["bank"] else None
        self.model, self.experts, self.shares = dict(state["model"]), dict(state["experts"]), dict(state["shares"])
        self.without, self.masked = list(state["without"]), list(state["masked"])
        self.newcomer = state.get("newcomer")
