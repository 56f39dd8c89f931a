"""The LightningModules, by name."""

from fl_lightning.tasks.base import Batch, FederatedTask
from fl_lightning.tasks.classification import ClassificationTask
from fl_lightning.tasks.clip import ClipPretrainTask, ClipTask

__all__ = ["Batch", "ClassificationTask", "ClipPretrainTask", "ClipTask", "FederatedTask"]
