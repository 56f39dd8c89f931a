"""What training and sampling of a factory cost: ours, the same-size diffusers backbone, and the bare arithmetic.

    python benchmarks/factory.py                      # 1 x 8 x 8, the pilot's network; minutes
    python benchmarks/factory.py --side 16 --turns 3

"factory" trains through the participant with the `GeneratorPretraining` callback (averaged weights, forced normalisation,
schedule, gradients checked); "bare" is forward-backward of the loss plus Adam over the same network in a plain loop. The
sides take turns within one run. Times are CPU time of this process with one thread, the cost of a step being the
difference of two lengths of a fit, divided by the steps between; the median over turns is reported. The second table is
the greatest error of the samplers on data N(0, 0.5^2), whose exact samples are known.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fl_lightning.callbacks.generator_pretraining import GeneratorPretraining
from fl_lightning.cli import quiet
from fl_lightning.data.examples import DataInfo, TensorExamples
from fl_lightning.federation.participant import Participant
from fl_lightning.methods.base import Fit
from fl_lightning.models.edm2 import DiffusersUNet, EDM2UNet
from fl_lightning.rng import owned_global_rng, torch_generator
from fl_lightning.synthesis.samplers import Sampler, integrate, sample_seeds
from fl_lightning.tasks.base import Batch
from fl_lightning.tasks.diffusion import DiffusionTask

BATCH, IMAGES = 32, 160  # about one class of the digits, in full batches
BACKBONES: dict[str, Callable[..., nn.Module]] = {"edm2": EDM2UNet, "diffusers": DiffusersUNet}


def made(network: Callable[..., nn.Module], side: int) -> DiffusionTask:
    """A task for grey images of this side."""
    task = DiffusionTask(network, steps=18)
    task.build(DataInfo(("one",), (1, side, side), (0,)), 0)
    return task


def cpu(function: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    started = time.process_time()
    function()
    return time.process_time() - started


def fit(task: DiffusionTask, worker: Participant, data: TensorExamples, steps: int) -> None:
    """A factory's training, as a client carries it out."""
    callback = GeneratorPretraining(0.1, ramp_steps=50, reference_batches=400)
    overrides = {"max_steps": steps, "max_epochs": 10**6}
    worker.execute(Fit("generator", data, task.fresh(0), callbacks=(callback,), overrides=overrides), 1, "client")


def bare(task: DiffusionTask, data: TensorExamples, steps: int) -> None:
    """The same arithmetic, as one would write it by hand."""
    task.load(task.fresh(0))
    task.train()
    optimizer = torch.optim.Adam(task.parameters(), lr=0.01, betas=(0.9, 0.99))
    with owned_global_rng(0):
        batches: list[Tensor] = []
        for _ in range(steps):
            batches = batches or list(torch.randperm(len(data), generator=torch_generator(0)).split(BATCH))
            optimizer.zero_grad()
            index = batches.pop(0)
            task.loss(Batch(data.inputs[index], data.labels[index])).backward()
            optimizer.step()


def measure(side: int, steps: tuple[int, int], turns: int, samples: int) -> tuple[dict[str, float], dict[str, float]]:
    """CPU ms of a training step by side, and of a sample by sampler and side: medians over turns."""
    data = TensorExamples(torch.rand(IMAGES, 1, side, side, generator=torch_generator(0)), torch.zeros(IMAGES))
    tasks = {name: made(network, side) for name, network in BACKBONES.items()}
    workers = {
        name: Participant({"generator": t}, {"accelerator": "cpu", "devices": 1, "max_epochs": 1}, BATCH, 0)
        for name, t in tasks.items()
    }
    train: dict[str, Callable[[int], None]] = {}
    for name, task in tasks.items():
        train[f"{name} bare"] = partial(bare, task, data)
        train[f"{name} factory"] = partial(fit, task, workers[name], data)
    seeds = sample_seeds(0, "client", 0, range(samples))
    seen: dict[str, list[float]] = {}
    few, many = steps
    for turn in range(turns + 1):  # the first turn warms up
        for name, run in train.items():
            short, long = cpu(partial(run, few)), cpu(partial(run, many))
            if turn:
                seen.setdefault(f"train {name}", []).append((long - short) / (many - few) * 1e3)
        for name, task in tasks.items():
            for task.sampler in ("heun", "dpm++"):
                spent = cpu(partial(task.sample, seeds)) / samples * 1e3
                if turn:
                    seen.setdefault(f"sample {name} {task.sampler}", []).append(spent)
    medians = {name: statistics.median(values) for name, values in seen.items()}
    return (
        {name.removeprefix("train "): v for name, v in medians.items() if name.startswith("train ")},
        {name.removeprefix("sample "): v for name, v in medians.items() if name.startswith("sample ")},
    )


