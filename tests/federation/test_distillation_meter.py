"""The theory's meter on a linear model with two patches, against what is written out here; it disturbs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation.tiny import federation, numbers, same
from lightning.pytorch import Callback
from torch import Tensor, nn

from fl_lightning.data.bank import Bank, Provenance
from fl_lightning.data.examples import Annotated, Examples, TensorExamples
from fl_lightning.federation.distillation import DistillationMeter
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.losses.distillation import distillation_kl
from fl_lightning.methods import FedAvg, NoiseDistillation
from fl_lightning.methods.base import Method, Server, Training
from fl_lightning.methods.distillation import OneShotDistillation
from fl_lightning.metrics.distillation_theory import stability_bound
from fl_lightning.metrics.flatness import hessian_eigenvalues
from fl_lightning.report.theory import LINES
from fl_lightning.rng import torch_generator

IMAGES, RATE, STEPS = 12, 0.1, 3


class TwoRows(nn.Module):
    """Linear scores of images of two rows, each a patch; a row that is not kept is black."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.patch = (1, 2)
        self.linear = nn.Linear(4, classes)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        rows = images.flatten(1).unflatten(1, (2, 2))
        if keep is not None:
            rows = rows * torch.zeros(rows.shape[:2]).scatter(1, keep, 1.0)[..., None]
        return self.linear(rows.flatten(1))


class Relabel(Callback):
    """Cross-entropy on what is kept, the teachers' answer on the rest; for one fit alone."""

    used = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        assert not self.used
        self.used = True
        pl_module.criterion = lambda task, batch: relabelled(
            task.logits(batch.inputs, keep=batch.extras["keep"]),
            batch.labels,
            task.logits(batch.inputs, keep=batch.extras["low"]),
            batch.extras["soft"],
        )


def relabelled(kept: Tensor, labels: Tensor, low: Tensor, soft: Tensor) -> Tensor:
    return F.cross_entropy(kept, labels) + distillation_kl(low, soft)


class Planted(OneShotDistillation):
    """A student on random images, of which a random row is kept where they are sparse."""

    def __init__(self, sparse: bool, batch: int = IMAGES, cosine: bool = False, **common: Any) -> None:
        super().__init__(student=Training(STEPS, batch, cosine), **common)
        self.sparse = sparse

    def distil(self, server: Server) -> Mapping[str, float]:
        draw = torch_generator(server.seed, "planted")
        images = torch.rand(IMAGES, 1, 2, 2, generator=draw)
        keep = torch.randint(2, (IMAGES, 1), generator=draw)
        parts = [(Provenance("0", c, tuple(range(4))), images[4 * c : 4 * c + 4]) for c in range(3)]
        self.bank = Bank(parts, columns={"keep": keep, "low": 1 - keep} if self.sparse else {})
        data: Examples = self.bank
        if self.sparse:
            rest = Annotated(TensorExamples(data.inputs, data.labels), {"keep": 1 - keep})
            data = Annotated(data, {"soft": self.soft_labels(server, rest, ("soft",))})
        self.train_student(server, data, ("student",), (Relabel(),) if self.sparse else ())
        return {}


def run(method: Method, meter: DistillationMeter | None = None, network: Callable = TwoRows) -> FederationLoop:
    loop = federation(
        method, network=network, data_options={"dtype": torch.float32}, callbacks=[meter] if meter is not None else []
    )
    loop.fit()
    return loop


def found(loop: FederationLoop) -> dict[str, float]:
    return {k.removeprefix("theory/"): v for k, v in loop.history[-1].items() if k.startswith("theory/")}


