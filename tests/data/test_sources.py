"""Every source reads its format and names what is missing or broken."""

import csv
import gzip
import pickle
import re
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning.data import sources
from fl_lightning.data.examples import TensorExamples
from fl_lightning.data.source import Source, Splits
from fl_lightning.data.sources import (
    IDX,
    Digits,
    DomainFolder,
    FakeImages,
    ImageFolder,
    Manifest,
    MedMNIST,
    PublicSplit,
    Torchvision,
)

# The images of these tests are of few kinds.
pytestmark = pytest.mark.filterwarnings("ignore:.*images are copies of others")


def load(source, image_size=None, channels=None, seed=0):
    return source.load(image_size=image_size, channels=channels, seed=seed)


def everything(examples):
    return examples.fetch(torch.arange(len(examples)))


def write_image(path, value=128, size=(6, 6), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).convert(mode).save(path)


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def test_digits_are_split_by_class_and_seed():
    splits = load(Digits(test_fraction=0.25))
    assert len(splits.train) + len(splits.test) == 1797
    assert len(splits.test) == 449
    share = splits.test.labels.bincount() / (splits.test.labels.bincount() + splits.train.labels.bincount())
    assert (share - 0.25).abs().max() < 0.01
    assert splits.class_names[7] == "seven"
    pixels = everything(splits.train)
    assert tuple(pixels.shape[1:]) == (1, 8, 8)
    assert (pixels.min(), pixels.max()) == (0, 1)
    assert torch.equal(everything(load(Digits(test_fraction=0.25)).test), everything(splits.test))
    assert not torch.equal(load(Digits(test_fraction=0.25), seed=1).test.labels, splits.test.labels)
    assert tuple(everything(load(Digits(), 12, 3).test).shape[1:]) == (3, 12, 12)
    with pytest.raises(ValueError, match="between 0 and 1, got 1"):
        Digits(test_fraction=1)


def test_fake_images_depend_on_their_number_alone_and_show_their_class():
    source = FakeImages(num_classes=3, num_domains=2, image_size=8, channels=1, train_per_class=4, test_per_class=2)
    splits = load(source)
    assert splits.train.labels.bincount().tolist() == [8, 8, 8]
    assert splits.train.domains.bincount().tolist() == [12, 12]
    assert set(zip(splits.test.labels.tolist(), splits.test.domains.tolist(), strict=True)) == {
        (label, domain) for label in range(3) for domain in range(2)
    }
    pixels = everything(splits.train)
    assert torch.equal(splits.train.fetch(torch.tensor([5, 1])), pixels[[5, 1]])
    assert tuple(load(source, 16, 3).train.fetch(torch.tensor([0])).shape) == (1, 3, 16, 16)
    inside = (pixels[0] - pixels[1]).abs().mean()
    across = (pixels[0] - pixels[splits.train.labels == 1][0]).abs().mean()
    assert inside < across
    assert not torch.equal(everything(splits.test)[0], pixels[0])


def test_idx_reads_plain_and_gzipped_files(tmp_path):
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (7, 5, 4)), rng.integers(0, 3, 7)
    labels[:3] = [0, 1, 2]
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", pixels)
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels)
    write_idx(tmp_path / "t10k-images-idx3-ubyte", pixels[:3])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", labels[:3])
    splits = load(IDX(str(tmp_path)))
    assert splits.train.labels.tolist() == labels.tolist()
    assert torch.equal(everything(splits.train), torch.from_numpy(pixels)[:, None].float() / 255)
    assert splits.class_names == ("0", "1", "2")
    assert load(IDX(str(tmp_path), class_names=["a", "b", "c"])).class_names == ("a", "b", "c")
    with pytest.raises(ValueError, match="labels go up to 2, but class_names has 2"):
        load(IDX(str(tmp_path), class_names=["a", "b"]))

    write_idx(tmp_path / "t10k-labels-idx1-ubyte", labels[:2])  # shadows the gzipped one
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte must be \(N, H, W\)"):
        load(IDX(str(tmp_path)))
    with pytest.raises(FileNotFoundError, match=r"none: no such IDX file, nor with \.gz"):
        load(IDX(str(tmp_path), train_images="none"))


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "not an IDX file"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01" + bytes(4), "not an IDX file of unsigned bytes"),
        (b"\x00\x00\x08\x03\x00\x00", "do not hold"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x05ab", "do not hold"),
        (gzip.compress(b"abcdefgh" * 99, mtime=0)[:-9], "broken gzip"),
    ],
)
def test_broken_idx_files_are_named(tmp_path, raw, complaint):
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(ValueError, match=rf"file: .*{complaint}"):
        sources.read_idx(tmp_path / "file")


