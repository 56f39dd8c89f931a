"""The denoising loss of EDM (Karras et al. 2022) with EDM2's uncertainty weighting (Karras et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fl_lightning.models.edm2 import MPConv, MPFourier


class EDMLoss(nn.Module):
    """lambda(sigma) / exp(u(sigma)) ||D(x + sigma n; sigma) - x||^2 + u(sigma), ln sigma ~ N(p_mean, p_std^2).

    Summed over pixels and averaged over the batch, as EDM2 does; with Adam the scale matters only for its epsilon.
    lambda(sigma) = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2. exp(u), one magnitude-preserving layer on Fourier
    features of ln(sigma) / 4, learns how large the error is at each noise level, so that every level weighs the same.

    Args:
        p_mean: Mean of ln sigma. FederatedFactory: -0.8.
        p_std: Standard deviation of ln sigma, above 0. FederatedFactory: 1.6.
        sigma_data: Standard deviation of the data, above 0.
        uncertainty: Whether u is learned; otherwise u = 0.
        features: Fourier features of u, at least 1.
    """

    def __init__(
        self,
        p_mean: float = -0.8,
        p_std: float = 1.6,
        sigma_data: float = 0.5,
        uncertainty: bool = True,
        features: int = 128,
    ) -> None:
        super().__init__()
        for name, value in (("p_std", p_std), ("sigma_data", sigma_data), ("features", features)):
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        self.p_mean, self.p_std, self.sigma_data = p_mean, p_std, sigma_data
        self.fourier = MPFourier(features) if uncertainty else None
        self.head = MPConv(features, 1) if uncertainty else None

    def uncertainty(self, sigma: Tensor) -> Tensor:
        """u(sigma) of (B,) noise levels, (B,)."""
        if self.fourier is None or self.head is None:
            return torch.zeros_like(sigma)
        return self.head(self.fourier(sigma.log() / 4)).squeeze(1)

    def weight(self, sigma: Tensor) -> Tensor:
        """lambda(sigma), the reciprocal of c_out^2."""
        return (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2

    def forward(
        self,
        denoiser: Callable[..., Tensor],
        x: Tensor,
        class_labels: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The loss of a batch, with one noise level and one noise for each image.

        Args:
            denoiser: D(x, sigma, class_labels), as `Precond`.
            x: (B, C, H, W) data in [-1, 1].
            class_labels: (B,) int64, where the denoiser is conditional.
            generator: Draws levels and noise; None is the global generator, which a participant lends to every fit.

        Returns:
            A scalar.
        """
        level = torch.randn(len(x), generator=generator, device=x.device, dtype=x.dtype)
        noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        sigma = (level * self.p_std + self.p_mean).exp()
        error = (denoiser(x + noise * sigma.view(-1, 1, 1, 1), sigma, class_labels) - x).square().flatten(1).sum(1)
        u = self.uncertainty(sigma)
        return (self.weight(sigma) / u.exp() * error + u * x[0].numel()).mean()
