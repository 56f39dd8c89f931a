"""Every configuration runs, dry, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from fl_lightning.__main__ import main
from fl_lightning.data.bank import Bank, Provenance

CONFIGS = Path(__file__).parents[2] / "configs"
# Paper-sized configurations run on invented images: FedDTL's in tests/tasks, FedNSAM's below; the large ones by name.
WHOLE = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("pretrain/*.yaml")])


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_configuration_runs_dry(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dry = ["--trainer.fast_dev_run", "true", "--trainer.accelerator", "cpu", "--federation.callbacks", "null"]
    source = yaml.safe_load(path.read_text())["data"]["source"]
    if source["class_path"] in ("Glyphs", "Scenes"):  # drawing the images would take longer than all the rest
        dry += ["--data.source.init_args.images_per_class", "2", "--data.source.init_args.test_images_per_class", "2"]
    if "IDX" in str(source):  # files that not every machine has
        dry += ["--data.source.init_args.source=FakeImages", "--data.source.init_args.source.init_args.channels=1"]
    if path.stem == "bank_distillation":  # another run's images
        bank = tmp_path_factory.mktemp("bank") / "bank.safetensors"
        Bank([(Provenance("0", 1, (0, 1, 2)), torch.rand(3, 1, 8, 8))]).save(bank)
        dry += ["--method.init_args.bank", str(bank)]
    cli = main(["fit", "--config", str(path), *dry])
    rounds = cli.method.rounds  # type: ignore[attr-defined]
    assert [row["round"] for row in cli.loop.history] == list(range(rounds + 1))  # type: ignore[attr-defined]
    assert rounds in (1, 2)
    assert list(tmp_path.iterdir()) == []
    # A value that is not in the file that a run leaves, or an address in it, would make every process's run another one.
    assert "Unable to serialize" not in cli.config_text()  # type: ignore[attr-defined]


def test_no_study_tunes_on_a_test_set() -> None:
    found = []
    for path in sorted((CONFIGS / "compare").glob("*.yaml")):
        study = yaml.safe_load(path.read_text())
        variants = [variant for variant in study["variants"].values() if isinstance(variant, dict)]
        grids = [study.get("grid"), *(variant.get("grid") for variant in variants)]
        found += [grid["metric"] for grid in grids if grid and "metric" in grid]
    assert found
    assert all(metric.startswith("val") for metric in found), found


@pytest.mark.parametrize("path", sorted((CONFIGS / "paper").glob("*.yaml")), ids=lambda path: path.stem)
def test_paper_configurations_parse(path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(path), "--print_config"])
    assert exit.value.code in (0, None)
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["federation"]["name"] == yaml.safe_load(path.read_text())["federation"]["name"]


# Trainable parameters: LeNet-5 and VGG-11 by hand, ResNet-18 (11,173,962 for ten classes) with 512 + 1 a class; for
# transformers r (d_in + d_out) of qkv and proj in every block, and the classifier.
FEDNSAM = {
    "cifar10_lenet5": 797_962,
    "cifar10_vgg11": 9_272_790,
    "cifar10_resnet18": 11_173_962,
    "cifar100_lenet5": 797_962 + 90 * 193,
    "cifar100_resnet18": 11_173_962 + 90 * 513,
    "cifar100_vit_base": 16 * 12 * (4 + 2) * 768 + 100 * 769,
    "tiny_imagenet_resnet18": 11_173_962 + 190 * 513,
    "tiny_imagenet_vit_base": 16 * 12 * (4 + 2) * 768 + 200 * 769,
    "tiny_imagenet_swin_small": 16 * (4 + 2) * 96 * (2 * 1 + 2 * 2 + 18 * 4 + 2 * 8) + 200 * 769,
    "tiny_imagenet_swin_base": 16 * (4 + 2) * 128 * (2 * 1 + 2 * 2 + 18 * 4 + 2 * 8) + 200 * 1025,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "cifar10_lenet5" else pytest.mark.slow) for name in FEDNSAM]
)
def test_fednsams_paper_configurations_run_dry_on_fake_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The papers' networks with random weights on invented images of the right shape."""
    monkeypatch.chdir(tmp_path)
    classes = {"cifar10": 10, "cifar100": 100}.get(name.split("_")[0], 200)
    fake = {"num_classes": classes, "train_per_class": 200 // classes, "test_per_class": 1}
    cli = main(
        [
            "fit",
            f"--config={CONFIGS / 'paper' / f'fednsam_{name}.yaml'}",
            "--data.source=FakeImages",
            *[f"--data.source.init_args.{key}={value}" for key, value in fake.items()],
            *(["--model.init_args.network.init_args.pretrained=false"] if "vit" in name or "swin" in name else []),
            "--trainer.fast_dev_run=true",
            "--trainer.accelerator=cpu",
            "--federation.eval_batch_size=8",
        ]
    )
    loop = cli.loop  # type: ignore[attr-defined]
    assert sum(p.numel() for p in loop.model.trainable().values()) == FEDNSAM[name]
    assert [row["round"] for row in loop.history] == [0, 1, 2]
    assert len(loop.data.info.clients) == (50 if "vit" in name or "swin" in name else 100)
    assert bool(loop.data.train("0").augmentation) == ("vit" not in name and "swin" not in name)


# Classes and pixels; the generators' parameters are counted in tests/models/test_edm2.py.
FACTORY = {
    "cifar10": (10, 32),
    "bloodmnist": (8, 32),
    "retinamnist": (5, 32),
    "pathmnist": (9, 32),
    "isic2019": (8, 128),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORY)
def test_federated_factorys_paper_configurations_run_dry_on_fake_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's networks with random weights on invented images of the right shape; few images are drawn, in few steps."""
    monkeypatch.chdir(tmp_path)
    classes, size = FACTORY[name]
    cli = main(
        [
            "fit",
            f"--config={CONFIGS / 'paper' / f'federated_factory_{name}.yaml'}",
            "--data.source=FakeImages",
            f"--data.source.init_args.num_classes={classes}",
            f"--data.source.init_args.image_size={size}",
            "--data.source.init_args.train_per_class=2",
            "--data.source.init_args.test_per_class=1",
            "--method.init_args.samples_per_class=1",
            "--method.init_args.generator.init_args.steps=2",
            "--federation.callbacks=null",
            "--trainer.fast_dev_run=true",
            "--trainer.accelerator=cpu",
            "--federation.eval_batch_size=8",
        ]
    )
    method = cli.method  # type: ignore[attr-defined]
    own = next(iter(method.factories["0"].values()))
    assert sum(v.numel() for n, v in own.items() if "fourier" not in n.lower()) > (5e7 if size == 32 else 1.2e7)
    assert sum(p.numel() for p in cli.model.trainable().values()) == pytest.approx(23.5e6, rel=0.01)  # type: ignore[attr-defined]
    assert method.bank.inputs.shape[1:] == (3, size, size)


# Classes, and the parameters of DeiT-Tiny with that many: 5,526,346 with ten, 192 + 1 more for each further one.
MITR = {"cifar10": 10, "cifar100": 100, "officehome": 65, "mini_imagenet": 100}


@pytest.mark.slow
@pytest.mark.parametrize("name", MITR)
def test_fedmitrs_paper_configurations_run_dry_on_fake_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeiT-Tiny with random weights on invented images of the right shape, and two synthetic ones."""
    monkeypatch.chdir(tmp_path)
    cli = main(
        [
            "fit",
            f"--config={CONFIGS / 'paper' / f'fedmitr_{name}.yaml'}",
            "--data.source=FakeImages",
            f"--data.source.init_args.num_classes={MITR[name]}",
            "--data.source.init_args.image_size=224",
            "--data.source.init_args.train_per_class=2",
            "--data.source.init_args.test_per_class=1",
            "--data.batch_size=2",
            "--model.init_args.network.init_args.pretrained=false",
            "--method.init_args.images_per_client=2",
            "--federation.callbacks=null",
            "--trainer.fast_dev_run=true",
            "--trainer.accelerator=cpu",
            "--federation.eval_batch_size=8",
        ]
    )
    method = cli.method  # type: ignore[attr-defined]
    assert sum(p.numel() for p in cli.model.trainable().values()) == 5_526_346 + (MITR[name] - 10) * 193  # type: ignore[attr-defined]
    assert method.stops.check(cli.model.network) == [137, 95, 66, 46]  # type: ignore[attr-defined]
    assert method.bank.inputs.shape == (4, 3, 224, 224)
