"""Glyphs and the domains of digits: labels say what is drawn, domains are what they are called."""

import pytest
import torch

from fl_lightning.data.glyphs import DIGITS, DOMAINS, DigitDomains, Glyphs, render_glyphs


def test_shapes_ranges_and_counts():
    splits = Glyphs(4, 2).load(image_size=24, channels=3, seed=0)
    assert splits.class_names[:2] == ("zero", "one")
    assert splits.class_names[10] == "letter a"
    assert len(splits.class_names) == 36
    assert torch.equal(splits.train.labels.bincount(), torch.full((36,), 4))
    assert len(splits.test) == 72
    batch = splits.train.fetch(torch.arange(20))
    assert batch.shape == (20, 3, 24, 24)
    assert 0 <= batch.min() < batch.max() <= 1
    assert Glyphs(1, 1, letters=False).load(image_size=None, channels=None, seed=0).class_names == DIGITS


def test_the_seed_decides():
    def load(seed):
        return Glyphs(3, 3).load(image_size=None, channels=None, seed=seed)

    state = torch.get_rng_state()
    one, two, other = load(0), load(0), load(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.train.inputs, two.train.inputs)
    assert not torch.equal(one.train.inputs, other.train.inputs)
    assert not torch.equal(one.train.inputs, one.test.inputs)


def nearest_neighbour_accuracy(warp):
    def images(seed, count):
        labels = torch.arange(10).repeat_interleave(count)
        generator = torch.Generator().manual_seed(seed)
        return render_glyphs(labels, 32, generator, warp=warp, inverted=0.0).flatten(1), labels

    (train, labels), (test, truth) = images(0, 60), images(1, 10)
    return (labels[torch.cdist(test, train).argmin(1)] == truth).float().mean()


def test_unwarped_digits_are_readable_and_warped_ones_harder():
    plain = nearest_neighbour_accuracy(0.0)
    assert plain > 0.9
    assert nearest_neighbour_accuracy(1.0) < plain - 0.05


def test_polarity():
    labels, generator = torch.arange(10), torch.Generator().manual_seed(0)
    light = render_glyphs(labels, 32, generator, warp=0.0, inverted=0.0)
    dark = render_glyphs(labels, 32, generator, warp=0.0, inverted=1.0)
    assert light[:, :, 0].mean() < 0.1
    assert dark[:, :, 0].mean() > 0.9


@pytest.fixture(scope="module")
def domains():
    return DigitDomains().load(image_size=None, channels=None, seed=0)


def test_domains_are_what_they_are_called(domains):
    assert domains.domain_names == DOMAINS
    images = domains.test.fetch(torch.arange(len(domains.test))).view(4, -1, 1, 32, 32)
    labels = domains.test.labels.view(4, -1)
    assert all(torch.equal(labels[0], other) for other in labels)
    hand, inverted, blurred, printed = images
    torch.testing.assert_close(inverted, 1 - hand, rtol=0, atol=0.005)
    assert blurred.flatten(1).std(1).mean() < 0.5 * hand.flatten(1).std(1).mean()
    assert printed[:, :, :2].mean() < 0.3
    assert hand.flatten(1).std(1).mean() > 0.3


def test_no_handwriting_is_shared(domains):
    hand = domains.train.of_domain(0)
    inverted = domains.train.of_domain(1)
    test = domains.test.of_domain(0)

    def pictures(examples, flip=False):
        images = (examples.fetch(torch.arange(len(examples))) * 255).round()
        return {bytes((255 - i if flip else i).to(torch.uint8).numpy()) for i in images}

    assert not pictures(hand) & pictures(test)
    assert not pictures(hand) & pictures(inverted, flip=True)
    assert len(domains.train) + len(test) == 1797
    assert domains.train.domains.bincount().min() > 300
    assert domains.train.of_domain(3).labels.bincount(minlength=10).min() > 25


def test_one_domain_holds_all():
    splits = DigitDomains(["handwritten"], test_fraction=0.5).load(image_size=16, channels=3, seed=3)
    assert len(splits.train) + len(splits.test) == 1797
    assert abs(len(splits.train) - len(splits.test)) < 10
    assert splits.train.fetch(torch.tensor([0])).shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    ("source", "bad"),
    [
        (Glyphs, {"images_per_class": 0}),
        (Glyphs, {"test_images_per_class": 0}),
        (Glyphs, {"warp": -1.0}),
        (DigitDomains, {"domains": ["handwritten", "painted"]}),
        (DigitDomains, {"domains": ["printed", "printed"]}),
        (DigitDomains, {"domains": []}),
        (DigitDomains, {"test_fraction": 0.0}),
    ],
)
def test_values_out_of_range(source, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        source(**bad)
