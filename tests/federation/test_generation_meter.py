"""The meter of synthetic images: tells copies from honest draws, and disturbs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federation.tiny import federation, numbers, same
from methods.test_federated_factory import SIZES, factory, linear

from fl_lightning.federation.generation import GenerationMeter, MemorisationMeter
from fl_lightning.federation.recorder import Recorder
from fl_lightning.methods import FedAvg
from fl_lightning.metrics import generation as measures

OPTIONS: dict[str, Any] = {"network": linear, "data_options": {"dtype": torch.float32}}


def test_measures_once_and_draws(tmp_path: Path) -> None:
    meter = GenerationMeter(per_class=5, feature_epochs=2, grid=3)
    loop = federation(factory(), SIZES, callbacks=[Recorder(tmp_path), meter], **OPTIONS)
    loop.fit(tmp_path)
    found = [{k for k in row if k.startswith("generation/")} for row in loop.history]
    assert found[0] == found[1] == set()
    assert {
        "generation/nn_ratio",
        "generation/copy_rate",
        "generation/KID(classifier)",
        "generation/FD(classifier)",
    } <= found[2]
    assert (tmp_path / "samples.png").stat().st_size > 3000
    plain = federation(factory(), SIZES, **OPTIONS)
    plain.fit()
    assert same(plain.method.state_dict(), loop.method.state_dict())
    shared = [{k: v for k, v in row.items() if not k.startswith("generation/")} for row in numbers(loop)]
    assert shared == numbers(plain)


def test_replayed_training_images_are_copies() -> None:
    loop = federation(
        factory(), SIZES, callbacks=[meter := GenerationMeter(per_class=9, feature_epochs=0, grid=0)], **OPTIONS
    )
    loop.fit()
    honest = loop.history[-1]
    assert honest["generation/nn_ratio"] > 0.2
    assert loop.method.bank is not None  # type: ignore[attr-defined]
    replay = loop.data.train("0")
    loop.method.synthetic = lambda: replay  # type: ignore[method-assign]
    row = meter.measure(loop)
    assert row["generation/copy_rate"] == 1
    assert row["generation/nn_ratio"] == 0


def test_who_has_been_withdrawn_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = GenerationMeter(per_class=5, feature_epochs=1, grid=0)
    loop = federation(factory(without=["1", "class:class 2"]), SIZES, callbacks=[meter], **OPTIONS)
    asked: list[str] = []
    looked_at: dict[str, Any] = {}
    train, execute, memorisation = loop.data.train, loop.participant.execute, measures.memorisation

    def remember(generated: Any, real: Any, held_out: Any, names: Any) -> Any:
        looked_at.update(real=real[1], held_out=held_out[1])
        return memorisation(generated, real, held_out, names)

    def watch(request: Any, *owner: object) -> Any:
        if "generation meter" in owner:
            looked_at.update(features=request.data.labels)
        return execute(request, *owner)

    monkeypatch.setattr(measures, "memorisation", remember)
    loop.participant.execute = watch  # type: ignore[method-assign]
    loop.fit()
    meter.seen = None
    loop.data.train = lambda client: asked.append(client) or train(client)  # type: ignore[func-returns-value]
    assert meter.measure(loop)
    assert set(asked) == {"0", "2"}
    expected = sorted(label for client in "02" for label in train(client).labels.tolist() if label != 2)
    assert sorted(looked_at["real"].tolist()) == sorted(looked_at["features"].tolist()) == expected
    assert set(looked_at["held_out"].tolist()) == {0, 1}


def test_methods_that_synthesise_nothing_have_no_columns() -> None:
    loop = federation(FedAvg(1), callbacks=[GenerationMeter()])
    loop.fit()
    assert not [k for k in loop.history[-1] if k.startswith("generation/")]


@pytest.mark.parametrize(("name", "least"), [("per_class", 2), ("feature_epochs", 0), ("grid", 0)])
def test_wrong_arguments(name: str, least: int) -> None:
    with pytest.raises(ValueError, match=f"GenerationMeter.{name} is {least - 1}; it must be at least {least}"):
        GenerationMeter(**{name: least - 1})


def test_every_run_looks_for_copies() -> None:
    """Without any meter asked for: against distances written here, over all synthetic and training images."""
    loop = federation(factory(), SIZES, **OPTIONS)
    loop.fit()
    columns = [{k for k in row if k.startswith("memorisation/")} for row in loop.history]
    assert columns == [set(), set(), {"memorisation/nn_ratio", "memorisation/copy_rate"}]
    made = loop.method.synthetic()
    assert made is not None
    real = [loop.data.train(client) for client in loop.info.clients]
    images = torch.cat([r.fetch(torch.arange(len(r))) for r in real]).flatten(1).double()
    labels = torch.cat([r.labels for r in real])
    drawn, of = made.fetch(torch.arange(len(made))).flatten(1).double(), made.labels
    ratios, copies = [], []
    for c in labels.unique():
        own, ours = images[labels == c], drawn[of == c]
        if len(own) < 2 or not len(ours):
            continue
        among = (own[:, None] - own).norm(dim=2) + torch.eye(len(own)) * 1e9
        to_train, yardstick = (ours[:, None] - own).norm(dim=2).amin(1), among.amin(1)
        ratios.append(float(to_train.quantile(0.5) / yardstick.quantile(0.5)))
        copies.append(float((to_train <= yardstick.quantile(0.01)).double().mean()))
    assert loop.history[2]["memorisation/nn_ratio"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-6)
    assert loop.history[2]["memorisation/copy_rate"] == pytest.approx(sum(copies) / len(copies), rel=1e-6)

    meter = next(c for c in loop.callbacks if isinstance(c, MemorisationMeter))
    replay = loop.data.train("0")
    loop.method.synthetic = lambda: replay  # type: ignore[method-assign]
    assert meter.measure(loop) == {"memorisation/nn_ratio": 0.0, "memorisation/copy_rate": 1.0}
    assert meter.measure(loop) == {}  # once


def test_a_run_that_synthesises_nothing_has_no_such_column() -> None:
    loop = federation(FedAvg(rounds=1), SIZES, **OPTIONS)
    loop.fit()
    assert not [k for row in loop.history for k in row if k.startswith("memorisation/")]
