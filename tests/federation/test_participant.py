"""Local training: Lightning does what a plain loop does, any number of times, and leaves no trace."""

from __future__ import annotations

import copy
import gc
import os
import random
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federation.tiny import CPU, examples, federation, linear, normalised, same, sgd, task
from lightning.pytorch import Callback
from methods.test_flat_family import FAMILY
from torch import Tensor, nn

from fl_lightning.data.examples import DataInfo, TensorExamples
from fl_lightning.federation.flops import FlopCount
from fl_lightning.federation.participant import BatchLoader, Participant
from fl_lightning.methods import FedAvg, FedSAM, NoiseDistillation
from fl_lightning.methods.base import Fit, Predict, Result, Training
from fl_lightning.rng import torch_generator
from fl_lightning.rules.base import Composed, LocalRule
from fl_lightning.rules.proximal import Proximal
from fl_lightning.tasks import FederatedTask

INFO = DataInfo(("a", "b", "c"), (1, 2, 2), (0, 1, 2))


def participant(
    network: Any = linear, optimizer: Any = None, trainer: dict[str, Any] | None = None, batch_size: int = 4
) -> Participant:
    built = task(network, optimizer)
    built.build(INFO, 0)
    return Participant({"model": built}, {**CPU, **(trainer or {})}, batch_size, seed=3)


def start_of(network: Any = linear) -> dict[str, Tensor]:
    built = task(network)
    built.build(INFO, 0)
    return built.state()


def plain_fit(
    data: TensorExamples,
    owner: tuple[object, ...],
    *,
    network: Any = linear,
    optimizer: Any = None,
    epochs: int = 1,
    batch_size: int = 4,
    accumulate: int = 1,
    clip: float | None = None,
) -> dict[str, Tensor]:
    """What a fit has to come to, without Lightning."""
    model = network((1, 2, 2), 3)
    model.load_state_dict({name.removeprefix("network."): value for name, value in start_of(network).items()})
    model.train()
    steps = (optimizer or sgd())(model.parameters())
    shuffle = torch_generator(3, *owner, "fit", "shuffle")
    for _ in range(epochs):
        batches = torch.randperm(len(data), generator=shuffle).split(batch_size)
        for number, batch in enumerate(batches):
            loss = F.cross_entropy(model(data.inputs[batch]), data.labels[batch])
            (loss / accumulate).backward()
            if (number + 1) % accumulate == 0 or number + 1 == len(batches):
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                steps.step()
                steps.zero_grad()
    return {f"network.{name}": value.detach() for name, value in model.state_dict().items()}


def outcome(result: Result) -> dict[str, Tensor]:
    return {**result.params, **result.buffers}


ADAM = lambda p: torch.optim.Adam(p, lr=0.01)  # noqa: E731


def test_any_number_of_fits_each_equal_a_plain_loop_bit_for_bit() -> None:
    worker, start = participant(optimizer=ADAM, trainer={"max_epochs": 2}), start_of()
    data = {count: examples(count, count) for count in (7, 9)}
    for number in range(1, 101):
        result = worker.execute(Fit("model", data[7 + 2 * (number % 2)], start), number, "5")
        assert result.num_steps == (6 if number % 2 else 4)
        if number in (1, 2, 3, 100):
            expected = plain_fit(data[7 + 2 * (number % 2)], (number, "5"), optimizer=ADAM, epochs=2)
            assert same(outcome(result), expected)
            assert not torch.equal(result.params["network.1.weight"], start["network.1.weight"])


def test_batch_normalisation_trains_as_in_a_plain_loop() -> None:
    result = participant(normalised, trainer={"max_epochs": 2}).execute(
        Fit("model", examples(8), start_of(normalised)), 1, "0"
    )
    assert same(outcome(result), plain_fit(examples(8), (1, "0"), network=normalised, epochs=2))
    assert int(result.buffers["network.2.num_batches_tracked"]) == 4


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ({"gradient_clip_val": 0.1}, {"clip": 0.1}),
        ({"accumulate_grad_batches": 2}, {"accumulate": 2}),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"accumulate": 2, "clip": 0.1}),
    ],
)
def test_clipping_and_accumulation_of_the_trainer_section(trainer: dict[str, Any], options: dict[str, Any]) -> None:
    for rules in ((), (LocalRule(),)):
        result = participant(trainer=trainer).execute(Fit("model", examples(11), start_of(), rules=rules), 1, "0")
        for name, value in plain_fit(examples(11), (1, "0"), **options).items():
            torch.testing.assert_close(outcome(result)[name], value, rtol=0, atol=1e-12)
        assert result.num_steps == (2 if "accumulate" in options else 3)


