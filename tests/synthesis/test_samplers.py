"""Samplers on the Gaussian oracle, whose flow is known: order, evaluations, seeds, independence of the batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fl_lightning.models.edm2 import EDM2UNet, Precond
from fl_lightning.rng import derive_seed, owned_global_rng, torch_generator
from fl_lightning.synthesis.samplers import (
    SAMPLERS,
    Sampler,
    integrate,
    latents,
    sample,
    sample_seeds,
    sigma_schedule,
)

SHAPE = (1, 8, 8)
STD = 0.5


def oracle(x: Tensor, sigma: Tensor) -> Tensor:
    """The best denoiser of data N(0, STD^2)."""
    return x * STD**2 / (sigma.to(x.dtype) ** 2 + STD**2)


def error(sampler: Sampler, steps: int) -> float:
    """Greatest error over pixels: the flow keeps x / sqrt(sigma^2 + STD^2)."""
    z = torch.randn(8, 1, 8, 8, generator=torch_generator(0), dtype=torch.float64)
    exact = z * 80 * STD / (80**2 + STD**2) ** 0.5
    return float((integrate(oracle, z, sampler, steps) - exact).abs().max())


def network(label_dim: int = 0) -> Precond:
    with owned_global_rng(0):
        unet = EDM2UNet(SHAPE, label_dim, width=8)
    with torch.no_grad():
        for parameter in unet.parameters():
            if parameter.ndim == 0:
                parameter.fill_(0.5)
    return Precond(unet).eval()


def test_schedule() -> None:
    sigmas = sigma_schedule(18)
    assert len(sigmas) == 19
    assert (sigmas[0], sigmas[-2], sigmas[-1]) == (80, 0.002, 0)
    assert (sigmas.diff() < 0).all()
    i, high, low = 5, 80 ** (1 / 7), 0.002 ** (1 / 7)
    assert float(sigmas[i]) == pytest.approx((high + i / 17 * (low - high)) ** 7)


@pytest.mark.parametrize(("sampler", "order"), [("heun", 2), ("dpm++", 2), ("euler", 1)])
def test_order(sampler: Sampler, order: int) -> None:
    errors = [error(sampler, steps) for steps in (32, 64, 128)]
    for coarse, fine in pairwise(errors):
        assert 0.8 * 2**order < coarse / fine < 1.25 * 2**order


def test_dpm_solver_reaches_heuns_error_with_half_of_the_evaluations() -> None:
    for steps, heun in ((18, 0.080), (50, 0.0089)):
        assert error("heun", steps) == pytest.approx(heun, rel=0.35)
        assert error("dpm++", steps) < 1.25 * error("heun", steps)
    assert error("euler", 50) > 5 * error("heun", 50)


@pytest.mark.parametrize(("sampler", "calls"), [("heun", 35), ("dpm++", 18), ("euler", 18)])
def test_evaluations_and_their_levels(sampler: Sampler, calls: int) -> None:
    levels: list[float] = []

    def counted(x: Tensor, sigma: Tensor) -> Tensor:
        levels.append(float(sigma))
        return oracle(x, sigma)

    integrate(counted, torch.zeros(1, *SHAPE), sampler, 18)
    assert len(levels) == calls
    assert levels[0] == pytest.approx(80)
    assert levels[-1] == pytest.approx(0.002)
    assert sorted(set(levels), reverse=True) == pytest.approx(sigma_schedule(18)[:-1].tolist(), rel=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_do_not_depend_on_the_batch(sampler: Sampler) -> None:
    denoiser, seeds = network(3), sample_seeds(0, "a", 1, range(33))
    labels = torch.arange(33) % 3
    whole = sample(denoiser, seeds, SHAPE, labels, sampler, 3, batch_size=33)
    for size in (1, 7, 32):
        assert torch.equal(sample(denoiser, seeds, SHAPE, labels, sampler, 3, batch_size=size), whole)
    order = torch.randperm(33, generator=torch_generator(1))
    assert torch.equal(sample(denoiser, seeds[order], SHAPE, labels[order], sampler, 3), whole[order])
    assert torch.equal(sample(denoiser, seeds[20:22], SHAPE, labels[20:22], sampler, 3), whole[20:22])


def test_seeds_have_owners() -> None:
    seeds = sample_seeds(0, "a", 1, range(5))
    assert seeds.shape == (5, 1)
    assert seeds.dtype == torch.int64
    assert int(seeds[3]) == derive_seed(0, "a", 1, 3, "sample")
    assert torch.equal(sample_seeds(0, "a", 1, [3, 1]), seeds[[3, 1]])
    others = torch.cat([seeds, sample_seeds(1, "a", 1, range(5)), sample_seeds(0, "b", 1, range(5))])
    assert len(torch.cat([others, sample_seeds(0, "a", 2, range(5))]).unique()) == 20


def test_latents_are_normal_and_touch_no_global_generator() -> None:
    state = torch.get_rng_state()
    seeds = sample_seeds(0, "a", 1, range(400))
    z = latents(seeds, SHAPE)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(z.mean()) == pytest.approx(0, abs=0.02)
    assert float(z.std()) == pytest.approx(1, abs=0.02)
    assert torch.equal(z[7], torch.randn(SHAPE, generator=torch.Generator().manual_seed(int(seeds[7]))))
    sample(network(), seeds[:2], SHAPE, steps=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_seeds_no_samples() -> None:
    assert sample(network(), sample_seeds(0, "a", 1, []), SHAPE).shape == (0, *SHAPE)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ValueError, match="sampler is 'ddim'; allowed: 'heun', 'dpm"):
        integrate(oracle, torch.zeros(1, *SHAPE), "ddim")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps is 1; it must be at least 2"):
        sigma_schedule(1)
    with pytest.raises(ValueError, match=r"sigma_min is 90; it must be in \(0, 80\)"):
        sigma_schedule(5, sigma_min=90, sigma_max=80)
    with pytest.raises(ValueError, match=r"torch.float32; they must be torch.int64"):
        latents(torch.zeros(3, 1), SHAPE)
    with pytest.raises(ValueError, match="batch_size is 0; it must be at least 1"):
        sample(network(), [1], SHAPE, batch_size=0)
