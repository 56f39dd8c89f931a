"""The vectorised engine gives the serial one's numbers, for every method and uneven clients, and refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from federation.tiny import federation, normalised, numbers, sgd
from lightning.pytorch import Callback
from methods.test_flat_family import FAMILY
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fl_lightning.data.augmentation import HorizontalFlip
from fl_lightning.data.examples import Annotated, Examples
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.engines.vectorized import Gradients, direct
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.sampling import UniformSampler
from fl_lightning.message import Message
from fl_lightning.methods import FedAvg, LocalOnly
from fl_lightning.methods.averaging import AveragingClient
from fl_lightning.methods.base import Client, Steps
from fl_lightning.rules.base import LocalRule, Tensors, tree_add_scaled
from fl_lightning.tasks import ClassificationTask, FederatedTask

METHODS = {name: make for name, (make, *_) in FAMILY.items()} | {"local_only": LocalOnly}
SIZES = (7, 12, 5, 4)  # steps of 4, 6, 4, 2 in two epochs, last batches of 3, 4, 1, 4


def close(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    """The same nested containers, tensors to a tolerance."""
    leaves = [torch.utils._pytree.tree_leaves(x) for x in (a, b)]
    for x, y in zip(*leaves, strict=True):
        if isinstance(x, Tensor) and x.is_floating_point():
            torch.testing.assert_close(x, y, rtol=0, atol=tolerance)
        else:
            assert type(x) is type(y)


def pair(make: Callable[[], Any], **options: Any) -> tuple[FederationLoop, FederationLoop]:
    loops = []
    for engine in ("vectorized", "serial"):
        loop = federation(make(), SIZES, engine=engine, **options)
        loop.fit()
        loops.append(loop)
    return loops[0], loops[1]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_and_uneven_clients(name: str) -> None:
    ours, serial = pair(
        lambda: METHODS[name](rounds=4),
        sampler=UniformSampler(size=3),
        trainer={"max_epochs": 2, "gradient_clip_val": 0.3},
        vectorized_clients=2,
    )
    close(ours.method.state_dict(), serial.method.state_dict())
    close(ours.memory.state_dict(), serial.memory.state_dict())
    for mine, theirs in zip(numbers(ours), numbers(serial), strict=True):
        assert mine.keys() == theirs.keys()
        # What is counted is the same; what is computed, nearly.
        assert mine == pytest.approx(theirs, abs=1e-6)
        counted = [k for k in mine if k.startswith(("comm/", "round/"))]
        assert [mine[k] for k in counted] == [theirs[k] for k in counted]


@pytest.mark.parametrize(
    "optimizer",
    [
        sgd(0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
    ],
    ids=["momentum", "adamw", "adagrad", "rmsprop"],
)
def test_optimizers_with_state(optimizer: Callable) -> None:
    """One who has finished does not drift on with momentum or weight decay while the others go on."""
    ours, serial = pair(lambda: FedAvg(rounds=2, lr_decay=0.5), optimizer=optimizer, trainer={"max_epochs": 3})
    close(ours.method.state_dict()["parameters"], serial.method.state_dict()["parameters"])


@pytest.mark.parametrize(
    "trainer", [{"max_steps": 3, "max_epochs": 9}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}]
)
def test_the_trainer_section_counts(trainer: dict[str, Any]) -> None:
    ours, serial = pair(lambda: FedAvg(rounds=2), trainer=trainer)
    close(ours.method.state_dict()["parameters"], serial.method.state_dict()["parameters"])
    assert ours.history[1]["round/gradients"] == serial.history[1]["round/gradients"]


def test_a_chunk_changes_nothing_but_memory() -> None:
    states = []
    for chunk in (1, 3, 64):
        loop = federation(FedAvg(rounds=2), SIZES, engine="vectorized", vectorized_clients=chunk)
        loop.fit()
        states.append(loop.method.state_dict()["parameters"])
    close(states[0], states[1])
    close(states[0], states[2])


class Dropping(nn.Sequential):
    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, num_classes).double())


class Whole(ClassificationTask):
    """Has no losses of single examples."""

    example_losses = FederatedTask.example_losses


class Idle(Callback):
    """Does nothing."""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"network": normalised}, "AveragingClient cannot be vectorised: BatchNorm1d keeps statistics"),
        ({"network": Dropping}, "AveragingClient cannot be vectorised: Dropout draws"),
        ({"trainer": {"accumulate_grad_batches": 2}}, "cannot be vectorised: .*accumulate_grad_batches"),
        ({"trainer": {"precision": "bf16-mixed"}}, "trainer.precision is bf16-mixed; it must be 32-true"),
        ({"trainer": {"callbacks": [Idle()]}}, "callback Idle watches single fits"),
        ({"data_options": {"augmentation": [HorizontalFlip()]}}, "data.augmentation draws"),
        ({"optimizer": lambda p: torch.optim.LBFGS(p)}, "LBFGS cannot be vectorised"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_differ_is_refused_before_training(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        federation(FedAvg(rounds=1), (6, 6), engine="vectorized", **options).fit()


@dataclass(frozen=True)
class Watching(AveragingClient):
    """Sends a callback along that the lean loop would call."""

    def update(self, client: Client, message: Message) -> Steps:
        steps = super().update(client, message)
        return (yield from self._watched(steps))

    def _watched(self, steps: Steps) -> Steps:
        reply = yield replace(next(steps), callbacks=(Light(),))  # type: ignore[arg-type]
        return steps.send(reply)


class Light(Callback):
    runs_lean = True


def test_a_fits_own_callback_is_never_skipped() -> None:
    loop = federation(FedAvg(rounds=1), (6, 6), engine="vectorized")
    loop.program = Watching()
    with pytest.raises(ValueError, match="Watching cannot be vectorised: Light watches single fits"):
        loop.fit()


@pytest.mark.parametrize("name", ["loss", "training_step", "on_before_optimizer_step", "setup", "cached"])
def test_a_tasks_own_code_is_never_skipped(name: str) -> None:
    loop = federation(FedAvg(rounds=1), (6, 6), engine="vectorized")
    own = getattr(ClassificationTask, name)
    kind = type("Own", (ClassificationTask,), {name: lambda self, *a, **k: own(self, *a, **k)})
    loop.participant.tasks["model"].__class__ = kind
    with pytest.raises(ValueError, match=f"cannot be vectorised: .*(own {name})"):
        loop.fit()


@dataclass(frozen=True)
class Annotating(AveragingClient):
    """Trains on examples with a further column, or with augmentation of its own."""

    augmented: bool = False

    def update(self, client: Client, message: Message) -> Steps:
        train: Examples = client.train.select(range(len(client.train)))
        if self.augmented:
            train.augmentation = (HorizontalFlip(),)
        else:
            train = Annotated(train, {"soft": torch.zeros(len(train), 2)})
        return super().update(replace(client, train=train), message)


@pytest.mark.parametrize(
    ("augmented", "text"), [(False, r"examples have columns \(soft\)"), (True, "augmentation draws")]
)
def test_what_examples_bring_along_is_never_ignored(augmented: bool, text: str) -> None:
    loop = federation(FedAvg(rounds=1), (6, 6), engine="vectorized")
    loop.program = Annotating("average", augmented)
    with pytest.raises(ValueError, match=f"Annotating cannot be vectorised: {text}"):
        loop.fit()


def test_parameter_groups_are_refused() -> None:
    """By number of dimensions they would be other groups in a stack."""

    def grouped(parameters: Any) -> torch.optim.Optimizer:
        bias = [p for p in parameters if p.ndim == 1]
        weights = [p for p in parameters if p.ndim > 1]
        return torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": bias}], lr=0.1)

    with pytest.raises(ValueError, match="parameter groups"):
        federation(FedAvg(rounds=1), (6, 6), engine="vectorized", optimizer=grouped).fit()


def test_a_task_without_losses_of_examples_is_refused() -> None:
    loop = federation(FedAvg(rounds=1), (6, 6), engine="vectorized")
    loop.participant.tasks["model"].__class__ = Whole
    with pytest.raises(ValueError, match="Whole has no example_losses"):
        loop.fit()


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"federation.engine is 'fast'; allowed: 'serial', 'vectorized', 'ray'"):
        federation(FedAvg(rounds=1), engine="fast")
    with pytest.raises(ValueError, match=r"federation.vectorized_clients is 0; it must be at least 1"):
        federation(FedAvg(rounds=1), engine="vectorized", vectorized_clients=0)


class Biased(nn.Module):
    """A layer with a fixed tensor beside it."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, num_classes)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.flatten(1) * self.scale) + self.layer(inputs.flatten(1)).square()


