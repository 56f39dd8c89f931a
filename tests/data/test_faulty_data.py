"""Data that no classifier could be made from, one fault a test: refused by name, or said."""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.examples import TensorExamples
from fl_lightning.data.source import Source, Splits
from fl_lightning.data.sources import IDX, DomainFolder, ImageFolder, Manifest, MedMNIST


class Given(Source):
    def __init__(
        self, train: Any, test: Any = (0, 1, 2), val: Any = None, domains: Any = None, classes: int = 3
    ) -> None:
        def part(labels: Any) -> TensorExamples:
            given = torch.tensor(labels, dtype=torch.int64)
            return TensorExamples(torch.zeros(len(given), 1, 2, 2), given)

        whole = part(train)
        if domains is not None:
            whole.domains = torch.tensor(domains)
        names = tuple("abc"[:classes])
        self.splits = Splits(whole, part(test), names, val=None if val is None else part(val))

    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        return self.splits


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Given([]), "Given: the train split holds no example"),
        (Given([0, 1, 2], test=[]), "Given: the test split holds no example"),
        (Given([0, 0], test=[0], classes=1), r"Given: 1 class \(a\); a classifier needs at least 2"),
        (Given([1, 1, 1]), "all 3 training examples are of class 'b'; at least 2 classes"),
        (Given([0, 1, 3, 7]), r"2 of 4 labels of the train split are out of range, the first is 3; .*\[0, 2\]"),
        (Given([0, 1, 2], test=[0, -1]), r"1 of 2 labels of the test split are out of range, the first is -1"),
        (Given([0, 1, 2], val=[9]), "1 of 1 labels of the val split are out of range, the first is 9"),
        (Given([0, 1, 2], domains=[0, 0, 1]), r"1 of 3 domains of the train split .* first is 1; .*\[0, 0\]"),
    ],
)
def test_splits_that_make_no_classifier(source: Source, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FederatedDataModule(source, num_clients=1, val_fraction=0.0).setup()


def test_without_clients_the_training_split_may_be_empty() -> None:
    FederatedDataModule(Given([], test=[0, 1]), num_clients=0).setup()
    with pytest.raises(ValueError, match="the test split holds no example"):
        FederatedDataModule(Given([], test=[]), num_clients=0).setup()


def archive(path: Path, **changes: Any) -> MedMNIST:
    arrays = {}
    for name in ("train", "val", "test"):
        arrays[f"{name}_images"] = np.zeros((4, 5, 5), np.uint8)
        arrays[f"{name}_labels"] = np.array([[0], [1], [0], [1]], np.uint8)
    given = {**arrays, **changes}
    np.savez(path, **{key: value for key, value in given.items() if value is not None})
    return MedMNIST(str(path))


def load(source: Source, image_size: int | None = None) -> Splits:
    return source.load(image_size=image_size, channels=None, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": None, "images": np.zeros(1)}, "has no train_images; a MedMNIST file has train, val and test"),
        ({"train_labels": np.zeros((3, 1), np.uint8)}, r"train_labels must be 4 integers, .*got uint8 \(3, 1\)"),
        ({"test_labels": np.full((4, 1), np.nan)}, r"test_labels must be 4 integers, .*got float64 \(4, 1\)"),
        (
            {"val_images": np.zeros((0, 5, 5), np.uint8), "val_labels": np.zeros((0, 1), np.uint8)},
            "a split holds no example",
        ),
    ],
)
def test_archives_that_are_not_what_they_should_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(archive(tmp_path / "toy.npz", **changes))


def test_an_empty_idx_file_is_named(tmp_path: Path) -> None:
    for name, shape in (("t-images", (0, 4, 4)), ("t-labels", (0,))):
        header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
        (tmp_path / name).write_bytes(header)
    files = {
        "train_images": "t-images",
        "train_labels": "t-labels",
        "test_images": "t-images",
        "test_labels": "t-labels",
    }
    with pytest.raises(ValueError, match="no example"):
        load(IDX(str(tmp_path), **files))


def picture(path: Path, value: int, size: tuple[int, int] = (6, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).save(path)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_an_image_that_claims_to_be_huge_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    for number in range(3):
        picture(tmp_path / "a" / f"{number}.png", number)
        picture(tmp_path / "b" / f"{number}.png", 100 + number)
    sides = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)  # 3.6 GB of pixels in 60 bytes
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", sides) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    (tmp_path / "a" / "bomb.png").write_bytes(bomb)
    with pytest.raises(ValueError, match=r"1 of 7 images cannot be read, .*bomb\.png.*3600000000 pixels"):
        load(ImageFolder(str(tmp_path)))
    with pytest.warns(UserWarning, match=r"1 unreadable images left out: .*bomb\.png"):
        load(ImageFolder(str(tmp_path), on_unreadable="skip"))


def test_copies_are_said(tmp_path: Path) -> None:
    for number in range(3):
        picture(tmp_path / "a" / f"{number}.png", number)
        picture(tmp_path / "b" / f"{number}.png", 100 + number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(ImageFolder(str(tmp_path)))
    picture(tmp_path / "a" / "again.png", 1)
    with pytest.warns(UserWarning, match=r"1 of 7 images are copies of others, .*1\.png.*; 0 stand under different"):
        load(ImageFolder(str(tmp_path)))
    picture(tmp_path / "b" / "other.png", 1)
    with pytest.warns(UserWarning, match=r"2 of 8 images are copies of others, .*; 1 stand under different labels"):
        load(ImageFolder(str(tmp_path)))
    (tmp_path / "rows.csv").write_text("path,label\n" + "".join(f"a/{k}.png,x\nb/{k}.png,y\n" for k in (0, 1, 2, 2)))
    with pytest.warns(UserWarning, match="2 of 8 images are copies of others"):  # the same path twice
        load(Manifest(str(tmp_path / "rows.csv")))


def test_domains_with_other_classes_are_refused_and_told_how_to_go_on(tmp_path: Path) -> None:
    for domain, names in {"art": ["cat", "dog"], "photo": ["dog", "emu"]}.items():
        for place, name in enumerate(names):
            for number in range(5):
                picture(tmp_path / domain / name / f"{number}.png", 20 * number + 3 * place + (domain == "art"))
    with pytest.raises(ValueError, match=r"domains lack classes: .*emu.*set classes to union or intersection"):
        FederatedDataModule(DomainFolder(str(tmp_path)), num_clients=2).setup()
    with pytest.raises(ValueError, match=r"DomainFolder: 1 class \(dog\)"):
        FederatedDataModule(DomainFolder(str(tmp_path), classes="intersection"), num_clients=2).setup()
    FederatedDataModule(DomainFolder(str(tmp_path), classes="union"), num_clients=2).setup()
