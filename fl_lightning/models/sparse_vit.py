"""Vision transformers that can be run on some of an image's patches, and asked which patches they look at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fl_lightning.models.timm_model import create_timm

_ASSETS = Path(__file__).parents[1] / "assets"
HEAD = "head."  # names of the classifier's parameters


class SparseViT(nn.Module):
    """A ViT of timm, or a tiny one for small images, that leaves out patches.

    Patches are numbered row by row. A left out patch is not embedded and enters no block; the others keep their own
    position embedding. Class and register tokens are always there.

    Pixels are not normalised here: the task's ``mean`` and ``std`` must be those of the weights.

    Args:
        input_shape: (C, H, W) of an image.
        num_classes: Width of the output.
        name: A plain ViT of timm with a class token, for example "deit_tiny_patch16_224"; null builds a tiny one from
            ``patch_size``, ``embed_dim``, ``depth`` and ``num_heads``, which are used for nothing else.
        pretrained: Load timm's weights (fetched once).
        img_size: Height and width in pixels that timm's model is built for; null takes its own (224). Pretrained position
            embeddings are resampled to it.
        patch_size: Height and width of a patch in pixels; divides the image.
        embed_dim: Width of a token, a multiple of ``num_heads``.
        depth: Blocks, at least 1.
        num_heads: Attention heads, at least 1.
        weights: Name of weights in the package's assets ("tiny-vit-digits") or a safetensors file, written by
            `ExportModel` or of timm: a pretrained body. Its classifier is left aside, so classes may differ.

    Attributes:
        patch: (height, width) of a patch in pixels.
        grid: (rows, columns) of patches.
        num_patches: N = rows x columns.

    Raises:
        ValueError: An unknown or unsupported model, or images or weights that do not fit it.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        name: str | None = None,
        pretrained: bool = False,
        img_size: int | None = None,
        patch_size: int = 4,
        embed_dim: int = 64,
        depth: int = 3,
        num_heads: int = 4,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        if name is not None:
            self.model: Any = create_timm(input_shape, num_classes, name, pretrained, img_size)
        elif pretrained or img_size is not None:
            raise ValueError(f"pretrained is {pretrained} and img_size {img_size}; without a name false and null")
        else:
            self.model = _tiny(input_shape, num_classes, patch_size, embed_dim, depth, num_heads)
        _check_supported(self.model, name)
        self.patch: tuple[int, int] = tuple(self.model.patch_embed.patch_size)
        self.grid: tuple[int, int] = tuple(self.model.patch_embed.grid_size)
        self.num_patches = self.grid[0] * self.grid[1]
        if weights is not None:
            if pretrained:
                raise ValueError(f"weights is {weights!r} and pretrained true; only one of them can be given")
            load_body(self.model, weights)

    def forward(self, input: Tensor, keep: Tensor | None = None, dense_embedding: bool = False) -> Tensor:
        """Class scores (B, num_classes).

        Args:
            input: (B, C, H, W).
            keep: (B, k) int64 in [0, N), the patches to look at, none twice; None for all. Then it is timm's own model.
            dense_embedding: Embed all patches and drop them after that: what SMI's code does, for the same result.

        Raises:
            ValueError: ``keep`` has another shape.
        """
        if keep is None:
            return self.model(input)
        return self.model.forward_head(self._features(input, keep, dense_embedding))

    def tokens(self, input: Tensor, keep: Tensor | None = None, dense_embedding: bool = False) -> Tensor:
        """Class scores (B, k, num_classes) of every patch's own token, read by the classifier; arguments as `forward`."""
        patches = self._features(input, keep, dense_embedding)[:, self.model.num_prefix_tokens :]
        return self.model.head(self.model.head_drop(self.model.fc_norm(patches)))

    def attention(self, input: Tensor, keep: Tensor | None = None, dense_embedding: bool = False) -> Tensor:
        """Attention of the class token to every patch in the last block, mean over heads, (B, k) in the order of ``keep``.

        A row sums to at most 1: the rest goes to the class and register tokens. Arguments as `forward`.
        """
        return self._class_attention(self._before_last(input, keep, dense_embedding))

    def forward_with_attention(
        self, input: Tensor, keep: Tensor | None = None, dense_embedding: bool = False
    ) -> tuple[Tensor, Tensor]:
        """What `forward` and `attention` return, in one pass."""
        x = self._before_last(input, keep, dense_embedding)
        return self.model.forward_head(self.model.norm(self.model.blocks[-1](x))), self._class_attention(x)

    def _features(self, input: Tensor, keep: Tensor | None, dense_embedding: bool) -> Tensor:
        """Tokens (B, prefix + k, d) after the last norm."""
        return self.model.norm(self.model.blocks[-1](self._before_last(input, keep, dense_embedding)))

    def _before_last(self, input: Tensor, keep: Tensor | None, dense_embedding: bool) -> Tensor:
        """Tokens (B, prefix + k, d) that enter the last block."""
        return self.model.blocks[:-1](self._embedded(input, keep, dense_embedding))

    def _embedded(self, input: Tensor, keep: Tensor | None, dense_embedding: bool) -> Tensor:
        """Tokens (B, prefix + k, d) that enter the first block."""
        model, prefix = self.model, self.model.num_prefix_tokens
        if keep is None:
            return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(input))))
        if keep.ndim != 2 or len(keep) != len(input) or keep.shape[1] < 1:
            raise ValueError(f"keep has shape {tuple(keep.shape)}; it must be ({len(input)}, k >= 1)")
        if dense_embedding:
            x = model.patch_embed(input)[torch.arange(len(keep), device=keep.device)[:, None], keep]
        else:
            embed = model.patch_embed.proj  # a convolution whose stride is its kernel: a linear layer on every patch
            x = F.linear(_Patches.apply(self._checked(input), keep, self.patch), embed.weight.flatten(1), embed.bias)
            x = model.patch_embed.norm(x)
        first = [model.cls_token] if model.reg_token is None else [model.cls_token, model.reg_token]
        start = torch.cat(first, 1).expand(len(x), -1, -1)
        if model.pos_embed is not None:
            offset = 0 if model.no_embed_class else prefix
            x = x + model.pos_embed[0, offset:][keep]
            start = start + model.pos_embed[:, :offset] if offset else start
        return model.norm_pre(model.pos_drop(torch.cat([start, x], 1)))

    def _checked(self, input: Tensor) -> Tensor:
        expected = (
            self.model.patch_embed.proj.in_channels,
            *(g * p for g, p in zip(self.grid, self.patch, strict=True)),
        )
        if tuple(input.shape[1:]) != expected:
            raise ValueError(f"images have shape {tuple(input.shape)}; it must be (B, {', '.join(map(str, expected))})")
        return input

    def _class_attention(self, x: Tensor) -> Tensor:
        """What `attention` returns, from the tokens x (B, T, d) that enter the last block.

        Fused attention returns no weights, so the class token's row is computed here.
        """
        block, prefix = self.model.blocks[-1], self.model.num_prefix_tokens
        attn = block.attn
        qkv = attn.qkv(block.norm1(x)).unflatten(2, (3, attn.num_heads, attn.head_dim))  # (B, T, 3, heads, width)
        query, key = attn.q_norm(qkv[:, 0, 0]), attn.k_norm(qkv[:, :, 1])
        weights = torch.einsum("bhd,bthd->bht", query * attn.scale, key).softmax(-1)
        return weights.mean(1)[:, prefix:]


