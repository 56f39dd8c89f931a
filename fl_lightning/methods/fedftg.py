"""FedFTG (Zhang et al., CVPR 2022): fine-tuning the average by data-free distillation, here after a single round.

Numbers are the steps of the server as the authors' code has it: 1. the average; 2. label counts; 3. a generator that is
told the class; 4. iterations, each with new noise and classes; 5. a step of the generator for each client, 6. with a
term for diversity; 7. steps of the student on the same noise; 8. more iterations than in one of the paper's many
rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from fl_lightning.callbacks.optimizer_memory import OptimizerMemory
from fl_lightning.data.examples import Annotated, TensorExamples
from fl_lightning.losses.adversarial import diversity_loss
from fl_lightning.methods.base import Predict, Server, Training, at_least_0
from fl_lightning.methods.distillation import Init
from fl_lightning.methods.generator_distillation import GeneratorDistillation
from fl_lightning.tasks.adversarial import AdversarialGenerator
from fl_lightning.tasks.base import Batch, FederatedTask
from fl_lightning.tasks.ensemble import EXPERT

Discrepancy = Literal["l1", "kl"]


class FedFTGGenerator(AdversarialGenerator):
    """L_G of FedFTG: one client's in every step, in turn. A given group ``shares`` holds alpha, (K, C).

    Args:
        weights: Of the adversarial term, the cross-entropy and the diversity.
        discrepancy: How the adversarial term compares student and client.
        *args: Those of `AdversarialGenerator`.
    """

    resumes = True

    def __init__(self, weights: tuple[float, float, float], discrepancy: Discrepancy, *args: Any) -> None:
        super().__init__(*args)
        self.weights: tuple[float, float, float] = weights
        self.discrepancy: Discrepancy = discrepancy

    def objective(self, images: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        clients = sorted(group for group in self.given if group.startswith(EXPERT))
        client = self.current_epoch % len(clients)  # an epoch is a step
        teacher, student = self.asked(self.given[clients[client]], "logits", images), self.student(images)
        alpha = self.given["shares"]["shares"][client, labels].to(images)
        # 5. The code multiplies the batch's mean CE by alpha; weighing every image is the evident intent.
        fooled = (alpha * discrepancy(student, teacher.detach(), self.discrepancy)).mean()
        known = (alpha * F.cross_entropy(teacher, labels, reduction="none")).mean()
        diverse = diversity_loss(self.latents[rows], images)  # 6.
        adversarial, one_hot, diversity = self.weights
        return -adversarial * fooled + one_hot * known + diversity * diverse / len(clients)


def discrepancy(student: Tensor, teacher: Tensor, kind: Discrepancy) -> Tensor:
    """How far apart two classifiers are on every image, (B,).

    Args:
        student: Scores (B, C).
        teacher: Scores (B, C).
        kind: "l1": mean over classes of |student - teacher|; "kl": KL(softmax(teacher) || softmax(student)).
    """
    if kind == "l1":
        return (student - teacher).abs().mean(1)
    return F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="none", log_target=True).sum(1)


def class_shares(counts: Tensor) -> Tensor:
    """alpha_k^y = n_k^y / sum_j n_j^y; 0 for a class that nobody has.

    Args:
        counts: Training images by client and class, (K, C).
    """
    return counts / counts.sum(0).clamp_min(1)


class SoftCrossEntropy(Callback):
    """The student's loss of FedFTG, from column ``soft`` (B, C) of the batch, log-probabilities.

    Args:
        class_mean: Mean over batch and classes; False sums over the classes.
    """

    runs_lean = resumes = True

    def __init__(self, class_mean: bool) -> None:
        self.class_mean = class_mean

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.criterion = self.criterion

    def criterion(self, task: FederatedTask, batch: Batch) -> Tensor:
        """The loss in place of the task's own."""
        own = task.logits(batch.inputs).log_softmax(1)  # type: ignore[operator]
        terms = -batch.extras["soft"].softmax(1) * own
        return terms.mean() if self.class_mean else terms.sum(1).mean()


