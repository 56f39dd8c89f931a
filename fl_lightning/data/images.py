"""Images in one shape: files and arrays of any kind become (C, H, W) tensors of one size, 1 or 3 channels, in [0, 1].

Resizing is bicubic with antialiasing (what CLIP and timm models were trained with) and happens on uint8 where the
source is uint8, so that a cached image and one decoded again agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
ORIENTATION_TAG, SWAPPED_ORIENTATIONS = 0x0112, (5, 6, 7, 8)  # EXIF; these four exchange width and height


def to_channels(images: Tensor, channels: int | None) -> Tensor:
    """Bring images (..., C, H, W) to 1 or 3 channels; None leaves them as they are.

    Grey is repeated; colour becomes its luma (ITU-R 601).

    Raises:
        ValueError: ``channels``, or what the images have, is neither 1 nor 3.
    """
    have = images.shape[-3]
    if channels is None or channels == have:
        return images
    if channels not in (1, 3) or have not in (1, 3):
        raise ValueError(f"cannot bring {have} channels to {channels}: both must be 1 (grey) or 3 (RGB)")
    if channels == 3:
        return images.expand(*images.shape[:-3], 3, *images.shape[-2:])
    from torchvision.transforms.v2 import functional

    return functional.rgb_to_grayscale(images)


def resize(images: Tensor, size: int | None) -> Tensor:
    """Bring images (..., C, H, W) to (..., C, size, size); None leaves them as they are.

    The shorter side is resized to ``size`` and the longer cropped about its centre; a square image is only resized.

    Raises:
        ValueError: ``size`` is below 1.
    """
    if size is not None and size < 1:
        raise ValueError(f"image size must be at least 1 pixel, got {size}")
    if size is None or tuple(images.shape[-2:]) == (size, size):
        return images
    from torchvision.transforms.v2 import InterpolationMode, functional

    resized = functional.resize(images, [size], interpolation=InterpolationMode.BICUBIC, antialias=True)
    if resized.is_floating_point():
        resized = resized.clamp(0, 1)  # bicubic overshoots at edges
    return functional.center_crop(resized, [size, size])


def to_unit(images: Tensor) -> Tensor:
    """uint8 images as float32 in [0, 1]; floating ones as float32, unchanged."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images.float()


def prepare(images: Tensor, image_size: int | None = None, channels: int | None = None) -> Tensor:
    """Bring images (..., C, H, W), uint8 or floating in [0, 1], to float32 in [0, 1] of the given size and channels."""
    return to_unit(to_channels(resize(images, image_size), channels)).contiguous()


def from_pil(image: Image) -> Tensor:
    """A PIL image as uint8 (C, H, W): one channel where its mode is grey, else three.

    EXIF orientation is applied. Transparency is laid on white, as a page would show it: what lies under a transparent
    pixel is arbitrary. 16-bit grey is divided down to 8 bits; floating grey must lie in [0, 1].

    Raises:
        ValueError: Values of a wide grey image are outside their range.
    """
    from PIL import Image as pil
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        wide, top = np.array(image, dtype=np.float64), 1.0 if image.mode == "F" else 65535.0
        if not (wide.min() >= 0 and wide.max() <= top):
            raise ValueError(
                f"values of a {image.mode} image must be in [0, {top:g}], got {wide.min()} to {wide.max()}"
            )
        return torch.from_numpy(np.rint(wide * (255 / top)).astype(np.uint8))[None]
    target = "L" if _is_grey(image) else "RGB"
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = pil.alpha_composite(pil.new("RGBA", rgba.size, "white"), rgba)
    array = np.array(image.convert(target))
    return torch.from_numpy(array)[None] if target == "L" else torch.from_numpy(array).permute(2, 0, 1).contiguous()


def decode(path: str | Path) -> Tensor:
    """Decode an image file to uint8 (C, H, W), C 1 or 3; see `from_pil` for what happens to unusual ones.

    Raises:
        ValueError: The file cannot be decoded; the message names it.
        FileNotFoundError: There is no such file.
    """
    return _open(path, from_pil)


def header(path: str | Path) -> tuple[int, int, int]:
    """(C, H, W) that `decode` will return, from the file's header and PIL's integrity check, without decoding.

    The check reads checksums where a format has them; that a JPEG is cut short is found only when it is decoded.

    Raises:
        ValueError: The file is no image, or is found broken; the message names it.
        FileNotFoundError: There is no such file.
    """

    def read(image: Image) -> tuple[int, int, int]:
        width, height = image.size
        known = (
            image.format != "PNG" or "exif" in image.info
        )  # PNG: looking for EXIF behind the pixels would decode them
        if known and image.getexif().get(ORIENTATION_TAG) in SWAPPED_ORIENTATIONS:
            width, height = height, width
        channels = 1 if _is_grey(image) else 3
        image.verify()
        return channels, height, width

    return _open(path, read)


def _is_grey(image: Image) -> bool:
    return image.mode in ("1", "L", "LA", "F") or image.mode.startswith("I")


def _open(path: str | Path, read: Callable[[Image], T]) -> T:
    from PIL import Image as pil

    try:
        with pil.open(path) as image:
            return read(image)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such image file") from None
    except (OSError, ValueError, SyntaxError, EOFError, pil.DecompressionBombError) as error:  # PIL raises all of these
        raise ValueError(f"{path}: cannot be read as an image ({error})") from error
