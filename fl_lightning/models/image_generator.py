"""A convolutional generator of small images from noise, as data-free distillation uses it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ImageGenerator(nn.Module):
    """Noise to images: a linear stem at a quarter of the size, twice (upsample, 3 x 3 convolution, BatchNorm,
    LeakyReLU), a last convolution and a sigmoid. The generator of DENSE's code (Zhang et al., 2022), which Co-Boosting
    took over.

    With ``num_classes`` it is that of FedFTG's code (Zhang et al., 2022): z and the one-hot class pass through a stem
    each, which give half of the channels. FedFTG's ends in a tanh and a BatchNorm, for pixels that are normalised; here
    both end in a sigmoid.

    Args:
        input_shape: (C, H, W) of an image; sides that 4 does not divide are met by upsampling to half (rounded up),
            then to the side itself.
        latent: Width of z, at least 1.
        width: Channels of the last hidden layer, at least 1; twice as many before.
        num_classes: Classes that are told; None for a generator that is told nothing.
    """

    def __init__(
        self, input_shape: tuple[int, int, int], latent: int = 256, width: int = 64, num_classes: int | None = None
    ) -> None:
        super().__init__()
        for name, value in (("latent", latent), ("width", width)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        channels, *size = input_shape
        self.num_classes = num_classes
        self.sizes = tuple([-(-side // part) for side in size] for part in (4, 2, 1))
        places = self.sizes[0][0] * self.sizes[0][1]
        self.stem = nn.Linear(latent, (1 if num_classes else 2) * width * places)
        if num_classes:
            self.class_stem = nn.Linear(num_classes, width * places)
        self.first = nn.BatchNorm2d(2 * width)
        self.second = nn.Sequential(
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)
        )
        self.third = nn.Sequential(
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    @torch.no_grad()
    def redraw(self, generator: torch.Generator) -> None:
        """Draw all weights anew, as DENSE's code does: N(0, 0.02^2), those of BatchNorm N(1, 0.02^2), biases 0.

        Args:
            generator: Owner of the draws, on the parameters' device.
        """
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d, nn.BatchNorm2d)):
                mean = 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0
                nn.init.normal_(module.weight, mean, 0.02, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Images (B, C, H, W) in (0, 1).

        Args:
            latents: z, (B, latent).
            labels: Classes, (B,) int64; read where there is a stem for them.
        """
        stems = [self.stem(latents)]
        if self.num_classes:
            stems.append(self.class_stem(F.one_hot(labels, self.num_classes).to(latents)))
        hidden = self.first(torch.cat(stems, 1).unflatten(1, (-1, *self.sizes[0])))
        hidden = self.second(F.interpolate(hidden, self.sizes[1]))
        return self.third(F.interpolate(hidden, self.sizes[2]))