def medmnist(path, shape=(28, 28, 3), labels=1, **changes):
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 6), ("val", 3), ("test", 4)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
        arrays[f"{split}_labels"] = np.arange(count * labels).reshape(count, labels) % 3
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


@pytest.mark.parametrize("shape", [(28, 28, 3), (28, 28)])
def test_medmnist(tmp_path, shape):
    arrays = medmnist(tmp_path / "toymnist.npz", shape)
    splits = load(MedMNIST(str(tmp_path / "toymnist.npz")))
    assert splits.val is not None
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [6, 3, 4]
    assert splits.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    first = everything(splits.train)[0]
    assert tuple(first.shape) == (len(shape) if len(shape) == 3 else 1, 28, 28)
    assert first[0, 3, 5] == pytest.approx(arrays["train_images"][0, 3, 5].flat[0] / 255)


def test_medmnist_refuses_what_it_cannot_read(tmp_path):
    path = tmp_path / "toymnist.npz"
    with pytest.raises(FileNotFoundError, match=r"toymnist\.npz: no such file; download"):
        load(MedMNIST(str(path)))
    medmnist(path, labels=2)
    with pytest.raises(ValueError, match="toymnist is multi-label"):
        load(MedMNIST(str(path)))
    medmnist(path, shape=(28, 28, 28))
    with pytest.raises(ValueError, match=r"train_images must be uint8 \(N, H, W\)"):
        load(MedMNIST(str(path)))
    medmnist(path, val_labels=None)
    with pytest.raises(ValueError, match="has no val_labels"):
        load(MedMNIST(str(path)))
    medmnist(path, train_labels=np.array([[{}]] * 6, dtype=object))  # would need pickle
    with pytest.raises(ValueError, match="not a MedMNIST"):
        load(MedMNIST(str(path)))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="not a MedMNIST"):
        load(MedMNIST(str(path)))


def test_image_folder_without_splits_draws_a_test_set(tmp_path):
    for name, value in (("cat", 40), ("dog", 200)):
        for number in range(5):
            write_image(tmp_path / name / "deep" / f"{number}.PNG", value)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "dog" / "._0.png").write_text("left by another system")
    splits = load(ImageFolder(str(tmp_path)))
    assert splits.class_names == ("cat", "dog")
    assert splits.val is None
    assert (splits.train.labels.bincount().tolist(), splits.test.labels.bincount().tolist()) == ([4, 4], [1, 1])
    values = everything(splits.train)[:, 0, 0, 0] * 255
    assert torch.equal(values.round() == 200, splits.train.labels == 1)
    assert tuple(splits.test.fetch(torch.tensor([], dtype=torch.int64)).shape) == (0, 3, 6, 6)


def test_image_folder_reads_split_folders(tmp_path):
    for split, count in (("train", 3), ("valid", 2), ("test", 1)):
        for name in ("a", "b"):
            for number in range(count):
                write_image(tmp_path / split / name / f"{number}.jpg", mode="L")
    splits = load(ImageFolder(str(tmp_path)))
    assert splits.val is not None
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [6, 4, 2]
    assert everything(splits.test).shape[1] == 1  # grey stays grey
    (tmp_path / "test").rename(tmp_path / "held")
    assert len(load(ImageFolder(str(tmp_path))).test) == 4  # the validation folder
    assert load(ImageFolder(str(tmp_path))).val is None
    (tmp_path / "held" / "a").rename(tmp_path / "valid" / "c")
    with pytest.raises(ValueError, match=r"valid: classes that .*train does not have: \['c'\]"):
        load(ImageFolder(str(tmp_path)))


