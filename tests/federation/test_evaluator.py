"""Scores under names that carry their scope, from logits that are made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.examples import Examples
from fl_lightning.data.partition import ByDomain, Partitioner, Pathological
from fl_lightning.data.sources import Digits, FakeImages
from fl_lightning.federation.evaluation import Evaluator
from fl_lightning.methods.base import Predict

REQUEST = Predict("model", None)


class Scripted(Evaluator):
    """Right about some examples, sure of ``wrong`` about the others."""

    calls = 0

    def script(self, right: Any, wrong: int) -> Scripted:
        self.right, self.wrong = right, wrong
        return self

    def logits(self, request: Predict, examples: Examples, round: int) -> Tensor:
        self.calls += 1
        labels = torch.where(self.right(examples), examples.labels, torch.tensor(self.wrong))
        return 9.0 * torch.nn.functional.one_hot(labels, self.info.num_classes).float()


def evaluator(source: Any, partitioner: Partitioner, right: Any, wrong: int = 0, limit: Any = None, **data: Any) -> Any:
    module = FederatedDataModule(source, partitioner, **data)
    return Scripted(module, module.info, None, limit).script(right, wrong)  # type: ignore[arg-type]


def test_clients_are_scored_on_their_shares_and_unseen_ones_apart() -> None:
    """A client per pair of classes; the model knows classes 0 to 5 and takes the rest for a 0."""
    judge = evaluator(Digits(), Pathological(2), lambda e: e.labels < 6, num_clients=5, unseen_clients=["0", "4"])
    row = judge.model(REQUEST, 1, validate=False)
    held = {key: sorted(set(judge.data.train(key).labels.tolist())) for key in "01234"}
    accuracy = {key: sum(c < 6 for c in classes) / 2 for key, classes in held.items()}
    seen = [accuracy[key] for key in "123"]
    assert row["client_worst/acc"] == pytest.approx(min(seen), abs=0.05)
    assert row["client_mean/acc"] == pytest.approx(sum(seen) / 3, abs=0.05)
    assert row["unseen_mean/acc"] == pytest.approx((accuracy["0"] + accuracy["4"]) / 2, abs=0.05)
    assert row["global/acc"] == pytest.approx(0.6, abs=0.05)
    assert row["global/recall/five"] == 1.0
    assert row["global/recall/six"] == 0.0


def test_local_classes_are_judged_among_themselves() -> None:
    """Taking every image for class 0 is wrong among all classes, and right where a client holds one class only."""
    judge = evaluator(Digits(), Pathological(1), lambda e: torch.zeros(len(e), dtype=torch.bool), num_clients=10)
    row = judge.model(REQUEST, 1, validate=False)
    assert row["global/acc"] == pytest.approx(0.1, abs=0.02)
    assert row["local_mean/acc"] == 1.0


def test_base_and_novel_are_judged_among_their_own_and_once() -> None:
    """Novel images taken for class 0: among the novel classes alone all scores tie, and the first of them is chosen."""
    judge = evaluator(Digits(), Pathological(1), lambda e: e.labels < 5, num_clients=5, base_classes=5)
    row = judge.model(REQUEST, 1, validate=True)
    assert row["base/acc"] == row["global/acc"] == row["val_base/acc"] == 1.0
    assert row["novel/acc"] == pytest.approx(0.2, abs=0.02)
    assert row["base_novel/hm"] == pytest.approx(2 * row["novel/acc"] / (1 + row["novel/acc"]))
    assert judge.calls == 3  # global = base, novel, validation


def test_domains_are_named() -> None:
    source = FakeImages(num_classes=3, num_domains=2, image_size=4, channels=1)
    judge = evaluator(source, ByDomain(), lambda e: e.domains == 1, num_clients=2)
    row = judge.model(REQUEST, 1, validate=False)
    first, second = (row[f"domain/{name}/acc"] for name in judge.info.domain_names)
    assert first == pytest.approx(1 / 3)
    assert second == 1.0


def test_a_limit_takes_fewer_examples_of_every_set() -> None:
    judge = evaluator(Digits(), Pathological(1), lambda e: e.labels >= 0, limit=20, num_clients=5, base_classes=5)
    assert {len(e) for e in judge.tests.values()} == {20}
    assert judge.tests["global"] is judge.tests["base"]
    assert judge.model(REQUEST, 0, validate=True)["client_mean/acc"] == 1.0


def test_personal_models_are_scored_on_their_own_shares_validation_and_everything() -> None:
    """Every client's model takes each image for the client's own class."""
    judge = evaluator(Digits(), Pathological(1), None, num_clients=10)

    def outputs(labels: Tensor, own: int) -> Tensor:
        return torch.nn.functional.one_hot(torch.full((len(labels),), own), 10).float()

    class Engine:
        def evaluate(self, program: Any, message: Any, clients: Any) -> Any:
            replies = {}
            for key in clients:
                (own,) = set(judge.data.train(key).labels.tolist())
                parts = {"own": judge.data.test(key), "val": judge.data.val(key), "global": judge.tests["global"]}
                replies[key] = {part: outputs(examples.labels, own) for part, examples in parts.items()}
            return replies

    row = judge.personal(Engine(), None, None)
    assert row["personal_mean/acc"] == row["val_personal_worst/acc"] == 1.0
    assert row["personal_mean/global_acc"] == pytest.approx(0.1, abs=0.01)
