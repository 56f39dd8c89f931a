"""Trains a part of a network and leaves the rest as it is."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn


class TrainHead(Callback):
    """Freezes all but the last linear layer, the classifier's head, for one fit: parameters, and statistics of BatchNorm."""

    runs_lean = resumes = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        layers = [module for module in pl_module.modules() if isinstance(module, nn.Linear)]
        if not layers:
            raise ValueError(f"{type(pl_module).__name__} has no linear layer to be its head")
        head = set(layers[-1].parameters())
        self._frozen = [p for p in pl_module.parameters() if p.requires_grad and p not in head]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        # BatchNorm's statistics are of the rest, too. Every fit starts in training mode.
        for module in pl_module.modules():
            if module._buffers and not head & set(module.parameters()):
                module.eval()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for parameter in self._frozen:
            parameter.requires_grad_(True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # the task goes on to other fits