@pytest.mark.parametrize(("image_size", "channels"), [(None, None), (4, 1), (9, 3)])
def test_training_and_test_images_are_prepared_alike(tmp_path, image_size, channels):
    noise = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    for split in ("train", "val", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(noise).save(tmp_path / split / "a" / "one.png")
        Image.fromarray(noise).save(tmp_path / f"{split}.png")
    (tmp_path / "list.csv").write_text(
        "path,label,split\n" + "".join(f"{s}.png,a,{s}\n" for s in ("train", "val", "test"))
    )
    for source in (ImageFolder(str(tmp_path)), Manifest(str(tmp_path / "list.csv"))):
        splits = load(source, image_size, channels)
        (train,), (val,), (test,) = (everything(part) for part in (splits.train, splits.val, splits.test))
        assert torch.equal(train, test)
        assert torch.equal(train, val)
    for arrays in ((tmp_path / "set.npz"),):
        pixels = {f"{s}_images": noise[None, :6, :6] for s in ("train", "val", "test")}
        np.savez(arrays, **pixels, **{f"{s}_labels": np.zeros((1, 1), int) for s in ("train", "val", "test")})
        splits = load(MedMNIST(str(arrays)), image_size, channels)
        assert torch.equal(everything(splits.train), everything(splits.test))


def test_image_folder_recognises_tiny_imagenet(tmp_path):
    for key in ("n02", "n01"):
        for number in range(2):
            write_image(tmp_path / "train" / key / "images" / f"{key}_{number}.JPEG")
    write_image(tmp_path / "val" / "images" / "val_0.JPEG")
    write_image(tmp_path / "val" / "images" / "val_1.JPEG")
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    (tmp_path / "words.txt").write_text("n01\tgoldfish, Carassius auratus\n")
    write_image(tmp_path / "test" / "images" / "test_0.JPEG")
    splits = load(ImageFolder(str(tmp_path)))
    assert splits.class_names == ("goldfish", "n02")
    assert splits.train.labels.tolist() == [0, 0, 1, 1]
    assert splits.test.labels.tolist() == [1, 0]
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\n")
    with pytest.raises(ValueError, match="line 1: unknown class 'n09'"):
        load(ImageFolder(str(tmp_path)))


def test_image_folder_names_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone: no such folder; put the images there as root/class"):
        load(ImageFolder(str(tmp_path / "gone")))
    with pytest.raises(ValueError, match="has no class folders"):
        load(ImageFolder(str(tmp_path)))
    write_image(tmp_path / "a" / "0.png")
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="b: no images"):
        load(ImageFolder(str(tmp_path)))
    write_image(tmp_path / "b" / "0.png", size=(6, 9))
    with pytest.raises(ValueError, match="images differ in size"):
        load(ImageFolder(str(tmp_path)))
    assert tuple(everything(load(ImageFolder(str(tmp_path)), 4).train).shape[1:]) == (3, 4, 4)


def test_unreadable_files_are_refused_or_skipped(tmp_path):
    for name in ("a", "b"):
        for number in range(3):
            write_image(tmp_path / name / f"{number}.png")
    (tmp_path / "a" / "broken.png").write_text("no image")
    (tmp_path / "b" / "empty.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 of 8 images cannot be read, the first is: .*broken\.png"):
        load(ImageFolder(str(tmp_path)))
    with pytest.warns(UserWarning, match=r"2 unreadable images left out: .*broken\.png, .*empty\.png"):
        splits = load(ImageFolder(str(tmp_path), on_unreadable="skip"))
    assert len(splits.train) + len(splits.test) == 6
    with pytest.raises(ValueError, match="on_unreadable must be"):
        ImageFolder(str(tmp_path), on_unreadable="ignore")


