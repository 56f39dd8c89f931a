"""One-shot distillation whose images are optimised pixel by pixel against the uploaded models: what DeepInversion and
FedMITR share. They differ in two attributes: which patches are stopped, and what the student learns of the images.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from fl_lightning.callbacks.cosine_rate import CosineRate
from fl_lightning.callbacks.optimizer_memory import OptimizerMemory
from fl_lightning.callbacks.sparse_inversion import SparseModelInversion
from fl_lightning.callbacks.token_relabel import TokenRelabel
from fl_lightning.data.bank import Bank, Provenance
from fl_lightning.data.examples import Annotated, DataInfo, Examples, TensorExamples
from fl_lightning.message import Groups
from fl_lightning.methods.base import SERVER, UNLIMITED, Fit, Predict, Server, Training
from fl_lightning.methods.distillation import OneShotDistillation, noise_images
from fl_lightning.methods.generator_distillation import spread
from fl_lightning.rng import torch_generator
from fl_lightning.synthesis.inversion import LabelSource, label_plan
from fl_lightning.tasks.base import FederatedTask
from fl_lightning.tasks.inversion import STUDENT, TEACHER, InversionTask, targets

Teacher = Literal["per_client", "ensemble"]
ENSEMBLE = "ensemble"  # whose images those of the ensemble are
PRIOR_IMAGES = 256  # of noise, on which "client_head" reads what a model expects


class InversionDistillation(OneShotDistillation):
    """Epochs of two parts: images are inverted from the uploaded models, and the student is trained on all so far.

    A subclass sets ``relabel``, and ``stops`` where patches shall be stopped.

    Args:
        images_per_client: Synthetic images of every client over all epochs, a multiple of ``epochs``; of the ensemble, as
            many for each of its members.
        batch: Images that are optimised together, at least 1.
        iterations: Steps on each batch, at least 1.
        tv: Weight of TV_2 over the whole batch, at least 0: set it anew where batch or image size change.
        batch_norm: Weight of the BatchNorm statistics, at least 0, and 0 for networks without, such as a ViT.
        jitter: Largest roll of the images, as a share of their side, in [0, 1).
        inversion_optimizer: Builds the optimizer of the pixels.
        teacher: Whose images: "per_client", every uploaded model's by itself, or the "ensemble"'s.
        label_source: Which classes: "uniform", "balanced" (in turn), "client_head" (what a model says about noise) or
            "client_counts" (an oracle: clients must send their label counts). See `label_plan`.
        competition: Weight of 1 - JS(student, teachers), at least 0; it wants ``epochs`` above 1.
        epochs: At least 1. The student's budget is divided so that every epoch makes equally many passes over its images.
        l2: Weight of the images' norm, at least 0.
        flip: Reflect the images at random.
        **common: Those of `OneShotDistillation`.
    """

    relabel: TokenRelabel
    stops: SparseModelInversion | None = None

    makes_images = True

    def __init__(
        self,
        images_per_client: int,
        batch: int,
        iterations: int,
        tv: float,
        batch_norm: float,
        jitter: float,
        inversion_optimizer: OptimizerCallable,
        teacher: Teacher = "per_client",
        label_source: LabelSource = "uniform",
        competition: float = 0.0,
        epochs: int = 1,
        l2: float = 0.0,
        flip: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        for name, value in (("batch", batch), ("iterations", iterations), ("epochs", epochs)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if images_per_client < 1 or images_per_client % epochs:
            raise ValueError(f"images_per_client is {images_per_client}; it must be a multiple of epochs, {epochs}")
        for name, chosen, allowed in (("teacher", teacher, Teacher), ("label_source", label_source, LabelSource)):
            if chosen not in get_args(allowed):
                raise ValueError(f"{name} is {chosen!r}; allowed: {', '.join(map(repr, get_args(allowed)))}")
        if teacher == ENSEMBLE and self.combine == "product":
            raise ValueError("combine is 'product'; an ensemble can be inverted as a 'mean' or as 'mean_logits'")
        self.images_per_client, self.batch, self.iterations, self.epochs = images_per_client, batch, iterations, epochs
        self.teacher, self.label_source, self.competition = teacher, label_source, competition
        self.wants_counts = label_source == "client_counts"
        self.inversion = partial(
            InversionTask,
            combine="probs" if self.combine == "mean" else "logits",
            tv=tv,
            l2=l2,
            batch_norm=batch_norm,
            adversarial=competition,
            jitter=jitter,
            flip=flip,
            optimizer=inversion_optimizer,
        )

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        super().setup(model, info, seed)
        network = getattr(model, "network", None)
        if self.stops is not None:
            self.stops.check(network)
        if self.relabel.reading == "r2" and self.relabel.beta and not hasattr(network, "tokens"):
            raise ValueError(f"reading is 'r2', but {type(network).__name__} has no patch tokens; a SparseViT has")

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        return {**super().tasks(model), "inversion": self.inversion(model)}

    # ---- the server

    def distil(self, server: Server) -> Mapping[str, float]:
        numbers: dict[str, float] = {}
        made: list[Mapping[str, Tensor]] = []  # columns of the bank, by epoch
        taught: list[Mapping[str, Tensor]] = []  # what the ensemble says about its images
        memory = OptimizerMemory()
        for epoch in range(self.epochs):
            new, columns, numbers = self.synthesise(server, epoch)
            made = [*made, columns]
            before = self.bank.parts if self.bank is not None and epoch else ()
            self.bank = Bank((*before, *new), columns=_stacked(made))
            taught.append(self.ask_teachers(server, Bank(new, columns=columns), epoch))
            images = Annotated(self.bank, _stacked(taught))
            numbers |= self.learn(server, images, epoch, memory) | self.agreement(images)
        return numbers

    @property
    def makers(self) -> dict[str, Groups]:
        """Whose images are made: the groups of teachers that the inversion is given, by name."""
        if self.teacher == ENSEMBLE:
            return {ENSEMBLE: {TEACHER + client: upload for client, upload in self.uploads.items()}}
        return {client: {TEACHER + client: upload} for client, upload in self.uploads.items()}

    def synthesise(
        self, server: Server, epoch: int
    ) -> tuple[list[tuple[Provenance, Tensor]], dict[str, Tensor], dict[str, float]]:
        """Images of every teacher, batch by batch: runs for the bank, their columns, and means over the batches."""
        parts: list[tuple[Provenance, Tensor]] = []
        columns: list[Mapping[str, Tensor]] = []
        metrics: list[Mapping[str, float]] = []
        student = {STUDENT: self.student} if self.competition else {}
        for maker, teachers in self.makers.items():
            count = self.images_per_client // self.epochs * len(teachers)
            first = epoch * count
            plan = self.labels(server, maker, count, epoch)
            for number, labels in enumerate(plan.split(self.batch)):
                owner = (server.seed, server.round, SERVER, "pixels", epoch, maker, number)
                pixels = torch.randn(len(labels), *self.info.input_shape, generator=torch_generator(*owner))
                result = server.fit(
                    Fit(
                        "inversion",
                        targets(labels),
                        {"pixels": pixels},
                        {**teachers, **student},
                        callbacks=() if self.stops is None else (copy.deepcopy(self.stops),),
                        overrides={
                            "max_steps": self.iterations,
                            "max_epochs": UNLIMITED,
                            "batch_size": len(labels),
                        },
                        key=("invert", epoch, maker, number),
                    )
                )
                metrics.append(result.metrics)
                order = labels.argsort(stable=True)
                columns.append({name: column[order] for name, column in patches(result.buffers).items()})
                for label in labels.unique().tolist():
                    at = torch.nonzero(labels == label).flatten()
                    origin = Provenance(maker, label, tuple((first + at).tolist()))
                    parts.append((origin, result.params["pixels"][at]))
                first += len(labels)
        means = {name: sum(m[name] for m in metrics) / len(metrics) for name in ("loss", "confidence")}
        return parts, _stacked(columns), {f"server/inversion_{name}": value for name, value in means.items()}

    def labels(self, server: Server, maker: str, count: int, epoch: int) -> Tensor:
        """The classes of the images to make, (count,), among those that clients train on."""
        classes = len(self.info.base_classes)
        logits: Tensor | None = None
        counts: Tensor | None = None
        if self.label_source == "client_head":
            noise = noise_images(PRIOR_IMAGES, 0.5, self.info, server, "prior")
            key = ("prior", epoch, maker)
            if self.teacher == ENSEMBLE:
                logits = self.soft_labels(server, noise, key)
            else:
                logits = server.predict(Predict("model", noise, self.uploads[maker], key=key)).outputs
        elif self.label_source == "client_counts":
            counts = torch.stack(list(self.counts.values())).sum(0) if self.teacher == ENSEMBLE else self.counts[maker]
        owner = torch_generator(server.seed, server.round, SERVER, "labels", epoch, maker)
        return label_plan(
            self.label_source,
            count,
            classes,
            owner,
            logits=None if logits is None else logits[:, :classes],
            counts=None if counts is None else counts[:classes],
        )

    def ask_teachers(self, server: Server, bank: Bank, epoch: int) -> dict[str, Tensor]:
        """What the ensemble says about images: constants, so the student's steps cost the student's forward passes only."""
        bare = TensorExamples(bank.inputs, bank.labels)  # a column is an option of the forward pass
        answers = {}
        for column, (output, seen) in self.relabel.targets(sparse="low" in bank.columns).items():
            images = bare if seen is None else Annotated(bare, {"keep": bank.columns[seen]})
            request = Predict("ensemble", images, given=self.teachers, output=output, key=("teach", column, epoch))
            outputs = server.predict(request).outputs
            assert outputs is not None
            answers[column] = outputs.float()
        return answers

    def learn(self, server: Server, images: Examples, epoch: int, memory: OptimizerMemory) -> dict[str, float]:
        """The epoch's share of the student's budget, on all images so far. Returns the mean loss; nothing without a step."""
        whole = self.student_training
        steps = spread(whole.steps, range(1, self.epochs + 1))  # the pool of epoch e is e times the first
        if not steps[epoch]:
            return {}
        cosine = (CosineRate(whole.steps, sum(steps[:epoch])),) if whole.cosine else ()
        part = Training(steps[epoch], whole.batch_size, lr=whole.lr)
        loss = self.train_student(server, images, ("student", epoch), (self.relabel, memory, *cosine), part)
        return {"server/student_loss": loss}

    def agreement(self, images: Examples) -> dict[str, float]:
        """Share of the images whose label is what the ensemble names, by what it was shown of them."""
        answers = images.extras(torch.arange(len(images)))
        shown = {name: value for name, value in answers.items() if name.startswith("soft") and value.ndim == 2}
        return {
            f"server/agreement_{name}": float((value.argmax(1) == images.labels).float().mean())
            for name, value in shown.items()
        }


def patches(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Columns of a bank from what an inversion leaves; none where no patch was stopped.

    Returns:
        ``keep`` (B, k) and ``low`` (B, N - k): numbers of the patches that went on, and that were stopped; ``attention``
        (B, N).
    """
    mask = buffers["mask"]
    if mask.all():
        return {}
    kept = int(mask[0].sum())  # alike for all images
    return {
        "keep": mask.nonzero()[:, 1].view(-1, kept),
        "low": (~mask).nonzero()[:, 1].view(len(mask), -1),
        "attention": buffers["attention"],
    }


def _stacked(columns: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Columns of several sets, one below the other."""
    return {name: torch.cat([part[name] for part in columns]) for name in columns[0]} if columns else {}
