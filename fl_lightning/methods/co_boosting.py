"""Co-Boosting (Dai et al., ICLR 2024): images and ensemble make each other better, one-shot and data-free.

Numbers are the steps of the algorithm as the authors' code has it: 1. equal weights of the uploaded models; 2. epochs,
each with a new generator, as in DENSE, that seeks hard images; 3. they join the pool; 4. the weights move by the sign
of their gradient; 5. the student learns the weighted ensemble's soft labels of the pool's images after a step towards
diverse ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from fl_lightning.data.examples import DataInfo, Examples
from fl_lightning.losses.adversarial import disagreement, hard_cross_entropy
from fl_lightning.losses.distillation import distillation_kl
from fl_lightning.message import Tensors
from fl_lightning.methods.base import SERVER, Distillation, Fit, Predict, Server, Training, at_least_0, passes
from fl_lightning.methods.dense import check_statistics
from fl_lightning.methods.generator_distillation import GeneratorDistillation
from fl_lightning.rng import derive_seed
from fl_lightning.tasks.adversarial import AdversarialGenerator, BatchSearch
from fl_lightning.tasks.asked import Asked
from fl_lightning.tasks.base import Batch, FederatedTask
from fl_lightning.tasks.ensemble import EXPERT, Combine, ask_members, combined

DIVERSITY_TEMPERATURE = 4.0  # of the probabilities that step 5 moves in a random direction


class CoBoostingGenerator(BatchSearch):
    """L_G of Co-Boosting.

    Args:
        hardness: hs, the exponent of an image's hardness 1 - p_y.
        weights: Of the cross-entropy and of the adversarial term.
        adversarial_temperature: T of the adversarial term.
        *args: Those of `BatchSearch`.
    """

    resumes = True

    def __init__(
        self, hardness: float, weights: tuple[float, float], adversarial_temperature: float, *args: Any
    ) -> None:
        super().__init__(*args)
        self.hardness, self.adversarial_temperature = hardness, adversarial_temperature
        self.one_hot, self.adversarial = weights

    def objective(self, images: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        teacher, statistics = self.watched_ensemble(images)
        known = hard_cross_entropy(teacher, labels, self.hardness)
        fooled = disagreement(teacher, self.student(images), self.adversarial_temperature)
        return self.one_hot * known + statistics / self.members - self.adversarial * fooled

    @property
    def members(self) -> int:
        """K."""
        return sum(group.startswith(EXPERT) for group in self.given)


class ClippedSignDescent(torch.optim.Optimizer):
    """w <- clip(w - lr sign(gradient), 0, 1).

    Args:
        params: Parameters in [0, 1].
        lr: How far each number moves in a step, at least 0.
    """

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                moved = (parameter - group["lr"] * parameter.grad.sign()).clamp_(0, 1)
                if moved.any():  # all weights 0 would be no ensemble; one member's gradient is rounding noise
                    parameter.copy_(moved)
        return loss


class EnsembleWeights(FederatedTask):
    """The weights of an ensemble as what is trained, by cross-entropy.

    Args:
        model: A task of the members' kind.
        combine: How they answer together.
        temperature: T of a "mean" of probabilities.
    """

    resumes = True

    def __init__(self, model: FederatedTask, combine: Combine, temperature: float) -> None:
        super().__init__(ClippedSignDescent)
        self.asked = Asked(model)
        self.combine: Combine = combine
        self.temperature = temperature
        self.weights = nn.Parameter(torch.zeros(0))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """As many weights as are given: who uploads is not known before."""
        self.weights = nn.Parameter(torch.empty_like(tensors["weights"]))
        super().load(tensors)

    def loss(self, batch: Batch) -> Tensor:
        scores = ask_members(self.asked, self.given, batch.inputs)
        return F.cross_entropy(combined(scores, self.combine, self.temperature, weights=self.weights), batch.labels)


class DiverseSamples(Callback):
    """The student's step of Co-Boosting: images take a step of the weighted ensemble's along a random direction of its
    probabilities, and the student learns what the ensemble says about the result.

    Args:
        asked: The teachers' network.
        combine: How they answer together.
        epsilon: Size of the step in every pixel of [0, 1].
        temperature: T of the distillation.
        seed: Owner of the random directions.
    """

    runs_lean = resumes = True

    def __init__(self, asked: Asked, combine: Combine, epsilon: float, temperature: float, seed: int) -> None:
        self.asked, self.epsilon, self.temperature, self.seed = asked, epsilon, temperature, seed
        self.combine: Combine = combine

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._draws = torch.Generator().manual_seed(self.seed)
        pl_module.criterion = self.criterion

    def fit_state(self) -> dict[str, Any]:
        return {"draws": self._draws.get_state()}

    def load_fit_state(self, state: dict[str, Any]) -> None:
        self._draws.set_state(state["draws"])

    def criterion(self, task: FederatedTask, batch: Batch) -> Tensor:
        """The loss in place of the task's own."""
        images = self.diverse(task, batch.inputs)
        with torch.no_grad():
            teacher = self.ensemble(task, images)
        return distillation_kl(task.logits(images), teacher, self.temperature)  # type: ignore[operator]

    def ensemble(self, task: FederatedTask, images: Tensor) -> Tensor:
        """The weighted ensemble's scores (B, C)."""
        weights = task.given["weights"]["weights"]
        return combined(ask_members(self.asked, task.given, images), self.combine, self.temperature, weights=weights)

    def diverse(self, task: FederatedTask, images: Tensor) -> Tensor:
        """x + epsilon sign(grad_x sum u softmax(z_w(x) / 4)) with u ~ U(-1, 1)."""
        if not self.epsilon:
            return images
        images = images.detach().requires_grad_()
        scores = self.ensemble(task, images)
        directions = 2 * torch.rand(scores.shape, generator=self._draws).to(scores) - 1
        moved = (directions * (scores / DIVERSITY_TEMPERATURE).softmax(1)).sum()
        return images.detach() + self.epsilon * torch.autograd.grad(moved, images)[0].sign()


