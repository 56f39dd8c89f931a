"""One-shot distillation whose images come from a generator that learns against the uploaded models and the student:
what FedFTG, DENSE and Co-Boosting share.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from fl_lightning.callbacks.optimizer_memory import OptimizerMemory
from fl_lightning.data.bank import Bank, Provenance
from fl_lightning.data.examples import DataInfo, Examples, TensorExamples
from fl_lightning.message import Groups, Tensors
from fl_lightning.methods.base import SERVER, UNLIMITED, Fit, Result, Server, Training
from fl_lightning.methods.distillation import OneShotDistillation
from fl_lightning.models.image_generator import ImageGenerator
from fl_lightning.rng import owned_global_rng, torch_generator
from fl_lightning.tasks.adversarial import AdversarialGenerator
from fl_lightning.tasks.base import FederatedTask


class GeneratorDistillation(OneShotDistillation):
    """Epochs of two parts: the generator makes a batch of images, and the student is trained on.

    The student's budget of steps is that of the whole, divided among the epochs; its optimizer's momentum is carried
    over, and with ``student.cosine`` the learning rate falls from epoch to epoch along a cosine over all steps.

    Args:
        images: Synthetic images over all epochs; a multiple of ``epochs``, at least 2 an epoch.
        epochs: Batches of images, at least 1.
        latent: Width of the noise z.
        width: Channels of the generator's last hidden layer.
        generator_optimizer: Builds the optimizer of the generator (and of z, where z is trained); None is Adam with learning
            rate 1e-3 and betas (0.5, 0.999).
        **common: Those of `OneShotDistillation`.
    """

    conditional = False  # whether the generator is told the class

    makes_images = True

    def __init__(
        self,
        images: int,
        epochs: int,
        latent: int,
        width: int,
        generator_optimizer: OptimizerCallable | None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        for name, value in (("epochs", epochs), ("latent", latent), ("width", width)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if images < 2 * epochs or images % epochs:
            raise ValueError(
                f"images is {images}; it must be a multiple of the number of batches, {epochs}, and at least twice that"
            )
        self.images, self.epochs, self.latent, self.width = images, epochs, latent, width
        # No default of the signature: a configuration could not write a function with a tuple in it.
        self.generator_optimizer: OptimizerCallable = generator_optimizer or dense_adam

    def setup(self, model: FederatedTask, info: DataInfo, seed: int) -> None:
        super().setup(model, info, seed)
        with owned_global_rng(seed, SERVER, "generator", "init"):
            self.network = ImageGenerator(
                info.input_shape, self.latent, self.width, info.num_classes if self.conditional else None
            )
        self.parts: list[tuple[Provenance, Tensor]] = []
        self.student_memory = OptimizerMemory()

    def tasks(self, model: FederatedTask) -> dict[str, FederatedTask]:
        return {**super().tasks(model), "generator": self.generator(model)}

    @abstractmethod
    def generator(self, model: FederatedTask) -> AdversarialGenerator:
        """The task that trains the generator."""

    @property
    def batch(self) -> int:
        """Images of an epoch, B."""
        return self.images // self.epochs

    @property
    def uniform(self) -> Tensor:
        """Equal shares (C,) of the classes that the clients train on."""
        shares = torch.zeros(self.info.num_classes)
        shares[list(self.info.base_classes)] = 1
        return shares

    @property
    def adversaries(self) -> Groups:
        """Whom the generator is trained against."""
        return {**self.teachers, "student": self.student}

    def fresh(self, server: Server, epoch: int) -> dict[str, Tensor]:
        """The generator's first weights and buffers."""
        self.network.redraw(torch_generator(server.seed, server.round, SERVER, "generator", epoch))
        return {f"generator.{name}": value.detach().clone() for name, value in self.network.state_dict().items()}

    def draw(self, server: Server, epoch: int, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Noise z ~ N(0, I), (B, D), and classes y (B,) in proportion to ``shares`` (C,)."""
        generator = torch_generator(server.seed, server.round, SERVER, "noise", epoch)
        latents = torch.randn(self.batch, self.latent, generator=generator)
        return latents, torch.multinomial(shares, self.batch, replacement=True, generator=generator)

    def rows(self, labels: Tensor) -> Examples:
        """A generator's examples: rows of z with the classes (B,) that the images shall show."""
        return TensorExamples(torch.arange(len(labels)), labels)

    def train_generator(
        self,
        server: Server,
        labels: Tensor,
        start: Tensors,
        given: Groups,
        steps: int,
        epoch: int,
        callbacks: Sequence[Callback] = (),
    ) -> Result:
        """Steps of the generator on the epoch's batch."""
        overrides = {"max_steps": steps, "max_epochs": UNLIMITED, "batch_size": len(labels)}
        fit = Fit("generator", self.rows(labels), start, given, (), tuple(callbacks), overrides, ("generator", epoch))
        return server.fit(fit)

    def keep(self, images: Tensor, labels: Tensor) -> Bank:
        """Keep an epoch's images (B, C, H, W). Returns them alone as a bank, by class, rounded to 256 levels."""
        before = sum(len(origin.indices) for origin, _ in self.parts)
        places = {label: torch.nonzero(labels == label).flatten() for label in labels.unique().tolist()}
        origins = [Provenance(SERVER, label, tuple((before + at).tolist())) for label, at in places.items()]
        new = Bank(zip(origins, (images[at] for at in places.values()), strict=True))
        self.parts += new.parts
        return new

    def pool(self) -> Bank:
        """All images that were kept so far, in the order of their epochs."""
        self.bank = Bank(self.parts)
        return self.bank

    def learn(
        self,
        server: Server,
        images: Examples,
        epoch: int,
        shares: Sequence[int],
        callbacks: Sequence[Callback] = (),
        given: Groups | None = None,
    ) -> Mapping[str, float]:
        """Train the student by the epoch's share of its budget. Returns its loss; nothing where that is no step."""
        whole = self.student_training
        steps = spread(whole.steps, shares)
        if not steps[epoch]:
            return {}
        done = sum(steps[:epoch])
        scale = 0.5 * (1 + math.cos(math.pi * done / whole.steps)) if whole.cosine else 1.0
        part = Training(steps[epoch], whole.batch_size, lr=whole.lr)
        callbacks = (*callbacks, self.student_memory)
        loss = self.train_student(server, images, ("student", epoch), callbacks, part, given, lr_scale=scale)
        return {"server/student_loss": loss}


def dense_adam(parameters: Any) -> torch.optim.Optimizer:
    """The generator's optimizer in the code of DENSE and Co-Boosting."""
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.999))


def spread(total: int, shares: Sequence[int]) -> list[int]:
    """Divide a number in proportion to shares: integers that sum to it, no running sum above its due.

    Args:
        total: At least 0.
        shares: At least 0 each, not all 0.
    """
    due = [total * sum(shares[: place + 1]) // sum(shares) for place in range(len(shares))]
    return [after - before for before, after in zip([0, *due], due, strict=False)]
