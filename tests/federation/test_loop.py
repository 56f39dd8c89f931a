"""The loop: rounds in order, a record without gaps, a resumed run that nobody could tell from an uninterrupted one."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from federation.tiny import federation, normalised, numbers, same, sgd

from fl_lightning.aggregation import Keep
from fl_lightning.data.examples import DataInfo
from fl_lightning.federation.callbacks import EarlyStop, FederationCallback
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.privacy import PrivateMean
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.sampling import PoissonSampler, UniformSampler
from fl_lightning.federation.state import CheckpointFolder, MemoryStore, read_checkpoint
from fl_lightning.federation.system import System
from fl_lightning.message import Group, Message
from fl_lightning.methods import SCAFFOLD, FedAvg, LocalOnly
from fl_lightning.methods.base import (
    SERVER,
    Client,
    ClientProgram,
    Fit,
    Method,
    Predict,
    Reduced,
    Server,
    Steps,
)
from fl_lightning.tasks import FederatedTask

# ---- a method that uses every corner of the interface: peer to peer, personal, with memory and server-only rounds


@dataclass(frozen=True)
class PeerClient(ClientProgram):
    """Round 1: train an expert and send it. Round 2: average it with the others' by what they agree on locally."""

    def update(self, client: Client, message: Message) -> Steps:
        if message.round == 1:
            result = yield Fit("model", client.train, message.tensors["start"])
            return client.reply({"expert": result.params}, memory={"expert": result.params, "again": result.params})
        own = client.memory["expert"]
        assert f"expert/{client.key}" not in message.tensors  # a client is sent the others' experts only
        experts = [own, *(message.tensors[group] for group in sorted(message.tensors))]
        scores = []
        for number, expert in enumerate(experts):
            embedded = yield Predict("model", client.train, expert, key=("score", number))
            assert embedded.outputs is not None
            scores.append(float((embedded.outputs.argmax(1) == client.train.labels).double().mean()))
        mixed = {n: sum(s * e[n] for s, e in zip(scores, experts, strict=True)) / sum(scores) for n in own}
        result = yield Fit("model", client.train, mixed, overrides={"max_epochs": 1}, key=("mixed",))
        return client.reply({"expert": result.params}, scalars={"best": max(scores)}, memory={"expert": result.params})

    def evaluate(self, client: Client, message: Message) -> Steps | None:
        return self._own(client) if "expert" in client.memory else None

    def _own(self, client: Client) -> Steps:
        own = yield Predict("model", client.test, client.memory["expert"])
        return {"own": own.outputs}


