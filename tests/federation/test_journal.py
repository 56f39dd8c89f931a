"""The journal: a run killed in the middle of a round goes on there, does little again, and ends as if nothing had been."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from federation.tiny import examples, federation, numbers, same, sgd

from fl_lightning.aggregation import Keep
from fl_lightning.callbacks.optimizer_memory import OptimizerMemory
from fl_lightning.data.examples import DataInfo
from fl_lightning.federation import journal as journals
from fl_lightning.federation.journal import Follower
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.participant import Participant
from fl_lightning.federation.state import CheckpointError, CheckpointFolder, read_checkpoint
from fl_lightning.message import Group, Message
from fl_lightning.methods import FedAvg
from fl_lightning.methods.base import SERVER, Client, ClientProgram, Fit, Method, Predict, Reduced, Server, Steps
from fl_lightning.tasks import FederatedTask
from fl_lightning.tasks.base import Picture

REQUESTS = 3 * 2 + 4  # of a round of `Chain`


@dataclass(frozen=True)
class ChainClient(ClientProgram):
    """Two fits, the second from where the first ended, and a memory that knows its round."""

    def update(self, client: Client, message: Message) -> Steps:
        seen = int(client.memory["round"]["round"]) if client.memory else 0
        assert seen == client.round - 1  # never a later round's
        first = yield Fit("model", client.train, message.tensors["model"], key=("first",))
        second = yield Fit("model", client.train, None, key=("second",))
        rows, names = torch.zeros(1, dtype=torch.int64), ("row",)
        return client.reply(
            {"model": second.params},
            scalars={"seen": seen},
            memory={"round": {"round": torch.tensor(client.round)}, "own": first.params, "again": first.params},
            metrics={"loss": second.metrics["loss"]},
            pictures=[Picture("dot", 3, torch.zeros(1, 1, 2, 2, dtype=torch.uint8), rows, names)],
        )


class Chain(Method):
    """The server trains in three fits with one momentum, and asks what the last one has left in the task."""

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        self.model: Mapping[str, torch.Tensor] = model.state()

    def client(self) -> ClientProgram:
        return ChainClient()

    def broadcast(self, round: int) -> Message:
        return Message(round, SERVER, {"model": self.model})

    def uplink(self, round: int) -> dict[str, Group]:
        return {"model": Group("artifact", Keep(), like=self.model)}

    def numbers(self, round: int) -> tuple[str, ...]:
        return ("seen",)

    def server_update(self, round: int, total: Reduced, server: Server) -> Mapping[str, float]:
        models = list(total.groups["model"].values())
        self.model = {name: sum(model[name] for model in models) / len(models) for name in models[0]}
        memory, data = OptimizerMemory(), examples(10, 5)
        for number in range(3):
            start = self.model if number == 0 else None
            result = server.fit(Fit("model", data, start, callbacks=(memory,), key=("server", number)))
        outputs = server.predict(Predict("model", data)).outputs
        assert outputs is not None
        self.model = result.params
        return {"server/outputs": float(outputs.sum())}

    def evaluations(self) -> dict[str, Predict]:
        return {"": Predict("model", None, self.model)}

    def state_dict(self) -> dict[str, Any]:
        return {"model": dict(self.model)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model = dict(state["model"])


class Killed(BaseException):
    """As kill -9: nobody catches it."""


class Watched:
    """Counts the requests of turns, and ends the run before one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.last: int | None = None
        self.how: type[BaseException] = Killed
        given = Participant.execute

        def execute(worker: Participant, request: Fit | Predict, *owner: object) -> Any:
            if owner[1] != "evaluate":
                if len(self.asked) == self.last:
                    raise self.how
                self.asked.append(owner)
            return given(worker, request, *owner)

        monkeypatch.setattr(Participant, "execute", execute)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def chain(rounds: int = 1, **options: Any) -> FederationLoop:
    options = {"journal_seconds": 0.0, "count_flops": True, **options}
    return federation(Chain(rounds), optimizer=sgd(momentum=0.9), **options)


def run(
    folder: Path, watched: Watched, kill: int | None = None, name: str = "a", **options: Any
) -> tuple[FederationLoop, int]:
    """A run from its newest checkpoint, if it has one, and how many requests it carried out."""
    loop, watched.asked, watched.last = chain(**options), [], kill
    kept = CheckpointFolder(folder / "checkpoints").list()
    try:
        loop.fit(folder, kept[-1] if kept else None, {"config_hash": name})
    except (Killed, KeyboardInterrupt):
        assert kill is not None
    return loop, len(watched.asked)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> FederationLoop:
    """The run that nobody killed, without a journal."""
    loop = chain(journal_seconds=None)
    loop.fit(tmp_path_factory.mktemp("expected"))
    return loop


