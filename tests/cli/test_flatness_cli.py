"""The subcommand flatness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.__main__ import main

RUN = """
seed_everything: 0
model:
  class_path: ClassificationTask
  init_args: {network: {class_path: fl_lightning.models.MLP, init_args: {hidden: []}}}
data:
  source: {class_path: Digits}
  num_clients: 4
  train_fraction: 0.2
method: {class_path: FedAvg, init_args: {rounds: 1}}
federation:
  name: small
  progress: false
  callbacks:
    - class_path: FlatnessMeter
      init_args: {num_examples: 50, clients: 2, local_steps: 1, eigenvalues: 1, radii: [0.1],
                  surface: true, surface_points: 3}
trainer: {accelerator: cpu, max_epochs: 1, logger: false}
"""


def test_flatness_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    cli: Any = main(["fit", "--config", "run.yaml"])
    run = Path("lightning_logs/small/version_0")
    assert (run / "flatness_surface.png").exists()
    expected = {name: value for name, value in cli.loop.history[-1].items() if name.startswith("flatness/")}
    assert {"flatness/lambda_1", "flatness/sharpness_0.1", "flatness/fd1"} <= set(expected)

    # The run's own meter, from the newest checkpoint and from a run's folder without a configuration: the same numbers.
    for arguments, folder in ((["--config", "run.yaml", "--output", "new/there"], Path("new/there")), ([], run)):
        again: Any = main(["flatness", *arguments, *(() if arguments else ("--ckpt_path", str(run)))])
        assert again.scores == expected
        report = json.loads((folder / "flatness.json").read_text())
        assert report["metrics"] == expected
        assert (report["round"], report["settings"]["num_examples"]) == (1, 50)
        assert (folder / "flatness_surface.png").read_bytes()[1:4] == b"PNG"
        out = capsys.readouterr().out
        assert f"flatness/fd1 {expected['flatness/fd1']:.6g}" in " ".join(out.split())
        assert str(folder / "flatness.json") in out

    # Another one, given on the command line.
    other: Any = main(
        [
            "flatness",
            "--ckpt_path",
            str(run),
            "--meter",
            "FlatnessMeter",
            "--meter.clients",
            "0",
            "--meter.radii",
            "[0.3]",
        ]
    )
    assert "flatness/sharpness_0.3" in other.scores
    assert "flatness/fd1" not in other.scores


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--config", "run.yaml"], "no checkpoint of this configuration below lightning_logs"),
        (
            ["--config", "run.yaml", "--meter", "FlatnessMeter", "--meter.every", "0"],
            "every is 0; it must be at least 1",
        ),
        (["--config", "run.yaml", "--ckpt_path", "nowhere"], "nowhere is no round checkpoint"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    with pytest.raises(SystemExit) as exit:
        main(["flatness", *arguments])
    assert exit.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert line.startswith("error: ")
    assert text in line
