"""Where examples come from: scikit-learn, torchvision, IDX and MedMNIST files, folders, manifests, and invented images.

Arrays are kept in memory as uint8 where they are uint8; image files are decoded when they are fetched. Labels come from
file names and tables, never from decoding. A source that has to draw its test split draws it stratified, by seed.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import struct
import warnings
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.data import images
from fl_lightning.data.examples import Concatenated, Examples, TensorExamples, Transformed
from fl_lightning.data.partition import stratified_take
from fl_lightning.data.source import Source, Splits
from fl_lightning.rng import numpy_generator, torch_generator

IN_MEMORY_BYTES = 2**29  # an array whose prepared form is larger is resized when fetched instead of when loaded
CHUNK = 1024  # images resized at once

OnUnreadable = Literal["refuse", "skip"]


# ---------------------------------------------------------------------------------------------------------------------
# Examples decoded on fetch


class DecodedExamples(Examples):
    """Examples that are decoded, resized and brought to one number of channels when they are fetched.

    Args:
        labels: (N,) integers.
        domains: (N,) integers, or None for one domain.
        image_size: Height and width in pixels; None if all images already have one size.
        channels: 1 or 3.
        cache: Keep every decoded image, as uint8 of the final size; it is decoded once.
    """

    def __init__(
        self,
        labels: Sequence[int] | np.ndarray,
        domains: Sequence[int] | np.ndarray | None,
        image_size: int | None,
        channels: int,
        cache: bool = False,
    ) -> None:
        self.labels = torch.as_tensor(np.asarray(labels, dtype=np.int64))
        numbers = np.zeros(len(self.labels)) if domains is None else domains
        self.domains = torch.as_tensor(np.asarray(numbers, dtype=np.int64))
        self.image_size, self.channels = image_size, channels
        self._kept: dict[int, Tensor] | None = {} if cache else None

    @abstractmethod
    def decode(self, index: int) -> Tensor:
        """One image as uint8 (C, H, W)."""

    def fetch(self, indices: Tensor) -> Tensor:
        if len(indices) == 0:  # the shape of one image is not known without decoding one
            return self.fetch(torch.tensor([0]))[:0]
        return images.to_unit(torch.stack([self._prepared(index) for index in indices.tolist()]))

    def _prepared(self, index: int) -> Tensor:
        if self._kept is not None and index in self._kept:
            return self._kept[index]
        image = images.to_channels(images.resize(self.decode(index), self.image_size), self.channels)
        if self._kept is not None:
            self._kept[index] = image
        return image


class FileExamples(DecodedExamples):
    """Image files.

    Args:
        paths: N files.
        labels: (N,) integers.
        domains: (N,) integers, or None for one domain.
        image_size: Height and width in pixels; None if all files already have one size.
        channels: 1 or 3.
        cache: Keep decoded images in memory.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Sequence[int] | np.ndarray,
        domains: Sequence[int] | np.ndarray | None,
        image_size: int | None,
        channels: int,
        cache: bool = False,
    ) -> None:
        super().__init__(labels, domains, image_size, channels, cache)
        self.paths = list(paths)

    def decode(self, index: int) -> Tensor:
        return images.decode(self.paths[index])


class DatasetExamples(DecodedExamples):
    """A map-style dataset of (PIL image, anything), labels known without decoding; ``order[i]`` is example i."""

    def __init__(
        self, dataset: Any, order: np.ndarray, labels: np.ndarray, image_size: int, channels: int, cache: bool
    ) -> None:
        super().__init__(labels, None, image_size, channels, cache)
        self.dataset, self.order = dataset, order

    def decode(self, index: int) -> Tensor:
        number = int(self.order[index])
        try:
            return images.from_pil(self.dataset[number][0])
        except (OSError, ValueError, SyntaxError) as error:
            raise ValueError(f"example {number} of {type(self.dataset).__name__} cannot be read ({error})") from error


# ---------------------------------------------------------------------------------------------------------------------
# Embedded and invented images


class Digits(Source):
    """The 1,797 handwritten digits that come with scikit-learn: 8 x 8, grey, ten classes, "zero" to "nine".

    Args:
        test_fraction: Share held out for testing, in (0, 1), stratified by class.
    """

    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

    def __init__(self, test_fraction: float = 0.2) -> None:
        self.test_fraction = _share(test_fraction)

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        pixels = torch.from_numpy(bunch.images).float().div_(16)[:, None]  # values 0 to 16
        whole = _array_examples(pixels, bunch.target, image_size, channels)
        return _drawn(whole, self.test_fraction, seed, "digits", self.names)


