"""One-shot distillation on images that another run has drawn: the bank of a FederatedFactory in place of inverted images.

No paper has this. Clients upload a model once, as in every method of `fl_lightning.methods.distillation`; the images come
from a file that `ExportBank` wrote. So clients send both: a factory there, a model here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from fl_lightning.data.bank import Bank
from fl_lightning.data.examples import DataInfo
from fl_lightning.methods.base import Server
from fl_lightning.methods.distillation import Distil, OneShotDistillation
from fl_lightning.tasks.base import FederatedTask

StudentLoss = Literal["kd", "ce"]


class BankDistillation(OneShotDistillation):
    """The student learns from another run's synthetic images.

    Args:
        bank: A file of `ExportBank`; of images of the clients' shape, with classes of theirs.
        student_loss: "kd": what the ensemble of the uploads says about the images; "ce": the classes that they stand for.
        **common: Those of `OneShotDistillation`.
    """

    makes_images = True

    def __init__(self, bank: str, student_loss: StudentLoss = "kd", **common: Any) -> None:
        super().__init__(**common)
        if student_loss not in get_args(StudentLoss):
            raise ValueError(f"student_loss is {student_loss!r}; allowed: 'kd', 'ce'")
        self.path, self.student_loss = bank, student_loss

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        super().setup(model, info, seed)
        self.images = Bank.load(self.path)
        if (shape := tuple(self.images.inputs.shape[1:])) != info.input_shape:
            raise ValueError(f"bank {self.path} has images of shape {shape}; the clients' have {info.input_shape}")
        if (largest := int(self.images.labels.max())) >= info.num_classes:
            raise ValueError(f"bank {self.path} has class {largest}; there are {info.num_classes} classes")

    def distil(self, server: Server) -> Mapping[str, float]:
        self.bank = self.images
        images = self.with_soft_labels(server, self.images)
        named = images.extras(torch.arange(len(images)))["soft"].argmax(1) == images.labels
        losses = (Distil(self.temperature),) if self.student_loss == "kd" else ()
        loss = self.train_student(server, images, ("student",), losses)
        return {
            "server/bank": float(len(images)),
            "server/agreement_soft": float(named.float().mean()),
            "server/student_loss": loss,
        }
