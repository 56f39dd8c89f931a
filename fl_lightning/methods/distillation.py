"""One-shot federated learning by data-free distillation: clients upload their models once, the server makes images out
of these models and trains a student on them. What the methods of this family share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback
from torch import Tensor

from fl_lightning.aggregation import Keep, Mean
from fl_lightning.callbacks.train_only import TrainHead
from fl_lightning.data.bank import Bank
from fl_lightning.data.examples import Annotated, DataInfo, Examples, TensorExamples
from fl_lightning.losses.distillation import distillation_kl
from fl_lightning.message import Group, Groups, Message, Tensors
from fl_lightning.methods.base import (
    SERVER,
    ClientProgram,
    Distillation,
    Fit,
    Method,
    Predict,
    Reduced,
    Server,
    Training,
    unused,
)
from fl_lightning.methods.ensemble import OneShotClient
from fl_lightning.rng import torch_generator
from fl_lightning.tasks.base import Batch, FederatedTask
from fl_lightning.tasks.ensemble import EXPERT, Combine, EnsembleTask, check_combine

Init = Literal["initial", "fedavg"]
Trainable = Literal["all", "head"]


class Distil(Callback):
    """The student's loss against soft labels: column ``soft`` (B, C) of the batch, the ensemble's scores of these images.

    Args:
        temperature: T of `distillation_kl`, above 0.
    """

    runs_lean = resumes = True

    def __init__(self, temperature: float = 4.0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it must be above 0")
        self.temperature = temperature

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.criterion = self.criterion

    def criterion(self, task: FederatedTask, batch: Batch) -> Tensor:
        """The loss in place of the task's own."""
        return distillation_kl(task.logits(batch.inputs), batch.extras["soft"], self.temperature)  # type: ignore[operator]