class HardDigits(Source):
    """scikit-learn's digits made harder: every image several times, each copy shifted and with Gaussian noise of its own.

    1,347 training images in 3 copies and 450 test images in 4: small enough for two cores, and too hard for a small
    network to get all right. Values are not clipped: pixels of [0, 1] leave it by the noise, but resizing to another size
    than 8 x 8 clips them. Test images are drawn as `Digits` draws them. No two copies of one image are in different
    splits: validation images are held out here, before copying, and the data module's ``val_fraction`` has no effect.

    Args:
        copies: Copies of a training or validation image, at least 1.
        test_copies: Copies of a test image, at least 1.
        shift: Copies are moved by -shift to +shift whole pixels of the 8 x 8, uniformly and in both axes, in [0, 7];
            zeros come in.
        noise: Standard deviation of the noise, at least 0.
        val_images: Images (before copying) of the 1,347 that are held out for validation, in [0, 1346].
    """

    num_images, test_images = 1797, 450

    def __init__(
        self, copies: int = 3, test_copies: int = 4, shift: int = 1, noise: float = 0.25, val_images: int = 0
    ) -> None:
        most = self.num_images - self.test_images - 1
        for name, value, low, high in (
            ("copies", copies, 1, math.inf),
            ("test_copies", test_copies, 1, math.inf),
            ("shift", shift, 0, 7),
            ("noise", noise, 0, math.inf),
            ("val_images", val_images, 0, most),
        ):
            if not low <= value <= high:
                raise ValueError(
                    f"{name} must be {f'in [{low}, {high}]' if high < math.inf else f'at least {low}'}, got {value}"
                )
        self.copies, self.test_copies, self.shift, self.noise = copies, test_copies, shift, noise
        self.val_images = val_images

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        plain = Digits(self.test_images / self.num_images).load(image_size=None, channels=None, seed=seed)

        def copied(split: str, examples: Examples, copies: int) -> Examples:
            draw = torch_generator(seed, "source", "hard digits", split)
            pixels = examples.fetch(torch.arange(len(examples))).repeat(copies, 1, 1, 1)
            rows, columns = torch.randint(2 * self.shift + 1, (2, len(pixels)), generator=draw)
            places = F.pad(pixels, 4 * [self.shift]).unfold(2, 8, 1).unfold(3, 8, 1)  # (N, 1, places, places, 8, 8)
            pixels = places[torch.arange(len(pixels)), :, rows, columns]
            pixels = pixels + self.noise * torch.randn(pixels.shape, generator=draw)
            return _array_examples(pixels, examples.labels.repeat(copies).numpy(), image_size, channels)

        train, count = copied("train", plain.train, self.copies), len(plain.train)
        held, kept = stratified_take(
            plain.train.labels.numpy(),
            plain.train.domains.numpy(),
            self.val_images / count,
            numpy_generator(seed, "source", "hard digits", "val"),
        )
        held, kept = ((part + count * np.arange(self.copies)[:, None]).ravel() for part in (held, kept))
        return Splits(
            train.select(kept), copied("test", plain.test, self.test_copies), Digits.names, val=train.select(held)
        )


