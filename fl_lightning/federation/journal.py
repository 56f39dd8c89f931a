"""What an unfinished round has come to so far, on disk: a run that is killed in a round of days goes on in its middle.

One file of entries that only grows, ``<run>/journal/round_00003.log``; it is gone once the round's checkpoint is written. An
entry is a client's reply as it was accepted, or the result of a request (`Fit`, `Predict`) of a client whose reply is not
there yet, or of the server. Every draw has an owner and no request depends on an earlier one but through its result, so the
resumed round asks again and is given what was journalled, up to the first thing that was not.

What depends on something that was done again is done again itself: results of a turn (a client's, the server's) on those
before them in the turn, results of the server on all replies. The order of the entries says all of that, see `_note`. An
entry is JSON and safetensors, each with its checksum; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load as load_safetensors
from torch import Tensor

from fl_lightning.federation.incoming import Failure, Guard
from fl_lightning.federation.state import MANIFEST, CheckpointError, serialise, unflatten
from fl_lightning.message import Message
from fl_lightning.methods.base import Fit, Predict, Reply, Result
from fl_lightning.tasks.base import Picture

if TYPE_CHECKING:
    from fl_lightning.federation.participant import Participant

FOLDER = "journal"  # in the run's
BEGIN, REPLY, RESULT, FORGET = "begin", "reply", "result", "forget"
SERVER_TURN = "server"
HELD = 2**28  # bytes that may wait in memory for the next writing
_LENGTH, _DIGEST = 8, 32  # bytes in front of an entry: of its JSON's length, and of its JSON's SHA-256


@dataclass
class _Entry:
    """An entry; ``at`` is where its tensors lie in the file, None while it is held in memory."""

    header: dict[str, Any]
    value: Any = None
    at: int | None = None


class Journal:
    """Keeps replies and results of the round at hand.

    Args:
        folder: `FOLDER` in the run's folder; who writes a checkpoint deletes it.
        seconds: What was done in less time than this since the last writing waits in memory, at most `HELD` bytes of it, and
            is written as soon as more time has gone by; at least 0, and 0 writes at once. Nothing of a round that takes less
            is ever written.
        base: Writes the checkpoint that the round starts from, unless it is there, and returns its path.
        configuration: A name for what the run computes; entries of another one are not read.
    """

    def __init__(self, folder: Path, seconds: float, base: Callable[[], Path], configuration: str) -> None:
        self.folder, self.seconds, self.base, self.configuration = folder, seconds, base, configuration

    # ---- the round

    def begin(self, round: int, base: Path) -> None:
        """A round starts, from a checkpoint that is or will be at ``base``: read what the journal knows of it."""
        self.round, self._path = round, self.folder / f"round_{round:05d}.log"
        self._held: dict[str, list[_Entry]] = {}  # by turn
        self._known: dict[str, list[_Entry]] = {}  # by turn: a reply, or results
        self._recalled: set[str] = set()
        self._bytes, self._end, self._since = 0, 0, time.monotonic()
        if self._path.exists():
            self._load(base)

    def _load(self, base: Path) -> None:
        entries = list(_entries(self._path))
        if not entries or entries[0][0].header.get("facts") != self._begin(base):
            self._say("is not of this configuration and this checkpoint; it is not read")
            self._path.unlink()
            return
        for entry, _ in entries[1:]:
            self._note(entry)
        self._end = entries[-1][1]
        if self._end < self._path.stat().st_size:
            self._say(f"is damaged, or half written, after byte {self._end}; what came there is done again")
            os.truncate(self._path, self._end)
        replies = sum(known[0].header["kind"] == REPLY for known in self._known.values() if known)
        results = sum(map(len, self._known.values())) - replies
        self._say(f"goes on with the journal's {replies} replies and {results} results of requests", self.round)

    def _begin(self, base: Path) -> dict[str, Any]:
        """What a file must say of itself to be read."""
        manifest = base / MANIFEST
        state = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None
        return {"round": self.round, "configuration": self.configuration, "state": state}

    def _note(self, entry: _Entry) -> None:
        """What an entry means for those before it."""
        header = entry.header
        turn = header["turn"]
        if header["kind"] == RESULT:
            known = self._known.setdefault(turn, [])
            del known[header["number"] :]
            if len(known) == header["number"]:  # else the ones before it are lost
                known.append(entry)
            return
        self._known[turn] = [entry] if header["kind"] == REPLY else []
        self._known.pop(SERVER_TURN, None)

    # ---- replies

    def keeping(
        self, replies: Iterator[tuple[Reply | None, Message | None]], worker: Participant, guard: Guard
    ) -> Iterator[tuple[Reply | None, Message | None]]:
        """The same replies, those that clients have just made being kept, with what they cost."""
        while True:
            gradients, flops, failures = worker.num_gradients, _flops(worker), len(guard.failures)
            try:
                reply, received = next(replies)
            except StopIteration:
                return
            if reply is not None and received is not None and reply.message.sender not in self._recalled:
                value = {
                    "reply": _reply_tree(reply),
                    "num_gradients": worker.num_gradients - gradients,
                    "flops": _flops(worker) - flops,
                    "failures": [asdict(failure) for failure in guard.failures[failures:]],
                }
                turn = client_turn(reply.message.sender)
                self._bytes -= sum(map(_size, self._held.pop(turn, [])))
                self._hold(_Entry({"kind": REPLY, "turn": turn}, value))
            yield reply, received

    def recall(self, clients: Sequence[str], worker: Participant, guard: Guard) -> list[Reply] | None:
        """The replies of clients, counted as if they had just been made; None unless those of all are there."""
        values = []
        for client in clients:
            known = self._known.get(client_turn(client), [])
            value = self._read(known[0]) if known and known[0].header["kind"] == REPLY else None
            if value is None:
                return None
            values.append(value)
        for value in values:
            count_costs(worker, value)
            guard.take_over([Failure(**failure) for failure in value["failures"]], {})
        self._recalled.update(clients)
        return [_reply(value["reply"], client, self.round) for value, client in zip(values, clients, strict=True)]

    # ---- requests

    def forget(self, client: str) -> None:
        """A client has failed, and starts over if it is asked again."""
        turn = client_turn(client)
        known = self._known.get(turn, [])
        if known and known[0].header["kind"] == RESULT:
            del self._known[turn]
            held = self._held.pop(turn, [])
            self._bytes -= sum(map(_size, held))
            if len(held) < len(known):  # some are in the file
                self._hold(_Entry({"kind": FORGET, "turn": turn}))

    def result(self, turn: str, number: int, request: Fit | Predict) -> Mapping[str, Any] | None:
        """What was kept of a turn's request of this number; None, also for those after it, where that is none or another."""
        known = self._known.get(turn, [])
        if number >= len(known) or known[number].header["kind"] != RESULT:
            return None
        if known[number].header["asked"] == asked(request) and (value := self._read(known[number])) is not None:
            return value
        self.discard(turn, number)
        return None

    def discard(self, turn: str, number: int) -> None:
        """A result does not fit: it is done again, and all that came after it."""
        self._say(f"has a result for request {number} of {turn} that does not fit; from there it is done again")
        del self._known[turn][number:]

    def keep(self, turn: str, number: int, request: Fit | Predict, result: Result, flops: float) -> None:
        """Keep the result of a turn's request, and what its callbacks carry to later ones."""
        metrics = {name: float(value) for name, value in result.metrics.items()}
        tree = {**vars(result), "metrics": metrics, "pictures": [vars(picture) for picture in result.pictures]}
        carried = [callback.state_dict() for callback in request.callbacks] if isinstance(request, Fit) else []
        value = {"result": tree, "callbacks": carried, "num_gradients": result.num_gradients, "flops": flops}
        header = {"kind": RESULT, "turn": turn, "number": number, "asked": asked(request)}
        self._hold(_Entry(header, value))

    # ---- the file

    def _hold(self, entry: _Entry) -> None:
        self._note(entry)
        self._held.setdefault(entry.header["turn"], []).append(entry)
        self._bytes += _size(entry)
        if time.monotonic() - self._since >= self.seconds or self._bytes > HELD:
            self.write()

    def write(self) -> None:
        """Put what is held in memory on disk.

        Raises:
            CheckpointError: The disk takes no more; what was there before is still there.
        """
        entries = [entry for turn in self._held.values() for entry in turn]
        if not entries:
            return
        if not self._end:
            begin = self._begin(self.base())  # first: where a checkpoint is written, the folder goes
            entries.insert(0, _Entry({"kind": BEGIN, "facts": begin}))
        try:
            self.folder.mkdir(exist_ok=True)
            with open(self._path, "ab" if self._end else "wb") as file:
                for entry in entries:
                    head, tensors = _packed(entry)
                    file.write(head)
                    file.write(tensors)
                file.flush()
                os.fsync(file.fileno())
                end = file.tell()
        except OSError as error:
            raise CheckpointError(
                error.errno, f"cannot write {self._path}: {error.strerror}; what it held before is still there"
            ) from error
        self._held, self._bytes, self._end, self._since = {}, 0, end, time.monotonic()

    def _read(self, entry: _Entry) -> Any:
        """An entry's value; None, and a line, where it is damaged."""
        if entry.at is None:
            return None
        try:
            with open(self._path, "rb") as file:
                file.seek(entry.at)
                content = file.read(entry.header["size"])
            if hashlib.sha256(content).hexdigest() != entry.header["sha256"]:
                raise ValueError("it differs from its checksum")
            # Copies lie in memory as torch lays it out.
            return unflatten(entry.header["tree"], {n: v.clone() for n, v in load_safetensors(content).items()})
        except Exception as error:
            self._say(f"has a damaged entry of {entry.header['turn']} ({error}); that is done again")
            return None

    def _say(self, what: str, round: int | None = None) -> None:
        print(f"{self._path if round is None else f'round {round}'} {what}", file=sys.stderr)


