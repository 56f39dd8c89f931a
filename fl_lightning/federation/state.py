"""What a federation remembers, in memory and on disk: safetensors, JSON and checksums; never a pickle."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fl_lightning.message import Groups

MANIFEST = "manifest.json"


class MemoryStore:
    """Client memories, each replaced as a whole when a reply is accepted."""

    def __init__(self) -> None:
        self._memories: dict[str, Groups] = {}

    def get(self, client: str) -> Groups:
        """The client's memory, read-only; empty for one who never kept any."""
        return self._memories.get(client, MappingProxyType({}))

    def commit(self, client: str, memory: Groups) -> None:
        """Replace a client's memory. A part of something larger (a stack of clients) is copied, to let go of the rest."""
        self._memories[client] = MappingProxyType(
            {
                group: MappingProxyType(
                    {n: v.clone() if v.untyped_storage().nbytes() > v.nbytes else v for n, v in tensors.items()}
                )
                for group, tensors in memory.items()
            }
        )

    def state_dict(self) -> dict[str, Any]:
        return {client: {group: dict(t) for group, t in memory.items()} for client, memory in self._memories.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._memories = {}
        for client, memory in state.items():
            self.commit(client, memory)


def flatten(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Move the tensors of nested dicts, lists and tuples into ``tensors``; what is left is JSON.

    Raises:
        TypeError: A value is neither a tensor nor of a JSON type.
    """
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().contiguous()
        return {"$tensor": path}
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


def digest(value: Any) -> str:
    """SHA-256 of nested dicts and lists of tensors and JSON values: equal for states that are equal to the last bit."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(flatten(value, tensors), sort_keys=True).encode()
    content = save_safetensors({name: tensors[name].clone() for name in sorted(tensors)})
    return hashlib.sha256(tree + content).hexdigest()


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
        """Write a checkpoint beside and rename it into place; older ones beyond ``keep_last`` go.

        Args:
            round: Last finished round.
            state: Nested dicts and lists of tensors and JSON values.
            info: JSON facts about the run that a reader wants without loading tensors.
        """
        final = self.folder / f"round_{round:05d}"
        beside = self.folder / f".writing_{round:05d}"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        tensors: dict[str, Tensor] = {}
        tree = flatten(state, tensors)
        storages: set[int] = set()
        for name, tensor in tensors.items():  # safetensors refuses tensors that share memory
            storage = tensor.untyped_storage().data_ptr()
            tensors[name] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
        files = {
            "tensors.safetensors": save_safetensors(tensors),
            "state.json": json.dumps(tree).encode(),
            "info.json": json.dumps({**info, "round": round}, indent=2).encode(),
        }
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        files[MANIFEST] = json.dumps({"round": round, "sha256": digests}, indent=2).encode()
        for name, content in files.items():
            with open(beside / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if final.exists():
            shutil.rmtree(final)
        beside.rename(final)
        for old in self.list()[: -self.keep_last]:
            shutil.rmtree(old)
        return final

    def list(self) -> list[Path]:
        """Checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("round_*") if (path / MANIFEST).exists())


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a round checkpoint.

    Args:
        path: A ``round_*`` folder.

    Returns:
        Its state and its info.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: A file is missing or differs from its checksum.
    """
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(f"{path} is no round checkpoint: it has no {MANIFEST}")
    contents = {}
    try:
        digests = json.loads((path / MANIFEST).read_bytes())["sha256"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {MANIFEST} cannot be read") from error
    for name, digest in digests.items():
        if not (path / name).is_file():
            raise ValueError(f"checkpoint {path} is damaged: {name} is missing")
        contents[name] = (path / name).read_bytes()
        if hashlib.sha256(contents[name]).hexdigest() != digest:
            raise ValueError(f"checkpoint {path} is damaged: {name} differs from its checksum")
    tensors = load_safetensors(contents["tensors.safetensors"])
    return unflatten(json.loads(contents["state.json"]), tensors), json.loads(contents["info.json"])
