"""What an unfinished round has come to so far, on disk: a run that is killed in a round of days goes on in its middle.

One file of entries that only grows, ``<run>/journal/round_00003.log``; it is gone once the round's checkpoint is written. An
entry is a client's reply as it was accepted, or the result of a request (`Fit`, `Predict`) of a client whose reply is not
there yet, or of the server. Every draw has an owner and no request depends on an earlier one but through its result, so the
resumed round asks again and is given what was journalled, up to the first thing that was not.

Beside it lies a snapshot of the training that is in progress, ``round_00003.training``, each in place of the last one; it
goes when the training's result is kept, and when something that came before it is done again.

What depends on something that was done again is done again itself: results of a turn (a client's, the server's) on those
before them in the turn, results of the server on all replies. The order of the entries says all of that, see `_note`. An
entry is JSON and safetensors, each with its checksum; nothing is ever unpickled.

Of several devices' processes the main one keeps the journal (`Journal`), and tells the others (`Follower`) what it finds
there, so that all of them go on at the same request.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors.torch import load as load_safetensors
from torch import Tensor

from fl_lightning.federation.incoming import Failure, Guard
from fl_lightning.federation.state import MANIFEST, CheckpointError, serialise, sync, unflatten, write_lasting
from fl_lightning.message import Message
from fl_lightning.methods.base import Fit, Predict, Reply, Result
from fl_lightning.tasks.base import Picture

if TYPE_CHECKING:
    from fl_lightning.federation.participant import Participant

FOLDER = "journal"  # in the run's
BEGIN, REPLY, RESULT, FORGET, TRAINING = "begin", "reply", "result", "forget", "training"
SERVER_TURN = "server"
_T = TypeVar("_T")
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
        share: Called on all devices at once, returns what this process has called it with; None where there is one device.
    """

    def __init__(
        self,
        folder: Path,
        seconds: float,
        base: Callable[[], Path],
        configuration: str,
        share: Callable[[Any], Any] | None = None,
    ) -> None:
        self.folder, self.seconds, self.base, self.configuration = folder, seconds, base, configuration
        self.share = share

    # ---- the round

    def begin(self, round: int, base: Path | None) -> None:
        """A round starts, from a checkpoint that is or will be at ``base``: read what the journal knows of it."""
        self.round, self._path = round, self.folder / f"round_{round:05d}.log"
        self._held: dict[str, list[_Entry]] = {}  # by turn
        self._known: dict[str, list[_Entry]] = {}  # by turn: a reply, or results
        self._recalled: set[str] = set()
        self._snapshot = self._path.with_suffix(".training")
        self._training: _Entry | None = None  # what lies there
        self._bytes, self._end, self._since = 0, 0, time.monotonic()
        if self._path.exists():
            assert base is not None  # a `Follower` alone has none
            self._load(base)
        if self._training is None:
            self._snapshot.unlink(missing_ok=True)
        self._resumes = bool(self._known)
        if self.share is not None:
            self.share(self._resumes)

    def _agreed(self, find: Callable[[], _T | None]) -> _T | None:
        """What is found on disk, on every device. Several of them look for nothing in a round that starts anew."""
        if self.share is None:
            return find()
        return self.share(find()) if self._resumes else None

    def _load(self, base: Path) -> None:
        entries, facts = list(_entries(self._path)), self._begin(base)
        if not entries or entries[0][0].header.get("facts") != facts:
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
        if self._snapshot.exists():
            self._training = self._found(facts)

    def _found(self, facts: Mapping[str, Any]) -> _Entry | None:
        """The snapshot of a training of this round. What it rests on is there, or will be noted when it is done again."""
        entry = next((entry for entry, _ in _entries(self._snapshot)), None)
        if entry is None:
            self._say("is damaged; that training starts over", path=self._snapshot)
            return None
        return entry if entry.header["facts"] == facts else None

    def _begin(self, base: Path) -> dict[str, Any]:
        """What a file must say of itself to be read."""
        manifest = base / MANIFEST
        state = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None
        return {"round": self.round, "configuration": self.configuration, "state": state}

    def _note(self, entry: _Entry) -> None:
        """What an entry means for those before it."""
        header = entry.header
        turn = header["turn"]
        if self._training is not None and self._training.header["turn"] in (
            (turn,) if header["kind"] == RESULT else (turn, SERVER_TURN)
        ):
            self._training = None  # done, or what it rests on is another; the file goes once that is written
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
                costs = worker.num_gradients - gradients, _flops(worker) - flops
                self.keep_reply(reply, *costs, guard.failures[failures:])
            yield reply, received

    def keep_reply(self, reply: Reply, num_gradients: int, flops: float, failures: Sequence[Failure]) -> None:
        """Keep a reply that has been accepted, with what it has cost and in what its client has failed before."""
        value = {
            "reply": _reply_tree(reply),
            "num_gradients": num_gradients,
            "flops": flops,
            "failures": [asdict(failure) for failure in failures],
        }
        turn = client_turn(reply.message.sender)
        self._bytes -= sum(map(_size, self._held.pop(turn, [])))
        self._hold(_Entry({"kind": REPLY, "turn": turn}, value))

    def recall(self, clients: Sequence[str], worker: Participant, guard: Guard) -> list[Reply] | None:
        """The replies of clients, counted as if they had just been made; None unless those of all are there."""
        if (values := self._agreed(partial(self._replies, clients))) is None:
            return None
        for value in values:
            count_costs(worker, value)
            guard.take_over([Failure(**failure) for failure in value["failures"]], {})
        self._recalled.update(clients)
        return [_reply(value["reply"], client, self.round) for value, client in zip(values, clients, strict=True)]

    def _replies(self, clients: Sequence[str]) -> list[Any] | None:
        values = []
        for client in clients:
            known = self._known.get(client_turn(client), [])
            value = self._read(known[0]) if known and known[0].header["kind"] == REPLY else None
            if value is None:
                return None
            values.append(value)
        return values

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
        self._forget_training(turn)

    def result(self, turn: str, number: int, request: Fit | Predict) -> Mapping[str, Any] | None:
        """What was kept of a turn's request of this number; None, also for those after it, where that is none or another."""
        return self._agreed(partial(self._result, turn, number, request))

    def _result(self, turn: str, number: int, request: Fit | Predict) -> Mapping[str, Any] | None:
        known = self._known.get(turn, [])
        if number >= len(known) or known[number].header["kind"] != RESULT:
            return None
        if known[number].header["asked"] == asked(request) and (value := self._read(known[number])) is not None:
            return value
        self.discard(turn, number)
        return None

    def without_replies(self) -> None:
        """The round's replies are not kept, and are made again: so is all that the server did with them."""
        self._known.pop(SERVER_TURN, None)
        self._forget_training(SERVER_TURN)

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

    # ---- a training in progress

    def training(self, turn: str, number: int, request: Fit | Predict) -> Training | None:
        """The place of the snapshots of a turn's request of this number; several devices have none."""
        return Training(self, turn, number, request) if self.share is None else None

    def _forget_training(self, turn: str) -> None:
        if self._training is not None and self._training.header["turn"] == turn:
            self._training = None
            self._snapshot.unlink(missing_ok=True)

    def _replace_training(self, turn: str, number: int, request: Fit | Predict, state: Mapping[str, Any]) -> None:
        """Write a snapshot, after all that came before it."""
        self.write(begin=True)
        header = {"kind": TRAINING, "facts": self._begin(self.base()), "turn": turn, "number": number}
        parts = _packed(_Entry({**header, "asked": asked(request)}, state))
        beside = self._snapshot.with_suffix(".writing")
        try:
            write_lasting(beside, parts)
            beside.rename(self._snapshot)
            sync(self.folder)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise _full(self._snapshot, error) from error
        self._training, _ = next(_entries(self._snapshot))
        self._since = time.monotonic()

    # ---- the file

    def _hold(self, entry: _Entry) -> None:
        training = self._training
        self._note(entry)
        self._held.setdefault(entry.header["turn"], []).append(entry)
        self._bytes += _size(entry)
        due = time.monotonic() - self._since >= self.seconds or self._bytes > HELD
        if due or self._training is not training:  # what took so long is not left to memory
            self.write()

    def write(self, begin: bool = False) -> None:
        """Put what is held in memory on disk.

        Args:
            begin: Begin the file even if nothing is held.

        Raises:
            CheckpointError: The disk takes no more; what was there before is still there.
        """
        entries = [entry for turn in self._held.values() for entry in turn]
        if not entries and (self._end or not begin):
            return
        if not self._end:
            facts = self._begin(self.base())  # first: where a checkpoint is written, the folder goes
            entries.insert(0, _Entry({"kind": BEGIN, "facts": facts}))
        try:
            self.folder.mkdir(exist_ok=True)
            parts = (part for entry in entries for part in _packed(entry))
            end = write_lasting(self._path, parts, append=bool(self._end))
        except OSError as error:
            raise _full(self._path, error) from error
        self._held, self._bytes, self._end, self._since = {}, 0, end, time.monotonic()
        if self._training is None:
            self._snapshot.unlink(missing_ok=True)

    def _read(self, entry: _Entry, path: Path | None = None) -> Any:
        """An entry's value; None, and a line, where it is damaged."""
        if entry.at is None:
            return None
        path = path or self._path
        try:
            with open(path, "rb") as file:
                file.seek(entry.at)
                content = file.read(entry.header["size"])
            if hashlib.sha256(content).hexdigest() != entry.header["sha256"]:
                raise ValueError("it differs from its checksum")
            # Copies lie in memory as torch lays it out.
            return unflatten(entry.header["tree"], {n: v.clone() for n, v in load_safetensors(content).items()})
        except Exception as error:
            self._say(f"has a damaged entry of {entry.header['turn']} ({error}); that is done again", path=path)
            return None

    def _say(self, what: str, round: int | None = None, path: Path | None = None) -> None:
        print(f"{path or self._path if round is None else f'round {round}'} {what}", file=sys.stderr)


