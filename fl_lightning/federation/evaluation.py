"""Scores of a federation's models on every test set, under names that carry their scope."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.examples import DataInfo, Examples, View
from fl_lightning.federation.engines.base import Engine
from fl_lightning.federation.participant import Participant
from fl_lightning.message import Message
from fl_lightning.methods.base import ClientProgram, Predict
from fl_lightning.metrics.evaluation import (
    client_scores,
    confusion,
    harmonic_mean,
    per_class_recall,
    personal_scores,
    restrict,
    scores,
)


class Positions:
    """Where the examples of a view stand in a set, or in another view of the same set."""

    def __init__(self, whole: Examples) -> None:
        order = torch.arange(len(whole))
        self.source, indices = (whole.source, whole.indices) if isinstance(whole, View) else (whole, order)
        self.place = torch.full((len(self.source),), -1)
        self.place[indices] = order

    def of(self, part: Examples) -> Tensor:
        """Indices into the set; what is not in it is left out."""
        if not (isinstance(part, View) and part.source is self.source):
            raise TypeError("a client's share of a set must be a view of the same source as the set")
        found = self.place[part.indices]
        return found[found >= 0]


def _limited(sets: dict[str, Examples], limit: int | None) -> dict[str, Examples]:
    """Every set with at most ``limit`` examples; a set under two names stays one set."""
    if limit is None:
        return sets
    fewer = {id(e): e.select(torch.linspace(0, len(e) - 1, min(limit, len(e))).long()) for e in sets.values()}
    return {name: fewer[id(examples)] for name, examples in sets.items()}


class Evaluator:
    """Scores models on the sets that the data module offers.

    Args:
        data: The data.
        info: Names and classes.
        participant: Runs forward passes.
        limit: Most examples of a set to score (a dry run), spread evenly over it; None for all.
    """

    def __init__(
        self, data: FederatedDataModule, info: DataInfo, participant: Participant, limit: int | None = None
    ) -> None:
        self.data, self.info, self.participant = data, info, participant
        self.everywhere = data.test_sets()["global"].labels
        self.tests, self.vals = (_limited(sets, limit) for sets in (data.test_sets(), data.val_sets()))
        self.clients = info.clients if data.info.clients else ()  # uploads may come from clients without data here
        self.positions = Positions(self.tests["global"])

    def logits(self, request: Predict, examples: Examples, round: int) -> Tensor:
        """Class scores (N, C) of a model on a set."""
        outputs = self.participant.execute(replace(request, data=examples), round, "evaluate").outputs
        assert outputs is not None
        return outputs.float()

    def classes(self, name: str) -> tuple[int, ...]:
        """The classes among which images of a set are classified: novel images among novel classes, others among base."""
        return self.info.novel_classes if name == "novel" else self.info.base_classes

    def model(self, request: Predict, round: int, *, validate: bool, test: bool = True) -> dict[str, float]:
        """Scores of one model: ``global/acc``, ``base/acc``, ``domain/<name>/acc``, ``client_worst/acc``, ..."""
        row: dict[str, float] = {}
        seen: dict[int, Tensor] = {}
        sets = {**(self.tests if test else {}), **({f"val_{n}": e for n, e in self.vals.items()} if validate else {})}
        for name, examples in sets.items():
            if len(examples) == 0:
                continue
            if id(examples) not in seen:
                seen[id(examples)] = self.logits(request, examples, round)
            classes = self.classes(name)
            logits, labels = restrict(seen[id(examples)], examples.labels, classes)
            values = scores(logits, labels, len(classes))
            # Everything for the global test set; for parts of it and for validation, what is selected and compared by.
            kept = values if name == "global" else {k: values[k] for k in ("acc", "balanced_acc", "loss")}
            row |= {f"{name}/{key}": value for key, value in kept.items()}
            if name == "global":
                recalls = per_class_recall(logits, labels, self._names(classes))
                row |= {f"global/{key}": value for key, value in recalls.items()}
                row |= self._shares(logits, labels)
        if "base/acc" in row and "novel/acc" in row:
            row["base_novel/hm"] = harmonic_mean(row["base/acc"], row["novel/acc"])
        return row

    def _names(self, classes: tuple[int, ...]) -> list[str]:
        return [self.info.class_names[c] for c in classes]

    def _share(self, client: str) -> Tensor:
        """Where a client's test examples stand in the test set that is scored."""
        return self.positions.of(self.data.test(client))

    def _shares(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        if not self.clients:
            return {}
        row = client_scores(logits, labels, map(self._share, self.clients))
        row |= self._local(logits, labels)
        if self.data.unseen:
            unseen = client_scores(logits, labels, map(self._share, self.data.unseen))
            row |= {name.replace("client_", "unseen_"): value for name, value in unseen.items()}
        return row

    def _local(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """``local_mean/acc``: each client's test images, classified among the classes that it trains on alone."""
        accuracies = []
        for key in self.clients:
            share, held = self._share(key), self.data.train(key).labels.unique().tolist()
            own, expected = restrict(logits[share], labels[share], held)
            if len(expected):
                accuracies.append(float((own.argmax(1) == expected).double().mean()))
        return {"local_mean/acc": sum(accuracies) / len(accuracies)} if accuracies else {}

    def personal(self, engine: Engine, program: ClientProgram, message: Message) -> dict[str, float]:
        """Scores of the clients' own models: ``personal_mean/acc`` on their own shares of the test set,
        ``val_personal_mean/acc`` on their validation examples, ``personal_mean/global_acc`` on the test set of all."""
        outputs = engine.evaluate(program, message, self.clients)
        if outputs is None:
            return {}
        classes = self.info.base_classes
        labels = {
            "own": lambda key: self.data.test(key).labels,
            "val": lambda key: self.data.val(key).labels,
            "global": lambda key: self.everywhere,
        }
        names = {"own": "personal_{}/acc", "val": "val_personal_{}/acc", "global": "personal_{}/global_acc"}
        row: dict[str, float] = {}
        for part, of in labels.items():
            pairs = [
                restrict(found[part], of(key), classes)
                for key, found in outputs.items()
                if part in found and len(of(key))
            ]
            for name, value in (personal_scores(pairs) if pairs else {}).items():
                kind = name.removeprefix("personal_").removesuffix("/acc")
                row[names[part].format(kind)] = value
        return row

    def confusion(self, request: Predict, round: int) -> tuple[Tensor, list[str]]:
        """Confusion matrix (C, C) on the global test set, rows true, and the class names."""
        examples, classes = self.tests["global"], self.info.base_classes
        logits, labels = restrict(self.logits(request, examples, round), examples.labels, classes)
        return confusion(logits, labels, len(classes)), self._names(classes)
