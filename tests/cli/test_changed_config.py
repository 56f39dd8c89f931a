"""Going on under another configuration: refused by name, unless it is said to be meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.__main__ import main

BASE = Path(__file__).parents[2] / "configs" / "fedavg.yaml"
SMALL = ["--method.rounds=2", "--data.num_clients=10", "--federation.sampler=null", "--trainer.logger=false"]


def fit(*arguments: str) -> Any:
    return main(["fit", "--config", str(BASE), *SMALL, *arguments])


def test_a_change_is_refused_by_name_and_taken_when_it_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = fit("--federation.keep_last=9").run_folder.resolve()
    first = str(folder / "checkpoints" / "round_00001")
    changed = ["--method.rounds=3", "--data.batch_size=20"]
    with pytest.raises(SystemExit):
        fit("--ckpt_path", first, *changed)
    said = capsys.readouterr().err
    assert "data.batch_size: 10 -> 20" in said
    assert "method.init_args.rounds: 2 -> 3" in said
    assert "--accept_changes" in said
    for path in ([], ["--ckpt_path", "last"]):
        with pytest.raises(SystemExit):
            fit("--accept_changes", *path, *changed)
        assert "accept_changes needs the path of a checkpoint" in capsys.readouterr().err
    cli = fit("--ckpt_path", first, "--accept_changes", *changed)
    assert cli.run_folder.resolve() == folder
    assert [int(row["round"]) for row in cli.loop.history] == [0, 1, 2, 3]
    facts = json.loads((folder / "checkpoints" / "round_00003" / "info.json").read_text())
    (change,) = facts["changes"]
    assert change["after_round"] == 1
    assert sorted(change["changed"]) == ["data.batch_size: 10 -> 20", "method.init_args.rounds: 2 -> 3"]
    # The run goes by its new configuration from now on, and what it went through is kept.
    again = fit("--ckpt_path", "last", *changed)
    assert again.run_folder.resolve() == folder
    facts = json.loads((folder / "checkpoints" / "round_00003" / "info.json").read_text())
    assert facts["changes"] == [change]
