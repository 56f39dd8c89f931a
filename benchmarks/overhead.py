"""What a client's turn costs beyond its arithmetic: the federation loop against a bare PyTorch loop.

The loop side is `FederationLoop` with aggregation, byte counts, server step and commit; evaluation is off. The bare side
loads the global weights, takes the same SGD steps over the same batches of 10 and adds the update up. Both train an MLP of
50,890 parameters (784-64-10) and a LeNet of 16 channels on 28 x 28 images. Four sides take turns, one round each, within
one run: the bare loop, ours with each client's fit by Lightning's Trainer (``client_loop: trainer``), by the lean loop
(``lean``), and with the cohort's fits together (``engine: vectorized``). What is reported is the least over the turns,
since work beside it can only add: CPU time of this process on one thread for the costs, and for the speed-up the time on
the clock as well, where each of the two has the better of one and two threads.

Where pfl is installed, its simulated backend takes its turns too, over the same examples; with ``--flower``, Flower's
simulation is timed on the clock after these, its start aside. ``--sketches`` adds two loops over stacked clients without a
federation around them: ``vmap`` over ``grad``, and a by-hand pass for the MLP that adds gradients to the weights in place.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --networks mlp --turns 40
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import flower_round_seconds, pfl_rounds
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fl_lightning.cli import quiet
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.sources import FakeImages
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.methods import FedAvg
from fl_lightning.models import MLP, LeNet5
from fl_lightning.tasks import ClassificationTask

BATCH, CLASSES, SHAPE = 10, 10, (1, 28, 28)
NETWORKS: dict[str, Callable[..., nn.Module]] = {"mlp": MLP, "lenet": partial(LeNet5, width=16)}
SIDES: dict[str, dict[str, Any]] = {
    "trainer": {"client_loop": "trainer"},
    "lean": {"client_loop": "lean"},
    "vectorized": {"engine": "vectorized"},
}
Cell = tuple[str, int, int]  # side, steps of a client, threads


class Held(FakeImages):
    """Fake images made once, so that drawing them is not measured."""

    def load(self, *, image_size: int | None, channels: int | None, seed: int):
        from dataclasses import replace

        from fl_lightning.data.examples import TensorExamples

        splits = super().load(image_size=image_size, channels=channels, seed=seed)
        train = splits.train.fetch(torch.arange(len(splits.train)))
        return replace(splits, train=TensorExamples(train, splits.train.labels))


def federation(network: str, steps: int, clients: int, folder: Path | None = None, **options: Any) -> FederationLoop:
    """A loop whose clients take so many steps a round, after its first round; evaluation off."""
    source = Held(CLASSES, image_size=28, channels=1, train_per_class=clients * BATCH * steps // CLASSES)
    data = FederatedDataModule(source, num_clients=clients, batch_size=BATCH, val_fraction=0.0)
    loop = FederationLoop(progress=False, validate=False, num_threads=None, **options)
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 1}
    loop.assemble(FedAvg(1), ClassificationTask(NETWORKS[network]), data, trainer, 0)
    loop.evaluate = lambda **_: {}  # type: ignore[method-assign]
    loop.fit(folder)
    return loop


def another_round(loop: FederationLoop) -> None:
    """One round more."""
    loop.method.rounds = loop.round + 1
    loop._run_round(loop.round + 1)


def bare(network: str, inputs: Tensor, labels: Tensor, clients: int) -> None:
    """The same arithmetic, as one would write it by hand."""
    model = NETWORKS[network](SHAPE, CLASSES)
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


def sketch_vmap(network: str, inputs: Tensor, labels: Tensor, cohort: int) -> None:
    """SGD of stacked clients by ``vmap`` over ``grad``, every client with the same batches."""
    model = NETWORKS[network](SHAPE, CLASSES)
    params = {name: p.detach().expand(cohort, *p.shape).clone() for name, p in model.named_parameters()}

    def loss(at: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, at, ((x - 0.5) / 0.5,)), y)

    for x, y in zip(inputs.split(BATCH), labels.split(BATCH), strict=True):
        x, y = x.expand(cohort, *x.shape).contiguous(), y.expand(cohort, -1).contiguous()
        for name, gradient in vmap(grad(loss))(params, x, y).items():
            params[name].sub_(gradient, alpha=0.1)


@torch.no_grad()
def sketch_by_hand(inputs: Tensor, labels: Tensor, cohort: int) -> None:
    """The same for the MLP alone, its backward pass written out, gradients added to the weights in place."""
    model = MLP(SHAPE, CLASSES)
    w1, b1, w2, b2 = (p.detach().expand(cohort, *p.shape).clone() for p in model.parameters())
    for x, y in zip(inputs.split(BATCH), labels.split(BATCH), strict=True):
        x = ((x.expand(cohort, *x.shape).contiguous() - 0.5) / 0.5).flatten(2)
        hidden = torch.baddbmm(b1[:, None], x, w1.mT).relu_()
        outer = torch.baddbmm(b2[:, None], hidden, w2.mT).softmax(-1)
        outer = (outer - F.one_hot(y, CLASSES)) / BATCH
        inner = torch.bmm(outer, w2).mul_(hidden > 0)
        w2.baddbmm_(outer.mT, hidden, alpha=-0.1)
        b2.sub_(outer.sum(1), alpha=0.1)
        w1.baddbmm_(inner.mT, x, alpha=-0.1)
        b1.sub_(inner.sum(1), alpha=0.1)


def measure(
    network: str, counts: tuple[int, int], turns: int, clients: int, cohort: int, sketches: bool = False
) -> dict[Cell, list[float]]:
    """Least milliseconds per client-round, of CPU and on the clock.

    Args:
        network: A name in `NETWORKS`.
        counts: Two numbers of steps.
        turns: Measurements of each cell.
        clients: Clients of a round, but for the vectorised engine.
        cohort: Clients of a round of the vectorised engine.
        sketches: Time the sketches too.
    """
    draw = torch.Generator().manual_seed(0)
    runs: dict[tuple[str, int], tuple[int, Callable[[], object]]] = {}
    for steps in counts:
        data = torch.rand(steps * BATCH, *SHAPE, generator=draw), torch.arange(steps * BATCH) % CLASSES
        runs["bare", steps] = clients, lambda data=data: bare(network, *data, clients)
        for side, options in SIDES.items():
            size = cohort if side == "vectorized" else clients
            loop = federation(network, steps, size, **options)
            runs[side, steps] = size, lambda loop=loop: another_round(loop)
        if find_spec("pfl") is not None:
            runs["pfl", steps] = clients, pfl_rounds(NETWORKS[network](SHAPE, CLASSES), *data, clients, BATCH)
        if sketches:
            runs["vmap", steps] = cohort, partial(sketch_vmap, network, *data, cohort)
            if network == "mlp":
                runs["by hand", steps] = cohort, partial(sketch_by_hand, *data, cohort)
    both = ("bare", "vectorized", *(side for side in ("vmap", "by hand") if (side, counts[0]) in runs))
    cells = [(*run, 1) for run in runs] + [(side, counts[0], 2) for side in both]
    least: dict[Cell, list[float]] = {}
    for _ in range(turns):
        for side, steps, threads in cells:
            torch.set_num_threads(threads)
            size, run = runs[side, steps]
            run()  # threads and caches as they are for this side
            before = time.process_time(), time.perf_counter()
            run()
            taken = [
                (now - then) * 1e3 / size
                for now, then in zip((time.process_time(), time.perf_counter()), before, strict=True)
            ]
            known = least.get((side, steps, threads), taken)
            least[side, steps, threads] = [min(pair) for pair in zip(known, taken, strict=True)]
    return least


def report(network: str, counts: tuple[int, int], least: dict[Cell, list[float]]) -> dict[str, float]:
    """Print the table; fixed and per-step parts by a line through the two step counts."""
    few, many = counts
    sides = list(dict.fromkeys(side for side, *_ in least))
    ours = [side for side in sides if side != "bare"]
    cpu = {side: {n: least[side, n, 1][0] for n in counts} for side in sides}
    step = {side: (by[many] - by[few]) / (many - few) for side, by in cpu.items()}
    fixed = {side: by[few] - few * step[side] for side, by in cpu.items()}
    print(f"{network}: CPU ms per client-round, one thread, batches of {BATCH}")
    print(f"{'':16}" + "".join(f"{side:>12}" for side in sides))
    rows = {f"{n} steps": {side: by[n] for side, by in cpu.items()} for n in counts}
    rows |= {
        f"{label} over bare": {s: of[s] - of["bare"] for s in ours} for label, of in (("fixed", fixed), ("step", step))
    }
    for label, values in rows.items():
        print(f"{label:16}" + "".join(f"{values[side]:12.2f}" if side in values else f"{'':12}" for side in sides))
    both = [side for side in sides if (side, few, 2) in least]
    clock = {side: min(least[side, few, threads][1] for threads in (1, 2)) for side in both}
    print(f"{few} steps on the clock, the better of 1 and 2 threads: {clock}")
    over = {
        f"{_key(side)}_{part}_ms": by[side] - by["bare"]
        for side in ours
        for part, by in (("fixed", fixed), ("step", step))
    }
    return {
        **over,
        **{f"{_key(side)}_speedup": clock["bare"] / clock[side] for side in both if side != "bare"},
        "vectorized_speedup_cpu": cpu["bare"][few] / cpu["vectorized"][few],
        **{f"{_key(side)}_ms": by[few] for side, by in cpu.items()},
        "bare_step_ms": step["bare"],
    }


def _key(side: str) -> str:
    return side.replace(" ", "_")


def main() -> None:
    """Measure and print; the last line is one JSON object, of the first network, with the others' inside."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=sorted(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--steps", type=int, nargs=2, default=[5, 25], help="the two step counts of a client's turn")
    parser.add_argument("--turns", type=int, default=15, help="turns of each side, at least 1")
    parser.add_argument("--clients", type=int, default=10, help="clients of a round")
    parser.add_argument("--cohort", type=int, default=50, help="clients of a round of the vectorised engine")
    parser.add_argument("--sketches", action="store_true", help="time stacked clients without a federation around them")
    parser.add_argument("--flower", action="store_true", help="time Flower's simulation, if installed")
    arguments = parser.parse_args()
    counts = (min(arguments.steps), max(arguments.steps))
    if min(*counts, arguments.turns, arguments.clients, arguments.cohort) < 1 or counts[0] == counts[1]:
        parser.error("every number must be at least 1, and the two step counts must differ")
    quiet()
    found = []
    for network in arguments.networks:
        least = measure(network, counts, arguments.turns, arguments.clients, arguments.cohort, arguments.sketches)
        figures = report(network, counts, least)
        if arguments.flower and find_spec("flwr") is not None:
            draw = torch.Generator().manual_seed(0)
            data = torch.rand(counts[0] * BATCH, *SHAPE, generator=draw), torch.arange(counts[0] * BATCH) % CLASSES
            make = partial(NETWORKS[network], SHAPE, CLASSES)
            seconds = flower_round_seconds(make, *data, arguments.clients, BATCH, arguments.turns)
            figures["flower_ms"] = min(seconds) * 1e3 / arguments.clients
            print(f"Flower, {counts[0]} steps on the clock, ms per client-round: {figures['flower_ms']:.2f}")
        found.append({k: round(v, 4) for k, v in figures.items()})
        print()
    print(json.dumps({**found[0], **dict(zip(arguments.networks[1:], found[1:], strict=True))}))


if __name__ == "__main__":
    main()