def client_turn(client: str) -> str:
    """The name of a client's turn."""
    return f"client {client}"


def asked(request: Fit | Predict) -> str:
    """Which request this is: all about it but the values of tensors, which follow from what came before."""
    about: list[Any] = [
        type(request).__name__,
        request.task,
        request.key,
        list(request.start or ()),
        list(request.given),
    ]
    about.append(None if request.data is None else len(request.data))
    if isinstance(request, Fit):
        parts = (*request.rules, *request.callbacks)
        about += [sorted(request.overrides.items()), [type(part).__name__ for part in parts]]
    else:
        about.append(request.output)
    return hashlib.sha256(repr(about).encode()).hexdigest()


def result_of(value: Mapping[str, Any]) -> Result:
    """The `Result` of an entry."""
    tree = dict(value["result"])
    return Result(**{**tree, "pictures": tuple(Picture(**picture) for picture in tree["pictures"])})


def _reply_tree(reply: Reply) -> dict[str, Any]:
    message = reply.message
    return {
        "groups": message.tensors,
        "scalars": message.scalars,
        "num_examples": message.num_examples,
        "memory": reply.memory,
        "metrics": {name: float(value) for name, value in reply.metrics.items()},
        "pictures": [vars(picture) for picture in reply.pictures],
    }


