"""Which of the claims of FedMITR's theory a study shows: one table and one figure of paired differences.

    python -m fl_lightning.report.theory lightning_logs/compare/<study> --dense A --sparse B --relabelled C

reads the runs of a finished ``compare`` whose variants recorded `DistillationMeter`'s columns, and writes ``theory.md`` and
``theory.png`` into the study's folder. Every line says that one quantity is smaller than another, seed by seed.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fl_lightning.report import tables
from fl_lightning.report.compare import read_metrics
from fl_lightning.report.figures import COLOURS, figure_to_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = ("dense", "sparse", "relabelled")
CLAIMS = {
    "i": "The bound of FedMITR is tighter than that of dense inversion, through a smaller L.",
    "ii": "Hard labels on background of high frequency make the gradient's Lipschitz constant large; sparse inversion "
    "removes that.",
    "iii": "Soft labels of the ensemble on noisy patches lower the variance of gradients.",
}
CAVEAT = (
    "The bound is that of Hardt, Recht and Singer (2016) with measured constants. It bounds the gap on the synthetic "
    "distribution only and says nothing about the shift from synthetic to real images, which dominates."
)


class Line(NamedTuple):
    """A claim about two quantities, each a role and a column of the meter: the first is smaller."""

    claim: str
    smaller: tuple[str, str]
    larger: tuple[str, str]

    def labels(self) -> tuple[str, str]:
        """Both quantities in words."""
        left, right = (f"{column} ({role})" for role, column in (self.smaller, self.larger))
        return left, right


def _between(claim: str, ours: str, theirs: str, *columns: str) -> list[Line]:
    return [Line(claim, (ours, column), (theirs, column)) for column in columns]


def _within(claim: str, role: str, *pairs: tuple[str, str]) -> list[Line]:
    return [Line(claim, (role, smaller), (role, larger)) for smaller, larger in pairs]


LINES = (
    *_between("i", "sparse", "dense", "L", "bound"),
    *_between("i", "relabelled", "dense", "L", "bound", "weights_apart", "loss_apart", "gap"),
    *_between("ii", "sparse", "dense", "high_frequency_kept", "beta"),
    *_within(
        "ii",
        "sparse",
        ("high_frequency_kept", "high_frequency_low"),
        ("hard_kept/L", "hard_low/L"),
        ("hard_kept/beta", "hard_low/beta"),
    ),
    *_within(
        "iii",
        "relabelled",
        ("soft_low/spread", "hard_low/spread"),
        ("soft_low/variance", "hard_low/variance"),
        ("covariance_soft_low", "covariance_hard_low"),
    ),
    *_between("iii", "relabelled", "sparse", "spread", "variance"),
)

Records = Mapping[
    str, Mapping[int, Mapping[str, float]]
]  # of every role and seed, the meter's columns without "theory/"


def read(study: Path, roles: Mapping[str, str]) -> dict[str, dict[int, dict[str, float]]]:
    """The meter's columns of every role and seed.

    Args:
        study: Folder of a study, with its ``runs.csv``.
        roles: Variant of each role.

    Raises:
        ValueError: A variant has no finished run in the study, or did not record the meter's columns.
    """
    study = study.resolve()
    with open(study / "runs.csv", newline="") as file:
        runs = [run for run in csv.DictReader(file) if run["use"] == "result"]
    found: dict[str, dict[int, dict[str, float]]] = {}
    for role, variant in roles.items():
        for run in (run for run in runs if run["variant"] == variant):
            record: dict[str, float] = {}
            for row in read_metrics(study.parents[2] / run["run"] / "metrics.csv"):
                record |= {name.removeprefix("theory/"): v for name, v in row.items() if name.startswith("theory/")}
            found.setdefault(role, {})[int(run["seed"])] = record
        if not any(found.get(role, {}).values()):
            there = ", ".join(dict.fromkeys(run["variant"] for run in runs))
            raise ValueError(f"{role} is {variant!r}, which recorded no theory/ column; finished variants: {there}")
    return found


def pairs(line: Line, records: Records) -> dict[int, tuple[float, float]]:
    """Of every seed that has both, the quantity that should be smaller and the other."""
    (ours, column), (theirs, other) = line.smaller, line.larger
    seeds = [seed for seed in records[ours] if seed in records[theirs]]
    both = {seed: (records[ours][seed].get(column), records[theirs][seed].get(other)) for seed in seeds}
    return {seed: (a, b) for seed, (a, b) in both.items() if a is not None and b is not None}


def table(records: Records) -> str:
    """The claims in GitHub's Markdown, with the caveat of the bound."""
    seeds = sorted({seed for by_seed in records.values() for seed in by_seed})
    text = f"Paired by seed ({', '.join(map(str, seeds))}): mean difference [95 % t-interval].\n"
    for claim, says in CLAIMS.items():
        text += f"\n**({claim})** {says}\n\n| smaller | than | values | difference | seeds | visible |\n"
        text += "|---|---|---:|---:|---:|---|\n"
        for line in (line for line in LINES if line.claim == claim):
            values = pairs(line, records)
            cells = _cells(values) if values else ("–", "–", "0", "not recorded")
            text += "| " + " | ".join((*line.labels(), *cells)) + " |\n"
    return f"{text}\n{CAVEAT}\n"


