"""What the figures of generated images show."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning.report.figures import figure_to_png
from fl_lightning.report.generation_figures import features_figure, samples_figure
from fl_lightning.rng import torch_generator

NAMES = ("cat", "dog", "owl")


def points(per_class: int, width: int = 5, classes: int = 3, owner: str = "real") -> tuple[Tensor, Tensor]:
    labels = torch.arange(classes).repeat_interleave(per_class)
    noise = torch.randn(len(labels), width, generator=torch_generator(0, owner))
    return noise + 6 * torch.eye(classes, width)[labels], labels


def test_samples_stand_in_the_row_of_their_class() -> None:
    images, labels = torch.rand(7, 1, 4, 3, generator=torch_generator(0)), torch.tensor([2, 0, 2, 0, 2, 2, 0])
    figure = samples_figure(images, labels, NAMES, per_class=3)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["cat", "owl"]  # no dog was given
    page = np.asarray(axes.images[0].get_array())
    assert page.shape == (4 + 1 + 4, 3 * 4 - 1)
    np.testing.assert_array_equal(page[:4, :3], images[1, 0])
    np.testing.assert_array_equal(page[:4, 8:], images[6, 0])
    np.testing.assert_array_equal(page[5:, 4:7], images[2, 0])
    assert (page[4] == 1).all()
    assert (page[:, 3] == 1).all()
    assert axes.images[0].get_clim() == (0, 1)  # black is 0 also where no pixel is


def test_samples_in_colour_and_rows_that_are_not_full() -> None:
    images, labels = torch.rand(3, 3, 4, 4, generator=torch_generator(0)), torch.tensor([0, 1, 1])
    page = np.asarray(samples_figure(images, labels, NAMES).axes[0].images[0].get_array())
    assert page.shape == (9, 9, 3)
    np.testing.assert_array_equal(page[5:, 5:], images[2].permute(1, 2, 0))
    assert (page[:4, 5:] == 1).all()


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_features_of_each_class_have_a_panel(method: str) -> None:
    figure = features_figure(points(20), points(15, owner="generated"), NAMES, method=method, per_class=18)
    assert [axes.get_title() for axes in figure.axes] == list(NAMES)
    for axes in figure.axes:
        everyone, real, generated = (np.asarray(found.get_offsets()) for found in axes.collections)
        assert (len(everyone), len(real), len(generated)) == (54, 18, 15)
        # The class's own generated points are nearer to its real ones than other classes' are.
        spread = np.linalg.norm(real - real.mean(0), axis=1).mean()
        assert np.linalg.norm(generated.mean(0) - real.mean(0)) < spread
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "real, all classes",
        "real, this class",
        "generated, this class",
    ]
    figure.draw_without_rendering()


def test_principal_components_are_those_of_the_real_features() -> None:
    real, (generated, labels) = points(20), points(20, owner="generated")
    near, far = (features_figure(real, (generated + by, labels), NAMES) for by in (0.0, 100.0))
    for first, second in zip(near.axes, far.axes, strict=True):
        np.testing.assert_array_equal(first.collections[0].get_offsets(), second.collections[0].get_offsets())
    centred = real[0].double() - real[0].double().mean(0)
    variances = torch.linalg.svdvals(centred) ** 2
    assert near.get_supxlabel() == f"component 1 ({(variances[0] / variances.sum()).item():.0%})"
    found = np.asarray(near.axes[0].collections[0].get_offsets())
    assert found[:, 0].var() * len(found) == pytest.approx(variances[0].item())


def test_tsne_depends_on_its_seed_alone_and_needs_few_examples() -> None:
    few, generated = points(2), points(1, owner="generated")
    before = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    first, again = (
        np.asarray(features_figure(few, generated, NAMES, method="tsne").axes[0].collections[0].get_offsets())
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)
    assert torch.equal(before[0], torch.get_rng_state())
    np.testing.assert_array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002


def test_a_png_is_the_same_twice(tmp_path: Path) -> None:
    real, generated = points(5, classes=2), points(5, classes=2, owner="generated")
    paths = [figure_to_png(features_figure(real, generated, NAMES), tmp_path / f"{n}.png", dpi=40) for n in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_places_without_a_class_stay_empty() -> None:
    figure = features_figure(points(3, 8, 7), points(3, 8, 7, "generated"), [f"class {n}" for n in range(7)])
    assert [axes.get_visible() for axes in figure.axes] == [True] * 7 + [False] * 3


def test_refusals() -> None:
    images, labels = torch.zeros(2, 1, 4, 4), torch.tensor([0, 1])
    for wrong, number in ((images[0], 2), (torch.zeros(2, 2, 4, 4), 2), (images[:0], 0), (images, 3)):
        with pytest.raises(ValueError, match="images and labels must have shapes"):
            samples_figure(wrong, torch.zeros(number, dtype=torch.int64), NAMES)
    for wrong in (images - 0.1, images + 1.5, images * math.nan):
        with pytest.raises(ValueError, match=r"images must lie in \[0, 1\], got"):
            samples_figure(wrong, labels, NAMES)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 1\)"):
        samples_figure(images, labels, NAMES[:1])
    with pytest.raises(ValueError, match="per_class must be positive, got 0"):
        samples_figure(images, labels, NAMES, per_class=0)
    with pytest.raises(ValueError, match="'pca' or 'tsne', got 'umap'"):
        features_figure(points(3), points(3), NAMES, method="umap")
    with pytest.raises(ValueError, match="features and labels"):
        features_figure(points(3), points(3, width=4), NAMES)
    with pytest.raises(ValueError, match="at least 3 real"):
        features_figure((torch.zeros(2, 5), labels), points(3), NAMES)