class CoBoosting(GeneratorDistillation):
    """Co-Boosting; defaults are those of the authors' script.

    The script's student: SGD with learning rate 0.01, momentum 0.9, weight decay 1e-4 (the model's optimizer here),
    gradients clipped at 10 (``trainer.gradient_clip_val``, which clips z with the generator), and one pass over the
    pool an epoch at batch 128. Here the budget ``student`` is divided so that every epoch makes equally many passes
    over the pool. In the code step 4 sees the pool before the epoch's own batch joins it.

    Args:
        images: Synthetic images over all epochs. 128 an epoch.
        epochs: Generators, one after the other.
        generator_steps: Steps on each generator and its noise.
        hs: Exponent of the hardness in the generator's cross-entropy, at least 0; 0 weighs all images alike.
        one_hot: Weight of that cross-entropy, at least 0.
        bn: Weight of the teachers' BatchNorm statistics, the mean over teachers, at least 0.
        adversarial: Weight of the term that seeks images on which student and ensemble differ, at least 0.
        adversarial_temperature: T of that term, above 0.
        mu: Step of the ensemble's weights, at least 0; it shrinks by 1 % an epoch. 0 keeps them equal.
        weight_passes: Passes over the pool on which the weights move, at least 1.
        epsilon: Step of the diverse images, at least 0; 0 keeps the pool's. 8/255, of pixels in [0, 1] here and of
            normalised ones in the code.
        latent: Width of z.
        width: Channels of the generator's last hidden layer.
        generator_optimizer: Builds the optimizer of the generator and z; null is Adam with learning rate 1e-3 and betas
            (0.5, 0.999).
        student: Budget of the student.
        temperature: T of the distillation.
        **common: Those of `OneShotDistillation`; ``combine`` must be a mean.
    """

    def __init__(
        self,
        images: int = 25_600,
        epochs: int = 200,
        generator_steps: int = 30,
        hs: float = 1.0,
        one_hot: float = 1.0,
        bn: float = 0.0,
        adversarial: float = 1.0,
        adversarial_temperature: float = 3.0,
        mu: float = 0.01,
        weight_passes: int = 1,
        epsilon: float = 8 / 255,
        latent: int = 256,
        width: int = 64,
        generator_optimizer: OptimizerCallable | None = None,
        student: Training = Training(20_100, 128, cosine=True),
        temperature: float = 4.0,
        **common: Any,
    ) -> None:
        super().__init__(
            images, epochs, latent, width, generator_optimizer, student=student, temperature=temperature, **common
        )
        if self.combine == "product":
            raise ValueError("combine is 'product'; the weights of Co-Boosting are those of a 'mean' or 'mean_logits'")
        for name, count in (("generator_steps", generator_steps), ("weight_passes", weight_passes)):
            if count < 1:
                raise ValueError(f"{name} is {count}; it must be at least 1")
        at_least_0(hs=hs, one_hot=one_hot, bn=bn, adversarial=adversarial, mu=mu, epsilon=epsilon)
        if not adversarial_temperature > 0:
            raise ValueError(f"adversarial_temperature is {adversarial_temperature}; it must be above 0")
        self.generator_steps, self.hs, self.one_hot, self.bn = generator_steps, hs, one_hot, bn
        self.adversarial, self.adversarial_temperature = adversarial, adversarial_temperature
        self.mu, self.weight_passes, self.epsilon = mu, weight_passes, epsilon

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        super().setup(model, info, seed)
        check_statistics(self.bn, model)
        self.weights = torch.zeros(0)  # (K,), in the order of the clients' names

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        self.asked = Asked(model, own=True)
        return {**super().tasks(model), "weights": EnsembleWeights(model, self.combine, self.temperature)}

    def generator(self, model: FederatedTask) -> AdversarialGenerator:
        return CoBoostingGenerator(
            self.hs,
            (self.one_hot, self.adversarial),
            self.adversarial_temperature,
            self.bn,
            model,
            self.network,
            (self.batch, self.latent),
            self.combine,
            self.temperature,
            self.generator_optimizer,
        )

    @property
    def weighted_teachers(self) -> dict[str, Tensors]:
        """The ensemble as it is: models and weights."""
        return {**self.teachers, "weights": {"weights": self.weights}}

    def distil(self, server: Server) -> Mapping[str, float]:
        numbers: dict[str, float] = {}
        self.weights = torch.full((len(self.uploads),), 1 / len(self.uploads))  # 1.
        for epoch in range(self.epochs):
            latents, labels = self.draw(server, epoch, self.uniform)  # 2.
            start = {**self.fresh(server, epoch), "latents": latents}
            given = {**self.weighted_teachers, "student": self.student}
            found = self.train_generator(server, labels, start, given, self.generator_steps, epoch)
            self.keep(found.buffers["best"], labels)  # 3.
            pool = self.pool()
            if epoch > 0:
                self.weights = self.move_weights(server, pool, epoch)  # 4.
            seed = derive_seed(server.seed, server.round, SERVER, "directions", epoch)
            step = DiverseSamples(self.asked, self.combine, self.epsilon, self.temperature, seed)
            passes = range(1, self.epochs + 1)  # the pool of epoch e is e batches
            numbers |= self.learn(server, pool, epoch, passes, (step,), self.weighted_teachers)  # 5.
            numbers["server/generator_loss"] = float(found.buffers["lowest"])
        clients = sorted(self.uploads)
        return numbers | {f"server/weight_{c}": float(w) for c, w in zip(clients, self.weights, strict=True)}

    def move_weights(self, server: Server, pool: Examples, epoch: int) -> Tensor:
        """Step 4: w <- clip(w - mu 0.99^e sign(gradient of CE(z_w(x), y)), 0, 1) for every batch of the pool."""
        overrides = {
            **passes(self.weight_passes),
            "batch_size": self.student_training.batch_size,
            "lr": self.mu * 0.99**epoch,
        }
        fit = Fit("weights", pool, {"weights": self.weights}, self.teachers, (), (), overrides, ("weights", epoch))
        return server.fit(fit).params["weights"]

    def evaluations(self) -> dict[str, Predict]:
        if not self.uploads:
            return super().evaluations()
        return {**super().evaluations(), "ensemble": Predict("ensemble", None, given=self.weighted_teachers)}

    def distillation(self) -> Distillation | None:
        found = super().distillation()
        return found and replace(found, teacher=Predict("ensemble", None, given=self.weighted_teachers))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.weights = state["weights"]
