"""One-shot ensembles against the mean of separately trained models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from federation.tiny import federation, same

from fl_lightning.methods import FedAvg, OneShotEnsemble


@pytest.mark.parametrize("combine", ["mean_logits", "mean", "product"])
def test_the_models_that_each_client_would_train_alone_answer_together(combine: str) -> None:
    loop = federation(OneShotEnsemble(combine))  # type: ignore[arg-type]
    loop.fit()
    whole = loop.data.test_sets()["global"]
    inputs = whole.fetch(torch.arange(len(whole)))
    scores = []
    for client in "012":
        from fl_lightning.federation.sampling import FixedCohort

        alone = federation(FedAvg(1), sampler=FixedCohort(clients=[client]))
        alone.fit()
        for name, value in alone.method.state().items():  # type: ignore[attr-defined]
            torch.testing.assert_close(value, loop.method.models[client][name], rtol=0, atol=1e-15)  # type: ignore[attr-defined]
        alone.model.load(alone.method.state())  # type: ignore[attr-defined]
        scores.append(alone.model.logits(inputs).detach())
    stacked = torch.stack(scores)
    expected = {
        "mean_logits": stacked.mean(0),
        "mean": stacked.softmax(2).mean(0),
        "product": stacked.log_softmax(2).clamp_min(torch.tensor(1e-12).log().item()).sum(0),
    }[combine]
    accuracy = float((expected.argmax(1) == whole.labels).double().mean())
    assert loop.history[-1]["global/acc"] == pytest.approx(accuracy)


def test_one_client_is_its_model() -> None:
    ensemble, alone = federation(OneShotEnsemble(), (12,)), federation(FedAvg(1), (12,))
    ensemble.fit()
    alone.fit()
    for name in ("global/acc", "global/loss", "global/macro_auroc"):
        assert ensemble.history[-1][name] == pytest.approx(alone.history[-1][name])


def test_resume(tmp_path: Path) -> None:
    loop = federation(OneShotEnsemble())
    loop.fit(tmp_path)
    again = federation(OneShotEnsemble())
    again.fit(tmp_path / "b", tmp_path / "checkpoints" / "round_00001")
    assert same(again.method.state_dict(), loop.method.state_dict())


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="combine is 'vote'; allowed: 'product', 'mean', 'mean_logits'"):
        OneShotEnsemble("vote")  # type: ignore[arg-type]
