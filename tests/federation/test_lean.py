"""The lean client loop is the Trainer to the last bit, and says where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federation.tiny import CPU, federation, normalised, numbers, same, task
from lightning.pytorch import Callback
from methods.test_flat_family import FAMILY

from fl_lightning.federation.participant import Participant
from fl_lightning.federation.sampling import UniformSampler
from fl_lightning.methods import FedAvg, LocalOnly
from fl_lightning.tasks import ClassificationTask

METHODS = {name: make for name, (make, *_) in FAMILY.items()} | {"local_only": LocalOnly}


@pytest.mark.parametrize(
    "options",
    [
        {"trainer": {"max_epochs": 2, "gradient_clip_val": 0.5}, "network": normalised, "batch_size": 3},
        {"trainer": {"max_epochs": 3, "max_steps": 4, "precision": "bf16-mixed"}},
    ],
    ids=["batchnorm, clipping", "bf16, steps"],
)
@pytest.mark.parametrize("name", METHODS)
def test_lean_is_the_trainer_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    loops = []
    for client_loop in ("lean", "trainer"):
        torch.manual_seed(1)
        loop = federation(
            METHODS[name](rounds=3), (6, 12, 6), sampler=UniformSampler(size=2), client_loop=client_loop, **options
        )
        loop.fit()
        loops.append(loop)
    lean, trainer = loops
    assert same(lean.method.state_dict(), trainer.method.state_dict())
    assert same(lean.memory.state_dict(), trainer.memory.state_dict())
    assert numbers(lean) == numbers(trainer)


class Watched(ClassificationTask):
    """Writes down the hooks of a fit, and Lightning's counters as it sees them."""

    seen: list[Any] = []

    def on_train_start(self) -> None:
        self.seen.append("start")

    def on_train_epoch_start(self) -> None:
        self.seen.append(("epoch", self.current_epoch))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append("zero_grad")

    def on_before_backward(self, loss: Any) -> None:
        self.seen.append("backward")

    def on_after_backward(self) -> None:
        self.seen.append("after")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(("step", self.global_step))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("batch", batch_idx, self.global_step))

    def on_train_epoch_end(self) -> None:
        self.seen.append("epoch end")

    def on_train_end(self) -> None:
        self.seen.append("end")

    def on_fit_end(self) -> None:
        self.seen.append("fit end")


def test_a_tasks_own_hooks_run_in_lightnings_order() -> None:
    from federation.tiny import data, linear, sgd

    from fl_lightning.methods.base import Fit

    orders = []
    for client_loop in ("lean", "trainer"):
        built = Watched(linear, sgd(), mean=[0.0], std=[1.0])
        built.build(data((7,)).info, 0)
        Watched.seen = []
        worker = Participant({"model": built}, {**CPU, "max_epochs": 2}, 4, 0, client_loop=client_loop)  # type: ignore[arg-type]
        worker.execute(Fit("model", data((7,)).train("0")), 1, "0")
        orders.append(Watched.seen)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 2 * 2 + 2 * 5 * 2 + 3


class Light(Callback):
    """Writes down its hooks, and asks to be run by the lean loop too."""

    runs_lean = True

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("light fit start")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("light start")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(
            ("light batch start", len(batch.inputs), batch_idx, trainer.global_step, trainer.current_epoch)
        )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(("light step", pl_module.num_gradients))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("light batch", batch_idx, trainer.global_step))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("light end")


class Heavy(Light):
    """Has a hook that the lean loop does not call."""

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("heavy check")


def test_light_callbacks_run_in_lightnings_order_and_heavy_ones_need_the_trainer() -> None:
    from federation.tiny import data, linear, sgd

    from fl_lightning.methods.base import Fit

    def order(callback: Callback, client_loop: Any) -> list[Any]:
        built = Watched(linear, sgd(), mean=[0.0], std=[1.0])
        built.build(data((7,)).info, 0)
        worker = Participant({"model": built}, {**CPU, "max_epochs": 2}, 4, 0, client_loop=client_loop)
        worker.execute(Fit("model", data((7,)).train("0"), callbacks=(callback,)), 1, "0")
        return Watched.seen

    orders = []
    for client_loop in ("lean", "trainer"):
        Watched.seen = []
        orders.append(order(Light(Watched.seen), client_loop))
    assert orders[0] == orders[1]
    assert len(orders[0]) == 2 * 2 + 2 * 5 * 2 + 3 + 3 + 3 * 2 * 2  # the task's own, as above, and the callback's
    with pytest.raises(ValueError, match="needs Lightning's Trainer because of the callback Heavy"):
        order(Heavy([]), "lean")


class Idle(Callback):
    """Does nothing."""


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        ({"callbacks": [Idle()]}, "of the callback Idle"),
        ({"accumulate_grad_batches": 2}, "of trainer.accumulate_grad_batches"),
        ({"limit_train_batches": 1}, "of trainer.limit_train_batches"),
        ({"detect_anomaly": True}, "of trainer.detect_anomaly"),
        ({"fast_dev_run": True}, "of trainer.(limit_train_batches|fast_dev_run)"),
        ({"min_epochs": 1}, "of trainer.min_epochs"),
    ],
)
def test_what_needs_the_trainer_is_named(trainer: dict[str, Any], reason: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(
        ValueError, match=f"client_loop is 'lean', but a fit needs Lightning's Trainer because {reason}"
    ):
        federation(FedAvg(rounds=1), trainer=trainer, client_loop="lean").fit()
    capsys.readouterr()
    federation(FedAvg(rounds=2), trainer=trainer).fit()  # auto
    told = [line for line in capsys.readouterr().err.splitlines() if "run under Lightning's Trainer because" in line]
    assert len(told) == 1  # once


def test_an_unknown_loop_is_refused() -> None:
    with pytest.raises(ValueError, match=r"client_loop is 'fast'; allowed: 'auto', 'trainer', 'lean'"):
        federation(FedAvg(rounds=1), client_loop="fast")
    with pytest.raises(ValueError, match=r"client_loop is 'fast'; allowed: 'auto', 'trainer', 'lean'"):
        Participant({"model": task()}, CPU, 4, 0, client_loop="fast")  # type: ignore[arg-type]
