"""A run killed within a training goes on at the step where it was, and ends as if nothing had been."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation.test_journal import chain
from federation.tiny import federation, numbers, same, sgd
from lightning.pytorch import Callback
from methods import test_feddtl as feddtl
from methods import test_federated_factory as factories
from methods import test_fedmitr as fedmitr
from safetensors.torch import load
from torch import nn

from fl_lightning.callbacks.generator_pretraining import GeneratorPretraining
from fl_lightning.data.augmentation import HorizontalFlip
from fl_lightning.data.examples import TensorExamples
from fl_lightning.federation import journal as journals
from fl_lightning.federation import snapshot as snapshots
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.participant import BatchLoader
from fl_lightning.federation.record_privacy import RecordPrivacy
from fl_lightning.federation.state import CheckpointError, CheckpointFolder, serialise, unflatten
from fl_lightning.losses.grpo import GRPO
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
    FedSMOO,
    MoFedSAM,
    NoiseDistillation,
)
from fl_lightning.methods.base import Training
from fl_lightning.models.clip import LoRA
from fl_lightning.models.edm2 import EDM2UNet
from fl_lightning.rng import torch_generator
from fl_lightning.tasks import ClassificationTask
from fl_lightning.tasks.base import FederatedTask, Picture
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


class Shown(FederationCallback):
    """Keeps the pictures of rounds."""

    def __init__(self) -> None:
        self.pictures: list[Any] = []

    def on_pictures(self, loop: FederationLoop, pictures: Any) -> None:
        self.pictures += [(key, vars(picture)) for key, own in pictures.items() for picture in own]


def run(make: Callable[[], FederationLoop], folder: Path, steps: Steps, kill: int = -1, journal: bool = True) -> Any:
    """A run from its newest checkpoint, if it has one, and how many steps it took."""
    loop = make()
    loop.callbacks.append(Shown())
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
    seen = [[c.pictures for c in of.callbacks if isinstance(c, Shown)] for of in (loop, expected)]
    assert not all(seen) or same(*seen)


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
    method = FedDTL(
        rounds=1, schedule="within_round", sft_epochs=1, rl_epochs=2, old_policy="round", mix="kl", grpo=GRPO(beta=3.0)
    )
    loop = feddtl.make_loop(method, feddtl.make_data(shots=5), lora=LoRA(rank=2, last_blocks=1, dropout=0.1))
    loop.evaluate = dict  # type: ignore[method-assign]  # takes most of the time
    return loop


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
    "FedSMOO": lambda: averaging(FedSMOO(rounds=2)),  # its rule carries something from step to step
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


# Steps within which to kill, where the second and the last but one are not what is of interest: before and after patches are
# stopped, in the second factory, in the reinforced epoch.
KILLS = {
    "sparse inversion": (5, 6),
    "inversion as SMI does": (6,),
    "diffusion factory": (10,),
    "stages of a policy": (4,),
}
SLOW = ("bf16, clipped", "MoFedSAM", "inversion as SMI does", "CVAE factory", "Co-Boosting")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] if k in SLOW else []) for k in KINDS])
def test_killed_within_a_training_it_goes_on_there_and_ends_as_if_nothing_had_been(
    kind: str, tmp_path: Path, steps: Steps
) -> None:
    expected, count = run(KINDS[kind], tmp_path / "whole", steps, journal=False)
    for kill in KILLS.get(kind, (2, count - 1)):
        folder = tmp_path / str(kill)
        run(KINDS[kind], folder, steps, kill)
        loop, taken = run(KINDS[kind], folder, steps)
        assert_as(loop, expected)
        assert taken == count - kill + 1  # the one that it was in
        assert not (folder / "journal").exists()


@pytest.mark.parametrize("kind", ["student", "a student's head", "FedFTG", "Co-Boosting", "diffusion factory"])
def test_callbacks_of_servers_and_factories_do_the_same_under_lightnings_trainer(kind: str) -> None:
    loops = [KINDS[kind](), KINDS[kind]()]
    loops[0].participant.client_loop, loops[1].participant.client_loop = "lean", "trainer"
    for loop in loops:
        loop.fit()
    assert_as(*loops)


# ---- when one is taken, and what becomes of it


def small(**options: Any) -> FederationLoop:
    """One round of two clients, of six steps each."""
    return averaging(FedAvg(1), **options)


@pytest.fixture(scope="module")
def whole() -> FederationLoop:
    """The run that nobody killed."""
    loop = small()
    loop.fit()
    return loop


def snapshot(folder: Path) -> Path:
    return folder / "journal" / "round_00001.training"


def log(folder: Path) -> Path:
    return snapshot(folder).with_suffix(".log")


def test_none_is_taken_before_a_training_has_lasted(
    tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int]] = []
    given = journals.Journal._replace_training

    def replace(self: Any, turn: str, number: int, request: Any, state: Any) -> None:
        taken.append((steps.taken, state["progress"]["steps"]))
        given(self, turn, number, request, state)

    monkeypatch.setattr(journals.Journal, "_replace_training", replace)
    monkeypatch.setattr(journals.time, "monotonic", lambda: 10.0 * steps.taken)  # a step takes ten seconds
    for seconds, expected in (
        (30.0, [(3, 3), (6, 6), (9, 3), (12, 6)]),
        (40.0, [(4, 4), (10, 4)]),
        (1e9, []),
        (None, []),
    ):
        loop = small(journal_seconds=seconds)
        steps.taken = 0
        loop.fit(tmp_path / str(seconds))
        assert taken == expected
        taken.clear()


def test_a_snapshot_goes_when_the_result_is_written_and_the_next_turn_has_its_own(
    tmp_path: Path, steps: Steps, whole: FederationLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    for kill, client, step in ((4, 0, 3), (3, 0, 5), (2, 1, 0), (2, 1, 1), (1, 1, 1), (5, 1, 5)):
        run(small, tmp_path, steps, kill)
        if not step:
            assert [path.name for path in snapshot(tmp_path).parent.iterdir()] == ["round_00001.log"]
            continue
        assert sorted(path.name for path in snapshot(tmp_path).parent.iterdir()) == [
            "round_00001.log",
            "round_00001.training",
        ]
        entry, _ = next(journals._entries(snapshot(tmp_path)))
        progress = dict(dict(entry.header["tree"]["$map"])["progress"]["$map"])
        assert (entry.header["turn"], progress["steps"]) == (f"client {client}", step)
    loop, taken = run(small, tmp_path, steps)
    assert "round 1 goes on within request 0 of client 1, after step 5" in capsys.readouterr().err
    assert_as(loop, whole)
    assert taken == 1


def test_a_kill_after_the_result_is_written_does_not_bring_the_snapshot_back(
    tmp_path: Path, steps: Steps, whole: FederationLoop
) -> None:
    run(small, tmp_path, steps, 5)
    old = snapshot(tmp_path).read_bytes()
    run(small, tmp_path, steps, 3)  # its last two, and one of the next client's
    snapshot(tmp_path).write_bytes(old)  # as if the file had not been deleted yet
    loop, taken = run(small, tmp_path, steps)
    assert_as(loop, whole)
    assert taken == 6


@pytest.mark.parametrize("where", ["head", "tensors", "end", "all"])
def test_a_damaged_snapshot_is_not_read(
    where: str, tmp_path: Path, steps: Steps, whole: FederationLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    run(small, tmp_path, steps, 5)
    content = bytearray(snapshot(tmp_path).read_bytes())
    if where in ("head", "tensors"):
        content[60 if where == "head" else -5] ^= 1
    snapshot(tmp_path).write_bytes(content[: {"end": -1, "all": 0}.get(where, len(content))])
    loop, taken = run(small, tmp_path, steps)
    assert "damaged" in capsys.readouterr().err
    assert_as(loop, whole)
    assert taken == 12


def test_a_snapshot_of_another_configuration_or_request_is_not_read(
    tmp_path: Path,
    steps: Steps,
    whole: FederationLoop,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(small, tmp_path, steps, 5)
    content = [file(tmp_path).read_bytes() for file in (log, snapshot)]
    kept = CheckpointFolder(tmp_path / "checkpoints").list()
    steps.taken, steps.last = 0, 1
    with pytest.raises(Killed):
        small(journal_seconds=1e9).fit(tmp_path, kept[-1], {"config_hash": "b"})
    assert not log(tmp_path).exists()
    assert not snapshot(tmp_path).exists()
    for file, bytes in zip((log, snapshot), content, strict=True):
        file(tmp_path).write_bytes(bytes)
    given = journals.asked
    monkeypatch.setattr(journals, "asked", lambda request: given(request) + "!")
    loop, taken = run(small, tmp_path, steps)
    assert "is of another request 0 of client 0, which starts over" in capsys.readouterr().err
    assert_as(loop, whole)
    assert taken == 12


def test_a_snapshot_of_another_kind_of_device_is_not_loaded(
    tmp_path: Path,
    steps: Steps,
    whole: FederationLoop,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = snapshots.Snapshots._state

    def state(self: Any, optimizer: Any, done: int) -> dict[str, Any]:
        found = given(self, optimizer, done)
        return {**found, "progress": {**found["progress"], "device": "cuda"}}

    monkeypatch.setattr(snapshots.Snapshots, "_state", state)
    run(small, tmp_path, steps, 5)
    monkeypatch.setattr(snapshots.Snapshots, "_state", given)
    loop, taken = run(small, tmp_path, steps)
    assert "starts over: it was on cuda, and is on cpu" in capsys.readouterr().err
    assert_as(loop, whole)
    assert taken == 12


def test_a_full_disk_ends_the_run_and_the_last_snapshot_survives(
    tmp_path: Path, steps: Steps, whole: FederationLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(small, tmp_path, steps, 4)

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journals.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device; what it held before is still there"):
        run(partial(small, on_client_error="skip"), tmp_path, steps)
    monkeypatch.undo()
    assert snapshot(tmp_path).is_file()
    assert len(list(snapshot(tmp_path).parent.iterdir())) == 2
    loop = small(journal_seconds=0.0)
    loop.fit(tmp_path, CheckpointFolder(tmp_path / "checkpoints").list()[-1], {"config_hash": "a"})
    assert_as(loop, whole)


def test_a_client_that_is_asked_again_starts_over(
    tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = FederatedTask.optimizer_step

    def step(task: FederatedTask, *arguments: Any) -> None:
        if steps.taken == 4 and not failed:
            failed.append(1)
            raise ValueError("the client is away")
        given(task, *arguments)

    monkeypatch.setattr(FederatedTask, "optimizer_step", step)
    loops, failed = [], list[int]()
    for journal in (False, True):
        failed.clear()
        loop, taken = run(partial(small, on_client_error="retry"), tmp_path / str(journal), steps, -1, journal)
        assert taken == 4 + 12
        loops.append(loop)
    assert_as(*loops)


def test_what_a_snapshot_rests_on_is_done_again_and_so_is_the_training(
    tmp_path: Path, steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three fits of the server with one momentum, after those of three clients: nine steps."""
    expected, count = run(chain, tmp_path / "whole", steps, journal=False)
    for damaged in (False, True):
        folder = tmp_path / str(damaged)
        run(chain, folder, steps, count - 4)  # in the second of the server's fits
        if damaged:
            entries = [entry for entry, _ in journals._entries(log(folder)) if entry.header.get("turn") == "server"]
            content = bytearray(log(folder).read_bytes())
            content[entries[0].at + 200] ^= 1
            log(folder).write_bytes(content)
        assert snapshot(folder).is_file()
        capsys.readouterr()
        loop, taken = run(chain, folder, steps)
        assert ("goes on within request 1 of server" in capsys.readouterr().err) is not damaged
        assert_as(loop, expected)
        assert taken == (9 if damaged else 5)