def test_results_depend_on_neither_order_nor_company() -> None:
    start, data = start_of(), {key: examples(6 + int(key), int(key)) for key in "012"}

    def run(order: str) -> dict[str, Any]:
        worker = participant(optimizer=ADAM)
        return {key: outcome(worker.execute(Fit("model", data[key], start), 1, key)) for key in order}

    together = run("012")
    assert same(together, run("201"))
    assert same(together["1"], run("1")["1"])
    assert not same(together["1"], outcome(participant(optimizer=ADAM).execute(Fit("model", data["1"], start), 2, "1")))


def test_overrides_hold_for_their_fit_only() -> None:
    worker, start = participant(), start_of()

    def steps(**overrides: float) -> int:
        return worker.execute(Fit("model", examples(10), start, overrides=overrides), 1, "0").num_steps

    assert steps() == 3
    assert steps(max_epochs=4) == 12
    assert steps(batch_size=2) == 5
    assert steps(max_steps=7, max_epochs=9) == 7
    assert steps() == 3
    slow = worker.execute(Fit("model", examples(10), start, overrides={"lr": 0.02}), 1, "0")
    assert same(outcome(slow), plain_fit(examples(10), (1, "0"), optimizer=sgd(0.02)))
    assert slow.lr_sum == pytest.approx(0.06)
    assert worker.execute(Fit("model", examples(10), start), 1, "0").lr_sum == pytest.approx(0.3)


@pytest.mark.parametrize("overrides", [{"epochs": 2}, {"max_epochs": 0}, {"batch_size": 0}, {"lr": -1.0}])
def test_wrong_overrides_name_the_allowed(overrides: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"allowed: max_epochs, max_steps|must be at least"):
        participant().execute(Fit("model", examples(4), overrides=overrides), 1, "0")


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="no task is called 'student'; there are: model"):
        participant().execute(Fit("student", examples(4)), 1, "0")
    with pytest.raises(ValueError, match="no examples"):
        participant().execute(Fit("model", examples(0)), 1, "0")
    with pytest.raises(ValueError, match=r"max_epochs is -1.*at least 1"):
        participant(trainer={"max_epochs": -1})
    with pytest.raises(KeyError, match="no parameter or buffer 'x'"):
        participant().execute(Fit("model", examples(4), {"x": torch.ones(1)}), 1, "0")
    with pytest.raises(ValueError, match=r"\(3, 4\) here and \(2,\)"):
        participant().execute(Fit("model", examples(4), {"network.1.weight": torch.ones(2)}), 1, "0")