class OneShotDistillation(Method):
    """Round 1: every client trains from the common initial model and uploads the result; the server does the rest.

    Args:
        student: Budget of the student's training, the same for every method that is compared.
        init: What the student starts from: the "initial" model that the clients were sent, or their average, "fedavg".
        weighted: Weigh the average by training images (McMahan et al.); a plain mean otherwise, as in the code of DENSE and
            Co-Boosting.
        trainable: "all" of the student, or its "head" alone.
        combine: How the uploaded models answer together: "mean_logits", "mean" of probabilities, or their "product".
        temperature: T of the distillation, above 0.
    """

    wants_counts = False  # of the training images of every class, from every client

    def __init__(
        self,
        student: Training = Training(400, 64, cosine=True),
        init: Init = "initial",
        weighted: bool = True,
        trainable: Trainable = "all",
        combine: Combine = "mean_logits",
        temperature: float = 4.0,
    ) -> None:
        super().__init__(1)
        for name, value, allowed in (("init", init, get_args(Init)), ("trainable", trainable, get_args(Trainable))):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
        check_combine(combine)
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it must be above 0")
        self.student_training, self.init, self.weighted, self.trainable = student, init, weighted, trainable
        self.combine: Combine = combine
        self.temperature = temperature

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        self.info, self.seed = info, seed
        self.initial: Tensors = model.state()
        self.uploads: dict[str, Tensors] = {}  # by client
        self.sizes: dict[str, int] = {}  # training images
        self.counts: dict[str, Tensor] = {}  # of every class (C,), where clients send them
        self.bank: Bank | None = None
        self.student_fit: Fit | None = None
        self.start: Tensors = self.initial
        self.student: Tensors = self.initial

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        return {"ensemble": EnsembleTask(model, self.combine, temperature=self.temperature)}

    def client(self) -> ClientProgram:
        return OneShotClient(self.wants_counts)

    def broadcast(self, round: int) -> Message:
        return Message(round, SERVER, {"model": self.initial}, {"num_classes": float(self.info.num_classes)})

    def uplink(self, round: int) -> dict[str, Group]:
        groups = {"model": Group("artifact", Keep(), like=self.initial)}
        counts = {"counts": torch.zeros(self.info.num_classes, dtype=torch.int64)}
        return groups | ({"counts": Group("rows", Keep(), like=counts)} if self.wants_counts else {})

    # ---- the server

    def server_update(self, round: int, total: Reduced, server: Server) -> Mapping[str, float]:
        self.uploads = dict(total.groups["model"])
        self.sizes = dict(total.examples)
        self.counts = {client: held["counts"] for client, held in total.groups.get("counts", {}).items()}
        self.start = self.initial if self.init == "initial" else self.average()
        self.student = self.start
        return self.distil(server)

    @abstractmethod
    def distil(self, server: Server) -> Mapping[str, float]:
        """Make images into ``self.bank`` and train ``self.student`` on them. Returns numbers for the round's record."""

    def average(self) -> Tensors:
        """The mean of the uploaded models."""
        mean, total = Mean(), None
        for client, upload in self.uploads.items():
            total = mean.add(total, upload, float(self.sizes[client]) if self.weighted else 1.0, client)
        return mean.finish(mean.merge(None, total))

    @property
    def teachers(self) -> Groups:
        """The uploaded models, as the ensemble is given them."""
        return {EXPERT + client: upload for client, upload in self.uploads.items()}

    def soft_labels(self, server: Server, images: Examples, key: tuple[object, ...]) -> Tensor:
        """The ensemble's scores (N, C) of images; columns of the images are options of the forward pass."""
        outputs = server.predict(Predict("ensemble", images, given=self.teachers, key=key)).outputs
        assert outputs is not None
        return outputs.float()

    def with_soft_labels(self, server: Server, images: Examples, key: tuple[object, ...] = ("soft",)) -> Examples:
        """The images with the ensemble's scores as column ``soft``."""
        return Annotated(images, {"soft": self.soft_labels(server, images, key)})

    def train_student(
        self,
        server: Server,
        images: Examples,
        key: tuple[object, ...],
        callbacks: Sequence[Callback] = (),
        training: Training | None = None,
        given: Groups | None = None,
        **overrides: float,
    ) -> float:
        """Train the student further on images; callbacks set its loss (cross-entropy without). Returns the mean loss."""
        head = (TrainHead(),) if self.trainable == "head" else ()
        training = training or self.student_training
        fit = training.fit("model", images, self.student, key, (*callbacks, *head), given or {}, **overrides)
        self.student_fit = unused(fit)
        result = server.fit(fit)
        self.student = {**self.student, **result.params, **result.buffers}
        return result.metrics["loss"]

    # ---- scoring and state

    def synthetic(self) -> Examples | None:
        return self.bank

    def distillation(self) -> Distillation | None:
        if self.student_fit is None:
            return None
        return Distillation(self.student_fit, Predict("ensemble", None, given=self.teachers))

    def evaluations(self) -> dict[str, Predict]:
        return {"": Predict("model", None, self.student), "start": Predict("model", None, self.start)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "uploads": {client: dict(upload) for client, upload in self.uploads.items()},
            "sizes": dict(self.sizes),
            "counts": dict(self.counts),
            "bank": self.bank.state_dict() if self.bank is not None else None,
            "start": dict(self.start),
            "student": dict(self.student),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.uploads = {client: dict(upload) for client, upload in state["uploads"].items()}
        self.sizes = {client: int(size) for client, size in state["sizes"].items()}
        self.counts = dict(state["counts"])
        self.bank = Bank.from_state(state["bank"]) if state["bank"] else None
        self.start, self.student = dict(state["start"]), dict(state["student"])


def noise_images(count: int, std: float, info: DataInfo, server: Server, owner: str) -> TensorExamples:
    """Gaussian noise around a mean of 0.5, clipped to [0, 1], as images without meaningful labels."""
    generator = torch_generator(server.seed, server.round, SERVER, owner)
    pixels = torch.randn((count, *info.input_shape), generator=generator).mul_(std).add_(0.5)
    return TensorExamples(pixels.clamp_(0, 1), torch.zeros(count))


class NoiseDistillation(OneShotDistillation):
    """The control of every data-free method: the student learns the ensemble's soft labels of Gaussian noise.

    Args:
        images: Number of noise images, at least 1.
        std: Standard deviation of the noise around a mean of 0.5, above 0; pixels are clipped to [0, 1].
        **common: Those of `OneShotDistillation`.
    """

    def __init__(self, images: int = 500, std: float = 0.5, **common: Any) -> None:
        super().__init__(**common)
        if images < 1:
            raise ValueError(f"images is {images}; it must be at least 1")
        if not std > 0:
            raise ValueError(f"std is {std}; it must be above 0")
        self.images, self.std = images, std

    def distil(self, server: Server) -> Mapping[str, float]:
        images = self.with_soft_labels(server, noise_images(self.images, self.std, self.info, server, "noise"))
        loss = self.train_student(server, images, ("student",), (Distil(self.temperature),))
        return {"server/student_loss": loss}
