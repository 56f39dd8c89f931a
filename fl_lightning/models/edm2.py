"""The EDM2 network for small images, its preconditioning, and diffusers' U-Net behind the same.

Written from the equations of EDM (Karras et al. 2022, preconditioning) and EDM2 (Karras et al. 2024, magnitude-preserving
layers). Every layer keeps the expected magnitude of its input, so there are no biases and no group normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-4
SILU_GAIN = 1 / 0.596  # the RMS of silu(x) for x ~ N(0, 1) is 0.596
CLIP = 256.0  # what float16 bears without trouble


def normalise(x: Tensor, dim: int | Sequence[int] | None = None, eps: float = EPS) -> Tensor:
    """Divide by the root mean square over ``dim`` (all but the first by default), which `eps` keeps from 0."""
    dims = tuple(range(1, x.ndim)) if dim is None else dim
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
    return x * (norm * math.sqrt(norm.numel() / x.numel()) + eps).reciprocal()  # cheaper backwards than a division


def mp_silu(x: Tensor) -> Tensor:
    """SiLU that keeps unit magnitude."""
    return F.silu(x) * SILU_GAIN


def mp_sum(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """(1 - t) a + t b, scaled so that independent inputs of unit magnitude give unit magnitude; t in [0, 1]."""
    return torch.lerp(a, b, t) * ((1 - t) ** 2 + t**2) ** -0.5


def mp_concat(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """Concatenate over channels; b contributes the share t of the magnitude whatever the numbers of channels."""
    na, nb = a.shape[1], b.shape[1]
    scale = math.sqrt((na + nb) / ((1 - t) ** 2 + t**2))
    return torch.cat([a * (scale * (1 - t) / math.sqrt(na)), b * (scale * t / math.sqrt(nb))], dim=1)


class MPConv(nn.Module):
    """Linear map or convolution without bias whose weight rows count by their direction only.

    Rows are normalised in the graph, so that gradients are orthogonal to them; `normalise_weights` keeps the parameters
    themselves at unit RMS, without which they would grow and the effective learning rate shrink.

    Args:
        inputs: Input channels, at least 1.
        outputs: Output channels, at least 1.
        kernel: Side of the kernel, odd; 0 for a linear map of (B, inputs).
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, *([kernel] * 2 if kernel else [])))
        self.scale = 1 / math.sqrt(self.weight[0].numel())
        self.initialise()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights from N(0, 1); without a generator from the global one, which whoever builds must own."""
        self.weight.normal_(generator=generator)

    def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        """``gain`` multiplies the output; it is applied to the weights, which are fewer."""
        dims = tuple(range(1, self.weight.ndim))
        norm = torch.linalg.vector_norm(self.weight, dim=dims, keepdim=True)
        weight = self.weight * (gain * self.scale / (norm * self.scale + EPS))
        return F.linear(x, weight) if weight.ndim == 2 else F.conv2d(x, weight, padding=weight.shape[-1] // 2)


@torch.no_grad()
def normalise_weights(module: nn.Module) -> None:
    """Forced weight normalisation (EDM2): every row of every `MPConv` in ``module`` to unit RMS, in place."""
    for layer in module.modules():
        if isinstance(layer, MPConv):
            layer.weight.copy_(normalise(layer.weight))


class MPFourier(nn.Module):
    """Fourier features sqrt(2) cos(2 pi (f c + phi)) of a number, f ~ N(0, 1), phi ~ U(0, 1), drawn once.

    The frequencies are persistent buffers: a network is not the same function without them.

    Args:
        channels: Number of features, at least 1.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.frequencies: Tensor
        self.phases: Tensor
        self.register_buffer("frequencies", torch.empty(channels))
        self.register_buffer("phases", torch.empty(channels))
        self.initialise()

    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw frequencies and phases; without a generator from the global one, which whoever builds must own."""
        self.frequencies.normal_(generator=generator)
        self.phases.uniform_(generator=generator)

    def forward(self, c: Tensor) -> Tensor:
        """(B,) to (B, channels)."""
        return torch.cos((torch.outer(c, self.frequencies) + self.phases) * (2 * math.pi)) * math.sqrt(2)


class _Block(nn.Module):
    """Residual block of the encoder or decoder, with optional resampling before and self-attention after."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        embedding: int,
        *,
        decoder: bool,
        resample: str = "keep",
        attention: bool = False,
        head: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.decoder, self.resample, self.dropout = decoder, resample, dropout
        self.heads = max(outputs // head, 1) if attention else 0
        if self.heads and outputs % self.heads:
            raise ValueError(f"head is {head}; a level of {outputs} channels is not divided by {self.heads} heads")
        self.skip = MPConv(inputs, outputs, 1) if inputs != outputs else None
        self.first = MPConv(inputs if decoder else outputs, outputs, 3)
        self.embed = MPConv(embedding, outputs)
        self.gain = nn.Parameter(torch.zeros(()))
        self.second = MPConv(outputs, outputs, 3)
        self.qkv = MPConv(outputs, 3 * outputs, 1) if attention else None
        self.project = MPConv(outputs, outputs, 1) if attention else None

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        if self.resample == "down":
            x = F.avg_pool2d(x, 2)
        elif self.resample == "up":
            x = F.interpolate(x, scale_factor=2, mode="nearest")
        if not self.decoder:
            x = normalise(x if self.skip is None else self.skip(x), dim=1)  # pixel norm
        # The constant of each SiLU is applied to the weights that follow it.
        y = self.first(F.silu(x), SILU_GAIN)
        y = F.silu(y * (self.embed(embedding, self.gain) + 1)[:, :, None, None])
        y = self.second(F.dropout(y, self.dropout, self.training) if self.dropout else y, SILU_GAIN)
        if self.decoder and self.skip is not None:
            x = self.skip(x)
        x = mp_sum(x, y, 0.3)
        if self.qkv is not None:
            x = mp_sum(x, self._attend(x), 0.3)
        return F.hardtanh(x, -CLIP, CLIP)  # a clamp whose gradient is one kernel

    def _attend(self, x: Tensor) -> Tensor:
        assert self.qkv is not None
        assert self.project is not None
        b, c, h, w = x.shape
        # (3, B, heads, pixels, channels of a head), each query, key and value of unit RMS
        parts = self.qkv(x).view(b, 3, self.heads, c // self.heads, h * w).permute(1, 0, 2, 4, 3)
        q, k, v = normalise(parts, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.project(y.transpose(-1, -2).reshape(b, c, h, w))


class EDM2UNet(nn.Module):
    """U-Net F of magnitude-preserving layers (EDM2, Karras et al. 2024); `Precond` makes a denoiser of it.

    With the defaults 144,826 parameters on 1 x 8 x 8. FederatedFactory's network for 32 x 32 colour images is width 128,
    multipliers (1, 2, 2, 2), blocks 3, attention (16, 8), dropout 0.3, middle 2 (50.7 M parameters).

    Args:
        input_shape: (C, H, W) of an image; H and W divisible by 2^(levels - 1).
        label_dim: Number of classes the network is conditioned on; 0 for none.
        width: Channels of the first level, at least 1.
        multipliers: Channels of each level as multiples of ``width``; every level but the first halves the image.
        blocks: Residual blocks of a level of the encoder, at least 1; the decoder has one more.
        attention: Heights of the levels whose blocks attend.
        middle: Blocks at the start of the decoder, in [1, 2]; EDM2 has 2.
        middle_attention: Whether the first of them attends; None: where any level does. EDM2's always does.
        head: Channels of an attention head, at least 1: as many heads as fit must divide the channels of their level.
        dropout: In [0, 1).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        label_dim: int = 0,
        width: int = 16,
        multipliers: Sequence[int] = (1, 2),
        blocks: int = 1,
        attention: Sequence[int] = (),
        middle: int = 1,
        middle_attention: bool | None = None,
        head: int = 64,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("blocks", blocks), ("head", head), ("multipliers", min(multipliers))):
            _at_least(name, value, 1)
        _at_least("label_dim", label_dim, 0)
        if middle not in (1, 2):
            raise ValueError(f"middle is {middle}; it must be in [1, 2]")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}; it must be in [0, 1)")
        check_size(input_shape, len(multipliers))
        channels, height, _ = input_shape
        widths = [width * m for m in multipliers]
        embedding = max(widths)
        self.label_dim = label_dim
        self.fourier = MPFourier(widths[0])
        self.embed_noise = MPConv(widths[0], embedding)
        self.embed_label = MPConv(label_dim, embedding) if label_dim else None
        attends = [height >> level in attention for level in range(len(widths))]
        if missing := [a for a in attention if a not in [height >> level for level in range(len(widths))]]:
            raise ValueError(f"attention is {list(attention)}; no level has height {missing[0]}")
        top = any(attends) if middle_attention is None else middle_attention

        def block(inputs: int, outputs: int, attention: bool = False, **options: object) -> _Block:
            return _Block(inputs, outputs, embedding, attention=attention, head=head, dropout=dropout, **options)  # type: ignore[arg-type]

        now = widths[0]
        self.input = MPConv(channels + 1, now, 3)  # one more for the constant channel that stands for biases
        self.encoder, skips = nn.ModuleList(), [now]
        for level, out in enumerate(widths):
            if level:
                self.encoder.append(block(now, now, decoder=False, resample="down"))
                skips.append(now)
            for _ in range(blocks):
                self.encoder.append(block(now, out, attends[level], decoder=False))
                now = out
                skips.append(now)
        # Blocks of the decoder, and how many of them take what the encoder left.
        self.decoder, self.takes_skip = nn.ModuleList(), list[bool]()
        for level, out in reversed(list(enumerate(widths))):
            if level == len(widths) - 1:
                starts = [block(now, now, top and not i, decoder=True) for i in range(middle)]
            else:
                starts = [block(now, now, decoder=True, resample="up")]
            self.decoder.extend(starts)
            for _ in range(blocks + 1):
                self.decoder.append(block(now + skips.pop(), out, attends[level], decoder=True))
                now = out
            self.takes_skip += [False] * len(starts) + [True] * (blocks + 1)
        self.output = MPConv(now, channels, 3)
        self.output_gain = nn.Parameter(torch.zeros(()))

    def normalise_weights(self) -> None:
        """Forced weight normalisation; after every optimizer step, by whoever trains."""
        normalise_weights(self)

    def forward(self, x: Tensor, c_noise: Tensor, class_labels: Tensor | None = None) -> Tensor:
        """F(x, c_noise).

        Args:
            x: (B, C, H, W) of unit magnitude.
            c_noise: (B,) noise levels, ln(sigma) / 4.
            class_labels: (B,) int64 in [0, label_dim); needed just where label_dim is above 0.

        Returns:
            (B, C, H, W).

        Raises:
            ValueError: Labels are missing, or given to an unconditional network.
        """
        check_labels(self.label_dim, class_labels)
        embedding = self.embed_noise(self.fourier(c_noise))
        if self.embed_label is not None and class_labels is not None:
            one_hot = F.one_hot(class_labels, self.label_dim).to(embedding.dtype)
            embedding = mp_sum(embedding, self.embed_label(one_hot, math.sqrt(self.label_dim)))
        embedding = mp_silu(embedding)
        x = self.input(torch.cat([x, torch.ones_like(x[:, :1])], dim=1))
        skips = [x]
        for block in self.encoder:
            x = block(x, embedding)
            skips.append(x)
        for block, takes in zip(self.decoder, self.takes_skip, strict=True):
            x = block(mp_concat(x, skips.pop()) if takes else x, embedding)
        return self.output(x, self.output_gain)


class DiffusersUNet(nn.Module):
    """diffusers' ``UNet2DModel`` as F, for comparison: GroupNorm and biases in place of magnitude preservation.

    With the defaults 159,697 parameters on 1 x 8 x 8. Its output layer starts at random, not at 0.

    Args:
        input_shape: (C, H, W) of an image; H and W divisible by 2^(levels - 1).
        label_dim: Number of classes the network is conditioned on; 0 for none.
        width: Channels of the first level, a multiple of ``groups``.
        multipliers: Channels of each level as multiples of ``width``.
        blocks: Residual blocks of a level of the encoder, at least 1; the decoder has one more.
        attention: Heights of the levels whose blocks attend; the middle attends where any level does.
        groups: Groups of channels of a GroupNorm, at least 1.
        dropout: In [0, 1).
    """

    # The positional embedding is made for times in [0, 1000]: sigma_min of EDM goes to 0, sigma_max to 1000.
    _LOW, _HIGH = math.log(0.002), math.log(80.0)

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        label_dim: int = 0,
        width: int = 16,
        multipliers: Sequence[int] = (1, 2),
        blocks: int = 1,
        attention: Sequence[int] = (),
        groups: int = 8,
        dropout: float = 0.1,
    ) -> None:
        from diffusers import UNet2DModel

        super().__init__()
        check_size(input_shape, len(multipliers))
        if groups < 1 or width % groups:
            raise ValueError(f"groups is {groups}; it must be at least 1 and divide width {width}")
        channels, height, side = input_shape
        attends = [height >> level in attention for level in range(len(multipliers))]
        self.label_dim = label_dim
        self.unet = UNet2DModel(
            sample_size=(height, side),
            in_channels=channels,
            out_channels=channels,
            down_block_types=tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in attends),
            up_block_types=tuple("AttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attends)),
            block_out_channels=tuple(width * m for m in multipliers),
            layers_per_block=blocks,
            norm_num_groups=groups,
            dropout=dropout,
            add_attention=any(attends),
            num_class_embeds=label_dim or None,
        )

    def forward(self, x: Tensor, c_noise: Tensor, class_labels: Tensor | None = None) -> Tensor:
        """As `EDM2UNet.forward`."""
        check_labels(self.label_dim, class_labels)
        time = 1000 * (4 * c_noise - self._LOW) / (self._HIGH - self._LOW)
        return self.unet(x, time, class_labels=class_labels, return_dict=False)[0]


class Precond(nn.Module):
    """The denoiser D(x; sigma) = c_skip x + c_out F(c_in x, c_noise) (EDM, Karras et al. 2022).

    Args:
        backbone: F(x, c_noise, class_labels).
        sigma_data: Standard deviation of the data, above 0.
    """

    def __init__(self, backbone: nn.Module, sigma_data: float = 0.5) -> None:
        super().__init__()
        if not sigma_data > 0:
            raise ValueError(f"sigma_data is {sigma_data}; it must be above 0")
        self.backbone, self.sigma_data = backbone, sigma_data

    def coefficients(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c_skip, c_out, c_in and c_noise of noise levels of any shape, above 0."""
        total = sigma**2 + self.sigma_data**2
        return self.sigma_data**2 / total, sigma * self.sigma_data * total**-0.5, total**-0.5, sigma.log() / 4

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor | None = None) -> Tensor:
        """Denoise.

        Args:
            x: (B, C, H, W) data in [-1, 1] plus noise of standard deviation sigma.
            sigma: (B,), or a scalar for the whole batch; above 0.
            class_labels: (B,) int64, where the backbone is conditional.

        Returns:
            (B, C, H, W), the expected data, of the type of x.
        """
        sigma = sigma.to(x).expand(len(x))
        c_skip, c_out, c_in, c_noise = self.coefficients(sigma)
        c_skip, c_out, c_in = (c.view(-1, 1, 1, 1) for c in (c_skip, c_out, c_in))
        return c_skip * x + c_out * self.backbone(c_in * x, c_noise, class_labels).to(x.dtype)


def check_size(input_shape: tuple[int, int, int], levels: int) -> None:
    """Refuse images that do not halve evenly ``levels - 1`` times."""
    factor = 2 ** (levels - 1)
    if any(side < factor or side % factor for side in input_shape[1:]):
        raise ValueError(
            f"input_shape is {tuple(input_shape)}; with {levels} levels height and width must be divisible by {factor}: "
            "resize the images or take fewer multipliers"
        )


def check_labels(label_dim: int, class_labels: Tensor | None) -> None:
    """Refuse labels that a network does not take, and their absence where it does."""
    if (class_labels is None) != (label_dim == 0):
        wanted = f"(B,) integers in [0, {label_dim})" if label_dim else "None, as the network is unconditional"
        raise ValueError(f"class_labels is {class_labels}; it must be {wanted}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
