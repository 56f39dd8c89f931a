"""FedFTG: two iterations against a plain loop, label counts, the student's loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation.tiny import CLASSES, sgd
from methods.plain_images import Student, batches, first_weights, paint, scores
from methods.test_generator_distillation import METHODS, SMALL, small
from torch import Tensor

from fl_lightning.methods import FedFTG
from fl_lightning.methods.fedftg import SoftCrossEntropy, class_shares, discrepancy
from fl_lightning.rng import torch_generator
from fl_lightning.tasks.base import Batch


@pytest.mark.parametrize(("kind", "class_mean"), [("l1", True), ("kl", False)])
def test_two_iterations_are_those_of_a_plain_loop(kind: Any, class_mean: bool) -> None:
    # Adam would turn the rounding noise of gradients that are 0 (a bias before BatchNorm) into steps.
    method = FedFTG(
        **SMALL,
        iterations=2,
        discrepancy=kind,
        class_mean=class_mean,
        adversarial=0.7,
        one_hot=1.3,
        diversity=2.0,
        generator_optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    )
    loop = small(method, optimizer=sgd(0.1, momentum=0.9))
    drawn, draw = [], method.draw
    method.draw = lambda *given: (drawn.append(given[2]), draw(*given))[1]  # type: ignore[method-assign]
    loop.fit()
    held = [loop.data.train(client).labels.bincount(minlength=CLASSES) for client in "012"]
    counts = torch.stack(held).float()
    assert all(torch.equal(shares, counts.sum(0)) for shares in drawn)  # balanced here: a draw alone would not tell
    alpha = counts / counts.sum(0)
    teachers = [method.uploads[client] for client in "012"]
    sizes = [7, 12, 5]
    mean = {n: sum(s * t[n] for s, t in zip(sizes, teachers, strict=True)) / 24 for n in teachers[0]}
    student = Student(mean)
    generator, learn = first_weights(method, 0)
    optimizer = torch.optim.SGD(learn, lr=0.5, momentum=0.9)
    done, shown = 0, []
    for iteration, steps in enumerate([2, 3]):
        draws = torch_generator(0, 1, "server", "noise", iteration)
        z = torch.randn(6, 3, generator=draws)
        y = torch.multinomial(counts.sum(0), 6, replacement=True, generator=draws)
        for k in range(3):
            x = paint(generator, z, y)
            client, own = scores(teachers[k], x)[0], scores(student.model, x)[0]
            if kind == "l1":
                apart = (own - client.detach()).abs().mean(1)
            else:
                p = client.detach().softmax(1)
                apart = (p * (p.log() - own.log_softmax(1))).sum(1)
            far = (z[:, None] - z[None]).square().mean(2)
            differ = (x[:, None] - x[None]).abs().flatten(2).mean(2)
            loss = -0.7 * (alpha[k, y] * apart).mean()
            loss = loss + 1.3 * (alpha[k, y] * F.cross_entropy(client, y, reduction="none")).mean()
            loss = loss + 2.0 * (-(far * differ).mean()).exp() / 3
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            x = paint(generator, z, y, training=False)
            q = sum(alpha[k, y][:, None] * scores(teachers[k], x)[0].softmax(1) for k in range(3))
        shown.append(x)
        scale = 0.5 * (1 + math.cos(math.pi * done / 5))
        for batch in batches(6, 4, steps, "student", iteration):
            terms = -q[batch] * scores(student.model, x[batch])[0].log_softmax(1)
            student.step(terms.mean() if class_mean else terms.sum(1).mean(), scale)
        done += steps
    bank = method.bank
    assert bank is not None
    places = torch.tensor([i for origin in bank.provenance for i in origin.indices]).argsort()
    torch.testing.assert_close(bank.inputs[places].float() / 255, torch.cat(shown), rtol=0, atol=1.01 / 255)
    assert torch.cat(shown).std() > 0.01
    for name, value in student.model.items():
        torch.testing.assert_close(method.student[name], value.detach(), rtol=1e-3, atol=1e-4)


def test_every_class_that_somebody_has_is_shared_out_whole() -> None:
    counts = torch.tensor([[4.0, 0.0, 1.0], [0.0, 0.0, 3.0]])
    torch.testing.assert_close(class_shares(counts), torch.tensor([[1.0, 0.0, 0.25], [0.0, 0.0, 0.75]]))
    loop = small(METHODS["FedFTG"]())
    loop.fit()
    method = loop.method
    uploaded = torch.stack([method.counts[client] for client in "012"])
    assert uploaded.sum(1).tolist() == [7, 12, 5]
    some = uploaded.sum(0) > 0
    torch.testing.assert_close(class_shares(uploaded.float()).sum(0), some.float())
    assert set(method.bank.labels.tolist()) <= set(torch.nonzero(some).flatten().tolist())


def test_equal_counts_weigh_the_clients_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(class_shares(torch.full((4, 3), 8.0)), torch.full((4, 3), 0.25))
    seen: list[Tensor] = []
    method = METHODS["FedFTG"](init="initial")
    loop = small(method)
    soft_labels = method.soft_labels

    def watch(server: Any, images: Any, key: Any) -> Tensor:
        seen.append(images)
        seen.append(soft_labels(server, images, key))
        return seen[-1]

    def equal(server: Any) -> Any:
        method.counts = {client: torch.full((CLASSES,), 8) for client in method.uploads}
        return FedFTG.distil(method, server)  # type: ignore[arg-type]

    monkeypatch.setattr(method, "soft_labels", watch)
    monkeypatch.setattr(method, "distil", equal)
    loop.fit()
    images = seen[0].fetch(torch.arange(6))  # type: ignore[attr-defined]
    expected = torch.stack([scores(model, images)[0].softmax(1) for model in method.uploads.values()]).mean(0)
    torch.testing.assert_close(seen[1].exp(), expected)


def test_discrepancy_by_hand() -> None:
    student, teacher = torch.tensor([[0.8, 0.2]]).double().log(), torch.tensor([[0.5, 0.5]]).double().log()
    l1 = (math.log(0.8 / 0.5) + math.log(0.5 / 0.2)) / 2
    assert discrepancy(student, teacher, "l1").tolist() == pytest.approx([l1])
    kl = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert discrepancy(student, teacher, "kl").tolist() == pytest.approx([kl])


def test_the_students_loss_by_hand() -> None:
    loop = small(METHODS["FedFTG"]())
    images = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    q = torch.tensor([[0.7, 0.2, 0.1]]).expand(4, -1)
    batch = Batch(images, torch.zeros(4), extras={"soft": q.log() + 3})
    own = scores(loop.model.state(), images)[0].log_softmax(1)
    torch.testing.assert_close(SoftCrossEntropy(True).criterion(loop.model, batch).detach(), -(q * own).sum() / 12)
    torch.testing.assert_close(SoftCrossEntropy(False).criterion(loop.model, batch).detach(), -(q * own).sum() / 4)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"discrepancy": "l2"}, "discrepancy is 'l2'; allowed: 'l1', 'kl'"),
        ({"diversity": -1}, "diversity is -1; it must be at least 0"),
        ({"iterations": 0}, "iterations is 0; it must be at least 1"),
    ],
)
def test_wrong_arguments(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METHODS["FedFTG"](**argument)
