"""One-shot distillation on another run's images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from federation.tiny import federation, linear
from torch import Tensor, nn

from fl_lightning.data import bank as banks
from fl_lightning.data.bank import Bank, Provenance
from fl_lightning.federation.callbacks import ExportBank
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.methods import BankDistillation, FederatedFactory, NoiseDistillation
from fl_lightning.methods.base import Training
from fl_lightning.rng import torch_generator
from fl_lightning.tasks import GaussianTask

FLOAT = {"dtype": torch.float32}


def net(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return linear(shape, classes).float()


def drawn(path: Path) -> Bank:
    """A factory's bank, exported by the loop."""
    method = FederatedFactory(
        generator=GaussianTask(),
        training=Training(1, 100),
        samples_per_class=6,
        classifier=Training(1, 8),
        min_examples=2,
    )
    loop = federation(method, network=net, data_options=FLOAT)
    loop.callbacks.append(ExportBank(str(path)))
    loop.fit()
    assert method.bank is not None
    return method.bank


def distilled(path: Path, loss: str, **common: object) -> FederationLoop:
    method = BankDistillation(str(path), loss, student=Training(1, 1000, lr=0.5), **common)  # type: ignore[arg-type]
    loop = federation(method, network=net, data_options=FLOAT)
    loop.fit()
    return loop


@pytest.mark.parametrize("loss", ["kd", "ce"])
def test_a_step_is_the_gradient_step_on_the_other_runs_images(loss: str, tmp_path: Path) -> None:
    """Against plain torch: one full-batch step of SGD from the uploads' average."""
    bank = drawn(tmp_path / "bank.safetensors")
    loop = distilled(tmp_path / "bank.safetensors", loss, init="fedavg")
    method = loop.method
    assert isinstance(method, BankDistillation)
    assert method.bank is not None
    assert torch.equal(method.bank.inputs, bank.inputs)
    assert method.bank.provenance == bank.provenance
    images = (bank.inputs.float() / 255).flatten(1)

    def scores(state: dict[str, Tensor]) -> Tensor:
        weight, bias = (next(v for k, v in state.items() if k.endswith(end)) for end in ("weight", "bias"))
        return images @ weight.T + bias

    student = {name: value.clone().requires_grad_() for name, value in method.start.items()}
    teacher = torch.stack([scores(dict(upload)) for upload in method.uploads.values()]).mean(0)
    if loss == "kd":
        t = method.temperature
        value = (
            t * t * F.kl_div(F.log_softmax(scores(student) / t, 1), F.softmax(teacher / t, 1), reduction="batchmean")
        )
    else:
        value = F.cross_entropy(scores(student), bank.labels)
    value.backward()
    for name, start in student.items():
        assert start.grad is not None
        torch.testing.assert_close(method.student[name], (start - 0.5 * start.grad).detach(), atol=1e-5, rtol=1e-4)
    assert loop.history[-1]["server/agreement_soft"] == pytest.approx(
        float((teacher.argmax(1) == bank.labels).float().mean())
    )


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bank.safetensors"
    with pytest.raises(ValueError, match=r"bank\.safetensors holds no bank"):
        distilled(path, "kd")
    Bank([(Provenance("0", 0, (0,)), torch.rand(1, 3, 2, 2))]).save(path)
    with pytest.raises(ValueError, match=r"images of shape \(3, 2, 2\); the clients' have \(1, 2, 2\)"):
        distilled(path, "kd")
    Bank([(Provenance("0", 7, (0,)), torch.rand(1, 1, 2, 2))]).save(path)
    with pytest.raises(ValueError, match="has class 7; there are 3 classes"):
        distilled(path, "kd")
    with pytest.raises(ValueError, match="student_loss is 'mse'; allowed: 'kd', 'ce'"):
        BankDistillation("x", "mse")  # type: ignore[arg-type]
    loop = federation(NoiseDistillation(4, student=Training(1, 4)), network=net, data_options=FLOAT)
    loop.callbacks.append(ExportBank(str(path)))
    with pytest.raises(ValueError, match="NoiseDistillation has no synthetic images to export"):
        loop.fit()


def test_a_large_bank_lies_in_a_file_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch_generator(0, "test")
    parts = [
        (Provenance(str(run), run % 3, tuple(range(4))), torch.rand(4, 1, 5, 5, generator=draw)) for run in range(6)
    ]
    small = Bank(parts)
    monkeypatch.setattr(banks, "ON_DISK", 250)  # bytes: of the six runs' 600, the first two stay in memory
    opened = []
    given = banks.tempfile.TemporaryFile
    monkeypatch.setattr(banks.tempfile, "TemporaryFile", lambda: opened.append(given()) or opened[-1])
    large = Bank(iter(parts))
    assert len(opened) == 1
    assert opened[0].closed  # the map keeps what it needs
    assert torch.equal(large.inputs, small.inputs)
    assert torch.equal(large.labels, small.labels)
    assert torch.equal(large.fetch(torch.tensor([3, 20])), small.fetch(torch.tensor([3, 20])))
    again = Bank((*large.parts, (Provenance("9", 1, (0,)), torch.ones(1, 1, 5, 5))))  # the next epoch's
    assert torch.equal(again.inputs[:-1], small.inputs)
    assert len(again) == 25
