"""The LightningModules, by name."""

from fl_lightning.tasks.base import Batch, FederatedTask
from fl_lightning.tasks.classification import ClassificationTask

__all__ = ["Batch", "ClassificationTask", "FederatedTask"]
