"""Images of every kind come out in one shape, and broken files are named."""

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning.data import images


@pytest.mark.parametrize(
    ("mode", "channels"),
    [("1", 1), ("L", 1), ("LA", 1), ("P", 3), ("RGB", 3), ("RGBA", 3), ("CMYK", 3), ("I;16", 1), ("I", 1)],
)
def test_header_foretells_what_decode_returns(tmp_path, mode, channels):
    path = tmp_path / ("image.tif" if mode in ("CMYK", "I") else "image.png")
    Image.new("L", (5, 3), 200).convert(mode if mode != "I;16" else "I").convert(mode).save(path)
    decoded = images.decode(path)
    assert decoded.dtype == torch.uint8
    assert tuple(decoded.shape) == images.header(path) == (channels, 3, 5)


def test_transparency_is_laid_on_white(tmp_path):
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("RGBA", (2, 2), (255, 0, 0, 51)).save(tmp_path / "faint.png")
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([0, 0, 0, 255, 255, 255])
    palette.save(tmp_path / "palette.png", transparency=0)
    assert images.decode(tmp_path / "clear.png").unique().tolist() == [255]
    assert images.decode(tmp_path / "faint.png")[:, 0, 0].tolist() == [255, 204, 204]
    assert images.decode(tmp_path / "palette.png").unique().tolist() == [255]


def test_16_bit_grey_keeps_its_range(tmp_path):
    wide = np.array([[0, 257, 65535]], dtype=np.uint16)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    assert images.decode(tmp_path / "wide.png").flatten().tolist() == [0, 1, 255]


def test_floating_grey_must_be_in_the_unit_range(tmp_path):
    Image.fromarray(np.array([[0.0, 1.0]], dtype=np.float32)).save(tmp_path / "good.tif")
    Image.fromarray(np.array([[0.0, 1.5]], dtype=np.float32)).save(tmp_path / "bad.tif")
    assert images.decode(tmp_path / "good.tif").flatten().tolist() == [0, 255]
    with pytest.raises(ValueError, match=r"bad\.tif.*must be in \[0, 1\]"):
        images.decode(tmp_path / "bad.tif")


def test_exif_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (4, 2))
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[images.ORIENTATION_TAG] = 6  # stored lying on its left side
    image.save(tmp_path / "turned.png", exif=exif)
    decoded = images.decode(tmp_path / "turned.png")
    assert tuple(decoded.shape) == images.header(tmp_path / "turned.png") == (3, 4, 2)
    assert decoded[:, 0, 1].tolist() == [255, 255, 255]


def test_broken_and_missing_files_are_named(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:2000])
    for name in ("text.png", "cut.png"):
        for read in (images.decode, images.header):
            with pytest.raises(ValueError, match=rf"{name}: cannot be read as an image"):
                read(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="gone"):
        images.decode(tmp_path / "gone.png")


def test_resize_takes_the_shorter_side_and_crops_about_the_centre():
    wide = torch.zeros(1, 10, 40, dtype=torch.uint8)
    wide[:, :, 10:30] = 200  # the middle square, and what the filter sees of its surroundings
    assert images.resize(wide, 5).unique().tolist() == [200]
    assert images.resize(wide.transpose(1, 2), 5).unique().tolist() == [200]
    assert images.resize(wide, None) is wide
    with pytest.raises(ValueError, match="at least 1 pixel, got 0"):
        images.resize(wide, 0)


def test_prepare_gives_unit_float_of_the_wanted_shape():
    noise = torch.randint(0, 256, (4, 3, 9, 13), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ready = images.prepare(noise, 20, 1)
    assert (ready.dtype, tuple(ready.shape)) == (torch.float32, (4, 1, 20, 20))
    edges = images.prepare((noise > 127).float(), 20, 3)  # bicubic would leave [0, 1] here
    assert edges.min() == 0
    assert edges.max() == 1
    assert torch.equal(images.prepare(noise), noise.float() / 255)


def test_channels():
    grey = torch.tensor([[[0.25]]])
    assert images.to_channels(grey, 3).flatten().tolist() == [0.25] * 3
    red = torch.tensor([1.0, 0.0, 0.0]).reshape(3, 1, 1)
    assert images.to_channels(red, 1).item() == pytest.approx(0.299, abs=1e-3)
    with pytest.raises(ValueError, match="cannot bring 3 channels to 2"):
        images.to_channels(red, 2)
