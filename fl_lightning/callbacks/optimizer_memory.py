"""Several fits with one optimizer."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class OptimizerMemory(Callback):
    """A fit goes on with what the optimizer remembered (momentum, Adam's moments) at the end of the last one.

    Learning rates and other options are those of the new fit. Copies share the memory, since a fit gets copies of its
    callbacks; the parameters must be the same from fit to fit.
    """

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}

    def __deepcopy__(self, memo: Any) -> OptimizerMemory:
        return self

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.memory:
            optimizer = trainer.optimizers[0]
            optimizer.load_state_dict({**optimizer.state_dict(), **self.memory})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.memory["state"] = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
