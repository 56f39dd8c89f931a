"""What sparse model inversion saves: steps, FLOPs and memory of dense and sparse inversion of one network, side by side.

    python benchmarks/inversion.py                                   # DeiT-Tiny at 224 pixels, 8 images; minutes
    python benchmarks/inversion.py --name null --turns 3             # a tiny ViT of 64 patches

Fits are those of a run: `InversionTask` through the participant's lean loop, with jitter, total variation, Adam and the hard
freeze. Every number of patches of SMI's schedule (events at 50, 100, 200 and 300 of 4,000 iterations, 30 % each) is timed in
steps of its own, and the schedule's time is the sum of their means weighted by how long they last, with a score pass before
each event. Sides take turns within one run; times are CPU time of this process with one thread, the least over turns, since
other work can only add. FLOPs are torch's counter's over loss and gradient, with fused attention off so that it is counted.
Memory is what a fresh process's resident size grows to at most during two steps of one number of patches, over what it was
before: a sparse run's first steps are dense, and need what a dense run needs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.callbacks import SparseModelInversion
from fl_lightning.cli import quiet
from fl_lightning.data.examples import DataInfo
from fl_lightning.federation.participant import Participant
from fl_lightning.methods.base import Fit
from fl_lightning.models import SparseViT
from fl_lightning.rng import torch_generator
from fl_lightning.synthesis.inversion import survivors
from fl_lightning.tasks import ClassificationTask, InversionTask
from fl_lightning.tasks.base import Batch
from fl_lightning.tasks.inversion import targets

EVENTS, RATIOS, ITERATIONS, CLASSES = (50, 100, 200, 300), (0.3,) * 4, 4000, 10


class Clock(Callback):
    """CPU seconds of every step but the first two, which prepare the optimizer and stop the patches."""

    runs_lean = True

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= 2:
            self.times.append(time.process_time())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.times.append(time.process_time())

    @property
    def steps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


class Side:
    """One inversion, of so many patches from the second step on."""

    def __init__(self, name: str | None, kept: int | None, images: int) -> None:
        shape = (3, 32, 32) if name is None else (3, 224, 224)
        classifier = ClassificationTask(lambda s, c: SparseViT(s, c, name))
        classifier.build(DataInfo(tuple(map(str, range(CLASSES))), shape, tuple(range(CLASSES))), 0)
        self.task, self.kept, self.state = InversionTask(classifier), kept, classifier.state()
        self.num_patches: int = self.task.network.num_patches
        self.noise = torch.randn(images, *shape, generator=torch_generator(0, "benchmark"))
        self.data = targets(torch.arange(images) % CLASSES)
        self.batch = Batch(self.data.inputs, self.data.labels)
        self.worker = Participant(
            {"inversion": self.task},
            {"accelerator": "cpu", "devices": 1, "max_epochs": 1},
            images,
            0,
            client_loop="lean",
        )

    def fit(self, steps: int) -> list[float]:
        """CPU seconds of this many steps, after two more."""
        clock = Clock()
        sparse = () if self.kept is None else (SparseModelInversion((1,), (1 - self.kept / self.num_patches,)),)
        overrides = {"max_steps": steps + 2, "max_epochs": ITERATIONS}
        given = {"teacher/0": self.state}
        start = {"pixels": self.noise}
        self.worker.execute(Fit("inversion", self.data, start, given, (), (*sparse, clock), overrides), 1)
        return clock.steps

    def ready(self) -> None:
        """Make the task's loss ready to be asked for outside of a fit."""
        self.task.load({"pixels": self.noise})
        self.task.given, self.task.kept = {"teacher/0": self.state}, None
        if self.kept is not None:
            self.task.go_on_with(torch.arange(self.kept).expand(len(self.noise), -1))

    def flops(self) -> int:
        """Of one loss and its gradient."""
        self.ready()
        for block in self.task.network.model.blocks:
            block.attn.fused_attn = False
        with FlopCounterMode(display=False) as counter:
            self.task.loss(self.batch).backward()
        for block in self.task.network.model.blocks:
            block.attn.fused_attn = True
        return counter.get_total_flops()

    def score_seconds(self) -> float:
        """CPU seconds of a score pass."""
        self.ready()
        started = time.process_time()
        with torch.no_grad():
            self.task.network.attention(self.noise, self.task.kept)
        return time.process_time() - started


def peak(name: str | None, kept: int | None, images: int) -> float:
    """MiB that a few steps add to a process at most. For a process of its own."""
    quiet()
    torch.set_num_threads(1)
    side = Side(name, kept, images)
    side.ready()
    optimizer = side.task.optimizer([side.task.pixels])
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew, at what is resident now
    before = resident("VmHWM")
    for _ in range(2):
        optimizer.zero_grad()
        side.task.loss(side.batch).backward()
        optimizer.step()
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """MiB of a line of Linux's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def main() -> None:
    """Measure, print a table, and the same figures as JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="deit_tiny_patch16_224", help="Of timm; null for a tiny ViT at 32 pixels.")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="Steps timed in a turn.")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    name = None if arguments.name == "null" else arguments.name
    dense = Side(name, None, arguments.images)
    total = dense.num_patches
    counts = [total, *survivors(total, RATIOS)]
    sides = {count: dense if count == total else Side(name, count, arguments.images) for count in counts}
    lasts = [after - before for before, after in pairwise((0, *EVENTS, ITERATIONS))]

    taken: dict[int, float] = dict.fromkeys(counts, float("inf"))
    scoring: dict[int, float] = dict.fromkeys(counts, float("inf"))
    for _ in range(arguments.turns):
        for count, side in sides.items():
            taken[count] = min(taken[count], *side.fit(arguments.steps))
            scoring[count] = min(scoring[count], side.score_seconds())
    flops = {count: side.flops() for count, side in sides.items()}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {
            kept: pool.apply(peak, (name, None if kept == total else kept, arguments.images))
            for kept in (total, counts[-1])
        }

    print(f"{'patches':>8} {'iterations':>11} {'ms a step':>10} {'time ratio':>11} {'FLOP ratio':>11}")
    for count, last in zip(counts, lasts, strict=True):
        ratios = taken[total] / taken[count], flops[total] / flops[count]
        print(f"{count:>8} {last:>11} {taken[count] * 1e3:>10.1f} {ratios[0]:>11.2f} {ratios[1]:>11.2f}")
    tail = counts[-1]
    sparse = sum(taken[c] * last for c, last in zip(counts, lasts, strict=True)) + sum(scoring[c] for c in counts[:-1])
    whole = ITERATIONS * taken[total] / sparse
    whole_flops = ITERATIONS * flops[total] / sum(flops[c] * last for c, last in zip(counts, lasts, strict=True))
    tail_time, tail_flops = taken[total] / taken[tail], flops[total] / flops[tail]
    print(f"tail       time {tail_time:.2f}  FLOPs {tail_flops:.2f}  memory {memory[total] / memory[tail]:.2f}")
    print(f"schedule   time {whole:.2f}  FLOPs {whole_flops:.2f}")
    print(
        json.dumps(
            {
                "dense_steps_per_s": 1 / taken[total],
                "tail_steps_per_s": 1 / taken[tail],
                "tail_time_ratio": tail_time,
                "tail_flop_ratio": tail_flops,
                "schedule_time_ratio": whole,
                "schedule_flop_ratio": whole_flops,
                "dense_peak_mib": memory[total],
                "tail_peak_mib": memory[tail],
                "tail_memory_ratio": memory[total] / memory[tail],
            }
        )
    )


if __name__ == "__main__":
    main()
