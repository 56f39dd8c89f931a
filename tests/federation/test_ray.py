"""The Ray engine has the serial one's bits, whatever the number of workers, and outlives a worker.

Most tests run its workers in this process, behind a stand-in for Ray that copies whatever is handed over; the slow ones
start Ray.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federation.test_journal import REQUESTS, Killed, Watched, chain
from federation.test_loop import Peers
from federation.tiny import data, federation, normalised, numbers, same
from methods.test_flat_family import FAMILY

from fl_lightning import aggregation
from fl_lightning.aggregation import CoordinateMedian, MultiKrum
from fl_lightning.federation.attacks import GaussianNoise, OneNaN, SignFlip
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.engines import ray as engine
from fl_lightning.federation.incoming import BadReply, TooFewReplies
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.privacy import PrivateMean
from fl_lightning.federation.sampling import PoissonSampler, UniformSampler
from fl_lightning.federation.state import CheckpointFolder
from fl_lightning.message import Message
from fl_lightning.methods import FedAvg, LocalOnly
from fl_lightning.methods.averaging import AveragingClient
from fl_lightning.methods.base import Client, Steps

ray = pytest.importorskip("ray")
METHODS = {name: make for name, (make, *_) in FAMILY.items()} | {"local_only": LocalOnly, "peers": Peers}
QUICK = ("scaffold", "fedsmoo", "fednsam paper", "local_only", "peers")
SIZES = (7, 12, 6, 4, 10, 3, 8, 6, 7, 4, 7, 3, 6, 4, 4, 11, 2, 6, 3)  # 19 clients: blocks of 8, 8 and 3


class Reference:
    """A value that went into the object store, or was lost with its worker."""

    def __init__(self, value: Any, lost: type[Exception] | None = None) -> None:
        self.blob, self.lost = b"" if lost else ray.cloudpickle.dumps(value), lost


class Copying:
    """Ray's calls that the engine makes, in this process, with everything pickled on its way and finished in odd order."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.puts: list[Any] = []
        self.order: list[tuple[str, ...]] = []
        self.results: list[Any] = []
        self.die = self.lose = 0  # workers at work, results of theirs
        self.machines: list[dict[str, float]] = [{"CPU": 3.0}]

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": dict(machine)} for machine in self.machines]

    def put(self, value: Any) -> Any:
        self.puts.append(value)
        return Reference(value)

    def get(self, ref: Any) -> Any:
        if isinstance(ref, list):
            return [self.get(one) for one in ref]
        if ref.lost:
            raise ref.lost("", "", "") if ref.lost is ray.exceptions.ObjectLostError else ref.lost()
        return ray.cloudpickle.loads(ref.blob)

    def wait(self, refs: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return refs[-1:], refs[:-1]  # the last one handed out is the first to be done

    def kill(self, worker: Any) -> None:
        worker.killed = True

    def remote(self, **options: Any) -> Callable[[type], Any]:
        def make(kind: type) -> Any:
            def actor() -> Any:
                worker = engine.Worker()  # its process's part of ``kind`` is not for this one

                def use(settings: Reference) -> Reference:
                    return Reference(worker.use(self.get(settings)))

                def work(name: str, shared: Reference, item: Any) -> tuple[Any, Any]:
                    self.order.append(tuple(item.memories))
                    if self.die:
                        self.die -= 1
                        return Reference(None, ray.exceptions.RayActorError), None
                    status, result = worker.work(name, self.get(shared), self.get(Reference(item)))
                    self.results.append(result)
                    gone, self.lose = self.lose > 0, max(self.lose - 1, 0)
                    return Reference(status), Reference(result, ray.exceptions.ObjectLostError if gone else None)

                call = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=work))
                return SimpleNamespace(work=call, use=SimpleNamespace(remote=use))

            return SimpleNamespace(remote=actor)

        return make


def run(make: Callable[[], Any], workers: int, stand_in: Any = None, **options: Any) -> FederationLoop:
    """A loop that has run: serial without workers."""
    torch.manual_seed(1)
    more = {"engine": "ray", "num_workers": workers} if workers else {}
    loop = federation(make(), **{"sizes": SIZES, **more, **options})
    if workers:
        loop.engine.ray = stand_in or Copying()  # type: ignore[attr-defined]
    loop.fit()
    return loop


