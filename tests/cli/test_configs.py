"""Every configuration runs, dry, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fl_lightning.__main__ import main

CONFIGS = Path(__file__).parents[2] / "configs"
# Paper-sized: their backbones and data have to be fetched first.
NEEDS_FILES = {path.name for path in (CONFIGS / "paper").glob("*.yaml")}


def whole() -> list[object]:
    found = []
    for path in sorted(CONFIGS.rglob("*.yaml")):
        config = yaml.safe_load(path.read_text())
        if path.parent.name == "compare" or "method" not in config:
            continue
        heavy = path.parent != CONFIGS or "Clip" in config["model"]["class_path"]
        found.append(pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if heavy else []))
    return found


@pytest.mark.parametrize("path", whole())
def test_configuration_runs_dry(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.name in NEEDS_FILES:
        pytest.skip(f"{path.name} needs data or weights that do not come with the package")
    monkeypatch.chdir(tmp_path)
    dry = ["--trainer.fast_dev_run", "true", "--trainer.accelerator", "cpu", "--federation.callbacks", "null"]
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
