"""What a run writes at its end: whatever would fail there is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from federation.tiny import federation, same
from methods.test_distillation import single
from methods.test_federated_factory import factory, linear
from safetensors.torch import load_file

from fl_lightning import methods
from fl_lightning.data.bank import Bank
from fl_lightning.federation.callbacks import ExportBank, ExportModel, FederationCallback
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.methods import FedAvg, FedFTG, LocalOnly, NoiseDistillation, OneShotEnsemble
from fl_lightning.methods.base import Method, Training
from fl_lightning.methods.distillation import OneShotDistillation


def tiny_ftg() -> FedFTG:
    return FedFTG(images=4, iterations=1, latent=4, width=4, student=Training(1, 4))


def assembled(method: Method, callback: FederationCallback) -> FederationLoop:
    options = {"network": single(linear), "data_options": {"dtype": torch.float32}}
    return federation(method, callbacks=[callback], **options)  # type: ignore[arg-type]


def refused(method: Method, callback: FederationCallback, message: str) -> None:
    loop = assembled(method, callback)
    with pytest.raises(ValueError, match=message):
        loop.fit()
    assert loop.history == []
    assert not loop.participant.trained


@pytest.mark.parametrize("method", [LocalOnly(1), OneShotEnsemble(), factory("peer")], ids=lambda m: type(m).__name__)
def test_who_has_no_model_says_so_before_training(method: Method, tmp_path: Path) -> None:
    refused(method, ExportModel(str(tmp_path / "x" / "model.safetensors")), "has no global model to export")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", [FedAvg(1), NoiseDistillation(4), factory("peer")], ids=lambda m: type(m).__name__)
def test_who_has_no_images_says_so_before_training(method: Method, tmp_path: Path) -> None:
    refused(method, ExportBank(str(tmp_path / "x" / "bank.safetensors")), "has no synthetic images to export")
    assert list(tmp_path.iterdir()) == []


def test_who_makes_images_says_so() -> None:
    kinds = [kind for kind in vars(methods).values() if isinstance(kind, type) and issubclass(kind, Method)]
    silent = {kind.__name__ for kind in kinds if issubclass(kind, OneShotDistillation) and not kind.makes_images}
    assert silent <= {"NoiseDistillation", "OneShotDistillation"}
    assert {kind.__name__ for kind in kinds if kind.makes_images} >= {"CoBoosting", "DENSE", "FedMITR", "DeepInversion"}
    assert factory("server").makes_images


@pytest.mark.parametrize("exporter", [ExportModel, ExportBank])
def test_a_place_that_takes_no_file_is_refused_before_training(exporter: type, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    method = FedAvg(1) if exporter is ExportModel else tiny_ftg()
    name = exporter.__name__
    refused(
        method, exporter(str(tmp_path / "file" / "x")), rf"{name}.path is '.*file/x'; its folder must be one that can"
    )
    refused(method, exporter(str(tmp_path / "folder")), rf"{name}.path is '.*folder', which is a folder; it must be")


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    callback = ExportModel(str(tmp_path / "x" / "model.safetensors"))
    federation(FedAvg(1), callbacks=[callback], trainer={"fast_dev_run": True}).fit()
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_and_where(tmp_path: Path) -> None:
    path = tmp_path / "new" / "er" / "model.safetensors"
    loop = assembled(FedAvg(1), ExportModel(str(path)))
    loop.fit()
    assert same(load_file(path), loop.method.state())  # type: ignore[attr-defined]
    bank = tmp_path / "new" / "bank.safetensors"
    assembled(tiny_ftg(), ExportBank(str(bank))).fit()
    assert len(Bank.load(bank)) == 4
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["bank.safetensors", "er"]