class FakeImages(Source):
    """Invented images for dry runs of any shape: a coarse pattern per class, a tint per domain, noise per image.

    An image is a function of the seed, its split and its number, made when fetched: nothing is kept in memory.

    Args:
        num_classes: Number of classes.
        num_domains: Number of domains.
        image_size: Height and width in pixels, where the data module does not ask for another.
        channels: 1 or 3, where the data module does not ask for another.
        train_per_class: Training images of a class in a domain.
        test_per_class: Test images of a class in a domain.
        noise: Standard deviation of the noise.
    """

    def __init__(
        self,
        num_classes: int = 10,
        num_domains: int = 1,
        image_size: int = 32,
        channels: int = 3,
        train_per_class: int = 20,
        test_per_class: int = 5,
        noise: float = 0.1,
    ) -> None:
        for name, value in (
            ("num_classes", num_classes),
            ("num_domains", num_domains),
            ("image_size", image_size),
            ("train_per_class", train_per_class),
            ("test_per_class", test_per_class),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, got {channels}")
        self.num_classes, self.num_domains = num_classes, num_domains
        self.image_size, self.channels = image_size, channels
        self.train_per_class, self.test_per_class, self.noise = train_per_class, test_per_class, noise

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        shape = (channels or self.channels, image_size or self.image_size)
        train, test = (
            _FakeExamples(self, per_class, *shape, seed, split)
            for split, per_class in (("train", self.train_per_class), ("test", self.test_per_class))
        )
        class_names = tuple(f"class {number}" for number in range(self.num_classes))
        return Splits(train, test, class_names, tuple(f"d{n}" for n in range(self.num_domains)))


class _FakeExamples(Examples):
    def __init__(self, source: FakeImages, per_class: int, channels: int, size: int, seed: int, split: str) -> None:
        self.labels = torch.arange(source.num_classes).repeat_interleave(per_class).repeat(source.num_domains)
        self.domains = torch.arange(source.num_domains).repeat_interleave(per_class * source.num_classes)
        self.size, self.noise, self.seed, self.split = size, source.noise, seed, split
        draw = torch_generator(seed, "fake", "patterns")
        self.patterns = 0.2 + 0.6 * torch.rand(source.num_classes, channels, 4, 4, generator=draw)
        self.tints = 0.2 * torch.rand(source.num_domains, channels, 1, 1, generator=draw) - 0.1

    def fetch(self, indices: Tensor) -> Tensor:
        means = self.patterns[self.labels[indices]] + self.tints[self.domains[indices]]
        batch = torch.nn.functional.interpolate(means, size=(self.size, self.size), mode="nearest")
        for image, index in zip(batch, indices.tolist(), strict=True):
            draw = torch_generator(self.seed, "fake", self.split, index)
            image.add_(torch.randn(image.shape, generator=draw), alpha=self.noise)
        return batch.clamp_(0, 1)


# ---------------------------------------------------------------------------------------------------------------------
# torchvision

# Constructor arguments of the train, test and validation split; a set without a split of its own has the first alone.
_FLAG: tuple[dict[str, Any], ...] = ({"train": True}, {"train": False})
_SPLIT: tuple[dict[str, Any], ...] = ({"split": "train"}, {"split": "test"})
_SPLIT_VAL: tuple[dict[str, Any], ...] = ({"split": "train"}, {"split": "test"}, {"split": "val"})
TORCHVISION: dict[str, tuple[dict[str, Any], ...]] = {
    "CIFAR10": _FLAG,
    "CIFAR100": _FLAG,
    "Caltech101": ({},),
    "Caltech256": ({},),
    "Country211": ({"split": "train"}, {"split": "test"}, {"split": "valid"}),
    "DTD": _SPLIT_VAL,
    "EMNIST": ({"split": "balanced", "train": True}, {"split": "balanced", "train": False}),
    "EuroSAT": ({},),
    "FGVCAircraft": _SPLIT_VAL,
    "FashionMNIST": _FLAG,
    "Flowers102": _SPLIT_VAL,
    "Food101": _SPLIT,
    "GTSRB": _SPLIT,
    "Imagenette": ({"split": "train"}, {"split": "val"}),
    "KMNIST": _FLAG,
    "MNIST": _FLAG,
    "OxfordIIITPet": ({"split": "trainval"}, {"split": "test"}),
    "Places365": ({"split": "train-standard"}, {"split": "val"}),
    "RenderedSST2": _SPLIT_VAL,
    "SEMEION": ({},),
    "STL10": _SPLIT,
    "SUN397": ({},),
    "SVHN": _SPLIT,
    "StanfordCars": _SPLIT,
    "USPS": _FLAG,
}


class Torchvision(Source):
    """A classification set of torchvision, in the split its authors made; a set without one is split by seed.

    Sets that torchvision holds as arrays stay in memory. The others are decoded when fetched and need an image size.
    Class names are torchvision's; numbers where it has none.

    Args:
        name: Name of the torchvision class, such as ``CIFAR10``, ``EuroSAT``, ``OxfordIIITPet``.
        root: Folder of the files; every set finds its own subfolder there.
        download: Fetch missing files.
        test_fraction: Share held out for testing, in (0, 1), of a set that has no test split.
        options: More arguments of the torchvision class, such as ``{split: letters}`` of EMNIST.
        cache: Keep decoded images in memory.
    """

    def __init__(
        self,
        name: str,
        root: str = "data",
        download: bool = False,
        test_fraction: float = 0.2,
        options: dict[str, Any] | None = None,
        cache: bool = False,
    ) -> None:
        if name not in TORCHVISION:
            raise ValueError(f"unknown torchvision set {name!r}; allowed: {', '.join(TORCHVISION)}")
        self.name, self.root, self.download, self.cache = name, root, download, cache
        self.test_fraction, self.options = _share(test_fraction), dict(options or {})

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        sets = [self._construct(arguments) for arguments in TORCHVISION[self.name]]
        first, *others = [self._examples(one, image_size, channels) for one in sets]
        names = self._class_names(sets[0], int(first.labels.max()) + 1)
        if not others:
            return _drawn(first, self.test_fraction, seed, self.name, names)
        return Splits(first, others[0], names, val=others[1] if len(others) > 1 else None)

    def _construct(self, arguments: dict[str, Any]) -> Any:
        import torchvision

        try:
            return getattr(torchvision.datasets, self.name)(
                self.root, download=self.download, **{**arguments, **self.options}
            )
        except (RuntimeError, OSError) as error:
            raise FileNotFoundError(
                f"{Path(self.root).absolute()}: torchvision cannot load {self.name} from here ({error}). "
                "Set download: true on a machine with network, or put the files there as torchvision would"
            ) from error

    def _examples(self, dataset: Any, image_size: int | None, channels: int | None) -> Examples:
        labels = next(
            (getattr(dataset, name) for name in ("targets", "labels", "_labels", "y") if hasattr(dataset, name)), None
        )
        if labels is None:
            labels = [label for _, label in dataset._samples]
        labels = np.asarray(labels, dtype=np.int64)
        if hasattr(dataset, "data"):
            pixels = torch.as_tensor(dataset.data)
            if pixels.ndim == 4 and pixels.shape[1] not in (1, 3):
                pixels = pixels.permute(0, 3, 1, 2)
            return _array_examples(pixels if pixels.ndim == 4 else pixels[:, None], labels, image_size, channels)
        if image_size is None:
            raise ValueError(f"{self.name} is decoded when fetched, from images of any size: image_size must be given")
        order = np.arange(len(labels))
        if hasattr(dataset, "_image_files"):  # SUN397 lists its files in the order of the file system
            order = np.argsort([str(path) for path in dataset._image_files], kind="stable")
        return DatasetExamples(dataset, order, labels[order], image_size, channels or 3, self.cache)

    @staticmethod
    def _class_names(dataset: Any, num_classes: int) -> tuple[str, ...]:
        names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None) or range(num_classes)
        return tuple(str(name if isinstance(name, str | int) else name[0]) for name in names)  # synonyms: the first


