"""Images from a trained classifier: the pixels are what trains."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, get_args

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.data.examples import TensorExamples
from fl_lightning.synthesis.inversion import (
    Combine,
    Shift,
    ensemble,
    jensen_shannon,
    pixel_range,
    statistics_distance,
    to_images,
    total_variation,
)
from fl_lightning.tasks.base import Batch, FederatedTask
from fl_lightning.tasks.classification import ClassificationTask

TEACHER, STUDENT = "teacher/", "student"


def targets(labels: Tensor) -> TensorExamples:
    """The examples of a fit of `InversionTask`: class and number of every image, (B,)."""
    return TensorExamples(torch.arange(len(labels)), labels)


class InversionTask(FederatedTask):
    """Pixels that trained classifiers take for given classes (DeepInversion, Yin et al. 2020).

    A fit starts from ``start={"pixels": noise}``, (B, C, H, W) drawn from N(0, I), and is given the teachers' states as
    groups ``teacher/<client>``: one client's, or several for their ensemble. Its examples are `targets`, all B in every
    step: overrides ``batch_size`` B, ``max_steps`` the iterations, ``max_epochs`` at least as many.

    The result: ``params["pixels"]``, now images in [0, 1]; ``buffers["mask"]``, (B, N) bool, the patches that were optimised
    to the end; ``buffers["attention"]``, (B, N), the score of every patch when it was last judged. All are True and 0
    unless the callback `SparseModelInversion` stops patches; N is 1 for networks without patches.

    Pixels are optimised as the network sees them, normalised by the task's ``mean`` and ``std``: so SMI's learning rate,
    weights and start are meant, and Adam's step is a share of the network's unit, whatever the channel's ``std``. After each
    step they are limited to what is black and white there.

    Teachers are run in evaluation mode through a copy of the network that is no sub-module: nothing of theirs is trained,
    saved or changed.

    Args:
        model: The classifier whose kind the teachers are, built; its own weights are not used.
        combine: Of several teachers: the mean of "logits", or of "probs".
        tv: Weight of TV_2 (see `total_variation`), at least 0. SMI's script: 1e-4, for 100 images of 224 x 224.
        l2: Weight of the images' Euclidean norm, mean over images, at least 0. SMI: 0.
        batch_norm: Weight of DeepInversion's BatchNorm statistics, summed over layers, mean over teachers; at least 0, and 0
            for a network without BatchNorm. DeepInversion's CIFAR script: 10.
        adversarial: Weight of 1 - JS(student, teachers), at least 0: ADI where above 0. The student's state is then given
            as a group ``student``.
        jitter: Each step the images are rolled by up to this share of their side in both axes, in [0, 1). SMI: 1/8.
        flip: Each step the images are reflected or not, all alike.
        optimizer: Builds the optimizer. SMI: Adam, rate 0.25, betas 0.5 and 0.99.

    Raises:
        ValueError: A value out of range, or a model that is no built classifier.
    """

    resumes = True

    def __init__(
        self,
        model: FederatedTask,
        combine: Combine = "logits",
        tv: float = 1e-4,
        l2: float = 0.0,
        batch_norm: float = 0.0,
        adversarial: float = 0.0,
        jitter: float = 0.125,
        flip: bool = True,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=0.25, betas=(0.5, 0.99)),
    ) -> None:
        super().__init__(optimizer)
        for name, value in (("tv", tv), ("l2", l2), ("batch_norm", batch_norm), ("adversarial", adversarial)):
            if not value >= 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter is {jitter}; it must be in [0, 1)")
        if combine not in get_args(Combine):
            raise ValueError(f"combine is {combine!r}; allowed: 'logits', 'probs'")
        if not isinstance(model, ClassificationTask) or not hasattr(model, "network"):
            raise ValueError(f"the model is a {type(model).__name__}; only a built ClassificationTask can be inverted")
        self.combine, self.tv, self.l2, self.jitter, self.flip = combine, tv, l2, jitter, flip
        self.batch_norm, self.adversarial = batch_norm, adversarial
        # In a list, which nn.Module does not look into: a registered teacher would be trained, saved and set to train mode.
        self._skeleton = [_Skeleton(model.network)]
        self._statistics: list[Tensor] | None = None  # terms of BatchNorm layers, while they are asked for
        if batch_norm:
            self._watch_batch_norm()
        self.mean: Tensor
        self.std: Tensor
        self.mask: Tensor
        self.attention: Tensor
        self.register_buffer("mean", model.mean.clone(), persistent=False)
        self.register_buffer("std", model.std.clone(), persistent=False)
        self._resize(torch.empty(0, 1, 1, 1))
        self.kept: Tensor | None = None  # (B, k) living patches, None for all
        self.options: dict[str, Any] = {}  # more for a network that is given ``keep``

    @property
    def network(self) -> Any:
        """The copy of the network that teachers are run through."""
        return self._skeleton[0].network

    def _resize(self, pixels: Tensor) -> None:
        rows, columns = getattr(self.network, "grid", (1, 1))
        self.pixels = nn.Parameter(torch.empty_like(pixels, memory_format=torch.contiguous_format))
        self.register_buffer("mask", pixels.new_ones((len(pixels), rows * columns), dtype=torch.bool))
        self.register_buffer("attention", pixels.new_zeros((len(pixels), rows * columns)))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """As ever, and for as many images of whatever size as ``pixels`` are."""
        if "pixels" in tensors and tensors["pixels"].shape != self.pixels.shape:
            if tensors["pixels"].ndim != 4:
                raise ValueError(f"pixels have shape {tuple(tensors['pixels'].shape)}; it must be (B, C, H, W)")
            self._resize(tensors["pixels"].to(self.pixels))
        super().load(tensors)

    def fit_state(self) -> dict[str, Any]:
        return {**super().fit_state(), "kept": self.kept, "confidence": self._confidence}

    def load_fit_state(self, state: Mapping[str, Any]) -> None:
        super().load_fit_state(state)
        self.kept, self._confidence = state["kept"], state["confidence"]

    # ---- the sparse part, driven by a callback

    @torch.no_grad()
    def scores(self) -> Tensor:
        """(B, k) attention to the living patches of the images as they are, not jittered; mean over teachers."""
        with self.trainer.precision_plugin.train_step_context():
            options = self._options(self.kept)
            found = [self._ask(state, self.pixels, "attention", **options) for state in self._teachers()]
        scores = torch.stack(found).float().mean(0)
        places = torch.arange(self.mask.shape[1], device=scores.device).expand_as(self.mask)
        self.attention.scatter_(1, places if self.kept is None else self.kept, scores)
        return scores

    def go_on_with(self, kept: Tensor) -> None:
        """From now on look at these patches alone, (B, k)."""
        self.kept = kept
        self.mask.zero_().scatter_(1, kept, True)

    def _options(self, kept: Tensor | None) -> dict[str, Any]:
        return {} if kept is None else {"keep": kept, **self.options}

    # ---- the loss

    def loss(self, batch: Batch) -> Tensor:
        if len(batch.inputs) != len(self.pixels):
            raise ValueError(
                f"a step saw {len(batch.inputs)} of {len(self.pixels)} images; it must see all, on one device: override "
                f"batch_size with {len(self.pixels)} and give that many targets"
            )
        labels = torch.empty_like(batch.labels)
        labels[batch.inputs] = batch.labels  # the loader shuffles; images stay where they are
        shift, kept = self._draw_shift(), self.kept
        if kept is not None:
            kept = shift.patches(kept, self.network.grid, self.network.patch)
        view, options = shift.images(self.pixels), self._options(kept)

        self._statistics = [] if self.batch_norm else None
        teachers = self._teachers()
        scores = torch.stack([self._ask(state, view, **options) for state in teachers])
        statistics, self._statistics = self._statistics, None
        teacher = ensemble(scores.float(), self.combine)
        loss = F.cross_entropy(teacher, labels)
        if self.tv:
            loss = loss + self.tv * total_variation(self.pixels)
        if self.l2:
            loss = loss + self.l2 * torch.linalg.vector_norm(self.pixels.flatten(1), dim=1).mean()
        if statistics:
            loss = loss + self.batch_norm * torch.stack(statistics).sum() / len(teachers)
        if self.adversarial:
            student = self._ask(self.given[STUDENT], view, **options)
            loss = loss + self.adversarial * (1 - jensen_shannon(student, teacher))
        self._confidence = teacher.detach().softmax(1).gather(1, labels[:, None]).mean()
        return loss

    def _draw_shift(self) -> Shift:
        height, width = (int(self.jitter * side) for side in self.pixels.shape[2:])
        return Shift(
            int(torch.randint(-height, height + 1, ())),
            int(torch.randint(-width, width + 1, ())),
            bool(self.flip and torch.randint(2, ())),
        )

    def _teachers(self) -> list[Mapping[str, Tensor]]:
        return [self.given[group] for group in sorted(self.given) if group.startswith(TEACHER)]

    def _ask(self, state: Mapping[str, Tensor], inputs: Tensor, what: str = "__call__", **options: Any) -> Tensor:
        return functional_call(self._skeleton[0], dict(state), (inputs, what), options)

    def _watch_batch_norm(self) -> None:
        layers = [m for m in self.network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        if not layers:
            raise ValueError(
                f"batch_norm is {self.batch_norm}; it must be 0 for {type(self.network).__name__}, which has no BatchNorm "
                "with running statistics"
            )

        def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if self._statistics is not None:
                self._statistics.append(statistics_distance(inputs[0], layer.running_mean, layer.running_var))  # type: ignore[arg-type]

        for layer in layers:
            layer.register_forward_pre_hook(note)

    # ---- what a fit calls

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self._skeleton[0].to(self.trainer.strategy.root_device)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.kept, self.options = None, {}
        self.mask.fill_(True)
        self.attention.zero_()
        self._check_given()

    def _check_given(self) -> None:
        if not self._teachers():
            raise ValueError(f"an inversion was asked without teachers; given: {', '.join(self.given) or 'nothing'}")
        if self.adversarial and STUDENT not in self.given:
            raise ValueError(
                f"adversarial is {self.adversarial}; a group {STUDENT!r} with the student's state must be given"
            )
        own = {name: value.shape for name, value in self._skeleton[0].state_dict().items()}
        for group, state in self.given.items():
            wrong = [name for name, value in state.items() if own.get(name) != value.shape]
            if wrong and (group == STUDENT or group.startswith(TEACHER)):
                raise ValueError(f"{group} is of another model: {type(self.network).__name__} has no such {wrong[0]!r}")

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.pixels.clamp_(*pixel_range(self.mean, self.std))

    @torch.no_grad()
    def on_train_end(self) -> None:
        self.pixels.copy_(to_images(self.pixels, self.mean, self.std))

    def fit_metrics(self) -> dict[str, float]:
        """The mean loss, and the teachers' mean probability of the labels in the last step."""
        return {**super().fit_metrics(), "confidence": float(self._confidence)}


class _Skeleton(nn.Module):
    """A frozen copy of a network, under the name that the classifier's state has it, of which any method can be called."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = copy.deepcopy(network)
        self.requires_grad_(False).eval()

    def forward(self, inputs: Tensor, what: str, **options: Any) -> Tensor:
        return getattr(self.network, what)(inputs, **options)
