"""The pure parts of sparse inversion against arithmetic that is done by hand or in another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning.rng import torch_generator
from fl_lightning.synthesis.inversion import (
    Shift,
    check_schedule,
    ensemble,
    hold_,
    jensen_shannon,
    label_plan,
    pixel_mask,
    pixel_range,
    statistics_distance,
    survivors,
    to_images,
    top_patches,
    total_variation,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(seed, "test"))


def test_survivors_are_the_floors_of_exact_products() -> None:
    assert survivors(196, (0.3, 0.3, 0.3, 0.3)) == [137, 95, 66, 46]
    assert survivors(64, (0.3, 0.3, 0.3, 0.3)) == [44, 30, 21, 14]
    assert survivors(16, (0.3, 0.3)) == [11, 7]
    assert int(100 * (1 - 0.9)) == 9  # the trap
    for count in range(1, 230):
        for percent in range(0, 100, 5):
            exact = count * (100 - percent) // 100
            if exact:
                assert survivors(count, (percent / 100,)) == [exact], (count, percent)
            else:
                with pytest.raises(ValueError, match="at least 1 must stay"):
                    survivors(count, (percent / 100,))
    assert survivors(196, ()) == []


@pytest.mark.parametrize(
    ("events", "ratios", "reason"),
    [
        ((1, 2), (0.3,), "a ratio for every event"),
        ((0,), (0.3,), "at least 1 and rise"),
        ((3, 3), (0.3, 0.3), "at least 1 and rise"),
        ((3, 2), (0.3, 0.3), "at least 1 and rise"),
        ((1,), (1.0,), r"in \[0, 1\)"),
        ((1,), (-0.1,), r"in \[0, 1\)"),
        ((1,), (float("nan"),), r"in \[0, 1\)"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(events: Any, ratios: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_schedule(events, ratios)
    check_schedule((1, 2, 7), (0.0, 0.5, 0.99))
    check_schedule((), ())


def test_top_patches_are_absolute_and_nested() -> None:
    first = torch.tensor([[0.1, 0.9, 0.3, 0.8, 0.2], [0.5, 0.4, 0.3, 0.2, 0.1]])
    kept = top_patches(first, None, 3)
    assert kept.tolist() == [[1, 2, 3], [0, 1, 2]]
    again = top_patches(torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.2, 0.3]]), kept, 2)
    assert again.tolist() == [[2, 3], [1, 2]]


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(("down", "right"), [(0, 0), (4, 0), (-4, 8), (12, -4), (3, -2), (1, 7), (-3, -6)])
def test_patches_move_with_the_pixels(down: int, right: int, mirrored: bool) -> None:
    """Every pixel holds its patch's number: after a roll, most of a moved patch's cell (rounded) shows it."""
    grid, patch = (3, 4), (4, 4)
    numbers = torch.arange(12).view(1, 1, 3, 4).repeat_interleave(4, 2).repeat_interleave(4, 3).float()
    shift = Shift(down, right, mirrored)
    shown = shift.images(numbers)[0, 0].unfold(0, 4, 4).unfold(1, 4, 4).reshape(12, 16)
    kept = torch.randperm(12, generator=torch_generator(0, "kept"))[None, :7]
    moved = shift.patches(kept, grid, patch)
    assert moved.unique().numel() == 7
    for before, after in zip(kept[0].tolist(), moved[0].tolist(), strict=True):
        share = (shown[after] == before).float().mean()
        assert share >= 1 / 4 if down % 4 == 2 or right % 4 == 2 else share > 1 / 4
        if not (down % 4 or right % 4):
            assert share == 1


def test_images_roll_and_then_are_reflected() -> None:
    image = torch.arange(6.0).view(1, 1, 2, 3)
    assert Shift(1, 1, False).images(image)[0, 0].tolist() == [[5, 3, 4], [2, 0, 1]]
    assert Shift(1, 1, True).images(image)[0, 0].tolist() == [[4, 3, 5], [1, 0, 2]]
    assert Shift(0, 0, False).images(image) is image


def test_a_mask_of_patches_covers_their_pixels() -> None:
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 4] = mask[1, 2] = True  # row 1, column 1; row 0, column 2
    pixels = pixel_mask(mask, (2, 3), (4, 2))
    assert pixels.shape == (2, 1, 8, 6)
    expected = torch.zeros(2, 1, 8, 6, dtype=torch.bool)
    expected[0, 0, 4:8, 2:4] = expected[1, 0, 0:4, 4:6] = True
    assert torch.equal(pixels, expected)


def test_pixels_that_are_held_keep_their_bits() -> None:
    pixels, held = random(2, 3, 4, 4).requires_grad_(), random(2, 3, 4, 4, seed=1)
    alive = random(2, 1, 4, 4, seed=2) > 0
    before = pixels.detach().clone()
    hold_(pixels, held, alive)
    assert torch.equal(pixels, torch.where(alive, before, held))


def test_total_variation_by_loops_and_its_gradient() -> None:
    x = random(2, 3, 4, 5).double().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        squares = torch.zeros((), dtype=torch.float64)
        for i in range(4):
            for j in range(5):
                if i + down < 4 and 0 <= j + right < 5:
                    squares = squares + (x[:, :, i + down, j + right] - x[:, :, i, j]).square().sum()
        expected = expected + squares.sqrt()
    (wanted,) = torch.autograd.grad(expected, x)
    found = total_variation(x)
    assert torch.allclose(found, expected)
    assert torch.allclose(torch.autograd.grad(found, x)[0], wanted)
    flat = torch.ones(1, 1, 3, 3, requires_grad=True)
    total_variation(flat).backward()
    assert flat.grad is not None
    assert (flat.grad == 0).all()  # and no NaN


def test_pixels_have_a_range_per_channel() -> None:
    mean, std = torch.tensor([0.2, 0.5]).view(2, 1, 1), torch.tensor([0.4, 0.1]).view(2, 1, 1)
    low, high = pixel_range(mean, std)
    assert torch.allclose(low.flatten(), torch.tensor([-0.5, -5.0]))
    assert torch.allclose(high.flatten(), torch.tensor([2.0, 5.0]))
    images = to_images(torch.stack([low, high]).expand(2, 2, 3, 3), mean, std)
    assert torch.allclose(images, torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 2, 3, 3))


def test_jensen_shannon_against_scipy() -> None:
    from scipy.spatial.distance import jensenshannon

    student, teacher = random(5, 4), random(5, 4, seed=1)
    p, q = ((3 * s / 9).softmax(1).double().numpy() for s in (student, teacher))
    assert p.min() > 0.01
    expected = (jensenshannon(p, q, axis=1) ** 2).mean()  # the distance is the root
    assert float(jensen_shannon(student, teacher)) == pytest.approx(expected, rel=1e-4)
    assert float(jensen_shannon(student, student)) == pytest.approx(0, abs=1e-6)
    # Scores so far apart that all but one probability is 0: limited to 0.01 and 0.99.
    far = torch.tensor([[90.0, 0.0]])
    p, q = torch.tensor([0.99, 0.01]), torch.tensor([0.01, 0.99])
    middle = (p + q) / 2
    limited = 0.5 * (p * (p / middle).log()).sum() + 0.5 * (q * (q / middle).log()).sum()
    assert float(jensen_shannon(far, far.flip(1))) == pytest.approx(float(limited), rel=1e-5)


def test_statistics_are_the_batchs_biased_ones() -> None:
    inputs, mean, variance = random(6, 3, 2, 2), random(3, seed=1), random(3, seed=2).abs()
    columns = inputs.permute(1, 0, 2, 3).reshape(3, -1)
    expected = (columns.mean(1) - mean).norm() + (columns.var(1, unbiased=False) - variance).norm()
    assert torch.allclose(statistics_distance(inputs, mean, variance), expected)
    assert statistics_distance(random(6, 3), mean, variance).shape == ()


def test_ensembles_are_means_of_scores_or_of_probabilities() -> None:
    scores = random(3, 4, 5)
    assert torch.allclose(ensemble(scores, "logits"), (scores[0] + scores[1] + scores[2]) / 3)
    assert torch.allclose(ensemble(scores, "probs").exp(), scores.softmax(2).mean(0))
    assert torch.allclose(ensemble(scores[:1], "probs"), scores[0].log_softmax(1), atol=1e-6)


def test_labels_are_drawn_from_the_source_that_is_asked_for() -> None:
    def shares(source: Any, **options: Any) -> Tensor:
        drawn = label_plan(source, 4000, 4, torch_generator(0, "labels"), **options)
        assert (drawn.shape, drawn.dtype) == ((4000,), torch.int64)
        return drawn.bincount(minlength=4) / 4000

    assert torch.allclose(shares("uniform"), torch.full((4,), 0.25), atol=0.03)
    counts = torch.tensor([30, 0, 10, 60])
    assert torch.allclose(shares("client_counts", counts=counts), counts / 100, atol=0.03)
    assert shares("client_counts", counts=counts)[1] == 0
    logits = torch.tensor([[50.0, 0, 0, 0], [0.0, 0, 50, 0], [0.0, 0, 50, 0], [0.0, 0, 0, 0]])
    expected = torch.tensor([1.25, 0.25, 2.25, 0.25]) / 4  # the mean of the four softmaxes
    assert torch.allclose(shares("client_head", logits=logits), expected, atol=0.03)
    assert torch.equal(shares("uniform"), shares("uniform"))
    assert torch.equal(shares("balanced"), torch.full((4,), 0.25))
    assert label_plan("balanced", 6, 4, torch_generator(0)).tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("server", 5), "label source is 'server'; allowed: 'uniform', 'balanced', 'client_head', 'client_counts'"),
        (("uniform", 0), "num_images is 0"),
        (("client_head", 5), "logits are missing"),
        (("client_counts", 5), "counts are None"),
    ],
)
def test_labels_that_cannot_be_drawn_are_refused(arguments: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        label_plan(*arguments, 4, torch_generator(0))
    with pytest.raises(ValueError, match=r"logits are \(2, 3\); 'client_head' needs \(M >= 1, 4\)"):
        label_plan("client_head", 5, 4, torch_generator(0), logits=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="not all 0"):
        label_plan("client_counts", 5, 4, torch_generator(0), counts=torch.zeros(4))
