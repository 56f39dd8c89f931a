"""Clients who are not there: what they sent once lies in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.federation.engines.base import Addressed, Total
from fl_lightning.federation.engines.serial import SerialEngine
from fl_lightning.federation.uploads import FIRST, check_uploads, read_upload
from fl_lightning.message import Group, Message
from fl_lightning.methods.base import ClientProgram, Reply


class UploadsEngine(SerialEngine):
    """The replies of round 1 are read from a folder, at no cost on the way down; later rounds run as ever.

    Args:
        later: Runs the later rounds, and personalised evaluation.
        folder: See `fl_lightning.federation.uploads`.
    """

    def __init__(self, later: SerialEngine, folder: Path) -> None:
        super().__init__(later.participant, later.data, later.memory, later.guard)
        self.later, self.folder = later, folder

    def run(
        self,
        program: ClientProgram,
        message: Message,
        cohort: Sequence[str],
        uplink: Mapping[str, Group],
        *rest: Any,
    ) -> Total:
        if message.round > FIRST:
            return self.later.run(program, message, cohort, uplink, *rest)
        check_uploads(self.folder, cohort, uplink)
        self._uplink = uplink
        return super().run(program, message, cohort, uplink, *rest)

    def replies(
        self,
        program: ClientProgram,
        message: Message,
        cohort: Sequence[str],
        addressed: Addressed,
        progress: Callable[[str], None],
    ) -> Iterator[tuple[Reply | None, Message | None]]:
        for key in cohort:
            progress(key)
            yield self.guard.ask(key, partial(self._read, key)), None

    def _read(self, key: str) -> Reply:
        return read_upload(self.folder, key, self._uplink)[0]

    def evaluate(
        self, program: ClientProgram, message: Message, clients: Sequence[str]
    ) -> dict[str, dict[str, Tensor]] | None:
        return self.later.evaluate(program, message, clients)

    def close(self) -> None:
        self.later.close()