class _Patches(torch.autograd.Function):
    """Pixels (B, k, C x height x width) of some patches of images (B, C, H, W); no patch twice.

    What is not looked at costs a fill with zeros in the gradient, and nothing here.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, keep: Tensor, patch: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.shape, ctx.patch = images.shape, patch
        cells, places = _cells(images, keep, patch)
        return cells[places].flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        gradient = outer.new_zeros(ctx.shape)
        (keep,) = ctx.saved_tensors
        cells, places = _cells(gradient, keep, ctx.patch)
        cells[places] = outer.unflatten(2, (-1, *ctx.patch))
        return gradient, None, None


def _cells(images: Tensor, keep: Tensor, patch: tuple[int, int]) -> tuple[Tensor, tuple[Any, ...]]:
    """A view (B, C, rows, height, columns, width), and the index that makes it (B, k, C, height, width)."""
    cells = images.unflatten(3, (-1, patch[1])).unflatten(2, (-1, patch[0]))
    columns, every = cells.shape[4], slice(None)
    return cells, (torch.arange(len(keep), device=keep.device)[:, None], every, keep // columns, every, keep % columns)


def _tiny(
    input_shape: tuple[int, int, int], num_classes: int, patch_size: int, embed_dim: int, depth: int, num_heads: int
) -> nn.Module:
    for option, value in (("patch_size", patch_size), ("depth", depth), ("num_heads", num_heads)):
        if value < 1:
            raise ValueError(f"{option} is {value}; it must be at least 1")
    channels, height, width = input_shape
    if height % patch_size or width % patch_size:
        raise ValueError(f"patch_size is {patch_size}; it must divide the images of {height} x {width}")
    if embed_dim < 1 or embed_dim % num_heads:
        raise ValueError(f"embed_dim is {embed_dim}; it must be a multiple of num_heads, {num_heads}")
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        (height, width),
        patch_size,
        channels,
        num_classes,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
    )


def _check_supported(model: Any, name: str | None) -> None:
    """Refuse by name what `SparseViT` would not run as timm does."""
    from timm.layers import Attention, PatchEmbed
    from timm.models.vision_transformer import Block, VisionTransformer

    if hasattr(model, "dist_token"):
        raise ValueError(f"name is {name!r}, which has a distillation token; only models with a class token alone")
    if type(model) is not VisionTransformer:
        raise ValueError(f"name is {name!r}, a {type(model).__name__}; it must be a plain VisionTransformer of timm")
    if model.cls_token is None:
        raise ValueError(f"name is {name!r}, which has no class token, whose attention would score the patches")
    if model.global_pool != "token":
        raise ValueError(f"name is {name!r}, which pools by {model.global_pool!r}; it must classify by its class token")
    parts: dict[str, tuple[Any, type]] = {"patch_embed": (model.patch_embed, PatchEmbed)}
    for block in model.blocks:
        parts |= {"block": (block, Block), "attention": (block.attn, Attention)}
        for part, (found, plain) in parts.items():
            if type(found) is not plain:
                raise ValueError(f"name is {name!r}, whose {part} is a {type(found).__name__}, not a {plain.__name__}")


def load_body(model: nn.Module, weights: str) -> None:
    """Load all parameters but the classifier's, in place.

    Args:
        model: A ViT of timm.
        weights: As for `SparseViT`.

    Raises:
        ValueError: No such weights, or their names or shapes are not the model's.
    """
    from safetensors.torch import load_file

    shipped = {path.stem: path for path in sorted(_ASSETS.glob("tiny-vit-*.safetensors"))}
    path = shipped.get(weights, Path(weights))
    if not path.is_file():
        raise ValueError(f"weights is {weights!r}; it must be one of {list(shipped)} or a safetensors file")
    found: Mapping[str, Tensor] = {
        name.removeprefix("network.").removeprefix("model."): value for name, value in load_file(path).items()
    }
    body = {name: value for name, value in model.state_dict().items() if not name.startswith(HEAD)}
    loaded = {name: value for name, value in found.items() if not name.startswith(HEAD)}
    if loaded.keys() != body.keys():
        missing, unknown = sorted(body.keys() - loaded.keys()), sorted(loaded.keys() - body.keys())
        raise ValueError(
            f"weights {weights!r} are of another model: they lack {missing[:3]} and have {unknown[:3]} over"
        )
    for name, value in body.items():
        if loaded[name].shape != value.shape:
            shapes = f"{tuple(loaded[name].shape)} in weights {weights!r} and {tuple(value.shape)} in the model"
            raise ValueError(f"{name} is {shapes}; image, patch and width must be those of the weights")
        value.copy_(loaded[name])  # detached: what state_dict gives shares the parameter's storage
