"""Hard digits: shifted, noisy copies, of which no image's are in two splits."""

import numpy as np
import pytest
import torch

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partition import Dirichlet
from fl_lightning.data.sources import Digits, HardDigits


def load(source, image_size=None, channels=None, seed=0):
    return source.load(image_size=image_size, channels=channels, seed=seed)


def everything(examples):
    return examples.fetch(torch.arange(len(examples)))


def images_of(examples):
    """The distinct images of copies without shift and noise."""
    return {image.numpy().tobytes() for image in everything(examples)}


def test_sizes_and_seed():
    splits = load(HardDigits())
    assert (len(splits.train), len(splits.test), len(splits.val)) == (3 * 1347, 4 * 450, 0)
    pixels = everything(splits.train)
    assert (tuple(pixels.shape[1:]), pixels.dtype) == ((1, 8, 8), torch.float32)
    assert pixels.min() < 0  # not clipped
    assert pixels.max() > 1
    assert torch.equal(everything(load(HardDigits()).train), pixels)
    assert not torch.equal(everything(load(HardDigits(), seed=1).train), pixels)
    assert tuple(everything(load(HardDigits(copies=1), 16, 3).test).shape) == (1800, 3, 16, 16)


def test_copies_are_shifted_noisy_digits():
    plain = load(Digits(450 / 1797))
    exact = load(HardDigits(copies=2, shift=0, noise=0))
    assert torch.equal(everything(exact.train), everything(plain.train).repeat(2, 1, 1, 1))
    assert torch.equal(exact.test.labels, plain.test.labels.repeat(4))

    shifted = everything(load(HardDigits(noise=0)).train)[:, 0]
    originals = torch.nn.functional.pad(everything(plain.train)[:, 0], [1] * 4).repeat(3, 1, 1)
    moved = torch.stack([originals[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)], 1)
    matches = (moved == shifted[:, None]).all((2, 3))
    assert matches.any(1).all()
    assert 0.08 < matches.float().mean(0).min() < matches.float().mean(0).max() < 0.15  # uniform over nine places

    noise = everything(load(HardDigits(shift=0)).test)[:, 0] - everything(plain.test)[:, 0].repeat(4, 1, 1)
    assert noise.std().item() == pytest.approx(0.25, rel=0.01)
    assert np.corrcoef(noise.view(4, -1)[:2])[0, 1] == pytest.approx(0, abs=0.03)  # each copy has its own


def test_no_image_is_in_two_splits():
    splits = load(HardDigits(shift=0, noise=0, val_images=200))
    train, val, test = map(images_of, (splits.train, splits.val, splits.test))
    assert (len(train), len(val), len(test)) == (1147, 200, 450)
    assert not train & val
    assert not train & test
    assert not val & test
    assert len(splits.val) == 3 * 200
    whole, fewer = everything(load(HardDigits()).train), everything(load(HardDigits(val_images=200)).train)
    assert {image.numpy().tobytes() for image in fewer} <= {image.numpy().tobytes() for image in whole}


def test_the_data_module_draws_no_validation_copies():
    data = FederatedDataModule(HardDigits(), Dirichlet(0.1), num_clients=5, val_fraction=0.1)
    assert sum(len(data.train(client)) for client in data.info.clients) == 3 * 1347
    assert len(data.server_val()) == 0
    data = FederatedDataModule(HardDigits(val_images=100), Dirichlet(0.1), num_clients=5)
    assert len(data.server_val()) == 300


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"copies": 0}, "copies must be at least 1, got 0"),
        ({"test_copies": -1}, "test_copies must be at least 1, got -1"),
        ({"shift": 8}, r"shift must be in \[0, 7\], got 8"),
        ({"noise": -0.1}, r"noise must be at least 0, got -0\.1"),
        ({"val_images": 1347}, r"val_images must be in \[0, 1346\], got 1347"),
    ],
)
def test_wrong_values_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        HardDigits(**arguments)
