"""Evaluation numbers against scikit-learn and against counts made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import Tensor
from torchmetrics.functional.classification import multiclass_auroc

from fl_lightning.metrics.evaluation import (
    client_scores,
    confusion,
    harmonic_mean,
    per_class_recall,
    personal_scores,
    restrict,
    scores,
)
from fl_lightning.rng import torch_generator

torch.set_num_threads(1)


def problem(n: int = 300, classes: int = 7, present: int | None = None, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits that favour the label, and labels among the first ``present`` classes."""
    generator = torch_generator(0, n, classes)
    labels = torch.randint(present or classes, (n,), generator=generator)
    logits = torch.randn(n, classes, generator=generator)
    logits[torch.arange(n), labels] += 0.8
    return scale * logits, labels


def plain_ece(probabilities: np.ndarray, labels: np.ndarray) -> float:
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    bins = np.minimum((confidence * 15).astype(int), 14)
    inside = [bins == b for b in range(15)]
    return sum(abs(right[m].mean() - confidence[m].mean()) * m.mean() for m in inside if m.any())


@pytest.mark.parametrize("present", [7, 4])
@pytest.mark.parametrize("scale", [0.2, 2.0, 5.0])
def test_scores_agree_with_sklearn(present: int, scale: float) -> None:
    """With four of seven classes present, the averages are over the four."""
    logits, labels = problem(present=present, scale=scale)
    p, y, guess = logits.double().softmax(-1).numpy(), labels.numpy(), logits.argmax(-1).numpy()
    want = {
        "acc": sk.accuracy_score(y, guess),
        "balanced_acc": sk.recall_score(y, guess, labels=range(present), average="macro"),
        "macro_auroc": np.mean([sk.roc_auc_score(y == c, p[:, c]) for c in range(present)]),
        "loss": sk.log_loss(y, p, labels=range(7)),
    }
    got = scores(logits, labels, 7)
    assert got.pop("ece") == pytest.approx(plain_ece(p, y), abs=1e-6)
    assert got == pytest.approx(want, rel=1e-9)
    assert all(type(value) is float for value in got.values())


def test_auroc_counts_ties_by_half() -> None:
    logits = torch.tensor([[0.0, 0], [0, 0], [0, 1], [1, 0], [0, 0]])
    labels = torch.tensor([0, 1, 1, 0, 1])
    p = logits.double().softmax(-1)
    want = sk.roc_auc_score(labels, p[:, 1])
    assert 0.5 < want < 1
    assert scores(logits, labels, 2)["macro_auroc"] == pytest.approx(want)
    assert multiclass_auroc(p, labels, 2).item() == pytest.approx(want)


def test_confident_logits_keep_their_ranks() -> None:
    """In float32 these probabilities are all 1, and the area would be one half."""
    logits = torch.tensor([[30.0, 0], [31, 0], [32, 0], [33, 0]])
    assert (logits.softmax(-1)[:, 0] == 1).all()
    assert scores(logits, torch.tensor([1, 1, 0, 0]), 2)["macro_auroc"] == 1


def test_logits_in_the_unit_interval_are_still_logits() -> None:
    logits, labels = problem()
    logits = logits.sigmoid()
    p = logits.double().softmax(-1).numpy()
    assert scores(logits, labels, 7)["ece"] == pytest.approx(plain_ece(p, labels.numpy()), abs=1e-6)


def test_one_class_has_no_ranking_and_nothing_is_nan() -> None:
    logits, _ = problem()
    got = scores(logits, torch.full((300,), 2), 7)
    assert "macro_auroc" not in got
    assert all(map(math.isfinite, got.values()))
    assert got["balanced_acc"] == got["acc"]


def test_a_diverged_model_shows_in_the_loss() -> None:
    logits, labels = problem()
    logits[5] = math.nan
    got = scores(logits, labels, 7)
    assert math.isnan(got.pop("loss"))
    assert 0 <= got["acc"] <= 1


