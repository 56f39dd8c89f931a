"""Several fits with one optimizer."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class OptimizerMemory(Callback):
    """A fit goes on with what the optimizer remembered (momentum, Adam's moments) at the end of the last one.

    Learning rates and other options are those of the new fit. Deep copies share the memory, since a fit gets such
    of its callbacks; a `copy.copy` has one of its own, as it is by now. The parameters must be the same from fit to fit.
    """

    runs_lean = resumes = True

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}

    def __deepcopy__(self, memo: Any) -> OptimizerMemory:
        return self

    def __copy__(self) -> OptimizerMemory:
        other = OptimizerMemory()
        other.memory = dict(self.memory)
        return other

    def state_dict(self) -> dict[str, Any]:
        """What a later fit goes on with, for the journal of a run."""
        return dict(self.memory)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.memory.clear()
        self.memory.update(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.memory:
            optimizer = trainer.optimizers[0]
            optimizer.load_state_dict({**optimizer.state_dict(), **copy.deepcopy(self.memory)})  # it steps in place

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.memory["state"] = trainer.optimizers[0].state_dict()["state"]
