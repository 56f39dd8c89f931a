"""Deterministic samplers of the probability flow of EDM (Karras et al. 2022): Heun, DPM-Solver++ and Euler.

Every sample has a seed of its own, so that it is the same in whichever batch, order and process it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.rng import derive_seed

Sampler = Literal["heun", "dpm++", "euler"]
SAMPLERS: tuple[Sampler, ...] = ("heun", "dpm++", "euler")
# Kernels are chosen by the number of rows, and round differently; none of ours does at multiples of this.
ROWS = 16
# (B, C, H, W) and a scalar noise level to the denoised (B, C, H, W).
Denoise = Callable[[Tensor, Tensor], Tensor]


def sigma_schedule(
    steps: int,
    sigma_min: float = 0.002,
    sigma_max: float = 80.0,
    rho: float = 7.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Noise levels from ``sigma_max`` down to ``sigma_min``, then 0.

    Args:
        steps: Number of steps, at least 2.
        sigma_min: Last level above 0.
        sigma_max: First level, above ``sigma_min``.
        rho: How much denser the levels are where there is little noise, above 0.
        dtype: Of the result.

    Returns:
        (steps + 1,), strictly decreasing.
    """
    if steps < 2:
        raise ValueError(f"steps is {steps}; it must be at least 2")
    if not 0 < sigma_min < sigma_max:
        raise ValueError(f"sigma_min is {sigma_min}; it must be in (0, {sigma_max})")
    if not rho > 0:
        raise ValueError(f"rho is {rho}; it must be above 0")
    high, low = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    sigmas = torch.linspace(high, low, steps, dtype=torch.float64) ** rho
    sigmas[0], sigmas[-1] = sigma_max, sigma_min  # not off by the rounding of a root
    return torch.cat([sigmas, sigmas.new_zeros(1)]).to(dtype)


