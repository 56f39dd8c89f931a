"""What a federation remembers, in memory and on disk: safetensors, JSON and checksums; never a pickle."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fl_lightning.message import Groups, Tensors

MANIFEST = "manifest.json"
TENSORS, STATE, INFO = "tensors.safetensors", "state.json", "info.json"
SHARD = 2**26  # bytes of tensors in a file of a checkpoint, about
MEMORY = "memory"  # the part of a state that may be larger than this process' memory: clients' memories


class CheckpointError(OSError):
    """A checkpoint, or a client's memory that leaves this process' own, could not be written."""


class _Folder:
    """A temporary folder that goes with this object, or with the process. Names for files in it: numbers."""

    def __init__(self) -> None:
        self.path, self.numbers = Path(mkdtemp(prefix="fl_lightning_memories_")), count()
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


class Spilled(Mapping[str, Tensors]):
    """A client's memory in a file of its own, which goes with this object. Every look into it reads the file.

    Args:
        folder: Where it lies.
        memory: What to write.

    Raises:
        CheckpointError: The disk takes no more.
    """

    __slots__ = ("_folder", "_number")

    def __init__(self, folder: _Folder, memory: Groups) -> None:
        self._folder, self._number = folder, next(folder.numbers)
        tensors: dict[str, Tensor] = {}
        tree = json.dumps(flatten(memory, tensors))
        try:
            self._path.write_bytes(save_safetensors(_apart(tensors), {"tree": tree}))
        except OSError as error:
            raise CheckpointError(
                error.errno, f"cannot write a client's memory into {folder.path}: {error.strerror}"
            ) from error

    def __del__(self) -> None:
        self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self._folder.path / f"{self._number}.safetensors"

    def load(self) -> Groups:
        """What was written."""
        with safe_open(self._path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            return unflatten(json.loads(file.metadata()["tree"]), tensors)

    def __getitem__(self, group: str) -> Tensors:
        return self.load()[group]

    def __iter__(self) -> Iterator[str]:
        return iter(self.load())

    def __len__(self) -> int:
        return len(self.load())


class MemoryStore:
    """Client memories, each replaced as a whole when a reply is accepted.

    Args:
        budget: MiB to keep in memory, at least 0; those used least recently lie in a temporary folder, which goes with the
            store. None keeps all in memory.

    Raises:
        ValueError: ``budget`` is below 0.
    """

    def __init__(self, budget: float | None = None) -> None:
        if budget is not None and not budget >= 0:
            raise ValueError(f"federation.memory_budget is {budget}; it must be at least 0, or null")
        self._limit = math.inf if budget is None else budget * 2**20
        self._folder = None if budget is None else _Folder()
        self._clear()

    def _clear(self) -> None:
        self._clients: dict[str, None] = {}  # in the order in which they came, whatever is spilled
        self._here: dict[str, Groups] = {}  # least recently used first
        self._files: dict[str, Spilled] = {}  # what is here may have one too
        self._bytes = 0

    def get(self, client: str) -> Groups:
        """The client's memory, read-only; empty for one who never kept any."""
        if client not in self._clients:
            return MappingProxyType({})
        memory = self._here[client] if client in self._here else _frozen(self._files[client].load())
        self._put(client, memory)
        return memory

    def commit(self, client: str, memory: Groups) -> None:
        """Replace a client's memory. A part of something larger (a stack of clients) is copied, to let go of the rest."""
        self._clients.setdefault(client)
        self._files.pop(client, None)
        self._put(client, _frozen(memory))

    def _put(self, client: str, memory: Groups) -> None:
        """Keep a memory here as the one used last, and spill what is too much."""
        if client in self._here:
            self._bytes -= _size(self._here.pop(client))
        self._here[client] = memory
        self._bytes += _size(memory)
        while self._bytes > self._limit:
            assert self._folder is not None
            oldest, spilled = next(iter(self._here.items()))
            if oldest not in self._files:  # where writing fails, the memory is here still
                self._files[oldest] = Spilled(self._folder, spilled)
            del self._here[oldest]
            self._bytes -= _size(spilled)

    def state_dict(self) -> dict[str, Any]:
        """All memories; those in files are read when they are looked at."""
        return {
            client: {group: dict(t) for group, t in self._here[client].items()}
            if client in self._here
            else self._files[client]
            for client in self._clients
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._clear()
        for client, memory in state.items():
            self.commit(client, memory)


def _frozen(memory: Groups) -> Groups:
    return MappingProxyType(
        {
            group: MappingProxyType(
                {n: v.clone() if v.untyped_storage().nbytes() > v.nbytes else v for n, v in tensors.items()}
            )
            for group, tensors in memory.items()
        }
    )


def _size(memory: Groups) -> int:
    return sum(value.nbytes for tensors in memory.values() for value in tensors.values())


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where two share memory: safetensors refuses these."""
    apart, storages = {}, set[int]()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return apart


def flatten(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Move the tensors of nested dicts, lists and tuples into ``tensors``; what is left is JSON.

    Raises:
        TypeError: A value is neither a tensor nor of a JSON type.
    """
    if isinstance(value, Tensor):
        while path in tensors:  # "a/b" within "c", and "b" within "c/a"
            path += "'"
        tensors[path] = value.detach().cpu().contiguous()
        return {"$tensor": path}
    if isinstance(value, Spilled):
        value = value.load()  # once, and not by group
    if isinstance(value, Mapping):
        entries = [[key, flatten(item, tensors, f"{path}/{key}")] for key, item in value.items()]
        # JSON turns integer keys (torch's optimizer states have them) into strings, so pairs are kept.
        return {"$map": entries}
    if isinstance(value, (list, tuple)):
        items = [flatten(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"state at {path or 'the top'!r} is a {type(value).__name__}; tensors and JSON values can be kept")


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        if "$tuple" in value:
            return tuple(unflatten(item, tensors) for item in value["$tuple"])
        return {key: unflatten(item, tensors) for key, item in value["$map"]}
    return value


def serialise(value: Any) -> tuple[Any, bytes]:
    """What `flatten` makes of a value: JSON, and its tensors as safetensors."""
    tensors: dict[str, Tensor] = {}
    tree = flatten(value, tensors)
    return tree, save_safetensors(_apart(tensors))


def digest(value: Any) -> str:
    """SHA-256 of nested dicts and lists of tensors and JSON values: equal for states that are equal to the last bit."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(flatten(value, tensors), sort_keys=True).encode()
    content = save_safetensors({name: tensors[name].clone() for name in sorted(tensors)})
    return hashlib.sha256(tree + content).hexdigest()


class _Shards(dict[str, Tensor]):
    """Tensors on their way to files: written, and let go of, as soon as there are `SHARD` bytes of them.

    Args:
        folder: Where the files go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.digests = folder, dict[str, str]()
        self._names, self._bytes = set[str](), 0

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, value)
        self._names.add(name)
        self._bytes += value.nbytes
        if self._bytes >= SHARD:
            self.write()

    def write(self) -> None:
        """Put what there is into the next file."""
        content, file = save_safetensors(_apart(self)), _shard(len(self.digests))
        self.digests[file] = _write(self.folder / file, content)
        self.clear()
        self._bytes = 0


class _Unread(Mapping[str, Any]):
    """A part of a checkpoint whose entries are read when they are looked at.

    Args:
        entries: What `flatten` has made of them.
        tensors: By name, read when looked at.
    """

    def __init__(self, entries: Sequence[tuple[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        self._entries, self._tensors = dict(entries), tensors

    def __getitem__(self, key: str) -> Any:
        return unflatten(self._entries[key], self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class _Tensors(Mapping[str, Tensor]):
    """The tensors of several safetensors files, by name, each read when it is looked at; one file is open at a time.

    Args:
        paths: The files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._places: dict[str, Path] = {}
        for path in paths:
            self._open(path)
            self._places |= dict.fromkeys(self._file.keys(), path)

    def _open(self, path: Path) -> None:
        self._path, self._file = path, safe_open(path, "pt")

    def __getitem__(self, name: str) -> Tensor:
        if self._places[name] != self._path:
            self._open(self._places[name])
        return self._file.get_tensor(name).clone()  # where torch would lay it, and free of the file

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class CheckpointFolder:
    """Round checkpoints of one run: ``round_00012/`` folders, each whole or not there.

    Args:
        folder: Where they lie.
        keep_last: How many to keep, at least 1.
    """

    def __init__(self, folder: Path, keep_last: int = 2) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; it must be at least 1")
        self.folder, self.keep_last = Path(folder), keep_last

    def save(self, round: int, state: Mapping[str, Any], info: Mapping[str, Any]) -> Path:
        """Write a checkpoint beside and rename it into place; then those of later rounds go, and older ones beyond
        ``keep_last``.

        Args:
            round: Last finished round.
            state: Nested dicts and lists of tensors and JSON values.
            info: JSON facts about the run that a reader wants without loading tensors.

        Raises:
            CheckpointError: The disk takes no more; what was there before is still there.
        """
        final = self.folder / f"round_{round:05d}"
        beside = self.folder / f".writing_{round:05d}"
        aside = self.folder / f".replaced_{round:05d}"
        shutil.rmtree(beside, ignore_errors=True)
        try:
            if aside.exists() and not final.exists():
                aside.rename(final)
            shutil.rmtree(aside, ignore_errors=True)
            beside.mkdir(parents=True)
            shards = _Shards(beside)
            tree = flatten(state, shards)
            if shards or not shards.digests:
                shards.write()
            rest = {STATE: json.dumps(tree), INFO: json.dumps({**info, "round": round}, indent=2)}
            digests = shards.digests | {name: _write(beside / name, text.encode()) for name, text in rest.items()}
            _write(beside / MANIFEST, _manifest(round, digests))
            if final.exists():  # set aside, where `list` finds it, so that there is no moment with neither
                final.rename(aside)
            beside.rename(final)
            sync(self.folder)
        except TypeError:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        except OSError as error:
            shutil.rmtree(beside, ignore_errors=True)
            kept = self.list()
            last = f"the last good one is {kept[-1]}" if kept else "there is none before it"
            raise CheckpointError(error.errno, f"cannot write {final}: {error.strerror}; {last}") from error
        there = self.list()
        kept = there[: there.index(final) + 1][-self.keep_last :]
        for old in dict.fromkeys((*reversed(there), *self.folder.glob(".replaced_*"))):
            if old not in kept:
                shutil.rmtree(old)
        return final

    def list(self) -> list[Path]:
        """Checkpoints, oldest first. One that was set aside is there as long as nothing has taken its place."""
        found = {
            path.name.partition("_")[2]: path
            for names in (".replaced_*", "round_*")
            for path in self.folder.glob(names)
            if (path / MANIFEST).exists()
        }
        return [found[number] for number in sorted(found, key=lambda number: (len(number), number))]


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a round checkpoint.

    Args:
        path: A ``round_*`` folder.

    Returns:
        Its state and its info. Clients' memories are read, one by one, when they are looked at; the files must be there.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: A file is missing or differs from its checksum.
    """
    files = _verified(path)
    try:
        tensors = _Tensors([path / name for name in files if name not in (STATE, INFO)])
        tree = json.loads((path / STATE).read_bytes())
        unflatten(tree, dict.fromkeys(tensors, torch.empty(0)))  # every one is there
        state = {
            key: _Unread(item["$map"], tensors) if key == MEMORY else unflatten(item, tensors)
            for key, item in tree["$map"]
        }
    except Exception as error:
        raise ValueError(f"checkpoint {path} is damaged: its state cannot be read ({error!r})") from error
    return state, _info(path)


def read_info(path: Path) -> dict[str, Any]:
    """The info of a round checkpoint alone; raises as `read_checkpoint` does."""
    _verified(path, only=INFO)
    return _info(path)


def _info(path: Path) -> dict[str, Any]:
    try:
        info = json.loads((path / INFO).read_bytes())
        if info["round"] != json.loads((path / MANIFEST).read_bytes())["round"]:
            raise ValueError(f"{MANIFEST} is of another round")
    except Exception as error:
        raise ValueError(f"checkpoint {path} is damaged: {INFO} does not fit ({error!r})") from error
    return info


def _manifest(round: int, digests: Mapping[str, str]) -> bytes:
    return json.dumps({"round": round, "sha256": dict(digests)}, indent=2).encode()


def _shard(number: int) -> str:
    """The name of a checkpoint's file of tensors."""
    return f"tensors_{number:05d}.safetensors" if number else TENSORS


def _write(path: Path, content: bytes) -> str:
    """Write a file that lasts, and return its SHA-256."""
    write_lasting(path, [content])
    return hashlib.sha256(content).hexdigest()


def write_lasting(path: Path, parts: Iterable[bytes], append: bool = False) -> int:
    """Write a file that is on the disk afterwards, or append to one; returns where it ends."""
    with open(path, "ab" if append else "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _verified(path: Path, only: str | None = None) -> list[str]:
    """Names of a checkpoint's files beside the manifest, after a look at all of them, or at one.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: The manifest is not to the byte as it is written, or a file is missing or differs from its checksum.
    """
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(f"{path} is no round checkpoint: it has no {MANIFEST}")
    try:
        written = (path / MANIFEST).read_bytes()
        manifest = json.loads(written)
        digests = {name: str(value) for name, value in manifest["sha256"].items()}
        names = [*map(_shard, range(max(1, len(digests) - 2))), STATE, INFO]
        sound = type(manifest["round"]) is int and written == _manifest(manifest["round"], digests)
    except Exception as error:
        raise ValueError(f"checkpoint {path} is damaged: {MANIFEST} cannot be read") from error
    if not sound or list(digests) != names:
        raise ValueError(f"checkpoint {path} is damaged: {MANIFEST} is not as it was written")
    for name in names if only is None else [only]:
        if not (path / name).is_file():
            raise ValueError(f"checkpoint {path} is damaged: {name} is missing")
        with open(path / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digests[name]:
                raise ValueError(f"checkpoint {path} is damaged: {name} differs from its checksum")
    return names


def sync(folder: Path) -> None:
    """Make renames in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
