"""What comes in: replies against their schema, and clients that fail."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation.tiny import federation, normalised, numbers, same

from fl_lightning.__main__ import main
from fl_lightning.federation.attacks import OneNaN
from fl_lightning.federation.incoming import BadReply, Failure, TooFewReplies, check_reply
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.sampling import FixedCohort
from fl_lightning.message import Group, Message
from fl_lightning.methods import SCAFFOLD, FedAvg, FedCM, FedDyn, FedSMOO
from fl_lightning.methods.averaging import AveragingClient
from fl_lightning.methods.base import Client, Reply, Steps
from fl_lightning.methods.fedcm import FedCMClient

CONFIG = str(Path(__file__).parents[2] / "configs" / "fedavg.yaml")
LIKE = {"w": torch.zeros(2, 3), "b": torch.zeros(3), "n": torch.zeros((), dtype=torch.int64)}
UPLINK = {
    "model": Group("update", like=LIKE),
    "rows": Group("rows", like={"x": torch.zeros(0, 4), "y": torch.zeros(0, dtype=torch.int64)}),
}


def reply(**changes: Any) -> Reply:
    groups = {"model": LIKE, "rows": {"x": torch.zeros(5, 4), "y": torch.zeros(5, dtype=torch.int64)}}
    options = {"round": 2, "sender": "7", "tensors": groups, "scalars": {"s": 1.0}, "num_examples": 3, **changes}
    return Reply(Message(**options))


def refusal(given: Reply, **options: Any) -> str:
    with pytest.raises(BadReply) as error:
        check_reply(given, UPLINK, "7", 2, **{"numbers": ("s",), **options})
    return str(error.value)


def test_a_reply_that_fits_passes() -> None:
    check_reply(reply(), UPLINK, "7", 2, numbers=("s",))
    check_reply(reply(num_examples=0), UPLINK, "7", 2, numbers=("s",))


def test_one_error_lists_everything_that_is_wrong() -> None:
    model = {"w": torch.zeros(3, 2), "n": torch.zeros(()), "extra": torch.tensor([1.0, torch.inf])}
    bad = reply(tensors={"model": model, "odd": {}}, scalars={"t": torch.nan}, num_examples=-1, sender="8", round=3)
    assert refusal(replace(bad, metrics={"loss": torch.nan})) == (
        "client 7's reply is of client '8' and round 3, expected '7' and 2; has num_examples -1; it must be at least 0; "
        "misses groups rows; has unexpected groups odd; group 'model' misses b; group 'model' has unexpected extra; "
        "group 'model' has w as (3, 2) torch.float32, expected (2, 3) torch.float32; "
        "group 'model' has n as () torch.float32, expected () torch.int64; group 'model' is not finite: extra; "
        "misses numbers s; has unexpected numbers t; has numbers that are not finite: t; "
        "comes from a training whose loss is nan"
    )


def test_rows_may_be_many_but_not_wide() -> None:
    rows = {"x": torch.zeros(9, 4), "y": torch.zeros(9, dtype=torch.int64)}
    check_reply(reply(tensors={"model": LIKE, "rows": rows}), UPLINK, "7", 2, numbers=("s",))
    text = refusal(reply(tensors={"model": LIKE, "rows": {**rows, "x": torch.zeros(9, 5)}}))
    assert text == "client 7's reply group 'rows' has x as (9, 5) torch.float32, expected (0, 4) torch.float32"


def test_a_reply_is_no_larger_than_allowed() -> None:
    size = reply().message.nbytes
    check_reply(reply(), UPLINK, "7", 2, size, ("s",))
    assert refusal(reply(), max_bytes=size - 1) == (
        f"client 7 replied with {size} bytes; federation.max_reply_bytes is {size - 1}"
    )


@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD, FedDyn, FedSMOO])
def test_averaging_methods_state_what_they_expect(method: Any) -> None:
    loop = federation(method(rounds=1), network=normalised, sizes=(6, 12, 6), batch_size=3)
    uplink = loop.method.uplink(1)
    assert all(group.like for group in uplink.values())
    loop.fit()


# ---- clients that fail


@dataclass(frozen=True)
class Faulty(AveragingClient):
    """Client 1 fails in round 2, as often as ``times`` says."""

    times: Any = None

    def update(self, client: Client, message: Message) -> Steps:
        result = yield from super().update(client, message)
        if client.key == "1" and client.round == 2 and self.times:
            self.times.pop()
            raise OSError("the disk is gone")
        return result


class Fails(FedAvg):
    def __init__(self, times: int, **options: Any) -> None:
        super().__init__(**options)
        self.times = [None] * times

    def client(self) -> Any:
        return Faulty(self.buffer_policy, times=self.times)


class Without(FixedCohort):
    """Client 1 is not there in round 2."""

    def __init__(self) -> None:
        super().__init__(["0", "2"])

    def cohort(self, round: int, clients: Any, seed: int) -> tuple[str, ...]:
        return super().cohort(round, clients, seed) if round == 2 else tuple(clients)


ENGINES: list[Any] = [{"client_loop": "lean"}, {"client_loop": "trainer"}, {"engine": "vectorized"}]


@pytest.mark.parametrize("options", ENGINES)
def test_the_round_goes_on_without_who_fails(options: Any) -> None:
    loop = federation(Fails(9, rounds=3), on_client_error="skip", **options)
    loop.fit()
    expected = federation(FedAvg(rounds=3), sampler=Without(), **options)
    expected.fit()
    if "engine" in options:  # who is left trains one by one
        for name, value in expected.method.state().items():
            torch.testing.assert_close(loop.method.state()[name], value, rtol=1e-10, atol=1e-12)
    else:
        assert same(loop.method.state(), expected.method.state())
    assert [row["round/failures"] for row in loop.history[1:]] == [0, 1, 0]
    assert [row["round/clients"] for row in loop.history[1:]] == [3, 2, 3]


@pytest.mark.parametrize("options", ENGINES)
def test_who_succeeds_when_asked_again_takes_part(options: Any) -> None:
    seen: list[Failure] = []
    loop = federation(Fails(1, rounds=3), on_client_error="retry", **options)
    loop.guard.record = seen.append
    loop.fit()
    whole = federation(FedAvg(rounds=3), **options)
    whole.fit()
    for name, value in whole.method.state().items():
        torch.testing.assert_close(loop.method.state()[name], value, rtol=1e-10, atol=1e-12)
    assert [row["round/clients"] for row in loop.history[1:]] == [3, 3, 3]
    if "engine" not in options:  # a stack of clients fails as a whole, before anyone is asked alone
        assert same(loop.method.state(), whole.method.state())
        assert [row["round/failures"] for row in loop.history[1:]] == [0, 1, 0]
        assert [(f.round, f.client, f.attempt, f.error, f.refused) for f in seen] == [
            (2, "1", 1, "OSError: the disk is gone", False)
        ]
        assert "raise OSError" in seen[0].traceback


@dataclass(frozen=True)
class Silent(FedCMClient):
    """Client 1 leaves the number out that the server divides by."""

    def update(self, client: Client, message: Message) -> Steps:
        reply = yield from super().update(client, message)
        sent = reply.message
        left = {} if client.key == "1" else sent.scalars
        return replace(reply, message=Message(sent.round, sent.sender, sent.tensors, left, sent.num_examples))


class Silenced(FedCM):
    def client(self) -> Any:
        return Silent(self.buffer_policy, self.alpha)


@pytest.mark.parametrize("options", ENGINES)
def test_a_number_that_is_left_out_does_not_change_the_mean_of_the_others(options: Any) -> None:
    loop, expected = (federation(m(rounds=2), on_client_error="skip", **options) for m in (Silenced, FedCM))
    expected.sampler = FixedCohort(["0", "2"])
    for each in (loop, expected):
        each.fit()
    for name, value in expected.method.state().items():  # type: ignore[attr-defined]
        torch.testing.assert_close(loop.method.state()[name], value, rtol=1e-10, atol=1e-12)  # type: ignore[attr-defined]
    assert [row["round/failures"] for row in loop.history[1:]] == [1, 1]


def test_a_failure_ends_the_run_where_that_is_asked_for() -> None:
    seen: list[Failure] = []
    loop = federation(Fails(1, rounds=3))
    loop.guard.record = seen.append
    with pytest.raises(OSError, match="the disk is gone"):
        loop.fit()
    assert [f.client for f in seen] == ["1"]
    assert "round/failures" not in loop.history[-1]


def test_a_quorum() -> None:
    loop = federation(Fails(9, rounds=3), on_client_error="skip", min_clients=3)
    what = r"round 2: 2 of 3 clients replied, and federation.min_clients is 3 \(client 1: OSError: the disk is gone\)"
    with pytest.raises(TooFewReplies, match=what):
        loop.fit()
    assert loop.round == 1
    with pytest.raises(ValueError, match="min_clients is 4; round 1 has 3 clients"):
        federation(FedAvg(rounds=1), min_clients=4).fit()
    nobody = federation(FedAvg(rounds=1), attack=OneNaN(share=1.0), on_client_error="skip")
    with pytest.raises(TooFewReplies, match="0 of 3 clients replied"):
        nobody.fit()


def test_wrong_values_are_refused() -> None:
    for options, what in (
        ({"on_client_error": "ignore"}, "on_client_error is 'ignore'; allowed: 'raise', 'skip', 'retry'"),
        ({"min_clients": 0}, "min_clients is 0"),
        ({"max_reply_bytes": 0}, "max_reply_bytes is 0"),
    ):
        with pytest.raises(ValueError, match=what):
            federation(FedAvg(rounds=1), **options)


def test_a_diverged_training_is_a_failure() -> None:
    loop = federation(FedAvg(rounds=1), optimizer=lambda p: torch.optim.SGD(p, lr=1e300), trainer={"max_epochs": 3})
    with pytest.raises(BadReply, match=r"client 0's reply .*(is not finite|whose loss is)"):
        loop.fit()


def test_failures_stand_in_the_runs_folder(tmp_path: Path) -> None:
    def run(rounds: int, **options: Any) -> Any:
        loop = federation(FedAvg(rounds=rounds), attack=OneNaN(clients=["1"]), on_client_error="skip")
        loop.callbacks.append(Recorder(tmp_path))
        loop.fit(tmp_path, **options)
        return loop

    def lines() -> list[tuple[int, str]]:
        found = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
        assert all("BadReply" in line["error"] and "Traceback" in line["traceback"] for line in found)
        return [(line["round"], line["client"]) for line in found]

    whole = run(3)
    assert lines() == [(1, "1"), (2, "1"), (3, "1")]
    with open(tmp_path / "failures.jsonl", "a") as file:
        file.write('{"round": 3, "cli')  # torn by a kill
    again = run(3, checkpoint=tmp_path / "checkpoints" / "round_00002")
    assert lines() == [(1, "1"), (2, "1"), (3, "1")]
    assert numbers(again) == numbers(whole)


def test_a_bad_reply_on_the_command_line_leaves_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    attack = ["--federation.attack=OneNaN", "--federation.attack.share=1.0", "--method.init_args.rounds=1"]
    with pytest.raises(BadReply, match="is not finite"):
        main(["fit", "--config", CONFIG, *attack])
    (folder,) = (tmp_path / "lightning_logs" / "fedavg").iterdir()
    assert len((folder / "failures.jsonl").read_text().splitlines()) == 1
