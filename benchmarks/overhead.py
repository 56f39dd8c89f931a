"""What a client's turn costs beyond its arithmetic: the federation loop against a bare PyTorch loop.

The loop side is `FederationLoop.fit` with aggregation, byte counts, server step and commit; evaluation is off. The bare side
loads the global weights, takes the same SGD steps over the same batches and adds the update up. Both train an MLP of 50,890
parameters (784-64-10) on 28 x 28 images. The two sides take turns within one run, and the median over turns is reported, as
CPU time of this process, so that work beside it disturbs little.

    python benchmarks/overhead.py                # one thread
    python benchmarks/overhead.py --threads 1 2  # one thread, then two
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.cli import quiet
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.sources import FakeImages
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.methods import FedAvg
from fl_lightning.models import MLP
from fl_lightning.tasks import ClassificationTask

CLIENTS, BATCH, CLASSES = 10, 10, 10
SHAPE = (1, 28, 28)


class Held(FakeImages):
    """Fake images made once, so that drawing them is not measured."""

    def load(self, *, image_size: int | None, channels: int | None, seed: int):
        from dataclasses import replace

        from fl_lightning.data.examples import TensorExamples

        splits = super().load(image_size=image_size, channels=channels, seed=seed)
        train = splits.train.fetch(torch.arange(len(splits.train)))
        return replace(splits, train=TensorExamples(train, splits.train.labels))


def federation(steps: int, rounds: int) -> FederationLoop:
    """A loop whose clients take so many steps a round; evaluation off."""
    source = Held(CLASSES, image_size=28, channels=1, train_per_class=CLIENTS * BATCH * steps // CLASSES)
    data = FederatedDataModule(source, num_clients=CLIENTS, batch_size=BATCH, val_fraction=0.0)
    loop = FederationLoop(progress=False, validate=False, num_threads=None)
    loop.assemble(
        FedAvg(rounds), ClassificationTask(MLP), data, {"accelerator": "cpu", "devices": 1, "max_epochs": 1}, 0
    )
    loop.evaluate = lambda **_: {}  # type: ignore[method-assign]
    return loop


def bare(inputs: Tensor, labels: Tensor, clients: int) -> None:
    """The same arithmetic, as one would write it by hand."""
    model = MLP(SHAPE, CLASSES)
    world = {name: p.detach().clone() for name, p in model.named_parameters()}
    total = {name: torch.zeros_like(p) for name, p in world.items()}
    for client in range(clients):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(world[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in torch.randperm(len(labels), generator=torch.Generator().manual_seed(client)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model((inputs[batch] - 0.5) / 0.5), labels[batch]).backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            total[name].add_(parameter.detach() - world[name], alpha=1 / clients)
    for name, value in world.items():
        value.add_(total[name])


def cpu_ms(function: Callable[[], object]) -> float:
    """CPU milliseconds of a call."""
    started = time.process_time()
    function()
    return (time.process_time() - started) * 1e3


def measure(counts: tuple[int, int], turns: int, rounds: int) -> dict[str, dict[int, float]]:
    """CPU ms per client-round, by side and number of steps."""
    loops = {steps: federation(steps, rounds * (turns + 1)) for steps in counts}
    draw = torch.Generator().manual_seed(0)
    data = {n: (torch.rand(n * BATCH, *SHAPE, generator=draw), torch.arange(n * BATCH) % CLASSES) for n in counts}
    seen: dict[str, dict[int, list[float]]] = {side: {n: [] for n in counts} for side in ("bare", "loop")}
    for turn in range(turns + 1):  # the first turn warms up
        for steps, loop in loops.items():
            loop.method.rounds = rounds * (turn + 1)  # go on for some rounds more
            both = {
                "bare": cpu_ms(lambda steps=steps: [bare(*data[steps], CLIENTS) for _ in range(rounds)]),
                "loop": cpu_ms(lambda loop=loop: resume(loop)),
            }
            if turn:
                for side, value in both.items():
                    seen[side][steps].append(value / (rounds * CLIENTS))
    return {side: {n: statistics.median(values) for n, values in by.items()} for side, by in seen.items()}


def resume(loop: FederationLoop) -> None:
    """Rounds until ``method.rounds``, from where the loop stands."""
    if not loop.history:
        loop.fit()
    while loop.round < loop.method.rounds:
        loop._run_round(loop.round + 1)


def report(counts: tuple[int, int], ms: dict[str, dict[int, float]], threads: int) -> dict[str, float]:
    """Print the table; fixed and per-step parts by a line through the two step counts."""
    few, many = counts
    step = {side: (by[many] - by[few]) / (many - few) for side, by in ms.items()}
    fixed = {side: by[few] - few * step[side] for side, by in ms.items()}
    print(f"CPU ms per client-round, {threads} thread(s), MLP 784-64-10, batches of {BATCH}")
    print(f"{'':14}{'bare loop':>12}{'fl_lightning':>14}{'difference':>12}")
    rows = {f"{n} steps": {side: by[n] for side, by in ms.items()} for n in counts}
    for label, values in {**rows, "fixed": fixed, "per step": step}.items():
        print(f"{label:14}{values['bare']:12.2f}{values['loop']:14.2f}{values['loop'] - values['bare']:12.2f}")
    return {
        "trainer_fixed_ms": fixed["loop"] - fixed["bare"],
        "trainer_step_ms": step["loop"] - step["bare"],
        "bare_ms": ms["bare"][few],
        "loop_ms": ms["loop"][few],
        "bare_step_ms": step["bare"],
        "threads": threads,
    }


def main() -> None:
    """Measure and print; the last line is one JSON object, of the first number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="numbers of CPU threads to compare")
    parser.add_argument("--steps", type=int, nargs=2, default=[5, 25], help="the two step counts of a client's turn")
    parser.add_argument("--turns", type=int, default=9, help="turns of each side, at least 1")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of ten clients in a turn")
    arguments = parser.parse_args()
    counts = (min(arguments.steps), max(arguments.steps))
    if min(*arguments.threads, *counts, arguments.turns, arguments.rounds) < 1 or counts[0] == counts[1]:
        parser.error("every number must be at least 1, and the two step counts must differ")
    quiet()
    found = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        found.append(report(counts, measure(counts, arguments.turns, arguments.rounds), threads))
        print()
    others = {f"threads_{f['threads']:.0f}": f for f in found[1:]}
    print(json.dumps({**{k: round(v, 4) for k, v in found[0].items()}, **others}))


if __name__ == "__main__":
    main()