class Watcher(Callback):
    """Counts what it sees; a callback that is carried over into another fit counts on."""

    starts: list[int] = []

    def __init__(self) -> None:
        self.batches = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        Watcher.starts.append(self.batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1


def test_callbacks_of_the_configuration_are_new_in_every_fit() -> None:
    Watcher.starts = []
    configured, own = Watcher(), Watcher()
    worker = participant(trainer={"callbacks": [configured]})
    worker.execute(Fit("model", examples(8), callbacks=(own,)), 1, "0")
    worker.execute(Fit("model", examples(8)), 1, "1")
    assert Watcher.starts == [0, 0, 0]  # two in the first fit, one in the second
    assert (configured.batches, own.batches) == (0, 2)


def test_a_fit_leaves_the_global_generators_and_the_disk_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Noisy(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            random.random()
            np.random.random()  # noqa: NPY002
            return super().forward(input + torch.rand(()))

    def noisy(shape: Any, classes: int) -> nn.Module:
        return Noisy(nn.Flatten(), nn.Linear(4, classes)).double()

    worker, start = participant(noisy), start_of(noisy)
    state = random.getstate(), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
    first = outcome(worker.execute(Fit("model", examples(8), start), 1, "0"))
    worker.execute(Predict("model", examples(8), start), 1, "0")
    assert (state[0], state[1]) == (random.getstate(), str(np.random.get_state()))  # noqa: NPY002
    assert torch.equal(state[2], torch.get_rng_state())
    torch.rand(7)
    assert same(first, outcome(worker.execute(Fit("model", examples(8), start), 1, "0")))  # nor does it depend on them
    assert os.listdir(tmp_path) == []


class Scheduled(FederatedTask):
    """A task with a learning rate schedule, by Lightning's usual hook."""

    def build(self, info: DataInfo, seed: int) -> None:
        self.network = linear(info.input_shape, info.num_classes)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.network(batch.inputs), batch.labels)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # type: ignore[arg-type]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("rules", [(), (LocalRule(),)])
def test_lr_sum_follows_the_schedule(rules: tuple[LocalRule, ...]) -> None:
    built = Scheduled(sgd(0.8))
    built.build(INFO, 0)
    worker = Participant({"model": built}, CPU, 4, seed=3)
    for _ in range(2):
        assert worker.execute(Fit("model", examples(12), rules=rules), 1, "0").lr_sum == pytest.approx(0.8 + 0.4 + 0.2)


def test_everything_of_a_fit_is_freed() -> None:
    worker = participant(optimizer=ADAM)
    data = examples(8)
    callback = Watcher()
    watched: list[weakref.ref[Any]] = [weakref.ref(data), weakref.ref(callback)]
    optimizers: list[weakref.ref[Any]] = []

    class Spy(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            optimizers.append(weakref.ref(trainer.optimizers[0]))

    worker.execute(Fit("model", data, callbacks=(callback, Spy()), rules=(Proximal(),)), 1, "0")
    built = worker.tasks["model"]
    assert built._trainer is None
    assert built.given == {}
    assert built.rule is None
    del data, callback
    gc.collect()
    assert [ref() for ref in watched + optimizers] == [None, None, None]

    trainer = weakref.ref(worker.trainer)
    del worker
    gc.collect()
    assert trainer() is None


def test_a_failed_fit_does_not_harm_the_next() -> None:
    class Failing(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                raise RuntimeError("broken")

    worker, start = participant(optimizer=ADAM), start_of()
    with pytest.raises(RuntimeError, match="broken"):
        worker.execute(Fit("model", examples(8), start, callbacks=(Failing(),)), 1, "0")
    assert same(
        outcome(worker.execute(Fit("model", examples(8), start), 1, "0")),
        plain_fit(examples(8), (1, "0"), optimizer=ADAM),
    )


def test_a_share_of_the_batches_that_is_none_is_refused_by_name() -> None:
    loop = federation(FedAvg(1), (16, 7), trainer={"limit_train_batches": 0.5})  # two of four, one of two
    assert loop.fit()[1]["round/gradients"] == 3
    with pytest.raises(ValueError, match=r"limit_train_batches is 0.4; it must be at least 0.5 for a fit of 2 batches"):
        federation(FedAvg(1), (16, 7), trainer={"limit_train_batches": 0.4}).fit()


def test_fast_dev_run_takes_one_step() -> None:
    worker = participant(trainer={"fast_dev_run": True, "max_epochs": 5})
    for _ in range(2):
        assert worker.execute(Fit("model", examples(12), overrides={"max_epochs": 3}), 1, "0").num_steps == 1


def test_precision() -> None:
    worker = participant(trainer={"precision": "bf16-mixed"})
    result = worker.execute(Fit("model", examples(8), start_of(), rules=(Proximal(),)), 1, "0")
    exact = plain_fit(examples(8), (1, "0"))
    assert not same(outcome(result), exact)
    torch.testing.assert_close(result.params["network.1.weight"], exact["network.1.weight"], rtol=0.05, atol=0.05)
    half = participant()
    half.trainer.precision_plugin.precision = "16-mixed"  # a CPU would not build it
    with pytest.raises(ValueError, match=r"16-mixed cannot run Proximal.*bf16-mixed"):
        half.execute(Fit("model", examples(8), rules=(Proximal(),)), 1, "0")


class Twice(LocalRule):
    """Asks for the gradient twice, as sharpness-aware rules do."""

    def direction(self, oracle: Any, params: Any, constants: Any, carry: Any, step: int) -> Any:
        oracle(params)
        return oracle(params), carry


def test_a_second_gradient_counts_neither_in_the_loss_nor_in_batch_normalisation() -> None:
    start = start_of(normalised)
    once = participant(normalised, trainer={"max_epochs": 2}).execute(Fit("model", examples(8), start), 1, "0")
    twice = participant(normalised, trainer={"max_epochs": 2}).execute(
        Fit("model", examples(8), start, rules=(Composed((Twice(),)),)), 1, "0"
    )
    assert same(outcome(once), outcome(twice))
    assert once.metrics == twice.metrics
    assert once.num_steps == twice.num_steps == 4


def test_loss_is_the_mean_over_the_steps() -> None:
    data = examples(4)
    result = participant(optimizer=sgd(0.0)).execute(Fit("model", data, start_of()), 1, "0")
    model = linear((1, 2, 2), 3)
    model.load_state_dict({name.removeprefix("network."): value for name, value in start_of().items()})
    assert result.metrics["loss"] == pytest.approx(float(F.cross_entropy(model(data.inputs), data.labels).detach()))


def test_results_are_copies() -> None:
    worker = participant()
    first = worker.execute(Fit("model", examples(8), start_of()), 1, "0")
    kept = copy.deepcopy(first.params)
    worker.execute(Fit("model", examples(8)), 1, "0")
    assert same(first.params, kept)


def test_predictions_come_in_order_and_can_be_trained_on() -> None:
    worker, start = participant(), start_of()
    worker.eval_batch_size = 4
    model = linear((1, 2, 2), 3)
    model.load_state_dict({name.removeprefix("network."): value for name, value in start.items()})
    for count in (10, 3):  # two sets, one after the other
        data = examples(count, count)
        outputs = worker.execute(Predict("model", data, start), 1, "0").outputs
        assert outputs is not None
        torch.testing.assert_close(outputs, model(data.inputs).detach(), rtol=0, atol=1e-12)
        assert not outputs.is_inference()
    empty = worker.execute(Predict("model", examples(0), start), 1, "0").outputs
    assert empty is not None
    assert len(empty) == 0


def test_a_fit_goes_on_from_what_the_task_holds() -> None:
    worker, start = participant(), start_of()
    worker.execute(Fit("model", examples(4), start), 1, "0")
    second = worker.execute(Fit("model", examples(4)), 1, "0")
    chained = worker.execute(
        Fit("model", examples(4), worker.execute(Fit("model", examples(4), start), 1, "0").params), 1, "0"
    )
    assert same(outcome(second), outcome(chained))


@pytest.mark.parametrize("world", [2, 3])
def test_devices_share_each_batch_exactly(world: int) -> None:
    data = examples(11)
    whole = list(BatchLoader(data, 4, torch.Generator().manual_seed(0)))
    shares = [list(BatchLoader(data, 4, torch.Generator().manual_seed(0), rank, world)) for rank in range(world)]
    assert len(BatchLoader(data, 4)) == len(whole) == 3
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        mean = sum(part.inputs.mean(0) * part.scale for part in parts) / world
        torch.testing.assert_close(mean, batch.inputs.mean(0), rtol=0, atol=1e-12)
    lone = [next(iter(BatchLoader(examples(1), 4, None, rank, world))) for rank in range(world)]
    assert [part.scale for part in lone] == [float(world), *[0.0] * (world - 1)]


def test_floating_point_operations_of_a_run() -> None:
    """A linear map of 4 to 3: 24 forward for an example, as many for the weights' gradient; none for the inputs'."""
    plain, counted = federation(FedAvg(2)), federation(FedAvg(2), count_flops=True)
    plain.fit()
    counted.fit()
    assert same(plain.method.state_dict(), counted.method.state_dict())
    assert [row.get("round/flops") for row in counted.history] == [None, 24 * 48.0, 24 * 48.0]
    sam = federation(FedSAM(rounds=1), count_flops=True)
    sam.fit()
    assert sam.history[1]["round/flops"] == 2 * 24 * 48


def test_floating_point_operations_of_server_work() -> None:
    """Three clients' models on 24 examples, three teachers on 9 images, a student of 5 steps of 4, 4, 1, 4, 4 images."""
    method = NoiseDistillation(images=9, student=Training(5, 4))
    loop = federation(
        method, network=lambda *a: linear(*a).float(), data_options={"dtype": torch.float32}, count_flops=True
    )
    loop.fit()
    assert loop.history[1]["round/flops"] == 24 * 48 + 3 * 9 * 24 + 17 * 48


def test_operations_of_a_loss_that_takes_a_gradient_itself() -> None:
    """A gradient with respect to the inputs: one more forward pass, and its 24 backward, for each image."""

    class Moved(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.criterion = self.criterion

        def criterion(self, module: Any, batch: Any) -> Tensor:
            inputs = batch.inputs.detach().requires_grad_()
            gradient = torch.autograd.grad(module.network(inputs).sum(), inputs)[0]
            return module.loss(batch._replace(inputs=batch.inputs + gradient.sign()))

    worker = participant()
    worker.flops = FlopCount()
    worker.execute(Fit("model", examples(8), start_of(), callbacks=(Moved(),)), 1, "a")
    assert worker.flops.total == 8 * (48 + 24 + 24)


def test_operations_are_not_counted_by_the_vectorised_engine() -> None:
    with pytest.raises(ValueError, match="count_flops is true, and the engine is 'vectorized'; it must be 'serial'"):
        federation(FedAvg(1), engine="vectorized", count_flops=True)


def test_max_time_holds_for_every_fit_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", SimpleNamespace(monotonic=lambda: next(clock)))
    worker = participant(trainer={"max_time": {"seconds": 3}, "max_epochs": 100})  # a look at the clock is a second
    data = examples(12)
    results = [worker.execute(Fit("model", data, start_of()), 1, "a") for _ in range(2)]
    assert [result.num_steps for result in results] == [3, 3]
    assert same(outcome(results[0]), plain_fit(data, (1, "a")))  # three steps are an epoch


@pytest.mark.parametrize("name", ["fedavg", "fednsam paper"])
def test_a_network_is_compiled_once_and_not_once_a_client(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that counts, and leaves the graph as it is; weights equal those without, and a batch of each size is
    compiled for training and one for evaluation."""
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    own = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: own(function, backend=counting, **options))
    states = []
    for compiled in (True, False):
        torch._dynamo.reset()
        loop = federation(FAMILY[name][0](rounds=2), (8, 8, 8, 8, 8), compile=compiled)
        loop.fit()
        states.append(loop.method.state_dict()["parameters"])
    assert states[0].keys() == states[1].keys()
    for n, value in states[0].items():
        torch.testing.assert_close(value, states[1][n], rtol=0, atol=1e-12)
    assert 1 <= len(graphs) <= 3  # of ten clients' fits


@pytest.mark.parametrize("engine", ["vectorized", "ray"])
def test_compiling_is_for_the_serial_engine(engine: str) -> None:
    with pytest.raises(ValueError, match=f"federation.compile is true, and the engine is '{engine}'"):
        federation(FedAvg(rounds=1), engine=engine, compile=True)


@pytest.mark.parametrize("engine", ["serial", "vectorized"])
def test_gradients_are_not_clipped_to_less_than_nothing(engine: str) -> None:
    for value in (-1, -0.5, float("nan")):
        with pytest.raises(ValueError, match=rf"trainer.gradient_clip_val is {value}; it must be at least 0, or null"):
            federation(FedAvg(rounds=1), trainer={"gradient_clip_val": value}, engine=engine)
    federation(FedAvg(rounds=1), trainer={"gradient_clip_val": 0}, engine=engine)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"max_steps": 0}, "max_steps is 0, .*must be at least 1, or -1 for no limit$"),
        ({"max_epochs": 0}, "max_epochs is 0; local epochs must be at least 1"),
        (
            {"max_epochs": 0, "max_steps": 5},
            "max_epochs is 0, .*must be at least 1, or -1 for no limit beside max_steps$",
        ),
        ({"limit_train_batches": 0}, r"limit_train_batches is 0, .*must be at least 1, or a share in \(0, 1\]$"),
        ({"limit_train_batches": 0.0}, "limit_train_batches is 0"),
    ],
)
def test_a_budget_of_nothing_is_refused(trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.{message}"):
        federation(FedAvg(rounds=1), trainer=trainer)


@pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        ({"max_epochs": 2, "max_steps": -1}, 4),
        ({"max_epochs": -1, "max_steps": 3}, 3),
        ({"limit_train_batches": 1}, 1),
        ({"max_epochs": 0, "max_steps": 0, "fast_dev_run": True}, 1),  # which brings its own budget
    ],
)
def test_budgets_with_one_limit(trainer: dict[str, Any], steps: int) -> None:
    assert participant(trainer=trainer).execute(Fit("model", examples(8)), "owner").num_steps == steps