def alike(ours: FederationLoop, serial: FederationLoop) -> None:
    assert same(ours.method.state_dict(), serial.method.state_dict())
    assert same(ours.memory.state_dict(), serial.memory.state_dict())
    assert numbers(ours) == numbers(serial)


@pytest.mark.parametrize("name", QUICK)
def test_methods_have_the_serial_bits(name: str) -> None:
    options: dict[str, Any] = {"sampler": UniformSampler(size=18), "network": normalised}
    if name == "peers":
        options = {"sizes": [3 * size for size in SIZES]}
    make = partial(METHODS[name], rounds=3 if name == "peers" else 2)
    serial = run(make, 0, **options)
    for workers in (1, 2, 3) if name == "scaffold" else (1,):  # in blocks; one by one
        alike(run(make, workers, **options), serial)


def test_blocks_come_back_as_sums_and_the_broadcast_goes_out_once() -> None:
    stand_in = Copying()
    run(lambda: FedAvg(rounds=2), 1, stand_in)
    assert [len(clients) for clients in stand_in.order] == [8, 8, 3] * 2
    assert len(stand_in.puts) == 1 + 2  # what workers are made of, and a round's work twice
    assert all(not reply.message.tensors for done in stand_in.results for reply in done.replies)
    assert all(done.block["model"][0] for done in stand_in.results)


def test_few_sums_come_back_from_a_large_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "MAX_BLOCKS", 2)
    stand_in, kinds = Copying(), (("3", 1, "bad"), ("9", 1, "bad"), ("10", 1, "bad"))
    serial, _ = failing(kinds, 0, on_client_error="skip")
    loop, _ = failing(kinds, 1, stand_in=stand_in, on_client_error="skip")
    assert [len(clients) for clients in stand_in.order] == [10, 9] * 2
    alike(loop, serial)


def test_single_clients_go_longest_first_where_blocks_are_few() -> None:
    stand_in = Copying()
    run(lambda: FedAvg(rounds=1), 3, stand_in)
    lengths = [SIZES[int(client)] for (client,) in stand_in.order]
    assert lengths == sorted(SIZES, reverse=True)