def test_cache_decodes_once_to_the_same_bits(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.fromarray(noise + 16 * number).save(tmp_path / name / f"{number}.png")
    plain = load(ImageFolder(str(tmp_path), test_fraction=0.5), 12)
    kept = load(ImageFolder(str(tmp_path), test_fraction=0.5, cache=True), 12)
    before = everything(kept.train)
    assert torch.equal(everything(plain.train), before)
    for path in tmp_path.rglob("*.png"):
        path.unlink()
    assert torch.equal(everything(kept.train), before)
    with pytest.raises(FileNotFoundError):
        everything(plain.train)


def domains(root, **classes):
    for domain, names in classes.items():
        for name in names:
            for number in range(5):
                write_image(root / domain / name / f"{number}.png", 10 * number)


def test_domain_folder_numbers_domains_and_classes(tmp_path):
    domains(tmp_path, photo=["cat", "dog"], art=["cat", "dog"], clip=["cat", "dog"])
    splits = load(DomainFolder(str(tmp_path)))
    assert (splits.domain_names, splits.class_names) == (("art", "clip", "photo"), ("cat", "dog"))
    for part, count in ((splits.train, 4), (splits.test, 1)):
        strata = torch.stack([part.domains, part.labels]).unique(dim=1, return_counts=True)[1]
        assert strata.tolist() == [count] * 6
    assert load(DomainFolder(str(tmp_path), ["photo", "art"])).domain_names == ("photo", "art")
    with pytest.raises(
        FileNotFoundError, match=r"no folder for the domains \['oil'\]; it has \['art', 'clip', 'photo'\]"
    ):
        load(DomainFolder(str(tmp_path), ["oil"]))


def test_domain_folder_refuses_differing_classes_unless_told(tmp_path):
    domains(tmp_path, art=["cat", "dog"], photo=["dog", "emu"])
    with pytest.raises(ValueError, match=r"'art': \['emu'\], 'photo': \['cat'\]"):
        load(DomainFolder(str(tmp_path)))
    assert load(DomainFolder(str(tmp_path), classes="union")).class_names == ("cat", "dog", "emu")
    common = load(DomainFolder(str(tmp_path), classes="intersection"))
    assert common.class_names == ("dog",)
    assert len(common.train) + len(common.test) == 10
    assert common.train.labels.unique().tolist() == [0]


def test_domain_folder_takes_named_classes_in_their_order(tmp_path):
    domains(tmp_path, art=["cat", "dog", "emu"], photo=["cat", "dog", "fox"])
    splits = load(DomainFolder(str(tmp_path), class_names=["dog", "cat"]))
    assert splits.class_names == ("dog", "cat")
    assert len(splits.train) + len(splits.test) == 20
    with pytest.raises(ValueError, match=r"class_names names classes that domains lack: {'art': \['fox'\]}"):
        load(DomainFolder(str(tmp_path), class_names=["dog", "fox"]))


def write_manifest(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_manifest_with_sites_and_splits(tmp_path):
    rows = []
    for number, (label, site, split) in enumerate(
        [
            ("10", "york", "train"),
            ("9", "bonn", "train"),
            ("9", "york", "valid"),
            ("10", "bonn", "test"),
            ("9", "bonn", ""),
        ]
    ):
        write_image(tmp_path / "pictures" / f"{number}.png", number)
        rows.append({"path": f"{number}.png", "label": label, "site": site, "split": split})
    table = write_manifest(tmp_path / "table.csv", rows)
    splits = load(Manifest(table, str(tmp_path / "pictures")))
    assert (splits.class_names, splits.domain_names) == (("9", "10"), ("bonn", "york"))
    assert splits.train.labels.tolist() == [1, 0, 0]
    assert splits.train.domains.tolist() == [1, 0, 0]
    assert splits.val is not None
    assert (splits.val.labels.tolist(), splits.test.labels.tolist()) == ([0], [1])
    assert (everything(splits.test) * 255).round().unique().tolist() == [3]
    assert load(Manifest(table, str(tmp_path / "pictures"), ["nine", "ten"])).class_names == ("nine", "ten")
    with pytest.raises(ValueError, match="2 classes, but class_names has 1"):
        load(Manifest(table, str(tmp_path / "pictures"), ["nine"]))


def test_manifest_with_names_alone_draws_a_test_set(tmp_path):
    rows = [{"path": f"{number}.png", "label": ["ape", "bat"][number % 2]} for number in range(10)]
    for row in rows:
        write_image(tmp_path / row["path"])
    table = tmp_path / "table.csv"
    write_manifest(table, rows)
    table.write_text("\ufeff" + table.read_text(encoding="utf-8"), encoding="utf-8")  # as spreadsheets save it
    splits = load(Manifest(str(table)))
    assert splits.class_names == ("ape", "bat")
    assert splits.domain_names == ("all",)
    assert sorted(splits.test.labels.tolist()) == [0, 1]


def test_manifest_names_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such manifest"):
        load(Manifest(str(tmp_path / "gone.csv")))
    good = {"path": "0.png", "label": "a", "split": "train"}
    for bad, complaint in (
        ({**good, "label": ""}, "line 3: columns path and label"),
        ({**good, "split": "holdout"}, "line 3: split must be one of .*'holdout'"),
    ):
        with pytest.raises(ValueError, match=complaint):
            load(Manifest(write_manifest(tmp_path / "table.csv", [good, bad])))
    with pytest.raises(ValueError, match="line 2: columns path and label"):
        load(Manifest(write_manifest(tmp_path / "table.csv", [{"file": "0.png", "label": "a"}])))
    with pytest.raises(FileNotFoundError, match=r"1 of 1 images are missing, the first is .*0\.png"):
        load(Manifest(write_manifest(tmp_path / "table.csv", [good])))
    (tmp_path / "table.csv").write_text("path,label\n")
    with pytest.raises(ValueError, match="no rows"):
        load(Manifest(str(tmp_path / "table.csv")))


def test_torchvision_arrays(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 28, 28))
    for part, count in (("train", 6), ("t10k", 4)):
        write_idx(tmp_path / "MNIST" / "raw" / f"{part}-images-idx3-ubyte", pixels[:count])
        write_idx(tmp_path / "MNIST" / "raw" / f"{part}-labels-idx1-ubyte", np.arange(count))
    splits = load(Torchvision("MNIST", str(tmp_path)))
    assert (splits.train.labels.tolist(), splits.test.labels.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3])
    assert splits.class_names[2] == "2 - two"
    assert torch.equal(everything(splits.train), torch.from_numpy(pixels)[:, None].float() / 255)


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 3, 1, 2)])
def test_torchvision_arrays_in_colour(axes):
    class Held:
        targets = [1, 0]

    pixels = np.random.default_rng(0).integers(0, 256, (2, 6, 5, 3), dtype=np.uint8)  # as CIFAR; transposed, as SVHN
    Held.data = pixels.transpose(axes)
    examples = Torchvision("CIFAR10")._examples(Held(), None, None)
    assert torch.equal(everything(examples), torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255)
    assert examples.labels.tolist() == [1, 0]