# ---------------------------------------------------------------------------------------------------------------------
# Array files


class IDX(Source):
    """IDX files (the format of MNIST), gzipped or not. The default names are those of MNIST and Fashion-MNIST.

    Args:
        root: Folder of the four files. Debian's dataset-fashion-mnist has them in /usr/share/datasets/fashion-mnist.
        train_images: Name of a file of unsigned bytes, (N, H, W); with or without ``.gz`` on disk.
        train_labels: Name of a file of unsigned bytes, (N,).
        test_images: As ``train_images``.
        test_labels: As ``train_labels``.
        class_names: Names by label; None numbers the classes.
    """

    def __init__(
        self,
        root: str,
        train_images: str = "train-images-idx3-ubyte",
        train_labels: str = "train-labels-idx1-ubyte",
        test_images: str = "t10k-images-idx3-ubyte",
        test_labels: str = "t10k-labels-idx1-ubyte",
        class_names: list[str] | None = None,
    ) -> None:
        self.root, self.class_names = root, class_names
        self.train_files, self.test_files = (train_images, train_labels), (test_images, test_labels)

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        train, test = (self._read(*names, image_size, channels) for names in (self.train_files, self.test_files))
        return Splits(train, test, _names(self.class_names, [train, test], self.root))

    def _read(self, pixels: str, labels: str, image_size: int | None, channels: int | None) -> Examples:
        arrays = read_idx(Path(self.root) / pixels), read_idx(Path(self.root) / labels)
        if arrays[0].ndim != 3 or arrays[1].shape != arrays[0].shape[:1]:
            shapes = f"{arrays[0].shape} and {arrays[1].shape}"
            raise ValueError(f"{Path(self.root) / pixels} must be (N, H, W) and {labels} (N,), got {shapes}")
        return _array_examples(torch.from_numpy(arrays[0])[:, None], arrays[1], image_size, channels)


def read_idx(path: str | Path) -> np.ndarray:
    """Read an IDX file of unsigned bytes, gzipped or not; ``.gz`` may be left off the path.

    Raises:
        FileNotFoundError: Neither the path nor it with ``.gz`` is a file.
        ValueError: The file is not IDX of unsigned bytes, or is cut short.
    """
    plain = Path(path)
    found = next((one for one in (plain, plain.with_name(plain.name + ".gz")) if one.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"{plain}: no such IDX file, nor with .gz; put it there or correct root and the file names"
        )
    raw = found.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"{found}: broken gzip ({error}); fetch it again") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"{found}: not an IDX file of unsigned bytes (it starts with {raw[:4].hex()}, not 000008)")
    start = 4 + 4 * raw[3]
    shape = struct.unpack(f">{raw[3]}I", raw[4:start]) if len(raw) >= start else ()
    if len(raw) != start + int(np.prod(shape)):
        raise ValueError(f"{found}: {len(raw)} bytes do not hold an array of shape {shape}; fetch it again")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape).copy()


class MedMNIST(Source):
    """An ``.npz`` file in the format of MedMNIST: train, val and test images (N, H, W[, 3]) and labels (N, 1).

    Args:
        path: The file, such as ``data/bloodmnist.npz``.
        class_names: Names by label; None numbers the classes, the file has no names.
    """

    def __init__(self, path: str, class_names: list[str] | None = None) -> None:
        self.path, self.class_names = path, class_names

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        path = Path(self.path)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path.absolute()}: no such file; download {path.name} from MedMNIST and put it there"
            )
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: not a MedMNIST .npz file ({error}); download it again") from error
        train, test, val = (self._split(path, arrays, name, image_size, channels) for name in ("train", "test", "val"))
        return Splits(train, test, _names(self.class_names, [train, test, val], self.path), val=val)

    @staticmethod
    def _split(
        path: Path, arrays: dict[str, np.ndarray], name: str, image_size: int | None, channels: int | None
    ) -> Examples:
        for key in (f"{name}_images", f"{name}_labels"):
            if key not in arrays:
                raise ValueError(f"{path}: has no {key}; a MedMNIST file has train, val and test images and labels")
        pixels, labels = arrays[f"{name}_images"], arrays[f"{name}_labels"]
        if labels.ndim == 2 and labels.shape[1] > 1:
            raise ValueError(
                f"{path}: {path.stem} is multi-label ({labels.shape[1]} labels an image); only one is supported"
            )
        if pixels.dtype != np.uint8 or not (pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[3] == 3)):
            raise ValueError(
                f"{path}: {name}_images must be uint8 (N, H, W) or (N, H, W, 3), got {pixels.dtype} {pixels.shape}"
            )
        if not np.issubdtype(labels.dtype, np.integer) or len(labels) != len(pixels):
            raise ValueError(
                f"{path}: {name}_labels must be {len(pixels)} integers, one an image, got {labels.dtype} {labels.shape}"
            )
        tensor = torch.from_numpy(pixels)
        tensor = tensor[:, None] if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2)
        return _array_examples(tensor, labels.reshape(-1), image_size, channels)


