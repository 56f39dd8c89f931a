"""Co-Boosting: two epochs against a plain loop, the weights' bounds, and DENSE as what is left without its parts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation.tiny import linear, normalised, same, sgd
from methods.plain_images import Student, batches, by_class, first_weights, paint, scores
from methods.test_generator_distillation import METHODS, SMALL, small, watched
from torch import Tensor

from fl_lightning.methods import CoBoosting
from fl_lightning.methods.base import Training
from fl_lightning.methods.co_boosting import ClippedSignDescent, DiverseSamples
from fl_lightning.metrics.experts import mean_of_experts
from fl_lightning.rng import derive_seed, torch_generator
from fl_lightning.tasks.ensemble import EnsembleTask, combined

HS, MU, EPSILON, T, RATE = 2.0, 0.05, 0.1, 4.0, 0.3


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=RATE, betas=(0.5, 0.999))


def test_two_epochs_are_those_of_a_plain_loop() -> None:
    options: dict[str, Any] = {"hs": HS, "mu": MU, "epsilon": EPSILON, "generator_optimizer": adam}
    method = CoBoosting(**SMALL, epochs=2, generator_steps=3, **options)
    loop = small(method, optimizer=sgd(0.1, momentum=0.9))
    loop.fit()
    teachers, student = [method.uploads[client] for client in "012"], Student(method.initial)
    w = torch.full((3,), 1 / 3)

    def ensemble(x: Tensor, w: Tensor) -> Tensor:
        return sum(w[k] * scores(teachers[k], x)[0] for k in range(3)) / w.sum()  # type: ignore[return-value]

    pool, labels, done = torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.int64), 0
    for epoch, steps in enumerate([1, 4]):
        generator, learn = first_weights(method, epoch)
        draws = torch_generator(0, 1, "server", "noise", epoch)
        z = torch.randn(6, 3, generator=draws).requires_grad_()
        y = torch.multinomial(torch.ones(3), 6, replacement=True, generator=draws)
        optimizer = adam([*learn, z])
        lowest = math.inf
        for _ in range(3):
            x = paint(generator, z)
            teacher, own = ensemble(x, w), scores(student.model, x)[0]
            hard = (1 - teacher.softmax(1)[range(6), y].detach()) ** HS
            p, q = (teacher / 3).softmax(1), (own / 3).softmax(1)
            kl = 9 * (p * (p / q).log()).sum(1)
            loss = (hard * F.cross_entropy(teacher, y, reduction="none")).mean() - kl.mean()
            if loss.item() < lowest:
                lowest, best = loss.item(), x.detach()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        images, classes = by_class(best, y)
        pool, labels = torch.cat([pool, images]), torch.cat([labels, classes])
        if epoch > 0:
            for batch in batches(len(pool), 4, 3, "weights", epoch):
                w.requires_grad_()
                (gradient,) = torch.autograd.grad(F.cross_entropy(ensemble(pool[batch], w), labels[batch]), w)
                w = (w.detach() - MU * 0.99**epoch * gradient.sign()).clamp(0, 1)
        scale = 0.5 * (1 + math.cos(math.pi * done / 5))
        directions = torch.Generator().manual_seed(derive_seed(0, 1, "server", "directions", epoch))
        for batch in batches(len(pool), 4, steps, "student", epoch):
            x = pool[batch].requires_grad_()
            u = 2 * torch.rand(len(batch), 3, generator=directions) - 1
            (gradient,) = torch.autograd.grad((u * (ensemble(x, w) / 4).softmax(1)).sum(), x)
            x = (x + EPSILON * gradient.sign()).detach()
            own, target = (scores(student.model, x)[0] / T).log_softmax(1), (ensemble(x, w) / T).softmax(1)
            student.step(T * T * F.kl_div(own, target, reduction="batchmean"), scale)
        done += steps
    torch.testing.assert_close(method.weights, w, rtol=0, atol=1e-6)
    assert not torch.equal(w, torch.full((3,), 1 / 3))
    for name, value in student.model.items():
        torch.testing.assert_close(method.student[name], value.detach(), rtol=1e-3, atol=1e-4)
    assert loop.history[-1]["server/generator_loss"] == pytest.approx(lowest, abs=1e-4)
    # The record's ensemble is the weighted one.
    whole = loop.data.test_sets()["global"]
    x = whole.fetch(torch.arange(len(whole)))
    right = (ensemble(x, w).argmax(1) == whole.labels).float().mean().item()
    assert loop.history[-1]["ensemble/global/acc"] == pytest.approx(right)
    assert [loop.history[-1][f"server/weight_{client}"] for client in "012"] == w.tolist()


def test_without_its_parts_it_is_dense_with_the_plain_ensemble() -> None:
    common = {"adversarial_temperature": 3.0, "temperature": 4.0, "generator_optimizer": adam}
    ours = METHODS["CoBoosting"](hs=0.0, mu=0.0, epsilon=0.0, **common)
    dense = METHODS["DENSE"](masked=False, **common)
    for method in (ours, dense):
        small(method).fit()
    assert same(ours.bank.state_dict(), dense.bank.state_dict())  # type: ignore[union-attr]
    for name, value in dense.student.items():
        torch.testing.assert_close(ours.student[name], value, rtol=1e-5, atol=1e-6)
    for part in ({"hs": 1.0}, {"mu": 0.05}, {"epsilon": 0.1}):  # each of them changes something
        other = METHODS["CoBoosting"](**{"hs": 0.0, "mu": 0.0, "epsilon": 0.0, **common, **part})
        small(other).fit()
        assert not torch.allclose(other.student["network.1.weight"], dense.student["network.1.weight"], atol=1e-5)


def test_the_clients_limit_of_steps_is_not_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS["CoBoosting"](weight_passes=2, student=Training(5, 4))
    fits = watched(small(method, trainer={"max_steps": 1}), monkeypatch)
    assert method.bank is not None
    assert [result.num_steps for fit, result in fits if fit.key[:1] == ("weights",)] == [
        2 * math.ceil(len(method.bank) / 4)
    ]


def test_who_asks_for_the_teachers_is_told_their_weights() -> None:
    method = METHODS["CoBoosting"](mu=0.1)
    small(method).fit()
    found = method.distillation()
    assert found is not None
    assert torch.equal(found.teacher.given["weights"]["weights"], method.weights)  # type: ignore[attr-defined]
    assert not torch.allclose(method.weights, method.weights.mean())  # type: ignore[attr-defined]


@pytest.mark.parametrize("mu", [0.02, 5.0])
def test_weights_move_by_a_step_a_batch_and_stay_within_their_bounds(mu: float) -> None:
    method = METHODS["CoBoosting"](mu=mu, student=Training(5, 100))  # the pool is one batch
    small(method).fit()
    moved = (method.weights - 1 / 3).abs()  # type: ignore[attr-defined]
    assert method.weights.min() >= 0  # type: ignore[attr-defined]
    assert method.weights.max() <= 1  # type: ignore[attr-defined]
    assert moved.max() <= mu * 0.99 + 1e-7
    assert moved.max() > 0.01
    still = METHODS["CoBoosting"](epochs=1, mu=mu)
    small(still).fit()
    assert torch.equal(still.weights, torch.full((3,), 1 / 3))  # type: ignore[attr-defined]


def test_a_step_of_the_weights_by_hand() -> None:
    w = torch.nn.Parameter(torch.tensor([0.5, 0.02, 0.99, 0.3], dtype=torch.float64))
    optimizer = ClippedSignDescent([w], lr=0.05)
    w.grad = torch.tensor([3.0, 1e-9, -2.0, 0.0], dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([0.45, 0.0, 1.0, 0.3]).double())
    alone = torch.nn.Parameter(torch.tensor([0.03, 0.0]))
    optimizer = ClippedSignDescent([alone], lr=0.05)
    alone.grad = torch.tensor([1e-9, 0.0])
    optimizer.step()
    assert alone[0] == torch.tensor(0.03)  # an ensemble of nobody would be no ensemble


def test_diverse_images_are_a_signed_step_of_tempered_probabilities() -> None:
    mapping = 6 * torch.randn(4, 3, generator=torch_generator(3))

    class Linear(DiverseSamples):
        def ensemble(self, task: Any, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(1) @ mapping

    step = Linear(None, "mean_logits", 0.1, 4.0, seed=5)  # type: ignore[arg-type]
    step.on_fit_start(None, SimpleNamespace())
    images = torch.rand(8, 1, 2, 2, generator=torch_generator(4))
    u = 2 * torch.rand(8, 3, generator=torch.Generator().manual_seed(5)) - 1
    slopes = {}
    for temperature in (1.0, 4.0):
        p = (images.flatten(1) @ mapping / temperature).softmax(1)
        slopes[temperature] = (p * (u - (p * u).sum(1, keepdim=True))) @ mapping.T
    assert not torch.equal(slopes[1.0].sign(), slopes[4.0].sign())  # so that the temperature can be seen
    expected = images.flatten(1) + 0.1 * slopes[4.0].sign()
    torch.testing.assert_close(step.diverse(None, images).flatten(1), expected)  # type: ignore[arg-type]


def test_statistics_are_a_mean_over_the_teachers() -> None:
    """Three copies of one client are as far away as that client."""
    loop = small(METHODS["CoBoosting"](bn=0.5), normalised)
    generator = loop.participant.tasks["generator"]
    state, images = loop.model.state(), torch.rand(6, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    labels, rows = torch.zeros(6, dtype=torch.int64), torch.arange(6)
    values = []
    for names in ("a", "abc"):
        experts = {f"expert/{name}": state for name in names}
        generator.given = {**experts, "student": state, "weights": {"weights": torch.ones(len(names))}}
        values.append(generator.objective(images, rows, labels))
    torch.testing.assert_close(values[0], values[1])
    hidden = scores(state, images)[1]
    assert hidden is not None
    far = hidden.mean(0).norm() + (hidden.var(0, unbiased=False) - 1).norm()
    hard = scores(state, images)[0].log_softmax(1)[:, 0]
    torch.testing.assert_close(values[0], ((1 - hard.exp()) * -hard).mean() + 0.5 * far)


@pytest.mark.parametrize("combine", ["mean_logits", "mean"])
def test_weighted_ensembles(combine: Any) -> None:
    answers = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.tensor([0.2, 0.0, 0.6], dtype=torch.float64, requires_grad=True)
    shares = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)
    found = combined(answers, combine, 2.0, weights=weights)
    if combine == "mean_logits":
        expected = torch.einsum("e,enc->nc", shares, answers)
    else:
        expected = 2 * torch.einsum("e,enc->nc", shares, (answers / 2).softmax(2)).log()
    torch.testing.assert_close(found.detach(), expected)
    positive = (weights + 0.1).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: combined(answers, combine, 2.0, weights=w), positive)
    found.sum().backward()
    assert weights.grad is not None
    assert weights.grad.isfinite().all()
    equal = combined(answers, combine, 2.0, weights=torch.full((3,), 7.0))
    torch.testing.assert_close(equal, combined(answers, combine, 2.0))
    rows = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)).double()
    each = torch.cat([combined(answers[:, n : n + 1], combine, 2.0, weights=rows[:, n]) for n in range(5)])
    torch.testing.assert_close(combined(answers, combine, 2.0, weights=rows), each)


def test_a_task_takes_weights_for_all_or_for_each_example() -> None:
    loop = small(METHODS["CoBoosting"](), linear)
    task = EnsembleTask(loop.model, "mean_logits")
    states = {f"expert/{n}": {m: v + n for m, v in loop.model.state().items()} for n in range(2)}
    images = torch.rand(3, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    answers = torch.stack([scores(state, images)[0] for state in states.values()])
    task.given = {**states, "weights": {"weights": torch.tensor([1.0, 3.0])}}
    torch.testing.assert_close(task.logits(images), 0.25 * answers[0] + 0.75 * answers[1])
    task.given = states
    columns = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    expected = torch.stack([answers[0, 0], answers[1, 1], answers[:, 2].mean(0)])
    torch.testing.assert_close(task.logits(images, weights=columns), expected)


def test_probabilities_of_zero_stay_finite_where_somebody_says_more() -> None:
    certain = torch.tensor([[[0.0, -math.inf]], [[-math.inf, 0.0]]])
    found = mean_of_experts(certain, torch.tensor([1.0, 3.0])).exp()
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.75]]).double())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"combine": "product"}, "combine is 'product'; the weights of Co-Boosting"),
        ({"weight_passes": 0}, "weight_passes is 0; it must be at least 1"),
        ({"hs": -1}, "hs is -1; it must be at least 0"),
        ({"mu": -1}, "mu is -1; it must be at least 0"),
        ({"mu": math.nan}, "mu is nan; it must be at least 0"),
        ({"epsilon": -1}, "epsilon is -1; it must be at least 0"),
    ],
)
def test_wrong_arguments(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METHODS["CoBoosting"](**argument)
    with pytest.raises(ValueError, match="members have weights in a 'mean' or 'mean_logits' only"):
        combined(torch.zeros(2, 1, 3), "product", weights=torch.ones(2))
