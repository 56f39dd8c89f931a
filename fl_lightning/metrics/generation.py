"""How good generated images are, and how many of them are copies of training images.

Pure functions over tensors. Distances between distributions are taken on the features of a network that is handed in,
and their names carry that network's: ``KID(<feature>)``, ``FD(<feature>)``. "FID" would promise Inception's features.
Copies are looked for among the *training* images; a comparison with test images cannot find them. Images that were not
trained on, held out of the same class, say what distance is to be expected.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.rng import owned_global_rng

Labelled = tuple[Tensor, Tensor]  # inputs (N, ...) and labels (N,)

BLOCK_VALUES = 2**22  # inputs in one block of a distance matrix: 32 MiB in float64
BLOCK_ROWS = 2048  # of a block: 32 MiB of distances in float64
COPIED = 1e-12  # cosine distances below are rounding
OWN = 200  # training images of a class whose distances to others are a yardstick: all against all would be dear


# ---- distances between distributions of features


def features(network: nn.Module, images: Tensor, batch_size: int = 256) -> Tensor:
    """Features of images, in evaluation mode and without gradient; the network is left as it was.

    Args:
        network: Maps (B, ...) to (B, ...); what it returns is flattened.
        images: (N, ...), in the range that the network was trained on.
        batch_size: Images at a time, positive.

    Returns:
        (N, d) float64 on the CPU, d all values of one output.

    Raises:
        ValueError: No image.
    """
    if len(images) == 0:
        raise ValueError("at least one image is needed, got 0")
    parameter = next(network.parameters(), None)
    device = images.device if parameter is None else parameter.device
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            found = [network(batch.to(device)).flatten(1).double().cpu() for batch in images.split(batch_size)]
    finally:
        for module, training in modes:  # not network.train(): a frozen normalisation inside would wake up
            module.training = training
    return torch.cat(found)


def feature_scores(
    generated: Tensor,
    real: Tensor,
    network: nn.Module,
    name: str,
    *,
    seed: int = 0,
    measures: Sequence[str] = ("KID", "FD"),
) -> dict[str, float]:
    """Distances between generated and real images, under names that say on which features.

    Args:
        generated: Images, (N, C, H, W).
        real: Images, (M, C, H, W); the training images where MiFID is asked for.
        network: See :func:`features`; a classifier's body that real images have trained.
        name: Of the features, such as ``digits-cnn``.
        seed: Of the run, for KID's subsets.
        measures: Of ``KID``, ``FD`` and ``MiFID``.

    Returns:
        {``KID(<name>)``: ...}, see :func:`kid`, :func:`frechet_distance` and :func:`mifid`.

    Raises:
        ValueError: Another measure, or too few images for one, see there.
    """
    known: dict[str, Callable[[Tensor, Tensor], float]] = {
        "KID": lambda a, b: kid(a, b, seed=seed),
        "FD": frechet_distance,
        "MiFID": mifid,
    }
    if unknown := set(measures) - known.keys():
        raise ValueError(f"measures must be among {sorted(known)}, got {sorted(unknown)}")
    ours, theirs = features(network, generated), features(network, real)
    return {f"{measure}({name})": known[measure](ours, theirs) for measure in measures}


def kid(generated: Tensor, real: Tensor, *, seed: int = 0, subsets: int = 100, subset_size: int = 1000) -> float:
    """Kernel distance (Bińkowski et al. 2018): squared maximum mean discrepancy with the kernel (xᵀy / d + 1)³.

    Unbiased, hence fit for few images, and below 0 now and then where the distributions agree.

    Args:
        generated: Features, (N, d).
        real: Features, (M, d).
        seed: Of the run; the subsets are drawn from it.
        subsets: How many subsets the mean is over, positive; 1 is enough, and used, where a subset is everything.
        subset_size: Images of either kind in one, at least 2; lowered to what there is.

    Returns:
        Mean over the subsets.

    Raises:
        ValueError: Fewer than 2 rows, other than two dimensions, widths that differ, or sizes out of range.
    """
    from torchmetrics.image.kid import KernelInceptionDistance

    _check(generated, real)
    if subsets < 1 or subset_size < 2:
        raise ValueError(f"subsets must be >= 1 and subset_size >= 2, got {subsets} and {subset_size}")
    size = min(subset_size, len(generated), len(real))
    whole = size == len(generated) == len(real)
    with warnings.catch_warnings(), owned_global_rng(seed, "KID"):
        warnings.filterwarnings("ignore", "Metric `Kernel Inception Distance` will save", UserWarning)
        metric = KernelInceptionDistance(_AsTheyAre(real.shape[1]), subsets=1 if whole else subsets, subset_size=size)
        metric.update(real.double(), real=True)
        metric.update(generated.double(), real=False)
        return float(metric.compute()[0])


def frechet_distance(generated: Tensor, real: Tensor) -> float:
    """Squared Fréchet distance between Gaussians fitted to features: |μ₁ − μ₂|² + tr(Σ₁ + Σ₂ − 2(Σ₁Σ₂)^½), >= 0.

    Args:
        generated: Features, (N, d), N > d, or its covariance would be singular and the distance mostly sampling noise.
        real: Features, (M, d), M > d.

    Raises:
        ValueError: Too few rows, other than two dimensions, or widths that differ.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    _check(generated, real)
    width, fewest = real.shape[1], min(len(generated), len(real))
    if fewest <= width:
        raise ValueError(f"a Fréchet distance on {width} features needs more than {width} images each, got {fewest}")
    metric = FrechetInceptionDistance(_AsTheyAre(width))
    metric.update(real.double(), real=True)
    metric.update(generated.double(), real=False)
    return max(float(metric.compute()), 0.0)  # rounding