# ---------------------------------------------------------------------------------------------------------------------
# Folders and manifests


class _Files(Source):
    """What sources of image files share: the arguments, and the way from rows to splits.

    A row is (file, label, domain, split).
    """

    def __init__(self, test_fraction: float, cache: bool, on_unreadable: OnUnreadable) -> None:
        if on_unreadable not in ("refuse", "skip"):
            raise ValueError(f"on_unreadable must be 'refuse' or 'skip', got {on_unreadable!r}")
        self.test_fraction, self.cache, self.on_unreadable = _share(test_fraction), cache, on_unreadable

    def _splits(
        self,
        rows: Sequence[tuple[Path, int, int, str]],
        class_names: Sequence[str],
        domain_names: Sequence[str],
        image_size: int | None,
        channels: int | None,
        seed: int,
        where: Path,
    ) -> Splits:
        rows, headers = self._readable(rows, where)
        _warn_of_copies(rows, where)
        if image_size is None and len(sizes := {header[1:] for header in headers}) > 1:
            raise ValueError(
                f"{where}: images differ in size ({len(sizes)} sizes, such as {sorted(sizes)[:2]}); give image_size"
            )
        channels = channels or max(header[0] for header in headers)

        def examples(split: str) -> Examples:
            chosen = [row[:3] for row in rows if row[3] == split]
            paths, labels, domains = zip(*chosen, strict=True) if chosen else ((), (), ())
            return FileExamples(paths, labels, domains, image_size, channels, self.cache)

        train, test, val = examples("train"), examples("test"), examples("val")
        if not len(train):
            raise ValueError(f"{where}: no training images")
        names = tuple(class_names), tuple(domain_names)
        if len(test):
            return Splits(train, test, *names, val=val if len(val) else None)
        drawn = _drawn(train, self.test_fraction, seed, type(self).__name__, *names)
        return Splits(drawn.train, drawn.test, *names, val=val if len(val) else None)

    def _readable(
        self, rows: Sequence[tuple[Path, int, int, str]], where: Path
    ) -> tuple[list[tuple[Path, int, int, str]], list[tuple[int, int, int]]]:
        good, headers, bad = [], [], []
        for row in rows:
            try:
                headers.append(images.header(row[0]))
                good.append(row)
            except ValueError as error:
                bad.append((row[0], error))
        if bad and (self.on_unreadable == "refuse" or not good):
            raise ValueError(
                f"{where}: {len(bad)} of {len(rows)} images cannot be read, the first is: {bad[0][1]}. "
                "Mend or remove them, or set on_unreadable: skip"
            )
        if bad:
            listed = ", ".join(str(path) for path, _ in bad)
            warnings.warn(f"{where}: {len(bad)} unreadable images left out: {listed}", stacklevel=2)
        return good, headers


class ImageFolder(_Files):
    """A folder per class: ``root/class/...``, or ``root/train/class/...`` beside ``test`` and ``val``.

    Without a test folder, the validation folder is the test set; without either, the test set is drawn. The layout of
    Tiny-ImageNet (``train/<id>/images``, ``val/val_annotations.txt``, ``words.txt``) is recognised; its unlabelled test
    images are left alone. Classes are numbered in the order of their folders' names.

    Args:
        root: The folder.
        test_fraction: Share drawn for testing, in (0, 1), where no folder says what the test set is.
        cache: Keep decoded images in memory.
        on_unreadable: ``refuse`` broken files, or ``skip`` them with a warning that names them.
    """

    def __init__(
        self, root: str, test_fraction: float = 0.2, cache: bool = False, on_unreadable: OnUnreadable = "refuse"
    ) -> None:
        super().__init__(test_fraction, cache, on_unreadable)
        self.root = root

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        root = _existing(self.root, "root/class/... or root/train/class/...")
        base = root / "train" if (root / "train").is_dir() else root
        classes = [folder.name for folder in _folders(base)]
        names: Sequence[str] = classes
        rows = _class_rows(base, classes, 0, "train")
        if (root / "val" / "val_annotations.txt").is_file():
            names = self._words(root, classes)
            rows += self._annotated(root / "val", classes)
        elif base != root:
            folders = {key: found for key, options in _SPLIT_FOLDERS.items() if (found := _first(root, options))}
            if "test" not in folders and "val" in folders:
                folders = {"test": folders["val"]}
            for split, folder in folders.items():
                if unknown := sorted({one.name for one in _folders(folder)} - set(classes)):
                    raise ValueError(f"{folder}: classes that {base} does not have: {unknown}")
                rows += _class_rows(folder, [one.name for one in _folders(folder)], 0, split, classes)
        return self._splits(rows, names, ["all"], image_size, channels, seed, root)

    @staticmethod
    def _words(root: Path, classes: Sequence[str]) -> list[str]:
        words = {}
        if (root / "words.txt").is_file():
            for line in (root / "words.txt").read_text(encoding="utf-8").splitlines():
                key, _, text = line.partition("\t")
                words[key] = text.split(",")[0].strip()
        return [words.get(key) or key for key in classes]

    @staticmethod
    def _annotated(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int, int, str]]:
        table, number = folder / "val_annotations.txt", {name: label for label, name in enumerate(classes)}
        rows = []
        for count, line in enumerate(table.read_text(encoding="utf-8").splitlines(), 1):
            file, key, *_ = [*line.split("\t"), ""]
            if key not in number:
                raise ValueError(f"{table}, line {count}: unknown class {key!r}")
            rows.append((folder / "images" / file, number[key], 0, "test"))
        return _all_exist(rows, table)


