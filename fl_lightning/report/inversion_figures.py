"""Figures of inverted images, as matplotlib Figures without pyplot: what was made, which patches were optimised, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_lightning.synthesis.inversion import pixel_mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STOPPED = 0.85  # grey level that stopped patches are shown in


def inversion_figure(
    images: Tensor, mask: Tensor, labels: Tensor, class_names: Sequence[str], attention: Tensor | None = None
) -> Figure:
    """A column for every image, with its class: the whole image, its kept patches, and the attention to its patches.

    Args:
        images: (B, C, H, W) in [0, 1], B >= 1; C is 1 or 3.
        mask: (B, N) bool, the kept patches of a grid of square patches; N = 1 is the whole image.
        labels: (B,) integers in [0, number of names).
        class_names: Position = label.
        attention: (B, N) at least 0, brightest where it is greatest in its image; None leaves the row out.

    Raises:
        ValueError: Shapes, values or labels out of range, or N that makes no grid.
    """
    from matplotlib.figure import Figure

    count = len(images)
    if images.ndim != 4 or count == 0 or images.shape[1] not in (1, 3) or not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(f"images must be (B >= 1, 1 or 3, H, W) in [0, 1], got shape {(*images.shape,)}")
    if mask.ndim != 2 or len(mask) != count or (attention is not None and attention.shape != mask.shape):
        shapes = f"{(*mask.shape,)} and {None if attention is None else (*attention.shape,)}"
        raise ValueError(f"mask and attention must have shape ({count}, N), got {shapes}")
    if (*labels.shape,) != (count,) or not (labels.min() >= 0 and labels.max() < len(class_names)):
        raise ValueError(f"labels must be {count} integers in [0, {len(class_names)}), got {labels.tolist()}")
    grid, patch = _grid(mask.shape[1], images.shape[2], images.shape[3])
    images = images.detach().float().cpu()
    shown = pixel_mask(mask.cpu(), grid, patch)
    rows = {"image": images, "kept patches": torch.where(shown, images, STOPPED)}
    if attention is not None:
        heat = attention.detach().float().cpu()
        heat = heat / heat.amax(1, keepdim=True).clamp_min(1e-12)
        rows["attention"] = pixel_mask(heat, grid, patch)
    height, width = images.shape[2:]
    figure = Figure(figsize=(1.0 + 0.9 * count, 0.4 + 0.9 * len(rows) * height / width), layout="constrained")
    panels = figure.subplots(len(rows), count, squeeze=False)
    for line, (name, pictures) in zip(panels, rows.items(), strict=True):
        for axes, picture in zip(line, pictures, strict=True):
            pixels = picture.permute(1, 2, 0).numpy()
            colours = "magma" if name == "attention" else "gray"
            pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
            axes.imshow(pixels, cmap=colours, vmin=0, vmax=1, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
        line[0].set_ylabel(name, fontsize=8)
    for axes, label in zip(panels[0], labels.tolist(), strict=True):
        axes.set_title(class_names[label], fontsize=8)
    return figure


def _grid(patches: int, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, columns) of square patches, and (height, width) of one, if there is such a grid; N = 1 may be oblong."""
    if patches == 1:
        return (1, 1), (height, width)
    side = math.isqrt(height * width // patches)
    if side < 1 or height % side or width % side or (height // side) * (width // side) != patches:
        raise ValueError(
            f"mask has N = {patches}; no grid of so many square patches fills images of {height} x {width}"
        )
    return (height // side, width // side), (side, side)
