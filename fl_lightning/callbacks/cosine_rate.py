"""A learning rate that falls along a cosine over one local fit."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class CosineRate(Callback):
    """Half a cosine from the optimizer's own learning rate in the first step down towards 0 after the last.

    Args:
        steps: Optimizer steps of the whole cosine, at least 1.
        done: How many of them were taken before this fit, at least 0: one cosine over several fits.
    """

    runs_lean = resumes = True

    def __init__(self, steps: int, done: int = 0) -> None:
        for name, value, least in (("steps", steps, 1), ("done", done, 0)):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        self.steps, self.done = steps, done

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._base = [group["lr"] for group in trainer.optimizers[0].param_groups]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        factor = 0.5 * (1 + math.cos(math.pi * min((self.done + trainer.global_step) / self.steps, 1.0)))
        for group, base in zip(trainer.optimizers[0].param_groups, self._base, strict=True):
            group["lr"] = base * factor
