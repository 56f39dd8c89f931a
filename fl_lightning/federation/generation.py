"""How good, and how original, the images are that a server has synthesised."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fl_lightning.data.examples import Examples
from fl_lightning.federation.callbacks import FederationCallback, Row, classes_in, clients_in, examples_in
from fl_lightning.federation.recorder import Recorder
from fl_lightning.methods.base import Fit, passes
from fl_lightning.metrics import generation as measures
from fl_lightning.rng import numpy_generator
from fl_lightning.tasks.base import FederatedTask

if TYPE_CHECKING:
    from fl_lightning.federation.loop import FederationLoop

FEATURES = "classifier"
_VALUES = 2**26  # of training images that every run's meter compares with: 256 MiB
_COLUMNS = 16  # images whose patches are shown


class SynthesisWatcher(FederationCallback, ABC):
    """Looks at a method's synthetic images once, in the round that makes them."""

    seen: Examples | None = None

    def on_start(self, loop: FederationLoop) -> None:
        self.seen = loop.method.synthetic()  # of a run that goes on: measured in the round that made it

    def measure(self, loop: FederationLoop) -> Row:
        made = loop.method.synthetic()
        if made is None or made is self.seen:
            return {}
        self.seen = made
        return self.look(loop, made)

    @abstractmethod
    def look(self, loop: FederationLoop, made: Examples) -> Row:
        """Numbers of new images for the round's row."""


class GenerationMeter(SynthesisWatcher):
    """Measures a method's synthetic images in the round that makes them, and draws some of them.

    Columns ``generation/…``: ``nn_ratio``, ``copy_rate`` (`fl_lightning.metrics.generation.memorisation`: distances to the
    training images of all clients, with the test images as the yardstick), ``KID(classifier)`` and ``FD(classifier)`` on the
    last hidden features of a classifier that is trained for this on all real training images, and that nobody else sees.
    Images of clients and classes that the method does ``without`` are not looked at.

    Args:
        per_class: Synthetic images of a class that are looked at, at least 2.
        feature_epochs: Epochs of the classifier whose features are compared, at least 1; 0 measures no distances.
        grid: Images of a class to draw, as `SamplePictures` does; 0 for no picture.
    """

    def __init__(self, per_class: int = 200, feature_epochs: int = 10, grid: int = 8) -> None:
        for name, value, least in (
            ("per_class", per_class, 2),
            ("feature_epochs", feature_epochs, 0),
            ("grid", grid, 0),
        ):
            if value < least:
                raise ValueError(f"GenerationMeter.{name} is {value}; it must be at least {least}")
        self.per_class, self.feature_epochs, self.grid = per_class, feature_epochs, grid

    def on_start(self, loop: FederationLoop) -> None:
        super().on_start(loop)
        self.initial = loop.model.state()

    def look(self, loop: FederationLoop, made: Examples) -> Row:
        names = loop.info.class_names
        shown = some(made, self.per_class, loop)
        if self.grid:
            draw_samples(loop, shown, self.grid)
        if not loop.data.info.clients:  # no real image to compare with
            return {}
        pairs = {
            "generated": _whole(shown),
            "train": _whole(examples_in(loop)),
            "held_out": _whole(loop.data.test_sets()["global"].of_classes(classes_in(loop))),
        }
        row = measures.memorisation(pairs["generated"], pairs["train"], pairs["held_out"], names)
        if self.feature_epochs:
            self._train(loop)
            body = _LastHidden(loop.model)
            generated, real = pairs["generated"][0], pairs["held_out"][0]
            enough = len(generated) > body.width(real[:1]) < len(real)
            kinds = ("KID", "FD") if enough else ("KID",)  # FD of fewer images than features says nothing
            row |= measures.feature_scores(generated, real, body, FEATURES, seed=loop.seed, measures=kinds)
        return {
            f"generation/{name}": value for name, value in row.items() if "/" not in name or name.startswith("nn_dist")
        }

    def _train(self, loop: FederationLoop) -> None:
        """Leave the model with the weights of a classifier of real images."""
        budget = passes(self.feature_epochs)
        fit = Fit("model", examples_in(loop), self.initial, overrides=budget, key=("features",))
        loop.model.load((result := loop.participant.execute(fit, 0, "generation meter")).params)
        loop.model.load(result.buffers)


