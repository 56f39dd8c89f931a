"""The virtual clock by hand, and turns that take too long on the wall."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from federation.tiny import federation, numbers

from fl_lightning.__main__ import main
from fl_lightning.federation.incoming import TooFewReplies
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.sampling import UniformSampler
from fl_lightning.federation.system import System, Turn
from fl_lightning.methods import FedAvg, FedDyn
from fl_lightning.rng import numpy_generator
from fl_lightning.tasks import ClassificationTask

SIZES = (8, 12, 40, 4)
CONFIG = str(Path(__file__).parents[2] / "configs" / "fedavg_stragglers.yaml")


def timed(rounds: int = 3, method: Any = None, **system: Any) -> FederationLoop:
    options = {"speed": 10.0, "bandwidth": 1000.0, **system}
    return federation(method or FedAvg(rounds=rounds), SIZES, system=System(**options), trainer={"max_epochs": 2})


def test_a_round_lasts_until_its_slowest_reply() -> None:
    loop = timed()
    loop.sampler = UniformSampler(2)
    loop.fit()
    for number, row in enumerate(loop.history[1:], 1):
        cohort = loop._cohort(number)
        each = (row["comm/bytes_down"] + row["comm/bytes_up"]) / 2 / 1000.0  # all clients are sent, and send, the same
        slowest = max(2 * SIZES[int(client)] / 10.0 for client in cohort) + each
        assert row["round/virtual_seconds"] == pytest.approx(slowest, rel=1e-9)
        assert row["round/late"] == row["round/unavailable"] == 0
    assert not [k for k in loop.history[0] if "virtual" in k]


def test_who_would_be_late_is_not_asked_and_the_round_takes_the_deadline() -> None:
    loop = timed(deadline=5.0)  # client 2 needs 8 seconds
    asked: list[str] = []
    reply = loop.engine.reply  # type: ignore[attr-defined]
    loop.engine.reply = lambda program, received, key: asked.append(key) or reply(program, received, key)  # type: ignore
    loop.fit()
    assert asked == ["0", "1", "3"] * 3
    for row in loop.history[1:]:
        assert (row["round/clients"], row["round/late"], row["round/virtual_seconds"]) == (3, 1, 5.0)
    # It is the federation of the three alone.
    three = timed()
    three._cohort = lambda round: ("0", "1", "3")  # type: ignore[method-assign]
    three.fit()
    for name, value in three.method.state().items():  # type: ignore[attr-defined]
        assert torch.equal(value, loop.method.state()[name])  # type: ignore[attr-defined]


def test_availability_speed_and_jitter_are_drawn_by_seed_round_and_client() -> None:
    system = System(availability=0.3, speed=10.0, speed_spread=1.0, bandwidth=5.0, bandwidth_spread=0.5, jitter=0.2)

    def normal(*owner: object) -> float:
        return float(numpy_generator(7, "system", *owner).standard_normal())

    times = {}
    for client in map(str, range(300)):
        turn = system.turn(client, 4, 7, 60, 70, 30)
        seconds = 60 / (10 * math.exp(normal(client, "speed"))) + 100 / (
            5 * math.exp(0.5 * normal(client, "bandwidth"))
        )
        assert turn.seconds == pytest.approx(seconds * math.exp(0.2 * normal(client, 4, "jitter")))
        times[client] = turn
    there = sum(turn.available for turn in times.values())
    assert abs(there - 90) < 5 * math.sqrt(300 * 0.3 * 0.7)
    assert times == {client: system.turn(client, 4, 7, 60, 70, 30) for client in times}
    others = [system.turn(client, 5, 7, 60, 70, 30) for client in times]
    assert [t.available for t in others] != [t.available for t in times.values()]
    quick = System(availability=1.0, speed=10.0)
    assert quick.turn("a", 1, 0, 60, 10**9, 10**9) == Turn(True, 6.0)  # no limit of bandwidth


def test_unavailable_clients_are_left_out_and_a_resume_draws_alike(tmp_path: Path) -> None:
    def loop() -> FederationLoop:
        made = timed(5, FedDyn(rounds=5), availability=0.6, jitter=0.5, speed_spread=0.5)
        made.keep_last = 9
        return made

    whole = loop()
    whole.fit(tmp_path)
    for number, row in enumerate(whole.history[1:], 1):
        there = sum(
            numpy_generator(0, "system", number, client, "available").random() < 0.6 for client in whole.info.clients
        )
        assert (row["round/clients"], row["round/unavailable"]) == (there, 4 - there)
    assert {row["round/unavailable"] for row in whole.history[1:]} != {0.0}
    resumed = loop()
    resumed.fit(checkpoint=tmp_path / "checkpoints" / "round_00002")
    assert numbers(resumed) == numbers(whole)


def test_a_round_without_enough_clients_ends_the_run() -> None:
    loop = timed(deadline=0.5)
    with pytest.raises(TooFewReplies, match="round 1: 0 of 4 clients are there and in time"):
        loop.fit()


def test_passes_take_the_place_of_the_trainers_budget() -> None:
    assert timed(bandwidth=None, passes=5.0).fit()[1]["round/virtual_seconds"] == pytest.approx(5 * 40 / 10)
    by_steps = federation(
        FedAvg(rounds=1), SIZES, system=System(speed=10.0), trainer={"max_epochs": -1, "max_steps": 3}
    )
    assert by_steps.fit()[1]["round/virtual_seconds"] == pytest.approx(3 * 4 / 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [("availability", 0.0), ("speed", 0.0), ("bandwidth", -1.0), ("deadline", 0.0), ("passes", 0.0), ("jitter", -0.1)],
)
def test_wrong_values_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"federation\.system\.{name} is {value}"):
        System(**{name: value})
    with pytest.raises(ValueError, match=r"federation.uploads is 'x', and federation.system is given"):
        FederationLoop(uploads="x", system=System())


# ---- the wall's clock


@pytest.mark.parametrize("client_loop", ["lean", "trainer"])
def test_a_turn_that_takes_too_long_has_failed(client_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    loss = ClassificationTask.loss

    def slow(self: Any, batch: Any) -> Any:
        now[0] += 1.0
        return loss(self, batch)

    monkeypatch.setattr(ClassificationTask, "loss", slow)
    # Batches of 4, two epochs: 4, 6, 20 and 2 seconds.
    options = {
        "client_timeout": 4.5,
        "on_client_error": "skip",
        "trainer": {"max_epochs": 2},
        "client_loop": client_loop,
    }
    loop = federation(FedAvg(rounds=2), SIZES, **options)
    failures: list[Any] = []
    loop.guard.record = failures.append
    loop.fit()
    assert [row["round/clients"] for row in loop.history[1:]] == [2, 2]
    assert [(f.round, f.client) for f in failures] == [(1, "1"), (1, "2"), (2, "1"), (2, "2")]
    assert "TimeoutError" in failures[0].error
    assert "federation.client_timeout, 4.5 seconds" in failures[0].error
    assert loop.participant._limit is None  # the server's time is its own


def test_a_timeout_is_for_the_serial_engine() -> None:
    with pytest.raises(ValueError, match=r"federation.client_timeout is 1.0 and the engine 'vectorized'"):
        FederationLoop(engine="vectorized", client_timeout=1.0)
    with pytest.raises(ValueError, match=r"federation.client_timeout is 0.0"):
        FederationLoop(client_timeout=0.0)


def test_the_configuration_runs(tmp_path: Path) -> None:
    arguments = ["--trainer.default_root_dir", str(tmp_path), "--method.init_args.rounds", "2"]
    main(["fit", "--config", CONFIG, *arguments, "--federation.progress", "false"])
    (record,) = tmp_path.rglob("metrics.csv")
    assert "round/virtual_seconds" in record.read_text()