def test_torchvision_without_a_test_split(tmp_path):
    for name, value in (("Forest", 50), ("River", 150)):
        for number in range(5):
            write_image(tmp_path / "eurosat" / "2750" / name / f"{name}_{number}.jpg", value, (64, 64))
    splits = load(Torchvision("EuroSAT", str(tmp_path)), 16)
    assert splits.class_names == ("Forest", "River")
    assert (splits.train.labels.bincount().tolist(), splits.test.labels.bincount().tolist()) == ([4, 4], [1, 1])
    values = everything(splits.train)
    assert tuple(values.shape) == (8, 3, 16, 16)
    assert torch.equal(values.mean((1, 2, 3)) > 0.4, splits.train.labels == 1)
    with pytest.raises(ValueError, match="image_size must be given"):
        load(Torchvision("EuroSAT", str(tmp_path)))


def test_torchvision_with_three_splits_and_lists(tmp_path):
    base = tmp_path / "dtd" / "dtd"
    (base / "labels").mkdir(parents=True)
    for split, count in (("train", 3), ("val", 2), ("test", 1)):
        lines = []
        for name, value in (("woven", 200), ("banded", 50)):
            for number in range(count):
                write_image(base / "images" / name / f"{split}{number}.jpg", value)
                lines.append(f"{name}/{split}{number}.jpg\n")
        (base / "labels" / f"{split}2.txt").write_text("".join(lines))
    splits = load(Torchvision("DTD", str(tmp_path), options={"partition": 2}), 6)
    assert splits.val is not None
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [6, 4, 2]
    assert splits.class_names == ("banded", "woven")
    assert splits.train.labels.tolist() == [0, 0, 0, 1, 1, 1]  # in the order of the paths, not of the list
    assert torch.equal(everything(splits.train)[:, 0, 0, 0] > 0.5, splits.train.labels == 1)