def test_restricted_scores_are_those_of_the_smaller_problem() -> None:
    """Base images among base names: rows and columns of other classes do not matter."""
    logits, labels = problem()
    classes = [5, 1, 2]
    keep = np.isin(labels.numpy(), classes)
    columns = logits.numpy()[keep][:, classes]
    guess = np.array(classes)[columns.argmax(1)]
    got = scores(logits, labels, 7, classes=classes)
    assert got["acc"] == pytest.approx(sk.accuracy_score(labels.numpy()[keep], guess))
    assert got["acc"] > scores(logits, labels, 7)["acc"]
    touched = logits.clone()
    touched[:, [0, 3, 4, 6]] += 100
    assert scores(touched, labels, 7, classes=classes) == got


def test_restrict_renumbers_by_position() -> None:
    logits = torch.arange(12.0).view(3, 4)
    columns, labels = restrict(logits, torch.tensor([3, 0, 1]), [3, 1])
    assert columns.tolist() == [[3, 1], [11, 9]]
    assert labels.tolist() == [0, 1]


def test_recall_leaves_absent_classes_out() -> None:
    logits, labels = problem(present=4)
    names = [f"class {c}" for c in range(7)]
    want = sk.recall_score(labels, logits.argmax(-1), labels=range(4), average=None)
    got = per_class_recall(logits, labels, names)
    assert got == pytest.approx({f"recall/class {c}": want[c] for c in range(4)})


def test_confusion_has_true_classes_in_rows() -> None:
    logits, labels = problem()
    want = sk.confusion_matrix(labels, logits.argmax(-1), labels=range(7))
    assert (want != want.T).any()
    assert confusion(logits, labels, 7).tolist() == want.tolist()


def test_clients_count_alike_in_the_mean_and_by_size_in_the_weighted_mean() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1])
    logits = torch.eye(2)[torch.tensor([0, 0, 0, 1, 0])]  # three of four right, then none of one
    shares = [torch.arange(4), torch.tensor([4]), torch.tensor([], dtype=torch.int64)]
    want = {"mean": 0.375, "weighted": 0.6, "worst": 0.0}
    got = client_scores(logits, labels, shares)
    assert got == pytest.approx({f"client_{name}/acc": value for name, value in want.items()})
    personal = personal_scores([(logits[share], labels[share]) for share in shares])
    assert personal == pytest.approx({f"personal_{name}/acc": value for name, value in want.items()})


@given(st.floats(0, 1), st.floats(0, 1))
def test_harmonic_mean_lies_between_minimum_and_mean(base: float, novel: float) -> None:
    got = harmonic_mean(base, novel)
    assert min(base, novel) - 1e-12 <= got <= (base + novel) / 2 + 1e-12
    assert got == harmonic_mean(novel, base)


def test_harmonic_mean_by_hand() -> None:
    assert harmonic_mean(0.6, 0.3) == pytest.approx(0.4)
    assert harmonic_mean(0, 0) == 0
    assert harmonic_mean(89.58, 83.01) == pytest.approx(86.17, abs=0.005)  # FedDTL, few-shot Non-IID


def test_misfits_are_refused() -> None:
    logits, labels = problem()
    with pytest.raises(ValueError, match=r"\(N, 6\)"):
        scores(logits, labels, 6)
    with pytest.raises(ValueError, match="shapes"):
        scores(logits, labels[:-1], 7)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 7\)"):
        confusion(logits, labels + 1, 7)
    with pytest.raises(ValueError, match="got 0"):
        scores(logits[:0], labels[:0], 7)
    for classes in ([], [1, 1], [7], [-1]):
        with pytest.raises(ValueError, match="distinct"):
            restrict(logits, labels, classes)
    with pytest.raises(ValueError, match="client"):
        client_scores(logits, labels, [torch.tensor([], dtype=torch.int64)])
    with pytest.raises(ValueError, match="base"):
        harmonic_mean(-0.1, 0.5)
