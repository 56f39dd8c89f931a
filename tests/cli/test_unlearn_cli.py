"""``unlearn`` and ``enrol`` on a run that ``fit`` left."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.__main__ import main
from fl_lightning.cli import config_hash
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.participant import Participant
from fl_lightning.federation.state import CheckpointFolder, digest, read_checkpoint
from fl_lightning.report.compare import index_runs

CONFIG = Path(__file__).parents[2] / "configs" / "federated_factory.yaml"
SMALL = [
    *("--data.num_clients", "4", "--data.train_fraction", "0.2", "--data.partitioner", "Shards"),
    *("--method.init_args.generator", "GaussianTask", "--method.init_args.pretraining", "[]"),
    *("--method.init_args.samples_per_class", "8", "--method.init_args.training", '{"steps": 1, "batch_size": 500}'),
    *("--method.init_args.classifier", '{"steps": 3, "batch_size": 8}'),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished")
    cli: Any = main(["fit", "--config", str(CONFIG), *SMALL, "--trainer.default_root_dir", str(root)])
    return cli.run_folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a finished run."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(finished, tmp_path / "lightning_logs" / "federated_factory" / "version_0"))


def test_a_client_is_forgotten_exactly_and_nothing_older_stays(folder: Path, capsys: pytest.CaptureFixture) -> None:
    before, _ = read_checkpoint(folder / "checkpoints" / "round_00002")
    (folder / "samples.png").write_bytes(b"a picture of what was drawn")
    (folder / "pictures" / "client_1").mkdir(parents=True)
    (folder / "pictures" / "client_1" / "factory_3_samples_0000100.png").write_bytes(b"of its training")
    (folder / "uploads").mkdir()
    (folder / "uploads" / "1.safetensors").write_bytes(b"a factory")
    (folder / "journal").mkdir()
    (folder / "journal" / "round_00001.log").write_bytes(b"a factory, of a round that was killed")
    assert "1" in before["method"]["factories"]
    main(["unlearn", "--ckpt_path", str(folder), "--client", "1", "--verify"])
    said = capsys.readouterr().out
    assert "DIFFERS" not in said
    assert said.count(" equal ") == 9
    report = json.loads((folder / "unlearned_1.json").read_text())
    assert report["exact"] is True
    assert report["sha256"] == report["never_joined_sha256"]
    assert not (folder / "samples.png").exists()
    assert not (folder / "pictures").exists()
    assert not (folder / "uploads").exists()
    assert not (folder / "journal").exists()
    for checkpoint in sorted((folder / "checkpoints").iterdir()):
        state, _ = read_checkpoint(checkpoint)
        assert set(state["method"]["factories"]) == {"0", "2", "3"}
    assert [c.name for c in sorted((folder / "checkpoints").iterdir())] == ["round_00001", "round_00002"]
    with open(folder / "metrics.csv") as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    assert (folder / "summary.json").is_file()
    # And a class after it; the report on the client stays.
    main(["unlearn", "--ckpt_path", str(folder), "--class_name", "three", "--verify"])
    assert json.loads((folder / "unlearned_class_three.json").read_text())["exact"] is True
    assert (folder / "unlearned_1.json").is_file()
    main(["test", "--ckpt_path", str(folder)])
    # What was forgotten can be verified again, and the run is no longer taken for one of the old configuration.
    main(["unlearn", "--ckpt_path", str(folder), "--class_name", "three", "--verify"])
    assert json.loads((folder / "unlearned_class_three.json").read_text())["exact"] is True
    assert yaml.safe_load((folder / "config.yaml").read_text())["method"]["init_args"]["without"] == [
        "1",
        "class:three",
    ]
    finished, unfinished = index_runs(folder.parent)
    assert not finished
    assert not unfinished


def test_a_run_that_was_killed_while_it_collected_forgets_what_its_journal_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException): ...

    monkeypatch.chdir(tmp_path)
    given, clients = Participant.execute, set[object]()

    def execute(worker: Participant, request: Any, *owner: object) -> Any:
        clients.update(owner[1:2] if owner[0] == 1 else ())
        if owner[:2] == (1, "3") and "kill" in clients:
            raise Killed
        return given(worker, request, *owner)

    monkeypatch.setattr(Participant, "execute", execute)
    clients.add("kill")
    fit = ["fit", "--config", str(CONFIG), *SMALL, "--federation.journal_seconds", "0"]
    with pytest.raises(Killed):
        main(fit)
    folder = tmp_path / "lightning_logs" / "federated_factory" / "version_0"
    assert b"client 1" in (folder / "journal" / "round_00001.log").read_bytes()
    clients.clear()
    main(["unlearn", "--ckpt_path", str(folder), "--client", "1", "--verify"])
    assert json.loads((folder / "unlearned_1.json").read_text())["exact"] is True
    assert not (folder / "journal").exists()
    state, _ = read_checkpoint(folder / "checkpoints" / "round_00002")
    assert set(state["method"]["factories"]) == {"0", "2", "3"}


def test_whoever_was_forgotten_can_join_again(folder: Path, capsys: pytest.CaptureFixture) -> None:
    always, before = read_checkpoint(folder / "checkpoints" / "round_00002")
    main(["unlearn", "--ckpt_path", str(folder), "--client", "1"])
    (folder / "pictures" / "client_0").mkdir(parents=True)
    events = set(folder.glob("events.out.tfevents.*"))
    (folder / "samples.png").write_bytes(b"a picture of what was drawn without the client")
    main(["enrol", "--ckpt_path", str(folder), "--client", "1", "--verify"])
    said = capsys.readouterr().out
    assert "DIFFERS" not in said
    assert said.count(" equal ") == 9
    report = json.loads((folder / "enrolled_1.json").read_text())
    assert report["exact"] is True
    assert report["sha256"] == report["from_the_start_sha256"]
    assert not (folder / "unlearned_1.json").exists()
    assert not (folder / "samples.png").exists()
    assert (folder / "pictures" / "client_0").is_dir()  # of factories that are as they were
    assert events <= set(folder.glob("events.out.tfevents.*"))
    now, facts = read_checkpoint(folder / "checkpoints" / "round_00002")
    assert digest(now["method"]) == digest(always["method"])
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["round/clients"] or 0) for row in rows] == [0, 1, 0]  # the newcomer alone
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["method"]["init_args"]["without"] is None
    assert facts["config_hash"] == before["config_hash"] == config_hash(config)  # a run with everybody


def test_an_interrupted_enrolment_is_finished_by_the_same_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["unlearn", "--ckpt_path", str(folder), "--client", "1"])
    run = FederationLoop._run_round

    def interrupt(loop: FederationLoop, round: int) -> None:
        if round == 2:
            raise KeyboardInterrupt
        run(loop, round)

    monkeypatch.setattr(FederationLoop, "_run_round", interrupt)
    with pytest.raises(KeyboardInterrupt):
        main(["enrol", "--ckpt_path", str(folder), "--client", "1"])
    assert not (folder / "enrolled_1.json").exists()
    monkeypatch.setattr(FederationLoop, "_run_round", run)
    cli: Any = main(["enrol", "--ckpt_path", str(folder), "--client", "1"])
    assert (cli.loop.round, cli.method.without) == (2, [])
    assert set(cli.method.factories) == {"0", "1", "2", "3"}
    assert (folder / "enrolled_1.json").is_file()


def test_a_run_on_several_devices_is_refused_before_anything_is_deleted(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["trainer"]["devices"] = 2
    (folder / "config.yaml").write_text(text := yaml.safe_dump(config, sort_keys=False))
    state, facts = read_checkpoint(folder / "checkpoints" / "round_00002")
    CheckpointFolder(folder / "checkpoints", 9).save(
        2, state, {**facts, "config": text, "config_hash": config_hash(config)}
    )
    files = sorted(str(p) for p in folder.rglob("*"))
    for verb in ("unlearn", "enrol"):
        with pytest.raises(SystemExit):
            main([verb, "--ckpt_path", str(folder), "--client", "1"])
        assert f"{verb} works on one device" in capsys.readouterr().err
    assert sorted(str(p) for p in folder.rglob("*")) == files


def test_nothing_outside_of_a_run_is_touched(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = tmp_path / "project" / "backup" / "round_00002"
    shutil.copytree(folder / "checkpoints" / "round_00002", copied)
    (tmp_path / "project" / "thesis").mkdir()
    with pytest.raises(SystemExit):
        main(["unlearn", "--config", str(folder / "config.yaml"), "--ckpt_path", str(copied), "--client", "1"])
    assert (tmp_path / "project" / "thesis").is_dir()
    assert (copied / "manifest.json").is_file()
    # A torn checkpoint goes; a file that is not ours stays; a relative path is the same run.
    torn = folder / "checkpoints" / "round_00009"
    torn.mkdir()
    (torn / "tensors.safetensors").write_bytes(b"weights")
    (folder / "notes.txt").write_text("mine")
    monkeypatch.chdir(folder / "checkpoints")
    main(["unlearn", "--config", "../config.yaml", "--ckpt_path", "round_00002", "--client", "1"])
    assert not torn.exists()
    assert (folder / "notes.txt").is_file()
    assert (folder / "checkpoints" / "round_00002" / "manifest.json").is_file()


def test_another_configuration_is_refused(folder: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["unlearn", "--ckpt_path", str(folder), "--client", "1", "--method.init_args.samples_per_class", "3"])
    assert "samples_per_class" in capsys.readouterr().err


def test_masking_a_class(folder: Path, capsys: pytest.CaptureFixture) -> None:
    cli: Any = main(["unlearn", "--ckpt_path", str(folder), "--class_name", "three", "--approximate"])
    assert cli.method.evaluations()[""].given["mask"]["logits"][3] == -1e4
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metrics"]["global/recall/three"] == 0  # the record says what the masked model does
    assert json.loads((folder / "unlearned_class_three.json").read_text())["approximate"] is True


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "unlearn takes one of --client and --class_name"),
        (["--client", "1", "--class_name", "three"], "unlearn takes one of --client and --class_name"),
        (["--client", "77"], "names client '77'; allowed: 0, 1, 2, 3"),
        (["--class_name", "three", "--approximate", "--verify"], "nothing to verify"),
    ],
)
def test_wrong_arguments_change_nothing(
    folder: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture
) -> None:
    files = sorted(str(p) for p in folder.rglob("*"))
    with pytest.raises(SystemExit) as exit:
        main(["unlearn", "--ckpt_path", str(folder), *arguments])
    assert exit.value.code not in (0, None)
    assert text in capsys.readouterr().err
    assert sorted(str(p) for p in folder.rglob("*")) == files


def test_other_methods_refuse_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--method.init_args.rounds", "1", "--data.num_clients", "2", "--federation.sampler", "AllClients"]
    cli: Any = main(["fit", "--config", str(CONFIG.with_name("fedavg.yaml")), *small])
    with pytest.raises(SystemExit):
        main(["unlearn", "--ckpt_path", str(cli.run_folder), "--client", "1"])
    assert "FedAvg cannot unlearn" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["enrol", "--ckpt_path", str(cli.run_folder), "--client", "1"])
    assert "FedAvg cannot enrol" in capsys.readouterr().err
    # A relative path from inside of the run's folder is the same run (and nothing is left to do).
    folder = cli.run_folder.resolve()
    monkeypatch.chdir(folder / "checkpoints")
    again: Any = main(["fit", "--ckpt_path", "round_00001"])
    assert again.run_folder == folder
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["round_00001"]