def test_torchvision_pets_and_caltech(tmp_path):
    pets = tmp_path / "oxford-iiit-pet"
    (pets / "annotations").mkdir(parents=True)
    for split in ("trainval", "test"):
        write_image(pets / "images" / f"Abyssinian_{split}.jpg")
        write_image(pets / "images" / f"basset_hound_{split}.jpg")
        text = f"Abyssinian_{split} 1 1 1\nbasset_hound_{split} 2 2 1\n"
        (pets / "annotations" / f"{split}.txt").write_text(text)
    assert load(Torchvision("OxfordIIITPet", str(tmp_path)), 8).class_names == ("Abyssinian", "Basset Hound")

    objects = tmp_path / "caltech101" / "101_ObjectCategories"
    (tmp_path / "caltech101" / "Annotations").mkdir(parents=True)
    for name in ("BACKGROUND_Google", "ant", "crab"):
        for number in range(1, 6):
            write_image(objects / name / f"image_{number:04d}.jpg", mode="L", size=(6, 5 + number))
    splits = load(Torchvision("Caltech101", str(tmp_path)), 8)
    assert splits.class_names == ("ant", "crab")
    assert tuple(everything(splits.train).shape) == (8, 3, 8, 8)  # grey and of mixed sizes on disk


def test_torchvision_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"unknown torchvision set 'CIFAR11'; allowed: .*CIFAR10,"):
        Torchvision("CIFAR11")
    for name in sources.TORCHVISION:
        with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path}: torchvision cannot load {name}")) as caught:
            load(Torchvision(name, str(tmp_path)), 32)
        assert "Set download: true" in str(caught.value)


def test_large_arrays_are_resized_when_fetched(monkeypatch):
    small = load(Digits(), 16, 3)
    monkeypatch.setattr(sources, "IN_MEMORY_BYTES", 1000)
    lazy = load(Digits(), 16, 3)
    assert torch.equal(everything(lazy.test), everything(small.test))
    assert torch.equal(lazy.train.labels, small.train.labels)


@pytest.mark.parametrize("lazily", [False, True])
def test_examples_can_be_sent_to_another_process(monkeypatch, lazily):
    if lazily:
        monkeypatch.setattr(sources, "IN_MEMORY_BYTES", 0)
    test = load(Digits(), 9).test
    assert torch.equal(everything(pickle.loads(pickle.dumps(test))), everything(test))


def as_rows(examples):
    return {tuple(row) for row in everything(examples).flatten(1).tolist()}