class Watching(FederationCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_reply(self, loop: FederationLoop, reply: Any) -> None:
        assert reply.message.tensors["model"]
        self.seen.append(reply.message.sender)


def test_who_watches_replies_sees_them_whole_and_in_order() -> None:
    watching = Watching()
    run(lambda: FedAvg(rounds=1), 1, callbacks=[watching])
    assert watching.seen == [str(n) for n in range(len(SIZES))]


def test_a_dead_workers_clients_are_run_again_and_the_third_death_ends_it() -> None:
    stand_in = Copying()
    stand_in.die = 2
    ours = run(lambda: METHODS["scaffold"](rounds=2), 1, stand_in)
    alike(ours, run(lambda: METHODS["scaffold"](rounds=2), 0))
    assert ours.engine.deaths == 2  # type: ignore[attr-defined]
    stand_in = Copying()
    stand_in.die = 3
    with pytest.raises(RuntimeError, match=r"3 workers died over client .*, round 1"):
        run(lambda: FedAvg(rounds=1), 1, stand_in)


def test_a_lost_result_is_made_again() -> None:
    stand_in = Copying()
    stand_in.lose = 2
    alike(run(lambda: METHODS["scaffold"](rounds=2), 1, stand_in), run(lambda: METHODS["scaffold"](rounds=2), 0))
    assert len(stand_in.order) == 3 * 2 + 2


# ---- clients that fail


class Odd(Exception):
    """One that does not survive a journey."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


@dataclass(frozen=True)
class Troubled(AveragingClient):
    """Some clients fail: with every third round's turn, or after a client's first try in the run."""

    kinds: tuple[tuple[str, int, str], ...] = ()  # client, round, what happens
    marker: str = ""

    def update(self, client: Client, message: Message) -> Steps:
        kind = {(key, round): kind for key, round, kind in self.kinds}.get((client.key, message.round))
        if kind == "dies" and not Path(self.marker).exists():
            Path(self.marker).touch()
            os._exit(1)
        if kind == "first" and client.key not in TRIED:
            TRIED.append(client.key)
            raise OSError("the disk is gone")
        if kind == "odd":
            raise Odd("no such ", "thing")
        if kind == "value":
            raise ValueError("no such thing")
        reply = yield from super().update(client, message)
        if kind == "late":
            raise OSError("after the training")
        if kind == "bad":
            shifted = {name: value[None] for name, value in reply.message.tensors["model"].items()}
            reply = replace(reply, message=reply.message.plus({"model": shifted}))
        return reply


TRIED: list[str] = []


class Trouble(FedAvg):
    def __init__(self, rounds: int, *kinds: tuple[str, int, str], marker: str = "") -> None:
        super().__init__(rounds)
        self.troubles = Troubled(kinds=kinds, marker=marker)

    def client(self) -> Troubled:
        return self.troubles


SOME = (("1", 2, "value"), ("3", 2, "late"), ("5", 2, "bad"), ("6", 1, "first"), ("9", 2, "bad"))
BLOCK = tuple((str(key), 1, "bad") for key in range(8, 16))


def failing(kinds: Any, workers: int, **options: Any) -> tuple[FederationLoop, list[Any]]:
    """A loop that has run in spite of failures, and what was recorded of these."""
    TRIED.clear()
    seen: list[Any] = []

    class Told(FederationCallback):
        def on_failure(self, loop: FederationLoop, failure: Any) -> None:
            assert failure.traceback.rstrip().endswith(failure.error)
            seen.append(replace(failure, traceback=""))

    return run(lambda: Trouble(2, *kinds), workers, callbacks=[Told()], **options), seen


@pytest.mark.parametrize("policy", ["skip", "retry"])
@pytest.mark.parametrize("kinds", [SOME, BLOCK], ids=["some", "a whole block"])
def test_failures_are_those_of_the_serial_engine(kinds: Any, policy: str) -> None:
    serial, failures = failing(kinds, 0, on_client_error=policy)
    assert len(failures) == {"skip": 1, "retry": 2}[policy] * (len(kinds) - (kinds is SOME)) + (kinds is SOME)
    for workers in (1, 3):
        loop, seen = failing(kinds, workers, on_client_error=policy)
        alike(loop, serial)
        assert seen == failures


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("kind", "error"), [("value", ValueError), ("late", OSError), ("bad", BadReply)])
def test_the_cohorts_first_failure_ends_the_run_as_it_would_here(kind: str, error: Any, workers: int) -> None:
    """Client 15, whose data are many and whose turn comes early among single ones, fails too."""
    kinds = (("15", 2, "odd"), ("3", 2, kind))
    with pytest.raises(error) as serial:
        failing(kinds, 0)
    with pytest.raises(error) as caught:
        failing(kinds, workers)
    assert type(caught.value) is type(serial.value)
    assert str(caught.value) == str(serial.value)
    (note,) = caught.value.__notes__
    assert note.startswith("client 3, round 2, in a worker:\nTraceback")
    assert "in update\n" in note


def test_an_exception_that_cannot_travel_arrives_as_its_text() -> None:
    with pytest.raises(RuntimeError, match="Odd: no such thing") as caught:
        failing((("3", 2, "odd"),), 1)
    assert 'raise Odd("no such ", "thing")' in caught.value.__notes__[0]


@pytest.mark.parametrize("workers", [1, 3])
def test_one_failure_is_recorded_where_it_ends_the_run(workers: int) -> None:
    seen: list[Any] = []
    loop = federation(Trouble(2, ("3", 2, "value")), SIZES, engine="ray", num_workers=workers)
    loop.engine.ray = Copying()  # type: ignore[attr-defined]
    loop.guard.record = seen.append
    with pytest.raises(ValueError, match="no such thing"):
        loop.fit()
    assert [(failure.client, failure.round, failure.attempt) for failure in seen] == [("3", 2, 1)]
    assert loop.round == 1


def test_a_quorum_counts_who_failed_elsewhere() -> None:
    for workers in (1, 3):
        with pytest.raises(TooFewReplies, match=r"round 1: 11 of 19 clients .*min_clients is 12 \(client 8: BadReply"):
            failing(BLOCK, workers, on_client_error="skip", min_clients=12)


def test_the_size_of_replies_is_limited_where_they_are_made() -> None:
    for workers in (1, 3):
        with pytest.raises(BadReply, match=r"client 0 replied with .* federation.max_reply_bytes is 100"):
            run(lambda: FedAvg(rounds=1), workers, max_reply_bytes=100)


# ---- runs that are killed


def test_a_killed_round_goes_on_with_the_replies_that_had_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with what the server has done since. A client whose turn was not over starts over."""
    watched, serial = Watched(monkeypatch), chain(journal_seconds=None, count_flops=False)
    serial.fit(tmp_path / "serial")

    def fit(folder: Path, kill: int | None = None) -> tuple[FederationLoop, int]:
        loop, watched.asked, watched.last = chain(engine="ray", num_workers=2, count_flops=False), [], kill
        loop.engine.ray = Copying()  # type: ignore[attr-defined]
        kept = CheckpointFolder(folder / "checkpoints").list()
        with suppress(Killed):
            loop.fit(folder, kept[-1] if kept else None, {"config_hash": "a"})
        return loop, len(watched.asked)

    for kill, spared in ((1, 0), (5, 2), (6, 6), (8, 8)):  # the third client is waited for; the server's third request
        fit(tmp_path / str(kill), kill)
        loop, again = fit(tmp_path / str(kill))
        alike(loop, serial)
        assert again == REQUESTS - spared


def test_workers_that_add_replies_up_are_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(federation, sizes=SIZES, engine="ray", num_workers=1, journal_seconds=0.0)
    serial = run(lambda: FedAvg(rounds=2), 0)
    for die in (1, 0):
        loop, stand_in = make(FedAvg(rounds=2)), Copying()
        loop.engine.ray = stand_in  # type: ignore[attr-defined]
        if die:
            monkeypatch.setattr(loop.method, "server_update", lambda *a: [][0])
        kept = CheckpointFolder(tmp_path / "checkpoints").list()
        with suppress(IndexError):
            loop.fit(tmp_path, kept[-1] if kept else None)
        assert [len(clients) for clients in stand_in.order] == [8, 8, 3] * (1 if die else 2)
    assert same(loop.method.state_dict(), serial.method.state_dict())


# ---- what sees all replies, and what changes them


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"aggregator": MultiKrum(byzantine=3), "attack": OneNaN(clients=["2", "9"]), "on_client_error": "skip"},
        {"aggregator": CoordinateMedian(), "attack": GaussianNoise(share=0.2, std=1.0)},
        {"aggregator": PrivateMean(noise_multiplier=1.0), "sampler": PoissonSampler(0.9)},
        {"attack": SignFlip(share=0.3)},
    ],
    ids=["krum", "median", "private", "attack"],
)
def test_robust_and_private_rules_and_attacks(options: dict[str, Any], workers: int) -> None:
    fresh = partial(copy.deepcopy, options)
    make = METHODS["scaffold"] if "sampler" not in options else FedAvg
    alike(run(lambda: make(rounds=2), workers, **fresh()), run(lambda: make(rounds=2), 0, **fresh()))


