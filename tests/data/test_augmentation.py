"""Augmentation changes what a client trains on, by draws that the fit owns, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federation.tiny import CPU, data, examples, federation, numbers, same, sgd, task
from torch import Tensor, nn

from fl_lightning.data.augmentation import Augmentation, HorizontalFlip, RandomCrop, augment, draw
from fl_lightning.data.examples import Examples, TensorExamples
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.participant import BatchLoader, Participant
from fl_lightning.methods import FedAvg, Method
from fl_lightning.methods.base import Client, ClientProgram, Fit, Message, Predict, Server, Steps
from fl_lightning.tasks import ClassificationTask
from fl_lightning.tasks.base import Batch

BOTH: list[Augmentation] = [RandomCrop(1), HorizontalFlip()]


def batch(count: int = 500, size: int = 6) -> Tensor:
    return torch.rand(count, 2, size, size, generator=torch.Generator().manual_seed(0)) + 0.1


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- the functions


def test_random_crops_are_windows_of_the_padded_image_and_all_occur() -> None:
    images, crop = batch(), RandomCrop(2)
    cropped = crop(images, draw([crop], len(images), rng()))
    padded = torch.nn.functional.pad(images, [2] * 4)
    windows = torch.stack([padded[:, :, y : y + 6, x : x + 6] for y in range(5) for x in range(5)], 1)
    matches = (windows == cropped[:, None]).all((2, 3, 4))
    assert matches.sum(1).tolist() == [1] * len(images)
    assert matches.sum(0).min() >= 5  # 20 expected
    # The largest number below 1 is in the last place, the smallest in the first.
    corners = crop(images[:2], torch.tensor([[1 - 2**-24, 0.0], [0.0, 1 - 2**-24]]))
    assert torch.equal(corners, torch.stack([windows[0, 20], windows[1, 4]]))


def test_flips_are_drawn_per_image() -> None:
    images = batch()
    flipped = HorizontalFlip()(images, draw([HorizontalFlip()], len(images), rng()))
    turned = (flipped == images.flip(-1)).all((1, 2, 3))
    assert torch.equal(flipped[~turned], images[~turned])
    assert turned.float().mean().item() == pytest.approx(0.5, abs=0.07)
    for probability, expected in ((0.0, images), (1.0, images.flip(-1))):
        flip = HorizontalFlip(probability)
        assert torch.equal(flip(images, draw([flip], len(images), rng())), expected)


def test_changes_follow_one_another_each_with_its_own_numbers() -> None:
    images, draws = batch(), draw(BOTH, 500, rng())
    assert draws.shape == (500, 3)
    expected = BOTH[1](BOTH[0](images, draws[:, :2]), draws[:, 2:])
    assert torch.equal(augment(BOTH, images, draws), expected)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: RandomCrop(0), "padding is 0; it must be at least 1"),
        (lambda: HorizontalFlip(1.5), r"probability is 1\.5; it must be in \[0, 1\]"),
    ],
)
def test_wrong_values_are_refused(make: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()


# ---- who is augmented


@pytest.mark.parametrize("world", [2, 3])
def test_devices_change_an_image_alike(world: int) -> None:
    own = examples(11).select(range(11))
    own.augmentation = tuple(BOTH)

    def load(rank: int = 0, world: int = 1) -> list[Batch]:
        return list(BatchLoader(own, 4, rng(), rank, world, rng(1)))

    shares = [load(rank, world) for rank in range(world)]
    for number, whole in enumerate(load()):
        for rank, share in enumerate(shares):
            expected = whole.inputs[rank::world]
            assert torch.equal(share[number].inputs[: len(expected)], expected)


def test_the_training_examples_of_clients_carry_it_and_so_do_their_views() -> None:
    module = data((7, 12, 5), augmentation=BOTH)
    for client in module.info.clients:
        assert module.train(client).augmentation == tuple(BOTH)
        assert module.train(client).select([0, 1]).augmentation == tuple(BOTH)
        assert module.train(client).of_classes([0]).augmentation == tuple(BOTH)
        assert module.val(client).augmentation == module.test(client).augmentation == ()
    assert module.server_val().augmentation == module.test_sets()["global"].augmentation == ()
    assert module.train("0").source.augmentation == ()  # other views of the set are left alone
    assert data((7, 12, 5)).train("0").augmentation == ()


class Recording(ClassificationTask):
    """Notes the inputs that it is trained on and asked about, and keeps activations of everything."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__(
            lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double(), sgd(), [0.0], [1.0]
        )
        self.keeps = keeps
        self.trained: list[Tensor] = []
        self.asked: list[Tensor] = []
        self.asked_for: list[Examples] = []

    def cached(self, examples: Examples) -> Examples | None:
        self.asked_for.append(examples)
        return examples if self.keeps else None

    def loss(self, batch: Batch) -> Tensor:
        assert not self.keeps or not self.inputs_are_cached
        self.trained.append(batch.inputs.clone())
        return super().loss(batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert self.inputs_are_cached == self.keeps
        self.asked.append(batch.inputs.clone())
        return super().predict_step(batch, batch_idx)


class Asking(FedAvg):
    """FedAvg whose clients ask about their training examples too, and whose server trains on examples of its own."""

    def client(self) -> ClientProgram:
        outer = super().client()

        class Program(ClientProgram):
            def update(self, client: Client, message: Message) -> Steps:
                yield Predict("model", client.train)
                return (yield from outer.update(client, message))

        return Program()

    def server_update(self, round: int, total: Any, server: Server) -> Any:
        server.fit(Fit("model", examples(30, 2), self.state()))
        return super().server_update(round, total, server)


def recorded(method: Method, augmentation: list[Augmentation] | None, keeps: bool = False) -> tuple[Recording, Any]:
    loop = FederationLoop(progress=False, num_threads=None)
    recording, module = Recording(keeps), data((12,), 30, augmentation=augmentation)
    loop.assemble(method, recording, module, CPU, 0)
    loop.fit()
    return recording, module


def rows(inputs: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in inputs}


def test_only_a_clients_fit_is_augmented() -> None:
    method = Asking(rounds=2)
    recording, module = recorded(method, [HorizontalFlip(1.0)])
    own = module.train("0").fetch(torch.arange(12))
    flipped, server = rows(own.flip(-1)), rows(examples(30, 2).inputs)
    assert [rows(inputs) for inputs in recording.trained] == [flipped, server, flipped, server]
    asked = [rows(inputs) for inputs in recording.asked]
    assert asked.count(rows(own)) == 2
    assert all(inputs in (rows(own), server) for inputs in asked)  # the test set is the server's set


def test_nothing_augmented_is_kept() -> None:
    recording, _ = recorded(FedAvg(rounds=1), BOTH, keeps=True)
    assert recording.asked_for
    assert all(not one.augmentation for one in recording.asked_for)


def test_every_round_and_epoch_draws_anew_and_a_run_repeats() -> None:
    crop: list[Augmentation] = [RandomCrop(1)]
    first, second = (recorded(FedAvg(rounds=2), crop)[0].trained for _ in range(2))
    assert same(first, second)
    assert rows(first[0]) != rows(first[1])
    own = TensorExamples(batch(8, 2)[:, :1].double(), torch.zeros(8)).select(range(8))
    own.augmentation = tuple(crop)
    loader = BatchLoader(own, 8, None, draws=rng())
    assert rows(next(iter(loader)).inputs) != rows(next(iter(loader)).inputs)  # two epochs
    model = task()
    model.build(data((12,)).info, 0)
    worker = Participant({"model": model}, CPU, 8, 0)
    fits = [worker.execute(Fit("model", own, model.state(), key=(key,)), 1, "0").metrics for key in "ab"]
    assert fits[0] != fits[1]


def test_without_it_nothing_changes_and_neither_do_the_other_draws() -> None:
    def run(augmentation: list[Augmentation] | None) -> FederationLoop:
        loop = federation(FedAvg(rounds=2), data_options={"augmentation": augmentation})
        loop.fit()
        return loop

    plain = run(None)
    for augmentation in ([], [HorizontalFlip(0.0)]):
        other = run(augmentation)
        assert numbers(other) == numbers(plain)
        assert same(other.method.state(), plain.method.state())  # type: ignore[attr-defined]
    assert not same(run(BOTH).method.state(), plain.method.state())  # type: ignore[attr-defined]


def test_a_resumed_run_draws_the_same(tmp_path: Path) -> None:
    def loop(rounds: int) -> FederationLoop:
        return federation(FedAvg(rounds=rounds), data_options={"augmentation": BOTH})

    whole = loop(3)
    whole.fit()
    loop(2).fit(tmp_path)
    resumed = loop(3)
    resumed.fit(tmp_path, tmp_path / "checkpoints" / "round_00002")
    assert same(resumed.method.state(), whole.method.state())  # type: ignore[attr-defined]
    assert numbers(resumed) == numbers(whole)
