"""A tiny study from its YAML to its tables, and the parts of it that need no run."""

from __future__ import annotations

import csv
import json
import math
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.__main__ import main as command_line
from fl_lightning.report import compare
from fl_lightning.report.compare import Comparison, Grid, Study, Variant, index_runs, read_metrics, reading

CONFIGS = Path(__file__).parents[2] / "configs"
LR = "model.init_args.optimizer.init_args.lr"
STUDY: dict[str, Any] = {
    "name": "tiny",
    "base": [str(CONFIGS / "fedavg.yaml")],
    "seeds": [0, 1],
    "set": {
        "method.init_args.rounds": 2,
        "data.num_clients": 10,
        "data.train_fraction": 0.3,
        "federation.sampler": "AllClients",
        "trainer.max_epochs": 1,
        "trainer.logger": False,
    },
    "grid": {"keys": [LR], "values": [1e-3, 0.1], "metric": "val_global/acc", "seeds": [0]},
    "baseline": "fedavg",
    "metrics": ["global/acc", "client_worst/acc"],
    "curves": ["global/acc"],
    "variants": {
        "fedavg": None,
        "fedprox": {"set": {"method": "FedProx", "method.init_args.mu": 1.0, LR: 0.05}, "grid": None},
        "fedprox_first": {"runs_of": "fedprox", "at": "lowest:global/acc"},
    },
}


