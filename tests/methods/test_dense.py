"""DENSE: two epochs against a plain loop, and its augmentation."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation.tiny import linear, normalised, sgd
from methods.plain_images import Student, batches, by_class, first_weights, paint, scores
from methods.test_generator_distillation import METHODS, SMALL, small
from torch import Tensor

from fl_lightning.data.augmentation import HorizontalFlip
from fl_lightning.methods import DENSE, dense
from fl_lightning.rng import torch_generator

BN, ADVERSARIAL, T, RATE = 0.5, 0.7, 2.0, 0.3


@pytest.mark.parametrize("network", [linear, normalised])
def test_two_epochs_are_those_of_a_plain_loop(network: Callable) -> None:
    bn = BN if network is normalised else 0.0
    method = DENSE(
        **SMALL,
        epochs=2,
        generator_steps=3,
        bn=bn,
        adversarial=ADVERSARIAL,
        temperature=T,
        generator_optimizer=lambda p: torch.optim.Adam(p, lr=RATE, betas=(0.5, 0.999)),
    )
    loop = small(method, network, (7, 12, 6), optimizer=sgd(0.1, momentum=0.9))
    loop.fit()
    teachers, student = list(method.uploads.values()), Student(method.initial)

    def ensemble(x: Tensor) -> tuple[Tensor, Tensor]:
        """z(x) and the BatchNorm statistics' distance."""
        answers = [scores(teacher, x) for teacher in teachers]
        far = torch.zeros(())
        for teacher, (_, hidden) in zip(teachers, answers, strict=True):
            if hidden is not None:
                far = far + (hidden.mean(0) - teacher["network.2.running_mean"]).norm()
                far = far + (hidden.var(0, unbiased=False) - teacher["network.2.running_var"]).norm()
        return sum(answer for answer, _ in answers) / 3, far  # type: ignore[return-value]

    pool, soft, done = torch.zeros(0, 1, 2, 2), torch.zeros(0, 3), 0
    masked = []
    for epoch, steps in enumerate([1, 4]):  # 5 steps in proportion to the pool
        generator, learn = first_weights(method, epoch)
        draws = torch_generator(0, 1, "server", "noise", epoch)
        z = torch.randn(6, 3, generator=draws).requires_grad_()
        y = torch.multinomial(torch.ones(3), 6, replacement=True, generator=draws)
        adam = torch.optim.Adam([*learn, z], lr=RATE, betas=(0.5, 0.999))
        lowest = math.inf
        for _ in range(3):
            x = paint(generator, z)
            teacher, far = ensemble(x)
            own = scores(student.model, x)[0]
            kl = (teacher.softmax(1) * (teacher.log_softmax(1) - own.log_softmax(1))).sum(1)
            differ = teacher.argmax(1) != own.argmax(1)
            masked.append(differ.float().mean().item())
            loss = F.cross_entropy(teacher, y) + bn * far - ADVERSARIAL * (kl * differ).mean()
            if loss.item() < lowest:
                lowest, best = loss.item(), x.detach()
            adam.zero_grad()
            loss.backward()
            adam.step()
        images, _ = by_class(best, y)
        pool, soft = torch.cat([pool, images]), torch.cat([soft, ensemble(images)[0].detach()])
        scale = 0.5 * (1 + math.cos(math.pi * done / 5))
        for batch in batches(len(pool), 4, steps, "student", epoch):
            own = scores(student.model, pool[batch], training=True)[0]
            target = (soft[batch] / T).softmax(1)
            student.step(T * T * F.kl_div((own / T).log_softmax(1), target, reduction="batchmean"), scale)
        done += steps
        assert loop.history[-1]["server/generator_loss"] == pytest.approx(lowest, abs=1e-4) or epoch == 0
    if network is linear:
        assert 0 < sum(masked) < len(masked)  # the mask decides something
    assert loop.method.bank is not None
    torch.testing.assert_close(method.bank.inputs.float() / 255, pool, rtol=0, atol=1.01 / 255)  # type: ignore[union-attr]
    for name, value in student.model.items():
        if not value.is_floating_point():  # the number of batches that a BatchNorm has seen
            continue
        torch.testing.assert_close(method.student[name], value.detach(), rtol=1e-3, atol=1e-4)


def test_images_are_changed_at_random_before_anybody_is_asked() -> None:
    """A flip changes the images that come out, and a probability of 0 is no augmentation."""

    def images(*augmentation: HorizontalFlip) -> Tensor:
        method = METHODS["DENSE"](augmentation=list(augmentation))
        small(method).fit()
        return method.bank.inputs  # type: ignore[union-attr]

    assert torch.equal(images(), images(HorizontalFlip(0.0)))
    assert not torch.equal(images(), images(HorizontalFlip(1.0)))


def test_every_step_of_the_generator_draws_its_views_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    given = dense.augment

    def augment(augmentation: Any, images: Tensor, draws: Tensor) -> Tensor:
        seen.append(draws.flatten().sort().values)  # whatever the order of the rows
        return given(augmentation, images, draws)

    monkeypatch.setattr(dense, "augment", augment)
    small(METHODS["DENSE"](epochs=1, generator_steps=4, augmentation=[HorizontalFlip(0.5)])).fit()
    assert len(seen) == 4
    assert all(not torch.equal(a, b) for a, b in combinations(seen, 2))


def test_what_is_kept_is_not_what_was_flipped() -> None:
    """With teachers and student that see left and right alike, flipping all changes nothing."""

    class Blind(torch.nn.Module):
        def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer((x + x.flip(-1)).sum(-1).flatten(1))

    def images(*augmentation: HorizontalFlip) -> Tensor:
        method = METHODS["DENSE"](augmentation=list(augmentation))
        small(method, Blind).fit()
        return method.bank.inputs  # type: ignore[union-attr]

    assert torch.equal(images(), images(HorizontalFlip(1.0)))