def test_the_schema_travels_without_numbers() -> None:
    stand_in = Copying()
    run(lambda: METHODS["scaffold"](rounds=1), 1, stand_in)
    uplink = stand_in.puts[1].uplink
    assert uplink["model"].like.keys() == uplink["control"].like.keys() != set()
    for group in uplink.values():
        assert all(value.is_meta and value.dtype == torch.float64 for value in group.like.values())


def test_uploads_come_from_the_folder_and_later_rounds_from_workers(tmp_path: Path) -> None:
    federation(FedAvg(rounds=1), SIZES, save_uploads=True).fit(tmp_path)

    def after(workers: int) -> FederationLoop:
        torch.manual_seed(1)
        more = {"engine": "ray", "num_workers": workers} if workers else {}
        loop = federation(FedAvg(rounds=2), SIZES, uploads=str(tmp_path / "uploads"), **more)
        if workers:
            loop.engine.later.ray = Copying()  # type: ignore[attr-defined]
        loop.fit()
        assert not workers or loop.engine.later.ray.order  # type: ignore[attr-defined]
        return loop

    alike(after(1), after(0))


@dataclass(frozen=True)
class Telling(AveragingClient):
    """Sends a number along."""

    def update(self, client: Client, message: Message) -> Steps:
        reply = yield from super().update(client, message)
        sent = reply.message
        return replace(reply, message=Message(sent.round, sent.sender, sent.tensors, {"says": 2.0}, sent.num_examples))


