"""A run killed within a training goes on at the step where it was, and ends as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation.tiny import CPU, SHAPE, Given, federation, normalised, numbers, same, sgd
from methods import test_feddtl as feddtl
from methods import test_federated_factory as factories
from methods import test_fedmitr as fedmitr
from torch import Tensor, nn

from fl_lightning.callbacks.generator_pretraining import GeneratorPretraining
from fl_lightning.data.augmentation import HorizontalFlip
from fl_lightning.federation import journal as journals
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.record_privacy import RecordPrivacy
from fl_lightning.federation.state import CheckpointFolder
from fl_lightning.methods import (
    DENSE,
    SCAFFOLD,
    CoBoosting,
    FedAvg,
    FedDTL,
    FederatedFactory,
    FedFTG,
    FedMITR,
    FedNSAM,
    FedSAM,
    FedSpeed,
    MoFedSAM,
    NoiseDistillation,
)
from fl_lightning.methods.base import Training
from fl_lightning.models.clip import LoRA
from fl_lightning.models.edm2 import EDM2UNet
from fl_lightning.tasks.base import FederatedTask
from fl_lightning.tasks.diffusion import DiffusionTask
from fl_lightning.tasks.generator import CVAETask, GaussianTask


class Killed(BaseException):
    """As kill -9: nobody catches it."""


class Steps:
    """Counts the steps of trainings, and ends the run within one: the weights have moved, nothing else has been done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken, self.last = 0, -1
        given = FederatedTask.optimizer_step

        def step(task: FederatedTask, *arguments: Any) -> None:
            given(task, *arguments)
            self.taken += 1
            if self.taken == self.last:
                raise Killed

        monkeypatch.setattr(FederatedTask, "optimizer_step", step)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def run(make: Callable[[], FederationLoop], folder: Path, steps: Steps, kill: int = -1, journal: bool = True) -> Any:
    """A run from its newest checkpoint, if it has one, and how many steps it took."""
    loop = make()
    loop.journal_seconds = 0.0 if journal else None
    steps.taken, steps.last = 0, kill
    kept = CheckpointFolder(folder / "checkpoints").list()
    try:
        loop.fit(folder, kept[-1] if kept else None, {"config_hash": "a"})
    except Killed:
        assert kill > 0
    return loop, steps.taken


def assert_as(loop: FederationLoop, expected: FederationLoop) -> None:
    assert numbers(loop) == numbers(expected)
    assert same(loop.method.state_dict(), expected.method.state_dict())
    assert same(loop.memory.state_dict(), expected.memory.state_dict())


