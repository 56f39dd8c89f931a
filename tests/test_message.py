"""Messages: what goes in comes out, nothing is shared with live parameters, and bytes are counted exactly."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.aggregation import Mean
from fl_lightning.message import Group, Message

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = np.arange(int(np.prod(shape))).reshape(shape) - 1
    tensor = torch.as_tensor(values).to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=8)
group_names = names.filter(lambda text: not set(text) & {":", ","} and text != "message")
messages = st.builds(
    Message,
    st.integers(0, 2**40),
    names,
    st.dictionaries(group_names, st.dictionaries(names, tensors(), max_size=3), max_size=3),
    st.dictionaries(names, st.floats(allow_nan=False), max_size=2),
    st.integers(0, 2**40),
)


def same(a: Message, b: Message) -> bool:
    return (
        (a.round, a.sender, a.scalars, a.num_examples) == (b.round, b.sender, b.scalars, b.num_examples)
        and list(a.tensors) == list(b.tensors)
        and all(a.tensors[g].keys() == b.tensors[g].keys() for g in a.tensors)
        and all(
            value.dtype == b.tensors[group][name].dtype and torch.equal(value, b.tensors[group][name])
            for group, held in a.tensors.items()
            for name, value in held.items()
        )
    )


@settings(max_examples=100, deadline=None)
@given(messages)
def test_bytes_round_trip_and_size(message: Message) -> None:
    blob = message.to_bytes()
    assert same(message, Message.from_bytes(blob))
    assert message.nbytes == len(blob)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_a_scalar_tensor_survive(dtype: torch.dtype) -> None:
    message = Message(3, "7", {"model": {"w": torch.tensor([[1, 0]]).to(dtype), "zero_dim": torch.tensor(1).to(dtype)}})
    assert same(message, Message.from_bytes(message.to_bytes()))


def test_empty_message_and_empty_group() -> None:
    for message in (Message(0, "server"), Message(1, "4", {"model": {}, "rows": {}}, {"loss": 0.5}, 9)):
        assert same(message, Message.from_bytes(message.to_bytes()))
        assert message.nbytes == len(message.to_bytes())


def test_nothing_is_shared_with_live_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    live = {"w": parameter}
    message = Message(1, "server", {"model": live})
    with torch.no_grad():
        parameter.zero_()
    live["other"] = parameter
    assert message.tensors["model"].keys() == {"w"}
    assert message.tensors["model"]["w"].tolist() == [1, 1, 1]
    assert not message.tensors["model"]["w"].requires_grad
    with pytest.raises(TypeError):
        message.tensors["model"]["w"] = parameter  # type: ignore[index]
    with pytest.raises(TypeError):
        message.scalars["x"] = 1.0  # type: ignore[index]


def test_only_some_groups_cost_only_their_bytes() -> None:
    message = Message(1, "server", {"a": {"w": torch.ones(100)}, "b": {"v": torch.ones(10)}}, {"stage": 1.0})
    part = message.only(("b",))
    assert list(part.tensors) == ["b"]
    assert part.scalars == message.scalars
    assert part.nbytes == len(part.to_bytes()) < message.nbytes - 300
    assert message.only(()).nbytes == len(message.only(()).to_bytes())
    with pytest.raises(KeyError):
        message.only(("c",))


@pytest.mark.parametrize("name", ["message", "a:b", "a,b", ""])
def test_reserved_group_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Message(1, "server", {name: {"w": torch.ones(1)}})


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_garbage_is_no_message(cut: int) -> None:
    blob = Message(1, "server", {"model": {"w": torch.ones(5)}}).to_bytes()
    with pytest.raises(ValueError, match="not a message"):
        Message.from_bytes(blob[:cut])
    with pytest.raises(ValueError, match="not a message"):
        Message.from_bytes(b"\x00" * 64)


def test_a_safetensors_file_that_is_no_message() -> None:
    from safetensors.torch import save

    for blob in (save({"w": torch.ones(2)}), b"", b"\xff" * 30):
        with pytest.raises(ValueError, match="not a message: it differs from its checksum"):
            Message.from_bytes(blob)
        with pytest.raises(ValueError, match="not a message"):  # whoever means it can work the checksum out
            Message.from_bytes(blob + hashlib.blake2b(blob, digest_size=16).digest())


def test_no_changed_byte_is_accepted_and_no_blob_that_is_too_large() -> None:
    blob = Message(1, "server", {"model": {"w": torch.ones(5)}}, {"s": 1.0}, 3).to_bytes()
    for place in range(len(blob)):
        with pytest.raises(ValueError, match="not a message"):
            Message.from_bytes(blob[:place] + bytes([blob[place] ^ 1]) + blob[place + 1 :])
    assert Message.from_bytes(blob, len(blob)).num_examples == 3
    with pytest.raises(ValueError, match=f"{len(blob)} bytes; allowed are {len(blob) - 1}"):
        Message.from_bytes(blob, len(blob) - 1)


def test_kinds_of_groups() -> None:
    assert isinstance(Group("update").reduce, Mean)
    with pytest.raises(ValueError, match=r"'gradient'.*'update', 'rows', 'artifact'"):
        Group("gradient")
