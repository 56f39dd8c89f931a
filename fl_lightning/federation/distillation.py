"""What the theory of one-shot distillation claims, measured where a server has trained a student on images of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor

from fl_lightning.data.examples import Annotated, Examples, TensorExamples
from fl_lightning.federation.callbacks import FederationCallback, Row
from fl_lightning.federation.flatness import Criterion, mean_loss
from fl_lightning.losses.distillation import distillation_kl
from fl_lightning.message import Tensors
from fl_lightning.methods.base import SERVER, Distillation, Fit, Predict, unused
from fl_lightning.metrics import distillation_theory as theory
from fl_lightning.metrics.flatness import hessian_eigenvalues, moved, norm, random_direction
from fl_lightning.rng import owned_global_rng, torch_generator
from fl_lightning.tasks.base import Batch, FederatedTask

if TYPE_CHECKING:
    from fl_lightning.federation.loop import FederationLoop

_OWNER = "theory"


class DistillationMeter(FederationCallback):
    """Measures what FedMITR's theory speaks of, into the row of the round in which a server has trained a student on its
    synthetic images, under ``theory/``. The run computes the same to the last bit.

    The student's last training is made again, with the same draws, and looked at on its way. Losses are those of a fixed
    sample of its images, in evaluation mode, without weight decay or augmentation, in batches as large as the training's.
    Images are seen in three views: ``kept`` are the patches of column ``keep``, ``low`` those of column ``low``, ``full``
    all of them. Where no patch was dropped, ``kept`` is ``full`` and there is no ``low``.

    - ``L_mean``, ``L_max``, ``spread``, ``variance`` (M1, M4): mean and largest norm of a batch's gradient, the variance of
      batches' gradients, and the same relative to the squared norm of their mean. ``beta_random``, ``beta_gradient``,
      ``lambda_1`` (M2): change of the gradient per length of a step at random and along the gradient, and the Hessian's
      largest eigenvalue. Each with ``@<percent of the training>``, of the loss that the student was trained with.
    - ``L``, ``beta``, ``L_mean``, ``spread``, ``variance``: the largest ``L_max`` and beta of all these points, the means of
      the others. Also of three losses that were not trained with, under their names: ``hard_kept/`` and ``hard_low/``,
      cross-entropy to the image's label, and ``soft_low/``, KL divergence from the teachers' answer to the same patches
      (T = 1).
    - ``step_constant``, ``bound``: c = max_t t * (learning rate of step t), and `stability_bound` of L, beta and c. See its
      caveats: it says nothing about the shift from synthetic to real images.
    - ``removed_variance_<view>`` and ``..._sampled`` (M3): mean of 1 - ||q||^2, q the teachers' answer (T = 1; of a
      "mean" made at another T, the softmax at 1 of its scores), and the same from drawn labels.
      ``covariance_hard_<view>``, ``covariance_soft_<view>``: traces of the covariance, over images, of the gradients of the
      scores p - e_y and p - q. ``label_bias_<view>``: mean ||q - e_y||^2, which no variance covers.
    - ``weights_apart``, ``loss_apart`` (M5): distance of the weights after a training in which another image of the set
      took the place of one, and the largest change of the loss of a real test image; mean and maximum over trainings.
    - ``synthetic_acc``, ``gap`` (M6): accuracy on the sample (``kept``), and how far accuracy on real test images is below.
    - ``high_frequency_<view>`` (M7): `high_frequency_share`, for a model with patches (an attribute ``patch`` of a module).
    - ``agreement_<view>`` (M8): share of images to which the teachers give their label.

    A method that trains its student in many fits is measured in the last of them.

    Args:
        num_examples: Most synthetic images to measure on, at least 1; cut to whole batches.
        points: Where to look, as shares of the training in [0, 1]; at least one.
        radius: Length of the steps of beta, above 0; the norm is over all trained parameters together.
        directions: Random directions of beta, at least 1.
        eigenvalue: Measure ``lambda_1``: some 20 Hessian-vector products a point.
        replaced: Trainings with one image replaced, at least 0; each costs as much as the student's.
        draws: Labels drawn per image for the check of M3, at least 1.
    """

    def __init__(
        self,
        num_examples: int = 512,
        points: Sequence[float] = (0.0, 0.5, 1.0),
        radius: float = 0.05,
        directions: int = 1,
        eigenvalue: bool = True,
        replaced: int = 1,
        draws: int = 64,
    ) -> None:
        for name, value, least in (
            ("num_examples", num_examples, 1),
            ("directions", directions, 1),
            ("replaced", replaced, 0),
            ("draws", draws, 1),
        ):
            if value < least:
                raise ValueError(f"DistillationMeter.{name} is {value}; it must be at least {least}")
        if not points or not all(0 <= share <= 1 for share in points):
            raise ValueError(f"DistillationMeter.points is {list(points)}; it must hold shares in [0, 1], at least one")
        if not 0 < radius < math.inf:
            raise ValueError(f"DistillationMeter.radius is {radius}; it must be above 0 and finite")
        self.num_examples, self.points, self.radius, self.directions = num_examples, tuple(points), radius, directions
        self.eigenvalue, self.replaced, self.draws = eigenvalue, replaced, draws
        self.seen: Fit | None = None

    def measure(self, loop: FederationLoop) -> Row:
        found = loop.method.distillation()
        if found is None or found.fit is self.seen or loop.method.synthetic() is None:
            return {}
        self.seen, started = found.fit, time.perf_counter()
        participant = loop.participant
        task, num_gradients = participant.tasks[found.fit.task], participant.num_gradients
        state = task.state()
        try:
            row = _Measurement(self, loop, found).row()
        finally:
            task.load(state)
            participant.num_gradients = num_gradients  # measuring is no training
        return {f"theory/{name}": value for name, value in row.items()} | {"time/theory": time.perf_counter() - started}


class _Measurement:
    """One distillation as it is measured."""

    def __init__(self, meter: DistillationMeter, loop: FederationLoop, found: Distillation) -> None:
        self.meter, self.loop, self.fit, self.teacher = meter, loop, found.fit, found.teacher
        self.participant, data = loop.participant, found.fit.data
        self.batch = min(self.participant.budget(self.fit.overrides)[2], len(data))
        count = min(meter.num_examples, len(data))
        count -= count % self.batch if count > self.batch else 0
        sample = data.select(torch.randperm(len(data), generator=self._draw("images"))[:count])
        columns = sample.extras(whole := torch.arange(count))
        self.images = TensorExamples(sample.fetch(whole), sample.labels)
        low = columns["low"] if "low" in columns and columns["low"].shape[1] else None
        self.patches: dict[str, Tensor | None] = {"kept": columns["keep"] if low is not None else None, "full": None}
        self.patches |= {} if low is None else {"low": low}
        self.views = {name: self._view(keep) for name, keep in self.patches.items()}
        self.soft = {name: self._scores(self.teacher, view) for name, view in self.views.items()}
        self.trained_on = sample

    def row(self) -> dict[str, float]:
        """All numbers by name."""
        probe = _Probe(self.meter.points, self._at_a_point)
        after = self._train(self.fit, probe)
        real = self.loop.data.test_sets()["global"]
        own, on_real = self._student(after, self.views["kept"]), self._student(after, real)
        accuracy = _accuracy(own, self.images.labels)
        return (
            self._on_the_way(probe)
            | self._labels(after)
            | self._stability(after, real, on_real)
            | {"synthetic_acc": accuracy, "gap": accuracy - _accuracy(on_real, real.labels)}
            | self._spectra()
            | {f"agreement_{view}": _accuracy(self.soft[view], self.images.labels) for view in self.views}
        )

    # ---- what the run can do

    def _draw(self, *owner: object) -> torch.Generator:
        return torch_generator(self.loop.seed, _OWNER, *owner)

    def _view(self, keep: Tensor | None) -> Examples:
        return self.images if keep is None else Annotated(self.images, {"keep": keep})

    def _train(self, fit: Fit, *more: Callback) -> dict[str, Tensor]:
        """A training as the server's own: parameters and buffers after it."""
        fit = unused(fit)
        fit = replace(fit, callbacks=(*fit.callbacks, *more))
        result = self.participant.execute(fit, self.loop.round, SERVER)
        return {**result.params, **result.buffers}

    def _scores(self, request: Predict, examples: Examples) -> Tensor:
        request = replace(request, data=examples, key=(_OWNER, "scores"))
        outputs = self.participant.execute(request, self.loop.round, SERVER).outputs
        assert outputs is not None
        return outputs.double()

    def _student(self, state: Tensors, examples: Examples) -> Tensor:
        return self._scores(Predict(self.fit.task, None, {**(self.fit.start or {}), **state}), examples)

    # ---- M1, M2, M4 and the bound

    def _at_a_point(self, task: FederatedTask) -> dict[str, dict[str, float]]:
        """Gradients and their change, of every loss, at the parameters that the task has."""
        modes = [(module, module.training) for module in task.modules()]
        with owned_global_rng(self.loop.seed, _OWNER, "losses"), torch.enable_grad():
            try:
                return {which: self._gradients(task, which, *loss) for which, loss in self._losses(task).items()}
            finally:
                for module, training in modes:
                    module.training = training

    def _losses(self, task: FederatedTask) -> dict[str, tuple[Examples, Criterion | None]]:
        losses: dict[str, tuple[Examples, Criterion | None]] = {
            "": (self.trained_on, task.criterion),
            "hard_kept": (self.views["kept"], _hard),
        }
        if "low" in self.views:
            soft = Annotated(self.views["low"], {"soft": self.soft["low"].float()})
            losses |= {"hard_low": (self.views["low"], _hard), "soft_low": (soft, _soft)}
        return losses

    def _gradients(
        self, task: FederatedTask, which: str, examples: Examples, criterion: Criterion | None
    ) -> dict[str, float]:
        params = {name: p.detach() for name, p in task.trainable().items()}
        buffers = {name: buffer.detach() for name, buffer in task.persistent_buffers().items()}
        loss, meter = mean_loss(task, examples, buffers, self.batch, criterion), self.meter
        found = theory.batch_gradients([part for _, part in loss.parts], params)
        draw = self._draw("directions")
        at_random = [
            theory.smoothness(loss, params, random_direction(params, draw), meter.radius, found.mean)
            for _ in range(meter.directions)
        ]
        numbers = {
            "L_mean": found.mean_norm,
            "L_max": found.max_norm,
            "spread": found.spread,
            "variance": found.variance,
            "beta_random": max(at_random),
            "beta_gradient": theory.smoothness(loss, params, found.mean, meter.radius, found.mean),
        }
        if meter.eigenvalue and not which:
            top = hessian_eigenvalues(loss, params, generator=self._draw("lanczos")).values
            numbers |= {"lambda_1": top[0]} if top else {}
        return numbers

    def _on_the_way(self, probe: _Probe) -> dict[str, float]:
        row: dict[str, float] = {}
        for share, losses in probe.found:
            row |= {f"{name}@{100 * share:g}": value for name, value in losses[""].items()}
        for loss in probe.found[0][1]:
            points = [losses[loss] for _, losses in probe.found]
            values = {
                "L": max(p["L_max"] for p in points),
                "beta": max(max(p["beta_random"], p["beta_gradient"]) for p in points),
            }
            values |= {n: sum(p[n] for p in points) / len(points) for n in ("L_mean", "spread", "variance")}
            row |= {f"{loss}/{name}" if loss else name: value for name, value in values.items()}
        row["step_constant"] = probe.step_constant
        constants = row["L"], row["beta"], row["step_constant"]
        if all(0 < value < math.inf for value in constants) and len(self.fit.data) > 1:
            row["bound"] = theory.stability_bound(*constants, probe.steps, len(self.fit.data))
        return row

    # ---- M3, M5 and M7

    def _labels(self, after: Tensors) -> dict[str, float]:
        row: dict[str, float] = {}
        labels = F.one_hot(self.images.labels, self.soft["full"].shape[-1])
        for view, examples in self.views.items():
            p, q = self._student(after, examples).softmax(-1), self.soft[view].softmax(-1)
            sampled = theory.sampled_hard_label_variance(p, q, self.meter.draws, self._draw("labels", view))
            row |= {
                f"removed_variance_{view}": float(theory.hard_label_variance(q).mean()),
                f"removed_variance_{view}_sampled": float(sampled.mean()),
                f"covariance_hard_{view}": theory.covariance_trace(p - labels),
                f"covariance_soft_{view}": theory.covariance_trace(p - q),
                f"label_bias_{view}": float((q - labels).square().sum(-1).mean()),
            }
        return row

    def _stability(self, after: Tensors, real: Examples, on_real: Tensor) -> dict[str, float]:
        data, apart = self.fit.data, list[tuple[float, float]]()
        for number in range(self.meter.replaced if len(data) > 1 else 0):
            out, into = torch.randperm(len(data), generator=self._draw("replaced", number))[:2].tolist()
            indices = torch.arange(len(data))
            indices[out] = into
            other = self._train(replace(self.fit, data=data.select(indices)))
            change = theory.largest_loss_change(on_real, self._student(other, real), real.labels)
            apart.append((norm(moved(other, after, -1.0)), change))
        if not apart:
            return {}
        distances, changes = zip(*apart, strict=True)
        return {"weights_apart": sum(distances) / len(apart), "loss_apart": max(changes)}

    def _spectra(self) -> dict[str, float]:
        modules = self.participant.tasks[self.fit.task].modules()
        sizes = [size for module in modules if isinstance(size := getattr(module, "patch", None), tuple)]
        images = self.images.inputs
        return {
            f"high_frequency_{view}": theory.high_frequency_share(images, sizes[0], keep)
            for view, keep in self.patches.items()
            if sizes
        }