def test_gradients_written_down_are_each_clients_own_and_see_the_tasks_tensors_as_they_are() -> None:
    task = ClassificationTask(Biased)
    task.network = Biased((1, 2, 2), 3)
    draw = torch.Generator().manual_seed(1)
    inputs, labels = torch.rand(5, 6, 1, 2, 2, generator=draw), torch.randint(0, 3, (5, 6), generator=draw)
    mask = torch.ones(5, 6)
    mask[2, 4:] = 0
    params = {n: torch.randn(5, *p.shape, generator=draw) for n, p in task.trainable().items()}
    gradients = Gradients(task)
    for scale in (2.0, 3.0):
        task.network.scale.fill_(scale)
        *found, losses = gradients.of(params, inputs, labels, mask)(inputs, labels, mask, *params.values())
        assert len(gradients.known) == 1
        for k in range(5):
            task.load({n: stack[k] for n, stack in params.items()})
            own = mask[k].bool()
            loss = nn.functional.cross_entropy(task.logits(inputs[k][own]), labels[k][own])
            for ours, theirs in zip(found, torch.autograd.grad(loss, list(task.parameters())), strict=True):
                torch.testing.assert_close(ours[k], theirs)
            torch.testing.assert_close(losses[k], loss)


def test_a_shorter_list_of_operations_gives_the_same_and_one_that_writes_is_left_alone() -> None:
    def plain(x: Tensor) -> Tensor:
        same = x.view(x.shape).expand(x.shape)
        return (same.sin() + x.sin()) @ same.transpose(0, 1).transpose(0, 1).mT

    def writing(x: Tensor) -> Tensor:
        first, second = x.clone(), x.clone()
        return first.add_(1) + second

    x = torch.rand(3, 3)
    graph = make_fx(plain)(x)
    before = len(graph.graph.nodes)
    assert torch.equal(direct(graph)(x), plain(x))
    assert len(graph.graph.nodes) < before - 4  # two views, two swaps and a sine
    assert torch.equal(direct(make_fx(writing)(x))(x), writing(x))


