"""What FedFTG, DENSE and Co-Boosting share, asserted of all three."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation.tiny import federation, linear, normalised, same, sgd
from methods.test_distillation import single, two_layers
from torch import Tensor

from fl_lightning.callbacks.optimizer_memory import OptimizerMemory
from fl_lightning.data.examples import TensorExamples
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.participant import Participant
from fl_lightning.methods import DENSE, CoBoosting, FedFTG
from fl_lightning.methods.base import Fit, Method, Training, unused
from fl_lightning.methods.generator_distillation import GeneratorDistillation, spread
from fl_lightning.rng import derive_seed

SMALL: dict[str, Any] = {"images": 12, "latent": 3, "width": 2, "student": Training(5, 4, cosine=True)}
METHODS: dict[str, Callable[..., GeneratorDistillation]] = {
    "DENSE": lambda **options: DENSE(**{**SMALL, "epochs": 2, "generator_steps": 3, "bn": 0.0, **options}),
    "CoBoosting": lambda **options: CoBoosting(**{**SMALL, "epochs": 2, "generator_steps": 3, **options}),
    "FedFTG": lambda **options: FedFTG(**{**SMALL, "iterations": 2, **options}),
}


def small(method: Method, network: Callable = linear, sizes: tuple[int, ...] = (7, 12, 5), **options: Any) -> Any:
    return federation(method, sizes, network=single(network), data_options={"dtype": torch.float32}, **options)


@pytest.fixture(params=METHODS)
def make(request: pytest.FixtureRequest) -> Callable[..., GeneratorDistillation]:
    return METHODS[request.param]


def watched(loop: FederationLoop, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Fit, Any]]:
    """All fits of the server, with their results."""
    seen: list[tuple[Fit, Any]] = []
    execute = Participant.execute

    def spy(self: Participant, request: Any, *owner: object) -> Any:
        result = execute(self, request, *owner)
        if isinstance(request, Fit) and owner[-1] == "server":
            seen.append((request, result))
        return result

    monkeypatch.setattr(Participant, "execute", spy)
    loop.fit()
    return seen


def test_the_budget_is_that_of_the_whole(
    make: Callable[..., GeneratorDistillation], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = small(make())
    fits = watched(loop, monkeypatch)
    student = [(fit, result) for fit, result in fits if fit.task == "model"]
    assert sum(result.num_steps for _, result in student) == 5
    assert len(student) == 2
    assert student[0][0].overrides["lr_scale"] == 1
    assert 0 < student[1][0].overrides["lr_scale"] < 1
    bank = loop.method.synthetic()
    assert len(bank) == 12
    assert bank.inputs.shape[1:] == (1, 2, 2)
    assert sorted(i for origin in bank.provenance for i in origin.indices) == list(range(12))


def test_the_server_sees_no_data_of_a_client_and_leaves_the_uploads_as_they_are(
    make: Callable[..., GeneratorDistillation], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = small(make(init="fedavg"), normalised, (7, 12, 6))
    kept: dict[str, dict[str, Tensor]] = {}
    distil = loop.method.distil

    def guarded(server: Any) -> Any:
        kept.update({client: {n: v.clone() for n, v in model.items()} for client, model in loop.method.uploads.items()})
        with monkeypatch.context() as patch:
            patch.setattr(TensorExamples, "fetch", only_synthetic(loop))
            return distil(server)

    monkeypatch.setattr(loop.method, "distil", guarded)
    loop.fit()
    assert len(kept) == 3
    assert loop.history[-1]["round/clients"] == 3
    assert same(kept, loop.method.uploads)
    assert all(p.grad is None or not p.grad.any() for p in loop.method.initial.values())
    weights = sum(value.numel() * value.element_size() for value in loop.method.initial.values())
    counts = 8 * 3 if loop.method.wants_counts else 0
    assert 3 * (weights + counts) < loop.history[-1]["comm/bytes_up"] < 3 * (weights + counts + 1500)


def only_synthetic(loop: FederationLoop) -> Callable:
    whole = {id(loop.data.source.splits.train), id(loop.data.source.splits.test)}  # type: ignore[attr-defined]
    fetch = TensorExamples.fetch

    def guard(self: TensorExamples, indices: Tensor) -> Tensor:
        assert id(self) not in whole, "a client's images were fetched"
        return fetch(self, indices)

    return guard


def test_a_student_that_learns_nothing_is_the_average(make: Callable[..., GeneratorDistillation]) -> None:
    loop = small(make(init="fedavg"), optimizer=sgd(0.0))
    loop.fit()
    assert same(loop.method.student, loop.method.start)
    assert loop.history[-1]["global/acc"] == loop.history[-1]["start/global/acc"]


def test_the_students_learning_rate_is_its_own(
    make: Callable[..., GeneratorDistillation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not that of the clients, whose optimizer this is."""
    students = []
    for lr in (0.02, 0.07):
        loop = small(make(init="fedavg", student=Training(5, 4, cosine=True, lr=lr)), optimizer=sgd(0.5))
        fits = watched(loop, monkeypatch)
        assert all(fit.overrides["lr"] == lr for fit, _ in fits if fit.task == "model")
        students.append(loop.method.student)
    assert not same(*students)