def assert_as(loop: FederationLoop, expected: FederationLoop) -> None:
    assert numbers(loop) == numbers(expected)
    assert same(loop.method.state_dict(), expected.method.state_dict())
    assert same(loop.memory.state_dict(), expected.memory.state_dict())


def test_killed_anywhere_a_round_goes_on_there_and_nothing_is_done_again(
    tmp_path: Path, watched: Watched, expected: FederationLoop
) -> None:
    for kill in (0, 1, 2, 6, 7, 8, 9):  # before the first, within a turn, between turns, within the server's
        folder = tmp_path / str(kill)
        run(folder, watched, kill)
        loop, again = run(folder, watched)
        assert_as(loop, expected)
        assert again == REQUESTS - kill
        assert not (folder / "journal").exists()


def test_two_kills_in_one_round(tmp_path: Path, watched: Watched, expected: FederationLoop) -> None:
    run(tmp_path, watched, 3)
    run(tmp_path, watched, 5)
    loop, again = run(tmp_path, watched)
    assert_as(loop, expected)
    assert again == REQUESTS - 8


def test_rounds_between_checkpoints_start_from_one_that_the_journal_asks_for(tmp_path: Path, watched: Watched) -> None:
    options = {"rounds": 2, "checkpoint_every": 10}
    whole, _ = run(tmp_path / "whole", watched, journal_seconds=None, **options)
    run(tmp_path / "killed", watched, REQUESTS + 3, **options)
    kept = CheckpointFolder(tmp_path / "killed" / "checkpoints").list()
    assert [path.name for path in kept] == ["round_00000", "round_00001"]
    loop, again = run(tmp_path / "killed", watched, **options)
    assert_as(loop, whole)
    assert again == REQUESTS - 3


