"""FedMITR (Shen et al., arXiv 2605.10748): one-shot federated learning with vision transformers, by sparse model inversion
and token relabel. A reconstruction: no equation and no table of hyper-parameters of the paper could be read. What was found
where, and what is an option because it was not found, stands in ``docs/methods/fedmitr.md``.

Client, once: fine-tune the ViT, upload it. Server, for each client k with labels y (`InversionDistillation.synthesise`):

1. pixels x ~ N(0, I); steps of Adam on CE(f^k(x|S), y) + tv TV_2(x), where S are all patches at first;
2. at each event the patches of S to which f^k's class token attends least are stopped for good (`SparseModelInversion`):
   H is S at the end, L its complement;
3. (x, y, H, L, k) joins the bank, the stopped patches as they were when they were stopped.

Then the student f_S (`TokenRelabel`): what was inverted is believed, the rest is relabelled by the ensemble z,

    R1: CE(f_S(x|H), y) + lambda KL_T(z(x|L) || f_S(x|L)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable

from fl_lightning.callbacks.sparse_inversion import Freeze, SparseModelInversion
from fl_lightning.callbacks.token_relabel import TokenRelabel
from fl_lightning.methods.inversion_distillation import InversionDistillation
from fl_lightning.synthesis.token_relabel import HardView, Reading


class FedMITR(InversionDistillation):
    """FedMITR. Defaults are those of SMI's script, whose co-author is this paper's first; the paper's own are not known.

    Corners of the ablation: ``events: [], ratios: []`` is dense inversion with hard labels (DeepInversion); ``lam: 0`` is
    sparse inversion with hard labels; the defaults are FedMITR; ``hard_view: kd`` learns the ensemble's scores of all
    patches, with ``lam: 0`` of those that were inverted alone.

    Args:
        events: Iterations at which patches are stopped, rising, at least 1.
        ratios: Share of the patches still alive that each event stops, in [0, 1).
        freeze: "hard", or "smi_compat", in which stopped patches go on drifting; see `SparseModelInversion`.
        reading: Of token relabel: "r1" two sparse views, "r2" labels for all patch tokens, "r3" sparse view and whole image.
        hard_view: What is learnt on H: "ce" the label, "kd" the ensemble's scores, "mix" half of each.
        lam: lambda, weight of the relabel term, at least 0.
        beta: Weight of the patch tokens in "r2", at least 0.
        images_per_client: As `InversionDistillation`, for all that follow.
        batch: SMI: 100.
        iterations: SMI: 4000.
        tv: SMI: 1e-4 for 100 images of 224 x 224.
        jitter: SMI: 1/8.
        batch_norm: A ViT has none.
        inversion_optimizer: Null is SMI's, Adam with learning rate 0.25 and betas (0.5, 0.99).
        **shared: The others of `InversionDistillation`.
    """

    def __init__(
        self,
        events: Sequence[int] = (50, 100, 200, 300),
        ratios: Sequence[float] = (0.3, 0.3, 0.3, 0.3),
        freeze: Freeze = "hard",
        reading: Reading = "r1",
        hard_view: HardView = "ce",
        lam: float = 1.0,
        beta: float = 0.5,
        images_per_client: int = 100,
        batch: int = 100,
        iterations: int = 4000,
        tv: float = 1e-4,
        jitter: float = 0.125,
        batch_norm: float = 0.0,
        inversion_optimizer: OptimizerCallable | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(
            images_per_client=images_per_client,
            batch=batch,
            iterations=iterations,
            tv=tv,
            jitter=jitter,
            batch_norm=batch_norm,
            inversion_optimizer=inversion_optimizer or smi_adam,
            **shared,
        )
        self.stops = SparseModelInversion(events, ratios, freeze)
        if late := [event for event in events if event >= iterations]:
            raise ValueError(
                f"events are {list(events)} and iterations {iterations}; event {late[0]} would never come: all must be below"
            )
        self.relabel = TokenRelabel(reading, hard_view, lam, beta, self.temperature)


def smi_adam(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of the pixels in SMI's script."""
    return torch.optim.Adam(parameters, lr=0.25, betas=(0.5, 0.99))
