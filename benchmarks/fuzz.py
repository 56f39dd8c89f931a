"""Mutated bytes for what reads bytes: the wire decoder and the checkpoint loader.

Two kinds of input. "corrupted": a valid blob, or one file of a valid checkpoint, with random damage; nothing of this may
be accepted. "hostile": the same damage with the checksums worked out anew, so that it reaches the parsers; it may come to
another value or be refused, no more. A crash is any other end than a value or a refusal (ValueError; FileNotFoundError for
a checkpoint), the death of the process included; a hang is an input that takes longer than ``--limit`` seconds. What
happens to input number n depends on seed and n alone.

    python benchmarks/fuzz.py --inputs 100000

The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fl_lightning.federation.state import MANIFEST, CheckpointFolder, read_checkpoint
from fl_lightning.message import Message

TARGETS = ("wire corrupted", "wire hostile", "checkpoint corrupted", "checkpoint hostile")
CHUNK = 2000  # inputs of a process: one that dies takes no others' counts along


def message() -> Message:
    """A message with every kind of content."""
    draw = torch.Generator().manual_seed(0)
    model = {"0.weight": torch.randn(4, 3, generator=draw), "0.bias": torch.zeros(4, dtype=torch.float64)}
    rows = {"x": torch.randn(3, 2, generator=draw).bfloat16(), "label": torch.tensor([1, 0, 2])}
    return Message(3, "client-7", {"model": model, "rows": rows, "buffers": {}}, {"loss": 0.5, "lr": 0.1}, 42)


def state() -> dict[str, Any]:
    """A state with every kind of content."""
    return {
        "round": 3,
        "method": {"w": torch.arange(6.0).view(2, 3), "optimizer": {"state": {0: {"step": 1}}, "betas": (0.9, 0.99)}},
        "memory": {"0": {"control": {"w": torch.ones(2)}}},
        "history": [{"round": 0.0}, {"round": 1.0, "global/acc": 0.5}],
        "nothing": None,
    }


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Damage, and not nothing."""
    while True:
        data = bytearray(content)
        for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
            at = draw.randrange(len(data) + 1)
            length = min(draw.choice((1, 1, 2, 4, 8, 64, 1024)), len(data) - at)
            other = draw.randrange(len(data) + 1)
            kind = draw.randrange(9)
            if kind == 0 and at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            elif kind == 1 and at < len(data):
                data[at] = draw.choice((0, 1, 127, 128, 255, *b'{}[]",:0-9eE.\\'))
            elif kind == 2:
                del data[at : at + length]
            elif kind == 3:
                data[at:at] = draw.randbytes(draw.choice((1, 2, 8, 64)))
            elif kind == 4:
                del data[at:]
            elif kind == 5:
                data[other:other] = data[at : at + length]
            elif kind == 6:
                data[at : at + length] = bytes(length)
            elif kind == 7:
                data[at : at + 8] = draw.choice((0, 1, 2**31 - 1, 2**63 - 1, 2**64 - 1)).to_bytes(8, "little")
            else:
                data += draw.randbytes(draw.choice((1, 8, 256)))
        if bytes(data) != content:
            return bytes(data)


class Hang(BaseException):
    """An input took too long."""


def _too_long(signum: int, frame: Any) -> None:
    raise Hang


def one(target: str, draw: random.Random, blob: bytes, folder: Path, files: dict[str, bytes]) -> str:
    """What becomes of one input: "accepted" or "refused"; anything else is raised."""
    what, kind = target.split()
    try:
        if what == "wire":
            if kind == "corrupted":
                Message.from_bytes(mutate(blob, draw))
            else:
                body = mutate(blob[:-16], draw)
                Message.from_bytes(body + hashlib.blake2b(body, digest_size=16).digest())
        else:
            name = draw.choice(sorted(files) if kind == "corrupted" else [n for n in sorted(files) if n != MANIFEST])
            changed = {name: mutate(files[name], draw)}
            if kind == "hostile":
                manifest = json.loads(files[MANIFEST])
                manifest["sha256"][name] = hashlib.sha256(changed[name]).hexdigest()
                changed[MANIFEST] = json.dumps(manifest, indent=2).encode()
            try:
                for path, content in changed.items():
                    (folder / path).write_bytes(content)
                read_checkpoint(folder)
            finally:
                for path in changed:
                    (folder / path).write_bytes(files[path])
    except (ValueError, FileNotFoundError):
        return "refused"
    return "accepted"


def work(target: str, first: int, count: int, seed: int, limit: float, queue: Any) -> None:
    """A chunk of inputs, in a process of its own."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_long)
    found: Counter[str] = Counter()
    worst, bad = 0.0, []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        folder = CheckpointFolder(Path(root)).save(3, state(), {"config_hash": "x"})
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        blob = message().to_bytes()
        for number in range(first, first + count):
            started = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, limit)
            try:
                outcome = one(target, random.Random(f"{seed} {target} {number}"), blob, folder, files)
            except Hang:
                outcome = "hang"
            except BaseException as error:  # Rust panics are no Exceptions
                outcome = "crash"
                bad.append(f"{target} {number}: {error!r}"[:300])
            signal.setitimer(signal.ITIMER_REAL, 0)
            worst = max(worst, time.perf_counter() - started)
            found[outcome] += 1
            if outcome == "hang" or (outcome == "accepted" and target.endswith("corrupted")):
                bad.append(f"{target} {number}: {outcome}")
    queue.put((dict(found), worst, bad[:20]))


def fuzz(inputs: int, seed: int = 0, limit: float = 5.0) -> dict[str, Any]:
    """Counts of what became of so many inputs to each of the targets."""
    context = multiprocessing.get_context("fork")
    result: dict[str, Any] = {"inputs": 0, "crashes": 0, "hangs": 0, "accepted_corruptions": 0, "worst_seconds": 0.0}
    result |= {"targets": {}, "bad": []}
    for target in TARGETS:
        counts: Counter[str] = Counter()
        for first in range(0, inputs, CHUNK):
            queue, count = context.Queue(), min(CHUNK, inputs - first)
            process = context.Process(target=work, args=(target, first, count, seed, limit, queue))
            process.start()
            process.join(limit * 2 + count * 0.1)
            if process.is_alive():  # it hangs where no signal reaches
                process.kill()
                process.join()
                found, worst, bad = {"hang": 1}, limit, [f"{target}: a process hangs after input {first}"]
            elif process.exitcode:
                found, worst = {"crash": 1}, 0.0
                bad = [f"{target}: process died with {process.exitcode} after {first}"]
            else:
                found, worst, bad = queue.get()
            counts.update(found)
            result["worst_seconds"] = max(result["worst_seconds"], round(worst, 3))
            result["bad"] += bad
        result["targets"][target] = dict(counts)
        result["inputs"] += sum(counts.values())
        result["crashes"] += counts["crash"]
        result["hangs"] += counts["hang"]
        result["accepted_corruptions"] += counts["accepted"] if target.endswith("corrupted") else 0
        print(f"{target}: {dict(counts)}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=25_000, help="inputs to each of the four targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds for one input")
    options = parser.parse_args()
    started = time.perf_counter()
    result = fuzz(options.inputs, options.seed, options.limit)
    result["seconds"] = round(time.perf_counter() - started, 1)
    for line in result.pop("bad")[:50]:
        print(line)
    print(json.dumps(result))
    raise SystemExit(any(result[name] for name in ("crashes", "hangs", "accepted_corruptions")))


if __name__ == "__main__":
    main()