class Plain:
    """The student's problem, written out in float64."""

    def __init__(self, method: Planted) -> None:
        assert method.bank is not None
        self.images = method.bank.inputs.double() / 255
        self.labels = method.bank.labels
        self.keep = method.bank.columns.get("keep")
        self.teachers = [
            [u["network.linear.weight"], u["network.linear.bias"]] for _, u in sorted(method.uploads.items())
        ]

    def scores(self, w: list[Tensor], images: Tensor, keep: Tensor | None) -> Tensor:
        rows = images.flatten(1).unflatten(1, (2, 2))
        if keep is not None:
            rows = rows * F.one_hot(keep[:, 0], 2)[..., None]
        return F.linear(rows.flatten(1), w[0].double(), w[1].double())

    def teacher(self, images: Tensor, keep: Tensor | None) -> Tensor:
        return torch.stack([self.scores(t, images, keep) for t in self.teachers]).mean(0)

    def loss(self, w: list[Tensor], which: Tensor) -> Tensor:
        images, labels = self.images[which], self.labels[which]
        if self.keep is None:
            return F.cross_entropy(self.scores(w, images, None), labels)
        keep = self.keep[which]
        soft = self.teacher(images, 1 - keep)
        return relabelled(self.scores(w, images, keep), labels, self.scores(w, images, 1 - keep), soft)

    def gradient(self, w: list[Tensor], which: Tensor) -> Tensor:
        leaves = [t.detach().double().requires_grad_() for t in w]
        return torch.cat([g.flatten() for g in torch.autograd.grad(self.loss(leaves, which), leaves)])

    def trained(self, start: list[Tensor], which: Tensor) -> list[Tensor]:
        """Gradient descent on all images at once."""
        flat = torch.cat([t.double().flatten() for t in start])
        for _ in range(STEPS):
            flat = flat - RATE * self.gradient([flat[:12].view(3, 4), flat[12:]], which)
        return [flat[:12].view(3, 4), flat[12:]]


def weights(state: Mapping[str, Tensor]) -> list[Tensor]:
    return [state["network.linear.weight"], state["network.linear.bias"]]


EVERYTHING = torch.arange(IMAGES)


@pytest.mark.parametrize("sparse", [True, False])
def test_disturbs_nothing(sparse: bool) -> None:
    loop, plain = run(Planted(sparse), DistillationMeter(replaced=2)), run(Planted(sparse))
    assert found(loop)
    assert not [name for name in loop.history[0] if name.startswith("theory/")]
    assert same(plain.method.state_dict(), loop.method.state_dict())
    assert same(plain.model.state(), loop.model.state())
    assert plain.participant.num_gradients == loop.participant.num_gradients
    shared = [{k: v for k, v in row.items() if not k.startswith("theory/")} for row in numbers(loop)]
    assert shared == numbers(plain)
    assert loop.callbacks[0].measure(loop) == {}  # measured once


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_on_the_way(sparse: bool) -> None:
    loop = run(method := Planted(sparse), DistillationMeter(points=(0, 1), radius=0.01))
    row, plain = found(loop), Plain(method)
    largest = []
    for share, state in {0: method.start, 100: method.student}.items():
        w = weights(state)
        gradient = plain.gradient(w, EVERYTHING)
        assert row[f"L_max@{share}"] == pytest.approx(float(gradient.norm()), rel=1e-4)
        assert row[f"L_mean@{share}"] == row[f"L_max@{share}"]  # one batch
        assert row[f"variance@{share}"] == pytest.approx(0, abs=1e-5)
        flat = torch.cat([t.double().flatten() for t in w]) + 0.01 * gradient / gradient.norm()
        there = plain.gradient([flat[:12].view(3, 4), flat[12:]], EVERYTHING)
        assert row[f"beta_gradient@{share}"] == pytest.approx(float((there - gradient).norm()) / 0.01, rel=1e-2)

        def of_params(params: Mapping[str, Tensor]) -> Tensor:
            return plain.loss([params["w"], params["b"]], EVERYTHING)

        point = {"w": w[0].double(), "b": w[1].double()}
        top = hessian_eigenvalues(of_params, point, generator=torch_generator(0)).values[0]
        assert row[f"lambda_1@{share}"] == pytest.approx(top, rel=1e-3)
        assert 0 < row[f"beta_random@{share}"] < top * 1.01
        largest += [row[f"beta_gradient@{share}"], row[f"beta_random@{share}"]]
    assert row["L"] == max(row["L_max@0"], row["L_max@100"])
    assert row["L_mean"] == pytest.approx((row["L_mean@0"] + row["L_mean@100"]) / 2)
    assert row["beta"] == max(largest)
    assert row["step_constant"] == pytest.approx(RATE * STEPS)
    assert row["bound"] == stability_bound(row["L"], row["beta"], row["step_constant"], STEPS, IMAGES)


