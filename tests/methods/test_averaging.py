"""FedAvg and its family against arithmetic by hand and against plain loops without Lightning."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation.tiny import (
    CPU,
    Consecutive,
    Given,
    data,
    examples,
    federation,
    linear,
    normalised,
    numbers,
    same,
    sgd,
    task,
)
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.examples import TensorExamples
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.state import read_checkpoint
from fl_lightning.methods import FedAvg, FedProx, LocalOnly
from fl_lightning.rng import torch_generator
from fl_lightning.tasks import Batch

SIZES = (7, 12, 5)


def plain_federation(
    rounds: int,
    *,
    network: Callable = linear,
    epochs: int = 1,
    lr: float = 0.1,
    mu: float = 0.0,
    server: Callable = lambda p: torch.optim.SGD(p, lr=1.0),
    uniform: bool = False,
    batch_size: int = 4,
    sizes: tuple[int, ...] = SIZES,
    scale: Callable[[int], float] = lambda round: 1.0,
) -> dict[str, Tensor]:
    """Federated optimisation (Reddi et al., 2021, Algorithm 2) in a dozen lines, without Lightning."""
    built = task(network)
    built.build(data(sizes).info, 0)
    world = built.network
    names = [name for name, _ in world.named_parameters()]
    parameters = [nn.Parameter(p.detach().clone()) for p in world.parameters()]
    optimizer = server(parameters)
    whole, offsets = examples(sum(sizes), 1), torch.tensor([0, *sizes]).cumsum(0)
    for round in range(1, rounds + 1):
        total = [torch.zeros_like(p) for p in parameters]
        for client, size in enumerate(sizes):
            inputs = whole.inputs[offsets[client] : offsets[client + 1]]
            labels = whole.labels[offsets[client] : offsets[client + 1]]
            with torch.no_grad():
                for ours, theirs in zip(world.parameters(), parameters, strict=True):
                    ours.copy_(theirs)
            shuffle = torch_generator(0, round, str(client), "fit", "shuffle")
            for _ in range(epochs):
                for batch in torch.randperm(size, generator=shuffle).split(batch_size):
                    loss = F.cross_entropy(world(inputs[batch]), labels[batch])
                    loss = loss + mu / 2 * sum(
                        (w - s.detach()).pow(2).sum() for w, s in zip(world.parameters(), parameters, strict=True)
                    )
                    gradients = torch.autograd.grad(loss, list(world.parameters()))
                    with torch.no_grad():
                        for w, g in zip(world.parameters(), gradients, strict=True):
                            w -= lr * scale(round) * g
            weight = 1 / len(sizes) if uniform else size / sum(sizes)
            for t, ours, theirs in zip(total, world.parameters(), parameters, strict=True):
                t += weight * (ours.detach() - theirs.detach())
        for parameter, t in zip(parameters, total, strict=True):
            parameter.grad = -t
        optimizer.step()
    return {f"network.{name}": p.detach() for name, p in zip(names, parameters, strict=True)}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)


def state_after(method: FedAvg, **options: Any) -> dict[str, Tensor]:
    federation(method, **options).fit()
    return method.state()


class TwoWeights(nn.Module):
    """Logits (a x, b x) of a single pixel x: a model of two parameters."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -0.5], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1) * self.w


def test_two_clients_two_steps_by_hand() -> None:
    # Client 0 holds x = 1 (class 0), client 1 holds x = 2 (class 1) twice; learning rate 0.1, full batches, two epochs.
    inputs = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64).view(3, 1, 1, 1)
    source = Given(TensorExamples(inputs, torch.tensor([0, 1, 1])), TensorExamples(inputs, torch.tensor([0, 1, 1])), 2)
    module = FederatedDataModule(source, Consecutive((1, 2)), 2, batch_size=4, val_fraction=0.0)
    method = FedAvg(rounds=1)
    loop = FederationLoop(progress=False, validate=False)
    loop.assemble(method, task(TwoWeights), module, {**CPU, "max_epochs": 2}, 0)
    loop.fit()
    # d(loss)/d(a, b) = x (p - y). Client 0: p0 = s(a - b). Client 1: p1 = s(2 (b - a)).
    # Step 1 of client 0: p0 = s(1) = 0.731058578630, gradient -+0.268941421370: a, b = +-0.526894142137.
    # Step 2: p0 = s(1.053788284274) = 0.741503517, a, b = +-(0.526894142137 + 0.1 * 0.258496...).
    # Step 1 of client 1: p1 = s(-2) = 0.119202922022, gradient +-1.761594155956: a, b = +-0.323840584404.
    # Step 2: p1 = s(-1.295362337618), gradient +-2 * (1 - p1).
    s = torch.sigmoid
    first = 0.526894142137
    first += 0.1 * float(1 - s(torch.tensor(2 * first, dtype=torch.float64)))
    second = 0.3238405844044
    second -= 0.2 * float(1 - s(torch.tensor(-4 * second, dtype=torch.float64)))
    expected = (1 * first + 2 * second) / 3
    assert method.state()["network.w"].tolist() == pytest.approx([expected, -expected], abs=1e-12)
    assert expected == pytest.approx(0.295467922325, abs=1e-10)  # neither client's own, nor their plain mean


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({}, {}),
        ({"weighting": "uniform"}, {"uniform": True}),
        ({"server_optimizer": sgd(1.0, momentum=0.9)}, {"server": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)}),
        (
            {"server_optimizer": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3)},
            {"server": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3)},
        ),
    ],
    ids=["fedavg", "uniform", "fedavgm", "fedadam"],
)
def test_rounds_equal_a_plain_loop(arguments: dict[str, Any], options: dict[str, Any]) -> None:
    ours = state_after(FedAvg(rounds=4, **arguments), trainer={"max_epochs": 2})
    close(ours, plain_federation(4, epochs=2, **options))


