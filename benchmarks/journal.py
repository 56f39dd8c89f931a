"""What the journal of a round costs clients that are quick.

Ten clients of a FedAvg take some steps of a small MLP (`overhead.py`'s) a round, in three runs of one process that take
turns, a round each: without a journal, with the default (``federation.journal_seconds: 30``: nothing is written, each step
looks at the clock), and with everything written at once (0: every reply, and a snapshot after every step, on disk before the
next). All write a round checkpoint. Reported is the least over the turns.

    python benchmarks/journal.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from overhead import another_round, federation

from fl_lightning.cli import quiet

CLIENTS = 10
SIDES = {"null": None, "30": 30.0, "0": 0.0}


def main() -> None:
    """Measure and print; the last line is one JSON object: milliseconds per client-round, of CPU and on the clock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of a client's turn")
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    least: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as root:
        loops = {
            side: federation("mlp", options.steps, CLIENTS, Path(root) / side, journal_seconds=seconds)
            for side, seconds in SIDES.items()
        }
        for _ in range(options.turns):
            for side, loop in loops.items():
                before = time.process_time(), time.perf_counter()
                another_round(loop)
                now = time.process_time(), time.perf_counter()
                taken = [(b - a) * 1e3 / CLIENTS for a, b in zip(before, now, strict=True)]
                least[side] = [min(pair) for pair in zip(least.get(side, taken), taken, strict=True)]
    print(json.dumps({side: [round(value, 3) for value in values] for side, values in least.items()}))


if __name__ == "__main__":
    main()
