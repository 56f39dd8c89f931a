"""Switches a CLIP policy's local training from supervised learning to reinforcement."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.losses.grpo import GRPO
from fl_lightning.rng import torch_generator
from fl_lightning.tasks.clip import ClipPolicy, Objective, Reference

OldPolicy = Literal["step", "epoch", "round"]
Mix = Literal["parameters", "probabilities", "kl"]


class GRPOStageSwitch(Callback):
    """Sets what a fit minimises, and freezes the policy that GRPO's ratios are taken against.

    Args:
        switch_epoch: Local epoch from which reinforcement runs: 0 for the whole fit, None for none of it.
        second: What runs then: "grpo", or "sft_kl" (the control without a reward signal).
        grpo: Options of the loss.
        anchor: LoRA factors of the supervised model (dW_sft). At a switch within the fit, the policy at the switch instead.
        latest: LoRA factors of the latest global policy (dW_g).
        anchor_text: Class embeddings (C, d) of the reference, or None for those in force.
        anchor_weight: Weight of the anchor in the hybrid reference, in [0, 1]; the latest policy has the rest.
        mix: What is mixed into the hybrid reference: "parameters", "probabilities", or the two "kl" terms.
        old_policy: When the old policy is frozen: before every "step" (the ratio is then 1 and the clip inert), at the
            start of every local "epoch", or once in the fit ("round").
        seed: Owner seed of the noise, already derived for this client and round.
    """

    runs_lean = resumes = True

    def __init__(
        self,
        switch_epoch: int | None,
        second: Objective,
        grpo: GRPO,
        anchor: Reference,
        latest: Reference,
        anchor_text: Tensor | None,
        anchor_weight: float,
        mix: Mix,
        old_policy: OldPolicy,
        seed: int,
    ) -> None:
        self.switch_epoch, self.second, self.grpo = switch_epoch, second, grpo
        self.anchor, self.latest, self.anchor_text = anchor, latest, anchor_text
        self.anchor_weight, self.mix = anchor_weight, mix
        self.old_policy, self.seed = old_policy, seed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, ClipPolicy)
        pl_module.grpo = self.grpo

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, ClipPolicy)
        reinforce = self.switch_epoch is not None and trainer.current_epoch >= self.switch_epoch
        if not reinforce:
            pl_module.objective = "sft"
            return
        if trainer.current_epoch == self.switch_epoch:
            self._begin(pl_module, within=trainer.current_epoch > 0)
        if self.old_policy == "epoch" or (self.old_policy == "round" and pl_module.old is None):
            pl_module.freeze_old_policy()

    def _begin(self, policy: ClipPolicy, *, within: bool) -> None:
        device, weight = policy.device, self.anchor_weight
        anchor = dict(policy.trainable()) if within else self.anchor
        anchor = {name: value.detach().to(device, copy=True) for name, value in anchor.items()}
        latest = {name: self.latest[name].to(device) for name in anchor}
        if self.mix == "parameters":  # as the paper writes it; the mixture of products B A would be another
            mixed = {name: weight * value + (1 - weight) * latest[name] for name, value in anchor.items()}
            policy.references = [(1.0, mixed)]
        else:
            policy.references = [(weight, anchor), (1 - weight, latest)]
        policy.objective, policy.old = self.second, None
        policy.mix_probabilities = self.mix == "probabilities"
        policy.reference_text = None if self.anchor_text is None else self.anchor_text.to(device)
        policy.noise = torch_generator(self.seed, "noise", device=device)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, ClipPolicy)
        pl_module.objective, pl_module.references, pl_module.old = "sft", [], None
        pl_module.noise, pl_module.reference_text = None, None