def test_fedprox_equals_a_plain_loop() -> None:
    ours = state_after(FedProx(mu=0.8, rounds=3), trainer={"max_epochs": 2})
    close(ours, plain_federation(3, epochs=2, mu=0.8))
    assert not torch.allclose(ours["network.1.weight"], plain_federation(3, epochs=2)["network.1.weight"], atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "scales"),
    [
        ({"lr_decay": 0.5}, [1.0, 0.5, 0.25, 0.125]),
        ({"lr_schedule": "cosine"}, [1.0, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5]),
        ({"lr_schedule": "cosine", "lr_decay": 0.5}, [1.0, 0.25 + 0.125**0.5 / 2, 0.125, 0.0625 - 0.125**0.5 / 8]),
    ],
)
def test_the_clients_learning_rate_over_the_rounds(arguments: dict[str, Any], scales: list[float]) -> None:
    close(state_after(FedAvg(rounds=4, **arguments)), plain_federation(4, scale=lambda round: scales[round - 1]))


def test_fedadam_by_hand() -> None:
    """Reddi et al., 2021, Algorithm 2, with torch's bias correction: the first step is lr * sign(update)."""
    before = state_after(FedAvg(rounds=1, server_optimizer=sgd(0.0)))
    update = state_after(FedAvg(rounds=1))
    adam = state_after(FedAvg(rounds=1, server_optimizer=lambda p: torch.optim.Adam(p, lr=0.1, eps=0.0)))
    for name in before:
        step = 0.1 * (update[name] - before[name]).sign()
        torch.testing.assert_close(adam[name], before[name] + step, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "method",
    [lambda: FedProx(mu=0.0, rounds=3), lambda: FedAvg(3, server_optimizer=sgd(1.0, momentum=0.0, nesterov=False))],
    ids=["fedprox, mu 0", "fedavgm, momentum 0"],
)
def test_degenerate_methods_are_fedavg_bit_for_bit(method: Callable[[], FedAvg]) -> None:
    plain = federation(FedAvg(rounds=3), trainer={"max_epochs": 2})
    other = federation(method(), trainer={"max_epochs": 2})
    plain.fit()
    other.fit()
    assert same(plain.method.state_dict()["parameters"], other.method.state_dict()["parameters"])
    assert numbers(plain) == numbers(other)


def test_one_client_is_plain_lightning() -> None:
    """A federation of one, at a learning rate of one, is centralised training."""
    ours = state_after(FedAvg(rounds=1), sizes=(12,), trainer={"max_epochs": 3})
    built = task()
    built.build(data((12,)).info, 0)
    whole = examples(12, 1)
    shuffle = torch_generator(0, 1, "0", "fit", "shuffle")

    class Orders(torch.utils.data.Sampler):
        def __iter__(self) -> Any:
            return iter(torch.randperm(12, generator=shuffle).tolist())

        def __len__(self) -> int:
            return 12

    pairs = torch.utils.data.TensorDataset(whole.inputs, whole.labels)
    loader = DataLoader(
        pairs, 4, sampler=Orders(), collate_fn=lambda rows: Batch(*map(torch.stack, zip(*rows, strict=True)))
    )
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(**{**CPU, "max_epochs": 3}, **quiet).fit(built, loader)
    close(ours, built.state())


def test_several_rounds_of_one_client_are_centralised_training() -> None:
    ours = state_after(FedAvg(rounds=3), sizes=(12,))
    close(ours, plain_federation(3, sizes=(12,)))