class _Probe(Callback):
    """Looks at a task on the way of its training.

    Args:
        points: When, as shares of the training in [0, 1].
        look: What to find out; leaves the task as it is.

    Attributes:
        found: (share, what was found), in order.
        step_constant: max_t t * learning rate of step t.
        steps: Steps that were taken.
    """

    def __init__(
        self, points: Sequence[float], look: Callable[[FederatedTask], Mapping[str, dict[str, float]]]
    ) -> None:
        self.points, self.look = sorted(points), look
        self.found: list[tuple[float, Mapping[str, dict[str, float]]]] = []
        self.step_constant, self.steps = 0.0, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        total = trainer.estimated_stepping_batches
        self.due = [(round(share * total), share) for share in self.points]
        self._visit(0, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *ignored: Any) -> None:
        self.steps = trainer.global_step
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.step_constant = max(self.step_constant, self.steps * rate)
        self._visit(self.steps, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._visit(math.inf, pl_module)  # a training that ended early

    def _visit(self, step: float, task: FederatedTask) -> None:
        while self.due and self.due[0][0] <= step:
            self.found.append((self.due.pop(0)[1], self.look(task)))


def _hard(task: FederatedTask, batch: Batch) -> Tensor:
    return F.cross_entropy(_logits(task, batch), batch.labels)


def _soft(task: FederatedTask, batch: Batch) -> Tensor:
    return distillation_kl(_logits(task, batch), batch.extras["soft"])


def _logits(task: FederatedTask, batch: Batch) -> Tensor:
    options = {name: column for name, column in batch.extras.items() if name == "keep"}
    return task.logits(batch.inputs, **options)  # type: ignore[operator]


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(-1) == labels).double().mean())