def test_variance_over_batches_of_the_trainings_size() -> None:
    loop = run(
        method := Planted(True, 4, cosine=True), DistillationMeter(num_examples=11, points=(0,), eigenvalue=False)
    )
    row, plain = found(loop), Plain(method)
    order = torch.randperm(IMAGES, generator=torch_generator(loop.seed, "theory", "images"))[:8]  # two whole batches
    gradients = torch.stack([plain.gradient(weights(method.start), batch) for batch in order.split(4)])
    mean = gradients.mean(0)
    assert row["spread@0"] == pytest.approx(float((gradients - mean).square().sum(1).mean()), rel=1e-3)
    assert row["variance@0"] == pytest.approx(
        float((gradients - mean).square().sum(1).mean() / mean.square().sum()), rel=1e-3
    )
    assert row["L_max@0"] == pytest.approx(float(gradients.norm(dim=1).max()), rel=1e-4)
    assert "lambda_1@0" not in row
    assert row["step_constant"] == pytest.approx(RATE * 2 * 0.75)  # of t (1 + cos(pi (t - 1) / 3)) / 2 for t = 1, 2, 3


def test_views_and_labels() -> None:
    loop = run(method := Planted(True), DistillationMeter(points=(1,), draws=500))
    row, plain = found(loop), Plain(method)
    w, labels = weights(method.student), F.one_hot(plain.labels, 3)
    real = loop.data.test_sets()["global"]
    kept = plain.scores(w, plain.images, plain.keep)
    accuracy = float((kept.argmax(1) == plain.labels).double().mean())
    on_real = plain.scores(w, real.fetch(torch.arange(len(real))).double(), None)
    assert row["synthetic_acc"] == pytest.approx(accuracy)
    assert row["gap"] == pytest.approx(accuracy - float((on_real.argmax(1) == real.labels).double().mean()))
    assert plain.keep is not None
    for view, keep in {"kept": plain.keep, "low": 1 - plain.keep, "full": None}.items():
        p, teacher = plain.scores(w, plain.images, keep).softmax(1), plain.teacher(plain.images, keep)
        q = teacher.softmax(1)
        assert row[f"agreement_{view}"] == pytest.approx(float((teacher.argmax(1) == plain.labels).double().mean()))
        removed = float((1 - q.square().sum(1)).mean())
        assert row[f"removed_variance_{view}"] == pytest.approx(removed, rel=1e-4)
        assert row[f"removed_variance_{view}_sampled"] == pytest.approx(removed, abs=0.05)
        assert row[f"label_bias_{view}"] == pytest.approx(float((q - labels).square().sum(1).mean()), rel=1e-4)
        for kind, target in {"hard": labels, "soft": q}.items():
            trace = torch.cov((p - target).T, correction=0).trace()
            assert row[f"covariance_{kind}_{view}"] == pytest.approx(float(trace), rel=1e-3)
        assert row[f"high_frequency_{view}"] == 1  # a patch of two pixels has no other
    # Losses that were not trained with: the gradient of cross-entropy is X'(p - target) / N.
    cases = {
        "hard_kept": (plain.keep, labels),
        "hard_low": (1 - plain.keep, labels),
        "soft_low": (1 - plain.keep, None),
    }
    for name, (keep, target) in cases.items():
        target = plain.teacher(plain.images, keep).softmax(1) if target is None else target
        rows = (plain.images.flatten(1).unflatten(1, (2, 2)) * F.one_hot(keep[:, 0], 2)[..., None]).flatten(1)
        rows = torch.cat([rows, torch.ones(IMAGES, 1).double()], 1)
        slope = rows.T @ (plain.scores(w, plain.images, keep).softmax(1) - target) / IMAGES
        assert row[f"{name}/L"] == pytest.approx(float(slope.norm()), rel=1e-3)