def test_identical_clients_are_one_client_alone() -> None:
    def after(clients: int) -> dict[str, Tensor]:
        own = examples(6, 1)
        many = TensorExamples(own.inputs.repeat(clients, 1, 1, 1), own.labels.repeat(clients))
        module = FederatedDataModule(
            Given(many, examples(9, 2)), Consecutive((6,) * clients), clients, batch_size=6, val_fraction=0.0
        )
        loop = FederationLoop(progress=False, validate=False, num_threads=None)
        method = FedAvg(rounds=2)
        loop.assemble(method, task(), module, {**CPU, "max_epochs": 3}, 0)
        start = method.state()
        loop.fit()
        assert not same(method.state(), start)
        return method.state()

    close(after(3), after(1))  # whole batches: else each shuffles in its own way


# ---- buffers


def buffers_of_clients(round: int, start: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What BatchNorm holds after each client's fit from ``start``."""
    found, offsets = [], torch.tensor([0, *SIZES]).cumsum(0)
    whole = examples(sum(SIZES), 1)
    for client, size in enumerate(SIZES):
        model = normalised((1, 2, 2), 3)
        model.load_state_dict({name.removeprefix("network."): value for name, value in start.items()})
        optimizer = sgd()(model.parameters())
        for batch in torch.randperm(size, generator=torch_generator(0, round, str(client), "fit", "shuffle")).split(3):
            chosen = offsets[client] + batch
            optimizer.zero_grad()
            F.cross_entropy(model(whole.inputs[chosen]), whole.labels[chosen]).backward()
            optimizer.step()
        found.append({f"network.{name}": b.clone() for name, b in model.named_buffers()})
    return found


SIZES_BN = {"sizes": (6, 12, 6), "batch_size": 3, "network": normalised}


@pytest.fixture
def divisible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that batches of three divide: BatchNorm cannot train on one example."""
    monkeypatch.setitem(globals(), "SIZES", SIZES_BN["sizes"])


@pytest.mark.usefixtures("divisible")
def test_buffers_are_averaged_like_parameters() -> None:
    method = FedAvg(rounds=1, buffers="average")
    loop = federation(method, **SIZES_BN)
    expected = buffers_of_clients(1, method.state())
    loop.fit()
    for name in ("running_mean", "running_var"):
        mean = sum(size * b[f"network.2.{name}"] for size, b in zip(SIZES, expected, strict=True)) / sum(SIZES)
        torch.testing.assert_close(method.buffers[f"network.2.{name}"], mean, rtol=0, atol=1e-12)
    assert int(method.buffers["network.2.num_batches_tracked"]) == 3  # 2, 4, 2 weighted by 6, 12, 6
    assert method.buffers["network.2.num_batches_tracked"].dtype == torch.int64


@pytest.mark.usefixtures("divisible")
def test_local_buffers_stay_with_their_clients() -> None:
    method = FedAvg(rounds=2, buffers="local")
    loop = federation(method, **SIZES_BN)
    initial = method.state()
    loop.fit()
    first = buffers_of_clients(1, initial)
    # The second fit starts from the client's own statistics: 4 batches are seen by client 0 in the two rounds.
    for client, steps in zip("012", (4, 8, 4), strict=True):
        memory = loop.memory.get(client)["buffers"]
        assert int(memory["network.2.num_batches_tracked"]) == steps
        assert not torch.equal(memory["network.2.running_mean"], first[int(client)]["network.2.running_mean"])
    assert same(method.buffers, {n: v for n, v in initial.items() if n in method.buffers})  # nothing reached the server
    assert "buffers" not in method.uplink(1)
    assert "personal_mean/acc" in loop.history[-1]
    averaged = federation(FedAvg(rounds=2), **SIZES_BN)
    averaged.fit()
    assert loop.history[-1]["comm/bytes_up"] < averaged.history[-1]["comm/bytes_up"]


@pytest.mark.usefixtures("divisible")
def test_global_buffers_never_change() -> None:
    method = FedAvg(rounds=2, buffers="global")
    loop = federation(method, **SIZES_BN)
    initial = dict(method.buffers)
    loop.fit()
    assert same(method.buffers, initial)
    assert loop.memory.state_dict() == {}


# ---- local training only


def test_local_only_trains_on_alone_and_pays_once() -> None:
    method = LocalOnly(rounds=3)
    loop = federation(method, trainer={"max_epochs": 1})
    size = method.broadcast(1).nbytes
    loop.fit()
    assert [row["comm/bytes_down"] > 3 * size - 1 for row in loop.history[1:]] == [True, False, False]
    assert loop.history[1]["comm/bytes_down"] == 3 * size
    assert loop.history[2]["comm/bytes_down"] == 3 * method.broadcast(1).only(()).nbytes
    # Client 1 alone, centralised: the same model.
    whole = examples(sum(SIZES), 1)
    built = task()
    built.build(loop.info, 0)
    for round in (1, 2, 3):
        shuffle = torch_generator(0, round, "1", "fit", "shuffle")
        optimizer = sgd()(built.network.parameters())
        for batch in torch.randperm(SIZES[1], generator=shuffle).split(4):
            optimizer.zero_grad()
            F.cross_entropy(built.network(whole.inputs[SIZES[0] + batch]), whole.labels[SIZES[0] + batch]).backward()
            optimizer.step()
    assert same(dict(loop.memory.get("1")["model"]), built.state())
    assert {"personal_mean/acc", "personal_mean/global_acc"} <= loop.history[-1].keys()
    assert "global/acc" not in loop.history[-1]


def test_local_only_of_a_cohort_pays_when_a_client_is_first_reached() -> None:
    from fl_lightning.federation.sampling import UniformSampler

    loop = federation(LocalOnly(rounds=6), sampler=UniformSampler(size=1))
    size, nothing = loop.method.broadcast(1).nbytes, loop.method.broadcast(1).only(()).nbytes
    loop.fit()
    seen: set[str] = set()
    for round in range(1, 7):
        (client,) = UniformSampler(size=1).cohort(round, loop.info.clients, 0)
        assert loop.history[round]["comm/bytes_down"] == (nothing if client in seen else size)
        seen.add(client)
    assert 1 < len(seen) < 6


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: FedAvg(rounds=0), "rounds is 0; it must be at least 1"),
        (lambda: FedAvg(weighting="size"), "'size'; allowed: 'examples', 'uniform'"),  # type: ignore[arg-type]
        (lambda: FedAvg(buffers="none"), "'none'; allowed: 'average', 'local', 'global'"),  # type: ignore[arg-type]
        (lambda: FedAvg(lr_decay=0.0), r"lr_decay is 0.0; it must be in \(0, 1\]"),
        (lambda: FedAvg(lr_schedule="linear"), "'linear'; allowed: 'constant', 'cosine'"),  # type: ignore[arg-type]
        (lambda: FedProx(mu=-1), "mu is -1; it must be at least 0"),
        (lambda: FedProx(mu=math.nan), "mu is nan; it must be at least 0"),
    ],
)
def test_wrong_arguments(build: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()


class Halving(torch.optim.SGD):
    """Keeps a rate of its own among its hyper-parameters, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] /= 2
        return result