class Peers(Method):
    """Rounds 1 and 2 at the clients, then server-only rounds that average what was kept."""

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        self.start, self.experts, self.calls = dict(model.state()), {}, 0
        self.model = dict(self.start)

    def client(self) -> ClientProgram:
        return PeerClient()

    def cohort(self, round: int, sampled: tuple[str, ...]) -> tuple[str, ...]:
        return sampled if round <= 2 else ()

    def broadcast(self, round: int) -> Message:
        return Message(
            round, SERVER, {"start": self.start, **{f"expert/{key}": value for key, value in self.experts.items()}}
        )

    def addressed(self, round: int, client: str) -> tuple[str, ...] | None:
        if round == 1:
            return ("start",)
        return tuple(f"expert/{key}" for key in self.experts if key != client)

    def uplink(self, round: int) -> dict[str, Group]:
        return {"expert": Group("artifact", Keep())}

    def numbers(self, round: int) -> tuple[str, ...]:
        return ("best",) if round == 2 else ()

    def server_update(self, round: int, total: Reduced, server: Server) -> Mapping[str, float]:
        if total.clients:
            self.experts = total.groups["expert"]
        else:
            assert total.groups == {}
            self.model = {n: sum(e[n] for e in self.experts.values()) / len(self.experts) for n in self.model}
            self.calls += 1
        return {"server/calls": float(self.calls)}

    def evaluations(self) -> dict[str, Predict]:
        return {"": Predict("model", None, self.model)}

    def state_dict(self) -> dict[str, Any]:
        return {"experts": self.experts, "model": self.model, "calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.experts, self.model, self.calls = dict(state["experts"]), dict(state["model"]), state["calls"]


METHODS: dict[str, tuple[Callable[[], Method], dict[str, Any]]] = {
    "fedadam": (lambda: FedAvg(5, server_optimizer=lambda p: torch.optim.Adam(p, lr=0.05)), {}),
    "local buffers": (
        lambda: FedAvg(5, buffers="local"),
        {"network": normalised, "batch_size": 3, "sizes": (6, 12, 6)},
    ),
    "local only": (lambda: LocalOnly(5), {"sampler": UniformSampler(size=2)}),
    "peers": (lambda: Peers(4), {}),
}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are the report's business, and half of a small run's time."""
    monkeypatch.setattr(Recorder, "figure", lambda self, name, figure, step: None)
    for function in ("fl_lightning.federation.recorder.plot_counts", "fl_lightning.report.figures.confusion_figure"):
        monkeypatch.setattr(function, lambda *arguments: None)


def run(name: str, folder: Path, checkpoint: Path | None = None, stop: int | None = None, **options: Any) -> Any:
    make, own = METHODS[name]
    loop = federation(make(), **{**own, "keep_last": 9, **options})
    folder.mkdir(exist_ok=True)
    loop.callbacks = [Recorder(folder), *loop.callbacks]
    if stop is not None:
        loop.callbacks.append(Interrupt(stop))
        with pytest.raises(KeyboardInterrupt):
            loop.fit(folder, checkpoint)
    else:
        loop.fit(folder, checkpoint)
    return loop


class Interrupt(FederationCallback):
    """Ctrl-C in the middle of the clients' work in a round, or, in round 3, when the server has just updated its state."""

    def __init__(self, round: int) -> None:
        self.round, self.saved = round, ""

    def on_stage(self, loop: Any, stage: str, done: int, total: int) -> None:
        if self.round == 3:
            if stage == "evaluate" and loop.round == 3:
                raise KeyboardInterrupt
        elif loop.round + 1 == self.round and stage != "evaluate" and (done == 1 or total == 0):
            raise KeyboardInterrupt

    def on_interrupt(self, loop: Any, saved: str | None) -> None:
        self.saved = saved


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [{n: v for n, v in row.items() if not n.startswith("time/")} for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_is_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    whole = run(name, tmp_path / "whole")
    rows = table(tmp_path / "whole")
    rounds = whole.method.rounds
    assert [int(row["round"]) for row in rows] == list(range(rounds + 1))
    for stop in (1, 3, rounds):
        folder = tmp_path / f"stop{stop}"
        broken = run(name, folder, stop=stop, checkpoint_every=9 if stop == 3 else 1)
        assert Path(broken.callbacks[-1].saved).name == f"round_{stop - 1:05d}"
        resumed = run(name, folder, Path(broken.callbacks[-1].saved))
        assert same(resumed.method.state_dict(), whole.method.state_dict())
        assert same(resumed.memory.state_dict(), whole.memory.state_dict())
        assert numbers(resumed) == numbers(whole)
        assert table(folder) == rows


def test_a_killed_run_goes_on_from_the_last_checkpoint_and_rows_after_it_are_written_once(tmp_path: Path) -> None:
    whole = run("fedadam", tmp_path / "whole")
    run("fedadam", tmp_path / "killed", checkpoint_every=2)
    checkpoint = tmp_path / "killed" / "checkpoints" / "round_00002"
    assert not checkpoint.with_name("round_00003").exists()
    resumed = run("fedadam", tmp_path / "killed", checkpoint)
    assert table(tmp_path / "killed") == table(tmp_path / "whole")
    assert numbers(resumed) == numbers(whole)
    (tmp_path / "killed" / "metrics.csv").unlink()  # killed after the last checkpoint, before its row
    run("fedadam", tmp_path / "killed", checkpoint.with_name("round_00005"))
    assert table(tmp_path / "killed") == table(tmp_path / "whole")


def test_peers_and_server_only_rounds(tmp_path: Path) -> None:
    loop = run("peers", tmp_path)
    rows = loop.history
    assert [row["round/clients"] for row in rows[1:]] == [3, 3, 0, 0]
    assert [row["server/calls"] for row in rows[1:]] == [0, 0, 1, 2]
    assert rows[3]["comm/bytes_up"] == rows[3]["comm/bytes_down"] == 0
    start, experts = loop.method.start, loop.method.experts
    one = Message(2, SERVER, {"expert/0": experts["0"], "expert/1": experts["1"]})
    assert rows[1]["comm/bytes_down"] == 3 * Message(1, SERVER, {"start": start}).nbytes
    assert rows[2]["comm/bytes_down"] == 3 * one.nbytes
    assert "personal_mean/acc" not in rows[0]
    assert "personal_mean/acc" in rows[1]


def test_checkpoints_hold_no_pickle_and_only_the_last_are_kept(tmp_path: Path) -> None:
    run("fedadam", tmp_path, keep_last=2)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["round_00004", "round_00005"]
    for path in (tmp_path / "checkpoints").rglob("*"):
        if path.is_file():
            assert path.suffix in (".json", ".safetensors")
            assert path.read_bytes()[:2] not in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05")
    state, info = read_checkpoint(tmp_path / "checkpoints" / "round_00005")
    assert info["round"] == 5
    assert same(state["method"]["optimizer"]["param_groups"][0]["betas"], (0.9, 0.999))  # tuples stay tuples


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "info.json", "manifest.json"])
def test_damage_is_noticed_and_named(file: str, tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(3, {"w": torch.ones(4)}, {})
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 1
    (path / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path}.* is damaged"):
        read_checkpoint(path)
    (path / file).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=str(path)):
        read_checkpoint(path)