def heun(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """Second-order integration from ``x`` of noise level sigmas[0]; the step to 0 is Euler's: 2 N - 1 evaluations.

    Args:
        denoise: The denoiser.
        x: (B, C, H, W), data plus noise of standard deviation sigmas[0].
        sigmas: (N + 1,), strictly decreasing to 0.

    Returns:
        (B, C, H, W), the samples.
    """
    sigmas = sigmas.to(x.device)
    for i, (sigma, after) in enumerate(pairwise(sigmas)):
        step = (after - sigma).to(x.dtype)
        slope = (x - denoise(x, sigma)) / sigma.to(x.dtype)
        moved = x + step * slope
        if i < len(sigmas) - 2:
            slope = (slope + (moved - denoise(moved, after)) / after.to(x.dtype)) / 2
            moved = x + step * slope
        x = moved
    return x


def scheduled(denoise: Denoise, x: Tensor, scheduler: Any, steps: int) -> Tensor:
    """Integration by a scheduler of diffusers in EDM's formulation, one evaluation a step."""
    scheduler.set_timesteps(steps)
    # The schedulers precondition a raw network; a denoiser has done that itself.
    scheduler.precondition_outputs = lambda sample, denoised, sigma: denoised
    for time, sigma in zip(scheduler.timesteps, scheduler.sigmas[:-1], strict=True):
        scheduler.scale_model_input(x, time)  # notes the step; what it returns is the input of a raw network
        x = scheduler.step(denoise(x, sigma.to(x.device)), time, x).prev_sample
    return x


def integrate(
    denoise: Denoise,
    latents: Tensor,
    sampler: Sampler = "heun",
    steps: int = 18,
    sigma_min: float = 0.002,
    sigma_max: float = 80.0,
    rho: float = 7.0,
) -> Tensor:
    """Turn Gaussian latents into samples.

    Args:
        denoise: The denoiser.
        latents: (B, C, H, W) standard normal values.
        sampler: "heun" (2 N - 1 evaluations), "dpm++" (DPM-Solver++ 2M, N evaluations, as exact) or "euler" (N).
        steps: N, at least 2. FederatedFactory: 50 steps of Heun.
        sigma_min: Least noise level, above 0.
        sigma_max: Greatest noise level.
        rho: Shape of the schedule, above 0.

    Returns:
        (B, C, H, W) of the latents' type.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler is {sampler!r}; allowed: {', '.join(map(repr, SAMPLERS))}")
    sigmas = sigma_schedule(steps, sigma_min, sigma_max, rho)
    x = latents * sigma_max  # not the schedulers' init_noise_sigma, which is sqrt(sigma_max^2 + 1)
    if sampler == "heun":
        return heun(denoise, x, sigmas)
    from diffusers import EDMDPMSolverMultistepScheduler, EDMEulerScheduler

    scheduler = EDMDPMSolverMultistepScheduler if sampler == "dpm++" else EDMEulerScheduler
    return scheduled(denoise, x, scheduler(sigma_min=sigma_min, sigma_max=sigma_max, rho=rho), steps)


def sample_seeds(seed: int, client: object, label: int, indices: Sequence[int] | range) -> Tensor:
    """Seeds of a factory's samples: of (run, client, class, index), never of how many samples came before.

    Returns:
        (N, 1) int64 in [0, 2^63), which `TensorExamples` can hold as inputs.
    """
    seeds = [derive_seed(seed, client, label, int(index), "sample") for index in indices]
    return torch.tensor(seeds, dtype=torch.int64).view(-1, 1)


def latents(seeds: Tensor | Sequence[int], shape: Sequence[int]) -> Tensor:
    """Standard normal latents, each drawn by its own seed on the CPU.

    Args:
        seeds: (N,) or (N, 1) int64 in [0, 2^63).
        shape: (C, H, W) of one.

    Returns:
        (N, C, H, W) float32.
    """
    generator, out = torch.Generator(), torch.empty(len(seeds), *shape)
    for row, seed in zip(out, _as_list(seeds), strict=True):
        torch.randn(tuple(shape), generator=generator.manual_seed(seed), out=row)
    return out


@torch.no_grad()
def sample(
    denoiser: Callable[..., Tensor],
    seeds: Tensor | Sequence[int],
    shape: Sequence[int],
    labels: Tensor | None = None,
    sampler: Sampler = "heun",
    steps: int = 18,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    **schedule: float,
) -> Tensor:
    """Draw samples, one for each seed: the same whichever others are drawn beside it.

    On a CPU they are the same to the last bit for every ``batch_size``; elsewhere for the same one, since every pass then
    has as many rows.

    Args:
        denoiser: D(x, sigma, class_labels), as `Precond`, on ``device``, without dropout.
        seeds: (N,) or (N, 1) int64 in [0, 2^63).
        shape: (C, H, W) of a sample.
        labels: (N,) int64 classes, where the denoiser is conditional.
        sampler: See `integrate`.
        steps: See `integrate`.
        batch_size: Samples at a time, at least 1; rounded up to a multiple of 16.
        device: Where the denoiser is.
        **schedule: ``sigma_min``, ``sigma_max``, ``rho``; see `integrate`.

    Returns:
        (N, C, H, W) float32 on ``device``, about in [-1, 1].
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    numbers, parts = _as_list(seeds), []
    batch_size = _round_up(batch_size)
    for start in range(0, len(numbers), batch_size):
        rows = torch.arange(start, min(start + batch_size, len(numbers)))
        count = len(rows)
        padded = batch_size if torch.device(device).type != "cpu" else _round_up(count)
        rows = torch.cat([rows, rows[-1:].expand(padded - count)])
        own = None if labels is None else labels[rows.to(labels.device)].to(device)
        noise = latents([numbers[row] for row in rows.tolist()], shape).to(device)
        drawn = integrate(partial(_denoise, denoiser, own), noise, sampler, steps, **schedule)
        parts.append(drawn[:count])
    return torch.cat(parts) if parts else torch.empty(0, *shape, device=device)


def _denoise(denoiser: Callable[..., Tensor], labels: Tensor | None, x: Tensor, sigma: Tensor) -> Tensor:
    return denoiser(x, sigma, labels)


def _round_up(count: int) -> int:
    return -(-count // ROWS) * ROWS


def _as_list(seeds: Tensor | Sequence[int]) -> list[int]:
    if isinstance(seeds, Tensor):
        if seeds.dtype != torch.int64:
            raise ValueError(f"seeds are {seeds.dtype}; they must be torch.int64, as a float would lose digits")
        seeds = seeds.flatten().tolist()
    return [int(seed) for seed in seeds]
