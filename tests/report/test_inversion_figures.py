"""Figures of inverted images show what they were given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning.report.inversion_figures import STOPPED, inversion_figure

IMAGES = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))
MASK = torch.zeros(2, 6, dtype=torch.bool)  # patches of 4 x 4: two rows, three columns
MASK[0, 4] = MASK[1, 2] = True
ATTENTION = torch.arange(12.0).view(2, 6)
LABELS = torch.tensor([1, 0])
NAMES = ("cat", "dog")


def pictures(figure: Any) -> list[np.ndarray]:
    return [np.asarray(axes.get_images()[0].get_array()) for axes in figure.axes]


def test_images_kept_patches_and_attention() -> None:
    figure = inversion_figure(IMAGES, MASK, LABELS, NAMES, ATTENTION)
    first, second, kept, kept_second, heat, heat_second = pictures(figure)
    assert np.array_equal(first, IMAGES[0].permute(1, 2, 0).numpy())
    assert np.array_equal(second, IMAGES[1].permute(1, 2, 0).numpy())
    assert np.array_equal(kept[4:, 4:8], first[4:, 4:8])
    assert (kept[:4] == np.float32(STOPPED)).all()
    assert (kept[4:, :4] == np.float32(STOPPED)).all()
    assert np.array_equal(kept_second[:4, 8:], second[:4, 8:])
    assert heat[0, 0] == 0
    assert heat[7, 11] == heat_second[7, 11] == 1
    assert heat[3, 4] == pytest.approx(1 / 5)
    assert [axes.get_title() for axes in figure.axes[:2]] == ["dog", "cat"]
    assert [figure.axes[row].get_ylabel() for row in (0, 2, 4)] == ["image", "kept patches", "attention"]
    assert len(inversion_figure(IMAGES, MASK, LABELS, NAMES).axes) == 4


def test_a_network_without_patches_and_grey_images() -> None:
    whole, kept = pictures(inversion_figure(IMAGES[:1, :1], torch.ones(1, 1, dtype=torch.bool), LABELS[:1], NAMES))
    assert np.array_equal(whole, IMAGES[0, 0].numpy())
    assert np.array_equal(kept, whole)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((IMAGES[0], MASK, LABELS, NAMES), r"images must be \(B >= 1"),
        ((2 * IMAGES, MASK, LABELS, NAMES), r"in \[0, 1\]"),
        ((IMAGES, MASK[:1], LABELS, NAMES), r"mask and attention must have shape \(2, N\)"),
        ((IMAGES, MASK, LABELS, NAMES, ATTENTION[:, :5]), "mask and attention must have shape"),
        ((IMAGES, MASK[:, :5], LABELS, NAMES), "mask has N = 5; no grid"),
        ((IMAGES, MASK, LABELS, NAMES[:1]), r"labels must be 2 integers in \[0, 1\)"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        inversion_figure(*arguments)
