"""``compare``: variants of a configuration over seeds. Runs what is not there yet and tabulates everything.

A run is known by the hash of its full configuration. So a study that is called again runs only what is missing, and
two studies, or two variants, that need the same run share it.
"""

from __future__ import annotations

import _thread
import contextlib
import csv
import io
import json
import math
import multiprocessing
import os
import re
import shlex
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentParser, Namespace

from fl_lightning.report import tables

Values = dict[str, float]
VIRTUAL = "virtual seconds"
COSTS = ("kB up per round", "kB down per round", "MB in all", "gradients", "TFLOP", "seconds", "CPU seconds", VIRTUAL)
UPLOADS = "uploads"  # in the folder of a run that saves them
OPTIONAL = {  # not in every record
    "gradients": "round/gradients",
    "TFLOP": "round/flops",
    "CPU seconds": "time/cpu",
    VIRTUAL: "round/virtual_seconds",
}
SPENT = ("round", "gradients", "MB in all", "seconds", VIRTUAL)  # on the way to a target
AT = r"(first|last|mean:[1-9]\d*|(best|lowest):.+|(reach|fall):.+:[^:]+)"


@dataclass
class Grid:
    """A hyper-parameter that every variant tunes for itself before it runs on all seeds.

    Args:
        keys: Dotted keys that all get the value, for example ``model.init_args.optimizer.init_args.lr``.
        values: Values to try. A single one is taken as it is.
        metric: Column to pick by: its mean over the tuning seeds, at the variant's round ``at``. Take a validation column.
        seeds: Tuning seeds; those of the study by default. A tuning run that a seed of the study needs is not run twice.
        mode: "max" or "min".
    """

    keys: list[str]
    values: list[Any]
    metric: str
    seeds: list[int] | None = None
    mode: Literal["max", "min"] = "max"


@dataclass
class Variant:
    """One line of the table.

    Args:
        configs: YAML files on top of the study's ``base``.
        set: Options as on the command line, {dotted key: value}; they have the last word.
        at: The round that is read: "last", "first" (round 0, before any training), "best:<column>" (the highest),
            "lowest:<column>", "reach:<column>:<value>" (the first with at least the value) or "fall:<column>:<value>" (at
            most). Round 0 counts; of equals the earliest. "mean:<n>": the last value of every column, and the mean over
            the last n rounds where it stands in several. A seed that does not get there is left out, and the row says so.
        runs_of: Another variant whose runs are read; then this one has no runs, and no options, of its own.
        uploads_of: Another variant, not tuned, from whose clients' uploads (``federation.save_uploads``) this one's
            runs start, seed by seed, in place of clients; they wait until its run is there.
        grid: Fields of the study's ``grid`` that differ for this variant; null: this variant is not tuned.
    """

    configs: list[str] = field(default_factory=list)
    set: dict[str, Any] = field(default_factory=dict)
    at: str = "last"
    runs_of: str | None = None
    uploads_of: str | None = None
    grid: dict[str, Any] | None = field(default_factory=dict)