def test_a_reply_is_taken_in_before_the_next_one_is_made() -> None:
    seen: list[tuple[str, str]] = []

    class Made(AveragingClient):
        def upload(self, client: Client, *arguments: Any) -> dict:
            seen.append(("made", client.key))
            return {}

    class Taken(FederationCallback):
        def on_reply(self, loop: FederationLoop, reply: Any) -> None:
            seen.append(("taken", reply.message.sender))

    loop = federation(FedAvg(rounds=1), SIZES, engine="vectorized", callbacks=[Taken()])
    loop.program = Made()
    loop.fit()
    assert seen == [(what, key) for key in loop.info.clients for what in ("made", "taken")]


class TwoBiases(nn.Module):
    """Their gradients are the same operation."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(4, num_classes).double() for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.one(inputs.flatten(1)) + self.other(inputs.flatten(1))


def test_an_optimizer_that_writes_into_gradients_finds_each_in_memory_of_its_own() -> None:
    optimizer = sgd(0.1, momentum=0.9, nesterov=True, foreach=True)  # on a GPU, torch's default
    ours, serial = pair(lambda: FedAvg(rounds=1), network=TwoBiases, optimizer=optimizer)
    close(ours.method.state_dict()["parameters"], serial.method.state_dict()["parameters"])


class Convolving(nn.Sequential):
    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        layers = nn.Conv2d(1, 3, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(27, num_classes)
        super().__init__(*(layer.double() for layer in layers))


@dataclass(frozen=True)
class AtStart(LocalRule):
    """Half of its direction is the gradient where the fit started, which is one place for all clients."""

    perturbs = True

    def constants(self, start: Tensors, given: Any) -> dict[str, Any]:
        return {"start": start}

    def direction(self, oracle: Any, params: Tensors, constants: Any, carry: Any, step: int) -> tuple[Tensors, Any]:
        return tree_add_scaled(oracle(params), oracle(constants["start"]), 1.0), carry


class FromStart(AveragingClient):
    def rules(self, client: Client, message: Message) -> tuple[LocalRule, ...]:
        return (AtStart(),)


def test_a_rule_may_ask_at_parameters_that_all_clients_share() -> None:
    found = []
    for engine in ("vectorized", "serial"):
        loop = federation(FedAvg(rounds=1), SIZES, network=Convolving, engine=engine)
        loop.program = FromStart()
        loop.fit()
        found.append(loop.method.state_dict()["parameters"])
    close(*found)
