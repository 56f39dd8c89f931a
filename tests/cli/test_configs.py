"""Every configuration runs, dry, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fl_lightning.__main__ import main

CONFIGS = Path(__file__).parents[2] / "configs"
# Paper-sized configurations run on invented images in tests/tasks, by name.
WHOLE = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("pretrain/*.yaml")])


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_configuration_runs_dry(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dry = ["--trainer.fast_dev_run", "true", "--trainer.accelerator", "cpu", "--federation.callbacks", "null"]
    if path.parent.name == "pretrain":  # drawing the images would take longer than all the rest
        dry += ["--data.source.init_args.images_per_class", "2", "--data.source.init_args.test_images_per_class", "2"]
    cli = main(["fit", "--config", str(path), *dry])
    rounds = cli.method.rounds  # type: ignore[attr-defined]
    assert [row["round"] for row in cli.loop.history] == list(range(rounds + 1))  # type: ignore[attr-defined]
    assert rounds in (1, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", sorted((CONFIGS / "paper").glob("*.yaml")), ids=lambda path: path.stem)
def test_paper_configurations_parse(path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(path), "--print_config"])
    assert exit.value.code in (0, None)
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["federation"]["name"] == yaml.safe_load(path.read_text())["federation"]["name"]