class Weighing(FedAvg):
    """Weighs replies by what they say."""

    def client(self) -> Telling:
        return Telling()

    def numbers(self, round: int) -> tuple[str, ...]:
        return ("says",)

    def weight(self, message: Message) -> float:
        return 1 + message.scalars.get("says", 0.0)


def test_a_weight_that_examples_do_not_tell_is_refused() -> None:
    with pytest.raises(ValueError, match=r"was to weigh 1.0 by its examples, and its reply weighs 3.0"):
        run(lambda: Weighing(1), 1)
    alike(run(lambda: Weighing(1), 3), run(lambda: Weighing(1), 0))  # one by one, each is weighed when it is there


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_workers": 0}, "num_workers is 0; it must be at least 1"),
        ({"gpus_per_worker": 2}, r"gpus_per_worker is 2; it must be in \[0, 1\], or federation.devices_per_worker"),
        ({"devices_per_worker": 0}, "devices_per_worker is 0; it must be at least 1"),
        ({"gpus_per_worker": 1, "devices_per_worker": 2}, "for 2 devices a worker it must be 2, or 0 for CPUs"),
        ({"gpus_per_worker": 0.5}, "gpus_per_worker is 0.5, and trainer.accelerator trains on cpu"),
        ({"trainer": {"devices": 2, "strategy": "ddp"}}, "devices make 2 processes of the server; .* it has one"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        federation(FedAvg(rounds=1), engine="ray", **options)


def test_a_cluster_that_is_too_small_is_named() -> None:
    text = r"num_workers is 2, and Ray's machines have room for 1: .* 2 CPUs and 0 GPUs"
    with pytest.raises(ValueError, match=text):
        run(lambda: FedAvg(rounds=1), 2, Copying(), devices_per_worker=2)


@pytest.mark.parametrize(
    ("workers", "devices", "gpus", "machines", "room"),
    [
        (2, 2, 0, [{"CPU": 3.0}, {"CPU": 1.0}], 1),  # the four CPUs are on two machines
        (2, 2, 2, [{"CPU": 8.0, "GPU": 3.0}, {"CPU": 8.0, "GPU": 1.0}], 1),
        (3, 1, 0.6, [{"CPU": 8.0, "GPU": 2.0}], 2),  # 1.8 of two GPUs, but no GPU has room for two
        (4, 1, 1 / 3, [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 1.0}], 3),
    ],
)
def test_what_lies_on_several_machines_or_gpus_does_not_add_up(
    workers: int, devices: int, gpus: float, machines: list[dict[str, float]], room: int
) -> None:
    loop = federation(FedAvg(rounds=1), engine="ray", num_workers=workers, devices_per_worker=devices)
    loop.engine.ray, loop.engine.gpus_per_worker = Copying(), gpus  # type: ignore[attr-defined]
    loop.engine.ray.machines = machines  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"num_workers is {workers}, and Ray's machines have room for {room}:"):
        loop.engine._start()  # type: ignore[attr-defined]
    assert sum(map(loop.engine._room, machines)) == room  # type: ignore[attr-defined]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'fl_lightning\[ray\]'"):
        federation(FedAvg(rounds=1), engine="ray")


