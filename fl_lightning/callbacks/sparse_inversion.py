"""Sparse model inversion: patches that the model does not look at are stopped while an image is being made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.synthesis.inversion import check_schedule, hold_, pixel_mask, survivors, top_patches
from fl_lightning.tasks.inversion import InversionTask

Freeze = Literal["hard", "smi_compat"]


class SparseModelInversion(Callback):
    """Stops patches of an `InversionTask` at events, those that the class token attends to least (SMI; FedMITR adopts it).

    In the iteration before an event the living patches are scored: the last block's attention of the class token, mean over
    heads, on the images as they are, without jitter. From the event on the network is run on the best of them alone. Without
    events, or with ratios of 0, the fit is the dense one, bit for bit.

    Args:
        events: Iterations, counted from 0, at least 1 and rising; those after the fit's last never come. SMI: 50, 100, 200,
            300 of 4000.
        ratios: Share of the living patches that each event stops, in [0, 1). SMI: 0.3 each.
        freeze: "hard": pixels of stopped patches keep their values to the last bit. "smi_compat": as in SMI's code, total
            variation and Adam's momentum still move them, and stopped patches are embedded.
    """

    runs_lean = resumes = True

    def __init__(
        self,
        events: Sequence[int] = (50, 100, 200, 300),
        ratios: Sequence[float] = (0.3, 0.3, 0.3, 0.3),
        freeze: Freeze = "hard",
    ) -> None:
        check_schedule(events, ratios)
        if freeze not in ("hard", "smi_compat"):
            raise ValueError(f"freeze is {freeze!r}; allowed: 'hard', 'smi_compat'")
        self.events, self.ratios, self.freeze = tuple(events), tuple(ratios), freeze

    def check(self, network: Any) -> list[int]:
        """Patches alive after each event.

        Raises:
            ValueError: The network cannot leave out patches, or none would be left.
        """
        if self.events and not hasattr(network, "num_patches"):
            raise ValueError(
                f"events are {list(self.events)}, but {type(network).__name__} cannot leave out patches as a SparseViT can; "
                "without events it is inverted as a whole"
            )
        return survivors(network.num_patches, self.ratios) if self.events else []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        task = _inversion(pl_module)
        self._counts = dict(zip(self.events, self.check(task.network), strict=True))
        task.options = {"dense_embedding": True} if self.freeze == "smi_compat" else {}
        self._next: Tensor | None = None  # (B, k) who goes on from the next iteration on
        self._held: tuple[Tensor, Tensor] | None = None  # pixels at the last event; who is alive, by pixel

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        task, step = _inversion(pl_module), trainer.global_step
        if step in self._counts and self._next is not None:
            task.go_on_with(self._next)
            self._next = None
            if self.freeze == "hard":
                alive = pixel_mask(task.mask, task.network.grid, task.network.patch)
                self._held = task.pixels.detach().clone(), alive
        count = self._counts.get(step + 1)
        if count is not None and count < (task.mask.shape[1] if task.kept is None else task.kept.shape[1]):
            self._next = top_patches(task.scores(), task.kept, count)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._held is not None:
            hold_(_inversion(pl_module).pixels, *self._held)

    def fit_state(self) -> dict[str, Any]:
        return {"next": self._next, "held": self._held}

    def load_fit_state(self, state: dict[str, Any]) -> None:
        self._next, self._held = state["next"], state["held"]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._next = self._held = None


def _inversion(module: LightningModule) -> InversionTask:
    if not isinstance(module, InversionTask):
        raise ValueError(f"SparseModelInversion was given a {type(module).__name__}; it must be an InversionTask")
    return module
