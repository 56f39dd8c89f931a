"""The command line: runs, restores, and says in one line what is wrong."""

# ruff: noqa: E501  (tables of arguments and what is said about them)

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import fl_lightning
from fl_lightning.__main__ import main

CONFIGS = Path(__file__).parents[2] / "configs"
FEDAVG = ["--config", str(CONFIGS / "fedavg.yaml")]
SMALL = [
    *("--method.init_args.rounds", "2", "--federation.sampler.init_args.size", "2"),
    *("--federation.progress", "false", "--trainer.max_epochs", "1", "--trainer.logger", "false"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(*arguments: str) -> Any:
    return main(["fit", *FEDAVG, *SMALL, *arguments])


# ---- one line


WRONG = {
    "--method.init_args.roundz 3": r"method.init_args.roundz is no argument of FedAvg; did you mean rounds\?; allowed: rounds,",
    "--method.class_path FedAgv": r"method is 'FedAgv', .*did you mean FedAvg\?; allowed: .*FedAvg, .*LocalOnly",
    "--method.init_args.rounds x": r"method.init_args.rounds is x; allowed: int",
    "--method.init_args.rounds 0": r"rounds is 0; it must be at least 1",
    "--method.init_args.weighting size": r"method.init_args.weighting is size; allowed: 'examples', 'uniform'",
    "--data.source.class_path Digitz": r"data.source is 'Digitz', .*did you mean Digits\?; allowed: .*FakeImages",
    "--data.source Torchvision": r"data.source.init_args.name: required by Torchvision",
    "--data.partitioner.init_args.alpha -1": r"Dirichlet: alpha must be .*above 0, got -1",
    "--data.partitioner.init_args.alfa 1": r"data.partitioner.init_args.alfa is no argument of Dirichlet; did you mean alpha\?",
    "--data.partitioner.class_path Dirichle": r"data.partitioner is 'Dirichle', .*did you mean Dirichlet\?; allowed: .*IID",
    "--data.batchsize 3": r"data.batchsize is no option; did you mean data.batch_size\?",
    "--data.num_clients 0": r"data.num_clients is 0; it must be at least 1 unless federation.uploads names a folder",
    "--federation.evry 3": r"federation.evry is no option",
    "--federation.evaluate_every 0": r"federation.evaluate_every is 0; it must be at least 1",
    "--federation.engine rey": r"federation.engine is rey; allowed: 'serial'",
    "--federation.sampler.class_path Uniform": r"federation.sampler is 'Uniform', .*allowed: AllClients, FixedCohort, PoissonSampler, UniformSampler",
    "--federation.sampler.init_args.size 0": r"UniformSampler: size is 0; it must be at least 1",
    "--federation.monitor globl/acc": r"federation.monitor is 'globl/acc'; .*global/acc",
    "--trainer.precision 7": r"trainer.precision is 7; allowed: .*'bf16-mixed'",
    "--trainer.max_epochs -1": r"trainer.max_epochs is -1; local epochs must be at least 1",
    "--model.class_path Foo": r"model is 'Foo', .*allowed: .*ClassificationTask,",
    "--model.init_args.network.class_path Foo": r"model.init_args.network is 'Foo'.*import path",
    "--model.init_args.optimizer.class_path SDG": r"model.init_args.optimizer is 'SDG', .*did you mean SGD\?",
    "--model.init_args.optimizer.init_args.lrr 1": r"model.init_args.optimizer.init_args.lrr is no argument of SGD; .*lr\b",
    "--model.init_args.optimizer.init_args.lr -1": r"Invalid learning rate: -1.0",
    "--seed_everything x": r"seed_everything is x; allowed: bool, int",
    "--seed_everything false": r"seed_everything is false; allowed: an integer",
    "--ckpt_path nowhere": r"nowhere is no round checkpoint",
    "--config nowhere.yaml": r"config.*nowhere.yaml",
}


@pytest.mark.parametrize("argument", WRONG)
def test_a_wrong_argument_is_one_line_and_no_run(argument: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        fit(*argument.split())
    assert exit.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith("Initializing")]
    assert len(lines) == 1
    assert re.fullmatch(f"error: .*{WRONG[argument]}.*", lines[0])
    assert len(lines[0]) < 700
    assert not list(folder.rglob("version_*"))


BROKEN = {
    "batch_size: 10=>batch_sise: 10": r"data.batch_sise is no option; did you mean data.batch_size\?",
    "rounds: 50=>roundz: 50": r"method.init_args.roundz is no argument of FedAvg; did you mean rounds\?",
    "class_path: FedAvg=>class_path: fl_lightning.methods.Nope": r"method is 'fl_lightning.methods.Nope', .*allowed: .*FedAvg,",
    "class_path: FedAvg=>class_path: Digits": r"method is 'Digits', .*allowed: .*FedAvg,",
    "class_path: FedAvg=>other: 1": r"method needs a class_path.*allowed: .*FedAvg,",
    "sampler:=>samplr:": r"federation.samplr.init_args.size is no option",
    "seed_everything: 0=>foo: 1": r"foo is no option",
    "seed_everything: 0=>a: [1": r"config",
}


@pytest.mark.parametrize("change", BROKEN)
def test_a_wrong_yaml_is_one_line(change: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    old, new = change.split("=>")
    text = (CONFIGS / "fedavg.yaml").read_text()
    assert old in text
    (folder / "broken.yaml").write_text(text.replace(old, new))
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", "broken.yaml"])
    assert exit.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert re.fullmatch(f"error: .*{BROKEN[change]}.*", line)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fit"], "data.source, method, model: required"),
        (["fit", "--data.source", "Digits", "--method", "FedAvg"], "model: required"),
        (["fti"], "choose from 'fit', 'validate', 'test', 'predict', 'partition', 'compare'"),
        ([], "subcommand"),
        (["test", *FEDAVG], "no checkpoint of this configuration below lightning_logs"),
        (["predict", *FEDAVG], "images: required"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], text: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert text in line


# ---- configurations


def printed(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        main(["fit", *arguments, "--print_config"])
    assert exit.value.code in (0, None)
    return capsys.readouterr().out


def test_a_printed_configuration_prints_itself(folder: Path, capsys: pytest.CaptureFixture) -> None:
    text = printed(FEDAVG, capsys)
    (folder / "printed.yaml").write_text(text)
    assert printed(["--config", "printed.yaml"], capsys) == text
    assert yaml.safe_load(text)["method"]["init_args"]["rounds"] == 50


def test_later_configurations_win(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "a.yaml").write_text("method: {init_args: {rounds: 7}}\ndata: {batch_size: 3}\n")
    (folder / "b.yaml").write_text("method: {init_args: {rounds: 9}}\n")
    arguments = [*FEDAVG, "--config", "a.yaml", "--config", "b.yaml"]
    config = yaml.safe_load(printed([*arguments, "--data.num_clients", "11"], capsys))
    assert config["method"]["init_args"]["rounds"] == 9
    assert (config["data"]["batch_size"], config["data"]["num_clients"]) == (3, 11)
    assert config["model"]["init_args"]["network"]["init_args"]["hidden"] == [64]


def test_version_and_the_seed_that_was_drawn(folder: Path, capsys: pytest.CaptureFixture) -> None:
    main(["--version"])
    assert capsys.readouterr().out.strip() == fl_lightning.__version__
    seeds = set()
    for number in range(2):
        cli = fit("--seed_everything", "true", "--method.init_args.rounds", "1")
        saved = yaml.safe_load((folder / f"lightning_logs/fedavg/version_{number}/config.yaml").read_text())
        assert type(saved["seed_everything"]) is int
        assert saved["seed_everything"] == cli.loop.seed == cli.datamodule.seed
        seeds.add(cli.loop.seed)
    assert len(seeds) == 2


# ---- a run and what can be done with it


def last_row(run: Path) -> dict[str, float]:
    with open(run / "metrics.csv", newline="") as file:
        return {name: float(value) for name, value in list(csv.DictReader(file))[-1].items() if value}


def test_a_run_and_its_verbs(folder: Path, capsys: pytest.CaptureFixture) -> None:
    cli = fit()
    run = folder / "lightning_logs/fedavg/version_0"
    assert cli.run_folder.resolve() == run
    names = {
        "checkpoints",
        "config.yaml",
        "metrics.csv",
        "partition.json",
        "partition.png",
        "confusion.png",
        "summary.json",
    }
    assert {path.name for path in run.iterdir()} == names
    row = last_row(run)

    # The last row is reproduced from the checkpoint, from the run's folder, and from the same arguments.
    for arguments in (
        ["--ckpt_path", str(run / "checkpoints/round_00002")],
        [f"--ckpt_path={run}"],
        [*FEDAVG, *SMALL],
    ):
        for verb, name in (("test", "global/acc"), ("validate", "val_global/acc")):
            scores = main([verb, *arguments]).scores  # type: ignore[attr-defined]
            assert name in scores
            assert scores == {name: row.get(name) for name in scores}
    assert f"global/acc {row['global/acc']:.4f}" in re.sub(" +", " ", capsys.readouterr().out)
    assert sorted(path.name for path in (folder / "lightning_logs/fedavg").iterdir()) == ["version_0"]

    # A finished run that is resumed does nothing, in the same folder; another configuration is refused.
    again = fit("--ckpt_path", "last")
    assert again.run_folder.resolve() == run
    assert last_row(run) == row
    with pytest.raises(SystemExit):
        fit("--ckpt_path", str(run), "--data.batch_size", "7")
    assert "another configuration; differences: data.batch_size: 10 -> 7" in capsys.readouterr().err
    fit("--ckpt_path", "last", "--data.batch_size", "7", "--method.init_args.rounds", "1")
    assert "starting a new one" in capsys.readouterr().out
    assert (folder / "lightning_logs/fedavg/version_1").exists()

    # The newest checkpoint is damaged: it is named, the older one is used, and the end is the same.
    tensors = run / "checkpoints/round_00002/tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x01")
    resumed = fit("--ckpt_path", "last")
    assert re.search(r"checkpoint .*round_00002 is damaged.*older", capsys.readouterr().err)
    assert [row["round"] for row in resumed.loop.history] == [0, 1, 2]
    assert {n: v for n, v in last_row(run).items() if not n.startswith("time/")} == {
        n: v for n, v in row.items() if not n.startswith("time/")
    }


def test_predict_labels_any_images(folder: Path, capsys: pytest.CaptureFixture) -> None:
    fit()
    images = folder / "images" / "inner"
    images.mkdir(parents=True)
    grey = Image.fromarray((np.arange(64).reshape(8, 8) * 4).astype(np.uint8))
    grey.save(images / "grey.png")
    grey.resize((20, 31)).save(images.parent / "large.png")
    grey.convert("RGB").save(images.parent / "colour.jpg")
    grey.convert("P").save(images.parent / "palette.png")
    (images.parent / "notes.txt").write_text("no image")
    main(["predict", *FEDAVG, *SMALL, "--images", "images", "--output", "labels.csv"])
    with open("labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["path"]).name for row in rows] == ["colour.jpg", "grey.png", "large.png", "palette.png"]
    assert all(
        row["label"] in ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine") for row in rows
    )
    assert all(0.1 <= float(row["confidence"]) <= 1 for row in rows)
    assert rows[1]["label"] == rows[3]["label"]
    with pytest.raises(SystemExit):
        main(["predict", *FEDAVG, *SMALL, "--images", "nowhere"])
    assert "no image below nowhere" in capsys.readouterr().err


def test_partition_shows_who_holds_what(folder: Path, capsys: pytest.CaptureFixture) -> None:
    main(["partition", *FEDAVG, "--data.num_clients", "4", "--output", "who.png"])
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    counts = [list(map(int, row[1:])) for row in rows if row and row[0] in "0123"]
    assert len(counts) == 4
    assert all(sum(row[:-1]) == row[-1] for row in counts)
    assert sum(row[-1] for row in counts) == 1294  # of 1797: 80 % train, 10 % of them validation
    assert (folder / "who.png").read_bytes()[1:4] == b"PNG"
    assert "partition hash: " in out
    assert not (folder / "lightning_logs").exists()


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    cli = main(["fit", *FEDAVG, "--trainer.fast_dev_run", "true"])
    assert [row["round/clients"] for row in cli.loop.history[1:]] == [2, 2]  # type: ignore[attr-defined]
    assert list(folder.iterdir()) == []


def test_loggers_and_callbacks_of_the_configuration(folder: Path) -> None:
    (folder / "more.yaml").write_text(
        "trainer:\n  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: csv}}\n"
        "  callbacks: [{class_path: lightning.pytorch.callbacks.GradientAccumulationScheduler,"
        " init_args: {scheduling: {0: 2}}}]\n"
        "federation:\n  callbacks: [{class_path: EarlyStop, init_args: {monitor: global/acc, patience: 1, min_delta: 1.0}}]\n"
    )
    cli = main(["fit", *FEDAVG, *SMALL[:-2], "--config", "more.yaml", "--method.init_args.rounds", "5"])
    assert cli.loop.round == 1  # type: ignore[attr-defined]
    assert list((folder / "csv").rglob("metrics.csv"))
    assert json.loads((folder / "lightning_logs/fedavg/version_0/summary.json").read_text())["rounds"] == 1


def test_an_error_in_a_first_round_that_was_journalled_deletes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_lightning.methods import FedAvg

    def broken(self: Any, round: int, total: Any, server: Any) -> Any:
        raise ValueError("a generator diverged")

    monkeypatch.setattr(FedAvg, "server_update", broken)
    with pytest.raises(ValueError, match="diverged"):
        fit("--federation.journal_seconds", "0")
    run = folder / "lightning_logs/fedavg/version_0"
    assert (run / "journal" / "round_00001.log").is_file()
    assert (run / "checkpoints" / "round_00000").is_dir()
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    cli: Any = fit("--ckpt_path", "last")  # how often it is written does not make it another run
    assert cli.run_folder.resolve() == run.resolve()
    assert not (run / "journal").exists()


def test_an_error_after_clients_of_the_first_round_have_trained_deletes_nothing(folder: Path) -> None:
    hostile = '{class_path: OneNaN, init_args: {clients: ["0", "1", "2"]}}'
    with pytest.raises(ValueError, match="Krum"):
        fit(
            *("--data.num_clients", "5", "--federation.sampler", "null", "--federation.on_client_error", "skip"),
            *(
                "--federation.attack",
                hostile,
                "--federation.aggregator",
                "{class_path: Krum, init_args: {byzantine: 1}}",
            ),
            *("--federation.evaluate_every", "9", "--trainer.max_steps", "1"),
        )
    failures = (folder / "lightning_logs/fedavg/version_0/failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["client"] for line in failures] == ["0", "1", "2"]


def test_only_errors_before_the_first_round_are_the_users(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_lightning.methods import FedAvg

    def broken(self: Any, round: int, total: Any, server: Any) -> Any:
        if round == 2:
            raise ValueError("a bug")
        return {}

    monkeypatch.setattr(FedAvg, "server_update", broken)
    with pytest.raises(ValueError, match="a bug"):
        fit()
