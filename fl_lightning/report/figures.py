"""Figures of a run and of a comparison, as matplotlib Figures without pyplot, hence without global state or a display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours for all kinds of colour vision, without the yellow that is too pale for a line on white. A
# variant also has a line style and a marker of its own, because seven hues are fewer than twelve variants.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^v<>PX*ph"


def confusion_figure(matrix: Tensor | np.ndarray, class_names: Sequence[str]) -> Figure:
    """A confusion matrix: colour is the share of the true class, the number in a cell the count.

    Args:
        matrix: Counts, (C, C), >= 0; rows are true classes. Beyond 20 classes no counts are written.
        class_names: C names.

    Raises:
        ValueError: ``matrix`` is not (C, C).
    """
    from matplotlib.figure import Figure

    counts, number = np.asarray(matrix), len(class_names)
    if counts.shape != (number, number):
        raise ValueError(f"matrix must have shape {(number, number)}, got {counts.shape}")
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = min(max(4.0, 1.6 + 0.5 * number), 14.0)
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    size = 9.0 if number <= 50 else max(4.0, 480 / number)
    axes.set_xticks(range(number), class_names, rotation=45, ha="right", rotation_mode="anchor", fontsize=size)
    axes.set_yticks(range(number), class_names, fontsize=size)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if number <= 20:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if share[row, column] > 0.5 else "black"
                axes.text(column, row, f"{count:g}", ha="center", va="center", color=colour, fontsize=8)
    return figure


def curves_figure(curves: Mapping[str, Mapping[int, Sequence[tuple[int, float]]]], metric: str) -> Figure:
    """Learning curves: a line through the mean over seeds, a band of ±1 sample standard deviation where seeds are several.

    A round's mean is over the seeds that have a finite value there.

    Args:
        curves: {variant: {seed: [(round, value), ...]}}; readable up to about 12 variants.
        metric: Label of the vertical axis.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    axes = figure.subplots()
    for number, (variant, seeds) in enumerate(curves.items()):
        rounds, mean, std = _over_seeds(seeds)
        colour, dash, marker = _style(number)
        seeds_text = "seed" if len(seeds) == 1 else "seeds"
        # Markers are staggered, or twelve of them would sit on top of each other at every tenth of the axis.
        every = max(1, len(rounds) // 8)
        axes.plot(
            rounds,
            mean,
            dash,
            color=colour,
            marker=marker,
            markersize=5,
            markevery=(number % every, every),
            linewidth=1.6,
            label=f"{variant} ({len(seeds)} {seeds_text})",
        )
        axes.fill_between(rounds, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel(metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _dress(axes, "both")
    if curves:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9, handlelength=3.2)
    return figure


def bars_figure(finals: Mapping[str, Mapping[int, float]], metric: str) -> Figure:
    """Final values: a bar to the mean over seeds, ±1 sample standard deviation, and a dot per seed below it.

    Args:
        finals: {variant: {seed: value}}; values that are not finite are left out.
        metric: Label of the value axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.2 + 0.42 * max(len(finals), 2)), layout="constrained")
    axes = figure.subplots()
    for place, (variant, by_seed) in enumerate(finals.items()):
        values = np.array([value for value in by_seed.values() if math.isfinite(value)])
        if not len(values):
            continue
        mean, std = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0
        colour = COLOURS[place % len(COLOURS)]
        axes.barh(place, mean, height=0.7, color=colour, alpha=0.45, label=variant)
        if std:
            axes.errorbar(mean, place, xerr=std, color="black", capsize=3, linewidth=1.2)
        axes.plot(values, np.full(len(values), place + 0.22), "o", color=colour, markersize=4, markeredgecolor="white")
        text = f"{mean:.3g} ± {std:.2g}" if len(values) > 1 else f"{mean:.3g}"
        right = max(mean + std, float(values.max()), 0.0)
        axes.annotate(text, (right, place), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(finals)), list(finals))
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel(f"{metric} (mean ± standard deviation over seeds)")
    _dress(axes, "x")
    return figure


def surface_figure(coordinates: Sequence[float] | Tensor, losses: Tensor | np.ndarray) -> Figure:
    """The loss over two directions around a model: a surface in three dimensions, and its contours.

    Args:
        coordinates: The n positions along both directions, ascending; the model is at (0, 0).
        losses: The loss, (n, n); rows run along the first direction.

    Raises:
        ValueError: ``losses`` is not (n, n).
    """
    from matplotlib.figure import Figure

    at, heights = np.asarray(coordinates), np.asarray(losses)
    if heights.shape != (len(at), len(at)):
        raise ValueError(f"losses must have shape {(len(at), len(at))}, got {heights.shape}")
    first, second = np.meshgrid(at, at, indexing="ij")
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    solid = figure.add_subplot(1, 2, 1, projection="3d")
    solid.plot_surface(first, second, heights, cmap="viridis", rcount=len(at), ccount=len(at), linewidth=0)
    solid.set(zlabel="loss", xticks=at[[0, -1]], yticks=at[[0, -1]])  # more of them would overlap
    flat = figure.add_subplot(1, 2, 2)
    filled = flat.contourf(first, second, heights, levels=20, cmap="viridis")
    flat.contour(first, second, heights, levels=20, colors="black", linewidths=0.4, alpha=0.6)
    flat.plot(0, 0, "x", color="white", markersize=8, markeredgewidth=2)
    flat.set_aspect("equal")
    figure.colorbar(filled, ax=flat, label="loss", shrink=0.85)
    for axes in (solid, flat):
        axes.set_xlabel("first direction")
        axes.set_ylabel("second direction")
    return figure


def slice_figure(distances: Sequence[float] | Tensor, losses: Tensor | np.ndarray, label: str) -> Figure:
    """The loss along a line through a model, which is at 0.

    Args:
        distances: The n positions, ascending.
        losses: The loss at each, (n,).
        label: Of the horizontal axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.asarray(distances), np.asarray(losses), color=COLOURS[0], linewidth=1.6)
    axes.axvline(0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel(label)
    axes.set_ylabel("loss")
    _dress(axes, "both")
    return figure


def figure_to_png(figure: Figure, path: str | Path, dpi: int = 150) -> Path:
    """Write a figure as PNG, making the folder if need be; the same figure gives the same bytes.

    Args:
        figure: Any matplotlib figure.
        path: Target file, ending in ``.png``.
        dpi: Dots per inch, positive.

    Returns:
        The path written.

    Raises:
        ValueError: Another suffix.
    """
    path = Path(path)
    if path.suffix != ".png":
        raise ValueError(f"path must end in .png, got {path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    return path


def _style(number: int) -> tuple[str, str, str]:
    """Colour, dash and marker of the n-th variant; 7 × 4 colour and dash pairs are distinct."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)], MARKERS[number % len(MARKERS)]


def _over_seeds(seeds: Mapping[int, Sequence[tuple[int, float]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds in order, mean over seeds, and sample standard deviation (0 for one seed), each (R,)."""
    values: dict[int, list[float]] = {}
    for points in seeds.values():
        for number, value in points:
            if math.isfinite(value):
                values.setdefault(number, []).append(value)
    rounds = sorted(values)
    mean = [np.mean(values[number]) for number in rounds]
    std = [np.std(values[number], ddof=1) if len(values[number]) > 1 else 0.0 for number in rounds]
    return np.array(rounds), np.array(mean), np.array(std)


def _dress(axes: Any, grid: str) -> None:
    """A light grid behind the data and no box around it."""
    axes.grid(axis=grid, alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