def oracle_error(sampler: Sampler, steps: int) -> tuple[float, int]:
    """Greatest error on Gaussian data, and the evaluations that it took."""
    calls = 0

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * 0.25 / (sigma.to(x.dtype) ** 2 + 0.25)

    z = torch.randn(64, 1, 8, 8, generator=torch_generator(0), dtype=torch.float64)
    exact = z * 80 * 0.5 / (80**2 + 0.25) ** 0.5
    return float((integrate(denoise, z, sampler, steps) - exact).abs().max()), calls


def main() -> None:
    """Measure and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=8, help="height and width of the images, even")
    parser.add_argument("--steps", type=int, nargs=2, default=[5, 25], help="two lengths of a fit")
    parser.add_argument("--turns", type=int, default=5, help="turns of each side, at least 1")
    parser.add_argument("--samples", type=int, default=64, help="samples drawn at a time, at least 1")
    arguments = parser.parse_args()
    steps = (min(arguments.steps), max(arguments.steps))
    if min(*steps, arguments.turns, arguments.samples, arguments.side) < 1 or steps[0] == steps[1]:
        parser.error("every number must be at least 1, and the two lengths must differ")
    quiet()
    torch.set_num_threads(1)
    train, drawn = measure(arguments.side, steps, arguments.turns, arguments.samples)
    print(f"Training, batches of {BATCH} images of 1 x {arguments.side} x {arguments.side}, CPU time, one thread")
    print(f"{'':20}{'ms a step':>12}{'images/s':>12}{'to bare':>10}")
    for name, ms in train.items():
        print(f"{name:20}{ms:12.2f}{BATCH / ms * 1e3:12.0f}{ms / train[name.split()[0] + ' bare']:10.2f}")
    print(f"\nSampling, 18 steps, {arguments.samples} at a time\n{'':20}{'images/s':>12}")
    for name, ms in drawn.items():
        print(f"{name:20}{1e3 / ms:12.1f}")
    print(
        f"\nGreatest error on Gaussian data\n{'steps':>8}"
        + "".join(f"{s:>10}{'calls':>8}" for s in ("heun", "dpm++", "euler"))
    )
    errors: dict[str, float] = {}
    for count in (18, 50, 100):
        found = {sampler: oracle_error(sampler, count) for sampler in ("heun", "dpm++", "euler")}  # type: ignore[arg-type]
        print(f"{count:8}" + "".join(f"{error:10.4f}{calls:8}" for error, calls in found.values()))
        errors |= {f"{sampler}_{count}_error": round(error, 5) for sampler, (error, _) in found.items()}
    figures = {
        "factory_to_bare": train["edm2 factory"] / train["edm2 bare"],
        "factory_to_diffusers": train["edm2 factory"] / train["diffusers factory"],
        "train_step_ms": train["edm2 factory"],
        "train_images_s": BATCH / train["edm2 factory"] * 1e3,
        "heun_images_s": 1e3 / drawn["edm2 heun"],
        "dpm_images_s": 1e3 / drawn["edm2 dpm++"],
        "diffusers_dpm_images_s": 1e3 / drawn["diffusers dpm++"],
    }
    print()
    print(json.dumps({**{name: round(value, 4) for name, value in figures.items()}, **errors}))


if __name__ == "__main__":
    main()