@dataclass
class Study:
    """What to compare.

    Args:
        name: Name of the study; its folder is ``<output>/compare/<name>``, its runs lie in ``<output>/<name>/<variant>``.
        variants: {name: variant}, in the order of the table; a list is short for its ``configs``, null for nothing.
        base: YAML files, composed left to right as for ``fit``.
        seeds: Seeds of every variant.
        metrics: Columns of metrics.csv to tabulate. A variant that does not record one gets a dash.
        baseline: The variant that the others are compared with, seed by seed.
        grid: A hyper-parameter that every variant tunes for itself.
        set: Options of all variants, {dotted key: value}; after the configs of a variant and before its own ``set``.
        curves: Columns to draw over the rounds.
        targets: {column: values}: tabulate the first round that reaches each value, and what it cost to get there.
        order: "variants": all seeds of the first variant, then the next. "seeds": all variants on the first seed, then
            the next.
        jobs: Runs at a time, at least 1, each in a process of its own.
        digits: Decimals in table.md, at least 0.
        output: The folder of all runs, called lightning_logs.
    """

    name: str
    variants: dict[str, Variant | list[str] | None]
    base: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    metrics: list[str] = field(default_factory=lambda: ["global/acc"])
    baseline: str | None = None
    grid: Grid | None = None
    set: dict[str, Any] = field(default_factory=dict)
    curves: list[str] = field(default_factory=list)
    targets: dict[str, list[float]] = field(default_factory=dict)
    order: Literal["variants", "seeds"] = "variants"
    jobs: int = 1
    digits: int = 4
    output: str = "lightning_logs"

    def __post_init__(self) -> None:
        for label, number, least in (("jobs", self.jobs, 1), ("digits", self.digits, 0)):
            if number < least:
                raise ValueError(f"{label} is {number}; it must be at least {least}")
        if Path(self.output).name != "lightning_logs":  # the name that every run's root has
            raise ValueError(f"output is {self.output!r}; its last part must be lightning_logs")
        for name in (self.name, *self.variants):
            if not re.fullmatch(r"[^/\\:]+", name) or name in (".", "..", "compare"):
                raise ValueError(f"{name!r} cannot name a folder: it must have no slash, backslash or colon")
        lists: dict[str, list[Any]] = {"variants": [*self.variants], "seeds": self.seeds, "metrics": self.metrics}
        for label, names in lists.items():
            if not names or len(set(names)) < len(names):
                raise ValueError(f"{label} is {names}; it must hold at least one, and each once")
        self.rows = {name: _variant(given) for name, given in self.variants.items()}
        if self.baseline is not None and self.baseline not in self.rows:
            raise ValueError(f"baseline is {self.baseline!r}; variants: {', '.join(self.rows)}")
        self.grids = {name: self._grid(name, row.grid) for name, row in self.rows.items()}
        for name, row in self.rows.items():
            if not re.fullmatch(AT, row.at) or (row.at.startswith(("reach", "fall")) and not _number(row.at)):
                raise ValueError(
                    f"variants.{name}.at is {row.at!r}; allowed: first, last, mean:<n>, best:<column>, lowest:<column>, "
                    "reach:<column>:<value>, fall:<column>:<value>"
                )
            if row.runs_of is not None:
                owners = [n for n, other in self.rows.items() if other.runs_of is None]
                if row.runs_of not in owners:
                    raise ValueError(f"variants.{name}.runs_of is {row.runs_of!r}; allowed: {', '.join(owners)}")
                if row != Variant(at=row.at, runs_of=row.runs_of):
                    raise ValueError(f"variants.{name} reads runs of {row.runs_of!r}; it can have no options but 'at'")
            if row.uploads_of is not None:
                makers = [n for n, o in self.rows.items() if o.runs_of is o.uploads_of is None and not self.grids[n]]
                if row.uploads_of not in makers:
                    raise ValueError(f"variants.{name}.uploads_of is {row.uploads_of!r}; allowed: {', '.join(makers)}")

    def _grid(self, name: str, change: Mapping[str, Any] | None) -> Grid | None:
        if change is None or (self.grid is None and not change):
            return None
        allowed = [f.name for f in fields(Grid)]
        if set(change) - set(allowed):
            raise ValueError(f"variants.{name}.grid has {sorted(set(change) - set(allowed))}; allowed: {allowed}")
        missing = {"keys", "values", "metric"} - set(change)
        if self.grid is None and missing:
            raise ValueError(f"variants.{name}.grid lacks {sorted(missing)}, and the study has no grid")
        grid = replace(self.grid, **change) if self.grid else Grid(**change)
        for label, entries in {"keys": grid.keys, "values": grid.values, "seeds": grid.seeds}.items():
            if entries == []:
                raise ValueError(f"grid.{label} of variant {name!r} is empty; it must hold at least one")
        return grid


def _variant(given: Variant | Sequence[str] | None) -> Variant:
    return given if isinstance(given, Variant) else Variant(configs=list(given or []))


@dataclass(frozen=True)
class Run:
    """One run of the command line.

    Attributes:
        variant: Whose it is.
        seed: Its seed.
        value: What the grid's keys are set to; None without a grid.
        arguments: After ``python -m fl_lightning``.
        hash: Of its full configuration.
    """

    variant: str
    seed: int
    value: Any
    arguments: tuple[str, ...]
    hash: str

    @property
    def label(self) -> str:
        return f"{self.variant} seed {self.seed}" + ("" if self.value is None else f" value {self.value}")


