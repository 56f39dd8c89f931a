"""Procedural pictures of coloured shapes: 64 classes that share factors, and a domain shift with one knob."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.examples import Examples, TensorExamples
from fl_lightning.data.source import Source, Splits
from fl_lightning.rng import numpy_generator

COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
SHAPES = ("circle", "square", "triangle", "cross", "ring", "star", "bar", "moon")
_RGB = np.array(
    [
        [0.85, 0.10, 0.10],
        [0.95, 0.50, 0.05],
        [0.95, 0.90, 0.15],
        [0.15, 0.70, 0.20],
        [0.15, 0.85, 0.90],
        [0.15, 0.25, 0.90],
        [0.50, 0.15, 0.70],
        [0.95, 0.50, 0.75],
    ],
    np.float32,
)
# The shifted domain sees each colour partly in its neighbour's channel, so that colour words point to the wrong place.
_MIXING = np.array([[0.2, 0.8, 0.0], [0.0, 0.2, 0.8], [0.8, 0.0, 0.2]], np.float32)
# Pairs in the order of their labels: even colour + shape first (base classes), odd ones after (novel classes), so that
# every colour and every shape occurs in both halves and novel accuracy can only come from composition.
PAIRS = tuple(
    sorted(((c, s) for c in range(len(COLOURS)) for s in range(len(SHAPES))), key=lambda pair: (sum(pair) % 2, pair))
)


class Scenes(Source):
    """One coloured shape per picture, 64 classes ("red circle"); texture, size, place and background are nuisance.

    Labels 0..31 are the pairs with even colour + shape, 32..63 the odd ones, so that the first half of the classes is a
    base set and the second a novel set with the same colours and shapes.

    Args:
        images_per_class: Training images of each class, at least 1.
        test_images_per_class: Test images of each class, at least 1.
        shift: Strength in [0, 1] of the domain shift: mixed colour channels, clutter, lost contrast, noise, rotation.

    Raises:
        ValueError: A value is outside its range.
    """

    def __init__(self, images_per_class: int = 100, test_images_per_class: int = 30, shift: float = 0.0) -> None:
        for name, count in (("images_per_class", images_per_class), ("test_images_per_class", test_images_per_class)):
            if count < 1:
                raise ValueError(f"{name} is {count}, must be at least 1")
        if not 0 <= shift <= 1:
            raise ValueError(f"shift is {shift}, must be in [0, 1]")
        self.images_per_class, self.test_images_per_class, self.shift = images_per_class, test_images_per_class, shift

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        """Render; see `Source.load`. Size 32 unless given.

        Raises:
            ValueError: ``channels`` is 1: without colour half of each class's name is lost.
        """
        if channels not in (None, 3):
            raise ValueError(f"channels is {channels}, must be 3: the classes have colours")

        def split(name: str, per_class: int) -> Examples:
            labels = np.repeat(np.arange(len(PAIRS)), per_class)
            images = render_scenes(labels, self.shift, image_size or 32, numpy_generator(seed, "scenes", name))
            return TensorExamples(images, torch.from_numpy(labels))

        names = tuple(f"{COLOURS[colour]} {SHAPES[shape]}" for colour, shape in PAIRS)
        return Splits(split("train", self.images_per_class), split("test", self.test_images_per_class), names)


def render_scenes(labels: np.ndarray, shift: float, size: int, generator: np.random.Generator) -> Tensor:
    """Draw one picture per label.

    Args:
        labels: (N,) positions in `PAIRS`.
        shift: Strength of the domain shift in [0, 1].
        size: Height and width S in pixels.
        generator: Where all nuisance comes from.

    Returns:
        (N, 3, S, S) uint8.
    """
    parts = [labels[start : start + 512] for start in range(0, len(labels), 512)]  # bounds the memory of coordinates
    return torch.cat([_draw(np.array(PAIRS)[part], shift, size, generator) for part in parts])


def _draw(pairs: np.ndarray, shift: float, size: int, generator: np.random.Generator) -> Tensor:
    count = len(pairs)

    def uniform(low: float, high: float, *shape: int) -> np.ndarray:
        return generator.uniform(low, high, (count, *shape)).astype(np.float32)

    line = (np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1
    x, y = line[None, None, :], line[None, :, None]
    radius = np.where(uniform(0, 1) < 0.5, uniform(0.38, 0.5), uniform(0.58, 0.75))[:, None, None]
    angle = (uniform(-1, 1) * np.pi * (0.08 + 0.5 * shift))[:, None, None]
    dx, dy = uniform(-0.25, 0.25, 1, 1), uniform(-0.25, 0.25, 1, 1)
    u = ((x - dx) * np.cos(angle) + (y - dy) * np.sin(angle)) / radius
    v = ((y - dy) * np.cos(angle) - (x - dx) * np.sin(angle)) / radius
    cover = np.empty((count, size, size), np.float32)
    for shape in range(len(SHAPES)):
        at = pairs[:, 1] == shape
        cover[at] = np.clip(0.5 - _distance(shape, u[at], v[at]) * radius[at] * size / 2, 0, 1)

    texture, pitch = generator.integers(4, size=count)[:, None, None], 9.0
    stripes, columns = np.sin(pitch * v) > 0, np.sin(pitch * u) > 0
    dark = np.select([texture == 1, texture == 2, texture == 3], [stripes, stripes & columns, stripes ^ columns], False)
    ink = np.clip(_RGB[pairs[:, 0]] + uniform(-0.06, 0.06, 3), 0, 1)[:, :, None, None] * (1 - 0.35 * dark[:, None])

    grey = uniform(0.05, 0.95, 1)
    ground = np.clip(grey + 0.25 * (_RGB[generator.integers(8, size=count)] - 0.5), 0, 1)[:, :, None, None]
    for _ in range(5):  # clutter lies under the shape
        blob = (x - uniform(-1, 1, 1, 1)) ** 2 + (y - uniform(-1, 1, 1, 1)) ** 2 < uniform(0.05, 0.25, 1, 1) ** 2
        seen = blob & (uniform(0, 1, 1, 1) < shift)
        ground = np.where(seen[:, None], uniform(0, 1, 3, 1, 1), ground)
    image = ground + cover[:, None] * (ink - ground)

    mixing = (1 - shift) * np.eye(3, dtype=np.float32) + shift * _MIXING
    image = np.einsum("dc,nchw->ndhw", mixing, image)
    contrast = 1 - uniform(0, 0.7, 1, 1, 1) * shift
    image = (image - 0.5) * contrast + 0.5 + uniform(-0.2, 0.2, 1, 1, 1) * shift
    image += generator.standard_normal(image.shape, np.float32) * (0.02 + 0.2 * shift)
    return torch.from_numpy((np.clip(image, 0, 1) * 255).round().astype(np.uint8))


def _distance(shape: int, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Signed distance, negative inside, to the outline of shape number ``shape`` in coordinates of its own radius."""

    def box(half_width: float, half_height: float) -> np.ndarray:
        return np.maximum(np.abs(u) - half_width, np.abs(v) - half_height)

    r = np.hypot(u, v)
    match SHAPES[shape]:
        case "circle":
            return r - 0.9
        case "square":
            return box(0.8, 0.8)
        case "triangle":
            return np.maximum(np.abs(u) * 0.866 - v * 0.5, v) - 0.5
        case "cross":
            return np.minimum(box(0.3, 1.0), box(1.0, 0.3))
        case "ring":
            return np.abs(r - 0.75) - 0.22
        case "star":  # fold the plane into one of ten sectors: there a star is one straight edge
            sector = np.pi / 5
            angle = np.abs((np.arctan2(u, -v) + sector) % (2 * sector) - sector)
            tip, notch = np.array([1.1, 0.0]), 0.45 * np.array([np.cos(sector), np.sin(sector)])
            edge = notch - tip
            normal = np.array([edge[1], -edge[0]]) / np.hypot(*edge)
            return (r * np.cos(angle) - tip[0]) * normal[0] + r * np.sin(angle) * normal[1]
        case "bar":
            return box(1.1, 0.3)
        case _:  # moon
            return np.maximum(r - 1.0, 0.85 - np.hypot(u - 0.55, v))