def test_other_devices_are_told_what_the_main_one_finds(
    tmp_path: Path, watched: Watched, expected: FederationLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    plain = FederationLoop._new_journal

    def kept(loop: FederationLoop, folder: Path | None) -> Any:
        if folder is None:
            return Follower(lambda value: told.pop(0))
        journal = plain(loop, folder)
        assert journal is not None
        journal.share = lambda value: told.append(value) or value  # type: ignore[func-returns-value]
        return journal

    monkeypatch.setattr(FederationLoop, "_new_journal", kept)
    for kill in (0, 3, 8):  # the two processes of a run one after the other
        run(tmp_path / str(kill), watched, kill)
        assert told == [False]  # nothing is told in a round that starts anew
        told.clear()
        start = CheckpointFolder(tmp_path / str(kill) / "checkpoints").list() if kill else []
        copied = [shutil.copytree(path, tmp_path / f"start_{kill}") for path in start]
        loop, again = run(tmp_path / str(kill), watched)
        assert_as(loop, expected)
        assert told[0] is (kill > 0)
        other, watched.asked = chain(), []
        other.fit(None, copied[-1] if copied else None)
        assert_as(other, expected)
        assert len(watched.asked) == again == REQUESTS - kill
        assert not told


# ---- what it costs


@pytest.mark.parametrize("seconds", [30.0, None])
def test_a_round_that_is_quick_or_has_no_journal_writes_nothing(
    tmp_path: Path, watched: Watched, expected: FederationLoop, seconds: float | None
) -> None:
    run(tmp_path, watched, REQUESTS - 1, journal_seconds=seconds)
    assert list(tmp_path.rglob("*.*")) == []
    loop, again = run(tmp_path, watched, journal_seconds=seconds)
    assert_as(loop, expected)
    assert again == REQUESTS


def test_what_was_quick_waits_and_is_written_together(
    tmp_path: Path, watched: Watched, expected: FederationLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0, 1, 2, 29, *[31.0] * 2]  # the round starts; the first client's fits, and a reply; ...; is written
    monkeypatch.setattr(journals.time, "monotonic", lambda: now[len(watched.asked)])
    run(tmp_path, watched, 5, journal_seconds=30.0)
    kinds = [entry.header["kind"] for entry, _ in journals._entries(tmp_path / "journal" / "round_00001.log")]
    assert kinds == ["begin", "reply", "result", "result"]  # the first client's results are in its reply
    monkeypatch.undo()


def test_an_interrupt_writes_what_waits(tmp_path: Path, watched: Watched, expected: FederationLoop) -> None:
    watched.how = KeyboardInterrupt
    run(tmp_path, watched, 5, journal_seconds=1e9)
    loop, again = run(tmp_path, watched)
    assert_as(loop, expected)
    assert again == REQUESTS - 5


def test_much_that_waits_is_written(tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "HELD", 500)
    run(tmp_path, watched, 9, journal_seconds=1e9)
    assert (tmp_path / "journal" / "round_00001.log").exists()


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_seconds_out_of_range(seconds: float) -> None:
    with pytest.raises(ValueError, match="journal_seconds is"):
        chain(journal_seconds=seconds)


# ---- what does not fit


def log(folder: Path) -> Path:
    return folder / "journal" / "round_00001.log"


def test_a_damaged_entry_is_done_again_and_what_depends_on_it(
    tmp_path: Path, watched: Watched, expected: FederationLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, watched, REQUESTS - 1)
    entries = [entry for entry, _ in journals._entries(log(tmp_path))]
    second = [entry for entry in entries if entry.header["kind"] == "reply"][1]
    content = bytearray(log(tmp_path).read_bytes())
    content[second.at + 200] ^= 1
    log(tmp_path).write_bytes(content)
    loop, again = run(tmp_path, watched)
    assert "a damaged entry of client 1" in capsys.readouterr().err
    assert_as(loop, expected)
    assert watched.asked[:6] == [(1, "1")] * 2 + [(1, "server")] * 4
    assert again == 6


def test_a_damaged_result_of_the_server_and_those_after_it(
    tmp_path: Path, watched: Watched, expected: FederationLoop
) -> None:
    run(tmp_path, watched, REQUESTS - 1)
    entries = [entry for entry, _ in journals._entries(log(tmp_path))]
    second = [entry for entry in entries if entry.header.get("turn") == "server"][1]
    content = bytearray(log(tmp_path).read_bytes())
    content[second.at + 200] ^= 1
    log(tmp_path).write_bytes(content)
    run(tmp_path, watched, 1)  # killed again when the second is done again: the third must not come back
    loop, _ = run(tmp_path, watched)
    assert_as(loop, expected)
    assert watched.asked[:2] == [(1, "server")] * 2


@pytest.mark.parametrize("cut", ["begin", "head", "tensors", "last"])
def test_a_file_that_ends_within_an_entry_is_read_up_to_there(
    tmp_path: Path, watched: Watched, expected: FederationLoop, cut: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, watched, REQUESTS - 1)
    ends = [end for _, end in journals._entries(log(tmp_path))]
    at = {"begin": ends[0] // 2, "head": ends[0] + 7, "tensors": ends[1] - 1, "last": ends[-1] - 1}[cut]
    os.truncate(log(tmp_path), at)
    run(tmp_path, watched, 1)  # what comes next is written behind what is whole
    assert ("half written" in (said := capsys.readouterr().err)) == (cut != "begin"), said
    loop, again = run(tmp_path, watched)
    assert_as(loop, expected)
    redone = {"begin": REQUESTS, "head": REQUESTS, "tensors": REQUESTS, "last": 2}[cut]
    assert again == redone - 1


def test_entries_of_another_configuration_or_state_are_not_read(
    tmp_path: Path, watched: Watched, expected: FederationLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, watched, REQUESTS - 1)
    content = log(tmp_path).read_bytes()
    run(tmp_path, watched, 0, name="b")
    assert "is not of this configuration and this checkpoint" in capsys.readouterr().err
    assert not log(tmp_path).exists()
    log(tmp_path).write_bytes(content)  # and of this one again, but from another checkpoint
    (checkpoint,) = CheckpointFolder(tmp_path / "checkpoints").list()
    state, info = read_checkpoint(checkpoint)
    CheckpointFolder(tmp_path / "checkpoints").save(0, {**state, "seconds": {"round": 1.5}}, info)
    run(tmp_path, watched, 0)
    assert "is not of this configuration and this checkpoint" in capsys.readouterr().err


def test_a_request_that_is_another_one_is_carried_out_and_all_after_it(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, watched, REQUESTS - 1)
    given = journals.asked
    monkeypatch.setattr(journals, "asked", lambda r: "another" if r.key == ("server", 1) else given(r))
    _, again = run(tmp_path, watched)
    assert "a result for request 1 of server that does not fit" in capsys.readouterr().err
    assert watched.asked[:3] == [(1, "server")] * 3
    assert again == 3


def test_a_full_disk_ends_the_run_and_what_was_journalled_survives(
    tmp_path: Path, watched: Watched, expected: FederationLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, watched, 3)
    given = journals._packed  # of client 1, the first result is there

    def full(entry: Any) -> tuple[bytes, bytes]:
        head, tensors = given(entry)
        if entry.header["kind"] == "result" and entry.header["turn"] == "client 1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return head, tensors

    monkeypatch.setattr(journals, "_packed", full)
    # Whatever a failing client means: this is none.
    with pytest.raises(CheckpointError, match="No space left on device; what it held before is still there"):
        run(tmp_path, watched, on_client_error="skip")
    monkeypatch.setattr(journals, "_packed", given)
    loop, again = run(tmp_path, watched)
    assert_as(loop, expected)
    assert again == REQUESTS - 3


# ---- clients that fail


def failing(monkeypatch: pytest.MonkeyPatch, wanted: Any) -> None:
    """Clients' second fits fail where ``wanted`` says so of (round, client) and how often it was asked so far."""
    given, often = Participant.execute, dict[tuple[object, ...], int]()

    def execute(worker: Participant, request: Fit | Predict, *owner: object) -> Any:
        if request.key == ("second",):
            often[owner] = often.get(owner, 0) + 1
            if wanted(owner, often[owner]):
                raise OSError("the client is away")
        return given(worker, request, *owner)

    monkeypatch.setattr(Participant, "execute", execute)


def test_a_client_that_failed_is_asked_again_and_its_failures_are_counted_once(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda owner, often: owner == (1, "1") and often == 1)
    whole, _ = run(tmp_path / "whole", watched, on_client_error="retry")
    assert [row.get("round/failures") for row in numbers(whole)] == [None, 1]
    failing(monkeypatch, lambda owner, often: owner == (1, "1") and often == 1)
    run(tmp_path / "killed", watched, REQUESTS - 1, on_client_error="retry")
    loop, _ = run(tmp_path / "killed", watched, on_client_error="retry")
    assert_as(loop, whole)
    assert watched.asked[0] == (1, "server")


def test_a_client_that_was_skipped_is_asked_again(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda owner, often: owner == (1, "1"))
    whole, _ = run(tmp_path / "whole", watched, on_client_error="skip")
    assert [row["round/clients"] for row in numbers(whole)[1:]] == [2]
    run(tmp_path / "killed", watched, 7, on_client_error="skip")
    loop, _ = run(tmp_path / "killed", watched, on_client_error="skip")
    assert watched.asked[:2] == [(1, "1"), (1, "server")]  # its first fit too; the server goes on
    assert_as(loop, whole)


def test_a_run_that_a_client_ended_goes_on_with_what_this_client_had_done(
    tmp_path: Path, watched: Watched, expected: FederationLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda owner, often: owner == (1, "1") and often == 1)
    with pytest.raises(OSError, match="away"):
        run(tmp_path, watched)
    loop, again = run(tmp_path, watched)
    assert_as(loop, expected)
    assert again == REQUESTS - 3


# ---- the vectorised engine


def test_a_stack_of_clients_is_taken_as_a_whole(tmp_path: Path, watched: Watched) -> None:
    def one(folder: Path, watched: Watched, kill: int | None) -> tuple[FederationLoop, list[str]]:
        loop = federation(
            FedAvg(2),
            (4, 5, 6),
            engine="vectorized",
            vectorized_clients=2,
            journal_seconds=0.0,
            on_client_error="raise",
        )
        stacked: list[str] = []
        given = loop.engine._fit  # type: ignore[attr-defined]

        def fit(round: int, turns: list[Any]) -> list[Any]:
            if len(stacked) == kill:
                raise Killed
            stacked.append(f"{round}: {','.join(turn.key for turn in turns)}")
            return given(round, turns)

        loop.engine._fit = fit  # type: ignore[attr-defined]
        kept = CheckpointFolder(folder / "checkpoints").list()
        try:
            loop.fit(folder, kept[-1] if kept else None, {"config_hash": "a"})
        except Killed:
            assert kill is not None
        return loop, stacked

    whole, stacked = one(tmp_path / "whole", watched, None)
    assert stacked == ["1: 0,1", "1: 2", "2: 0,1", "2: 2"]
    one(tmp_path / "killed", watched, 3)
    loop, stacked = one(tmp_path / "killed", watched, None)
    assert stacked == ["2: 2"]
    assert_as(loop, whole)
