"""FedMITR and DeepInversion: banks with masks, relabelled students, and a server that sees nothing but uploads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation.test_uploads import guard
from federation.tiny import CPU, Consecutive, Given, same
from torch import Tensor

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.examples import TensorExamples
from fl_lightning.federation.generation import SamplePictures
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.recorder import Recorder
from fl_lightning.methods import DeepInversion, FedAvg, FedMITR
from fl_lightning.methods.base import Fit, Method, Predict, Training
from fl_lightning.models import MLP, ResNet8, SparseViT
from fl_lightning.rng import torch_generator
from fl_lightning.synthesis.inversion import label_plan
from fl_lightning.tasks import ClassificationTask

SHAPE, CLASSES, SIZES = (1, 8, 8), 3, (9, 12, 7)
SMALL: dict[str, Any] = {"images_per_client": 4, "batch": 3, "iterations": 3, "student": Training(3, 5)}
SPARSE: dict[str, Any] = {**SMALL, "events": [1, 2], "ratios": [0.25, 0.4]}  # 16, 12, 7 patches


def examples(count: int, owner: str) -> TensorExamples:
    """Noise with a brighter row of patches for each class."""
    draw = torch_generator(0, owner)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    images = torch.rand(count, *SHAPE, generator=draw) * 0.5
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 2 * label : 2 * label + 2] += 0.5
    return TensorExamples(images, labels)


class Vit(SparseViT):
    """A ViT of 16 patches in float64, with a head that is not zero."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__(input_shape, num_classes, patch_size=2, embed_dim=8, depth=2, num_heads=2)
        self.double()
        for name, value in self.named_parameters():
            value.data += 0.2 * torch.randn(value.shape, generator=torch_generator(0, name)).double()

    def _before_last(self, input: Tensor, *arguments: Any) -> Tensor:
        return super()._before_last(input.double(), *arguments)

    def forward(self, input: Tensor, keep: Tensor | None = None, dense_embedding: bool = False) -> Tensor:
        return super().forward(input.double(), keep, dense_embedding)


def federation(
    method: Method, network: Any = Vit, sizes: Sequence[int] = SIZES, lr: float = 0.05, **options: Any
) -> FederationLoop:
    source = Given(examples(sum(sizes), "train"), examples(20, "test"), CLASSES)
    module = FederatedDataModule(source, Consecutive(tuple(sizes)), len(sizes), batch_size=4, val_fraction=0)
    task = ClassificationTask(network, lambda p: torch.optim.SGD(p, lr=lr), mean=[0.4], std=[0.3])
    loop = FederationLoop(**{"progress": False, "validate": False, "num_threads": None, **options})
    loop.assemble(method, task, module, CPU, 0)
    return loop


def fitted(method: Method, *arguments: Any, **options: Any) -> FederationLoop:
    loop = federation(method, *arguments, **options)
    loop.fit()
    return loop


def requests(loop: FederationLoop) -> list[Fit | Predict]:
    """What the server asks for, noted as it does."""
    seen: list[Fit | Predict] = []
    execute = loop.participant.execute

    def noting(request: Fit | Predict, *owner: object) -> Any:
        if owner == (1, "server"):
            seen.append(request)
        return execute(request, *owner)

    loop.participant.execute = noting  # type: ignore[method-assign]
    return seen


# ---- degenerate cases


def test_without_events_it_is_deep_inversion() -> None:
    shared = {**SMALL, "tv": 1e-3, "batch_norm": 0.0, "jitter": 0.2}
    adam = lambda p: torch.optim.Adam(p, lr=0.1)  # noqa: E731
    mitr = fitted(FedMITR(events=[], ratios=[], inversion_optimizer=adam, **shared))
    deep = fitted(DeepInversion("ce", inversion_optimizer=adam, **shared))
    assert same(mitr.method.state_dict(), deep.method.state_dict())
    assert mitr.method.bank.columns == {}  # type: ignore[attr-defined]
    kd = fitted(DeepInversion("kd", inversion_optimizer=adam, **shared))
    assert same(kd.method.bank.state_dict(), deep.method.bank.state_dict())  # type: ignore[attr-defined]
    assert not same(kd.method.student, deep.method.student)  # type: ignore[attr-defined]


@pytest.mark.parametrize("weighted", [True, False])
def test_a_student_that_takes_no_step_is_one_shot_fedavg(weighted: bool) -> None:
    still = {**SPARSE, "student": Training(3, 5, lr=0.0)}
    loop = fitted(FedMITR(init="fedavg", weighted=weighted, **still))
    assert same(loop.method.student, loop.method.start)  # type: ignore[attr-defined]
    if weighted:
        averaged = fitted(FedAvg(1))
        assert loop.history[-1]["global/loss"] == pytest.approx(averaged.history[-1]["global/loss"], abs=1e-9)


