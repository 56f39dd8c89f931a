"""Scenes: what the labels say is in the picture, and the knob turns."""

import pytest
import torch

from fl_lightning.data.scenes import COLOURS, PAIRS, SHAPES, Scenes


def load(shift=0.0, seed=0, per_class=6, size=None):
    return Scenes(per_class, 2, shift).load(image_size=size, channels=3, seed=seed)


def test_shapes_ranges_and_counts():
    splits = load()
    assert len(splits.train) == 64 * 6
    assert len(splits.test) == 64 * 2
    batch = splits.train.fetch(torch.tensor([0, 5, 300]))
    assert batch.shape == (3, 3, 32, 32)
    assert 0 <= batch.min() < batch.max() <= 1
    assert torch.equal(splits.train.labels.bincount(), torch.full((64,), 6))
    assert load(size=48).test.fetch(torch.tensor([0])).shape == (1, 3, 48, 48)


def test_the_halves_share_every_colour_and_shape():
    names = load(per_class=1).class_names
    assert names[0] == "red circle"
    assert len(set(names)) == 64
    for half, parity in ((PAIRS[:32], 0), (PAIRS[32:], 1)):
        assert {(c + s) % 2 for c, s in half} == {parity}
        assert {c for c, _ in half} == set(range(8)) == {s for _, s in half}
    assert [f"{COLOURS[c]} {SHAPES[s]}" for c, s in PAIRS] == list(names)


def test_the_seed_decides():
    one, two, other = load(), load(), load(seed=1)
    assert torch.equal(one.train.inputs, two.train.inputs)
    assert not torch.equal(one.train.inputs, other.train.inputs)
    assert not torch.equal(one.train.inputs[:64], one.test.inputs[:64])


def test_the_shape_has_the_colour_of_its_name():
    splits = load(per_class=20)
    means = splits.train.fetch(torch.arange(len(splits.train))).view(64, 20, 3, 32, 32).mean((1, 3, 4))
    by_colour = {
        colour: torch.stack([means[k] for k, (c, _) in enumerate(PAIRS) if c == number]).mean(0)
        for number, colour in enumerate(COLOURS)
    }
    assert by_colour["red"].argmax() == 0
    assert by_colour["green"].argmax() == 1
    assert by_colour["blue"].argmax() == 2
    assert by_colour["yellow"].argmin() == 2


def nearest_mean_accuracy(shift):
    splits = load(shift, per_class=20)
    train = splits.train.fetch(torch.arange(len(splits.train))).flatten(1)
    test = splits.test.fetch(torch.arange(len(splits.test))).flatten(1)
    means = torch.stack([train[splits.train.labels == label].mean(0) for label in range(64)])
    return (torch.cdist(test, means).argmin(1) == splits.test.labels).float().mean()


def test_a_shift_makes_it_harder():
    assert nearest_mean_accuracy(0.0) > nearest_mean_accuracy(1.0) + 0.03
    clean, shifted = load().train.inputs.float(), load(1.0).train.inputs.float()
    assert shifted.diff(dim=-1).abs().mean() > 2 * clean.diff(dim=-1).abs().mean()


@pytest.mark.parametrize(
    "bad", [{"images_per_class": 0}, {"test_images_per_class": 0}, {"shift": 1.5}, {"shift": -0.1}]
)
def test_values_out_of_range(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Scenes(**bad)


def test_grey_is_refused():
    with pytest.raises(ValueError, match="channels is 1"):
        Scenes(1, 1).load(image_size=None, channels=1, seed=0)
