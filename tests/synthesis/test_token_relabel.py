"""Token relabel on scores, and as the criterion of a task: section 8, items 12 to 15, of FedMITR's specification."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.callbacks.token_relabel import TokenRelabel
from fl_lightning.metrics.experts import mean_of_experts
from fl_lightning.rng import torch_generator
from fl_lightning.synthesis.token_relabel import labelled, relabelled, token_labelling, two_views
from fl_lightning.tasks.base import Batch

B, N, C, K = 3, 5, 4, 2
LABELS = torch.tensor([0, 3, 1])
KEEP = torch.tensor([[0, 3], [4, 1], [2, 0]])
LOW = torch.tensor([[1, 2, 4], [0, 2, 3], [1, 3, 4]])


def scores(name: str, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch_generator(0, name))


def kl(teacher: Tensor, student: Tensor, t: float) -> Tensor:
    """T^2 sum_c p_c (log p_c - log q_c) for every row, written plainly."""
    p, q = (teacher / t).softmax(-1), (student / t).softmax(-1)
    return t**2 * (p * (p.log() - q.log())).sum(-1)


def ce(student: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([-row.log_softmax(0)[y] for row, y in zip(student, labels, strict=True)])


def test_the_logit_gradients_of_the_two_terms() -> None:
    """d CE = p - e_y and d KL_T = T (p_T - q_T), each divided by the batch."""
    v, z = scores("v", B, C).requires_grad_(), scores("z", B, C)
    (gradient,) = torch.autograd.grad(labelled(v, LABELS), v)
    torch.testing.assert_close(gradient, (v.softmax(1) - F.one_hot(LABELS, C)) / B)
    (gradient,) = torch.autograd.grad(relabelled(v, z, 3.0), v)
    torch.testing.assert_close(gradient, 3.0 * ((v / 3).softmax(1) - (z / 3).softmax(1)) / B)


def test_a_soft_label_takes_away_exactly_the_variance_of_the_hard_ones() -> None:
    """E || (p - e_y) - (p - q) ||^2 = 1 - ||q||^2 for y drawn from q: section 5, claim (iii), by Monte Carlo at T = 1."""
    v, z = scores("v", 1, C).requires_grad_(), scores("z", 1, C)
    q = z[0].softmax(0)
    (soft,) = torch.autograd.grad(relabelled(v, z, 1.0), v)
    hard = torch.cat([torch.autograd.grad(labelled(v, torch.tensor([y])), v)[0] for y in range(C)])
    drawn = torch.multinomial(q, 200_000, replacement=True, generator=torch_generator(0, "labels"))
    torch.testing.assert_close(hard[drawn].mean(0), soft[0], atol=3e-3, rtol=0)
    spread = (hard[drawn] - soft).square().sum(1).mean()
    torch.testing.assert_close(spread, 1 - q.square().sum(), atol=3e-3, rtol=0)
    torch.testing.assert_close((q[:, None] * (hard - soft).square()).sum(), 1 - q.square().sum())


@pytest.mark.parametrize("view", ["ce", "kd", "mix"])
def test_two_views_and_token_labelling_by_hand(view: Any) -> None:
    high, low, soft_high, soft_low = (scores(n, B, C) for n in ("high", "low", "soft_high", "soft_low"))
    believed = {
        "ce": ce(high, LABELS),
        "kd": kl(soft_high, high, 2.0),
        "mix": (ce(high, LABELS) + kl(soft_high, high, 2.0)) / 2,
    }
    loss = two_views(LABELS, high, low, soft_high, soft_low, 0.7, view, 2.0)
    torch.testing.assert_close(loss, (believed[view] + 0.7 * kl(soft_low, low, 2.0)).mean())
    tokens, q = scores("tokens", B, N, C), scores("q", B, N, C)
    expected = believed[view].sum()
    for b in range(B):
        for i in KEEP[b]:
            hard, soft = ce(tokens[b, i][None], LABELS[b : b + 1])[0], kl(q[b, i], tokens[b, i], 2.0)
            expected = expected + 0.3 / 2 * {"ce": hard, "kd": soft, "mix": (hard + soft) / 2}[view]
        for i in LOW[b]:
            expected = expected + 0.3 * 0.7 / 3 * kl(q[b, i], tokens[b, i], 2.0)
    rows = [torch.stack([t[b, at[b]] for b in range(B)]) for t in (tokens, q) for at in (KEEP, LOW)]
    loss = token_labelling(LABELS, high, rows[0], rows[1], soft_high, rows[2], rows[3], 0.7, 0.3, view, 2.0)
    torch.testing.assert_close(loss, expected / B)


class PatchModel:
    """Scores that are the mean of a linear map of the patches seen: what a patch holds matters where it is seen, only."""

    def __init__(self, name: str) -> None:
        self.weight = scores(name, 6, C).requires_grad_()

    def tokens(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        seen = images if keep is None else images.gather(1, keep[:, :, None].expand(-1, -1, 6))
        return torch.tanh(seen) @ self.weight

    def logits(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        return self.tokens(images, keep).mean(1).sin()


TEACHERS = [PatchModel(f"teacher {k}") for k in range(K)]
IMAGES = scores("images", B, N, 6)


def batch(relabel: TokenRelabel, images: Tensor = IMAGES, sparse: bool = True, teachers: Any = TEACHERS) -> Batch:
    columns = {"keep": KEEP, "low": LOW} if sparse else {}
    extras = dict(columns)
    for column, (output, patches) in relabel.targets(sparse).items():
        options = {} if patches is None else {"keep": columns[patches]}
        extras[column] = torch.stack([getattr(t, output)(images, **options) for t in teachers]).mean(0)
    return Batch(images, LABELS, extras=extras)


def loss(relabel: TokenRelabel, student: PatchModel, **options: Any) -> Tensor:
    return relabel.criterion(student, batch(relabel, **options))  # type: ignore[arg-type]


def gradient(value: Tensor, model: PatchModel) -> Tensor:
    return torch.autograd.grad(value, model.weight, retain_graph=True)[0]


@pytest.mark.parametrize("view", ["ce", "kd", "mix"])
@pytest.mark.parametrize("reading", ["r1", "r2", "r3"])
def test_each_reading_sees_the_patches_that_it_says(reading: Any, view: Any) -> None:
    relabel = TokenRelabel(reading, view, lam=0.6, beta=0.4, temperature=2.0)
    student = PatchModel("student")
    z = lambda keep=None, output="logits": torch.stack([getattr(t, output)(IMAGES, keep) for t in TEACHERS]).mean(0)  # noqa: E731

    def believed(own: Tensor, soft: Tensor) -> Tensor:
        hard = ce(own.flatten(0, -2), LABELS.repeat_interleave(own[0].numel() // C)).mean()
        return {"ce": hard, "kd": kl(soft, own, 2.0).mean(), "mix": (hard + kl(soft, own, 2.0).mean()) / 2}[view]

    if reading == "r1":
        low = kl(z(LOW), student.logits(IMAGES, LOW), 2.0).mean()
        expected = believed(student.logits(IMAGES, KEEP), z(KEEP)) + 0.6 * low
    elif reading == "r3":
        low = kl(z(), student.logits(IMAGES), 2.0).mean()
        expected = believed(student.logits(IMAGES, KEEP), z(KEEP)) + 0.6 * low
    else:
        patches = believed(student.tokens(IMAGES, KEEP), z(KEEP, "tokens"))
        low = kl(z(LOW, "tokens"), student.tokens(IMAGES, LOW), 2.0).mean()
        expected = believed(student.logits(IMAGES), z()) + 0.4 * (patches + 0.6 * low)
    torch.testing.assert_close(loss(relabel, student), expected)


def test_without_relabelling_only_h_is_learnt_from() -> None:
    student = PatchModel("student")
    plain = F.cross_entropy(student.logits(IMAGES, KEEP), LABELS)
    for reading in ("r1", "r3"):
        relabel = TokenRelabel(reading, lam=0)  # type: ignore[arg-type]
        assert relabel.targets() == {}
        assert loss(relabel, student).item() == plain.item()
    assert loss(TokenRelabel("r2", beta=0), student).item() == F.cross_entropy(student.logits(IMAGES), LABELS).item()


def test_where_nothing_was_dropped_r1_is_cross_entropy_of_the_image() -> None:
    student = PatchModel("student")
    whole = F.cross_entropy(student.logits(IMAGES), LABELS)
    assert TokenRelabel().targets(sparse=False) == {}
    assert loss(TokenRelabel(), student, sparse=False).item() == whole.item()
    patches = ce(student.tokens(IMAGES).flatten(0, 1), LABELS.repeat_interleave(N)).mean()
    torch.testing.assert_close(loss(TokenRelabel("r2"), student, sparse=False), whole + 0.5 * patches)
    r3 = whole + kl(batch(TokenRelabel("r3"), sparse=False).extras["soft"], student.logits(IMAGES), 4.0).mean()
    torch.testing.assert_close(loss(TokenRelabel("r3"), student, sparse=False), r3)


def test_where_everything_was_dropped_only_the_ensemble_is_learnt_from() -> None:
    low, soft = scores("low", B, C), scores("soft", B, C)
    torch.testing.assert_close(two_views(LABELS, None, low, None, soft, 0.5), 0.5 * kl(soft, low, 4.0).mean())


@pytest.mark.parametrize("reading", ["r1", "r2", "r3"])
def test_nothing_is_relabelled_for_the_ensembles_only_member(reading: Any) -> None:
    """A student that is its own teacher: the KL is 0, and so is its gradient."""
    student = PatchModel("student")
    relabel, without = TokenRelabel(reading), TokenRelabel(reading, lam=0)
    own = loss(relabel, student, teachers=[student, student]) - loss(without, student)
    assert own.item() == pytest.approx(0, abs=1e-12)
    assert gradient(own, student).abs().max() < 1e-12


def test_r1_decouples_the_patches() -> None:
    """Pixels of L do not move the CE term, pixels of H do not move the KL term; each moves the other one."""
    student, relabel = PatchModel("student"), TokenRelabel()

    def terms(images: Tensor) -> tuple[Tensor, Tensor]:
        hard = loss(TokenRelabel(lam=0), student, images=images)
        return hard, loss(relabel, student, images=images) - hard

    def changed(patches: Tensor) -> Tensor:
        return IMAGES.scatter_add(1, patches[:, :, None].expand(-1, -1, 6), torch.ones(B, patches.shape[1], 6).double())

    hard, soft = terms(IMAGES)
    hard_low, soft_low = terms(changed(LOW))
    hard_high, soft_high = terms(changed(KEEP))
    assert hard_low == hard
    assert soft_low != soft
    assert hard_high != hard
    torch.testing.assert_close(soft_high, soft, atol=1e-12, rtol=0)


def test_teachers_are_not_trained_and_their_order_does_not_matter() -> None:
    student, relabel = PatchModel("student"), TokenRelabel("r3", "mix")
    loss(relabel, student).backward()
    assert student.weight.grad is not None
    assert all(teacher.weight.grad is None for teacher in TEACHERS)
    torch.testing.assert_close(loss(relabel, student, teachers=TEACHERS[::-1]), loss(relabel, student))
    alone = mean_of_experts(TEACHERS[0].logits(IMAGES)[None])
    torch.testing.assert_close(alone.softmax(1), TEACHERS[0].logits(IMAGES).softmax(1))


def test_the_callback_sets_the_criterion_of_a_fit() -> None:
    relabel, module = TokenRelabel(), SimpleNamespace(criterion=None)
    relabel.on_fit_start(None, module)
    assert module.criterion == relabel.criterion


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"reading": "r4"}, "reading is 'r4'; allowed: 'r1', 'r2', 'r3'"),
        ({"hard_view": "soft"}, "hard_view is 'soft'; allowed: 'ce', 'kd', 'mix'"),
        ({"lam": -1}, "lam is -1; it must be at least 0"),
        ({"beta": -0.5}, "beta is -0.5; it must be at least 0"),
        ({"temperature": 0}, "temperature is 0; it must be above 0"),
    ],
)
def test_wrong_arguments(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenRelabel(**argument)


def test_soft_labels_that_are_missing_are_missed() -> None:
    with pytest.raises(ValueError, match="scores are missing"):
        labelled(scores("v", B, C), LABELS, None, "mix")
