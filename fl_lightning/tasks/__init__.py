"""The LightningModules, by name."""

from fl_lightning.tasks.base import Batch, FederatedTask
from fl_lightning.tasks.classification import ClassificationTask
from fl_lightning.tasks.clip import ClipPretrainTask, ClipTask
from fl_lightning.tasks.diffusion import DiffusionTask
from fl_lightning.tasks.generator import CVAETask, GaussianTask, GeneratorTask
from fl_lightning.tasks.inversion import InversionTask

__all__ = [
    "Batch",
    "CVAETask",
    "ClassificationTask",
    "ClipPretrainTask",
    "ClipTask",
    "DiffusionTask",
    "FederatedTask",
    "GaussianTask",
    "GeneratorTask",
    "InversionTask",
]
