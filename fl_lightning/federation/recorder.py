"""What a run leaves: metrics.csv, TensorBoard events, the partition, failures.jsonl, summary.json."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from fl_lightning.data.partition import plot_counts
from fl_lightning.federation.callbacks import FederationCallback, Row
from fl_lightning.tasks.base import Picture

if TYPE_CHECKING:
    from fl_lightning.federation.incoming import Failure
    from fl_lightning.federation.loop import FederationLoop

FAILURES = "failures.jsonl"


class Recorder(FederationCallback):
    """Writes the run's folder as it goes.

    Args:
        folder: The run's folder; exists.
        loggers: Lightning loggers that get every round's row; a TensorBoard logger gets figures and pictures too.
    """

    def __init__(self, folder: Path, loggers: Sequence[Logger] = ()) -> None:
        self.folder, self.loggers = folder, list(loggers)
        self.columns: list[str] = []

    def on_start(self, loop: FederationLoop) -> None:
        if not loop.is_main:
            return
        data = loop.data
        if data.partition.clients:
            data.partition.save(self.folder / "partition.json")
            self.figure("partition", plot_counts(data.counts(), data.class_names, data.partition.clients), 0)
        if loop.history:
            self._rewrite(loop.history)  # a resumed run goes on where its checkpoint stands
        if (path := self.folder / FAILURES).exists():
            past = [line for line in map(json.loads, whole_lines(path)) if line["round"] <= loop.round]
            write_text(path, "".join(json.dumps(line) + "\n" for line in past))

    def on_failure(self, loop: FederationLoop, failure: Failure) -> None:
        if loop.is_main:
            with open(self.folder / FAILURES, "a") as file:
                file.write(json.dumps(asdict(failure)) + "\n")

    def on_round_end(self, loop: FederationLoop, row: Row) -> None:
        if loop.is_main:
            if set(row) <= set(self.columns):
                with open(self.folder / "metrics.csv", "a", newline="") as file:
                    csv.DictWriter(file, self.columns).writerow(_formatted(row))
            else:
                self._rewrite(loop.history)
            values = {name: value for name, value in row.items() if name != "round"}
            for logger in self.loggers:
                logger.log_metrics(values, step=int(row["round"]))
                logger.save()

    def on_pictures(self, loop: FederationLoop, pictures: Mapping[str, Sequence[Picture]]) -> None:
        if not loop.is_main:
            return
        from fl_lightning.report.generation_figures import samples_figure

        for client, drawn in pictures.items():
            for picture in drawn:
                name = f"pictures/client_{_plain(client)}/{_plain(picture.name)}"
                figure = samples_figure(
                    picture.images / 255, picture.rows, picture.row_names, per_class=len(picture.images)
                )
                self.figure(name, figure, picture.step, f"{name}_{picture.step:07d}.png")

    def on_end(self, loop: FederationLoop) -> None:
        evaluations = loop.method.evaluations()
        if evaluations:
            matrix, names = loop.evaluator.confusion(next(iter(evaluations.values())), loop.round)
        if not loop.is_main:
            return
        if evaluations:
            from fl_lightning.report.figures import confusion_figure

            self.figure("confusion", confusion_figure(matrix, names), loop.round)
        write_json(self.folder / "summary.json", loop.summary())
        for logger in self.loggers:
            logger.finalize("success")

    def _rewrite(self, history: Sequence[Row]) -> None:
        """Write the whole file, for a new column or a resumed run, beside it and renamed: no row is ever lost or doubled."""
        self.columns = ["round", *sorted({name for row in history for name in row} - {"round"})]
        beside = self.folder / "metrics.csv.writing"
        with open(beside, "w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(_formatted(row) for row in history)
        beside.rename(self.folder / "metrics.csv")

    def figure(self, name: str, figure: Any, step: int, file: str | None = None) -> None:
        """Write ``<name>.png``, or ``file`` below the run's folder, and show it in TensorBoard."""
        path = self.folder / (file or f"{name}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, bbox_inches="tight")
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(name, figure, step)


def _plain(name: str) -> str:
    """A name that is good for a file."""
    return re.sub(r"[^\w.-]+", "_", name)


def _formatted(row: Row) -> dict[str, Any]:
    """repr() of a float names it exactly, so that two files can be compared."""
    return {name: int(value) if name == "round" else repr(float(value)) for name, value in row.items()}


def write_json(path: Path, value: Any) -> None:
    """Write JSON beside and rename."""
    write_text(path, json.dumps(value, indent=2))


def write_text(path: Path, text: str) -> None:
    """Write beside and rename."""
    beside = path.with_name(path.name + ".writing")
    beside.write_text(text)
    beside.rename(path)


def whole_lines(path: Path) -> list[str]:
    """Lines of a file that has perhaps been torn in its last one."""
    return path.read_text().split("\n")[:-1]