class MemorisationMeter(SynthesisWatcher):
    """Whether a method's synthetic images are copies of training images; part of every run, in the round that makes them.

    Columns, means over classes: ``memorisation/nn_ratio``, the median distance of a synthetic image to the nearest training
    image, over the median distance of training images to the nearest other one: about 1 for an honest generator, 0 for one
    that replays; ``memorisation/copy_rate``, the share of synthetic images at most as far as the nearest 1 % of the training
    images are from another: about 0.01 for an honest one. Distances are Euclidean, over pixels, within a class. Where images
    are many or large, a drawn part of the training images stands for all, so that copies of the others go unseen;
    `GenerationMeter` looks at all.

    Args:
        per_class: Synthetic images of a class that are looked at, at least 1.
    """

    def __init__(self, per_class: int = 50) -> None:
        if per_class < 1:
            raise ValueError(f"MemorisationMeter.per_class is {per_class}; it must be at least 1")
        self.per_class = per_class

    def look(self, loop: FederationLoop, made: Examples) -> Row:
        if not clients_in(loop):  # no real image to compare with
            return {}
        most = max(2, _VALUES // math.prod(loop.info.input_shape) // loop.info.num_classes)
        images, labels = _whole(some(made, self.per_class, loop))
        real, of_real = _whole(some(examples_in(loop), most, loop))
        found = [
            measures.training_distances(images[labels == c], real[of_real == c])
            for c in classes_in(loop)
            if (labels == c).any() and (of_real == c).sum() > 1
        ]
        rows = {"nn_ratio": [d.ratio for d in found], "copy_rate": [d.copy_rate() for d in found]}
        return {f"memorisation/{name}": sum(values) / len(values) for name, values in rows.items() if values}


class SamplePictures(SynthesisWatcher):
    """Draws some of a method's synthetic images in the round that makes them: ``samples.png``, and in TensorBoard. Where
    patches of them were stopped (columns ``keep`` and ``attention``), ``samples_masks.png`` shows which, and where the model
    looked.

    Args:
        grid: Images of a class, at least 1.
    """

    def __init__(self, grid: int = 8) -> None:
        if grid < 1:
            raise ValueError(f"SamplePictures.grid is {grid}; it must be at least 1")
        self.grid = grid

    def look(self, loop: FederationLoop, made: Examples) -> Row:
        draw_samples(loop, some(made, self.grid, loop), self.grid)
        return {}


def draw_samples(loop: FederationLoop, shown: Examples, grid: int) -> None:
    """Write the pictures of `SamplePictures` where the run has a folder."""
    from fl_lightning.report.generation_figures import samples_figure
    from fl_lightning.report.inversion_figures import inversion_figure

    recorders = [callback for callback in loop.callbacks if isinstance(callback, Recorder)] if loop.is_main else []
    if not recorders:
        return
    (images, labels), names = _whole(shown), loop.info.class_names
    figures = {"samples": samples_figure(images, labels, names, grid)}
    one = torch.stack([(labels == label).nonzero()[0, 0] for label in labels.unique()])[:_COLUMNS]  # of each class
    columns = shown.extras(one)
    if {"keep", "attention"} <= columns.keys():
        mask = torch.zeros_like(columns["attention"], dtype=torch.bool).scatter_(1, columns["keep"], True)
        figures["samples_masks"] = inversion_figure(images[one], mask, labels[one], names, columns["attention"])
    for recorder in recorders:
        for name, figure in figures.items():
            recorder.figure(name, figure, loop.round)


class _LastHidden(nn.Module):
    """What enters the last linear layer of a classifier."""

    def __init__(self, task: FederatedTask) -> None:
        super().__init__()
        self.task = task
        linear = [module for module in task.modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise ValueError(f"{type(task).__name__} has no linear layer whose input could serve as features")
        self.last = linear[-1]

    def forward(self, images: Tensor) -> Tensor:
        found: list[Tensor] = []
        handle = self.last.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
        try:
            self.task.logits(images)  # type: ignore[operator]
        finally:
            handle.remove()
        return found[0]

    def width(self, image: Tensor) -> int:
        """Number of features."""
        return measures.features(self, image).shape[1]


def _whole(examples: Examples) -> tuple[Tensor, Tensor]:
    return examples.fetch(torch.arange(len(examples))), examples.labels


def some(examples: Examples, per_class: int, loop: FederationLoop) -> Examples:
    """At most so many of each class, drawn."""
    draw = numpy_generator(loop.seed, "generation meter", "images")
    labels = examples.labels.numpy()
    chosen = [draw.permutation((labels == c).nonzero()[0])[:per_class] for c in range(loop.info.num_classes)]
    return examples.select([int(i) for part in chosen for i in part])