@pytest.mark.parametrize("poisson", [False, True])
def test_a_loader_goes_on_within_a_pass_and_fetches_nothing_twice(poisson: bool) -> None:
    class Noted(TensorExamples):
        augmentation = (HorizontalFlip(),)
        fetched = 0

        def fetch(self, indices: torch.Tensor) -> torch.Tensor:
            self.fetched += len(indices)
            return super().fetch(indices)

    def loader() -> BatchLoader:
        data = Noted(torch.arange(88.0).view(22, 1, 2, 2), torch.arange(22))
        generators = torch_generator(0, "shuffle"), torch_generator(0, "augment")
        return BatchLoader(data, 4, generators[0], draws=generators[1], poisson=poisson)

    whole = loader()
    batches = [*whole, *whole]
    first, again = loader(), loader()
    list(first)  # a pass, and three batches
    pass_ = iter(first)
    for _ in range(3):
        next(pass_)
    state = first.state(3)
    again.load_state({**state, "generators": [generator.clone() for generator in state["generators"]]})
    assert same(list(again), batches[9:])
    rest = sum(len(batch.labels) for batch in batches[9:])
    assert again.examples.fetched == again.served - state["served"] == rest  # type: ignore[attr-defined]


# ---- who does not take part


class Inherits(ClassificationTask):
    """Does not say itself that nothing else is carried; its base cannot know."""


