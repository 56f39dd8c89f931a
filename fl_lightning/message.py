"""What crosses the wire between server and clients, and how many bytes that is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fl_lightning.aggregation import Mean, Reducer

Tensors = Mapping[str, Tensor]
Groups = Mapping[str, Tensors]

_SEPARATOR = ":"  # between group and tensor name on the wire; parameter names hold dots, never colons
_LIST = ","  # between the names of the groups in the metadata
_CHECKSUM = 16  # bytes at the end of a serialised message
_HEADER = "message"  # round, number of examples and the scalars travel as tensors, so that size follows from the schema


@dataclass(frozen=True)
class Group:
    """What a group of a reply is and how the server reduces it over clients.

    Attributes:
        kind: "update" (a difference or a gradient: one vector over all its tensors), "rows" (a list of rows, each of its
            own: embeddings, labels) or "artifact" (a whole thing to keep: a model, a generator). Transforms such as
            clipping act by kind.
        reduce: How replies become one.
        like: Tensors of the names, shapes and dtypes that every reply holds, where the server knows them beforehand: what
            comes from elsewhere is checked against it. A first dimension of 0 stands for any number of rows.
    """

    kind: str
    reduce: Reducer = field(default_factory=Mean)
    like: Tensors | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in ("update", "rows", "artifact"):
            raise ValueError(f"Group.kind is {self.kind!r}; allowed: 'update', 'rows', 'artifact'")


@dataclass(frozen=True)
class Message:
    """Named groups of detached CPU tensors, plus a few numbers. Copies on the way in, read-only after.

    Attributes:
        round: Round number, 1 for the first.
        sender: "server" or the client's key.
        tensors: Tensors by group and name.
        scalars: Numbers by name.
        num_examples: The sender's training examples; the usual weight of a mean.
    """

    round: int
    sender: str
    tensors: Groups = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    num_examples: int = 0

    def __post_init__(self) -> None:
        frozen = {}
        for group, tensors in self.tensors.items():
            if not group or _SEPARATOR in group or _LIST in group or group == _HEADER:
                raise ValueError(
                    f"a message group is called {group!r}; allowed: any text without {_SEPARATOR!r} and {_LIST!r} but "
                    f"{_HEADER!r} and the empty one"
                )
            frozen[group] = MappingProxyType({name: cpu_copy(value) for name, value in tensors.items()})
        object.__setattr__(self, "tensors", MappingProxyType(frozen))
        object.__setattr__(self, "scalars", MappingProxyType({k: float(v) for k, v in self.scalars.items()}))

    def plus(self, groups: Groups) -> Message:
        """The same message with these groups beside its own, or in place of them."""
        return Message(self.round, self.sender, {**self.tensors, **groups}, self.scalars, self.num_examples)

    def only(self, groups: tuple[str, ...]) -> Message:
        """The message with some of its groups; an unknown name raises KeyError."""
        return _share(self, {group: self.tensors[group] for group in groups})

    def without_tensors(self) -> Message:
        """The message with no groups, which still counts the bytes of all."""
        rest = _share(self, {})
        rest.__dict__["nbytes"] = self.nbytes
        return rest

    def to_bytes(self) -> bytes:
        """The message as it crosses a network: one safetensors blob and its checksum."""
        # The sender is a tensor too: with two entries of metadata, safetensors would write them in any order.
        flat = {
            f"{_HEADER}{_SEPARATOR}counts": torch.tensor([self.round, self.num_examples]),
            f"{_HEADER}{_SEPARATOR}sender": torch.tensor(list(self.sender.encode()), dtype=torch.uint8),
        }
        for name, value in self.scalars.items():
            flat[f"{_HEADER}{_SEPARATOR}scalar.{name}"] = torch.tensor(value, dtype=torch.float64)
        for group, tensors in self.tensors.items():
            flat |= {f"{group}{_SEPARATOR}{name}": tensor.contiguous() for name, tensor in tensors.items()}
        blob = save_safetensors(flat, {"groups": _LIST.join(self.tensors)})
        return blob + _checksum(blob)

    @classmethod
    def from_bytes(cls, blob: bytes, max_bytes: int | None = None) -> Message:
        """Read what `to_bytes` wrote.

        Raises:
            ValueError: The blob is larger than ``max_bytes``, or no message, or not as it was sent.
        """
        if max_bytes is not None and len(blob) > max_bytes:
            raise ValueError(f"a message of {len(blob)} bytes; allowed are {max_bytes}")
        blob, checksum = blob[:-_CHECKSUM], blob[-_CHECKSUM:]
        if _checksum(blob) != checksum:
            raise ValueError("not a message: it differs from its checksum")
        try:
            flat, metadata = load_safetensors(blob), _metadata(blob)
            counts = flat.pop(f"{_HEADER}{_SEPARATOR}counts").tolist()
            sender = bytes(flat.pop(f"{_HEADER}{_SEPARATOR}sender").tolist()).decode()
            groups: dict[str, dict[str, Tensor]] = {g: {} for g in metadata["groups"].split(_LIST) if g}
            scalars = {}
            for key, value in flat.items():
                group, name = key.split(_SEPARATOR, 1)
                if group == _HEADER:
                    scalars[name.removeprefix("scalar.")] = float(value)
                else:
                    groups[group][name] = value
            return cls(counts[0], sender, groups, scalars, counts[1])
        except Exception as error:
            raise ValueError(f"not a message: {error}") from error

    @cached_property
    def nbytes(self) -> int:
        """Length of `to_bytes()`, worked out from names, dtypes and shapes alone."""
        schema = tuple(
            (group, tuple((name, value.dtype, tuple(value.shape)) for name, value in tensors.items()))
            for group, tensors in self.tensors.items()
        )
        return _serialised_size(schema, tuple(self.scalars), len(self.sender.encode()))


def _checksum(blob: bytes) -> bytes:
    """Against accidents; whoever sends hostile messages can work it out too."""
    return hashlib.blake2b(blob, digest_size=_CHECKSUM).digest()


def cpu_copy(value: Tensor) -> Tensor:
    """A copy on the CPU, of its own memory and without a graph; one ``clone`` is cheaper than ``to`` with a copy."""
    return value.detach().clone() if value.is_cpu else value.detach().cpu()


def _share(message: Message, groups: Groups) -> Message:
    """A message over tensors that are already frozen, without another copy."""
    clone = object.__new__(Message)
    for name in ("round", "sender", "scalars", "num_examples"):
        object.__setattr__(clone, name, getattr(message, name))
    object.__setattr__(clone, "tensors", MappingProxyType(dict(groups)))
    return clone


@lru_cache(maxsize=1024)
def _serialised_size(schema: tuple, scalars: tuple[str, ...], sender_length: int) -> int:
    # expand() gives tensors of the right shape over one number; to_bytes makes them contiguous.
    tensors = {
        group: {name: torch.zeros((), dtype=dtype).expand(shape) for name, dtype, shape in entries}
        for group, entries in schema
    }
    return len(Message(0, "x" * sender_length, tensors, dict.fromkeys(scalars, 0.0)).to_bytes())


def _metadata(blob: bytes) -> dict[str, str]:
    length = int.from_bytes(blob[:8], "little")
    return json.loads(blob[8 : 8 + length])["__metadata__"]
