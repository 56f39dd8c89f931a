"""The flatness meter: what it measures in a federation, and that the federation does not notice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation.tiny import SHAPE, federation, normalised, numbers, same, sgd
from torch import Tensor, nn

from fl_lightning.data.examples import Concatenated
from fl_lightning.federation.callbacks import EarlyStop
from fl_lightning.federation.flatness import FlatnessMeter, mean_loss
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.sampling import UniformSampler
from fl_lightning.methods import FedAvg, LocalOnly
from fl_lightning.metrics import flatness
from fl_lightning.report.figures import surface_figure

FEW: dict[str, Any] = {"every": 1, "eigenvalues": 2, "clients": 2, "local_steps": 2, "directions": 2, "ascent_steps": 3}
EVEN = (8, 12, 4)  # no batch of one, which BatchNorm refuses


def meter(**options: Any) -> FlatnessMeter:
    return FlatnessMeter(**{**FEW, **options})


def measured(loop: FederationLoop) -> list[dict[str, float]]:
    return [{n: v for n, v in row.items() if n.startswith("flatness/")} for row in loop.history]


class Pushed(FedAvg):
    """Carries a momentum that is known."""

    def momentum(self) -> dict[str, Tensor] | None:
        return {name: torch.arange(p.numel(), dtype=p.dtype).view_as(p) for name, p in self.parameters.items()}


# ---- what


def test_the_columns_and_when_they_are_there() -> None:
    loop = federation(FedAvg(rounds=3), callbacks=[meter(every=2, eigenvalues=3, radii=[0.05])])
    loop.fit()
    names = {"train_loss", "gradient_norm", "sharpness_0.05", "random_0.05", "client_gradient_cosine"}
    names |= {"lambda_1", "lambda_2", "lambda_3", "lambda_1_over_3", "lambda_converged", "lambda_products"}
    names |= {"fd1", "fd2", "fd3"}
    assert [set(row) for row in measured(loop)] == [
        {f"flatness/{name}" for name in names} if there else set() for there in (True, False, True, True)
    ]
    assert ["time/flatness" in row for row in loop.history] == [True, False, True, True]
    assert loop.summary()["metrics"]["flatness/fd1"] == loop.history[-1]["flatness/fd1"]
    assert all(math.isfinite(value) for row in measured(loop) for value in row.values())


def test_what_is_switched_off_is_not_measured() -> None:
    loop = federation(FedAvg(rounds=1), callbacks=[meter(radii=[], clients=0, eigenvalues=0)])
    loop.fit()
    assert set(measured(loop)[1]) == {"flatness/train_loss", "flatness/gradient_norm"}


def by_hand(loop: FederationLoop, rho: float) -> dict[str, float]:
    """Softmax regression, one full-batch step a client, everything written out with torch's own functions."""
    state = loop.method.evaluations()[""].start
    assert state is not None
    w = flatness.flatten(state)

    def loss(w: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(inputs.flatten(1) @ w[:12].view(3, 4).T + w[12:], labels)

    sets = [loop.data.train(client) for client in loop.info.clients]
    held = [(part.fetch(torch.arange(len(part))), part.labels) for part in [Concatenated(sets), *sets]]
    slopes = [torch.func.grad(loss)(w, *part) for part in held]
    cosines = [float(F.cosine_similarity(slopes[0], slope, dim=0)) for slope in slopes[1:]]
    distances = []
    for part, slope in zip(held[1:], slopes[1:], strict=True):
        local = w - 0.3 * slope
        uphill = torch.func.grad(loss)(local, *part)
        there = local + rho * uphill / uphill.norm() - (w + rho * slopes[0] / slopes[0].norm())
        distances.append(float(there.square().sum()))
    hessian = torch.autograd.functional.hessian(lambda w: loss(w, *held[0]), w)
    pushed = torch.cat([torch.arange(12), torch.arange(3)]).double()
    return {
        "flatness/train_loss": float(loss(w, *held[0])),
        "flatness/gradient_norm": float(slopes[0].norm()),
        "flatness/lambda_1": float(torch.linalg.eigvalsh(hessian)[-1]),
        "flatness/client_gradient_cosine": sum(cosines) / 3,
        "flatness/fd1": sum(distances) / 3,
        "flatness/fd2": rho**2 * (2 - 2 * sum(cosines) / 3),
        "flatness/momentum_cosine": float(F.cosine_similarity(pushed, -slopes[0], dim=0)),
    }


def test_the_numbers_by_hand() -> None:
    # The federation's own optimizer has momentum and decay, which clients of the meter must not use.
    own = sgd(0.1, momentum=0.9, weight_decay=0.5)
    options = {"clients": 3, "local_steps": 1, "local_lr": 0.3, "distance_radius": 0.2}
    loop = federation(Pushed(rounds=2), optimizer=own, batch_size=12, callbacks=[meter(**options)])
    loop.fit()
    expected = by_hand(loop, 0.2)
    assert {name: loop.history[-1][name] for name in expected} == pytest.approx(expected, rel=1e-4)
    again = loop.callbacks[0].values(loop)  # type: ignore[attr-defined]
    assert {n: v for n, v in again.items() if n.startswith("flatness/")} == measured(loop)[-1]


def test_fd3_compares_the_global_model_with_the_clients_on_their_own_data() -> None:
    options = {"clients": 3, "local_steps": 1, "local_lr": 0.3, "distance_radius": 0.2}
    loop = federation(FedAvg(rounds=1), batch_size=12, callbacks=[meter(**options)])
    loop.fit()
    task, start = loop.model, loop.method.evaluations()[""].start
    assert start is not None
    sets = {client: loop.data.train(client) for client in loop.info.clients}
    of_global = flatness.sharpness(mean_loss(task, Concatenated(list(sets.values())), {}, 512), start, 0.2, 3)
    of_clients = []
    for examples in sets.values():
        loss = mean_loss(task, examples, {}, 512)
        of_clients.append(flatness.sharpness(loss, flatness.moved(start, flatness.gradient(loss, start), -0.3), 0.2, 3))
    assert loop.history[-1]["flatness/fd3"] == pytest.approx(of_global - sum(of_clients) / 3)


def test_who_has_left_is_not_measured() -> None:
    loop = federation(FedAvg(rounds=1), batch_size=12, callbacks=[meter()])
    loop.fit()
    loop.method.without = ["1", f"class:{loop.info.class_names[0]}"]
    task, start = loop.model, loop.method.evaluations()[""].start
    assert start is not None
    rest = Concatenated([loop.data.train(client) for client in loop.info.clients if client != "1"])
    rest_loss = mean_loss(task, rest.select(rest.labels.nonzero().flatten()), {}, 512)(start)
    found = loop.callbacks[0].values(loop)  # type: ignore[attr-defined]
    assert found["flatness/train_loss"] == pytest.approx(float(rest_loss), rel=1e-6)
    assert found["flatness/train_loss"] != pytest.approx(loop.history[-1]["flatness/train_loss"], rel=1e-3)


def test_parts_make_the_same_numbers_and_the_sample_stays() -> None:
    loops = []
    for size in (512, 5):
        loop = federation(
            FedAvg(rounds=2), optimizer=sgd(0.0), callbacks=[meter(num_examples=17)], eval_batch_size=size
        )
        loop.fit()
        loops.append(measured(loop))
    steady = "flatness/train_loss", "flatness/lambda_1", "flatness/sharpness_0.1", "flatness/random_0.1", "flatness/fd2"
    for name in steady:  # nothing is learnt, so nothing changes unless the draws do
        assert len({row[name] for row in loops[0]}) == 1
    for one, other in zip(*loops, strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    whole = federation(FedAvg(rounds=1), optimizer=sgd(0.0), callbacks=[meter()])
    whole.fit()
    assert measured(whole)[0]["flatness/train_loss"] != loops[0][0]["flatness/train_loss"]


def test_batch_statistics_are_the_models_and_weight_decay_is_left_out() -> None:
    loop = federation(
        FedAvg(rounds=2), EVEN, network=normalised, optimizer=sgd(0.1, weight_decay=1.0), callbacks=[meter()]
    )
    loop.fit()
    start = loop.method.evaluations()[""].start
    assert start is not None
    loop.model.load(start)
    loop.model.eval()
    pooled = Concatenated([loop.data.train(client) for client in loop.info.clients])
    expected = F.cross_entropy(loop.model.logits(pooled.fetch(torch.arange(24))), pooled.labels)  # type: ignore[operator]
    assert measured(loop)[-1]["flatness/train_loss"] == pytest.approx(expected.item())


def test_a_clients_model_is_judged_with_its_own_batch_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def spy(task: Any, examples: Any, buffers: Any, batch_size: int) -> Any:
        seen.append(buffers)
        return mean_loss(task, examples, buffers, batch_size)

    loop = federation(FedAvg(rounds=1), EVEN, network=normalised)
    loop.fit()
    monkeypatch.setattr("fl_lightning.federation.flatness.mean_loss", spy)
    meter(clients=1).values(loop)
    everywhere, of_client, of_local_model = seen
    assert same(everywhere, of_client)
    assert not same(of_local_model, everywhere)


def test_momentum_of_zero_has_no_direction() -> None:
    class Still(FedAvg):
        def momentum(self) -> dict[str, Tensor] | None:
            return {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    loop = federation(Still(rounds=1), callbacks=[meter()])
    loop.fit()
    assert "flatness/momentum_cosine" not in loop.history[-1]


def test_a_model_that_diverged_is_measured_as_far_as_it_goes() -> None:
    loop = federation(FedAvg(rounds=1), callbacks=[meter()])
    loop.fit()

    def grown(factor: float) -> dict[str, float]:
        for parameter in loop.method.parameters.values():  # type: ignore[attr-defined]
            parameter.data.mul_(factor)
        values = loop.callbacks[0].values(loop)  # type: ignore[attr-defined]
        return {name: value for name, value in values.items() if name.startswith("flatness/")}

    assert grown(1e100)["flatness/lambda_1"] == 0  # the softmax of such outputs is 0 or 1, whatever the weights
    row = grown(math.inf)
    assert set(row) == {"flatness/train_loss", "flatness/gradient_norm"}
    assert not math.isfinite(row["flatness/train_loss"])


# ---- the federation does not notice


def dropping(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def momentum_of_everything(rounds: int) -> FedAvg:
    return FedAvg(rounds=rounds, server_optimizer=sgd(1.0, momentum=0.9), buffers="local")  # clients have memories


RUNS: dict[str, Callable[..., FederationLoop]] = {
    "linear": lambda **options: federation(FedAvg(rounds=4), **options),
    "dropout, momentum, memories": lambda **options: federation(
        momentum_of_everything(4), EVEN, network=dropping, optimizer=sgd(0.1, momentum=0.9), **options
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_training_is_the_same_to_the_last_bit(name: str, tmp_path: Path) -> None:
    sampler = UniformSampler(2)
    with_meter = RUNS[name](sampler=sampler, callbacks=[meter(surface=True, surface_points=3)])
    with_meter.callbacks.insert(0, Recorder(tmp_path))
    before = torch.get_rng_state()
    with_meter.fit()
    assert torch.equal(torch.get_rng_state(), before)
    without = RUNS[name](sampler=sampler)
    without.fit()
    assert same(with_meter.method.state_dict(), without.method.state_dict())
    assert same(with_meter.memory.state_dict(), without.memory.state_dict())
    rows = [{n: v for n, v in row.items() if not n.startswith("flatness/")} for row in numbers(with_meter)]
    assert rows == numbers(without)


def test_the_task_is_put_back_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = meter()
    loop = federation(FedAvg(rounds=1), EVEN, network=normalised)
    loop.fit()
    task = loop.model
    task.train()
    state, optimizer = task.state(), task.optimizer
    watch.values(loop)
    assert same(task.state(), state)
    monkeypatch.setattr(flatness, "perturbed_model_distance", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        watch.values(loop)
    assert same(task.state(), state)
    assert task.training
    assert task.optimizer is optimizer


def test_what_a_loss_draws_is_the_meters() -> None:
    loop = federation(FedAvg(rounds=1))
    loop.fit()
    loss = loop.model.loss
    loop.model.loss = lambda batch: loss(batch) * (1 + torch.rand(()))  # type: ignore[method-assign]
    before, watch = torch.get_rng_state(), meter(eigenvalues=0, clients=0)
    rows = [watch.values(loop) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert rows[0]["flatness/sharpness_0.1"] == rows[1]["flatness/sharpness_0.1"]


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_measures_the_same(name: str, tmp_path: Path) -> None:
    whole = RUNS[name](callbacks=[meter()], keep_last=9)
    whole.fit(tmp_path)
    resumed = RUNS[name](callbacks=[meter()])
    resumed.fit(tmp_path / "again", tmp_path / "checkpoints/round_00002")
    assert numbers(resumed) == numbers(whole)
    assert measured(resumed)[4]


# ---- pictures


def test_pictures_after_the_last_round(tmp_path: Path) -> None:
    loop = federation(Pushed(rounds=2), callbacks=[Recorder(tmp_path), meter(surface=True, surface_points=5)])
    loop.fit()
    for name in ("flatness_surface", "flatness_momentum"):
        assert (tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG"
    kept = json.loads((tmp_path / "flatness_surface.json").read_text())
    train_loss = loop.history[-1]["flatness/train_loss"]
    assert kept["round"] == 2
    assert kept["surface"]["coordinates"] == [-1, -0.5, 0, 0.5, 1]
    assert kept["surface"]["loss"][2][2] == pytest.approx(train_loss)
    assert kept["momentum_slice"]["loss"][len(kept["momentum_slice"]["loss"]) // 2] == pytest.approx(train_loss)
    assert "flatness/lambda_1" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


def test_pictures_of_a_run_that_stopped_early_and_of_one_without_momentum(tmp_path: Path) -> None:
    stop = EarlyStop("global/acc", patience=1, min_delta=1.0)
    loop = federation(FedAvg(rounds=5), callbacks=[Recorder(tmp_path), stop, meter(surface=True, surface_points=3)])
    loop.fit()
    assert loop.round == 1
    assert json.loads((tmp_path / "flatness_surface.json").read_text())["round"] == 1
    assert not (tmp_path / "flatness_momentum.png").exists()


def test_a_surface_is_square() -> None:
    with pytest.raises(ValueError, match=r"losses must have shape \(3, 3\), got \(3, 2\)"):
        surface_figure([0, 1, 2], torch.zeros(3, 2))


# ---- errors


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("every", 0, "at least 1"),
        ("num_examples", 0, "at least 1"),
        ("clients", -1, "at least 0"),
        ("local_steps", 0, "at least 1"),
        ("local_lr", 0.0, "above 0"),
        ("radii", [0.1, -0.1], "above 0"),
        ("distance_radius", math.inf, "above 0 and finite"),
        ("eigenvalues", -1, "at least 0"),
        ("ascent_steps", 0, "at least 1"),
        ("directions", 0, "at least 1"),
        ("surface_points", 1, "at least 2"),
    ],
)
def test_wrong_arguments_are_named(argument: str, value: Any, allowed: str) -> None:
    shown = value[-1] if isinstance(value, list) else value
    with pytest.raises(ValueError, match=f"^{argument} is {shown}; it must be {allowed}"):
        FlatnessMeter(**{argument: value})


def test_what_cannot_be_measured_is_refused_before_training() -> None:
    assert math.prod(SHAPE) * 3 + 3 == 15
    for method, options, text in (
        (FedAvg(rounds=1), {"eigenvalues": 15}, r"eigenvalues is 15; with 15 .* it must be in \[0, 14\]"),
        (LocalOnly(rounds=1), {}, "measures a global model, and LocalOnly has none"),
    ):
        loop = federation(method, callbacks=[meter(**options)])
        with pytest.raises(ValueError, match=text):
            loop.fit()
        assert loop.history == []