def mifid(generated: Tensor, train: Tensor, *, threshold: float = 0.1) -> float:
    """Memorisation-informed Fréchet distance (Bai et al. 2021): the distance over how far the images keep from train.

    The divisor is the mean over *generated* images of the least cosine distance 1 − |cos| to a training image, and 1
    where that mean reaches the threshold. torchmetrics 1.9 takes the mean over the training images instead, where a
    generator that copies few of many images goes unnoticed; and it returns 0, the best value, for a whole training set
    replayed.

    Args:
        generated: Features, (N, d), N > d.
        train: Features of the training images, (M, d), M > d. A row of zeros is at distance 1 from all.
        threshold: In (0, 1]; torchmetrics' default.

    Returns:
        At least the Fréchet distance; infinite where every generated image's direction is that of a training image.

    Raises:
        ValueError: Threshold out of range, or see :func:`frechet_distance`.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must lie in (0, 1], got {threshold}")
    distance = frechet_distance(generated, train)
    directions = F.normalize(train.double(), dim=1)
    nearest = torch.cat(
        [
            1 - (block @ directions.T).abs().amax(1)
            for block in F.normalize(generated.double(), dim=1).split(max(1, BLOCK_VALUES // len(train)))
        ]
    )
    kept = nearest.mean().item()
    if kept <= COPIED:
        return math.inf
    return distance / kept if kept < threshold else distance


# ---- memorisation


@dataclass(frozen=True)
class TrainingDistances:
    """Euclidean distances to the nearest training image.

    Attributes:
        generated: Of every generated image, (G,) float64.
        held_out: Of every image of the same class that nobody trained on, (H,) float64: the yardstick. Where there are none,
            of some training images to the nearest other one.
    """

    generated: Tensor
    held_out: Tensor

    @property
    def ratio(self) -> float:
        """Median of the generated over median of the held-out; nan where held-out images are training images."""
        yardstick = self.held_out.quantile(0.5).item()
        return self.generated.quantile(0.5).item() / yardstick if yardstick > 0 else math.nan

    def copy_rate(self, percentile: float = 1.0) -> float:
        """Share of the generated at most as far as the held-out images' percentile, in [0, 100]."""
        if not 0 <= percentile <= 100:
            raise ValueError(f"percentile must lie in [0, 100], got {percentile}")
        return (self.generated <= self.held_out.quantile(percentile / 100)).double().mean().item()


