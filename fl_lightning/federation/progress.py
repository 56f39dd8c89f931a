"""One progress display for the whole federation."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fl_lightning.federation.callbacks import FederationCallback, Row

if TYPE_CHECKING:
    from fl_lightning.federation.incoming import Failure
    from fl_lightning.federation.loop import FederationLoop

# What a line of progress shows, in this order, where the run records it.
SHOWN = ("global/acc", "base/acc", "novel/acc", "base_novel/hm", "personal_mean/acc", "client_worst/acc", "client/loss")


def brief(row: Row) -> str:
    """The few numbers of a round that fit on a line."""
    return "  ".join(f"{name} {row[name]:.4f}" for name in SHOWN if name in row)


class ProgressDisplay(FederationCallback):
    """A live display on a terminal (round, stage, last metrics, time left), a plain line a round elsewhere."""

    def __init__(self) -> None:
        self.console = Console()
        self.live = self.console.is_terminal
        self.bar: Progress | None = None

    def on_start(self, loop: FederationLoop) -> None:
        self.started, self.first = time.perf_counter(), loop.round
        if not loop.is_main or not self.live:
            return
        self.bar = Progress(
            TextColumn("[bold]round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[stage]}"),
            TextColumn("[cyan]{task.fields[metrics]}"),
            console=self.console,
        )
        self.task = self.bar.add_task("rounds", total=loop.method.rounds, completed=loop.round, stage="", metrics="")
        self.bar.start()

    def on_stage(self, loop: FederationLoop, stage: str, done: int, total: int) -> None:
        if self.bar is not None:
            part = f"{stage} ({done + 1}/{total})" if stage.startswith("client") else stage
            fraction = done / max(total, 1) if stage.startswith("client") else 0.0
            self.bar.update(self.task, stage=part, completed=loop.round + 0.9 * fraction)

    def on_failure(self, loop: FederationLoop, failure: Failure) -> None:
        if loop.is_main:
            print(f"round {failure.round}: client {failure.client} failed: {failure.error}", file=sys.stderr)

    def on_round_end(self, loop: FederationLoop, row: Row) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=loop.round, metrics=brief(row))
        elif loop.is_main:
            done, left = loop.round - self.first, loop.method.rounds - loop.round
            spent = time.perf_counter() - self.started
            rest = f"  left {spent / done * left:.0f} s" if done else ""
            print(f"round {loop.round}/{loop.method.rounds}  {brief(row)}{rest}", flush=True)

    def on_end(self, loop: FederationLoop) -> None:
        self._close()

    def on_interrupt(self, loop: FederationLoop, saved: str | None) -> None:
        self._close()
        if loop.is_main:
            print(f"\ninterrupted after round {loop.round}", file=sys.stderr)

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
