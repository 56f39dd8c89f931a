"""What drives generators of images, by hand in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fl_lightning.losses.adversarial import disagreement, diversity_loss, hard_cross_entropy


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_hard_images_count_more() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).double().log().requires_grad_()
    labels = torch.tensor([0, 0])
    for hardness in (0.0, 1.0, 2.0):
        expected = (0.1**hardness * -math.log(0.9) + 0.8**hardness * -math.log(0.2)) / 2
        assert hard_cross_entropy(scores, labels, hardness).item() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(hard_cross_entropy(scores, labels, 1.0), scores)
    # The factor is a constant: (1 - p)(p - e_y) / B.
    torch.testing.assert_close(gradient[0], 0.1 * torch.tensor([-0.1, 0.1]).double() / 2)
    certain = hard_cross_entropy(torch.tensor([[50.0, 0.0]]), torch.tensor([0]), 0.5)
    assert certain.item() == 0


def test_disagreement_by_hand() -> None:
    teacher = torch.tensor([[0.9, 0.1], [0.6, 0.4]]).double().log()
    student = torch.tensor([[0.3, 0.7], [0.8, 0.2]]).double().log()
    kl = [0.9 * math.log(3) + 0.1 * math.log(1 / 7), 0.6 * math.log(0.75) + 0.4 * math.log(2)]
    assert disagreement(teacher, student).item() == pytest.approx(sum(kl) / 2)
    assert disagreement(teacher, student, masked=True).item() == pytest.approx(kl[0] / 2)  # the mean is over both
    squared = disagreement(2 * teacher, 2 * student, 2.0).item()
    assert squared == pytest.approx(4 * sum(kl) / 2)


@pytest.mark.parametrize("masked", [False, True])
def test_nothing_is_gained_where_student_and_ensemble_are_one(masked: bool) -> None:
    scores = drawn(6, 3).requires_grad_()
    loss = disagreement(scores, scores, 3.0, masked)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert loss.item() == 0
    assert gradient.abs().max() < 1e-12


def test_the_teachers_scores_have_a_gradient_too() -> None:
    teacher, student = drawn(4, 3).requires_grad_(), drawn(4, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: disagreement(a, b, 2.0), (teacher, student))


def test_diversity_by_hand() -> None:
    latents = torch.tensor([[0.0, 0.0], [1.0, 3.0]]).double()
    images = torch.tensor([[[0.0, 0.5]], [[1.0, 0.0]]]).double()
    # Distances 5 and 0.75 between the two, 0 of each to itself.
    assert diversity_loss(latents, images).item() == pytest.approx(math.exp(-(2 * 5 * 0.75) / 4))
    assert diversity_loss(latents, images[:1].expand(2, -1, -1)).item() == 1


def test_gradient_of_the_diversity() -> None:
    images = drawn(5, 1, 2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: diversity_loss(drawn(5, 4, seed=1), x), (images,))