def _cells(values: Mapping[int, tuple[float, float]]) -> tuple[str, str, str, str]:
    """Means, difference, number of seeds, verdict."""
    rows = [(side, seed, {"": pair[k]}) for seed, pair in values.items() for k, side in enumerate(("ours", "theirs"))]
    found, (ours, theirs) = tables.paired_differences(rows, "theirs")["ours"][""], np.mean(list(values.values()), 0)
    if found.pairs == 1:
        verdict, interval = "one seed", ""
    else:
        verdict = "yes" if found.high < 0 else "no: larger" if found.low > 0 else "undecided"
        interval = f" [{found.low:.3g}, {found.high:.3g}]"
    return f"{ours:.3g}, {theirs:.3g}", f"{found.mean:+.3g}{interval}", str(found.pairs), verdict


def figure(records: Records) -> Figure:
    """Every line's relative difference, (smaller - larger) / |larger| in per cent: a dot a seed, a bar for their mean.

    A claim is visible where its dots lie left of zero.
    """
    from matplotlib.figure import Figure

    shown = {claim: [line for line in LINES if line.claim == claim] for claim in CLAIMS}
    page = Figure(figsize=(10, 1.2 + 0.34 * len(LINES)), layout="constrained")
    panels = page.subplots(len(CLAIMS), 1, sharex=True, height_ratios=[len(lines) for lines in shown.values()])
    for axes, colour, (claim, lines) in zip(panels, COLOURS, shown.items(), strict=False):
        for place, line in enumerate(lines):
            values = [100 * (a - b) / abs(b) for a, b in pairs(line, records).values() if b]
            values = [value for value in values if math.isfinite(value)]
            if values:
                axes.barh(place, np.mean(values), height=0.6, color=colour, alpha=0.4)
                axes.plot(values, [place] * len(values), "o", color=colour, markersize=4, markeredgecolor="white")
        axes.set_yticks(range(len(lines)), [" < ".join(line.labels()) for line in lines], fontsize=8)
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xscale("symlog", linthresh=100)
        axes.set_title(f"claim ({claim})", loc="left", fontsize=9)
        axes.grid(axis="x", alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("relative difference in %; left of 0: as claimed (beyond ±100 logarithmic)")
    page.suptitle("The bound holds on the synthetic distribution only, not for real images", fontsize=9)
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table and the figure of a study."""
    parser = argparse.ArgumentParser(prog="python -m fl_lightning.report.theory", description=__doc__)
    parser.add_argument("study", type=Path, help="folder of the study, lightning_logs/compare/<name>")
    for role in ROLES:
        parser.add_argument(f"--{role}", required=True, help=f"variant with {role} images", metavar="VARIANT")
    given = vars(parser.parse_args(arguments))
    records = read(given["study"], {role: given[role] for role in ROLES})
    text = table(records)
    (given["study"] / "theory.md").write_text(text)
    figure_to_png(figure(records), given["study"] / "theory.png")
    print(text)


if __name__ == "__main__":
    main()
