"""The same configuration gives the same bits: twice in a row, in a fresh process, by either client loop, after a resume, and
on workers of Ray, however many.

One matrix over every configuration in ``configs/``, on few clients and few steps; FedNSAM by default, all by name
(``pytest -m "slow or not slow" tests/cli/test_determinism.py``).
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import shutil
import sys
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning.__main__ import main
from fl_lightning.data.bank import Bank, Provenance
from fl_lightning.federation.state import CheckpointFolder, digest, read_checkpoint

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = ["--trainer.logger=false", "--federation.progress=false", "--federation.callbacks=null", "--trainer.max_steps=3"]
CLIENTS = ["--data.num_clients=3", "--federation.keep_last=9"]
ROUNDS = ["--method.init_args.rounds=2"]
STUDENT = ["--method.init_args.student.steps=3"]
GENERATOR = [*STUDENT, "--method.init_args.images=20", "--method.init_args.latent=8", "--method.init_args.width=2"]
INVERSION = [*STUDENT, "--method.init_args.images_per_client=6", "--method.init_args.batch=6"]
FACTORY = [
    "--data.num_clients=10",
    *("--method.init_args.training.steps=3", "--method.init_args.classifier.steps=3"),
    *("--method.init_args.samples_per_class=3", "--method.init_args.generator.init_args.steps=2"),
]
OWN = {
    "ensemble": [],
    "bank_distillation": [*STUDENT, "--method.init_args.bank={bank}"],
    "noise_distillation": [*STUDENT, "--method.init_args.images=20"],
    "dense": [*GENERATOR, "--method.init_args.epochs=2"],
    "co_boosting": [*GENERATOR, "--method.init_args.epochs=2"],
    "fedftg": [*GENERATOR, "--method.init_args.iterations=2"],
    "deep_inversion": [*INVERSION, "--method.init_args.iterations=4"],
    "adi": [*INVERSION, "--method.init_args.iterations=4", "--method.init_args.epochs=2"],
    "fedmitr": [*INVERSION, "--method.init_args.iterations=4", "--method.init_args.events=[1,2]"],
    "federated_factory": FACTORY,
    "federated_factory_p2p": FACTORY,
    "feddtl": [*ROUNDS, "--data.num_clients=5"],
    "fedlora": [*ROUNDS, "--data.num_clients=5"],
    "centralized": [*ROUNDS, "--data.num_clients=1"],
}
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
Outcome = tuple[str, list[dict[str, str]]]


def arguments(name: str, folder: Path) -> list[str]:
    own = [text.format(bank=folder / "bank.safetensors") for text in OWN.get(name, ROUNDS)]
    root = ["--trainer.default_root_dir", str(folder)]
    return ["fit", "--config", str(CONFIGS / f"{name}.yaml"), *root, *TINY, *CLIENTS, *own]


def outcome(folder: Path) -> Outcome:
    """Digest of the newest run's last checkpoint, and its record without the clock."""
    (run,) = folder.glob("lightning_logs/*/version_*")
    state, _ = read_checkpoint(CheckpointFolder(run / "checkpoints").list()[-1])
    with open(run / "metrics.csv", newline="") as file:
        rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]
    return digest({"method": state["method"], "memory": state["memory"]}), rows


def fit(name: str, folder: Path, *more: str) -> Outcome:
    folder.mkdir(exist_ok=True)
    if name == "bank_distillation":
        Bank([(Provenance("0", 1, (0, 1)), torch.linspace(0, 1, 128).view(2, 1, 8, 8))]).save(
            folder / "bank.safetensors"
        )
    main([*arguments(name, folder), *more])
    return outcome(folder)


def fresh(name: str, folder: str) -> Any:
    """What the other process does."""
    torch.set_num_threads(1)
    return json.loads(json.dumps(fit(name, Path(folder))))


@pytest.fixture(scope="module")
def process() -> Any:
    """A process that has run nothing before."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


ALL = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "fednsam" else pytest.mark.slow) for name in NAMES]
)


@ALL
def test_the_same_configuration_gives_the_same_bits(name: str, tmp_path: Path, process: Any) -> None:
    first = fit(name, tmp_path / "first")
    assert fit(name, tmp_path / "again") == first
    assert process.apply(fresh, (name, str(tmp_path / "fresh"))) == list(first)
    assert fit(name, tmp_path / "trainer", "--federation.client_loop=trainer") == first
    shutil.copytree(tmp_path / "first", tmp_path / "resumed")
    (run,) = (tmp_path / "resumed").glob("lightning_logs/*/version_*")
    *before, _ = CheckpointFolder(run / "checkpoints").list()
    if before:  # not of a single round
        assert fit(name, tmp_path / "resumed", "--ckpt_path", str(before[-1])) == first


@ALL
def test_any_number_of_workers_gives_the_same_bits(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Behind the stand-in for Ray, in this process."""
    pytest.importorskip("ray")
    from federation.test_ray import Copying

    from fl_lightning.federation.engines.ray import RayEngine

    serial, made, used = fit(name, tmp_path / "serial"), RayEngine.__init__, []

    def make(engine: RayEngine, *args: Any, **options: Any) -> None:
        made(engine, *args, **options)
        engine.ray = Copying()
        used.append(engine.ray)

    monkeypatch.setattr(RayEngine, "__init__", make)
    for workers in (1, 2, 3):
        more = ("--federation.engine=ray", f"--federation.num_workers={workers}")
        assert fit(name, tmp_path / str(workers), *more) == serial
        assert used[-1].order


@pytest.fixture(scope="module")
def cluster() -> Any:
    """Ray, started once."""
    ray = pytest.importorskip("ray")
    variables = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", runtime_env={"env_vars": variables})
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_processes_of_ray_give_the_same_bits(name: str, tmp_path: Path, cluster: Any) -> None:
    serial = fit(name, tmp_path / "serial")
    assert fit(name, tmp_path / "ray", "--federation.engine=ray", "--federation.num_workers=2") == serial


@ALL
def test_bf16_mixed_runs_everywhere(name: str, tmp_path: Path, capsys: Any) -> None:
    """And trains something else than float32 does. Differential privacy for records refuses it by name."""
    mixed = "--trainer.precision=bf16-mixed"
    if name == "fedavg_record_dp":
        with pytest.raises(SystemExit):
            fit(name, tmp_path / "mixed", mixed)
        assert "trainer.precision is bf16-mixed; federation.record_privacy needs 32-true" in capsys.readouterr().err
        return
    digest, rows = fit(name, tmp_path / "mixed", mixed)
    assert digest != fit(name, tmp_path / "plain")[0]
    assert all(isfinite(float(value)) for row in rows for value in row.values() if value)
