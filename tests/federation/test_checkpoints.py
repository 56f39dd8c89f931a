"""Checkpoints that are damaged, and disks that are full: nothing is lost, nothing wrong is read."""

from __future__ import annotations

import errno
import importlib.util
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation.tiny import federation, same

from fl_lightning.__main__ import main
from fl_lightning.cli import newest
from fl_lightning.federation import state as state_module
from fl_lightning.federation.incoming import Guard
from fl_lightning.federation.state import CheckpointError, CheckpointFolder, MemoryStore, read_checkpoint, read_info
from fl_lightning.methods import FedAvg

ROOT = Path(__file__).parents[2]
STATE = {"w": torch.arange(4.0), "history": [{"round": 1.0}]}


def fuzzer() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "benchmarks" / "fuzz.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_changed_byte_is_accepted(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(3, STATE, {"config_hash": "x"})
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), 2 if file.name == "manifest.json" else 31):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(ValueError, match="is damaged"):
                read_checkpoint(path)
        for other in (content[:-1], content + b" ", b"", content[: len(content) // 2]):
            file.write_bytes(other)
            with pytest.raises(ValueError, match="is damaged"):
                read_checkpoint(path)
        file.write_bytes(content)
    assert same(read_checkpoint(path)[0], STATE)
    assert read_info(path)["round"] == 3


def test_a_manifest_of_another_round_or_with_less_in_it_is_refused(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(3, STATE, {})
    written = (path / "manifest.json").read_text()
    for old, new in (('"round": 3', '"round": 4'), ('"round": 3', '"round": 3.0'), ("{\n  ", "{\n   ")):
        assert old in written
        (path / "manifest.json").write_text(written.replace(old, new, 1))
        with pytest.raises(ValueError, match="is damaged"):
            read_checkpoint(path)


def test_random_damage_is_refused_and_hostile_bytes_crash_nothing() -> None:
    """`python benchmarks/fuzz.py` in small."""
    module = fuzzer()
    result = module.fuzz(150)
    assert result["inputs"] == 600
    assert (result["crashes"], result["hangs"], result["accepted_corruptions"], result["bad"]) == (0, 0, 0, [])
    assert result["targets"]["wire corrupted"] == {"refused": 150}
    assert module.mutate(b"abc", random.Random(0)) != b"abc"


def test_the_fuzzer_sees_what_it_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fuzzer()

    def careless(blob: bytes) -> None:
        if len(blob) % 5 == 0:
            raise RuntimeError("a crash")

    monkeypatch.setattr(module.Message, "from_bytes", staticmethod(careless))
    result = module.fuzz(40)
    assert result["accepted_corruptions"] > 10
    assert result["crashes"] > 0


# ---- which ones there are


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_came_after_a_round_that_is_written_again_goes(tmp_path: Path) -> None:
    for round in range(1, 6):
        CheckpointFolder(tmp_path, keep_last=9).save(round, STATE, {})
    folder = CheckpointFolder(tmp_path, keep_last=2)
    folder.save(3, STATE, {"config_hash": "new"})  # going on from round 2
    assert names(tmp_path) == ["round_00002", "round_00003"]
    assert read_info(folder.list()[-1])["config_hash"] == "new"
    folder.save(100_000, STATE, {})
    assert [path.name for path in folder.list()] == ["round_00003", "round_100000"]


def test_later_checkpoints_stay_until_the_new_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, STATE, {})
    folder.save(2, STATE, {})
    full(monkeypatch, 1)
    with pytest.raises(CheckpointError):
        folder.save(1, STATE, {})
    assert names(tmp_path) == ["round_00001", "round_00002"]


@pytest.mark.parametrize("next_round", [1, 2])
def test_a_kill_between_the_renames_leaves_the_round_as_it_was(
    next_round: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation(FedAvg(rounds=1)).fit(tmp_path)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep_last=1)
    before, rename = read_checkpoint(folder.list()[0])[0], Path.rename

    def killed(path: Path, target: Path) -> None:
        if path.name.startswith(".writing"):
            raise KeyboardInterrupt
        rename(path, target)

    with monkeypatch.context() as context:
        context.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.save(1, STATE, {})
    (left,) = folder.list()
    assert same(read_checkpoint(left)[0], before)
    assert newest(tmp_path) == left
    # From there a run goes on, and the next checkpoint leaves nothing else.
    loop = federation(FedAvg(rounds=next_round), keep_last=1)
    loop.fit(tmp_path, left)
    assert loop.round == next_round
    assert [name for name in names(folder.folder) if "writing" not in name] == [f"round_{next_round:05d}"]
    assert len(read_checkpoint(folder.list()[0])[0]["history"]) == next_round + 1


def test_a_write_that_fails_between_the_renames_is_told_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = CheckpointFolder(tmp_path), Path.rename
    folder.save(1, STATE, {})

    def broken(path: Path, target: Path) -> None:
        if path.name.startswith(".writing"):
            raise OSError(errno.EIO, "broken")
        rename(path, target)

    with monkeypatch.context() as context:
        context.setattr(Path, "rename", broken)
        for _ in range(2):  # what is set aside outlives the second try too
            with pytest.raises(CheckpointError, match=rf"last good one is {tmp_path}/.replaced_00001"):
                folder.save(1, {}, {})
    assert same(read_checkpoint(folder.list()[0])[0], STATE)


# ---- states larger than the memory


def test_memories_are_written_and_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "SHARD", 10_000)
    store, rows = MemoryStore(budget=0), torch.arange(20 * 1000.0).view(20, 1000)
    for client in range(20):
        store.commit(f"c{client}", {"own": {"w": rows[client], "n": torch.tensor(client)}})
    held, write = [], state_module._Shards.write

    def watched(shards: Any) -> None:
        held.append(sum(value.nbytes for value in shards.values()))
        write(shards)

    monkeypatch.setattr(state_module._Shards, "write", watched)
    whole = {"method": STATE, "memory": store.state_dict(), "round": 1}
    path = CheckpointFolder(tmp_path).save(1, whole, {})
    assert max(held) <= 10_000 + 4_008  # one client more than fits
    assert len(held) == 7  # 20 clients, three a file
    names = [f"tensors_{number:05d}.safetensors" for number in range(1, 7)]
    assert sorted(p.name for p in path.glob("*.safetensors")) == sorted(["tensors.safetensors", *names])
    read, _ = read_checkpoint(path)
    looked, get = [], state_module._Tensors.__getitem__

    def look(tensors: Any, name: str) -> torch.Tensor:
        looked.append(name)
        return get(tensors, name)

    monkeypatch.setattr(state_module._Tensors, "__getitem__", look)
    assert torch.equal(read["memory"]["c7"]["own"]["w"], rows[7])
    assert looked == ["/memory/c7/own/w", "/memory/c7/own/n"]
    other = MemoryStore(budget=0)
    other.load_state_dict(read["memory"])
    assert same(other.state_dict(), store.state_dict())
    assert list(read["memory"]) == [f"c{client}" for client in range(20)]  # in their order
    # A file that is missing or changed places is no checkpoint.
    first, second = (path / name for name in names[:2])
    content = first.read_bytes(), second.read_bytes()
    first.write_bytes(content[1])
    second.write_bytes(content[0])
    with pytest.raises(ValueError, match=r"tensors_00001.safetensors differs"):
        read_checkpoint(path)
    first.unlink()
    with pytest.raises(ValueError, match=r"tensors_00001.safetensors is missing"):
        read_checkpoint(path)


# ---- full disks


def full(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The disk takes this many more files."""
    left, sync = [after], os.fsync

    def fsync(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr("fl_lightning.federation.state.os.fsync", fsync)


@pytest.mark.parametrize("after", [0, 2, 3])
def test_a_full_disk_leaves_the_last_good_checkpoint(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=1)
    first = folder.save(1, STATE, {})
    full(monkeypatch, after)
    with pytest.raises(CheckpointError, match=rf"cannot write .*round_00002: No space left.*last good one is {first}"):
        folder.save(2, STATE, {})
    assert [path.name for path in tmp_path.iterdir()] == ["round_00001"]
    assert same(read_checkpoint(first)[0], STATE)


def test_the_first_checkpoint_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, 0)
    with pytest.raises(CheckpointError, match="there is none before it"):
        CheckpointFolder(tmp_path).save(1, STATE, {})


def test_writing_a_round_again_replaces_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {"w": torch.zeros(1)}, {})
    assert same(read_checkpoint(folder.save(1, STATE, {}))[0], STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["round_00001"]


def no_room_for_memories(monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool]) -> list[Path]:
    """Where memories go, the disk is full whenever ``when`` says so; returns the files that it did not take."""
    refused, write = list[Path](), Path.write_bytes

    def write_bytes(path: Path, content: bytes) -> int:
        if path.parent.name.startswith("fl_lightning_memories_") and when():
            refused.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    return refused


def test_a_memory_that_finds_no_room_on_the_disk_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store, full = MemoryStore(budget=1 / 2**10), False
    no_room_for_memories(monkeypatch, lambda: full)
    expected = {key: {"own": {"w": torch.full((200,), value)}} for key, value in {"a": 1.0, "b": 2.0}.items()}
    for key, memory in expected.items():
        store.commit(key, memory)  # 800 bytes; there is room for one
    full = True
    expected["c"] = {"own": {"w": torch.full((200,), 3.0)}}
    for action in (lambda: store.commit("c", expected["c"]), lambda: store.get("a")):
        with pytest.raises(CheckpointError, match=r"memory into .*fl_lightning_memories_.*: No space") as error:
            action()
        assert error.value.errno == errno.ENOSPC
    full = False
    assert same(store.state_dict(), expected)
    assert all(same(store.get(key), memory) for key, memory in expected.items())
    assert len(store._here) == 1


# ---- the command line

TINY = [
    *("fit", "--config", str(ROOT / "configs" / "fedavg.yaml"), "--federation.progress=false"),
    *("--trainer.logger=false", "--trainer.max_steps=2", "--federation.sampler.init_args.size=2"),
    *("--method.init_args.rounds=3", "--federation.evaluate_every=9", "--data.num_clients=4"),
]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = main(TINY).loop  # type: ignore[attr-defined]
    folder = tmp_path / "lightning_logs" / "fedavg" / "version_0" / "checkpoints"
    for file in ("tensors.safetensors", "info.json"):
        content = (folder / "round_00003" / file).read_bytes()
        (folder / "round_00003" / file).write_bytes(content[: len(content) // 2])
        capsys.readouterr()
        again = main([*TINY, "--ckpt_path", "last"]).loop  # type: ignore[attr-defined]
        named = capsys.readouterr().err
        assert f"round_00003 is damaged: {file}" in named
        assert "looking for an older one" in named
        assert len(again.seconds) == len(whole.seconds)
        assert again.round == 3
        assert same(again.method.state(), whole.method.state())
        assert same(read_checkpoint(folder / "round_00003")[0]["method"], whole.method.state_dict())


def test_a_full_disk_ends_the_run_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as context:
        full(context, 5 + 2)  # four files and the folder of round 1's checkpoint, two files of round 2's
        with pytest.raises(SystemExit) as exit:
            main(TINY)
        assert exit.value.code == 2
        said = capsys.readouterr().err
        kept = tmp_path / "lightning_logs" / "fedavg" / "version_0" / "checkpoints" / "round_00001"
        assert "the disk is full" in said
        assert f"go on from {Path('lightning_logs/fedavg/version_0/checkpoints/round_00001')}" in said
        read_checkpoint(kept)
    resumed = main([*TINY, "--ckpt_path", "last"]).loop  # type: ignore[attr-defined]
    assert resumed.round == 3
    assert resumed.history[1]["round"] == 1


def test_a_disk_without_room_for_memories_is_no_clients_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    asked, ask = [0], Guard.ask

    def watched(guard: Guard, *rest: Any) -> Any:
        asked[0] = guard.round
        try:
            return ask(guard, *rest)
        finally:
            asked[0] = 0

    monkeypatch.setattr(Guard, "ask", watched)
    refused = no_room_for_memories(monkeypatch, lambda: asked[0] == 2)
    config = str(ROOT / "configs" / "scaffold.yaml")
    with pytest.raises(SystemExit) as exit:
        main([*TINY, "--config", config, "--federation.memory_budget=0.05", "--federation.on_client_error=skip"])
    assert (exit.value.code, len(refused)) == (2, 1)
    said = capsys.readouterr().err
    assert "the disk is full" in said
    assert f"cannot write a client's memory into {refused[0].parent}" in said
    (folder,) = tmp_path.glob("lightning_logs/*/version_0")
    assert f"go on from {(folder / 'checkpoints' / 'round_00001').relative_to(tmp_path)}" in said
    assert not (folder / "failures.jsonl").exists()