def test_state_that_shares_tensors_or_cannot_be_kept(tmp_path: Path) -> None:
    shared = torch.ones(3)
    state = {"a": shared, "b": [shared, (shared.view(3, 1), None, True, 1.5, "x")], 3: {"empty": torch.empty(0)}}
    path = CheckpointFolder(tmp_path).save(1, state, {})
    assert same(read_checkpoint(path)[0], state)
    with pytest.raises(TypeError, match="state at '/a' is a set"):
        CheckpointFolder(tmp_path).save(2, {"a": set()}, {})
    with pytest.raises(ValueError, match="keep_last is 0"):
        CheckpointFolder(tmp_path, 0)


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    (tmp_path / ".writing_00002").mkdir(parents=True)
    (tmp_path / ".writing_00002" / "junk").touch()
    folder.save(2, {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["round_00002"]


def test_memory_is_read_only_and_replaced_as_a_whole() -> None:
    store = MemoryStore()
    assert store.get("0") == {}
    store.commit("0", {"a": {"w": torch.ones(1)}})
    held = store.get("0")
    with pytest.raises(TypeError):
        held["a"]["w"] = torch.zeros(1)  # type: ignore[index]
    store.commit("0", {"b": {}})
    assert list(store.get("0")) == ["b"]
    assert list(held) == ["a"]


# ---- when something is evaluated, stopped, refused


def test_evaluate_every() -> None:
    loop = federation(FedAvg(5), evaluate_every=2)
    loop.fit()
    assert [int(row["round"]) for row in loop.history if "global/acc" in row] == [0, 2, 4, 5]
    every = federation(FedAvg(5))
    every.fit()
    for row, full in zip(numbers(loop), numbers(every), strict=True):
        assert row.items() <= full.items()


@pytest.mark.parametrize("every", [1, 2])
def test_early_stop_waits_for_evaluated_rounds(every: int, tmp_path: Path) -> None:
    # With a learning rate of zero nothing ever improves.
    def make() -> Any:
        return federation(
            FedAvg(20, server_optimizer=sgd(0.0)),
            evaluate_every=every,
            callbacks=[EarlyStop("global/acc", patience=3)],
        )

    loop = make()
    loop.fit(tmp_path)
    assert loop.round == 3 * every
    resumed = make()
    resumed.fit(tmp_path, tmp_path / "checkpoints" / f"round_{3 * every:05d}")
    assert resumed.round == 3 * every  # a run that has stopped stays stopped


class Scores(FederationCallback):
    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_round_end(self, loop: Any, row: Any) -> None:
        row["score"] = self.values[loop.round]


@pytest.mark.parametrize(
    ("options", "rounds"),
    [({"patience": 2}, 6), ({"patience": 2, "min_delta": 0.2}, 3), ({"patience": 2, "mode": "min"}, 2)],
)
def test_early_stop_by_hand(options: dict[str, Any], rounds: int) -> None:
    values = [0.1, 0.4, 0.3, 0.5, 0.5, 0.45, 0.4, 0.9]
    loop = federation(FedAvg(7), callbacks=[Scores(values), EarlyStop("score", **options)])
    loop.fit()
    assert loop.round == (rounds if options != {"patience": 2} else 5)


def test_names_that_no_run_records_are_refused_before_training() -> None:
    for options in ({"callbacks": [EarlyStop("globl/acc")]}, {"monitor": "globl/acc"}):
        loop = federation(FedAvg(3), **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"'globl/acc'.*global/acc"):
            loop.fit()
        assert loop.round == 0


def test_monitor_puts_the_best_round_into_the_summary() -> None:
    loop = federation(FedAvg(4), monitor="global/acc")
    loop.fit()
    best = loop.summary()["best"]
    assert best["metrics"]["global/acc"] == max(row["global/acc"] for row in loop.history)
    assert loop.history[best["round"]]["global/acc"] == best["metrics"]["global/acc"]


@pytest.mark.parametrize(
    "options", [{"evaluate_every": 0}, {"checkpoint_every": 0}, {"keep_last": 0}, {"num_threads": 0}, {"engine": "x"}]
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"federation.{next(iter(options))} is"):
        federation(FedAvg(1), **options)


def test_a_dry_run_is_two_rounds_of_two_clients() -> None:
    loop = federation(FedAvg(9), trainer={"fast_dev_run": True})
    loop.fit()
    assert [row["round/clients"] for row in loop.history[1:]] == [2, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": PoissonSampler(1e-9), "aggregator": PrivateMean(noise_multiplier=1.0, delta=0.01)},  # draws nobody
        {"min_clients": 3},
        {"system": System(availability=1e-9)},
    ],
)
def test_a_dry_run_asks_two_clients_where_a_round_would_have_others(options: dict[str, Any]) -> None:
    loop = federation(FedAvg(9), trainer={"fast_dev_run": True}, **options)
    loop.fit()
    assert [row["round/clients"] for row in loop.history[1:]] == [2, 2]


# ---- what a round counts


def test_the_order_in_which_a_method_names_its_cohort_does_not_matter() -> None:
    class Reversed(FedAvg):
        def cohort(self, round: int, sampled: tuple[str, ...]) -> tuple[str, ...]:
            return sampled[::-1]

    loops = [federation(kind(3), (5, 6, 4, 7)) for kind in (FedAvg, Reversed)]
    for loop in loops:
        loop.fit()
    assert same(loops[0].method.state_dict(), loops[1].method.state_dict())
    assert numbers(loops[0]) == numbers(loops[1])


def test_methods_meet_the_same_cohorts_and_the_record_counts_their_bytes() -> None:
    seen: dict[str, list[str]] = {}

    class Names(FederationCallback):
        def on_stage(self, loop: Any, stage: str, done: int, total: int) -> None:
            if stage.startswith("client"):
                seen[type(loop.method).__name__].append(stage)

    for method in (FedAvg(4), LocalOnly(4)):
        seen[type(method).__name__] = []
        loop = federation(method, (4, 4, 4, 4, 4), sampler=UniformSampler(size=2), callbacks=[Names()])
        loop.fit()
        if isinstance(method, FedAvg):
            assert loop.history[1]["comm/bytes_down"] == 2 * method.broadcast(1).nbytes
            reply = Message(1, "0", {"model": method.parameters, "buffers": {}}).nbytes
            assert loop.history[1]["comm/bytes_up"] == 2 * reply
    assert seen["FedAvg"] == seen["LocalOnly"]
    assert len(seen["FedAvg"]) == 8


class Wrong(FedAvg):
    """Expects a group that no client sends."""

    def uplink(self, round: int) -> dict[str, Group]:
        return {**super().uplink(round), "control": Group("update")}


def test_a_reply_without_an_expected_group_is_refused_and_leaves_no_memory() -> None:
    loop = federation(Wrong(2, buffers="local"), network=normalised, batch_size=3, sizes=(6, 12, 6))
    with pytest.raises(ValueError, match=r"client 0's reply misses groups control"):
        loop.fit()
    assert loop.memory.state_dict() == {}


def test_the_record_on_disk(tmp_path: Path) -> None:
    loop = run("fedadam", tmp_path, checkpoint_every=5)
    rows = table(tmp_path)
    for row, expected in zip(rows, numbers(loop), strict=True):
        assert {n: float(v) for n, v in row.items() if v} == expected  # repr() names a float exactly
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["metrics"]["global/acc"] == loop.history[-1]["global/acc"]
    assert summary["bytes"]["up"] == sum(row.get("comm/bytes_up", 0) for row in loop.history)
    assert (summary["rounds"], summary["seed"]) == (5, 0)
    assert (tmp_path / "partition.json").exists()


def test_seeds_decide_everything() -> None:
    loops = [federation(FedAvg(2), seed=seed) for seed in (1, 1, 2)]
    for loop in loops:
        loop.fit()
    assert numbers(loops[0]) == numbers(loops[1]) != numbers(loops[2])


def test_a_memory_that_is_part_of_a_stack_lets_go_of_the_rest() -> None:
    store, stack = MemoryStore(), torch.arange(12.0).view(3, 4)
    store.commit("0", {"control": {"w": stack[1], "own": stack}})
    kept = store.get("0")["control"]
    assert torch.equal(kept["w"], stack[1])
    assert kept["w"].untyped_storage().nbytes() == 16
    assert kept["own"].data_ptr() == stack.data_ptr()  # a whole one is not copied


# ---- memories in files


def memory_of(number: int) -> dict[str, dict[str, torch.Tensor]]:
    """Two KiB, with a tensor under two names and an empty group."""
    draw = torch.Generator().manual_seed(number)
    one = torch.randn(128, generator=draw, dtype=torch.float64)
    half = torch.randn(8, 64, generator=draw).bfloat16()
    return {"b": {"one": one, "same": one}, "a": {"half": half.t(), "n": torch.tensor(number)}, "none": {}}


@pytest.mark.parametrize("budget", [None, 0, 10 / 2**10])
def test_memories_are_equal_wherever_they_lie(budget: float | None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = MemoryStore(budget)
    for number in range(12):
        store.commit(str(number), memory_of(number))
    spilled = {None: 0, 0: 12, 10 / 2**10: 9}[budget]
    files = list(tmp_path.glob("*/*.safetensors"))
    assert len(files) == spilled  # each takes 3080 bytes
    before = store.state_dict()
    store.commit("5", memory_of(50))
    store.commit("6", {})
    assert store.get("nobody") == {}
    expected = {str(n): memory_of(n) for n in range(12)}
    assert list(before) == list(expected)
    assert same(before, expected)  # files are read late, and stay for whoever may read them
    expected |= {"5": memory_of(50), "6": {}}
    for key in ("11", "0", "5", "6", "0"):
        assert same(store.get(key), expected[key])
        assert list(store.get(key)) == list(expected[key])
    assert same(store.state_dict(), expected)
    assert list(store.state_dict()) == list(expected)
    other = MemoryStore(budget)
    other.load_state_dict(store.state_dict())
    assert same(other.state_dict(), expected)
    del store, other, before
    assert list(tmp_path.iterdir()) == []


def test_the_least_recently_used_go_first_and_an_unchanged_file_is_not_written_again(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def files() -> set[str]:
        return {path.name for path in tmp_path.glob("*/*.safetensors")}

    store = MemoryStore(7 / 2**10)  # two and a bit
    for key in ("a", "b"):
        store.commit(key, memory_of(1))
    store.get("a")
    assert files() == set()
    store.commit("c", memory_of(2))
    assert (files(), list(store._here)) == ({"0.safetensors"}, ["a", "c"])
    store.get("b")
    assert (files(), list(store._here)) == ({"0.safetensors", "1.safetensors"}, ["c", "b"])
    store.get("a")
    store.get("c")
    assert (files(), list(store._here)) == ({f"{n}.safetensors" for n in range(3)}, ["a", "c"])
    store.commit("b", memory_of(3))  # its file is out of date
    assert (files(), list(store._here)) == ({"1.safetensors", "2.safetensors"}, ["c", "b"])


def test_a_run_with_memories_in_files_is_the_run_and_resumes(tmp_path: Path) -> None:
    def run(budget: float | None, rounds: int, folder: str, checkpoint: Path | None = None) -> FederationLoop:
        loop = federation(SCAFFOLD(rounds=rounds), sampler=UniformSampler(size=2), memory_budget=budget)
        loop.fit(tmp_path / folder, checkpoint)
        return loop

    whole, spilled = run(None, 4, "whole"), run(0, 4, "spilled")
    assert numbers(whole) == numbers(spilled)
    assert same(whole.memory.state_dict(), spilled.memory.state_dict())
    states = [read_checkpoint(tmp_path / f / "checkpoints" / "round_00004")[0] for f in ("whole", "spilled")]
    assert same(states[0]["memory"], states[1]["memory"])
    again = run(0, 4, "spilled", tmp_path / "spilled" / "checkpoints" / "round_00003")
    assert same(again.memory.state_dict(), whole.memory.state_dict())
    with pytest.raises(ValueError, match="memory_budget is -1; it must be at least 0, or null"):
        federation(SCAFFOLD(rounds=1), memory_budget=-1)