class FedFTG(GeneratorDistillation):
    """FedFTG, one-shot. Clients upload how many training images of every class they have.

    The code's student: 5 steps an iteration of SGD with learning rate 0.1 and weight decay 1e-3 (the model's optimizer
    here).

    Args:
        images: Synthetic images over all iterations. The code's batch is that of the clients, 50.
        iterations: Batches, each for one step of the generator a client, then its part of the student's budget. The
            code has 10 in each of its rounds; with one round, 1000 here.
        discrepancy: "l1" of scores (the code), or "kl" of probabilities (the paper). The client's are constants in it,
            as in the code.
        adversarial: Weight of the term that seeks images on which student and client differ, at least 0.
        one_hot: Weight of the clients' cross-entropy, at least 0.
        diversity: Weight of the diversity term, at least 0.
        class_mean: The student's loss is a mean over batch and classes (the code); False sums over the classes, which
            is the gradient of the paper's KL.
        latent: Width of z. The code: 100, for CIFAR-100 256.
        width: Channels of the generator's last hidden layer.
        generator_optimizer: Builds the generator's optimizer, which is one over all iterations.
        student: Budget of the student, 5 steps an iteration.
        init: The paper starts from the average of the uploads.
        **common: Those of `OneShotDistillation`.
    """

    wants_counts = True  # 2.
    conditional = True  # 3.

    def __init__(
        self,
        images: int = 50_000,
        iterations: int = 1000,
        discrepancy: Discrepancy = "l1",
        adversarial: float = 1.0,
        one_hot: float = 1.0,
        diversity: float = 1.0,
        class_mean: bool = True,
        latent: int = 100,
        width: int = 64,
        generator_optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=0.01),
        student: Training = Training(5000, 50),
        init: Init = "fedavg",
        **common: Any,
    ) -> None:
        if iterations < 1:
            raise ValueError(f"iterations is {iterations}; it must be at least 1")
        # 7. q is a mean of probabilities.
        super().__init__(
            images,
            iterations,
            latent,
            width,
            generator_optimizer,
            student=student,
            init=init,
            combine="mean",
            temperature=1.0,
            **common,
        )
        if discrepancy not in get_args(Discrepancy):
            raise ValueError(f"discrepancy is {discrepancy!r}; allowed: {', '.join(map(repr, get_args(Discrepancy)))}")
        at_least_0(adversarial=adversarial, one_hot=one_hot, diversity=diversity)
        self.term_weights = adversarial, one_hot, diversity
        self.discrepancy: Discrepancy = discrepancy
        self.class_mean = class_mean

    def generator(self, model: FederatedTask) -> AdversarialGenerator:
        return FedFTGGenerator(
            self.term_weights,
            self.discrepancy,
            model,
            self.network,
            (self.batch, self.latent),
            self.combine,
            self.temperature,
            self.generator_optimizer,
            False,
        )

    def distil(self, server: Server) -> Mapping[str, float]:
        numbers: dict[str, float] = {}
        clients = sorted(self.uploads)
        counts = torch.stack([self.counts[client] for client in clients]).float()  # 2. n_k^y
        alpha = class_shares(counts)
        state, memory = self.fresh(server, 0), OptimizerMemory()  # 3.
        for iteration in range(self.epochs):
            latents, labels = self.draw(server, iteration, counts.sum(0))  # 4. p(y) in proportion to sum_k n_k^y
            start = {**state, "latents": latents}
            given = {**self.adversaries, "shares": {"shares": alpha}}
            trained = self.train_generator(server, labels, start, given, len(clients), iteration, (memory,))  # 5.
            state = {**trained.params, **trained.buffers}
            told = Annotated(self.rows(labels), {"labels": labels})
            images = server.predict(Predict("generator", told, output="images", key=("images", iteration))).outputs
            assert images is not None
            self.keep(images, labels)
            batch = Annotated(TensorExamples(images, labels), {"weights": alpha[:, labels].T})
            q = {"soft": self.soft_labels(server, batch, ("soft", iteration))}  # 7. log sum_k alpha_k^y softmax(f_k(x))
            learnt = Annotated(TensorExamples(images, labels), q)
            shares = [1] * self.epochs
            numbers |= self.learn(server, learnt, iteration, shares, (SoftCrossEntropy(self.class_mean),))
            numbers["server/generator_loss"] = trained.metrics["loss"]
        self.pool()
        return numbers
