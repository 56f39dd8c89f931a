"""A folder of what clients have sent once: models that a market offers, or the replies of another run's first round.

Of every client two files. ``<client>.safetensors``: its tensors, named ``<group>:<name>`` as in a message; the group that is
a model (see `plain_group`) goes without its prefix, so that the file is one of weights like any other. ``<client>.json``:
``num_examples``, and what else the reply held: ``counts`` (training images of every class), ``scalars``, ``metrics``. What a
client remembers does not travel.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.incoming import faults
from fl_lightning.message import Group, Message, Tensors
from fl_lightning.methods.base import Reply

if TYPE_CHECKING:
    from fl_lightning.federation.loop import FederationLoop

FIRST = 1  # the round whose replies these are
_COUNTS = "counts"  # a group with this one vector stands in the JSON, for people to read and to write
_TENSORS, _FACTS = ".safetensors", ".json"


def uploads_folder(text: str, seed: int) -> Path:
    """The folder that ``federation.uploads`` names."""
    return Path(text.replace("{seed}", str(seed)))


def upload_clients(folder: Path, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Keys of the clients whose uploads lie in a folder: in the order of ``known``, or by number, then by name.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: A file lacks its partner, there are none, or a key is not among those known (if there are such).
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"federation.uploads is {str(folder)!r}; there is no such folder")
    weights, facts = ({path.stem for path in folder.glob(f"[!.]*{kind}")} for kind in (_TENSORS, _FACTS))
    if alone := sorted(weights ^ facts):
        raise ValueError(
            f"uploads of {', '.join(alone)} in {folder} lack one of the two files, {_TENSORS} and {_FACTS}"
        )
    if not weights:
        raise ValueError(f"{folder} holds no uploads, <client>{_TENSORS} and <client>{_FACTS}")
    if not known:
        return tuple(sorted(weights, key=lambda key: (not key.isdecimal(), int(key) if key.isdecimal() else 0, key)))
    if strange := sorted(weights - set(known)):
        raise ValueError(f"{folder} has uploads of {', '.join(strange)}; the data's clients are {', '.join(known)}")
    return tuple(key for key in known if key in weights)


def plain_group(uplink: Mapping[str, Group]) -> str | None:
    """The group whose tensors are named without prefix: the only artifact of which the server knows the names."""
    models = [name for name, group in uplink.items() if group.kind == "artifact" and group.like is not None]
    return models[0] if len(models) == 1 else None


def write_upload(folder: Path, reply: Reply, uplink: Mapping[str, Group]) -> None:
    """Write a client's two files."""
    message, plain = reply.message, plain_group(uplink)
    facts: dict[str, Any] = {"num_examples": message.num_examples}
    flat: dict[str, Tensor] = {}
    for group, tensors in message.tensors.items():
        if group == _COUNTS and list(tensors) == [_COUNTS]:
            facts[_COUNTS] = tensors[_COUNTS].tolist()
        else:
            prefix = "" if group == plain else f"{group}:"
            flat |= {prefix + name: value.contiguous() for name, value in tensors.items()}
    facts |= {"scalars": dict(message.scalars), "metrics": dict(reply.metrics)}
    save_file(flat, folder / (message.sender + _TENSORS), {"groups": ",".join(message.tensors)})
    (folder / (message.sender + _FACTS)).write_text(json.dumps(facts, indent=2) + "\n")


