"""The student's loss on images of which some patches are believed and the others relabelled."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

from fl_lightning.synthesis.token_relabel import HardView, Reading, check_relabel, token_labelling, two_views
from fl_lightning.tasks.base import Batch, FederatedTask


class TokenRelabel(Callback):
    """Sets the task's criterion for one fit to a reading of token relabel (`fl_lightning.synthesis.token_relabel`).

    Columns of a batch: ``keep`` (B, k) the patches of H and ``low`` (B, N - k) those of L, both missing where nothing was
    dropped; and what `targets` names, since the teachers' answers about fixed images are constants.

    Args:
        reading: "r1" two sparse views, "r2" token labelling, "r3" sparse view and whole image.
        hard_view: What is learnt on H: "ce" the label, "kd" the ensemble's scores, "mix" half of each.
        lam: lambda, weight of the relabel term, at least 0.
        beta: Weight of the patches beside the class token in "r2", at least 0.
        temperature: T, above 0.
    """

    runs_lean = resumes = True

    def __init__(
        self,
        reading: Reading = "r1",
        hard_view: HardView = "ce",
        lam: float = 1.0,
        beta: float = 0.5,
        temperature: float = 4.0,
    ) -> None:
        check_relabel(reading, hard_view, lam, beta, temperature)
        self.reading, self.hard_view, self.lam, self.beta, self.temperature = reading, hard_view, lam, beta, temperature

    def targets(self, sparse: bool = True) -> dict[str, tuple[str, str | None]]:
        """What the teachers must be asked about the images, as columns for the student.

        Args:
            sparse: Whether patches were dropped, so that there is an L.

        Returns:
            By column: the teachers' method (``logits`` or ``tokens``), and the column with the patches that they are to see
            (None for all).
        """
        found: dict[str, tuple[str, str | None]] = {}
        soft, relabels = self.hard_view != "ce", self.lam > 0
        if self.reading == "r2":
            if soft:
                found["soft"] = ("logits", None)
            if self.beta and (soft or (relabels and sparse)):
                found["soft_tokens"] = ("tokens", None)
            return found
        if soft:
            found["soft_high"] = ("logits", "keep" if sparse else None)
        if relabels and self.reading == "r3":
            found["soft"] = ("logits", None)
        elif relabels and sparse:
            found["soft_low"] = ("logits", "low")
        return found

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.criterion = self.criterion

    def criterion(self, task: FederatedTask, batch: Batch) -> Tensor:
        """The loss in place of the task's own: one forward pass of the student for each view."""
        forward: Any = task.logits
        at, images, labels = batch.extras, batch.inputs, batch.labels
        keep, low = at.get("keep"), at.get("low")
        if self.reading == "r2":
            tokens, taught = task.tokens(images) if self.beta else None, at.get("soft_tokens")  # type: ignore[operator]
            parts = {"high": _rows(tokens, keep), "soft_high": _rows(taught, keep)}
            if low is not None:
                parts |= {"low": _rows(tokens, low), "soft_low": _rows(taught, low)}
            return token_labelling(
                labels,
                forward(images),
                parts["high"],
                parts.get("low"),
                at.get("soft"),
                parts["soft_high"],
                parts.get("soft_low"),
                self.lam,
                self.beta,
                self.hard_view,
                self.temperature,
            )
        high = forward(images) if keep is None else forward(images, keep=keep)
        soft_high, seen, target = at.get("soft_high"), None, None
        if self.lam and self.reading == "r3":
            seen, target = high if keep is None else forward(images), at["soft"]
        elif self.lam and low is not None:
            seen, target = forward(images, keep=low), at["soft_low"]
        return two_views(labels, high, seen, soft_high, target, self.lam, self.hard_view, self.temperature)


def _rows(scores: Tensor | None, patches: Tensor | None) -> Tensor | None:
    """scores[b, patches[b]]: (B, k, C) of (B, N, C)."""
    if scores is None or patches is None:
        return scores
    return scores.gather(1, patches[:, :, None].expand(-1, -1, scores.shape[-1]))
