"""What a client's turn costs beyond its arithmetic: the federation loop against a bare PyTorch loop.

The loop side is `FederationLoop.fit` with aggregation, byte counts, server step and commit; evaluation is off. The bare side
loads the global weights, takes the same SGD steps over the same batches and adds the update up. Both train an MLP of 50,890
parameters (784-64-10) on 28 x 28 images. Four sides take turns within one run: the bare loop, ours with each client's fit by
Lightning's Trainer (``client_loop: trainer``), by the lean loop (``lean``), and with the cohort's fits together (``engine:
vectorized``). The median over turns is reported, as CPU time of this process, so that work beside it disturbs little.

    python benchmarks/overhead.py                # one thread
    python benchmarks/overhead.py --threads 1 2  # one thread, then two
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

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
SIDES: dict[str, dict[str, Any]] = {
    "trainer": {"client_loop": "trainer"},
    "lean": {"client_loop": "lean"},
    "vectorized": {"engine": "vectorized"},
}
SHAPE = (1, 28, 28)


class Held(FakeImages):
    """Fake images made once, so that drawing them is not measured."""

    def load(self, *, image_size: int | None, channels: int | None, seed: int):
        from dataclasses import replace

        from fl_lightning.data.examples import TensorExamples

        splits = super().load(image_size=image_size, channels=channels, seed=seed)
        train = splits.train.fetch(torch.arange(len(splits.train)))
        return replace(splits, train=TensorExamples(train, splits.train.labels))


def federation(steps: int, rounds: int, clients: int, **options: Any) -> FederationLoop:
    """A loop whose clients take so many steps a round; evaluation off."""
    source = Held(CLASSES, image_size=28, channels=1, train_per_class=clients * BATCH * steps // CLASSES)
    data = FederatedDataModule(source, num_clients=clients, batch_size=BATCH, val_fraction=0.0)
    loop = FederationLoop(progress=False, validate=False, num_threads=None, **options)
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


def measure(counts: tuple[int, int], turns: int, rounds: int, clients: int) -> dict[str, dict[int, float]]:
    """CPU ms per client-round, by side and number of steps."""
    loops = {(side, n): federation(n, rounds * (turns + 1), clients, **o) for side, o in SIDES.items() for n in counts}
    draw = torch.Generator().manual_seed(0)
    data = {n: (torch.rand(n * BATCH, *SHAPE, generator=draw), torch.arange(n * BATCH) % CLASSES) for n in counts}
    seen: dict[str, dict[int, list[float]]] = {side: {n: [] for n in counts} for side in ("bare", *SIDES)}
    for turn in range(turns + 1):  # the first turn warms up
        for steps in counts:
            taken = {"bare": cpu_ms(lambda steps=steps: [bare(*data[steps], clients) for _ in range(rounds)])}
            for side in SIDES:
                loop = loops[side, steps]
                loop.method.rounds = rounds * (turn + 1)  # go on for some rounds more
                taken[side] = cpu_ms(lambda loop=loop: resume(loop))
            if turn:
                for side, value in taken.items():
                    seen[side][steps].append(value / (rounds * clients))
    return {side: {n: statistics.median(values) for n, values in by.items()} for side, by in seen.items()}


def resume(loop: FederationLoop) -> None:
    """Rounds until ``method.rounds``, from where the loop stands."""
    if not loop.history:
        loop.fit()
    while loop.round < loop.method.rounds:
        loop._run_round(loop.round + 1)


def report(counts: tuple[int, int], ms: dict[str, dict[int, float]], threads: int, clients: int) -> dict[str, float]:
    """Print the table; fixed and per-step parts by a line through the two step counts."""
    few, many = counts
    step = {side: (by[many] - by[few]) / (many - few) for side, by in ms.items()}
    fixed = {side: by[few] - few * step[side] for side, by in ms.items()}
    print(f"CPU ms per client-round, {threads} thread(s), {clients} clients, MLP 784-64-10, batches of {BATCH}")
    print(f"{'':16}" + "".join(f"{side:>12}" for side in ms))
    rows = {f"{n} steps": {side: by[n] for side, by in ms.items()} for n in counts}
    for label, values in {**rows, "fixed": fixed, "per step": step}.items():
        print(f"{label:16}" + "".join(f"{values[side]:12.2f}" for side in ms))
    print(f"{'fixed over bare':16}" + "".join(f"{fixed[side] - fixed['bare']:12.2f}" for side in ms))
    print(f"{'step over bare':16}" + "".join(f"{step[side] - step['bare']:12.2f}" for side in ms))
    over = {
        f"{side}_{part}_ms": by[side] - by["bare"] for side in SIDES for part, by in (("fixed", fixed), ("step", step))
    }
    return {
        **over,
        "vectorized_speedup": ms["bare"][few] / ms["vectorized"][few],
        "bare_ms": ms["bare"][few],
        **{f"{side}_ms": ms[side][few] for side in SIDES},
        "bare_step_ms": step["bare"],
        "threads": threads,
        "clients": clients,
    }


def main() -> None:
    """Measure and print; the last line is one JSON object, of the first number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="numbers of CPU threads to compare")
    parser.add_argument("--steps", type=int, nargs=2, default=[5, 25], help="the two step counts of a client's turn")
    parser.add_argument("--turns", type=int, default=9, help="turns of each side, at least 1")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in a turn")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="clients of a round")
    arguments = parser.parse_args()
    counts = (min(arguments.steps), max(arguments.steps))
    if (
        min(*arguments.threads, *counts, arguments.turns, arguments.rounds, arguments.clients) < 1
        or counts[0] == counts[1]
    ):
        parser.error("every number must be at least 1, and the two step counts must differ")
    quiet()
    found = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        ms = measure(counts, arguments.turns, arguments.rounds, arguments.clients)
        found.append(report(counts, ms, threads, arguments.clients))
        print()
    others = {f"threads_{f['threads']:.0f}": f for f in found[1:]}
    print(json.dumps({**{k: round(v, 4) for k, v in found[0].items()}, **others}))


if __name__ == "__main__":
    main()