class Follower(Journal):
    """On a device beside the main one: is told what that one's journal holds, and keeps nothing."""

    def __init__(self, share: Callable[[Any], Any]) -> None:
        self.share: Callable[[Any], Any] = share

    def begin(self, round: int, base: Path | None) -> None:
        self.round, self._known, self._recalled, self._training = round, {}, set(), None
        self._resumes = self.share(None)

    def _agreed(self, find: Callable[[], _T | None]) -> _T | None:
        return self.share(None) if self._resumes else None

    def discard(self, *_: Any) -> None:
        """The main one does."""

    keep = keep_reply = write = forget = discard  # type: ignore[assignment]


class Training:
    """Where the snapshots of one training are kept, `fl_lightning.federation.snapshot.Place`.

    Args:
        journal: Whose clock says when one is due.
        turn: Of whom.
        number: Of the request in the turn.
        request: What is carried out.
    """

    def __init__(self, journal: Journal, turn: str, number: int, request: Fit | Predict) -> None:
        self._journal, self._turn, self._number, self._request = journal, turn, number, request

    def due(self) -> bool:
        return time.monotonic() - self._journal._since >= self._journal.seconds

    def keep(self, state: Mapping[str, Any]) -> None:
        self._journal._replace_training(self._turn, self._number, self._request, state)

    def kept(self) -> Mapping[str, Any] | None:
        journal, entry = self._journal, self._journal._training
        if entry is None or (entry.header["turn"], entry.header["number"]) != (self._turn, self._number):
            return None
        where, value = f"request {self._number} of {self._turn}", None
        if entry.header["asked"] == asked(self._request):
            value = journal._read(entry, journal._snapshot)
        else:
            journal._say(f"is of another {where}, which starts over", path=journal._snapshot)
        if value is None:
            self.discard()
        else:
            journal._say(f"goes on within {where}, after step {value['progress']['steps']}", journal.round)
        return value

    def discard(self) -> None:
        self._journal._forget_training(self._turn)


def _full(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(error.errno, f"cannot write {path}: {error.strerror}; what it held before is still there")


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
