"""Does a long run's memory grow? Resident memory over 300 rounds of a tiny federation, after a warm-up.

Every round has a cohort of 10 of 100 clients, an evaluation and a commit; SCAFFOLD, so that clients have memories. The slope
is that of a least-squares line through the rounds after the warm-up, by which time nearly every client has had a turn.

    python benchmarks/soak.py
    python benchmarks/soak.py --engine vectorized --rounds 600
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from fl_lightning.cli import quiet
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.sources import Digits
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.sampling import UniformSampler
from fl_lightning.methods import SCAFFOLD
from fl_lightning.tasks import ClassificationTask

LIMIT = 1.0  # MiB per 100 rounds
EVERY = 10  # rounds between looks: to collect garbage takes longer than a round


def resident() -> float:
    """Resident memory of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class Watch(FederationCallback):
    """Keeps the resident memory after every so many rounds."""

    def __init__(self, trim: bool) -> None:
        self.trim, self.sizes = trim, list[float]()

    def on_round_end(self, loop: FederationLoop, row: dict[str, float]) -> None:
        if row["round"] % EVERY == 0 and row["round"] > 0:
            gc.collect()
            if self.trim:
                ctypes.CDLL("libc.so.6").malloc_trim(0)
            self.sizes.append(resident())
            print(f"round {row['round']:.0f}: {self.sizes[-1]:.2f} MiB", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--warm_up", type=int, default=50)
    parser.add_argument("--engine", default="serial")
    parser.add_argument("--trim", action="store_true", help="give free memory back to the system before each look")
    parser.add_argument("--checkpoint_every", type=int, default=10)
    options = parser.parse_args()
    quiet()
    watch = Watch(options.trim)
    loop = FederationLoop(
        engine=options.engine,
        sampler=UniformSampler(size=10),
        callbacks=[watch],
        progress=False,
        checkpoint_every=options.checkpoint_every,
    )
    data = FederatedDataModule(Digits(), num_clients=100, batch_size=10)
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 1}
    loop.assemble(SCAFFOLD(rounds=options.rounds), ClassificationTask(), data, trainer, 0)
    with tempfile.TemporaryDirectory() as folder:
        loop.fit(Path(folder))
    late = np.array(watch.sizes[options.warm_up // EVERY - 1 :])
    slope = float(np.polyfit(EVERY * np.arange(len(late)), late, 1)[0]) * 100
    report = {
        "engine": options.engine,
        "rounds": options.rounds,
        "mib_after_warm_up": round(float(late[0]), 2),
        "mib_at_the_end": round(float(late[-1]), 2),
        "mib_per_100_rounds": round(slope, 3),
        "limit": LIMIT,
        "within": bool(slope <= LIMIT),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
