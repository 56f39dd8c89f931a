"""DeepInversion and Adaptive DeepInversion (Yin et al., CVPR 2020) as one-shot federated methods: images that the uploaded
models are sure about and whose BatchNorm statistics are those of their training images; a student learns from them.

For a ViT every BatchNorm term vanishes, and with it the method's main prior of images: cross-entropy and total variation are
left. The paper of FedMITR does not say what its row "DeepInversion" trains the student with: report both values of
``student_loss``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable

from fl_lightning.callbacks.token_relabel import TokenRelabel
from fl_lightning.methods.inversion_distillation import InversionDistillation


class DeepInversion(InversionDistillation):
    """L = CE(f(x), y) + tv TV_2(x) + l2 ||x|| + batch_norm sum_l (||mu_l - mu_l^run|| + ||var_l - var_l^run||)
    + competition (1 - JS(f_S(x), f(x))), the last term being ADI's.

    Defaults are those of the authors' CIFAR script with the paper's parameters, but for three: Adam's betas, which are those
    of their ImageNet script (CIFAR's has Adam's own), `flip` (false there), and `label_source` ("balanced" there).

    Args:
        student_loss: The student learns the labels by cross-entropy, "ce", or the ensemble's scores, "kd".
        images_per_client: As `InversionDistillation`, for all that follow. 256 in one batch.
        batch: 256.
        iterations: 2000.
        tv: 2.5e-5.
        batch_norm: 10.
        jitter: 2 pixels of 32.
        competition: Above 0, Adaptive DeepInversion. 0.2 in the authors' README, for ImageNet.
        inversion_optimizer: Null is Adam with learning rate 0.05 and betas (0.5, 0.9).
        **shared: The others of `InversionDistillation`.
    """

    def __init__(
        self,
        student_loss: Literal["ce", "kd"] = "ce",
        images_per_client: int = 256,
        batch: int = 256,
        iterations: int = 2000,
        tv: float = 2.5e-5,
        batch_norm: float = 10.0,
        jitter: float = 0.0625,
        competition: float = 0.0,
        inversion_optimizer: OptimizerCallable | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(
            images_per_client=images_per_client,
            batch=batch,
            iterations=iterations,
            tv=tv,
            batch_norm=batch_norm,
            jitter=jitter,
            competition=competition,
            inversion_optimizer=inversion_optimizer or deep_inversion_adam,
            **shared,
        )
        if student_loss not in ("ce", "kd"):
            raise ValueError(f"student_loss is {student_loss!r}; allowed: 'ce', 'kd'")
        self.relabel = TokenRelabel(hard_view=student_loss, lam=0, temperature=self.temperature)


def deep_inversion_adam(parameters: Any) -> torch.optim.Optimizer:
    """Adam on the pixels, with the authors' learning rate for CIFAR and betas for ImageNet."""
    return torch.optim.Adam(parameters, lr=0.05, betas=(0.5, 0.9))
