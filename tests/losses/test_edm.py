"""EDM's loss against its equation, with and without learned uncertainty."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fl_lightning.losses.edm import EDMLoss
from fl_lightning.rng import owned_global_rng, torch_generator


def half(x: Tensor, sigma: Tensor, class_labels: Tensor | None = None) -> Tensor:
    return x / 2


def images(count: int = 6) -> Tensor:
    return torch.randn(count, 2, 3, 3, generator=torch_generator(1), dtype=torch.float64)


def draws(x: Tensor) -> tuple[Tensor, Tensor]:
    """Levels and noise as the loss draws them."""
    generator = torch_generator(5)
    level = torch.randn(len(x), generator=generator, dtype=x.dtype)
    return (level * 1.6 - 0.8).exp(), torch.randn(x.shape, generator=generator, dtype=x.dtype)


@pytest.mark.parametrize("uncertainty", [False, True])
def test_equation(uncertainty: bool) -> None:
    with owned_global_rng(0):
        loss = EDMLoss(uncertainty=uncertainty).double()
    x = images()
    sigma, noise = draws(x)
    expected = 0.0
    for image, s, n in zip(x, sigma, noise, strict=True):
        u = loss.uncertainty(s[None])[0] if uncertainty else torch.zeros((), dtype=torch.float64)
        weight = (s**2 + 0.25) / (s * 0.5) ** 2
        expected += (weight / u.exp() * ((image + s * n) / 2 - image) ** 2 + u).sum() / len(x)
    assert torch.allclose(loss(half, x, generator=torch_generator(5)), expected, rtol=1e-12)
    assert (len(list(loss.parameters())) == 1) == uncertainty


def test_the_best_uncertainty_is_the_log_of_the_error() -> None:
    with owned_global_rng(0):
        loss = EDMLoss()
    x = torch.zeros(1024, 1, 2, 2)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.03)
    for step in range(250):
        optimizer.zero_grad()
        # An error of 3 c_out per pixel, so that lambda * error = 9 at every level.
        denoiser = lambda noisy, sigma, _=None: 3 * (loss.weight(sigma) ** -0.5).view(-1, 1, 1, 1).expand_as(noisy)  # noqa: E731
        loss(denoiser, x, generator=torch_generator(step)).backward()
        optimizer.step()
    u = loss.uncertainty(torch.tensor([0.05, 0.2, 0.45, 1.0, 2.0]))
    assert torch.allclose(u, torch.tensor(9.0).log(), atol=0.3)


def test_levels_are_log_normal() -> None:
    seen: list[Tensor] = []
    EDMLoss(p_mean=-0.4, p_std=1.0)(
        lambda x, sigma, _=None: seen.append(sigma) or x, torch.zeros(20_000, 1, 1, 1), generator=torch_generator(0)
    )
    assert float(seen[0].log().mean()) == pytest.approx(-0.4, abs=0.03)
    assert float(seen[0].log().std()) == pytest.approx(1.0, abs=0.03)


def test_without_a_generator_the_lent_one_draws() -> None:
    with owned_global_rng(0):
        loss = EDMLoss(uncertainty=False)
    values = []
    for seed in (0, 0, 1):
        with owned_global_rng(seed, "fit"):
            values.append(float(loss(half, images())))
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize("name", ["p_std", "sigma_data", "features"])
def test_wrong_values_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be above 0"):
        EDMLoss(**{name: 0})