def test_without_dropped_patches_there_is_no_low_view() -> None:
    dense, sparse = (found(run(Planted(kind), DistillationMeter())) for kind in (False, True))
    assert dense.keys() < sparse.keys()
    assert {name for name in sparse if "low" in name} == sparse.keys() - dense.keys()
    assert {column for line in LINES for _, column in (line.smaller, line.larger)} <= sparse.keys()
    for name in ("agreement", "removed_variance", "covariance_hard", "high_frequency"):
        assert dense[f"{name}_kept"] == dense[f"{name}_full"]
    assert dense["hard_kept/L"] == pytest.approx(dense["L"])  # what it was trained with


@pytest.mark.parametrize("sparse", [True, False])
def test_one_image_replaced(sparse: bool) -> None:
    loop = run(method := Planted(sparse), DistillationMeter(points=(0,), replaced=2))
    row, plain = found(loop), Plain(method)
    start = weights(method.start)
    trained, distances, changes = plain.trained(start, EVERYTHING), [], []
    real = loop.data.test_sets()["global"]
    images = real.fetch(torch.arange(len(real))).double()
    for number in range(2):
        order = torch.randperm(IMAGES, generator=torch_generator(loop.seed, "theory", "replaced", number))
        which = EVERYTHING.clone()
        which[order[0]] = order[1]
        other = plain.trained(start, which)
        distances.append(float(torch.cat([(a - b).flatten() for a, b in zip(trained, other, strict=True)]).norm()))
        losses = [
            F.cross_entropy(plain.scores(w, images, None), real.labels, reduction="none") for w in (trained, other)
        ]
        changes.append(float((losses[0] - losses[1]).abs().max()))
    assert row["weights_apart"] == pytest.approx(sum(distances) / 2, rel=1e-3)
    assert row["loss_apart"] == pytest.approx(max(changes), rel=1e-3)
    none = found(run(Planted(sparse), DistillationMeter(points=(0,), replaced=0)))
    assert row.keys() - none.keys() == {"weights_apart", "loss_apart"}


@pytest.mark.parametrize("always", [True, False])
def test_looking_does_not_change_a_training_that_draws(always: bool) -> None:
    class Forgetful(TwoRows):
        def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
            return super().forward(F.dropout(images, 0.5, always or self.training), keep)

    often, once = (
        found(run(Planted(False, 4), DistillationMeter(points=points), Forgetful)) for points in ((0, 0.4, 1), (1,))
    )
    assert {name: often[name] for name in once if "@100" in name} == {
        name: once[name] for name in once if "@100" in name
    }
    assert often["weights_apart"] == once["weights_apart"]


def test_only_what_is_trained_counts() -> None:
    class Deep(TwoRows):
        def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
            super().__init__(shape, 5)
            self.head = nn.Linear(5, classes)

        def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
            return self.head(super().forward(images, keep).relu())

    lengths = [
        found(run(Planted(False, trainable=which), DistillationMeter(points=(0,)), Deep))["L_max@0"]
        for which in ("head", "all")
    ]
    assert lengths[0] < lengths[1]


@pytest.mark.parametrize("method", [FedAvg(1), NoiseDistillation(student=Training(2, 4), images=9)])
def test_nothing_to_measure_without_labelled_images_of_the_servers(method: Method) -> None:
    assert not found(run(method, DistillationMeter()))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"num_examples": 0}, "num_examples is 0; it must be at least 1"),
        ({"directions": 0}, "directions is 0; it must be at least 1"),
        ({"replaced": -1}, "replaced is -1; it must be at least 0"),
        ({"draws": 0}, "draws is 0; it must be at least 1"),
        ({"points": [0.5, 1.5]}, r"points is \[0.5, 1.5\]; it must hold shares in \[0, 1\]"),
        ({"points": []}, r"points is \[\]"),
        ({"radius": 0}, "radius is 0; it must be above 0 and finite"),
    ],
)
def test_wrong_arguments(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"DistillationMeter.{message}"):
        DistillationMeter(**argument)