@pytest.mark.parametrize(
    "value",
    [torch.arange(6.0).view(2, 3).t(), torch.ones(2, dtype=torch.bfloat16), torch.tensor(3), torch.empty(0, 4),
     torch.tensor([True, False])],
    ids=["strided", "bf16", "scalar", "empty", "bool"],
)  # fmt: skip
def test_tensors_travel_as_arrays(value: torch.Tensor) -> None:
    back = engine._from_array(engine._to_array(value))
    assert same(back, value)
    back.zero_()  # it is its own


def test_data_travel_as_their_arguments() -> None:
    module = data((3, 4))
    before = module.train("1").fetch(torch.arange(4))
    there = ray.cloudpickle.loads(ray.cloudpickle.dumps(module))
    assert "_train" not in vars(there)
    assert torch.equal(there.train("1").fetch(torch.arange(4)), before)


# ---- Ray itself


@pytest.mark.slow
def test_two_devices_fit_a_client_together(tmp_path: Path) -> None:
    """In processes of a worker of a Ray of its own; one of them dies in round 2, and both are replaced."""
    (tmp_path / "calm").touch()
    make = partial(Trouble, 3, ("3", 2, "dies"))
    serial = run(lambda: make(marker=str(tmp_path / "calm")), 0)
    loop = run(lambda: make(marker=str(tmp_path / "died")), 1, ray, devices_per_worker=2)
    for name, value in loop.method.state_dict()["parameters"].items():
        torch.testing.assert_close(value, serial.method.state_dict()["parameters"][name], rtol=0, atol=1e-9)
    assert loop.engine.deaths == 1  # type: ignore[attr-defined]
    assert [row["client/loss"] for row in loop.history[1:]] == pytest.approx(
        [row["client/loss"] for row in serial.history[1:]], abs=1e-6
    )


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Any]]:
    """Three workers of a Ray that this module starts once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        loop = federation(FedAvg(rounds=1), engine="ray", num_workers=3)
        loop.engine._start()  # type: ignore[attr-defined]
        yield list(loop.engine.workers)  # type: ignore[attr-defined]
        loop.engine.close()
        assert not ray.is_initialized()


@pytest.fixture
def free(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Workers that a run takes in place of new ones."""
    taken = list(workers)
    monkeypatch.setattr(engine.RayEngine, "_worker", lambda self: taken.pop())
    monkeypatch.setattr(engine.RayEngine, "close", lambda self: None)
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_serial_bits(name: str, free: list[Any], workers: list[Any]) -> None:
    options: dict[str, Any] = {"sampler": UniformSampler(size=18), "network": normalised}
    if name == "peers":
        options = {"sizes": [3 * size for size in SIZES]}
    make = partial(METHODS[name], rounds=3 if name == "peers" else 2)
    serial = run(make, 0, **options)
    for count in (1, 2, 3):
        free[:] = workers
        alike(run(make, count, ray, **options), serial)
        assert len(free) == 3 - count


@pytest.mark.slow
def test_failures_in_other_processes_are_those_of_the_serial_engine(free: list[Any]) -> None:
    serial, failures = failing(SOME, 0, on_client_error="retry")
    loop, seen = failing(SOME, 3, stand_in=ray, on_client_error="retry")
    alike(loop, serial)
    assert seen == failures


@pytest.mark.slow
def test_an_error_arrives_with_its_place(free: list[Any]) -> None:
    with pytest.raises(ValueError, match="no such thing") as caught:
        run(lambda: Trouble(2, ("3", 2, "value")), 1, ray)
    assert "test_ray.py" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(free: list[Any], tmp_path: Path) -> None:
    """The last test: the process is gone."""
    (tmp_path / "calm").touch()
    serial = run(lambda: Trouble(3, ("3", 2, "dies"), marker=str(tmp_path / "calm")), 0)
    loop = run(lambda: Trouble(3, ("3", 2, "dies"), marker=str(tmp_path / "died")), 2, ray)
    alike(loop, serial)
    assert (tmp_path / "died").exists()
    assert loop.engine.deaths == 1  # type: ignore[attr-defined]
    assert not free
