"""What data-free one-shot methods share, on the control that distils noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from federation.tiny import federation, linear, same
from torch import Tensor, nn

from fl_lightning.data.examples import TensorExamples
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.losses.distillation import distillation_kl
from fl_lightning.methods import FedAvg, NoiseDistillation, OneShotEnsemble
from fl_lightning.methods.base import Method, Training
from fl_lightning.rng import torch_generator

STUDENT = Training(5, 8)


def single(network: Callable = linear) -> Callable:
    """The network in float32, as images are made in."""
    return lambda shape, classes: network(shape, classes).float()


def small(method: Method, network: Callable = linear) -> FederationLoop:
    return federation(method, network=single(network), data_options={"dtype": torch.float32})


def two_layers(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, classes))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in tensors.values()])


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_gradient_of_the_distillation_loss(temperature: float) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(6, 3, dtype=torch.float64, requires_grad=True), torch.randn(6, 3).double()
    distillation_kl(student, teacher, temperature).backward()
    expected = temperature * ((student / temperature).softmax(1) - (teacher / temperature).softmax(1)) / 6
    torch.testing.assert_close(student.grad, expected.detach())


def test_nothing_is_to_be_learnt_from_oneself() -> None:
    scores = torch.randn(6, 3, requires_grad=True, generator=torch.Generator().manual_seed(1))
    loss = distillation_kl(scores, scores.detach(), 4.0)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert scores.grad is not None
    assert scores.grad.abs().max() < 1e-6


@pytest.mark.parametrize("weighted", [True, False])
def test_a_student_that_takes_no_step_is_one_shot_fedavg(weighted: bool) -> None:
    """With a learning rate of 0 after the upload what is left is the average of the uploads."""
    loop = small(NoiseDistillation(init="fedavg", weighted=weighted, student=STUDENT, images=9))
    loop.fit()
    uploads, sizes = loop.method.uploads, loop.method.sizes  # type: ignore[attr-defined]
    shares = {client: sizes[client] if weighted else 1 for client in uploads}
    mean = sum(share * flat(uploads[client]) for client, share in shares.items()) / sum(shares.values())
    torch.testing.assert_close(flat(loop.method.start), mean)  # type: ignore[attr-defined]
    if weighted:
        averaged = small(FedAvg(1))
        averaged.fit()
        assert loop.history[-1]["start/global/acc"] == averaged.history[-1]["global/acc"]
    assert len(set(sizes.values())) > 1  # else the two means are one


def test_the_student_learns_what_a_plain_loop_learns() -> None:
    loop = small(NoiseDistillation(student=STUDENT, images=12, temperature=2.0, std=0.3))
    loop.fit()
    together = small(OneShotEnsemble("mean_logits"))
    together.fit()
    models = [(m["network.1.weight"], m["network.1.bias"]) for m in together.method.models.values()]  # type: ignore[attr-defined]
    generator = torch_generator(0, 1, "server", "noise")
    noise = torch.randn((12, 1, 2, 2), generator=generator)
    pixels = (0.5 + 0.3 * noise).clamp(0, 1).flatten(1)
    soft = torch.stack([pixels @ weight.T + bias for weight, bias in models]).mean(0)
    weight, bias = (loop.method.initial[f"network.1.{name}"].clone().requires_grad_() for name in ("weight", "bias"))  # type: ignore[attr-defined]
    shuffle = torch_generator(0, 1, "server", "student", "shuffle")
    steps = 0
    while steps < 5:
        for batch in torch.randperm(12, generator=shuffle).split(8):
            if steps == 5:
                break
            scores = pixels[batch] @ weight.T + bias
            loss = 4 * F.kl_div((scores / 2).log_softmax(1), (soft[batch] / 2).softmax(1), reduction="batchmean")
            for parameter, gradient in zip((weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True):
                parameter.data -= 0.1 * gradient
            steps += 1
    student = loop.method.student  # type: ignore[attr-defined]
    torch.testing.assert_close(student["network.1.weight"], weight.detach().to(student["network.1.weight"]))
    torch.testing.assert_close(student["network.1.bias"], bias.detach().to(student["network.1.bias"]))


def test_only_the_head_is_trained_where_that_is_asked_for() -> None:
    def student(trainable: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        loop = small(NoiseDistillation(student=STUDENT, images=9, trainable=trainable), two_layers)
        loop.fit()
        assert all(p.requires_grad for p in loop.model.parameters())
        return loop.method.start, loop.method.student  # type: ignore[attr-defined]

    start, head = student("head")
    changed = [name for name in start if not torch.equal(start[name], head[name])]
    assert changed == list(start)[-2:]
    start, whole = student("all")
    assert all(not torch.equal(start[name], whole[name]) for name in start)


def test_the_server_takes_no_client_step_after_the_upload_and_the_bytes_are_those_of_the_weights() -> None:
    loop = small(NoiseDistillation(student=STUDENT, images=9))
    loop.fit()
    row = loop.history[-1]
    assert row["round/clients"] == 3
    weights = sum(value.numel() * value.element_size() for value in loop.method.initial.values())  # type: ignore[attr-defined]
    assert 3 * weights < row["comm/bytes_up"] < 3 * (weights + 600)


def test_resume(tmp_path: Path) -> None:
    loop = small(NoiseDistillation(student=STUDENT, images=9))
    loop.fit(tmp_path)
    again = small(NoiseDistillation(student=STUDENT, images=9))
    again.fit(tmp_path / "b", tmp_path / "checkpoints" / "round_00001")
    assert same(again.method.state_dict(), loop.method.state_dict())
    assert again.method.distillation() is None  # the images are no part of the state


def test_the_students_training_can_be_made_again() -> None:
    loop = small(NoiseDistillation(student=Training(5, 8, cosine=True), images=9, trainable="head"), two_layers)
    assert loop.method.distillation() is None
    loop.fit()
    found = loop.method.distillation()
    assert found is not None
    result = loop.participant.execute(found.fit, 1, "server")
    assert same({**loop.method.student, **result.params}, loop.method.student)  # type: ignore[attr-defined]
    images = found.fit.data.fetch(torch.arange(9))
    scores = loop.participant.execute(replace(found.teacher, data=TensorExamples(images, torch.zeros(9))), 1).outputs
    assert torch.equal(found.fit.data.extras(torch.arange(9))["soft"], scores)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"init": "zero"}, "init is 'zero'; allowed: 'initial', 'fedavg'"),
        ({"trainable": "body"}, "trainable is 'body'; allowed: 'all', 'head'"),
        ({"combine": "vote"}, "combine is 'vote'"),
        ({"temperature": 0}, "temperature is 0; it must be above 0"),
        ({"images": 0}, "images is 0; it must be at least 1"),
        ({"std": 0}, "std is 0; it must be above 0"),
    ],
)
def test_wrong_arguments(argument: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseDistillation(**argument)
