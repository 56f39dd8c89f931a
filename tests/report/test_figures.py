"""What the figures show: lines, bands, bars and labels, and a PNG that can be read."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.image import imread

from fl_lightning.report.figures import bars_figure, confusion_figure, curves_figure, figure_to_png

Curves = dict[str, dict[int, list[tuple[int, float]]]]


def example_curves(variants: int = 12, seeds: int = 3, rounds: int = 20) -> Curves:
    generator = np.random.default_rng(0)
    return {
        f"variant {v}": {
            s: [(r, 0.9 - 0.03 * v - 0.6 * math.exp(-r / (3 + v)) + generator.normal(0, 0.01)) for r in range(rounds)]
            for s in range(seeds)
        }
        for v in range(variants)
    }


def test_every_variant_has_a_line_of_its_own_style_and_a_legend_entry() -> None:
    figure = curves_figure(example_curves(), "global/acc")
    (axes,) = figure.axes
    assert len(axes.lines) == 12
    assert len({(to_hex(line.get_color()), line.get_linestyle()) for line in axes.lines}) == 12
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [f"variant {v} (3 seeds)" for v in range(12)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "global/acc")
    figure.draw_without_rendering()
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1  # outside, over no curve


def test_line_is_the_mean_and_band_one_deviation() -> None:
    figure = curves_figure({"a": {0: [(0, 0.2), (2, 0.4)], 7: [(2, 0.8), (0, 0.4)]}}, "acc")
    (axes,) = figure.axes
    assert axes.lines[0].get_xdata().tolist() == [0, 2]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [0.3, 0.6])
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert heights.max() == pytest.approx(0.6 + 0.4 / math.sqrt(2))
    assert heights.min() == pytest.approx(0.3 - 0.2 / math.sqrt(2))


def test_values_that_are_not_finite_are_left_out_of_a_curve() -> None:
    figure = curves_figure({"a": {0: [(0, 0.2), (1, math.nan)], 1: [(0, 0.4), (1, 0.5), (2, math.inf)]}}, "loss")
    line = figure.axes[0].lines[0]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0, 1], pytest.approx([0.3, 0.5]))


def test_bars_end_at_the_mean() -> None:
    figure = bars_figure({"a": {0: 0.4, 1: 0.6}, "b": {0: 0.9}, "diverged": {0: math.nan}}, "acc")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.5, 0.9])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "diverged"]
    (error,) = axes.collections
    ends = error.get_segments()[0][:, 0]
    assert ends[1] - ends[0] == pytest.approx(2 * 0.2 / math.sqrt(2))
    assert [text.get_text() for text in axes.texts] == ["0.5 ± 0.14", "0.9"]


def test_confusion_colours_by_row_share_and_writes_counts() -> None:
    matrix = torch.tensor([[8, 2, 0], [1, 3, 0], [0, 0, 0]])
    figure = confusion_figure(matrix, ["cat", "dog", "never seen"])
    axes = figure.axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), [[0.8, 0.2, 0], [0.25, 0.75, 0], [0, 0, 0]])
    assert [text.get_text() for text in axes.texts] == ["8", "2", "1", "3"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        confusion_figure(matrix, ["cat", "dog"])


def test_png_is_written_and_repeats(tmp_path: Path) -> None:
    figures = {
        "curves": lambda: curves_figure(example_curves(3), "acc"),
        "bars": lambda: bars_figure({"a": {0: 0.4, 1: 0.6}}, "acc"),
        "confusion": lambda: confusion_figure(np.eye(30), [str(c) for c in range(30)]),
    }
    for name, make in figures.items():
        path = figure_to_png(make(), tmp_path / "new" / f"{name}.png")
        assert imread(path)[..., :3].std() > 0.01
        assert path.read_bytes() == figure_to_png(make(), tmp_path / "again.png").read_bytes()
    with pytest.raises(ValueError, match="png"):
        figure_to_png(figures["bars"](), tmp_path / "bars.pdf")


def test_figures_need_no_pyplot() -> None:
    code = (
        "import sys; from fl_lightning.report import figures as f; assert 'matplotlib' not in sys.modules;"
        "import numpy as np; f.confusion_figure(np.eye(2), 'ab'); f.curves_figure({'a': {0: [(0, 1.0)]}}, 'acc');"
        "f.bars_figure({'a': {0: 1.0}}, 'acc'); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