class Comparison:
    """A study with what is known of its runs.

    Args:
        study: What to compare.

    Attributes:
        finished: Folder of every finished run below the study's output, by hash.
        failed: Log file and last line of every run that failed, by label.
    """

    def __init__(self, study: Study) -> None:
        self.study, self.output = study, Path(study.output)
        self.folder = self.output / "compare" / study.name
        self.failed: dict[str, str] = {}
        self._broken: set[str] = set()
        self._configs: dict[tuple[str, str], dict[str, Any]] = {}
        self._runs: dict[tuple[str, int, str, str], Run] = {}
        self._rows: dict[str, list[Values]] = {}
        self._took: list[float] = []
        self.finished, self.unfinished = index_runs(self.output)
        for name in self.owners:  # refuse what the parser refuses before hours are spent on the others
            for value in self.values(name):
                self.run(name, study.seeds[0], value)

    # ---- planning

    @property
    def owners(self) -> list[str]:
        """Variants with runs of their own."""
        return [name for name, row in self.study.rows.items() if row.runs_of is None]

    def values(self, name: str) -> list[Any]:
        grid = self.study.grids[name]
        return grid.values if grid else [None]

    def run(self, name: str, seed: int, value: Any) -> Run:
        """The run of a variant with a seed and a value of its grid."""
        uploads = self._uploads(name, seed)
        key = (name, seed, repr(value), str(uploads))
        if key not in self._runs:
            study, row, grid = self.study, self.study.rows[name], self.study.grids[name]
            given: dict[str, Any] = {}
            for options in (study.set, row.set, dict.fromkeys(grid.keys, value) if grid else {}):
                for option, chosen in options.items():
                    # The later one stands later, too: between them may be a class that resets it.
                    given.pop(option, None)
                    given[option] = chosen
            arguments = [text for path in (*study.base, *row.configs) for text in ("--config", path)]
            arguments += [text for k, v in given.items() for text in (f"--{k}", _text(v))]
            arguments += ["--federation.name", f"{study.name}/{name}"]
            arguments += ["--trainer.default_root_dir", str(self.output.parent)]
            if (name, repr(value)) not in self._configs:  # a second or so each: the parser is built anew
                self._configs[name, repr(value)] = full_config(name, arguments)
            # The seed is an integer in every configuration, and nothing in a configuration depends on it.
            config = {**self._configs[name, repr(value)], "seed_everything": seed}
            if uploads is not None:
                arguments += ["--federation.uploads", str(uploads)]
                config["federation"] = {**config["federation"], "uploads": str(uploads)}
            self._runs[key] = Run(name, seed, value, ("fit", *arguments, "--seed_everything", str(seed)), _hash(config))
        return self._runs[key]

    def _uploads(self, name: str, seed: int) -> Path | None:
        """Where a variant's runs with this seed find their uploads, existing or not; None where they have clients."""
        maker = self.study.rows[name].uploads_of
        if maker is None:
            return None
        return self.finished.get(self.run(maker, seed, None).hash, Path()) / UPLOADS

    def ready(self, run: Run) -> bool:
        """Whether what a run starts from is there."""
        maker = self.study.rows[run.variant].uploads_of
        return maker is None or self.run(maker, run.seed, None).hash in self.finished

    def tuning(self, name: str) -> list[Run]:
        """Runs that decide on the grid's value; none if there is nothing to decide."""
        grid, values = self.study.grids[name], self.values(name)
        if grid is None or len(values) == 1:
            return []
        return [self.run(name, seed, value) for value in values for seed in grid.seeds or self.study.seeds]

    def settled(self, run: Run) -> bool:
        return run.hash in self.finished or run.hash in self._broken

    def scores(self, name: str) -> dict[Any, float]:
        """Mean of the grid's metric per value, over the tuning seeds; values of which a run failed are left out."""
        grid = self.study.grids[name]
        assert grid is not None
        found: dict[str, list[float]] = {}
        broken = set()
        for run in self.tuning(name):
            if run.hash in self.finished:
                values = self.reading(run, self.study.rows[name].at) or {grid.metric: math.nan}
                found.setdefault(repr(run.value), []).append(_column(values, grid.metric, "grid.metric", run.variant))
            else:
                broken.add(repr(run.value))
        return {key: sum(v) / len(v) for key, v in found.items() if key not in broken}

    def pick(self, name: str) -> list[Any]:
        """The value that a variant runs with, alone in a list; an empty list while or where none can be picked."""
        grid, tuning = self.study.grids[name], self.tuning(name)
        if grid is None or not tuning:
            return self.values(name)
        if not all(self.settled(run) for run in tuning):
            return []
        scores = {key: score for key, score in self.scores(name).items() if math.isfinite(score)}
        best = (max if grid.mode == "max" else min)(scores, key=lambda key: scores[key], default=None)
        return [value for value in grid.values if repr(value) == best]

    def wanted(self) -> Iterator[Run]:
        """All runs of the study that can be named by now, the first to start first."""
        names, seeds = self.owners, self.study.seeds
        variants_first = [(n, s) for n in names for s in seeds]
        for name, seed in variants_first if self.study.order == "variants" else [(n, s) for s in seeds for n in names]:
            yield from self.tuning(name)
            yield from (self.run(name, seed, value) for value in self.pick(name))

    def left(self) -> int:
        """Runs to go; runs after a grid that is not decided yet are counted as new ones."""
        open_runs = {run.hash for run in self.wanted() if not self.settled(run)}
        undecided = [n for n in self.owners if any(not self.settled(run) for run in self.tuning(n))]
        return len(open_runs) + len(undecided) * len(self.study.seeds)

    # ---- running

    def execute(self) -> None:
        """Run what is missing; returns when nothing is left that can run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "logs").mkdir(exist_ok=True)
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        # A pool of one process per slot: a process that dies takes no other run with it.
        pools: dict[int, ProcessPoolExecutor] = {}
        running: dict[Future[tuple[str | None, str]], tuple[Run, int, float]] = {}
        try:
            while True:
                for run in self.wanted():
                    busy = {slot for _, slot, _ in running.values()}
                    if len(busy) == self.study.jobs:
                        break
                    if self.settled(run) or any(run.hash == other.hash for other, _, _ in running.values()):
                        continue
                    if not self.ready(run):
                        continue
                    slot = min(set(range(self.study.jobs)) - busy)
                    if slot not in pools:
                        pools[slot] = ProcessPoolExecutor(1, context, _start_worker, (os.getpid(), stop))
                    resume = ["--ckpt_path", "last"] if run.hash in self.unfinished else []
                    print(f"{'resuming' if resume else 'running'} {run.label}", flush=True)
                    future = pools[slot].submit(_fit, [*run.arguments, *resume], str(self.log(run)))
                    running[future] = run, slot, time.perf_counter()
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run, slot, started = running.pop(future)
                    try:
                        folder, problem = future.result()
                    except BrokenExecutor:
                        folder, problem = None, "its process died"
                        pools.pop(slot).shutdown(wait=False)
                    self._took.append(time.perf_counter() - started)
                    self.settle(run, folder, problem)
                self.write()
        except KeyboardInterrupt:
            print("stopping; the same command goes on from here", file=sys.stderr)
            raise SystemExit(130) from None
        finally:
            stop.set()  # what still runs writes a checkpoint and ends
            for pool in pools.values():
                pool.shutdown(cancel_futures=True)

    def log(self, run: Run) -> Path:
        return self.folder / "logs" / (re.sub(r"[^\w.+=-]+", "_", run.label) + ".log")

    def settle(self, run: Run, folder: str | None, problem: str) -> None:
        """Take note of a run that ended."""
        if folder is None:
            self._broken.add(run.hash)
            self.failed[run.label] = f"{problem} (log: {self.log(run)})"
            print(f"FAILED {run.label}: {self.failed[run.label]}", file=sys.stderr)
            return
        first = not any(known in self.finished for known in {r.hash for r in self._runs.values()})
        self.finished[run.hash] = Path(folder)
        values = self.reading(run, "last") or {}
        if first and (unknown := [m for m in (*self.study.metrics, *self.study.curves) if m not in values]):
            print(f"warning: {run.label} does not record {', '.join(unknown)}; {_recorded(values)}", file=sys.stderr)
        left = self.left()
        seconds = left * sum(self._took) / len(self._took) / self.study.jobs
        shown = ", ".join(f"{m} {values[m]:.4f}" for m in self.study.metrics if m in values)
        print(
            f"done {run.label}: {shown} ({self._took[-1]:.0f} s); {left} left, about {_duration(seconds)}", flush=True
        )

    # ---- reading

    def rows(self, run: Run) -> list[Values]:
        """The record of a finished run."""
        if run.hash not in self._rows:
            self._rows[run.hash] = read_metrics(self.finished[run.hash] / "metrics.csv")
        return self._rows[run.hash]

    def reading(self, run: Run, at: str) -> Values | None:
        """What the table reads of a run; None where it never gets to the round that is asked for."""
        try:
            return reading(self.rows(run), at)
        except ValueError as error:
            raise ValueError(f"variant {run.variant!r}: {error}") from error

    def results(self) -> list[tuple[str, Run, Values]]:
        """Variant, run and what is read of it, for every line that is there."""
        found = []
        for name, row in self.study.rows.items():
            owner = row.runs_of or name
            for seed in self.study.seeds:
                for run in (self.run(owner, seed, value) for value in self.pick(owner)):
                    if run.hash in self.finished and (values := self.reading(run, row.at)) is not None:
                        found.append((name, run, values))
        return found

    # ---- writing

    def write(self) -> str:
        """Write table.md, table.csv, runs.csv and commands.txt; returns the table."""
        study, results = self.study, self.results()
        rows = [(n, run.seed, {m: v[m] for m in study.metrics if m in v}) for n, run, v in results]
        costs = [(n, run.seed, {c: v[c] for c in COSTS if c in v}) for n, run, v in results]
        count = {name: sum(n == name for n, _, _ in results) for name in study.rows}
        labels = {n: n if k == len(study.seeds) else f"{n} ({k} of {len(study.seeds)} seeds)" for n, k in count.items()}
        spread = tables.mean_std(rows)
        paired = tables.paired_differences(rows, study.baseline) if study.baseline in spread else {}
        seeds = f"{len(study.seeds)} seed{'s' if len(study.seeds) > 1 else ''} ({', '.join(map(str, study.seeds))})"
        text = f"# {study.name}\n\nMean ± standard deviation over {seeds}.\n\n"
        text += tables.markdown({labels[n]: cells for n, cells in spread.items()}, digits=study.digits)
        if paired:
            text += f"\n## Difference to {study.baseline}\n\nPaired by seed: mean [95 % t-interval].\n\n"
            text += tables.markdown({labels[n]: cells for n, cells in paired.items()}, digits=study.digits)
        text += self._targets() + self._picks() + "\n## Cost\n\n"
        text += tables.markdown({labels[n]: cells for n, cells in tables.mean_std(costs).items()})
        missing = [n for n, k in count.items() if k < len(study.seeds)]
        if missing:
            text += f"\nNot complete: {', '.join(f'{n} ({count[n]} of {len(study.seeds)} seeds)' for n in missing)}.\n"
        text += "".join(f"\nFailed: {label}: {problem}\n" for label, problem in self.failed.items())
        _write(self.folder / "table.md", text)
        all_costs = tables.mean_std(costs)
        _write(self.folder / "table.csv", _table_csv({n: {**s, **all_costs[n]} for n, s in spread.items()}, paired))
        _write(self.folder / "runs.csv", self._runs_csv(results))
        commands = dict.fromkeys(shlex.join(["python", "-m", "fl_lightning", *run.arguments]) for run in self.wanted())
        _write(self.folder / "commands.txt", "".join(f"{line}\n" for line in commands))
        return text

    def _targets(self) -> str:
        """Per target: how many seeds get there, and the medians over all seeds (not reached counts as infinite)."""
        clocked = any(OPTIONAL[VIRTUAL] in row for _, run, _ in self.results() for row in self.rows(run))
        text, spent = "", [cost for cost in SPENT if clocked or cost != VIRTUAL]
        for column, values in self.study.targets.items():
            for value in values:
                lines = []
                for name in self.owners:
                    runs = [
                        run
                        for seed in self.study.seeds
                        for run in (self.run(name, seed, v) for v in self.pick(name))
                        if run.hash in self.finished
                    ]
                    found = [self.reading(run, f"reach:{column}:{value}") for run in runs]
                    if found:
                        cells = [_median([math.inf if f is None else f.get(c, math.nan) for f in found]) for c in spent]
                        lines.append(
                            f"| {name} | {sum(f is not None for f in found)} of {len(found)} | {' | '.join(cells)} |\n"
                        )
                head = f"| variant | seeds that reach it | {' | '.join(spent)} |\n|---|---:|{'---:|' * len(spent)}\n"
                if lines:
                    text += f"\n## To {column} {value}\n\nMedian over seeds.\n\n{head}{''.join(lines)}"
        return text

    def _picks(self) -> str:
        """What each variant's grid came to; a value at an end of the grid says that the grid may be too short."""
        lines = []
        for name in self.owners:
            grid, value = self.study.grids[name], self.pick(name)
            if grid is None or not self.tuning(name) or not value:
                continue
            scores = self.scores(name)
            tried = ", ".join(f"{v}: {scores[repr(v)]:.4f}" for v in grid.values if repr(v) in scores)
            edge = " (an end of the grid)" if value[0] in (grid.values[0], grid.values[-1]) else ""
            lines.append(f"| {name} | {', '.join(grid.keys)} | {value[0]}{edge} | {grid.metric} | {tried} |\n")
        head = "\n## Tuned\n\n| variant | key | value | picked by | mean over tuning seeds |\n|---|---|---|---|---|\n"
        return head + "".join(lines) if lines else ""

    def _runs_csv(self, results: Sequence[tuple[str, Run, Values]]) -> str:
        """Every run that is there: those of the table, and those that only tuned (without a variant's final columns)."""
        lines = [(name, "result", run, values) for name, run, values in results]
        final = {run.hash for _, run, _ in results}
        for name in self.owners:
            tuned = [run for run in self.tuning(name) if run.hash in self.finished and run.hash not in final]
            lines += [(name, "tuning", run, self.reading(run, self.study.rows[name].at) or {}) for run in tuned]
        tuned_by = [grid.metric for grid in self.study.grids.values() if grid]
        columns = list(dict.fromkeys(["round", *self.study.metrics, *tuned_by, *COSTS]))
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["variant", "use", "seed", "value", *columns, "git_commit", "run"])
        for name, use, run, values in lines:
            folder = self.finished[run.hash]
            commit = json.loads((folder / "summary.json").read_text()).get("git_commit")
            cells = ["" if run.value is None else run.value, *(values.get(column, "") for column in columns)]
            writer.writerow([name, use, run.seed, *cells, commit, os.path.relpath(folder, self.output.parent)])
        return out.getvalue()

    def draw(self) -> None:
        """Write curves_<metric>.png for every metric of the study that a run recorded."""
        from fl_lightning.report.figures import curves_figure, figure_to_png

        for metric in self.study.curves:
            curves: dict[str, dict[int, list[tuple[int, float]]]] = {}
            for name, run, _ in self.results():
                points = [(int(row["round"]), row[metric]) for row in self.rows(run) if metric in row]
                if points and self.study.rows[name].runs_of is None:  # the same curve a second time says nothing
                    curves.setdefault(name, {})[run.seed] = points
            if curves:
                file = f"curves_{metric.replace('/', '_')}.png"
                figure_to_png(curves_figure(curves, metric), self.folder / file)


