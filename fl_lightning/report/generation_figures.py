"""Figures of generated images, as matplotlib Figures without pyplot: samples by class, features beside real ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fl_lightning.report.figures import COLOURS
from fl_lightning.rng import derive_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def samples_figure(images: Tensor, labels: Tensor, class_names: Sequence[str], per_class: int = 8) -> Figure:
    """A row of images for every class that has any, in the order given.

    Rows may stand for anything else that has names, such as noise levels or steps of training.

    Args:
        images: (N, C, H, W) in [0, 1], N >= 1; C is 1 or 3.
        labels: (N,) integers in [0, number of names).
        class_names: Position = label.
        per_class: Images in a row at most, positive; places left over stay white.

    Raises:
        ValueError: Shapes, values or labels out of range.
    """
    from matplotlib.figure import Figure

    if images.ndim != 4 or len(images) == 0 or images.shape[1] not in (1, 3) or (*labels.shape,) != (len(images),):
        shapes = f"{(*images.shape,)} and {(*labels.shape,)}"
        raise ValueError(f"images and labels must have shapes (N >= 1, 1 or 3, H, W) and (N,), got {shapes}")
    _check_labels(labels, class_names)
    if not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(f"images must lie in [0, 1], got {images.min():g} to {images.max():g}")
    if per_class < 1:
        raise ValueError(f"per_class must be positive, got {per_class}")
    images, labels = images.detach().float().cpu(), labels.cpu()
    present = labels.unique().tolist()
    rows = [images[labels == label][:per_class] for label in present]
    columns, (height, width) = max(map(len, rows)), images.shape[2:]
    # One picture with a white line between the images: hundreds of axes would take seconds to draw.
    page = torch.ones(images.shape[1], len(rows) * (height + 1) - 1, columns * (width + 1) - 1)
    for row, shown in enumerate(rows):
        for column, image in enumerate(shown):
            top, left = row * (height + 1), column * (width + 1)
            page[:, top : top + height, left : left + width] = image
    figure = Figure(figsize=(1.4 + 0.7 * columns, 0.4 + 0.7 * len(rows) * height / width), layout="constrained")
    axes = figure.subplots()
    pixels = page.permute(1, 2, 0).numpy()
    axes.imshow(pixels[..., 0] if len(page) == 1 else pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    centres = [row * (height + 1) + (height - 1) / 2 for row in range(len(rows))]
    axes.set_yticks(centres, [class_names[label] for label in present])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def features_figure(
    real: tuple[Tensor, Tensor],
    generated: tuple[Tensor, Tensor],
    class_names: Sequence[str],
    *,
    method: str = "pca",
    per_class: int = 200,
    seed: int = 0,
) -> Figure:
    """Features of real and generated images in two dimensions, a panel for each class over all the real ones.

    Args:
        real: Features (N, d) and labels (N,); at least 3 examples, d >= 2.
        generated: Features (M, d) and labels (M,), M >= 1.
        class_names: Position = label.
        method: ``pca``, the plane in which the *real* features vary most, so that pictures of several generators can be
            compared; or ``tsne``, fitted to both, where neighbourhoods count and distances between groups mean nothing.
        per_class: Examples of either kind and class at most, the first ones; positive.
        seed: Of the run, for t-SNE.

    Raises:
        ValueError: Shapes or labels that do not fit, too few examples, or another method.
    """
    from matplotlib.figure import Figure

    if method not in ("pca", "tsne"):
        raise ValueError(f"method must be 'pca' or 'tsne', got {method!r}")
    if per_class < 1:
        raise ValueError(f"per_class must be positive, got {per_class}")
    for points, labels in (real, generated):
        if points.ndim != 2 or points.shape[1] != real[0].shape[1] or (*labels.shape,) != (len(points),):
            raise ValueError(f"features and labels must be (N, d) and (N,), got {(*points.shape,)}, {(*labels.shape,)}")
        _check_labels(labels, class_names)
    if len(real[0]) < 3 or len(generated[0]) < 1 or real[0].shape[1] < 2:
        shapes = f"{(*real[0].shape,)} and {(*generated[0].shape,)}"
        raise ValueError(f"at least 3 real and 1 generated example of 2 features or more are needed, got {shapes}")
    (ours, our_labels), (theirs, their_labels) = (
        _first(points, labels, per_class) for points, labels in (real, generated)
    )
    if method == "pca":
        from sklearn.decomposition import PCA

        plane = PCA(2, svd_solver="full").fit(ours)
        placed, placed_generated = plane.transform(ours), plane.transform(theirs)
        names = [f"component {n + 1} ({share:.0%})" for n, share in enumerate(plane.explained_variance_ratio_)]
    else:
        from sklearn.manifold import TSNE

        both = np.concatenate([ours, theirs])
        # Perplexity counts neighbours, of which there must be some more: a third of the examples at most.
        perplexity, state = min(30.0, (len(both) - 1) / 3), derive_seed(seed, "t-SNE") % 2**32
        both = TSNE(2, perplexity=perplexity, init="pca", random_state=state, n_jobs=1).fit_transform(both)
        placed, placed_generated, names = both[: len(ours)], both[len(ours) :], ["t-SNE 1", "t-SNE 2"]
    shown = sorted({*our_labels.tolist(), *their_labels.tolist()})
    columns = min(5, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(1.0 + 2.4 * columns, 0.9 + 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, label in zip(panels, shown, strict=False):
        mine, its = placed[our_labels == label], placed_generated[their_labels == label]
        axes.scatter(*placed.T, s=4, color="0.85", linewidths=0, label="real, all classes")
        axes.scatter(*mine.T, s=14, facecolors="none", edgecolors=COLOURS[0], linewidths=0.8, label="real, this class")
        axes.scatter(*its.T, s=12, marker="x", color=COLOURS[1], linewidths=0.8, label="generated, this class")
        axes.set_title(class_names[label], fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    figure.supxlabel(names[0], fontsize=10)
    figure.supylabel(names[1], fontsize=10)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=9
    )
    return figure


def _first(points: Tensor, labels: Tensor, per_class: int) -> tuple[np.ndarray, np.ndarray]:
    """The first ``per_class`` examples of every class, as arrays."""
    owner = labels.cpu().numpy()
    keep = np.sort(np.concatenate([np.flatnonzero(owner == label)[:per_class] for label in np.unique(owner)]))
    return points.detach().cpu().double().numpy()[keep], owner[keep]


def _check_labels(labels: Tensor, class_names: Sequence[str]) -> None:
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(class_names)):
        raise ValueError(f"labels must lie in [0, {len(class_names)}), got {labels.min()} to {labels.max()}")