class DomainFolder(_Files):
    """A folder per domain and class: ``root/domain/class/...`` (Office-Home, Office-Caltech10, DomainNet).

    The test set is drawn, by domain and class. Classes are numbered in the order of their folders' names.

    Args:
        root: The folder.
        domains: Names of the domain folders, in the order that numbers them; None for all, in the order of their names.
        classes: Where domains differ in their classes: ``same`` refuses and names them, ``union`` and ``intersection``
            take all or the common ones.
        class_names: Only these class folders, numbered in this order; None for all. Every domain must have them.
        test_fraction: Share drawn for testing, in (0, 1).
        cache: Keep decoded images in memory.
        on_unreadable: ``refuse`` broken files, or ``skip`` them with a warning that names them.
    """

    def __init__(
        self,
        root: str,
        domains: list[str] | None = None,
        classes: Literal["same", "union", "intersection"] = "same",
        class_names: list[str] | None = None,
        test_fraction: float = 0.2,
        cache: bool = False,
        on_unreadable: OnUnreadable = "refuse",
    ) -> None:
        super().__init__(test_fraction, cache, on_unreadable)
        if classes not in ("same", "union", "intersection"):
            raise ValueError(f"classes must be 'same', 'union' or 'intersection', got {classes!r}")
        self.root, self.domains, self.classes, self.class_names = root, domains, classes, class_names

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        root = _existing(self.root, "root/domain/class/...")
        names = self.domains or [folder.name for folder in _folders(root)]
        if missing := [name for name in names if not (root / name).is_dir()]:
            raise FileNotFoundError(
                f"{root}: no folder for the domains {missing}; it has {[folder.name for folder in _folders(root)]}"
            )
        held = {name: {folder.name for folder in _folders(root / name)} for name in names}
        if self.class_names is not None:
            wanted = set(self.class_names)
            if lacks := {name: sorted(wanted - classes) for name, classes in held.items() if wanted - classes}:
                raise ValueError(f"{root}: class_names names classes that domains lack: {lacks}")
            held = dict.fromkeys(held, wanted)
        union, common = set[str]().union(*held.values()), set.intersection(*held.values())
        if self.classes == "same" and union != common:
            lacking = {name: sorted(union - classes) for name, classes in held.items() if union - classes}
            raise ValueError(f"{root}: domains lack classes: {lacking}; set classes to union or intersection")
        kept = self.class_names or sorted(common if self.classes == "intersection" else union)
        if not kept:
            raise ValueError(f"{root}: the domains {list(names)} have no class in common")
        rows = []
        for number, name in enumerate(names):
            rows += _class_rows(root / name, sorted(held[name] & set(kept)), number, "train", kept)
        return self._splits(rows, kept, names, image_size, channels, seed, root)


