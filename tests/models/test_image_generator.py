"""The generator of images: any size, one image for one z, a class where it is told."""

from __future__ import annotations

import pytest
import torch

from fl_lightning.models.image_generator import ImageGenerator


@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 8, 8), (3, 16, 12), (1, 28, 28), (3, 32, 32), (2, 18, 7)])
def test_images_have_the_shape_of_the_data_and_are_pixels(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    for classes in (None, 3):
        network = ImageGenerator(shape, latent=5, width=4, num_classes=classes)
        images = network(torch.randn(6, 5, generator=generator), torch.arange(6) % 3)
        assert images.shape == (6, *shape)
        assert images.min() > 0
        assert images.max() < 1


def test_parameters_are_those_of_the_papers_generator() -> None:
    """DENSE's for 32 x 32 colour images, by hand: stem, three BatchNorms, three convolutions."""
    count = sum(p.numel() for p in ImageGenerator((3, 32, 32)).parameters())
    assert count == 257 * 128 * 64 + 2 * (128 + 128 + 64) + 9 * 128 * 128 + 9 * 128 * 64 + 9 * 64 * 3 + 3


def test_the_class_changes_the_image() -> None:
    network = ImageGenerator((1, 8, 8), latent=5, width=4, num_classes=3).eval()
    z = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))
    zero, one, again = (network(z, torch.tensor([label])) for label in (0, 1, 0))
    assert torch.equal(zero, again)
    assert not torch.allclose(zero, one)


def test_a_new_draw_is_its_owners() -> None:
    network = ImageGenerator((1, 8, 8), latent=50, width=16, num_classes=3)
    network.redraw(torch.Generator().manual_seed(1))
    first = {name: value.clone() for name, value in network.named_parameters()}
    network.redraw(torch.Generator().manual_seed(2))
    assert not torch.equal(first["stem.weight"], network.stem.weight)
    network.redraw(torch.Generator().manual_seed(1))
    assert all(torch.equal(first[name], value) for name, value in network.named_parameters())
    assert first["stem.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert first["first.weight"].mean().item() == pytest.approx(1, abs=0.02)
    assert not any(value.any() for name, value in first.items() if name.endswith("bias"))


@pytest.mark.parametrize("argument", ["latent", "width"])
def test_wrong_arguments(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} is 0; it must be at least 1"):
        ImageGenerator((1, 8, 8), **{argument: 0})