class Silent(Callback):
    """Remembers something, and does not say so."""

    runs_lean = True


class Odd(Callback):
    """Says something that no file keeps."""

    runs_lean = resumes = True

    def fit_state(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


class Forgets(Callback):
    """Does not take back what it says."""

    runs_lean = resumes = True
    seen = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *ignored: Any) -> None:
        self.seen += 1

    def fit_state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_fit_state(self, state: dict[str, Any]) -> None:
        pass


class Heavy(Callback):
    """Needs the Trainer."""


class Counting(nn.Identity):
    """A module that remembers how often it was called."""

    def get_extra_state(self) -> int:
        return 0

    def set_extra_state(self, state: int) -> None:
        pass


def counting(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return nn.Sequential(factories.linear(shape, classes), Counting())


def inheriting() -> FederationLoop:
    loop = small()
    loop.participant.tasks["model"].__class__ = Inherits
    return loop


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (inheriting, "Inherits start over where they are killed because Inherits does not say what it carries"),
        (
            lambda: single(FedAvg(1), (20,), network=counting),
            "Counting has more",
        ),
        (lambda: small(trainer={"callbacks": [Silent()]}), "because Silent does not say what it carries"),
        (lambda: small(trainer={"callbacks": [Odd()]}), "is a lock; tensors and JSON values can be kept"),
        (
            lambda: small(trainer={"callbacks": [Heavy()]}),
            "of the callback Heavy; where it is killed, such a fit starts",
        ),
        (
            lambda: factory(
                DiffusionTask(unet, steps=2), (8,), pretraining=[GeneratorPretraining(stop=lambda *a: False)]
            ),
            "because GeneratorPretraining does not say",
        ),
    ],
)
def test_who_cannot_say_what_is_carried_starts_over_and_a_line_says_so(
    make: Any, reason: str, tmp_path: Path, steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, count = run(make, tmp_path / "whole", steps, journal=False)
    capsys.readouterr()
    run(make, tmp_path, steps, 4)
    assert not snapshot(tmp_path).exists()
    loop, taken = run(make, tmp_path, steps)
    assert_as(loop, expected)
    assert taken == count
    assert capsys.readouterr().err.count(reason) == 2  # once a run


def test_a_part_that_does_not_come_back_is_named_and_nothing_goes_on_with_it(tmp_path: Path, steps: Steps) -> None:
    make = partial(small, trainer={"callbacks": [Forgets()]})
    run(make, tmp_path, steps, 4)
    with pytest.raises(CheckpointError, match="its callbacks says something else after being loaded"):
        run(partial(make, on_client_error="skip"), tmp_path, steps)  # whatever a failing client means: this is none
    assert not snapshot(tmp_path).exists()
    _, taken = run(make, tmp_path, steps)
    assert taken == 12


def test_memory_layout_and_kind_of_container_come_back() -> None:
    wide = torch.arange(24.0).view(2, 3, 4)
    state = {"t": wide.transpose(0, 2), "row": wide[0, 0].expand(5, 4), "pair": (1, [wide, None]), 3: float("nan")}
    tree, tensors = serialise(snapshots._parked(state))
    back = snapshots._placed(unflatten(json.loads(json.dumps(tree)), load(tensors)), torch.device("cpu"))
    assert back["t"].stride() == state["t"].stride()
    assert same({n: back[n] for n in ("t", "row", "pair")}, {n: state[n] for n in ("t", "row", "pair")})
    assert back[3] != back[3]
    assert list(back) == list(state)
    with pytest.raises(TypeError, match="tuples with names"):
        snapshots._parked([Picture("a", 0, wide, wide, ()), torch.topk(wide, 1)])