# ---- the student, against a plain loop


def plain_logits(state: dict[str, Tensor], images: Tensor, keep: Tensor | None = None) -> Tensor:
    """Class scores by timm's own blocks on tokens that are picked after the embedding."""
    network = _Halves(SparseViT(SHAPE, CLASSES, patch_size=2, embed_dim=8, depth=2, num_heads=2).double().model)
    named = {name.removeprefix("network."): value for name, value in state.items()}
    tokens = torch.func.functional_call(network, named, (((images - 0.4) / 0.3).double(), True))
    if keep is not None:
        tokens = torch.stack([row[[0, *(kept + 1).tolist()]] for row, kept in zip(tokens, keep, strict=True)])
    return torch.func.functional_call(network, named, (tokens, False))


class _Halves(torch.nn.Module):
    """A ViT of timm, cut where its tokens enter the first block."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, embed: bool) -> Tensor:
        model = self.model
        return model._pos_embed(model.patch_embed(x)) if embed else model.head(model.norm(model.blocks(x))[:, 0])


def kl(z: Tensor, v: Tensor, t: float) -> Tensor:
    p, q = (z / t).softmax(1), (v / t).softmax(1)
    return t**2 * (p * (p / q).log()).sum(1).mean()


@pytest.mark.parametrize("view", ["ce", "mix"])
def test_two_clients_against_a_plain_loop_in_float64(view: Any) -> None:
    """Section 3.3, R1, in words that share nothing with the method: the ensemble of two, the complement, SGD."""
    training = Training(4, 5, cosine=True, lr=0.3)
    options = {**SPARSE, "student": training, "lam": 0.7, "temperature": 2.0, "hard_view": view}
    loop = fitted(FedMITR(**options), sizes=(9, 12))
    method: Any = loop.method
    bank = method.bank
    images, labels, keep = bank.inputs.float() / 255, bank.labels, bank.columns["keep"]
    low = torch.tensor([[i for i in range(16) if i not in row] for row in keep.tolist()])
    assert low.shape == (8, 9)

    def ensemble(patches: Tensor) -> Tensor:
        return sum(plain_logits(upload, images, patches) for upload in method.uploads.values()) / 2

    soft_low, soft_high = ensemble(low).float(), ensemble(keep).float()
    weights = {name: value.clone().requires_grad_() for name, value in method.initial.items()}
    shuffle = torch_generator(0, 1, "server", "student", 0, "shuffle")
    step = 0
    while step < 4:
        for at in torch.randperm(8, generator=shuffle).split(5):
            high = plain_logits(weights, images[at], keep[at])
            believed = F.cross_entropy(high, labels[at])
            if view == "mix":
                believed = (believed + kl(soft_high[at].double(), high, 2.0)) / 2
            loss = believed + 0.7 * kl(soft_low[at].double(), plain_logits(weights, images[at], low[at]), 2.0)
            rate = 0.3 * 0.5 * (1 + math.cos(math.pi * step / 4))
            for value, slope in zip(weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True):
                value.data -= rate * slope
            step += 1
    for name, value in weights.items():
        torch.testing.assert_close(method.student[name], value.detach())
    assert loop.history[-1]["server/agreement_soft_low"] == (soft_low.argmax(1) == labels).double().mean()


# ---- the bank


def test_the_bank_holds_every_clients_images_and_what_was_stopped() -> None:
    loop = federation(FedMITR(**SPARSE))
    asked = requests(loop)
    loop.fit()
    method: Any = loop.method
    bank, columns = method.bank, method.bank.columns
    assert len(bank) == 12
    assert columns["keep"].shape == (12, 7)
    assert columns["low"].shape == (12, 9)
    together = torch.cat([columns["keep"], columns["low"]], 1)
    assert torch.equal(together.sort(1).values, torch.arange(16).expand(12, -1))
    assert columns["attention"].shape == (12, 16)
    indices: dict[str, list[int]] = {}
    for origin in bank.provenance:
        indices.setdefault(origin.client, []).extend(origin.indices)
    assert {client: sorted(found) for client, found in indices.items()} == {key: [0, 1, 2, 3] for key in "012"}
    inversions = [request for request in asked if request.task == "inversion"]
    assert [(set(fit.given), len(fit.data)) for fit in inversions] == [  # type: ignore[arg-type]
        ({f"teacher/{client}"}, size) for client in "012" for size in (3, 1)
    ]
    # The image of a number is the one that the fit made from its noise, with the label that it was made for.
    again = federation(FedMITR(**SPARSE))
    result = again.participant.execute(inversions[2], 1, "server")
    wanted = inversions[2].data.labels  # type: ignore[union-attr]
    place = 0
    for origin in bank.provenance:
        for number in origin.indices:
            if origin.client == "1" and number < 3:
                assert wanted[number] == origin.label == bank.labels[place]
                pixels = (result.params["pixels"][number] * 255).round().to(torch.uint8)
                assert torch.equal(bank.inputs[place], pixels)
                kept = result.buffers["mask"][number].nonzero().flatten()
                assert torch.equal(columns["keep"][place], kept)
                assert torch.equal(columns["attention"][place], result.buffers["attention"][number])
            place += 1
    assert loop.history[-1]["server/inversion_confidence"] > 0


def test_the_ensembles_images() -> None:
    loop = federation(FedMITR(teacher="ensemble", combine="mean", **SPARSE))
    asked = requests(loop)
    loop.fit()
    method: Any = loop.method
    assert len(method.bank) == 12
    assert {origin.client for origin in method.bank.provenance} == {"ensemble"}
    inversions = [request for request in asked if request.task == "inversion"]
    assert all(set(fit.given) == {"teacher/0", "teacher/1", "teacher/2"} for fit in inversions)
    assert loop.participant.tasks["inversion"].combine == "probs"


@pytest.mark.parametrize("teacher", ["per_client", "ensemble"])
@pytest.mark.parametrize("source", ["client_head", "client_counts"])
def test_where_labels_come_from(source: Any, teacher: Any) -> None:
    loop = federation(FedMITR(label_source=source, teacher=teacher, **{**SPARSE, "images_per_client": 20, "batch": 60}))
    everybody, division = loop.data._divided["train"]
    everybody.labels[division.indices["1"]] = 2  # a client of one class
    asked = requests(loop)
    loop.fit()
    method: Any = loop.method
    wants = source == "client_counts"
    assert method.uplink(1).keys() == ({"model", "counts"} if wants else {"model"})
    plans = [request.data.labels for request in asked if request.task == "inversion"]  # type: ignore[union-attr]
    if wants and teacher == "per_client":
        assert set(plans[1].tolist()) == {2} < set(plans[0].tolist())
    if not wants:
        noise = (torch.randn(256, *SHAPE, generator=torch_generator(0, 1, "server", "prior")) * 0.5 + 0.5).clamp(0, 1)
        scores = torch.stack([plain_logits(method.uploads[client], noise) for client in "012"])
        scores = scores[1:2] if teacher == "per_client" else scores
        name = "1" if teacher == "per_client" else "ensemble"
        count = 20 if teacher == "per_client" else 60
        owner = torch_generator(0, 1, "server", "labels", 0, name)
        expected = label_plan("client_head", count, CLASSES, owner, logits=scores.mean(0).detach())
        assert torch.equal(plans[1 if teacher == "per_client" else 0], expected)


def test_a_client_may_be_called_ensemble() -> None:
    loop = federation(FedMITR(label_source="client_counts", **SPARSE))
    method: Any = loop.method
    method.counts = {"ensemble": torch.tensor([0, 0, 9]), "other": torch.tensor([9, 9, 0])}
    assert method.labels(SimpleNamespace(seed=0, round=1), "ensemble", 8, 0).tolist() == [2] * 8


# ---- alternation


def test_epochs_alternate_and_the_student_is_the_rival_of_the_next() -> None:
    training = Training(7, 5, cosine=True, lr=0.1)
    options = {**SMALL, "student": training, "images_per_client": 6, "batch_norm": 0.0}
    loop = federation(DeepInversion("kd", competition=0.5, epochs=3, **options))
    asked = requests(loop)
    loop.fit()
    kinds = [f"{type(request).__name__} {request.task}" for request in asked]
    assert kinds == [*["Fit inversion"] * 3, "Predict ensemble", "Fit model"] * 3
    students = [request for request in asked if isinstance(request, Fit) and request.task == "model"]
    inversions = [request for request in asked if request.task == "inversion"]
    assert [len(fit.data) for fit in students] == [6, 12, 18]
    assert [fit.overrides["max_steps"] for fit in students] == [1, 2, 4]  # 7 in proportion to 1, 2, 3
    assert [[c.done for c in fit.callbacks if hasattr(c, "done")] for fit in students] == [[0], [1], [3]]
    method: Any = loop.method
    assert same(inversions[0].given["student"], method.initial)
    assert same(inversions[3].given["student"], students[1].start)
    assert not same(inversions[6].given["student"], students[1].start)
    assert {origin.indices for origin in method.bank.provenance if origin.client == "0"} != set()
    found = sorted(i for origin in method.bank.provenance if origin.client == "0" for i in origin.indices)
    assert found == list(range(6))
    soft = students[2].data.extras(torch.arange(18))["soft_high"]
    assert torch.equal(soft[:6], students[0].data.extras(torch.arange(6))["soft_high"])


def test_batch_norm_statistics_are_for_networks_that_have_them() -> None:
    network = lambda shape, classes: ResNet8(shape, classes, width=2, norm="batch")  # noqa: E731
    loop = fitted(DeepInversion(**SMALL), network)
    assert loop.history[-1]["server/inversion_loss"] > 0
    with pytest.raises(ValueError, match=r"batch_norm is 10\.0; it must be 0 for Vit"):
        federation(DeepInversion(**SMALL))


# ---- the federation


def test_the_server_touches_no_client_data_and_takes_no_client_step() -> None:
    loop = federation(FedMITR(**SPARSE))
    closed = guard(loop)
    loop.fit()
    assert closed == [True]
    method: Any = loop.method
    row = loop.history[-1]
    weights = sum(value.numel() * value.element_size() for value in method.initial.values())
    assert row["round/clients"] == 3
    assert 3 * weights < row["comm/bytes_up"] < 3 * (weights + 150 * len(method.initial))


def test_resume_and_uploads(tmp_path: Path) -> None:
    loop = federation(FedMITR(label_source="client_counts", **SPARSE), save_uploads=True)
    loop.fit(tmp_path)
    again = federation(FedMITR(label_source="client_counts", **SPARSE))
    again.fit(tmp_path / "b", tmp_path / "checkpoints" / "round_00001")
    assert same(again.method.state_dict(), loop.method.state_dict())
    read = fitted(FedMITR(label_source="client_counts", **SPARSE), uploads=str(tmp_path / "uploads"))
    assert same(read.method.state_dict(), loop.method.state_dict())


def test_pictures_of_what_was_kept(tmp_path: Path) -> None:
    callbacks = [Recorder(tmp_path), SamplePictures(3)]
    loop = federation(FedMITR(**SPARSE), callbacks=callbacks)
    loop.fit(tmp_path)
    written = sorted(path.name for path in tmp_path.glob("samples*.png"))
    assert written == ["samples.png", "samples_masks.png"]
    (tmp_path / "samples.png").unlink()
    again = federation(FedMITR(**SPARSE), callbacks=[Recorder(tmp_path), SamplePictures(3)])
    again.fit(None, tmp_path / "checkpoints" / "round_00001")
    assert not (tmp_path / "samples.png").exists()  # they were drawn in the round that made the images
    dense = tmp_path / "dense"
    dense.mkdir()
    federation(DeepInversion(**{**SMALL, "batch_norm": 0.0}), callbacks=[Recorder(dense), SamplePictures()]).fit()
    assert [path.name for path in dense.glob("samples*.png")] == ["samples.png"]
    with pytest.raises(ValueError, match=r"SamplePictures\.grid is 0; it must be at least 1"):
        SamplePictures(0)


@pytest.mark.parametrize("reading", ["r2", "r3"])
@pytest.mark.parametrize("view", ["ce", "kd"])
def test_other_readings_run(reading: Any, view: Any) -> None:
    loop = fitted(FedMITR(reading=reading, hard_view=view, **SPARSE))
    assert loop.history[-1]["server/student_loss"] > 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"images_per_client": 0}, "images_per_client is 0; it must be a multiple of epochs, 1"),
        ({"images_per_client": 5, "epochs": 2}, "images_per_client is 5; it must be a multiple of epochs, 2"),
        ({"batch": 0}, "batch is 0; it must be at least 1"),
        ({"iterations": 0}, "iterations is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"teacher": "all"}, "teacher is 'all'; allowed: 'per_client', 'ensemble'"),
        (
            {"label_source": "guess"},
            "label_source is 'guess'; allowed: 'uniform', 'balanced', 'client_head', 'client_counts'",
        ),
        ({"teacher": "ensemble", "combine": "product"}, "combine is 'product'; an ensemble can be inverted as"),
        ({"events": [3], "ratios": []}, r"events are \[3\] and ratios \[\]"),
        ({"iterations": 200}, r"iterations 200; event 200 would never come"),
        ({"reading": "r9"}, "reading is 'r9'"),
    ],
)
def test_wrong_arguments(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedMITR(**argument)


def test_wrong_arguments_of_others() -> None:
    with pytest.raises(ValueError, match="student_loss is 'mse'; allowed: 'ce', 'kd'"):
        DeepInversion("mse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr is -1; it must be at least 0"):
        Training(1, 1, lr=-1)


def test_networks_that_have_no_patches_are_refused() -> None:
    with pytest.raises(ValueError, match="MLP cannot leave out patches"):
        federation(FedMITR(), MLP)
    with pytest.raises(ValueError, match="reading is 'r2', but MLP has no patch tokens"):
        federation(FedMITR(events=[], ratios=[], reading="r2"), MLP)
    with pytest.raises(ValueError, match="of 16 patches they leave"):
        federation(FedMITR(events=[1], ratios=[0.97]))
