"""The theory's quantities, where they are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning.metrics import distillation_theory as theory
from fl_lightning.metrics.flatness import Loss, Params
from fl_lightning.rng import torch_generator


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(0, *shape), dtype=torch.float64)


def linear(slope: Tensor) -> Loss:
    return lambda params: (slope * params["w"]).sum()


def probabilities(*shape: int) -> Tensor:
    return (2 * draw(*shape)).softmax(-1)


# ---- gradients


def test_gradients_of_linear_batches() -> None:
    slopes = draw(5, 3)
    found = theory.batch_gradients([linear(s) for s in slopes], {"w": draw(3)})
    norms = np.linalg.norm(slopes.numpy(), axis=1)
    mean = slopes.numpy().mean(0)
    spread = np.mean([np.sum((s - mean) ** 2) for s in slopes.numpy()])
    assert found.mean_norm == pytest.approx(norms.mean(), rel=1e-12)
    assert found.max_norm == pytest.approx(norms.max(), rel=1e-12)
    assert found.spread == pytest.approx(spread, rel=1e-10)
    assert found.variance == pytest.approx(spread / np.sum(mean**2), rel=1e-10)
    torch.testing.assert_close(found.mean["w"], slopes.mean(0))


def test_equal_batches_have_no_variance_and_opposite_ones_no_mean() -> None:
    same = theory.batch_gradients([linear(torch.ones(3))] * 4, {"w": torch.zeros(3)})
    assert same.variance == pytest.approx(0, abs=1e-12)
    opposite = theory.batch_gradients([linear(torch.ones(2)), linear(-torch.ones(2))], {"w": torch.zeros(2)})
    assert math.isnan(opposite.variance)
    assert opposite.mean_norm == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("known", [True, False])
def test_smoothness_of_a_quadratic_is_its_eigenvalue_along_an_eigenvector(known: bool) -> None:
    curvature = torch.tensor([5.0, 3.0, -9.0], dtype=torch.float64)

    def loss(params: Params) -> Tensor:
        return (curvature * params["w"] ** 2).sum() / 2

    point = {"w": draw(3)}
    slope = {"w": curvature * point["w"]} if known else None
    for axis, value in enumerate(curvature.abs()):
        direction = {"w": 7 * torch.eye(3, dtype=torch.float64)[axis]}
        assert theory.smoothness(loss, point, direction, 0.3, slope) == pytest.approx(float(value), rel=1e-10)
    mixed = draw(3) + 1
    expected = float((curvature * mixed).norm() / mixed.norm())
    assert theory.smoothness(loss, point, {"w": mixed}, 0.3, slope) == pytest.approx(expected, rel=1e-10)
    assert theory.smoothness(linear(mixed), point, {"w": mixed}, 0.3) == 0
    assert math.isnan(theory.smoothness(loss, point, {"w": torch.zeros(3).double()}, 0.3))
    with pytest.raises(ValueError, match="radius is 0; it must be above 0"):
        theory.smoothness(loss, point, {"w": mixed}, 0)


# ---- labels


def test_variance_of_hard_labels_is_exact() -> None:
    q = torch.stack([torch.eye(4)[1], torch.full((4,), 0.25), torch.tensor([0.5, 0.5, 0, 0])]).double()
    torch.testing.assert_close(theory.hard_label_variance(q), torch.tensor([0, 0.75, 0.5]).double())
    q, p = probabilities(6, 5), probabilities(5, 6).T.contiguous()
    p = p / p.sum(-1, keepdim=True)
    # Over all labels instead of drawn ones.
    every = torch.stack([q[:, y] * (p - torch.eye(5)[y] - (p - q)).square().sum(-1) for y in range(5)]).sum(0)
    torch.testing.assert_close(theory.hard_label_variance(q), every)


def test_drawn_labels_agree_with_the_identity() -> None:
    q, p = probabilities(8, 5), probabilities(8, 5).flip(0)
    draws = 20_000
    found = theory.sampled_hard_label_variance(p, q, draws, torch_generator(0, "labels"))
    # ||q - e_y||^2 lies in [0, 2]: five standard errors of at most 1 / sqrt(draws).
    assert (found - theory.hard_label_variance(q)).abs().max() < 5 / math.sqrt(draws)
    again = theory.sampled_hard_label_variance(p, q, draws, torch_generator(0, "labels"))
    assert torch.equal(found, again)
    certain = torch.eye(5).double()
    assert theory.sampled_hard_label_variance(p[:5], certain, 3, torch_generator(0)).abs().max() < 1e-30
    with pytest.raises(ValueError, match="draws is 0; it must be at least 1"):
        theory.sampled_hard_label_variance(p, q, 0, torch_generator(0))


def test_trace_of_a_covariance() -> None:
    vectors = draw(9, 4)
    assert theory.covariance_trace(vectors) == pytest.approx(np.trace(np.cov(vectors.numpy().T, ddof=0)), rel=1e-12)
    assert theory.covariance_trace(torch.ones(3, 2)) == 0


# ---- stability


def test_largest_change_of_the_loss() -> None:
    scores, others, labels = draw(7, 3), draw(3, 7).T, torch.arange(7) % 3
    losses = [
        [-math.log(math.exp(r[y]) / sum(map(math.exp, r))) for r, y in zip(s.tolist(), labels.tolist(), strict=True)]
        for s in (scores, others)
    ]
    expected = max(abs(a - b) for a, b in zip(*losses, strict=True))
    assert theory.largest_loss_change(scores, others, labels) == pytest.approx(expected, rel=1e-12)
    assert theory.largest_loss_change(scores, scores, labels) == 0


def test_stability_bound() -> None:
    # beta c = 1: 2 / (n - 1) * sqrt(2 c L^2 tau).
    assert theory.stability_bound(3.0, 2.0, 0.5, 100, 11) == pytest.approx(2 / 10 * math.sqrt(2 * 0.5 * 9 * 100))
    # beta c = 3: 4/3 / (n - 1) * (2 c L^2)^(1/4) * tau^(3/4).
    assert theory.stability_bound(2.0, 1.0, 3.0, 16, 5) == pytest.approx(4 / 3 / 4 * 24**0.25 * 8)
    bounds = [theory.stability_bound(value, 2.0, 0.5, 100, 11) for value in (0.1, 1.0, 10.0)]
    assert bounds == sorted(bounds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0, 1.0, 1, 2), "lipschitz is 0.0; it must be above 0"),
        ((1.0, math.nan, 1.0, 1, 2), "smoothness is nan; it must be above 0"),
        ((1.0, 1.0, -1.0, 1, 2), "step_constant is -1.0; it must be above 0"),
        ((1.0, 1.0, 1.0, 0, 2), "steps 0 must be at least 1"),
        ((1.0, 1.0, 1.0, 1, 1), "examples 1 at least 2"),
    ],
)
def test_a_bound_needs_its_constants(arguments: tuple[float, float, float, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        theory.stability_bound(*arguments)


# ---- images


def waves(frequency: tuple[float, float], side: int = 16) -> Tensor:
    """One image with a wave of so many periods per pixel along rows and columns, around grey."""
    at = torch.arange(side, dtype=torch.float64)
    phase = 2 * math.pi * (frequency[0] * at[:, None] + frequency[1] * at[None, :])
    return (0.5 + 0.4 * phase.cos()).view(1, 1, side, side)


def test_known_spectra() -> None:
    flat = torch.full((2, 3, 16, 16), 0.3, dtype=torch.float64)
    assert theory.high_frequency_share(flat, (4, 4)) == 0
    odd = torch.full((1, 1, 7, 7), 0.7, dtype=torch.float64)  # whose transform leaves a rounding error
    assert theory.high_frequency_share(odd, (7, 7)) == 0
    board = (torch.arange(16)[:, None] + torch.arange(16)).remainder(2).double().view(1, 1, 16, 16)
    assert theory.high_frequency_share(board, (4, 4)) == pytest.approx(1, abs=1e-12)
    for frequency, share in {(1 / 8, 0): 0, (1 / 4, 0): 0, (0, 3 / 8): 1, (1 / 4, 1 / 4): 1, (1 / 8, 1 / 8): 0}.items():
        assert theory.high_frequency_share(waves(frequency), (8, 8)) == pytest.approx(share, abs=1e-12)
    # A low and a high wave of amplitudes 1 and 2: 4 / 5 of the energy is high.
    mixed = (waves((1 / 8, 0)) - 0.5) + 2 * (waves((0, 3 / 8)) - 0.5)
    assert theory.high_frequency_share(mixed, (8, 8)) == pytest.approx(0.8)
    # The same whatever the brightness.
    assert theory.high_frequency_share(mixed + 5, (8, 8)) == pytest.approx(0.8)


def test_only_the_patches_that_are_asked_for_count() -> None:
    image = waves((1 / 8, 0)).repeat(2, 3, 1, 1)
    image[0, :, :8, 8:] = waves((0, 3 / 8))[0, :, :8, :8]  # patch 1 of the first image
    image[1, :, 8:, :8] = waves((0, 3 / 8))[0, :, :8, :8]  # patch 2 of the second
    high, others = torch.tensor([[1], [2]]), torch.tensor([[0, 2, 3], [0, 1, 3]])
    assert theory.high_frequency_share(image, (8, 8), high) == pytest.approx(1)
    assert theory.high_frequency_share(image, (8, 8), others) == pytest.approx(0, abs=1e-12)
    assert theory.high_frequency_share(image, (8, 8)) == pytest.approx(0.25)
    assert theory.high_frequency_share(image, (8, 8), torch.cat([others, high], 1)) == pytest.approx(0.25)


def test_patches_are_cut_as_a_slice_would() -> None:
    """Against one Fourier transform per patch, written out."""
    images, (height, width) = draw(2, 3, 8, 12), (4, 6)
    high = total = 0.0
    for image in images.numpy():
        for channel in image:
            for top in range(0, 8, height):
                for left in range(0, 12, width):
                    power = np.abs(np.fft.fft2(channel[top : top + height, left : left + width])) ** 2
                    for (i, j), value in np.ndenumerate(power):
                        fi, fj = min(i, height - i) / height, min(j, width - j) / width
                        total += value * (i + j > 0)
                        high += value * (math.hypot(fi, fj) > 0.25)
    assert theory.high_frequency_share(images, (height, width)) == pytest.approx(high / total, rel=1e-10)
    with pytest.raises(ValueError, match=r"patch is \(5, 4\); it must divide images of \(8, 12\)"):
        theory.high_frequency_share(images, (5, 4))