def dropping(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Dropout draws from the global generator, BatchNorm remembers."""
    layers = nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, classes)
    return nn.Sequential(*layers).double()


def single_dropping(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return dropping(shape, classes).float()


def averaging(method: Any, optimizer: Any = None, **options: Any) -> FederationLoop:
    trainer = {"max_epochs": 2, **options.pop("trainer", {})}
    optimizer = optimizer or sgd(momentum=0.9)
    return federation(method, (8, 9), network=dropping, optimizer=optimizer, trainer=trainer, batch_size=3, **options)


def private() -> FederationLoop:
    pytest.importorskip("opacus")
    privacy = RecordPrivacy(clip=1.0, noise_multiplier=0.5, delta=0.01)
    options = {"optimizer": sgd(momentum=0.9), "trainer": {"max_epochs": 2}, "batch_size": 2}
    return federation(FedAvg(1), (7, 5), record_privacy=privacy, **options)


def student(**options: Any) -> FederationLoop:
    """A student on noise, whose rate falls along a cosine."""
    return single(NoiseDistillation(images=10, student=Training(5, 4, cosine=True), **options))


def single(method: Any, sizes: tuple[int, ...] = (6, 6), **options: Any) -> FederationLoop:
    """A federation in float32."""
    data = {"data_options": {"dtype": torch.float32}, "network": factories.linear}
    return federation(method, sizes, **{**data, **options})


GENERATOR: dict[str, Any] = {"images": 12, "latent": 3, "width": 2, "student": Training(8, 4)}


def inversion(**options: Any) -> FederationLoop:
    small = {"images_per_client": 4, "batch": 2, "iterations": 5, "student": Training(6, 3, cosine=True)}
    sparse = {"events": [1, 3], "ratios": [0.25, 0.4]}
    return fedmitr.federation(FedMITR(epochs=2, **{**small, **sparse, **options}), sizes=(5, 4))


def factory(generator: Any, sizes: tuple[int, ...] = (5, 4), **options: Any) -> FederationLoop:
    training = {"training": Training(5, 4), "samples_per_class": 3, "classifier": Training(3, 4, cosine=True)}
    return single(FederatedFactory("server", generator, **training, **options), sizes)


def unet(shape: tuple[int, int, int], label_dim: int = 0) -> nn.Module:
    return EDM2UNet(shape, label_dim, width=4, multipliers=(1,), dropout=0.1)


def diffusion(**options: Any) -> FederationLoop:
    pretraining = [GeneratorPretraining(0.1, ramp_steps=4, reference_batches=2, grid=1, every=2, **options)]
    return factory(DiffusionTask(unet, steps=2), (8,), pretraining=pretraining)


def stages() -> FederationLoop:
    """Supervised in the first local epoch, reinforced in the next ones, against a policy that is frozen once."""
    method = FedDTL(rounds=1, schedule="within_round", sft_epochs=1, rl_epochs=2, old_policy="round", mix="kl")
    return feddtl.make_loop(method, feddtl.make_data(shots=5), lora=LoRA(rank=2, last_blocks=1, dropout=0.1))


KINDS: dict[str, Callable[[], FederationLoop]] = {
    "momentum, dropout, BatchNorm": lambda: averaging(FedAvg(2)),
    "Adam and augmentation": lambda: averaging(
        FedAvg(2), lambda p: torch.optim.Adam(p, 0.01), data_options={"augmentation": [HorizontalFlip()]}
    ),
    "bf16, clipped": lambda: averaging(FedAvg(2), trainer={"precision": "bf16-mixed", "gradient_clip_val": 0.5}),
    "SCAFFOLD": lambda: averaging(SCAFFOLD(rounds=2)),
    "FedSAM": lambda: averaging(FedSAM(rounds=2)),
    "FedNSAM": lambda: averaging(FedNSAM(rounds=2)),
    "MoFedSAM": lambda: averaging(MoFedSAM(rounds=2)),
    "FedSpeed": lambda: averaging(FedSpeed(rounds=2)),
    "record privacy": private,
    "student": student,
    "a student's head": lambda: student(trainable="head"),
    "DENSE": lambda: single(DENSE(**GENERATOR, epochs=2, generator_steps=4), network=single_dropping),
    "FedFTG": lambda: single(FedFTG(**GENERATOR, iterations=3)),
    "Co-Boosting": lambda: single(CoBoosting(**GENERATOR, epochs=2, generator_steps=4)),
    "sparse inversion": inversion,
    "inversion as SMI does": lambda: inversion(freeze="smi_compat", reading="r2", hard_view="kd"),
    "diffusion factory": diffusion,
    "CVAE factory": lambda: factory(CVAETask(2, (5,))),
    "Gaussian factory": lambda: factory(GaussianTask()),
    "stages of a policy": stages,
}


LONG = ("diffusion factory", "stages of a policy", "sparse inversion", "inversion as SMI does")  # one kill each


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", KINDS)
def test_killed_within_a_training_it_goes_on_there_and_ends_as_if_nothing_had_been(
    kind: str, tmp_path: Path, steps: Steps
) -> None:
    expected, count = run(KINDS[kind], tmp_path / "whole", steps, journal=False)
    for kill in (count // 2 + 1,) if kind in LONG else (2, count // 2, count - 1):
        folder = tmp_path / str(kill)
        run(KINDS[kind], folder, steps, kill)
        loop, taken = run(KINDS[kind], folder, steps)
        assert_as(loop, expected)
        assert taken == count - kill + 1  # the one that it was in
        assert not (folder / "journal").exists()
