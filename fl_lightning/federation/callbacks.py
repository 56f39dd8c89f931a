"""What watches a federation: called by the loop between its phases. Not to be confused with Lightning's callbacks, which
watch (and change) one local fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Literal

from fl_lightning.data.bank import Bank
from fl_lightning.data.examples import Concatenated, Examples
from fl_lightning.tasks.base import Picture

if TYPE_CHECKING:
    from fl_lightning.federation.incoming import Failure
    from fl_lightning.federation.loop import FederationLoop
    from fl_lightning.methods.base import Reply

Row = Mapping[str, float]


class FederationCallback:
    """Does nothing; override what you need. Called on every process; write files on ``loop.is_main`` only."""

    def on_start(self, loop: FederationLoop) -> None:
        """Everything is set up; row 0 has not been evaluated, or a checkpoint has just been restored."""

    def on_stage(self, loop: FederationLoop, stage: str, done: int, total: int) -> None:
        """A phase of the round goes on: ``done`` of ``total`` parts are finished."""

    def on_reply(self, loop: FederationLoop, reply: Reply) -> None:
        """A client's reply has come in for the round after ``loop.round``, and will be reduced."""

    def on_failure(self, loop: FederationLoop, failure: Failure) -> None:
        """A client has failed in the round after ``loop.round``."""

    def measure(self, loop: FederationLoop) -> Row:
        """Numbers of your own for the row of the round that is just over (0: before the first), by column name.

        Asked on every round, before the row is kept; {} where there is nothing to say. A resumed run must get the same
        numbers, and the federation must go on as if nothing had been measured: own what is drawn, put back what is changed.
        """
        return {}

    def on_pictures(self, loop: FederationLoop, pictures: Mapping[str, Sequence[Picture]]) -> None:
        """What the fits of some clients have drawn in the round that is just over, by client; before its row is kept."""

    def on_round_end(self, loop: FederationLoop, row: Row) -> None:
        """A round (0: before the first) is over and stands in ``loop.history``; its scores, where it was evaluated."""

    def should_stop(self, loop: FederationLoop) -> bool:
        """Asked before each round, and before the first of a resumed run: decide from ``loop.history`` alone."""
        return False

    def on_end(self, loop: FederationLoop) -> None:
        """The last round is over."""

    def on_interrupt(self, loop: FederationLoop, saved: str | None) -> None:
        """The run was interrupted; ``saved`` is the checkpoint to go on from."""


def clients_in(loop: FederationLoop) -> list[str]:
    """Clients with data here that take part: all but those that the method does ``without``."""
    return [client for client in loop.data.info.clients if client not in loop.method.without]


def classes_in(loop: FederationLoop) -> list[int]:
    """Labels of the classes that take part."""
    return [c for c, name in enumerate(loop.info.class_names) if f"class:{name}" not in loop.method.without]


def examples_in(loop: FederationLoop, *clients: str) -> Examples:
    """Training examples of these clients, of the classes that take part; by default of all clients that do."""
    return Concatenated([loop.data.train(c).of_classes(classes_in(loop)) for c in clients or clients_in(loop)])


class ExportModel(FederationCallback):
    """Write the model whose accuracy is reported to a safetensors file when the last round is over.

    Args:
        path: The file; its folder is made.
        half: Write float16, as a tiny CLIP's weights always are.
    """

    def __init__(self, path: str, half: bool = False) -> None:
        self.path, self.half = path, half

    def on_start(self, loop: FederationLoop) -> None:
        if not loop.method.one_model:
            raise ValueError(f"{type(loop.method).__name__} has no global model to export")
        if not loop.dry_run:
            _check_target(self, self.path)

    def on_end(self, loop: FederationLoop) -> None:
        request = loop.method.evaluations().get("")
        if request is None or request.start is None:
            raise ValueError(f"{type(loop.method).__name__} has no global model to export")
        if loop.is_main and not loop.dry_run:
            loop.model.load(request.start)
            loop.model.export(self.path, self.half)


class ExportBank(FederationCallback):
    """Write the images that the server has synthesised to a safetensors file when the last round is over; `BankDistillation`
    learns from them.

    Args:
        path: The file; its folder is made.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_start(self, loop: FederationLoop) -> None:
        if not loop.method.makes_images:
            raise ValueError(f"{type(loop.method).__name__} has no synthetic images to export")
        if not loop.dry_run:
            _check_target(self, self.path)

    def on_end(self, loop: FederationLoop) -> None:
        bank = loop.method.synthetic()
        if not isinstance(bank, Bank):
            raise ValueError(f"{type(loop.method).__name__} has no synthetic images to export")
        if loop.is_main and not loop.dry_run:
            bank.save(self.path)


def _check_target(exporter: FederationCallback, path: str) -> None:
    """Make a file's folder and see that it takes files, on every device, so that all of them end where it does not.

    Raises:
        ValueError: It does not.
    """
    label, folder = f"{type(exporter).__name__}.path is {path!r}", Path(path).parent
    if Path(path).is_dir():
        raise ValueError(f"{label}, which is a folder; it must be a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{label}; its folder must be one that can be written ({error.strerror})") from error


class EarlyStop(FederationCallback):
    """Stop when a metric has not improved for some rounds. Its state is the history, so a resumed run stops alike.

    Args:
        monitor: Column of the record, for example "val_global/acc".
        patience: Evaluated rounds without improvement to wait for, at least 1.
        mode: Whether larger ("max") or smaller ("min") is better.
        min_delta: Smallest change that counts, at least 0.
    """

    def __init__(
        self, monitor: str, patience: int = 10, mode: Literal["max", "min"] = "max", min_delta: float = 0.0
    ) -> None:
        if patience < 1 or min_delta < 0 or mode not in ("max", "min"):
            raise ValueError(
                f"patience {patience} must be >= 1, min_delta {min_delta} >= 0, mode {mode!r} 'max' or 'min'"
            )
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.sign = 1 if mode == "max" else -1

    def should_stop(self, loop: FederationLoop) -> bool:
        first = loop.history[0]  # before any training: a wrong name must not wait for the first evaluated round
        if self.monitor not in first:
            raise ValueError(f"EarlyStop.monitor is {self.monitor!r}; a run's scores are: {', '.join(sorted(first))}")
        best, since = float("-inf"), 0
        for past in loop.history:
            if self.monitor in past:
                value = self.sign * past[self.monitor]
                best, since = (value, 0) if value > best + self.min_delta else (best, since + 1)
        return since >= self.patience
