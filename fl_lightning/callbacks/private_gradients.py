"""Gradients of single examples, clipped, added up with noise (Abadi et al., 2016, Algorithm 1), by Opacus."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.rng import torch_generator
from fl_lightning.tasks.base import Batch, FederatedTask


class PrivateGradients(Callback):
    """Every backward pass of a fit leaves g~ = (sum_i g_i min(1, C / ||g_i||) + N(0, z^2 C^2)) / B in the gradients.

    Whatever comes after it (a rule's correction, the Trainer's clipping, the optimizer) sees no other gradient, so all of it
    costs no privacy. Batches are drawn by Poisson sampling (`Fit.poisson`); an empty one gives noise alone.

    Args:
        clip: C, above 0.
        noise_multiplier: z, at least 0.
        batch_size: B, the expected number of examples of a batch, above 0.
        owner: Of the noise: the run's seed and what follows.
    """

    runs_lean = resumes = True

    def __init__(self, clip: float, noise_multiplier: float, batch_size: float, owner: tuple[Any, ...]) -> None:
        self.clip, self.noise_multiplier, self.batch_size, self.owner = clip, noise_multiplier, batch_size, owner
        self.hooks: Any = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, FederatedTask)
        if reason := obstacle(pl_module):
            raise ValueError(reason)
        opacus = library()
        pl_module.criterion = self.loss
        self.parameters = list(pl_module.trainable().values())
        self.hooks = opacus.GradSampleHooks(pl_module, loss_reduction="mean")
        device = self.parameters[0].device
        self.sum = opacus.DPOptimizer(  # of which only what comes before the step is used
            torch.optim.SGD(self.parameters, lr=0.0),
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.clip,
            expected_batch_size=self.batch_size,
            generator=torch_generator(*self.owner, device=device),
        )

    def fit_state(self) -> dict[str, Any]:
        return {"noise": self.sum.generator.get_state()}

    def load_fit_state(self, state: dict[str, Any]) -> None:
        self.sum.generator.set_state(state["noise"])

    @staticmethod
    def loss(task: FederatedTask, batch: Batch) -> Tensor:
        """The task's loss; 0, and no part of the fit's mean, for a batch without examples."""
        if len(batch.labels):
            return task.loss(batch)
        task._loss_counted = True
        return torch.stack([0 * parameter.sum() for parameter in task.trainable().values()]).sum()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self.count, self.released = len(batch.labels), False

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.sum.zero_grad()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.released:
            raise ValueError("record-level privacy accounts for one gradient a step; this rule takes more")
        self.released = True
        for name, parameter in pl_module.named_parameters():
            if not parameter.requires_grad:
                continue
            if not self.count:
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))  # type: ignore[attr-defined]
            found = parameter.grad_sample  # type: ignore[attr-defined]
            if not isinstance(found, Tensor) or len(found) != self.count:
                raise ValueError(f"record-level privacy: {name} has no gradient for each of the {self.count} examples")
        self.sum.pre_step()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clean()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._clean()

    def _clean(self) -> None:
        """The task goes on to other fits."""
        if self.hooks is not None:
            self.hooks.cleanup()
            for parameter in self.parameters:
                parameter.summed_grad = None  # type: ignore[attr-defined]
            self.hooks = None


def obstacle(task: FederatedTask) -> str | None:
    """Why a task cannot be trained so, in a sentence; None where it can."""
    known = library().GradSampleHooks.GRAD_SAMPLERS
    what = f"record-level privacy cannot serve {type(task).__name__}: "
    if type(task).example_losses is FederatedTask.example_losses:
        return what + "its loss is not known to be a mean over examples (it has no example_losses)"
    for name, module in task.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if isinstance(module, _BatchNorm):
            return what + f"{type(module).__name__} ({name}) mixes the examples of a batch; GroupNorm does not"
        if own and type(module) not in known and any(True for _ in module.children()):
            return what + f"Opacus gives no gradients of single examples for {type(module).__name__} ({name})"
    if buffers := task.persistent_buffers():
        return what + f"buffers leave the fit without noise: {', '.join(buffers)}"
    validator, training = library().ModuleValidator, task.training
    task.train()
    errors = validator.validate(task, strict=False)
    task.train(training)
    return what + "; ".join(str(error) for error in errors) if errors else None


def library() -> Any:
    """Opacus' classes that are used.

    Raises:
        ValueError: It is not installed.
    """
    from types import SimpleNamespace

    try:
        from opacus.grad_sample import GradSampleHooks
        from opacus.optimizers import DPOptimizer
        from opacus.validators import ModuleValidator
    except ImportError as error:
        raise ValueError("record-level privacy needs the extra 'dp': pip install 'fl_lightning[dp]'") from error
    return SimpleNamespace(GradSampleHooks=GradSampleHooks, DPOptimizer=DPOptimizer, ModuleValidator=ModuleValidator)