def test_changed_hyper_parameters_of_the_server_outlast_the_state(tmp_path: Path) -> None:
    def run(server: Callable, rounds: int, checkpoint: Path | None = None) -> FedAvg:
        method = FedAvg(rounds=rounds, server_optimizer=server)
        folder = None if checkpoint else tmp_path
        federation(method, SIZES, keep_last=9).fit(folder, checkpoint)
        return method

    def halving(momentum: float, lr: float = 1.0) -> Callable:
        return lambda p: Halving(p, lr=lr, momentum=momentum)

    whole, second = run(halving(0.9), 3), tmp_path / "checkpoints" / "round_00002"
    assert same(run(halving(0.9), 3, second).state_dict(), whole.state_dict())
    start = {name: value.clone() for name, value in read_checkpoint(second)[0]["method"]["parameters"].items()}
    buffers = [state["momentum_buffer"] for state in whole.optimizer.state.values()]  # mean update of round 3 included
    # Only the momentum is another: the rate that the optimizer has come to stays.
    changed = run(halving(0.5), 3, second)
    assert changed.optimizer.param_groups[0]["momentum"] == 0.5
    assert changed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] == 0.125
    old = read_checkpoint(second)[0]["method"]["optimizer"]["state"]
    for index, (name, value) in enumerate(changed.parameters.items()):
        before = old[index]["momentum_buffer"]
        expected = start[name] - 0.25 * (buffers[index] - 0.4 * before)  # 0.5 of it in place of 0.9
        torch.testing.assert_close(value.detach(), expected, rtol=0, atol=1e-12)
    # Only the rate is: the momentum goes on.
    changed = run(halving(0.9, lr=0.1), 3, second)
    for index, (name, value) in enumerate(changed.parameters.items()):
        torch.testing.assert_close(value.detach(), start[name] - 0.1 * buffers[index], rtol=0, atol=1e-12)
    # Another optimizer starts afresh: Adam's first step is its rate, whatever the gradient.
    changed = run(lambda p: torch.optim.Adam(p, lr=0.03, eps=1e-12), 3, second)
    for name, value in changed.parameters.items():
        torch.testing.assert_close(
            (value.detach() - start[name]).abs(), torch.full_like(value, 0.03), rtol=1e-6, atol=0
        )
