"""Proof that nothing but the message crosses: a client's half is replayed in a process that has nothing else.

`recorded` keeps what every client was given and what it replied; `replay` hands that to a new process as bytes and gets
bytes back. They must be the same.
"""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fl_lightning.data.examples import DataInfo, Examples, TensorExamples
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.participant import Participant
from fl_lightning.message import Message
from fl_lightning.methods.base import Client, ClientProgram, Reply
from fl_lightning.tasks import FederatedTask

Build = Callable[[], FederatedTask]  # a function of a module, since it must be found again in the other process


@dataclass
class Part:
    """One client's part in one round, as bytes and plain data."""

    build: Build
    info: DataInfo
    program: ClientProgram
    trainer: dict[str, Any]
    batch_size: int
    client: Client
    memory: bytes
    message: bytes
    reply: bytes
    new_memory: bytes | None

    def __str__(self) -> str:
        return f"{type(self.program).__name__}, round {self.client.round}, client {self.client.key}"


def in_memory(data: Examples) -> TensorExamples:
    """A client's own copy of its examples."""
    every = torch.arange(len(data))
    return TensorExamples(data.fetch(every) if len(data) else torch.empty(0), data.labels, data.domains)


def memory_bytes(memory: Any) -> bytes:
    """Any memory, by way of a message."""
    return Message(0, "memory", memory).to_bytes()


@contextmanager
def recorded(loop: FederationLoop, build: Build, trainer: dict[str, Any]) -> Any:
    """While the block runs, list the parts of all clients of an assembled loop.

    Args:
        loop: The loop, assembled with a task as ``build`` makes it.
        build: Makes the task, not yet built. A function at the top of a module that the other process can import.
        trainer: The trainer section that the loop was assembled with.
    """
    parts: list[Part] = []
    program, given = loop.program, loop.program.update

    def update(client: Client, message: Message) -> Any:
        before = client.memory
        reply: Reply = yield from given(client, message)
        alone = replace(
            client,
            train=in_memory(client.train),
            val=in_memory(client.val),
            test=in_memory(client.test),
            shared_test=TensorExamples(torch.empty(0), torch.empty(0)),  # a simulation's privilege, not training's
            memory={},
        )
        new = None if reply.memory is None else memory_bytes(reply.memory)
        parts.append(
            Part(
                build,
                loop.info,
                program,
                trainer,
                loop.participant.batch_size,
                alone,
                memory_bytes(before),
                message.to_bytes(),
                reply.message.to_bytes(),
                new,
            )
        )
        return reply

    recording = type("Recording", (type(program),), {"update": staticmethod(update)})
    loop.program = recording(**vars(program))
    try:
        yield parts
    finally:
        loop.program = program


def replay(parts: Sequence[Part]) -> None:
    """Do every part again in one new process, in another order, and compare the bytes.

    Raises:
        AssertionError: A reply or a memory differs.
    """
    shuffled = list(parts)[::-1]
    here = Path(__file__).resolve()
    modules = [sys.modules[part.build.__module__].__file__ for part in parts]
    paths = [str(here.parents[1]), str(here.parents[2]), *{str(Path(file or "").parent) for file in modules}]
    program = f"import sys; sys.path[:0] = {paths!r}; from federation.wire import serve; serve()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=pickle.dumps(shuffled), capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    for part, (reply, memory) in zip(shuffled, pickle.loads(done.stdout), strict=True):
        assert reply == part.reply, f"{part}: another reply"
        assert memory == part.new_memory, f"{part}: another memory"


def serve() -> None:
    """What the new process does: parts in on standard input, replies out on standard output."""
    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout.buffer, io.TextIOWrapper(io.BytesIO())
    answers = []
    for part in pickle.load(sys.stdin.buffer):
        task = part.build()
        task.build(part.info, part.client.seed)
        worker = Participant(part.program.tasks(task), part.trainer, part.batch_size, part.client.seed)
        message, memory = Message.from_bytes(part.message), Message.from_bytes(part.memory).tensors
        client = replace(part.client, memory=memory)
        reply = worker.run(part.program.update(client, message), message.round, client.key)
        answers.append((reply.message.to_bytes(), None if reply.memory is None else memory_bytes(reply.memory)))
    out.write(pickle.dumps(answers))