def nearest_distances(queries: Tensor, references: Tensor, others: bool = False) -> Tensor:
    """Euclidean distance of every query to the nearest reference; exactly 0 for a copy.

    Memory is bounded: neither all distances nor a double copy of all inputs is ever held.

    Args:
        queries: (N, ...).
        references: (M, ...) of the same shape but for M, at least one.
        others: Of every query to the nearest other one: the references start with the queries, and are two at least.

    Returns:
        (N,) float64 on the CPU.

    Raises:
        ValueError: Shapes that do not fit, or no reference.
    """
    if queries.shape[1:] != references.shape[1:] or len(references) == 0:
        raise ValueError(f"shapes must be (N, ...) and (M >= 1, ...), got {(*queries.shape,)}, {(*references.shape,)}")
    queries, references = queries.detach().cpu().flatten(1), references.detach().cpu().flatten(1)
    rows = max(1, min(BLOCK_ROWS, BLOCK_VALUES // max(1, queries.shape[1])))
    found = []
    for number, near in enumerate(queries.split(rows)):
        near = near.double()
        best, place = torch.full((len(near),), math.inf, dtype=torch.float64), torch.zeros(len(near), dtype=torch.int64)
        for start in range(0, len(references), rows):
            distances = torch.cdist(
                near, references[start : start + rows].double(), compute_mode="use_mm_for_euclid_dist"
            )
            if others and start == number * rows:
                distances.fill_diagonal_(math.inf)
            least, at = distances.min(1)
            place, best = torch.where(least < best, at + start, place), torch.minimum(least, best)
        # A product of matrices finds the neighbour fast, but leaves 1e-7 where the distance is 0.
        found.append((near - references[place].double()).norm(dim=1))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def training_distances(generated: Tensor, train: Tensor, held_out: Tensor | None = None) -> TrainingDistances:
    """How far generated and held-out images of one class are from its training images.

    A generator trained with mirrored images can copy mirrored: put the mirrored training images into ``train`` too.

    Args:
        generated: (G, ...), images or features, G >= 1.
        train: (M, ...), M >= 1.
        held_out: (H, ...), H >= 1; in the range, and prepared the way, of the training images. None takes the distances of
            the first ``OWN`` training images to the nearest other one as the yardstick, M >= 2.

    Raises:
        ValueError: Shapes that do not fit, or an empty set.
    """
    if held_out is None:
        if not len(generated) or len(train) < 2:
            raise ValueError(f"a generated and two training images are needed, got {len(generated)} and {len(train)}")
        return TrainingDistances(
            nearest_distances(generated, train), nearest_distances(train[:OWN], train, others=True)
        )
    if not (len(generated) and len(train) and len(held_out)):
        sizes = (len(generated), len(train), len(held_out))
        raise ValueError(f"at least one generated, training and held-out image is needed, got {sizes}")
    return TrainingDistances(nearest_distances(generated, train), nearest_distances(held_out, train))


def nearest_neighbour_ratio(generated: Tensor, train: Tensor, held_out: Tensor) -> float:
    """Median distance to training images, generated over held-out, of one class; see :func:`training_distances`.

    About 1 for an honest generator, 0 for one that replays training images; below 0.5 is alarming.
    """
    return training_distances(generated, train, held_out).ratio


def copy_rate(generated: Tensor, train: Tensor, held_out: Tensor, percentile: float = 1.0) -> float:
    """Share of one class's generated images nearer to a training image than nearly all held-out ones are.

    About ``percentile`` / 100 for an honest generator, 1 for one that replays training images; see
    :func:`training_distances`. With fewer than 100 held-out images the first percentile is close to their minimum.
    """
    return training_distances(generated, train, held_out).copy_rate(percentile)


def memorisation(
    generated: Labelled, train: Labelled, held_out: Labelled, class_names: Sequence[str]
) -> dict[str, float]:
    """Signs of memorisation, class by class and as means over classes.

    Classes that lack a generated, a training or a held-out image are left out.

    Args:
        generated: Images (G, ...) and labels (G,).
        train: Images (M, ...) and labels (M,) that the generators were trained on.
        held_out: Images (H, ...) and labels (H,) of the same distribution that they were not.
        class_names: Position = label.

    Returns:
        ``nn_ratio/<name>``, ``copy_rate/<name>``, and the medians ``nn_distance/generated/<name>`` and
        ``nn_distance/held_out/<name>``; and each of the four without ``/<name>``, the mean over the classes.

    Raises:
        ValueError: No class has all three.
    """
    by_class: dict[str, dict[str, float]] = {}
    for label, name in enumerate(class_names):
        ours, seen, unseen = (
            images[(labels == label).to(images.device)] for images, labels in (generated, train, held_out)
        )
        if len(ours) and len(seen) and len(unseen):
            found = training_distances(ours, seen, unseen)
            by_class[name] = {
                "nn_ratio": found.ratio,
                "copy_rate": found.copy_rate(),
                "nn_distance/generated": found.generated.quantile(0.5).item(),
                "nn_distance/held_out": found.held_out.quantile(0.5).item(),
            }
    if not by_class:
        raise ValueError(f"none of the {len(class_names)} classes has generated, training and held-out images")
    keys = next(iter(by_class.values()))
    means = {key: sum(values[key] for values in by_class.values()) / len(by_class) for key in keys}
    return means | {f"{key}/{name}": value for name, values in by_class.items() for key, value in values.items()}


class _AsTheyAre(nn.Module):
    """The feature network of a torchmetrics metric that is fed features."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("num_features", torch.tensor(num_features))

    def forward(self, x: Tensor) -> Tensor:
        return x


def _check(generated: Tensor, real: Tensor) -> None:
    shapes = f"{(*generated.shape,)} and {(*real.shape,)}"
    if generated.ndim != 2 or real.ndim != 2 or generated.shape[1] != real.shape[1]:
        raise ValueError(f"features must have shapes (N, d) and (M, d), got {shapes}")
    if min(len(generated), len(real)) < 2:
        raise ValueError(f"at least 2 rows of features each are needed, got shapes {shapes}")