class Manifest(_Files):
    """A CSV table with the columns ``path`` and ``label``, and if it has them ``site`` and ``split``.

    Labels are class names, or integers; classes are numbered in their order. Sites become domains, in the order of
    their names. Splits are ``train``, ``val`` and ``test``; without a test image, the test set is drawn by site and
    class.

    Args:
        csv: The table, UTF-8, with a header line.
        root: Folder that paths are relative to; None for the table's own.
        class_names: Names in the order of the classes; None takes the labels' text.
        test_fraction: Share drawn for testing, in (0, 1), where the table does not say what the test set is.
        cache: Keep decoded images in memory.
        on_unreadable: ``refuse`` broken files, or ``skip`` them with a warning that names them.
    """

    def __init__(
        self,
        csv: str,
        root: str | None = None,
        class_names: list[str] | None = None,
        test_fraction: float = 0.2,
        cache: bool = False,
        on_unreadable: OnUnreadable = "refuse",
    ) -> None:
        super().__init__(test_fraction, cache, on_unreadable)
        self.csv, self.root, self.class_names = csv, root, class_names

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        table = Path(self.csv)
        if not table.is_file():
            raise FileNotFoundError(
                f"{table.absolute()}: no such manifest; write a CSV file with the columns path,label"
            )
        with table.open(encoding="utf-8-sig", newline="") as file:
            lines = list(csv.DictReader(file))
        for number, line in enumerate(lines, 2):  # line 1 is the header
            if not line.get("path") or not line.get("label"):
                raise ValueError(f"{table}, line {number}: columns path and label must be there and filled, got {line}")
            if (split := line.get("split") or "train") not in _SPLIT_NAMES:
                raise ValueError(f"{table}, line {number}: split must be one of {list(_SPLIT_NAMES)}, got {split!r}")
        if not lines:
            raise ValueError(f"{table}: no rows; it needs the columns path and label and a row for every image")
        texts = {line["label"].strip() for line in lines}
        labels = sorted(texts, key=int) if all(text.lstrip("-").isdecimal() for text in texts) else sorted(texts)
        if self.class_names is not None and len(self.class_names) != len(labels):
            raise ValueError(f"{table}: {len(labels)} classes, but class_names has {len(self.class_names)}")
        sites = sorted({line.get("site") or "all" for line in lines})
        label_number, site_number = ({name: n for n, name in enumerate(names)} for names in (labels, sites))
        base = table.parent if self.root is None else _existing(self.root, "the manifest's paths")
        rows = [
            (
                base / line["path"],
                label_number[line["label"].strip()],
                site_number[line.get("site") or "all"],
                _SPLIT_NAMES[line.get("split") or "train"],
            )
            for line in lines
        ]
        names = self.class_names or labels
        return self._splits(_all_exist(rows, table), names, sites, image_size, channels, seed, table)


_SPLIT_FOLDERS = {"test": ("test",), "val": ("val", "valid", "validation")}
_SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def _existing(root: str, layout: str) -> Path:
    if not Path(root).is_dir():
        raise FileNotFoundError(f"{Path(root).absolute()}: no such folder; put the images there as {layout}")
    return Path(root)


def _folders(root: Path) -> list[Path]:
    found = sorted(
        (one for one in root.iterdir() if one.is_dir() and one.name[0] not in "._"), key=lambda one: one.name
    )
    if not found:
        raise ValueError(f"{root}: has no class folders")
    return found


