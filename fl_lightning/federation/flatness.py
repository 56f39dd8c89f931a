"""How flat the global model's loss is, measured as a federation goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.data.examples import Examples
from fl_lightning.federation.callbacks import FederationCallback, Row, clients_in, examples_in
from fl_lightning.federation.recorder import Recorder, write_json
from fl_lightning.message import Tensors
from fl_lightning.methods.base import Fit, Predict
from fl_lightning.metrics import flatness as measures
from fl_lightning.metrics.flatness import MeanLoss
from fl_lightning.report.figures import figure_to_png, slice_figure, surface_figure
from fl_lightning.rng import numpy_generator, owned_global_rng, torch_generator
from fl_lightning.tasks.base import Batch, FederatedTask

if TYPE_CHECKING:
    from fl_lightning.federation.loop import FederationLoop

SLICE_POINTS = 41
_OWNER = "flatness"


Criterion = Callable[[FederatedTask, Batch], Tensor]


class _TaskLoss(nn.Module):
    """Calls a loss of a task where `functional_call` calls forward."""

    def __init__(self, task: FederatedTask, criterion: Criterion | None) -> None:
        super().__init__()
        self.task, self.criterion = task, criterion

    def forward(self, batch: Batch) -> Tensor:
        return self.task.loss(batch) if self.criterion is None else self.criterion(self.task, batch)


def mean_loss(
    task: FederatedTask, examples: Examples, buffers: Tensors, batch_size: int, criterion: Criterion | None = None
) -> MeanLoss:
    """A task's mean loss over examples as a function of its trainable parameters, without weight decay.

    The task is put into evaluation mode, where it must stay while the loss is used; its own tensors are not
    written, and read only where those that are given lack them. The inputs are fetched once and kept.

    Args:
        task: The task, on the device to compute on.
        examples: N >= 1 examples.
        buffers: Persistent buffers (BatchNorm statistics) to evaluate with, where they are not the task's own.
        batch_size: Examples per part, at least 1; memory grows with it.
        criterion: The mean loss of a batch; None takes the task's own.
    """
    task.eval()
    module, here = _TaskLoss(task, criterion), next(task.parameters()).device
    buffers = {name: buffer.to(here) for name, buffer in buffers.items()}

    def loss_of(batch: Batch, params: Mapping[str, Tensor]) -> Tensor:
        return functional_call(module, {f"task.{n}": t for n, t in {**buffers, **params}.items()}, (batch,))

    parts = []
    for indices in torch.arange(len(examples)).split(batch_size):
        extras = {name: column.to(here) for name, column in examples.extras(indices).items()}
        batch = Batch(examples.fetch(indices).to(here), examples.labels[indices].to(here), extras=extras)
        parts.append((len(indices) / len(examples), partial(loss_of, batch)))
    return MeanLoss(tuple(parts))


class _Point(NamedTuple):
    """The global model as it is measured."""

    task: FederatedTask
    request: Predict
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    loss: MeanLoss


class FlatnessMeter(FederationCallback):
    """Measure the flatness of the global model, into the round's row under ``flatness/``.

    All of it on the loss without weight decay, in evaluation mode, on one fixed sample of the clients' pooled training
    examples. Loss curvature falls as the loss falls: compare methods at equal ``flatness/train_loss``, not only at the last
    round. Training is not disturbed: with and without the meter, a run computes the same to the last bit.

    - ``train_loss``, ``gradient_norm``: the loss and the norm of its gradient.
    - ``lambda_1``, ...: largest eigenvalues of the Hessian; ``lambda_1_over_k``: ratio of the first to the last of k, where
      that is positive; ``lambda_converged``: 1 if all converged; ``lambda_products``: Hessian-vector products taken.
    - ``sharpness_<rho>``: largest increase of the loss within distance rho, by gradient ascent.
    - ``random_<rho>``: mean increase at distance rho in random directions, each taken both ways.
    - ``client_gradient_cosine``: mean over sampled clients of the cosine between their gradient and the global one.
    - ``fd1``, ``fd2``, ``fd3``: three candidates for the distance between the clients' flat regions and the global one
      (`perturbed_model_distance`, `perturbation_inconsistency`, `sharpness_gap` of `fl_lightning.metrics.flatness`). None
      is the formula of a paper. A client's model is made by ``local_steps`` steps of plain SGD from the global model, alike
      for every method, whatever the method's own clients do.
    - ``momentum_cosine``: cosine between the server's momentum and minus the gradient, for a method that has one.

    Args:
        every: Measure every so many rounds (and before the first and after the last), at least 1.
        num_examples: Most training examples to measure on, of all clients together and of a client, at least 1.
        clients: Clients to sample, the same in every round, at least 0; 0 leaves out what needs clients.
        local_steps: SGD steps to a client's model, at least 1; batches and gradient clipping are the run's.
        local_lr: Learning rate of these steps, above 0.
        radii: Distances rho of sharpness and random increase, each above 0; may be empty.
        distance_radius: Perturbation length rho of fd1, fd2 and fd3, above 0.
        eigenvalues: Number of eigenvalues, at least 0 and below the number of trainable parameters.
        ascent_steps: Steps of gradient ascent to a sharpness, at least 1.
        directions: Random directions, at least 1.
        surface: After the last round, draw the loss around the model: over two random filter-normalised directions (Li et
            al., 2018), and along the server's momentum.
        surface_points: Points of the surface along each side, from -1 to 1, at least 2.
        surface_seed: Draws the surface's two directions; not the run's seed, so that all runs are seen along the same draw.
    """

    def __init__(
        self,
        every: int = 10,
        num_examples: int = 1000,
        clients: int = 20,
        local_steps: int = 10,
        local_lr: float = 0.1,
        radii: Sequence[float] = (0.05, 0.1),
        distance_radius: float = 0.05,
        eigenvalues: int = 5,
        ascent_steps: int = 10,
        directions: int = 10,
        surface: bool = False,
        surface_points: int = 21,
        surface_seed: int = 0,
    ) -> None:
        for name, number, least in (
            ("every", every, 1),
            ("num_examples", num_examples, 1),
            ("clients", clients, 0),
            ("local_steps", local_steps, 1),
            ("eigenvalues", eigenvalues, 0),
            ("ascent_steps", ascent_steps, 1),
            ("directions", directions, 1),
            ("surface_points", surface_points, 2),
        ):
            if number < least:
                raise ValueError(f"{name} is {number}; it must be at least {least}")
        for name, lengths in {"local_lr": [local_lr], "distance_radius": [distance_radius], "radii": radii}.items():
            for length in lengths:
                if not 0 < length < math.inf:
                    raise ValueError(f"{name} is {length}; it must be above 0 and finite")
        self.every, self.num_examples, self.clients = every, num_examples, clients
        self.local_steps, self.local_lr = local_steps, local_lr
        self.radii, self.distance_radius, self.eigenvalues = tuple(radii), distance_radius, eigenvalues
        self.ascent_steps, self.directions = ascent_steps, directions
        self.surface, self.surface_points, self.surface_seed = surface, surface_points, surface_seed
        self._drawn = False

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments, as JSON values."""
        kept = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**kept, "radii": list(self.radii)}

    # ---- when

    def on_start(self, loop: FederationLoop) -> None:
        _, params, _ = self._model(loop)
        size = sum(p.numel() for p in params.values())
        if self.eigenvalues >= size:
            raise ValueError(
                f"FlatnessMeter.eigenvalues is {self.eigenvalues}; with {size} trainable parameters it must be in "
                f"[0, {size - 1}]"
            )

    def measure(self, loop: FederationLoop) -> Row:
        last = loop.round >= loop.method.rounds
        return self.values(loop) if last or loop.round % self.every == 0 else {}

    def on_round_end(self, loop: FederationLoop, row: Row) -> None:
        if loop.round >= loop.method.rounds:  # before the recorder closes its loggers in on_end
            self._draw_once(loop)

    def on_end(self, loop: FederationLoop) -> None:
        self._draw_once(loop)  # a run that was stopped early

    # ---- what

    def values(self, loop: FederationLoop) -> dict[str, float]:
        """All measurements of the global model as it is now, by column name, and the seconds they took."""
        started, seed = time.perf_counter(), loop.seed
        with self._global(loop) as point:
            loss, params = point.loss, point.params
            train_loss, slope = measures.value_and_gradient(loss, params)
            row = {"train_loss": train_loss, "gradient_norm": measures.norm(slope)}
            if math.isfinite(train_loss) and math.isfinite(row["gradient_norm"]):  # a run that diverged has no shape
                row |= self._eigenvalues(point, seed) if self.eigenvalues else {}
                for rho in self.radii:
                    row[f"sharpness_{rho:g}"] = self._sharpness(loss, params, rho, seed)
                    draw = torch_generator(seed, _OWNER, "random directions")
                    row[f"random_{rho:g}"] = measures.random_increase(loss, params, rho, self.directions, draw)
                momentum = self._momentum(loop, params)
                if momentum is not None:
                    row["momentum_cosine"] = -measures.cosine(momentum, slope)
                row |= self._distances(loop, point, slope) if self.clients else {}
        named = {f"flatness/{name}": number for name, number in row.items()}
        return named | {"time/flatness": time.perf_counter() - started}

    def draw(self, loop: FederationLoop, folder: Path, loggers: Sequence[Logger] = ()) -> list[Path]:
        """Draw the loss around the global model as it is now, as PNG and in TensorBoard; the numbers go to a JSON file.

        Args:
            loop: The federation.
            folder: Where the files go; exists.
            loggers: A TensorBoard logger among them gets the figures.

        Returns:
            The files. None are made where the loss is not finite.
        """
        with self._global(loop) as point:
            if not math.isfinite(measures.value(point.loss, point.params)):
                return []
            first, second = (
                measures.filter_normalised_direction(
                    point.params, torch_generator(self.surface_seed, _OWNER, "surface", axis)
                )
                for axis in range(2)
            )
            at = torch.linspace(-1, 1, self.surface_points, dtype=torch.float64)
            grid = measures.loss_surface(point.loss, point.params, first, second, at.tolist())
            numbers: dict[str, Any] = {
                "round": loop.round,
                "surface": {"coordinates": at.tolist(), "loss": grid.tolist()},
            }
            figures = {"flatness_surface": surface_figure(at, grid)}
            momentum = self._momentum(loop, point.params)
            if momentum is not None:
                along = torch.linspace(-1, 1, SLICE_POINTS, dtype=torch.float64)
                line = measures.loss_slice(point.loss, point.params, momentum, along.tolist())
                numbers["momentum_slice"] = {"distance": along.tolist(), "loss": line.tolist()}
                figures["flatness_momentum"] = slice_figure(along, line, "distance along the server's momentum")
        write_json(folder / "flatness_surface.json", numbers)
        for name, figure in figures.items():
            for logger in loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure(name, figure, loop.round, close=False)
        written = [figure_to_png(figure, folder / f"{name}.png") for name, figure in figures.items()]
        return [folder / "flatness_surface.json", *written]

    def _draw_once(self, loop: FederationLoop) -> None:
        recorder = next((c for c in loop.callbacks if isinstance(c, Recorder)), None)
        if self.surface and not self._drawn and recorder is not None and loop.is_main:
            self._drawn = True
            self.draw(loop, recorder.folder, recorder.loggers)

    def _model(self, loop: FederationLoop) -> tuple[Predict, dict[str, Tensor], dict[str, Tensor]]:
        """The request for the global model, and its trainable parameters and buffers."""
        method = type(loop.method).__name__
        request = loop.method.evaluations().get("")
        if request is None or request.start is None:
            raise ValueError(f"FlatnessMeter measures a global model, and {method} has none")
        trainable = loop.participant.tasks[request.task].trainable()
        missing = [name for name in trainable if name not in request.start]
        if missing or not trainable:
            raise ValueError(f"FlatnessMeter needs all trainable parameters, and {method}'s model lacks {missing[:3]}")
        params = {name: request.start[name].detach() for name in trainable}
        return request, params, {name: t.detach() for name, t in request.start.items() if name not in trainable}

    @contextmanager
    def _global(self, loop: FederationLoop) -> Iterator[_Point]:
        """The global model, its loss, and a task that is as it was before once the measurement is over."""
        request, params, buffers = self._model(loop)
        task = loop.participant.tasks[request.task]
        state, training, optimizer, cached = task.state(), task.training, task.optimizer, task.inputs_are_cached
        given, device = task.given, loop.participant.trainer.strategy.root_device
        home, num_gradients = next(task.parameters()).device, loop.participant.num_gradients
        params = {name: p.to(device) for name, p in params.items()}
        # A task's loss may draw; what it draws is the meter's.
        with owned_global_rng(loop.seed, _OWNER, loop.round):
            try:
                task.inputs_are_cached = False
                task.given = {g: {n: t.to(device) for n, t in tensors.items()} for g, tensors in request.given.items()}
                if not loop.data.info.clients:
                    raise ValueError("FlatnessMeter needs training examples, and data.num_clients is 0")
                loss = self._loss(loop, task.to(device), examples_in(loop), buffers, "all")
                yield _Point(task, request, params, buffers, loss)
            finally:
                task.to(home).load(state)
                task.train(training)
                task.optimizer, task.inputs_are_cached, task.given = optimizer, cached, given
                loop.participant.num_gradients = num_gradients  # measuring is no training

    def _loss(
        self, loop: FederationLoop, task: FederatedTask, examples: Examples, buffers: Tensors, owner: str
    ) -> MeanLoss:
        """The loss on a sample of examples that is the same in every round."""
        if len(examples) > self.num_examples:
            order = torch.randperm(len(examples), generator=torch_generator(loop.seed, _OWNER, "examples", owner))
            examples = examples.select(order[: self.num_examples].sort().values)
        return mean_loss(task, examples, buffers, loop.eval_batch_size)

    def _momentum(self, loop: FederationLoop, params: Tensors) -> dict[str, Tensor] | None:
        """The server's momentum where the method has one, and it is not zero."""
        momentum = loop.method.momentum()
        if momentum is None:
            return None
        found = {name: momentum[name].detach().to(p) for name, p in params.items()}
        return found if measures.norm(found) > 0 else None

    def _eigenvalues(self, point: _Point, seed: int) -> dict[str, float]:
        draw = torch_generator(seed, _OWNER, "lanczos")
        found = measures.hessian_eigenvalues(point.loss, point.params, self.eigenvalues, generator=draw)
        row = {f"lambda_{rank}": number for rank, number in enumerate(found.values, 1)}
        row |= {"lambda_converged": float(found.converged), "lambda_products": float(found.products)}
        if 1 < self.eigenvalues == len(found.values) and found.values[-1] > 0:
            row[f"lambda_1_over_{self.eigenvalues}"] = found.values[0] / found.values[-1]
        return row

    def _sharpness(self, loss: MeanLoss, params: Tensors, rho: float, seed: int, *owner: str) -> float:
        draw = torch_generator(seed, _OWNER, "ascent", *owner)
        return measures.sharpness(loss, params, rho, self.ascent_steps, draw)

    def _distances(self, loop: FederationLoop, point: _Point, slope: Tensors) -> dict[str, float]:
        """What compares the global model with the sampled clients'."""
        task, rho, seed = point.task, self.distance_radius, loop.seed
        of_global = self._sharpness(point.loss, point.params, rho, seed)
        present = [client for client in clients_in(loop) if len(examples_in(loop, client))]
        order = numpy_generator(seed, _OWNER, "clients").permutation(len(present))[: self.clients]
        cosines, distances, of_clients = [], [], []
        for client in [present[number] for number in sorted(order.tolist())]:
            examples = examples_in(loop, client)
            loss = self._loss(loop, task, examples, point.buffers, client)
            cosines.append(measures.cosine(measures.gradient(loss, point.params), slope))
            params, buffers = self._local_model(loop, point, client, examples)
            loss = self._loss(loop, task, examples, buffers, client)
            local_slope = measures.gradient(loss, params)
            distances.append(measures.perturbed_model_distance(point.params, slope, params, local_slope, rho))
            of_clients.append(self._sharpness(loss, params, rho, seed, client))
        return {
            "client_gradient_cosine": sum(cosines) / len(cosines),
            "fd1": sum(distances) / len(distances),
            "fd2": measures.perturbation_inconsistency(cosines, rho),
            "fd3": measures.sharpness_gap(of_global, of_clients),
        }

    def _local_model(
        self, loop: FederationLoop, point: _Point, client: str, examples: Examples
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A client's model after plain SGD from the global one: parameters and buffers."""
        task, given = point.task, point.task.given
        task.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=self.local_lr)
        fit = Fit(
            point.request.task,
            examples,
            {**point.params, **point.buffers},
            point.request.given,
            overrides={"max_steps": self.local_steps, "max_epochs": self.local_steps},  # an epoch has a step at least
            key=(_OWNER, "fit"),
        )
        result = loop.participant.execute(fit, loop.round, client)
        # A fit leaves the task on the CPU, without what it was given.
        device = next(iter(point.params.values())).device
        task.to(device)
        task.given, task.inputs_are_cached = given, False
        return {name: p.to(device) for name, p in result.params.items()}, result.buffers
