"""DENSE (Zhang et al., NeurIPS 2022): data-free one-shot federated learning by a generator that is drawn anew in every
epoch.

Numbers are the steps of the algorithm as the authors' code has it: 1. a fresh student; 2. epochs, each with a new
generator, noise and uniform classes; 3. steps on generator and noise; 4. the best batch joins the pool; 5. the student
learns the ensemble's soft labels of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from fl_lightning.data.augmentation import Augmentation, augment, draw
from fl_lightning.data.examples import Annotated, DataInfo
from fl_lightning.losses.adversarial import disagreement, hard_cross_entropy
from fl_lightning.losses.batch_statistics import statistics_layers
from fl_lightning.methods.base import SERVER, Server, Training, at_least_0
from fl_lightning.methods.distillation import Distil
from fl_lightning.methods.generator_distillation import GeneratorDistillation
from fl_lightning.rng import torch_generator
from fl_lightning.tasks.adversarial import AdversarialGenerator, BatchSearch
from fl_lightning.tasks.base import FederatedTask


class DENSEGenerator(BatchSearch):
    """L_G of DENSE. A given group ``views`` holds ``draws`` (steps B, D), the numbers that the augmentation takes.

    Args:
        weights: Of the cross-entropy and of the adversarial term.
        adversarial_temperature: T of the adversarial term.
        masked: Count it where student and ensemble disagree alone.
        augmentation: Random changes of the images before anybody is asked.
        *args: Those of `BatchSearch`.
    """

    resumes = True

    def __init__(
        self,
        weights: tuple[float, float],
        adversarial_temperature: float,
        masked: bool,
        augmentation: Sequence[Augmentation],
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self.one_hot, self.adversarial = weights
        self.adversarial_temperature, self.masked = adversarial_temperature, masked
        self.augmentation = tuple(augmentation)

    def objective(self, images: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        if self.augmentation:
            draws = self.given["views"]["draws"][self.current_epoch * len(self.latents) + rows]
            images = augment(self.augmentation, images, draws)
        teacher, statistics = self.watched_ensemble(images)
        known = hard_cross_entropy(teacher, labels)  # CE(z(x), y)
        fooled = disagreement(teacher, self.student(images), self.adversarial_temperature, self.masked)
        return self.one_hot * known + statistics - self.adversarial * fooled


class DENSE(GeneratorDistillation):
    """DENSE. The student starts from the common initial model ("S fresh"); defaults are those of the authors' README.

    The README's student: SGD with learning rate 0.01 and momentum 0.9 (the model's optimizer here), and one pass over
    the pool an epoch at batch 256, 20,100 steps in all. Here the budget ``student`` is divided so that every epoch
    makes equally many passes over the pool, which grows.

    Args:
        images: Synthetic images over all epochs. 256 an epoch.
        epochs: Generators, one after the other.
        generator_steps: Steps on each generator and its noise. 30; the code's default is 20.
        one_hot: Weight of CE(ensemble, y), at least 0.
        bn: Weight of the teachers' BatchNorm statistics, summed over teachers and layers, at least 0; 0 for networks
            without BatchNorm.
        adversarial: Weight of the term that seeks images on which student and ensemble differ, at least 0.
        adversarial_temperature: T of that term, above 0. Co-Boosting's copy of the method has 3 (and bn 0).
        masked: Count that term only where the two name different classes (the paper).
        augmentation: Random changes before anybody is asked. The code: RandomCrop(4) and HorizontalFlip; none here,
            since not every image may be mirrored.
        latent: Width of z.
        width: Channels of the generator's last hidden layer.
        generator_optimizer: Builds the optimizer of the generator and z; null is Adam with learning rate 1e-3 and betas
            (0.5, 0.999).
        student: Budget of the student.
        temperature: T of the distillation. 20; the code's default is 1.
        **common: Those of `OneShotDistillation`.
    """

    def __init__(
        self,
        images: int = 51_200,
        epochs: int = 200,
        generator_steps: int = 30,
        one_hot: float = 1.0,
        bn: float = 1.0,
        adversarial: float = 1.0,
        adversarial_temperature: float = 1.0,
        masked: bool = True,
        augmentation: list[Augmentation] | None = None,
        latent: int = 256,
        width: int = 64,
        generator_optimizer: OptimizerCallable | None = None,
        student: Training = Training(20_100, 256),
        temperature: float = 20.0,
        **common: Any,
    ) -> None:
        super().__init__(
            images, epochs, latent, width, generator_optimizer, student=student, temperature=temperature, **common
        )
        if generator_steps < 1:
            raise ValueError(f"generator_steps is {generator_steps}; it must be at least 1")
        at_least_0(one_hot=one_hot, bn=bn, adversarial=adversarial)
        if not adversarial_temperature > 0:
            raise ValueError(f"adversarial_temperature is {adversarial_temperature}; it must be above 0")
        self.generator_steps, self.one_hot, self.bn, self.adversarial = generator_steps, one_hot, bn, adversarial
        self.adversarial_temperature, self.masked = adversarial_temperature, masked
        self.augmentation = tuple(augmentation or ())

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        super().setup(model, info, seed)
        check_statistics(self.bn, model)

    def generator(self, model: FederatedTask) -> AdversarialGenerator:
        return DENSEGenerator(
            (self.one_hot, self.adversarial),
            self.adversarial_temperature,
            self.masked,
            self.augmentation,
            self.bn,
            model,
            self.network,
            (self.batch, self.latent),
            self.combine,
            self.temperature,
            self.generator_optimizer,
        )

    def distil(self, server: Server) -> Mapping[str, float]:
        numbers: dict[str, float] = {}
        soft: list[Tensor] = []
        for epoch in range(self.epochs):
            latents, labels = self.draw(server, epoch, self.uniform)  # 2.
            start = {**self.fresh(server, epoch), "latents": latents}
            owner = torch_generator(server.seed, server.round, SERVER, "views", epoch)
            views = {"draws": draw(self.augmentation, self.generator_steps * self.batch, owner)}
            given = {**self.adversaries, "views": views}
            found = self.train_generator(server, labels, start, given, self.generator_steps, epoch)  # 3.
            new = self.keep(found.buffers["best"], labels)  # 4.
            soft.append(self.soft_labels(server, new, ("soft", epoch)))
            pool = Annotated(self.pool(), {"soft": torch.cat(soft)})
            passes = range(1, self.epochs + 1)  # the pool of epoch e is e batches
            numbers |= self.learn(server, pool, epoch, passes, (Distil(self.temperature),))  # 5.
            numbers["server/generator_loss"] = float(found.buffers["lowest"])
        return numbers


def check_statistics(weight: float, model: FederatedTask) -> None:
    """Raises ValueError where BatchNorm statistics have a weight and the model has none."""
    if weight > 0 and not statistics_layers(model):
        network = type(getattr(model, "network", model)).__name__
        raise ValueError(f"bn is {weight}, but {network} has no BatchNorm layer with running statistics; set bn to 0")