class Numbered(Source):
    """Training and test images that hold nothing but their own number; 3 classes, 2 domains."""

    def load(self, *, image_size, channels, seed):
        drawn = torch.randperm(300, generator=torch.Generator().manual_seed(seed)).float().div_(1000)
        pixels = drawn[:, None, None, None] + torch.arange(4.0).view(1, 1, 2, 2) * 10
        labels, domains = torch.arange(300) % 3, torch.arange(300) // 3 % 2
        whole = TensorExamples(pixels, labels, domains)
        return Splits(whole.select(range(240)), whole.select(range(240, 300)), ("a", "b", "c"), ("d", "e"))


def test_the_public_part_and_the_clients_part_are_disjoint_cover_and_are_stratified():
    whole = Numbered().load(image_size=None, channels=None, seed=4)
    public, clients = (load(PublicSplit(Numbered(), 0.25, part, seed=4)) for part in ("public", "clients"))
    assert (len(public.train), len(clients.train)) == (60, 180)
    assert not as_rows(public.train) & as_rows(clients.train)
    assert as_rows(public.train) | as_rows(clients.train) == as_rows(whole.train)
    for splits, count in ((public, 10), (clients, 30)):
        strata = splits.train.labels * 2 + splits.train.domains
        assert strata.bincount().tolist() == [count] * 6
        assert torch.equal(everything(splits.test), everything(whole.test))
        assert not as_rows(splits.train) & as_rows(splits.test)
        assert (splits.class_names, splits.domain_names) == (whole.class_names, whole.domain_names)


def test_the_split_is_its_own_seeds_whatever_the_run_s():
    first, again = (load(PublicSplit(Numbered(), 0.25, "public"), seed=seed) for seed in (0, 1))
    assert torch.equal(everything(first.train), everything(again.train))
    assert torch.equal(everything(first.test), everything(again.test))
    other = load(PublicSplit(Numbered(), 0.25, "public", seed=1), seed=0)
    assert as_rows(other.train) != as_rows(first.train)


def test_variants_make_classes_of_their_own():
    plain = load(PublicSplit(Numbered(), 0.25, "public"))
    varied = load(PublicSplit(Numbered(), 0.25, "public", variants=["none", "rotate90", "mirror"]))
    assert varied.class_names == ("a", "b", "c", *(f"{c} {v}" for v in ("rotate90", "mirror") for c in "abc"))
    for found, source in ((varied.train, plain.train), (varied.test, plain.test)):
        pixels = everything(source)
        assert torch.equal(found.labels, torch.cat([source.labels, source.labels + 3, source.labels + 6]))
        assert torch.equal(found.domains, source.domains.repeat(3))
        as_is, turned, mirrored = everything(found).chunk(3)
        assert torch.equal(as_is, pixels)
        # [[0, 1], [2, 3]] against the clock is [[1, 3], [0, 2]], mirrored [[1, 0], [3, 2]].
        assert torch.equal(turned.flatten(1), pixels.flatten(1)[:, [1, 3, 0, 2]])
        assert torch.equal(mirrored.flatten(1), pixels.flatten(1)[:, [1, 0, 3, 2]])
    oblong = FakeImages(num_classes=2, image_size=6)
    oblong.load = lambda **_: Splits(*[TensorExamples(torch.zeros(8, 1, 4, 6), torch.zeros(8))] * 2, ("a",))
    with pytest.raises(ValueError, match="'rotate90', which needs square images"):
        load(PublicSplit(oblong, 0.5, "public", variants=["rotate90"]))
    one = load(PublicSplit(Numbered(), 0.25, "public", variants=["mirror"]))
    assert one.class_names == ("a mirror", "b mirror", "c mirror")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fraction": 1.0}, r"fraction must be between 0 and 1, got 1.0"),
        ({"part": "private"}, "part must be 'public' or 'clients', got 'private'"),
        ({"variants": ["mirror"]}, "variants must be null for the clients' part"),
        ({"part": "public", "variants": []}, "variants must be some of"),
        ({"part": "public", "variants": ["mirror", "mirror"]}, "none of them twice"),
        ({"part": "public", "variants": ["upside"]}, "variants must be some of"),
    ],
)
def test_public_splits_that_make_no_sense_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        PublicSplit(Numbered(), **options)