def write_study(folder: Path, **changes: Any) -> list[str]:
    """The command line of a study whose runs lie below ``folder``."""
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, "output": str(folder / "lightning_logs"), **changes}))
    return ["compare", "--config", str(path)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a study that ran once, with one variant more, whose every run fails."""
    root = tmp_path_factory.mktemp("study")
    broken = {"set": {"method": "FedProx", "method.init_args.mu": -1.0}, "grid": None}
    with pytest.raises(SystemExit) as end:
        command_line(write_study(root, variants={"broken": broken, **STUDY["variants"]}))
    assert end.value.code == 1
    return root


class NoPool:
    """Stands for the process pool where nothing may run."""

    def __init__(self, *args: Any) -> None:
        raise AssertionError("a run was started")


class InlinePool:
    """Stands for the process pool, in this process; keeps what it was asked to run."""

    seen: list[list[str]] = []

    def __init__(self, *args: Any) -> None:
        pass

    def submit(self, function: Any, arguments: list[str], log: str) -> Future[tuple[str, str]]:
        self.seen.append(arguments)
        future: Future[tuple[str, str]] = Future()
        future.set_result((str(command_line(arguments).run_folder), ""))  # type: ignore[attr-defined]
        return future

    def shutdown(self, **kwargs: Any) -> None:
        pass


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_failed_variant_is_named_and_the_others_run(done: Path) -> None:
    folder = done / "lightning_logs" / "compare" / "tiny"
    text = (folder / "table.md").read_text()
    assert text.count("Failed: broken seed") == 2
    assert "mu is -1.0" in text
    assert "broken (0 of 2 seeds)" in text
    lines = read(folder / "runs.csv")
    assert [(r["variant"], r["use"], r["seed"]) for r in lines] == [
        *[(v, "result", s) for v in ("fedavg", "fedprox", "fedprox_first") for s in ("0", "1")],
        ("fedavg", "tuning", "0"),
    ]
    # The tuning run with the picked value is the first seed's run: three folders, not four.
    assert len(list((done / "lightning_logs" / "tiny" / "fedavg").iterdir())) == 3
    for line in lines:
        assert (done / line["run"] / "summary.json").is_file()
    assert (folder / "curves_global_acc.png").stat().st_size > 5000


def test_second_call_runs_nothing_and_tabulates_the_recorded_numbers(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "ProcessPoolExecutor", NoPool)
    folder = command_line(write_study(done))
    assert isinstance(folder, Path)
    assert (folder / "table.md").read_text() in capsys.readouterr().out
    assert (
        command_line(["compare", "--config", str(folder / "study.yaml")]) == folder
    )  # what it wrote is the same study
    finals: dict[tuple[str, str], float] = {}
    for line in read(folder / "runs.csv"):
        summary = json.loads((done / line["run"] / "summary.json").read_text())
        config = yaml.safe_load((done / line["run"] / "config.yaml").read_text())
        assert summary["seed"] == int(line["seed"])
        assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == float(line["value"] or 0.05)
        if line["use"] == "result" and line["variant"] != "fedprox_first":
            finals[line["variant"], line["seed"]] = summary["metrics"]["global/acc"]
            assert float(line["global/acc"]) == finals[line["variant"], line["seed"]]
            total = sum(summary["bytes"].values()) / 1e6
            assert float(line["MB in all"]) == pytest.approx(total)
    first, second = (finals["fedprox", seed] - finals["fedavg", seed] for seed in "01")
    row = next(r for r in read(folder / "table.csv") if (r["variant"], r["metric"]) == ("fedprox", "global/acc"))
    assert float(row["mean"]) == pytest.approx((finals["fedprox", "0"] + finals["fedprox", "1"]) / 2)
    assert float(row["difference_mean"]) == pytest.approx((first + second) / 2)
    # 12.706 is the 97.5 % quantile of Student's t with one degree of freedom; √2 * std = |first - second|.
    half = 12.7062 * abs(first - second) / 2
    assert float(row["difference_high"]) == pytest.approx((first + second) / 2 + half, rel=1e-4)


def test_a_variant_may_read_another_round_of_another_variants_runs(done: Path) -> None:
    folder = done / "lightning_logs" / "compare" / "tiny"
    lines = {(r["variant"], r["seed"]): r for r in read(folder / "runs.csv") if r["use"] == "result"}
    for seed in "01":
        own, other = lines["fedprox", seed], lines["fedprox_first", seed]
        accuracies = [row["global/acc"] for row in read_metrics(done / own["run"] / "metrics.csv")]
        assert other["run"] == own["run"]
        assert float(other["global/acc"]) == min(accuracies) < float(own["global/acc"])
        assert int(float(other["round"])) == accuracies.index(min(accuracies))


@pytest.mark.parametrize("changed", ["unlearned_1.json", "enrolled_class_cat.json"])
@pytest.mark.parametrize("over", [True, False])
def test_runs_that_were_changed_afterwards_are_not_taken(changed: str, over: bool, tmp_path: Path) -> None:
    run = tmp_path / "a" / "version_0"
    run.mkdir(parents=True)
    for name in ("config.yaml", *(("summary.json", "metrics.csv") if over else ())):
        (run / name).write_text("seed_everything: 0\n")
    finished, unfinished = index_runs(tmp_path)
    assert (list(finished.values()), len(unfinished)) == (([run], 0) if over else ([], 1))
    (run / changed).touch()
    assert index_runs(tmp_path) == ({}, set())


def test_an_interrupted_run_goes_on_in_its_folder(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = done / "lightning_logs" / "tiny" / "fedavg" / "version_0"
    half = tmp_path / "lightning_logs" / "elsewhere" / "version_3"
    shutil.copytree(whole, half)
    (half / "summary.json").unlink()
    shutil.rmtree(half / "checkpoints" / "round_00002")
    monkeypatch.setattr(compare, "ProcessPoolExecutor", InlinePool)
    command_line(
        write_study(tmp_path, variants={"fedavg": None}, seeds=[0], grid={**STUDY["grid"], "values": [1e-3]}, curves=[])
    )
    assert [arguments[-2:] for arguments in InlinePool.seen] == [["--ckpt_path", "last"]]
    assert (half / "summary.json").is_file()
    assert not (tmp_path / "lightning_logs" / "tiny").exists()
    clock = "time/"
    for before, after in zip(read(whole / "metrics.csv"), read(half / "metrics.csv"), strict=True):
        assert {k: v for k, v in before.items() if clock not in k} == {k: v for k, v in after.items() if clock not in k}


def test_what_the_parser_refuses_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "ProcessPoolExecutor", NoPool)
    variants = {"fedavg": None, "typo": {"set": {"method.init_args.momentun": 0.9}}}
    with pytest.raises(SystemExit) as end:
        command_line(write_study(tmp_path, variants=variants, grid=None))
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert "variant 'typo'" in message
    assert "momentun" in message
    assert not (tmp_path / "lightning_logs").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": []}, "seeds is"),
        ({"seeds": [1, 1]}, "each once"),
        ({"jobs": 0}, "jobs is 0; it must be at least 1"),
        ({"baseline": "fedsgd"}, "baseline is 'fedsgd'; variants: a, b"),
        ({"output": "runs"}, "lightning_logs"),
        ({"variants": {"a/b": None}}, "cannot name a folder"),
        (
            {"variants": {"a": Variant(at="end")}},
            "allowed: first, last, mean:<n>, best:<column>, lowest:<column>, reach",
        ),
        ({"variants": {"a": None, "b": Variant(runs_of="c")}}, "runs_of is 'c'; allowed: a"),
        ({"variants": {"a": None, "b": Variant(runs_of="a", set={"x": 1})}}, "no options but 'at'"),
        ({"grid": None, "variants": {"a": None, "b": Variant(uploads_of="b")}}, "uploads_of is 'b'; allowed: a"),
        ({"variants": {"a": Variant(grid={"value": [1]})}}, "'value'.*allowed: .*'values'"),
        ({"variants": {"a": Variant(grid={"values": []})}}, "grid.values of variant 'a' is empty"),
    ],
)
def test_a_study_that_cannot_be_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Study(**{"name": "s", "variants": {"a": None, "b": ["x.yaml"]}, "grid": Grid(["lr"], [1], "m"), **change})


ROWS = [
    {"round": 0.0, "val/acc": 0.5, "acc": 0.4, "time/round": 1.0},
    {
        "round": 1.0,
        "val/acc": 0.7,
        "acc": 0.6,
        "comm/bytes_up": 1000.0,
        "comm/bytes_down": 3000.0,
        "round/gradients": 5.0,
        "time/round": 2.0,
    },
    {
        "round": 2.0,
        "loss": 1.0,
        "comm/bytes_up": 2000.0,
        "comm/bytes_down": 3000.0,
        "round/gradients": 5.0,
        "time/round": 2.0,
    },
    {
        "round": 3.0,
        "round/gradients": 2.0,
        "val/acc": math.nan,
        "acc": 0.1,
        "comm/bytes_up": 3000.0,
        "comm/bytes_down": 3000.0,
        "time/round": 4.0,
    },
]


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("last", {"round": 3, "acc": 0.1, "loss": 1.0, "kB up per round": 2.0, "MB in all": 0.015, "seconds": 9.0}),
        ("first", {"round": 0, "acc": 0.4, "kB up per round": 0.0, "MB in all": 0.0, "seconds": 1.0}),
        ("best:val/acc", {"round": 1, "acc": 0.6, "kB up per round": 1.0, "MB in all": 0.004, "seconds": 3.0}),
        ("lowest:val/acc", {"round": 0, "acc": 0.4, "kB up per round": 0.0, "MB in all": 0.0, "seconds": 1.0}),
        ("reach:acc:0.6", {"round": 1, "acc": 0.6, "MB in all": 0.004, "gradients": 5, "seconds": 3.0}),
        ("fall:acc:0.3", {"round": 3, "acc": 0.1, "MB in all": 0.015, "gradients": 12, "seconds": 9.0}),
        ("mean:2", {"round": 3, "acc": 0.1, "loss": 1.0, "MB in all": 0.015, "gradients": 12}),
        ("mean:3", {"round": 3, "acc": 0.35, "loss": 1.0, "time/round": 8 / 3}),
        ("mean:9", {"round": 3, "acc": 1.1 / 3, "loss": 1.0}),
    ],
)
def test_reading(at: str, expected: dict[str, float]) -> None:
    values = reading(ROWS, at)
    assert values is not None
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert ("loss" in values) == (
        at == "last" or at.startswith("mean")
    )  # a column of another round is no part of the best one


def test_options_with_nested_classes_are_written_as_json() -> None:
    """The parser turns what has a class_path into namespaces, in lists too."""
    from jsonargparse import Namespace

    nested = [Namespace(class_path="A", init_args=Namespace(values=[Namespace(class_path="B")]))]
    assert json.loads(compare._text(nested)) == [{"class_path": "A", "init_args": {"values": [{"class_path": "B"}]}}]


def test_what_is_never_reached_is_nothing() -> None:
    assert reading(ROWS, "reach:acc:0.61") is None
    assert reading(ROWS, "fall:acc:0.05") is None
    assert reading(ROWS, "reach:personal/acc:0.5") is None  # a variant that has no such column
    without = [{k: v for k, v in row.items() if k != "round/gradients"} for row in ROWS]
    assert "gradients" not in (reading(without, "last") or {})


def test_targets_are_tabulated_as_medians_over_seeds(done: Path) -> None:
    found = [r for r in read(done / "lightning_logs" / "compare" / "tiny" / "runs.csv") if r["use"] == "result"]
    lines = {(r["variant"], r["seed"]): r for r in found}
    records = [read_metrics(done / lines["fedavg", seed]["run"] / "metrics.csv") for seed in "01"]
    low, high = sorted(max(row["global/acc"] for row in record) for record in records)
    targets = {"global/acc": [low, (low + high) / 2, 2.0]}
    folder = command_line(write_study(done, targets=targets))
    text = (folder / "table.md").read_text()  # type: ignore[operator]
    sections = [part for part in text.split("## ") if part.startswith("To global/acc")]
    rows = [next(r for r in part.splitlines() if r.startswith("| fedavg |")).split("|")[2:-1] for part in sections]
    assert [row[0].strip() for row in rows] == ["2 of 2", "1 of 2", "0 of 2"]
    rounds = [next(row["round"] for row in record if row["global/acc"] >= low) for record in records]
    gradients = [
        sum(row.get("round/gradients", 0) for row in record if row["round"] <= round)
        for record, round in zip(records, rounds, strict=True)
    ]
    assert [float(cell) for cell in rows[0][1:3]] == [sum(rounds) / 2, sum(gradients) / 2]
    assert rows[1][1].strip() == rows[2][1].strip() == "–"


def test_virtual_seconds_stand_beside_the_others_where_runs_have_a_clock(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "virtual seconds" not in (done / "lightning_logs" / "compare" / "tiny" / "table.md").read_text()
    shutil.copytree(done / "lightning_logs", tmp_path / "lightning_logs")
    for path in (tmp_path / "lightning_logs").rglob("metrics.csv"):
        head, *rows = path.read_text().splitlines()
        cells = ["", "1.5", "2.25"]  # before the first round there are none
        lines = [f"{row},{cell}" for row, cell in zip(rows, cells, strict=True)]
        path.write_text("\n".join([f"{head},round/virtual_seconds", *lines]) + "\n")
    monkeypatch.setattr(compare, "ProcessPoolExecutor", NoPool)
    folder = command_line(write_study(tmp_path, targets={"global/acc": [0.0, 2.0]}))
    text = (folder / "table.md").read_text()  # type: ignore[operator]
    for reached, part in zip(
        (True, False), [p for p in text.split("## ") if p.startswith("To global/acc")], strict=True
    ):
        table = [line.split("|")[1:-1] for line in part.splitlines() if line.startswith("|")]
        assert table[0][-1].strip() == "virtual seconds"
        assert {len(line) for line in table} == {7}
        assert table[2][-1].strip() == ("0" if reached else "–")  # before any training, or never
    (cost,) = [part for part in text.split("## ") if part.startswith("Cost")]
    head, _, *lines = [line.split("|")[1:-1] for line in cost.splitlines() if line.startswith("|")]
    assert float(lines[0][[h.strip() for h in head].index("virtual seconds")].split("±")[0]) == 3.75


def test_reading_names_the_columns_there_are() -> None:
    with pytest.raises(ValueError, match=r"'val/f1'.*recorded: acc, comm/bytes_down, comm/bytes_up, loss"):
        reading(ROWS, "best:val/f1")


def test_pick_is_by_the_mean_over_tuning_seeds_and_leaves_out_what_diverged_or_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compare, "full_config", lambda variant, arguments: {"arguments": list(arguments)})
    grid = Grid([LR], [1, 2, 3, 4], "val/acc", seeds=[7, 8])
    comparison = Comparison(Study("s", {"a": None}, grid=grid, output=str(tmp_path / "lightning_logs")))
    scores = {(1, 7): 0.9, (1, 8): 0.1, (2, 7): 0.6, (2, 8): 0.6, (3, 7): 1.0, (3, 8): math.nan, (4, 7): 1.0}
    tuning = comparison.tuning("a")
    assert len({run.hash for run in tuning}) == 8
    for run in tuning[:-1]:
        comparison.finished[run.hash] = tmp_path
        comparison._rows[run.hash] = [{"round": 1.0, "val/acc": scores[run.value, run.seed]}]
    assert comparison.pick("a") == []  # one run is still to come
    comparison._broken.add(tuning[-1].hash)
    assert comparison.pick("a") == [2]
    assert [run.label for run in comparison.wanted()][-1] == "a seed 0 value 2"


def test_the_grids_value_has_the_last_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the study sets the same key and the variant then takes another class, which brings its own value."""
    monkeypatch.setattr(compare, "full_config", lambda variant, arguments: {"arguments": list(arguments)})
    variants: dict[str, Any] = {"a": Variant(set={"method": {"class_path": "FedAvg", "init_args": {"rounds": 3}}})}
    options = {"set": {"method.init_args.rounds": 5}, "grid": Grid(["method.init_args.rounds"], [1, 2], "val/acc")}
    study = Study("s", variants, **options, output=str(tmp_path / "lightning_logs"))
    arguments = Comparison(study).run("a", 0, 2).arguments
    method, rounds = arguments.index("--method"), arguments.index("--method.init_args.rounds")
    assert method < rounds
    assert arguments[rounds + 1] == "2"


def test_a_variant_starts_from_another_ones_uploads(tmp_path: Path) -> None:
    """It waits for them, seed by seed, and is the run that trained them: server work on the same models."""
    variants = {
        "second": {"set": {"method.init_args.combine": "mean"}, "uploads_of": "first"},
        "first": {"set": {"federation.save_uploads": True}},
    }
    ensemble = {"base": [str(CONFIGS / "ensemble.yaml")], "grid": None, "baseline": None, "variants": variants}
    options = {key: value for key, value in STUDY["set"].items() if key.startswith(("data", "trainer"))}
    command_line(write_study(tmp_path, **ensemble, set=options, metrics=["global/acc", "comm/bytes_up"], curves=[]))
    rows = list(csv.DictReader((tmp_path / "lightning_logs" / "compare" / "tiny" / "runs.csv").open()))
    sent = {(row["variant"], row["seed"]): row["comm/bytes_up"] for row in rows}
    assert len(sent) == 4
    assert all(sent["first", seed] == sent["second", seed] for seed in "01")
    configs = [path.read_text() for path in (tmp_path / "lightning_logs" / "tiny" / "second").glob("*/config.yaml")]
    assert len({yaml.safe_load(text)["federation"]["uploads"] for text in configs}) == 2
