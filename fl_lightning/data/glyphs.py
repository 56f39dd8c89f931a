"""Digits and letters drawn from the fonts that matplotlib ships, and scikit-learn's digits in several domains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.data.examples import Examples, TensorExamples
from fl_lightning.data.images import resize, to_channels
from fl_lightning.data.source import Source, Splits
from fl_lightning.rng import numpy_generator, torch_generator

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = tuple(f"letter {character}" for character in "abcdefghijklmnopqrstuvwxyz")
DOMAINS = ("handwritten", "inverted", "blurred", "printed")
# Text fonts with all digits and both cases; the rest of matplotlib's fonts hold symbols or sizes of brackets.
_FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmss10", "cmtt10", "cmti10"),
)
_CANVAS = 64


class Glyphs(Source):
    """Single digits, and letters in either case, printed and warped until some look handwritten.

    Every image has its own font, stroke width, affine and elastic warp, resolution, contrast and polarity.

    Args:
        images_per_class: Training images of each class, at least 1.
        test_images_per_class: Test images of each class, at least 1.
        letters: Whether to have 26 classes of letters ("letter a", ...) after the ten digits ("zero", ...).
        warp: Greatest strength of all distortions, at least 0; 0 leaves font, stroke width and polarity.

    Raises:
        ValueError: A value is outside its range.
    """

    def __init__(
        self,
        images_per_class: int = 500,
        test_images_per_class: int = 50,
        letters: bool = True,
        warp: float = 1.0,
    ) -> None:
        for name, count in (("images_per_class", images_per_class), ("test_images_per_class", test_images_per_class)):
            if count < 1:
                raise ValueError(f"{name} is {count}, must be at least 1")
        if warp < 0:
            raise ValueError(f"warp is {warp}, must be at least 0")
        self.images_per_class, self.test_images_per_class = images_per_class, test_images_per_class
        self.letters, self.warp = letters, warp

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        """Render; see `Source.load`. 32 pixels and one channel unless given."""
        names = DIGITS + LETTERS if self.letters else DIGITS

        def split(name: str, per_class: int) -> Examples:
            labels = torch.arange(len(names)).repeat_interleave(per_class)
            generator = torch_generator(seed, "glyphs", name)
            images = render_glyphs(labels, image_size or 32, generator, warp=self.warp)
            return TensorExamples(_to_bytes(images, channels), labels)

        return Splits(split("train", self.images_per_class), split("test", self.test_images_per_class), names)


class DigitDomains(Source):
    """Ten digits, light on dark in scikit-learn's handwriting, and under shifts of feature: one domain for each name.

    - handwritten: scikit-learn's 1,797 digits of 8x8 pixels, enlarged;
    - inverted: dark on light;
    - blurred: low-pass filtered, a third of the contrast, on grey;
    - printed: rendered from fonts, mildly warped.

    Each training image of the handwriting belongs to one domain only; every domain has the same test images.

    Args:
        domains: Some of the four names, none twice; position = domain number.
        test_fraction: Share of the handwriting, in (0, 1), that is for testing, the same in each class.

    Raises:
        ValueError: A value is outside its range.
    """

    def __init__(self, domains: Sequence[str] = DOMAINS, test_fraction: float = 0.25) -> None:
        if not domains or not set(domains) <= set(DOMAINS) or len(set(domains)) < len(domains):
            raise ValueError(f"domains is {tuple(domains)}, must be some of {DOMAINS}, none twice")
        if not 0 < test_fraction < 1:
            raise ValueError(f"test_fraction is {test_fraction}, must be in (0, 1)")
        self.domains, self.test_fraction = tuple(domains), test_fraction

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        """Read and render; see `Source.load`. 32 pixels and one channel unless given."""
        from sklearn.datasets import load_digits

        size = image_size or 32
        digits = load_digits()
        labels = torch.from_numpy(digits.target).long()
        images = resize(torch.from_numpy(digits.images).float()[:, None] / 16, size)
        train: list[list[int]] = [[] for _ in self.domains]
        test: list[int] = []
        shuffle = numpy_generator(seed, "digit domains", "split")
        for digit in range(10):
            order = shuffle.permutation(np.flatnonzero(digits.target == digit))
            cut = round(len(order) * self.test_fraction)
            test.extend(order[:cut])
            for number in range(len(self.domains)):
                train[number].extend(order[cut + number :: len(self.domains)])

        def split(name: str, indices: Sequence[Sequence[int]]) -> Examples:
            parts = []
            for domain, own in zip(self.domains, indices, strict=True):
                part = images[torch.tensor(np.array(own))]
                if domain == "inverted":
                    part = 1 - part
                elif domain == "blurred":
                    part = 0.35 + 0.3 * _blur(part, torch.full((len(part),), size / 12))
                elif domain == "printed":
                    generator = torch_generator(seed, "digit domains", name)
                    part = render_glyphs(labels[np.array(own)], size, generator, warp=0.4, inverted=0.0)
                parts.append(_to_bytes(part, channels))
            domains = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part) for part in parts]))
            return TensorExamples(torch.cat(parts), torch.cat([labels[np.array(own)] for own in indices]), domains)

        return Splits(split("train", train), split("test", [test] * len(train)), DIGITS, self.domains)


def render_glyphs(
    labels: Tensor, size: int, generator: torch.Generator, *, warp: float = 1.0, inverted: float = 0.3
) -> Tensor:
    """Draw one glyph per label.

    Args:
        labels: (N,) int64 in [0, 36): ten digits, then 26 letters, in upper or lower case by chance.
        size: Height and width S in pixels.
        generator: Where all nuisance comes from.
        warp: Greatest strength of all distortions, at least 0; each image has its own up to this.
        inverted: Share of images, in [0, 1], that are dark on light.

    Returns:
        (N, 1, S, S) float32 in [0, 1].
    """
    parts = labels.split(1024)  # bounds the memory of sampling grids
    return torch.cat([_draw(part, size, generator, warp, inverted) for part in parts])


def _draw(labels: Tensor, size: int, generator: torch.Generator, warp: float, inverted: float) -> Tensor:
    count = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator) * (high - low) + low

    # Each image has a strength of its own: a model that learns from scratch finds no foothold in warped ones alone.
    strength = warp * uniform(0, 1)
    mild = strength.clamp(max=1)
    bank = _bank()
    font = torch.randint(len(_FONTS), (count,), generator=generator)
    lower = (labels >= 10) & (uniform(0, 1) < 0.5)
    fields = bank[font, labels + 26 * lower]

    angle, shear = uniform(-0.35, 0.35) * strength, uniform(-0.4, 0.4) * strength
    wide, high = uniform(0.7, 1.35).log().mul(strength).exp(), uniform(0.65, 1.2).log().mul(strength).exp()
    cos, sin = angle.cos(), angle.sin()
    rows = [cos * wide, (shear * cos - sin) * high, uniform(-0.15, 0.15) * strength]
    rows += [sin * wide, (shear * sin + cos) * high, uniform(-0.15, 0.15) * strength]
    grid = F.affine_grid(torch.stack(rows, 1).view(count, 2, 3), [count, 1, size, size], align_corners=False)
    # A coarse field of random shifts, enlarged smoothly, bends strokes as a hand does.
    elastic = torch.randn(count, 2, 5, 5, generator=generator) * (0.11 * strength.view(-1, 1, 1, 1))
    grid = grid + F.interpolate(elastic, size=(size, size), mode="bicubic").permute(0, 2, 3, 1)
    field = F.grid_sample(fields[:, None], grid, padding_mode="border", align_corners=False)
    # The bank holds distances to the outline, so a threshold sets the stroke's width.
    ink = torch.sigmoid((field + uniform(-0.03, 0.07, 1, 1, 1)) * 3 * size / 4)

    ink = _blur(ink, 0.1 + size / 24 * mild * uniform(0, 1))
    coarse = F.interpolate(F.interpolate(ink, size=(8, 8), mode="area"), size=(size, size), mode="bilinear")
    ink = torch.where(uniform(0, 1, 1, 1, 1) < 0.5 * mild.view(-1, 1, 1, 1), coarse, ink)
    ink = ink / ink.amax((1, 2, 3), keepdim=True).clamp(min=0.2)
    ink = ink ** uniform(0.6, 1.6, 1, 1, 1)
    contrast = 1 - 0.6 * mild.view(-1, 1, 1, 1) * uniform(0, 1, 1, 1, 1) ** 2
    ground = (1 - contrast) * uniform(0, 1, 1, 1, 1)
    image = ground + contrast * ink
    image = torch.where(uniform(0, 1, 1, 1, 1) < inverted, 1 - image, image)
    noise = torch.randn(image.shape, generator=generator) * uniform(0, 0.08, 1, 1, 1) * strength.view(-1, 1, 1, 1)
    return (image + noise).clamp(0, 1)


@cache
def _bank() -> Tensor:
    """Signed distances to outlines, positive in the ink, in half canvas widths: (fonts, 10 + 26 + 26, 64, 64)."""
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont
    from scipy.ndimage import distance_transform_edt

    characters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    bank = np.empty((len(_FONTS), len(characters), _CANVAS, _CANVAS), np.float32)
    for row, name in zip(bank, _FONTS, strict=True):
        font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/{name}.ttf", 100)
        for field, character in zip(row, characters, strict=True):
            left, top, right, bottom = font.getbbox(character)
            glyph = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
            ImageDraw.Draw(glyph).text((1 - left, 1 - top), character, fill=255, font=font)
            scale = 44 / max(glyph.size)
            glyph = glyph.resize([max(4, round(side * scale)) for side in glyph.size], Image.Resampling.BOX)
            canvas = Image.new("L", (_CANVAS, _CANVAS))
            canvas.paste(glyph, ((_CANVAS - glyph.width) // 2, (_CANVAS - glyph.height) // 2))
            ink = np.asarray(canvas) > 127
            field[:] = (distance_transform_edt(ink) - distance_transform_edt(~ink)) / (_CANVAS / 2)
    return torch.from_numpy(bank)


def _blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur of (N, 1, S, S) images, each with its own sigma (N,) in pixels."""
    reach = max(1, math.ceil(2.5 * float(sigma.max())))
    at = torch.arange(-reach, reach + 1)
    kernel = torch.softmax(-0.5 * (at / sigma[:, None]) ** 2, 1)[:, None]
    flat = images.squeeze(1)[None]
    flat = F.conv2d(F.pad(flat, (0, 0, reach, reach), mode="replicate"), kernel[..., None], groups=len(images))
    flat = F.conv2d(F.pad(flat, (reach, reach, 0, 0), mode="replicate"), kernel[:, :, None], groups=len(images))
    return flat[0][:, None]


def _to_bytes(images: Tensor, channels: int | None) -> Tensor:
    return to_channels((images * 255).round().to(torch.uint8), channels).contiguous()
