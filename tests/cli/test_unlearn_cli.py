"""``unlearn`` on a run that ``fit`` left."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.__main__ import main
from fl_lightning.federation.state import read_checkpoint

CONFIG = Path(__file__).parents[2] / "configs" / "federated_factory.yaml"
SMALL = [
    *("--data.num_clients", "4", "--data.train_fraction", "0.2", "--data.partitioner", "Shards"),
    *("--method.init_args.generator", "GaussianTask", "--method.init_args.pretraining", "[]"),
    *("--method.init_args.samples_per_class", "8", "--method.init_args.training", '{"steps": 1, "batch_size": 500}'),
    *("--method.init_args.classifier", '{"steps": 3, "batch_size": 8}'),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    cli: Any = main(["fit", "--config", str(CONFIG), *SMALL])
    return cli.run_folder


def test_a_client_is_forgotten_exactly_and_nothing_older_stays(folder: Path, capsys: pytest.CaptureFixture) -> None:
    before, _ = read_checkpoint(folder / "checkpoints" / "round_00002")
    (folder / "samples.png").write_bytes(b"a picture of what was drawn")
    assert "1" in before["method"]["factories"]
    main(["unlearn", "--ckpt_path", str(folder), "--client", "1", "--verify"])
    said = capsys.readouterr().out
    assert "DIFFERS" not in said
    assert said.count(" equal ") == 9
    report = json.loads((folder / "unlearned_1.json").read_text())
    assert report["exact"] is True
    assert report["sha256"] == report["never_joined_sha256"]
    assert not (folder / "samples.png").exists()
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


def test_masking_a_class(folder: Path, capsys: pytest.CaptureFixture) -> None:
    cli: Any = main(["unlearn", "--ckpt_path", str(folder), "--class_name", "three", "--approximate"])
    assert cli.method.evaluations()[""].given["mask"]["logits"][3] == -float("inf")
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