# ---- what a run left


def index_runs(output: Path) -> tuple[dict[str, Path], set[str]]:
    """Finished runs below a folder by the hash of their configuration, and the hashes of those that did not finish."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, and there may be a thousand
    finished, unfinished = {}, set()
    for path in sorted(output.glob("**/config.yaml"), key=lambda p: (p.stat().st_mtime, str(p))):
        changed = (file for kind in ("unlearned", "enrolled") for file in path.parent.glob(f"{kind}_*.json"))
        if any(changed):  # no longer what its configuration makes in one go; nor do its rounds cost that
            continue
        found = _hash(yaml.load(path.read_text(), loader))
        if (path.parent / "summary.json").is_file() and (path.parent / "metrics.csv").is_file():
            finished[found] = path.parent
        else:
            unfinished.add(found)
    return finished, unfinished - set(finished)


def full_config(variant: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The configuration that ``fit`` makes of these arguments.

    Raises:
        ValueError: ``fit`` refuses them.
    """
    from fl_lightning import cli

    out, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            cli.run(["fit", *arguments, "--print_config"])
    except SystemExit as end:
        if end.code not in (None, 0):
            message = errors.getvalue().strip().splitlines() or [f"exit code {end.code}"]
            raise ValueError(f"variant {variant!r}: {message[-1].removeprefix('error: ')}") from end
    return yaml.safe_load(out.getvalue())


