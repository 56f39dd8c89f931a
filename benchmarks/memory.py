"""Peak resident memory against the number of clients and of rounds, on invented images that nobody keeps, or on a set in the
format of MNIST (``--idx``).

Every run is a process of its own: 60,000 images in all, a cohort of 100 (of which every client takes two steps), FedAvg, the
default MLP, an evaluation before the first and after the last round. With ``--memories`` the method is SCAFFOLD, nearly
every client has taken part, and each of these keeps a control variate of 199 KiB, at most 16 MiB of them in memory; in the
end a checkpoint is written, and read again.

    python benchmarks/memory.py
    python benchmarks/memory.py --idx my_folder
    python benchmarks/memory.py --memories
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from fl_lightning.cli import quiet
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.sources import IDX, FakeImages, Source
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.sampling import UniformSampler
from fl_lightning.federation.state import read_checkpoint
from fl_lightning.methods import SCAFFOLD, FedAvg
from fl_lightning.tasks import ClassificationTask

COHORT, IMAGES = 100, 60_000
RUNS = ((100, 3), (10_000, 3), (10_000, 12))  # clients, rounds
MEMORIES, BUDGET = ((200, 6), (2_000, 60)), 16.0  # clients, rounds; MiB


def peak() -> float:
    """Most resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def run(clients: int, rounds: int, idx: str | None, memories: bool) -> dict[str, float]:
    """Peaks when everything is set up and at the end; of the images in the folder ``idx``, or invented ones."""
    quiet()
    options = {"memory_budget": BUDGET if memories else None, "evaluate_every": rounds, "checkpoint_every": rounds}
    loop = FederationLoop(sampler=UniformSampler(size=COHORT), progress=False, validate=False, **options)
    source: Source = FakeImages(image_size=28, channels=1, train_per_class=IMAGES // 10, test_per_class=100)
    source = source if idx is None else IDX(idx)
    data = FederatedDataModule(source, num_clients=clients, batch_size=10, val_fraction=0.0)
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": -1, "max_steps": 2}
    loop.assemble(SCAFFOLD(rounds=rounds) if memories else FedAvg(rounds), ClassificationTask(), data, trainer, 0)
    ready = peak()
    with tempfile.TemporaryDirectory() as folder:
        loop.fit(Path(folder) if memories else None)
        if memories:
            loop.restore(read_checkpoint(Path(folder) / "checkpoints" / f"round_{rounds:05d}")[0])
    return {"clients": clients, "rounds": rounds, "mib_ready": round(ready, 1), "mib_peak": round(peak(), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=int, nargs=2, metavar=("CLIENTS", "ROUNDS"), help="one run, in this process")
    parser.add_argument("--idx", metavar="FOLDER", help="folder with images in the format of MNIST")
    parser.add_argument("--memories", action="store_true", help="clients that keep something, and a checkpoint of it")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(*options.one, options.idx, options.memories)))
        return
    found = []
    for clients, rounds in MEMORIES if options.memories else RUNS:
        command = [sys.executable, __file__, "--one", str(clients), str(rounds)]
        command += ([] if options.idx is None else ["--idx", options.idx]) + ["--memories"] * options.memories
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1], flush=True)
    few, many, *long = (row["mib_peak"] for row in found)
    of_rounds = {"mib_of_more_rounds": long[0] - many} if long else {}
    print(json.dumps({"runs": found, "mib_of_more_clients": many - few, **of_rounds}))


if __name__ == "__main__":
    main()
