"""What a local step of each method costs over plain SGD's, through the participant that every run uses, side by side.

    python benchmarks/local_step.py                              # LeNet-5, ResNet-18 and a small ViT; minutes
    python benchmarks/local_step.py --models lenet5 --repeats 9

CPU time of this process, one thread, batches of 50 images of 3 x 32 x 32. The cost of a step is the difference between a
fit of several steps and a fit of one, divided by the steps between, so that what a fit costs once is left out. Methods take
turns within one run; the ratio is of medians. Every method is in its second round, where momenta, control variates and
perturbations are not zero.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fl_lightning.cli import quiet
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.sources import FakeImages
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.methods import (
    SCAFFOLD,
    FedAvg,
    FedCM,
    FedDyn,
    FedGAMMA,
    FedLESAM,
    FedNSAM,
    FedProx,
    FedSAM,
    FedSMOO,
    MoFedSAM,
)
from fl_lightning.models import LeNet5, ResNet18
from fl_lightning.tasks import ClassificationTask

BATCH, CLASSES = 50, 10
METHODS: dict[str, Callable[[], FedAvg]] = {
    "fedavg": lambda: FedAvg(3),
    "fedprox": lambda: FedProx(rounds=3),
    "scaffold": lambda: SCAFFOLD(rounds=3),
    "feddyn": lambda: FedDyn(rounds=3),
    "fedcm": lambda: FedCM(rounds=3),
    "fedlesam": lambda: FedLESAM(rounds=3),
    "fednsam": lambda: FedNSAM(rounds=3),
    "fedsam": lambda: FedSAM(rounds=3),
    "mofedsam": lambda: MoFedSAM(rounds=3),
    "fedgamma": lambda: FedGAMMA(rounds=3),
    "fedsmoo": lambda: FedSMOO(rounds=3),
    "fednsam_local": lambda: FedNSAM(form="local", rounds=3),
}


def vit(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """ViT-Ti of 4 x 4 patches."""
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=num_classes)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "lenet5": LeNet5,
    "resnet18_groupnorm": lambda s, c: ResNet18(s, c, norm="group"),
    "resnet18_batchnorm": lambda s, c: ResNet18(s, c, norm="batch"),
    "vit_tiny": vit,
}


def second_round(make: Callable[[], FedAvg], network: Callable[..., nn.Module], steps: int) -> Callable[[int], float]:
    """A function that takes so many local steps of a method's second round and returns their CPU seconds."""
    data = FederatedDataModule(
        FakeImages(CLASSES, image_size=32, channels=3, train_per_class=BATCH * steps // CLASSES),
        num_clients=1,
        batch_size=BATCH,
        val_fraction=0.0,
    )
    loop = FederationLoop(progress=False, validate=False, num_threads=None)
    trainer: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "max_steps": 1}
    loop.assemble(make(), ClassificationTask(network), data, trainer, 0)
    loop.evaluate = lambda **_: {}  # type: ignore[method-assign]
    loop.folder = loop.facts = None  # type: ignore[assignment]
    loop._run_round(1)
    client, message = loop.engine.client("0", 2), loop.method.broadcast(2)  # type: ignore[attr-defined]
    fit = next(loop.program.update(client, message))

    def take(count: int) -> float:
        request = dataclasses.replace(fit, overrides={**fit.overrides, "max_steps": count})
        started = time.process_time()
        loop.participant.execute(request, 2, "0")
        return time.process_time() - started

    return take


def main() -> None:
    """Measure, print a table, and the same figures as JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--steps", type=int, default=3, help="Steps of the longer fit, at least 2.")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    names = list(dict.fromkeys(["fedavg", *arguments.methods]))
    figures: dict[str, float] = {}
    for model in arguments.models:
        sides = {name: second_round(METHODS[name], MODELS[model], arguments.steps) for name in names}
        taken: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(arguments.repeats):
            for name, take in sides.items():
                taken[name].append((take(arguments.steps) - take(1)) / (arguments.steps - 1))
        plain = statistics.median(taken["fedavg"])
        print(f"\n{model:<20} {'ms a step':>10} {'ratio':>6}")
        for name in names:
            step = statistics.median(taken[name])
            print(f"{name:<20} {step * 1e3:>10.1f} {step / plain:>6.2f}")
            figures |= {f"{model}_{name}_ms": step * 1e3, f"{model}_{name}_ratio": step / plain}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