def _hash(config: Mapping[str, Any]) -> str:
    """`fl_lightning.cli.config_hash`, of a configuration in which an option that is null is one that is absent."""
    from fl_lightning.cli import config_hash

    def without_null(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: without_null(v) for k, v in value.items() if v is not None}
        return [without_null(v) for v in value] if isinstance(value, list) else value

    return config_hash(without_null(config))


def read_metrics(path: Path) -> list[Values]:
    """The rows of a metrics.csv, without empty cells."""
    with open(path, newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def reading(rows: Sequence[Values], at: str) -> Values | None:
    """What a table reads of a run's record.

    Args:
        rows: Rounds in order.
        at: See `Variant`.

    Returns:
        Columns, and the costs of getting there: bytes, backward passes and seconds up to the round that is read. None where
        no round reaches the value of "reach" or "fall".

    Raises:
        ValueError: No row has a finite value in that column.
    """
    values: Values = {}
    kind, _, column = at.partition(":")
    if kind == "last":
        for row in rows:
            values |= row
    elif kind == "first":
        values |= rows[0]
    elif kind == "mean":
        for row in rows:
            values |= row
        for name in values.keys() - {"round"}:
            last = [row[name] for row in rows[-int(column) :] if name in row]
            values[name] = sum(last) / len(last) if last else values[name]
    else:
        column, _, limit = column.rpartition(":") if kind in ("reach", "fall") else (column, "", "")
        candidates = [row for row in rows if math.isfinite(row.get(column, math.nan))]
        if not candidates and kind in ("reach", "fall"):
            return None
        if not candidates:
            columns = {name: value for row in rows for name, value in row.items()}
            raise ValueError(f"'at' names {column!r}, which no round has as a finite number; {_recorded(columns)}")
        if kind in ("reach", "fall"):
            sign = 1 if kind == "reach" else -1
            candidates = [row for row in candidates if sign * row[column] >= sign * float(limit)][:1]
        if not candidates:
            return None
        values |= (min if kind == "lowest" else max)(candidates, key=lambda row: row[column])
    before = [row for row in rows if row["round"] <= values["round"]]
    names = "comm/bytes_up", "comm/bytes_down", "round/gradients", "round/flops", "time/round", "time/cpu"
    up, down, gradients, flops, *seconds = (sum(row.get(c, 0.0) for row in before) for c in (*names, OPTIONAL[VIRTUAL]))
    rounds = max(values["round"], 1.0)
    spent = (up / rounds / 1e3, down / rounds / 1e3, (up + down) / 1e6, gradients, flops / 1e12, *seconds)
    recorded = {column for row in rows for column in row}
    return values | {name: v for name, v in zip(COSTS, spent, strict=True) if OPTIONAL.get(name, "round") in recorded}


def _number(at: str) -> bool:
    try:
        return math.isfinite(float(at.rpartition(":")[2]))
    except ValueError:
        return False


def _median(values: list[float]) -> str:
    middle = statistics.median(values)
    return "–" if not math.isfinite(middle) else f"{middle:.2f}".removesuffix(".00")


def _column(values: Values, name: str, what: str, variant: str) -> float:
    if name not in values:
        raise ValueError(f"{what} is {name!r}, which variant {variant!r} does not record; {_recorded(values)}")
    return values[name]


def _recorded(values: Iterable[str]) -> str:
    return f"recorded: {', '.join(sorted(name for name in values if name not in COSTS and name != 'round'))}"


def _table_csv(
    spread: Mapping[str, Mapping[str, tables.Spread]], paired: Mapping[str, Mapping[str, tables.Difference]]
) -> str:
    """One line per variant and metric: its spread, and its difference to the baseline where there is one."""
    names = [f.name for f in fields(tables.Spread)], [f"difference_{f.name}" for f in fields(tables.Difference)]
    out = io.StringIO()
    writer = csv.DictWriter(out, ["variant", "metric", *names[0], *names[1]], lineterminator="\n")
    writer.writeheader()
    for variant, cells in spread.items():
        for metric, cell in cells.items():
            other = paired.get(variant, {}).get(metric)
            values = {**asdict(cell), **({f"difference_{k}": v for k, v in asdict(other).items()} if other else {})}
            known = {k: v for k, v in values.items() if not math.isnan(v)}
            writer.writerow({"variant": variant, "metric": metric, **known})
    return out.getvalue()


def _plain(value: Any) -> Any:
    """Namespaces as dictionaries."""
    if isinstance(value, Namespace):
        value = value.as_dict()  # not vars(): names such as "values" are mangled there
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _text(value: Any) -> str:
    """A value as on the command line."""
    return value if isinstance(value, str) else json.dumps(_plain(value))


def _write(path: Path, text: str) -> None:
    """Write beside and rename: whoever reads meanwhile sees a whole file."""
    beside = path.with_name(path.name + ".writing")
    beside.write_text(text)
    beside.replace(path)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# ---- in the worker process

_busy = threading.Event()


def _start_worker(parent: int, stop: Any) -> None:
    """Leave the terminal's process group and watch for the end: a run is interrupted once, and can write its checkpoint."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with interrupts ignored

    def watch() -> None:
        while not stop.wait(0.5) and os.getppid() == parent:
            pass
        if _busy.is_set():
            _thread.interrupt_main()
        while _busy.is_set():
            time.sleep(0.1)
        if not stop.is_set():  # nobody is left to end this process
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _fit(arguments: list[str], log: str) -> tuple[str | None, str]:
    """Run a command line with its output in a log file; returns the run's folder, or None and what went wrong."""
    from fl_lightning.__main__ import main as command_line
    from fl_lightning.usage import explain

    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _busy.set()
    try:
        folder = getattr(command_line(arguments), "run_folder", None)
        return (str(folder), "") if folder else (None, "it left no folder: trainer.fast_dev_run?")
    except BaseException as error:  # SystemExit and an interrupt are ends of a run too, not of the worker
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        cause = error.__cause__ if isinstance(error, SystemExit) and error.__cause__ else error
        return None, f"{type(cause).__name__}: {explain(str(cause))}"[:400]
    finally:
        _busy.clear()
        sys.stdout.flush()
        sys.stderr.flush()


def main(arguments: list[str]) -> Path:
    """Run a study from the command line.

    Args:
        arguments: After ``compare``.

    Returns:
        The study's folder.

    Raises:
        SystemExit: A run failed (1), or an interrupt (130).
        ValueError: The study cannot be run as it is described.
    """
    parser = ArgumentParser(
        prog="python -m fl_lightning compare",
        description="Run variants of a configuration over seeds and tabulate them. Finished runs are found again.",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="A YAML with the options below.")
    parser.add_class_arguments(Study)
    given = parser.parse_args(arguments)
    given.pop("config", None)
    study = Study(**vars(parser.instantiate(given)))
    comparison = Comparison(study)
    comparison.folder.mkdir(parents=True, exist_ok=True)
    _write(comparison.folder / "study.yaml", yaml.safe_dump(_plain(given), sort_keys=False))
    try:
        comparison.execute()
    finally:
        text = comparison.write()
        comparison.draw()
    results = comparison.results()
    unknown = [m for m in study.metrics if not any(m in values for _, _, values in results)]
    unknown += [t for t in study.targets if not any(t in row for _, run, _ in results for row in comparison.rows(run))]
    if results and unknown:
        columns = sorted({name for _, _, values in results for name in values})
        raise ValueError(f"metrics or targets name {', '.join(unknown)}, which no run records; {_recorded(columns)}")
    print(text)
    print(f"study: {comparison.folder}")
    if comparison.failed:
        for label, problem in comparison.failed.items():
            print(f"failed: {label}: {problem}", file=sys.stderr)
        raise SystemExit(1)
    return comparison.folder