def _first(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _class_rows(
    folder: Path, present: Sequence[str], domain: int, split: str, classes: Sequence[str] | None = None
) -> list[tuple[Path, int, int, str]]:
    """Rows of all images under ``folder/class``, for the classes present, numbered by their position in ``classes``."""
    number = {name: label for label, name in enumerate(classes or present)}
    rows = []
    for name in present:
        files = sorted(
            path
            for path in (folder / name).rglob("*")
            if path.suffix.lower() in images.SUFFIXES and not path.name.startswith(".")
        )
        if not files:
            raise ValueError(
                f"{folder / name}: no images ({', '.join(sorted(images.SUFFIXES))}); fill or remove the folder"
            )
        rows += [(path, number[name], domain, split) for path in files]
    return rows


def _all_exist(rows: list[tuple[Path, int, int, str]], table: Path) -> list[tuple[Path, int, int, str]]:
    if missing := [path for path, *_ in rows if not path.is_file()]:
        raise FileNotFoundError(
            f"{table}: {len(missing)} of {len(rows)} images are missing, the first is {missing[0]}; "
            "put them there or correct the paths"
        )
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# A public part

Variant = Literal["none", "rotate90", "mirror"]
_VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {  # partials, not lambdas: examples may be sent to another process
    "none": torch.clone,
    "rotate90": partial(torch.rot90, dims=(-2, -1)),
    "mirror": partial(torch.flip, dims=(-1,)),
}


class PublicSplit(Source):
    """One of two parts of a source's training images: a public one, on which a backbone may be trained in advance, and the
    clients'. No image is in both, and none of either is a test image.

    The source is loaded with this seed, not with the run's: whatever seed a run has, it meets no image of a part that a
    shipped backbone was trained on. So test images are the same in all runs; how clients divide theirs is not.

    Args:
        source: Where the examples come from.
        fraction: Share of the training images that is public, in (0, 1), stratified by domain and class.
        part: "public" or "clients".
        seed: Of the split, and of what the source draws.
        variants: Of the public part: every image becomes one for each of these, "none" (as it is), "rotate90" (against the
            clock, square images only) and "mirror" (left and right exchanged), and each is a class of its own, in training
            and test images alike: whoever tells them apart looks at more than is needed to tell C classes. With V variants
            there are C x V classes, first the C of the first variant. Null leaves images as they are.
    """

    def __init__(
        self,
        source: Source,
        fraction: float = 0.35,
        part: Literal["public", "clients"] = "clients",
        seed: int = 0,
        variants: list[Variant] | None = None,
    ) -> None:
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must be between 0 and 1, got {fraction}")
        if part not in ("public", "clients"):
            raise ValueError(f"part must be 'public' or 'clients', got {part!r}")
        if variants is not None and part == "clients":
            raise ValueError(f"variants must be null for the clients' part, got {variants}")
        if variants is not None and (
            not variants or set(variants) - _VARIANTS.keys() or len(set(variants)) < len(variants)
        ):
            raise ValueError(f"variants must be some of {list(_VARIANTS)}, none of them twice, got {variants}")
        self.source, self.fraction, self.part, self.seed, self.variants = source, fraction, part, seed, variants

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        splits = self.source.load(image_size=image_size, channels=channels, seed=self.seed)
        labels, domains = splits.train.labels.numpy(), splits.train.domains.numpy()
        draw = numpy_generator(self.seed, "source", "public")
        public, rest = stratified_take(labels, domains, self.fraction, draw)
        if self.part == "clients":
            return replace(splits, train=splits.train.select(rest))
        train = splits.train.select(public)
        if self.variants is None:
            return replace(splits, train=train)
        names = splits.class_names
        if "rotate90" in self.variants and len({*train.fetch(torch.tensor([0])).shape[2:]}) > 1:
            raise ValueError("variants have 'rotate90', which needs square images: give image_size")
        all_names = [name if kind == "none" else f"{name} {kind}" for kind in self.variants for name in names]
        return Splits(
            self._varied(train, len(names)),
            self._varied(splits.test, len(names)),
            tuple(all_names),
            splits.domain_names,
            None if splits.val is None else self._varied(splits.val, len(names)),
        )

    def _varied(self, examples: Examples, num_classes: int) -> Examples:
        parts = []
        for number, kind in enumerate(self.variants or ()):
            part = Transformed(examples, _VARIANTS[kind])
            part.labels = examples.labels + number * num_classes
            parts.append(part)
        return Concatenated(parts)


# ---------------------------------------------------------------------------------------------------------------------
# Shared


def _warn_of_copies(rows: Sequence[tuple[Path, int, int, str]], where: Path) -> None:
    """Say which files are the same to the byte: copies in training and test sets make scores too good, and copies under two
    labels contradict each other. Only files of one size are read."""
    sizes: dict[int, list[tuple[Path, int]]] = {}
    for path, label, *_ in rows:
        sizes.setdefault(path.stat().st_size, []).append((path, label))
    found: dict[bytes, list[tuple[Path, int]]] = {}
    for path, label in (row for alike in sizes.values() if len(alike) > 1 for row in alike):
        with open(path, "rb") as file:
            found.setdefault(hashlib.file_digest(file, "sha256").digest(), []).append((path, label))
    copies = [same for same in found.values() if len(same) > 1]
    if copies:
        contrary = sum(len({label for _, label in same}) > 1 for same in copies)
        (first, _), (second, _), *_ = copies[0]
        warnings.warn(
            f"{where}: {sum(len(same) - 1 for same in copies)} of {len(rows)} images are copies of others, the first is "
            f"{second} of {first}; {contrary} stand under different labels. Copies may lie in training and test sets",
            stacklevel=2,
        )


def _share(fraction: float) -> float:
    if not 0 < fraction < 1:
        raise ValueError(f"test_fraction must be between 0 and 1, got {fraction}")
    return fraction


def _names(given: Sequence[str] | None, splits: Sequence[Examples], where: str) -> tuple[str, ...]:
    """The names given, checked against the labels, or numbers."""
    if not all(len(split) for split in splits):
        raise ValueError(f"{where}: a split holds no example")
    needed = 1 + max(int(split.labels.max()) for split in splits)
    if given is not None and len(given) < needed:
        raise ValueError(f"{where}: labels go up to {needed - 1}, but class_names has {len(given)} names")
    return tuple(given) if given is not None else tuple(map(str, range(needed)))


def _array_examples(
    pixels: Tensor, labels: Sequence[int] | np.ndarray, image_size: int | None, channels: int | None
) -> Examples:
    """Images (N, C, H, W) in memory: prepared at once where the result is small, else when fetched."""
    targets = torch.as_tensor(np.asarray(labels, dtype=np.int64))
    side = image_size * image_size if image_size else pixels.shape[-1] * pixels.shape[-2]
    if len(pixels) * (channels or pixels.shape[1]) * side * pixels.element_size() > IN_MEMORY_BYTES:
        # A partial, not a lambda: examples may be sent to another process.
        return Transformed(
            TensorExamples(pixels.contiguous(), targets),
            partial(images.prepare, image_size=image_size, channels=channels),
        )
    chunks = [images.to_channels(images.resize(chunk, image_size), channels) for chunk in pixels.split(CHUNK)]
    return TensorExamples(torch.cat(chunks), targets)


def _drawn(
    whole: Examples,
    test_fraction: float,
    seed: int,
    owner: str,
    class_names: Sequence[str],
    domain_names: Sequence[str] = ("all",),
) -> Splits:
    """Split a set that has no test split, stratified by domain and class."""
    taken, left = stratified_take(
        whole.labels.numpy(), whole.domains.numpy(), test_fraction, numpy_generator(seed, "source", owner, "test")
    )
    return Splits(whole.select(left), whole.select(taken), tuple(class_names), tuple(domain_names))