def test_only_the_head_is_trained_where_that_is_asked_for(make: Callable[..., GeneratorDistillation]) -> None:
    loop = small(make(trainable="head"), two_layers)
    loop.fit()
    start, student = loop.method.start, loop.method.student
    assert [name for name in start if not torch.equal(start[name], student[name])] == list(start)[-2:]


def test_the_order_of_the_clients_does_not_matter_and_one_seed_gives_one_result(
    make: Callable[..., GeneratorDistillation],
) -> None:
    first, second = small(make()), small(make())
    first.fit()
    uploads = second.engine.run

    def reversed_order(*arguments: Any) -> Any:
        total = uploads(*arguments)
        for group in total.groups:
            total.groups[group] = dict(reversed(total.groups[group].items()))
        return total

    second.engine.run = reversed_order
    second.fit()
    assert list(second.method.uploads) == ["2", "1", "0"]
    for name, value in first.method.student.items():
        torch.testing.assert_close(second.method.student[name], value, rtol=1e-4, atol=1e-5)
    other = small(make(), seed=1)
    other.fit()
    assert not same(first.method.student, other.method.student)


def test_resume(make: Callable[..., GeneratorDistillation], tmp_path: Path) -> None:
    loop = small(make())
    loop.fit(tmp_path)
    again = small(make())
    again.fit(tmp_path / "b", tmp_path / "checkpoints" / "round_00001")
    assert same(again.method.state_dict(), loop.method.state_dict())
    assert again.evaluate() == loop.evaluate()


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [(10, [1, 2, 3, 4], [1, 2, 3, 4]), (5, [1, 2], [1, 4]), (3, [1] * 5, [0, 1, 0, 1, 1]), (0, [2], [0])],
)
def test_spread(total: int, shares: list[int], expected: list[int]) -> None:
    assert spread(total, shares) == expected


def test_spread_sums_to_the_total() -> None:
    for seed in range(30):
        total, count = derive_seed(seed, "total") % 500, 1 + derive_seed(seed, "count") % 40
        parts = spread(total, range(1, count + 1))
        assert sum(parts) == total
        assert min(parts) >= 0


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_several_fits_with_one_memory_are_one_optimizer(name: str) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))

    loop = small(DENSE(**SMALL, epochs=2, bn=0.0), optimizer=optimizer)
    data, start = loop.data.train("1"), loop.model.state()
    memory = OptimizerMemory()
    state = start
    for rate in (1.0, 0.5):
        fit = Training(2, 12).fit("model", data, state, (), (memory,), lr_scale=rate)
        state = loop.participant.execute(fit, 1, "server").params
    model = {n: v.clone().requires_grad_() for n, v in start.items()}
    plain = optimizer(list(model.values()))
    x, y = data.fetch(torch.arange(12)).flatten(1), data.labels
    for rate in (0.1, 0.1, 0.05, 0.05):
        plain.param_groups[0]["lr"] = rate
        plain.zero_grad()
        torch.nn.functional.cross_entropy(x @ model["network.1.weight"].T + model["network.1.bias"], y).backward()
        plain.step()
    for parameter, value in model.items():
        torch.testing.assert_close(state[parameter], value.detach(), rtol=1e-4, atol=1e-5)


def test_the_last_part_of_the_students_training_can_be_made_again(make: Callable[..., GeneratorDistillation]) -> None:
    """With what the optimizer remembered before it, however often."""
    loop = small(make(), optimizer=sgd(momentum=0.9))
    loop.fit()
    found = loop.method.distillation()
    assert found is not None
    for _ in range(2):
        result = loop.participant.execute(unused(found.fit), 1, "server")
        assert same(dict(result.params), {name: loop.method.student[name] for name in result.params})


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"images": 13}, "images is 13; it must be a multiple of the number of batches, 2, and at least twice that"),
        ({"images": 2}, "images is 2; it must be a multiple of the number of batches, 2, and at least twice that"),
        ({"latent": 0}, "latent is 0; it must be at least 1"),
        ({"width": 0}, "width is 0; it must be at least 1"),
        ({"adversarial": -1}, "adversarial is -1; it must be at least 0"),
        ({"one_hot": -1}, "one_hot is -1; it must be at least 0"),
        ({"init": "zero"}, "init is 'zero'"),
    ],
)
def test_wrong_arguments(make: Callable[..., GeneratorDistillation], argument: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**argument)


@pytest.mark.parametrize("name", ["DENSE", "CoBoosting"])
def test_more_wrong_arguments(name: str) -> None:
    for argument, message in [
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"generator_steps": 0}, "generator_steps is 0; it must be at least 1"),
        ({"bn": -1}, "bn is -1; it must be at least 0"),
        ({"adversarial_temperature": 0}, "adversarial_temperature is 0; it must be above 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            METHODS[name](**argument)
    with pytest.raises(ValueError, match=r"bn is 0\.5, but Sequential has no BatchNorm layer with running statistics"):
        small(METHODS[name](bn=0.5))