def _reply(tree: Mapping[str, Any], client: str, round: int) -> Reply:
    message = Message(round, client, tree["groups"], tree["scalars"], tree["num_examples"])
    return Reply(message, tree["memory"], tree["metrics"], tuple(Picture(**picture) for picture in tree["pictures"]))


def _flops(worker: Participant) -> float:
    return worker.flops.total if worker.flops is not None else 0.0


def count_costs(worker: Participant, value: Mapping[str, Any]) -> None:
    """Count what an entry has cost."""
    worker.num_gradients += value["num_gradients"]
    if worker.flops is not None:
        worker.flops.total += value["flops"]


def _size(entry: _Entry) -> int:
    return _nbytes(entry.value)


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_nbytes, parts))


def _packed(entry: _Entry) -> tuple[bytes, bytes]:
    tree, tensors = serialise(entry.value)
    sha256 = hashlib.sha256(tensors).hexdigest()
    head = json.dumps({**entry.header, "tree": tree, "size": len(tensors), "sha256": sha256}).encode()
    return len(head).to_bytes(_LENGTH, "big") + hashlib.sha256(head).digest() + head, tensors


def _entries(path: Path) -> Iterator[tuple[_Entry, int]]:
    """Entries of a file without their tensors, each with where it ends, up to the first that is not whole."""
    size, at = path.stat().st_size, 0
    with open(path, "rb") as file:
        while at < size:
            file.seek(at)
            front = file.read(_LENGTH + _DIGEST)
            length = int.from_bytes(front[:_LENGTH], "big")
            if at + len(front) + length > size:
                return
            head = file.read(length)
            if hashlib.sha256(head).digest() != front[_LENGTH:]:
                return
            header = json.loads(head)
            start = at + len(front) + length
            at = start + header["size"]
            if at > size:
                return
            yield _Entry(header, at=start), at