def read_upload(folder: Path, client: str, uplink: Mapping[str, Group]) -> tuple[Reply, list[str]]:
    """A client's reply, and what is wrong with it."""
    wrong: list[str] = []
    flat: dict[str, Tensor] = {}
    stated: list[str] = []
    try:
        with safe_open(folder / (client + _TENSORS), "pt") as file:
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            stated = ((file.metadata() or {}).get("groups") or "").split(",")
    except (SafetensorError, OSError) as error:
        wrong = [f"cannot be read ({error})"]
    try:
        facts = json.loads((folder / (client + _FACTS)).read_text())
        num_examples, counts = facts["num_examples"], list(facts.get(_COUNTS) or [])
        scalars, metrics = dict(facts.get("scalars") or {}), dict(facts.get("metrics") or {})
    except (ValueError, KeyError, TypeError, OSError) as error:
        return Reply(Message(FIRST, client)), [*wrong, f"has no facts with num_examples ({error!r})"]
    if not _is_count(num_examples) or num_examples < 1:
        wrong.append(f"has num_examples {num_examples!r}; it must be an integer of at least 1")
        num_examples = 1
    if counts and not (all(map(_is_count, counts)) and sum(counts)):
        wrong.append(f"has counts {counts}; they must be integers of at least 0, not all of them 0")
        counts = [0] * len(counts)
    for label, values in {"scalars": scalars, "metrics": metrics}.items():
        if odd := {name: value for name, value in values.items() if not isinstance(value, int | float)}:
            wrong.append(f"has {label} {odd}; they must be numbers")
            values.clear()
    plain = plain_group(uplink)
    found: dict[str, dict[str, Tensor]] = {group: {} for group in stated if group and group != _COUNTS}
    for name, value in flat.items():
        group, _, tensor = name.rpartition(":") if ":" in name else (plain or name, "", name)
        found.setdefault(group, {})[tensor] = value
    if _COUNTS in uplink and counts:
        found[_COUNTS] = {_COUNTS: torch.tensor(counts)}
    if found.keys() != uplink.keys():
        missing, over = sorted(uplink.keys() - found.keys()), sorted(found.keys() - uplink.keys())
        wrong.append(f"has not the groups that the method expects: missing {missing}, unexpected {over}")
    groups = {group: found.get(group, {}) for group in uplink}
    for group, expected in uplink.items():
        if expected.like is not None and group in found:
            groups[group] = _alike(groups[group], expected.like)
        wrong += faults(groups[group], expected.like if group in found else None)
    return Reply(Message(FIRST, client, groups, scalars, num_examples), metrics=metrics), wrong


def _is_count(value: object) -> bool:
    """Whether a value out of JSON is an integer from 0 on that a tensor can hold."""
    return type(value) is int and 0 <= value < 2**63


def _alike(tensors: Tensors, like: Tensors) -> dict[str, Tensor]:
    """The tensors in the order and the precision of ``like``, what is not in it behind them; other kinds of numbers stay."""
    ordered = {name: tensors[name] for name in like if name in tensors} | dict(tensors)
    return {
        name: value.to(like[name].dtype)
        if name in like and value.is_floating_point() == like[name].is_floating_point()
        else value
        for name, value in ordered.items()
    }


def check_uploads(folder: Path, clients: Sequence[str], uplink: Mapping[str, Group]) -> None:
    """All uploads fit what the method expects.

    Raises:
        ValueError: They do not; it names everything that is wrong.
    """
    wrong = {client: "; ".join(read_upload(folder, client, uplink)[1]) for client in clients}
    if text := "; ".join(f"{client} {what}" for client, what in wrong.items() if what):
        raise ValueError(f"uploads in {folder} do not fit: {text}")


def uploads_digest(folder: Path) -> str | None:
    """SHA-256 of the names and contents of the uploads, None where there is no folder."""
    paths = sorted(p for kind in (_TENSORS, _FACTS) for p in folder.glob(f"[!.]*{kind}"))
    stats = [(path.name, _file_digest(path, (s := path.stat()).st_size, s.st_mtime_ns)) for path in paths]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest() if stats else None


@cache
def _file_digest(path: Path, size: int, mtime: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class SaveUploads(FederationCallback):
    """Writes the first round's replies to a folder that is there as a whole or not at all.

    Args:
        folder: Its place.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.beside = folder, folder.with_name(folder.name + ".writing")

    def on_reply(self, loop: FederationLoop, reply: Reply) -> None:
        if loop.round + 1 == FIRST and loop.is_main:
            self.beside.mkdir(exist_ok=True)
            write_upload(self.beside, reply, loop.method.uplink(FIRST))

    def on_stage(self, loop: FederationLoop, stage: str, done: int, total: int) -> None:
        if stage == "server" and self.beside.is_dir():
            shutil.rmtree(self.folder, ignore_errors=True)  # of a first round that was interrupted later
            self.beside.rename(self.folder)
