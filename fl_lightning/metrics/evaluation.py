"""From logits and labels to the numbers that a round reports.

Pure functions that return plain floats under short names; the loop puts the scope in front (``global/acc``). Classes
without a test example are left out of every average over classes, so no average is NaN because a class is missing. A
model that diverged (logits not finite) shows as a NaN ``loss``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error, multiclass_confusion_matrix


def scores(
    logits: Tensor, labels: Tensor, num_classes: int, *, classes: Sequence[int] | None = None
) -> dict[str, float]:
    """Score predictions over one set of examples.

    Args:
        logits: (N, num_classes).
        labels: (N,) integers in [0, num_classes).
        num_classes: Number of columns of ``logits``.
        classes: If given, score only the examples of these classes, each classified among these classes only (base or
            novel accuracy as in CoOp and its successors), see :func:`restrict`.

    Returns:
        ``acc``, top-1 accuracy in [0, 1]; ``balanced_acc``, mean recall over the classes present, in [0, 1]; ``ece``,
        expected calibration error with 15 equal bins and l1 norm, in [0, 1]; ``loss``, mean cross-entropy in nats,
        >= 0; and, if at least two classes are present, ``macro_auroc``, mean one-versus-rest area under the ROC curve
        over the classes present.

    Raises:
        ValueError: Shapes that do not fit, labels out of range, or no example.
    """
    logits, labels = _checked(logits, labels, num_classes)
    if classes is not None:
        logits, labels = restrict(logits, labels, classes)
        num_classes = len(classes)
    if len(labels) == 0:
        raise ValueError("at least one example is needed, got 0")
    # Double, because confident models saturate float32 probabilities at 1, and equal numbers have no rank.
    log_probabilities = logits.double().log_softmax(-1)
    probabilities = log_probabilities.exp()
    recall, present = _recall(logits, labels, num_classes)
    # Given probabilities and not logits: torchmetrics takes logits that happen to lie in [0, 1] for probabilities.
    ece = multiclass_calibration_error(probabilities, labels, num_classes, n_bins=15, norm="l1", validate_args=False)
    result = {
        "acc": _accuracy(logits, labels),
        "balanced_acc": recall[present].mean().item(),
        "ece": ece.item(),
        "loss": F.nll_loss(log_probabilities, labels).item(),
    }
    if len(present) > 1:
        result["macro_auroc"] = _auroc(probabilities, labels, present)
    return result


def per_class_recall(logits: Tensor, labels: Tensor, class_names: Sequence[str]) -> dict[str, float]:
    """Share of each class's examples that are recognised.

    Args:
        logits: (N, C).
        labels: (N,) integers in [0, C).
        class_names: C names; position = label.

    Returns:
        ``recall/<name>`` in [0, 1] for every class that has an example.

    Raises:
        ValueError: Shapes that do not fit, or labels out of range.
    """
    recall, present = _recall(*_checked(logits, labels, len(class_names)), len(class_names))
    return {f"recall/{class_names[label]}": recall[label].item() for label in present.tolist()}


def client_scores(logits: Tensor, labels: Tensor, owner: Iterable[Tensor]) -> dict[str, float]:
    """Accuracy of one global model on each client's share of a test set.

    Args:
        logits: (N, C).
        labels: (N,) integers in [0, C).
        owner: Per client, the indices of its examples, 1-D; shares may overlap, and empty ones are left out.

    Returns:
        ``client_mean/acc``, each client counting the same; ``client_weighted/acc``, each example counting the same;
        ``client_worst/acc``. All in [0, 1].

    Raises:
        ValueError: Shapes that do not fit, labels out of range, or no client with an example.
    """
    logits, labels = _checked(logits, labels, logits.shape[-1])
    return _over_clients(((logits[share.cpu()], labels[share.cpu()]) for share in owner), "client")


def personal_scores(predictions: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Accuracy of each client's own model on its own test examples.

    Args:
        predictions: Per client, logits (N_k, C_k) and labels (N_k,); clients without examples are left out.

    Returns:
        ``personal_mean/acc``, ``personal_weighted/acc`` and ``personal_worst/acc``, see :func:`client_scores`.

    Raises:
        ValueError: Shapes that do not fit, labels out of range, or no client with an example.
    """
    return _over_clients([_checked(logits, labels, logits.shape[-1]) for logits, labels in predictions], "personal")


def harmonic_mean(base: float, novel: float) -> float:
    """2bn / (b + n) of base and novel accuracy, both >= 0; 0 if both are 0.

    Over seeds or data sets, report the mean of harmonic means, not the harmonic mean of means, which is larger.

    Raises:
        ValueError: A negative or NaN argument.
    """
    if not (base >= 0 and novel >= 0):
        raise ValueError(f"base and novel accuracy must be >= 0, got {base} and {novel}")
    return 2 * base * novel / (base + novel) if base + novel > 0 else 0.0


def restrict(logits: Tensor, labels: Tensor, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The classification problem among some classes only.

    Args:
        logits: (N, C).
        labels: (N,) integers.
        classes: K distinct column numbers in [0, C).

    Returns:
        Logits (M, K) and labels (M,) in [0, K), the position in ``classes``, of the M examples whose label is in
        ``classes``, in their order.

    Raises:
        ValueError: ``classes`` is empty, repeats one, or leaves [0, C).
    """
    if not classes or len(set(classes)) != len(classes) or not all(0 <= c < logits.shape[1] for c in classes):
        raise ValueError(f"classes must be distinct numbers in [0, {logits.shape[1]}), got {list(classes)}")
    matches = labels[:, None] == torch.tensor(list(classes), device=labels.device)
    keep = matches.any(-1)
    return logits[keep][:, list(classes)], matches[keep].int().argmax(-1)


def confusion(logits: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Counts of (true class, predicted class), (num_classes, num_classes) int64 on the CPU; rows are true classes.

    Args:
        logits: (N, num_classes).
        labels: (N,) integers in [0, num_classes).
        num_classes: Number of columns of ``logits``.

    Raises:
        ValueError: Shapes that do not fit, or labels out of range.
    """
    logits, labels = _checked(logits, labels, num_classes)
    return multiclass_confusion_matrix(logits.argmax(-1), labels, num_classes, validate_args=False)


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(-1) == labels).double().mean().item()


def _recall(logits: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Recall of every class, (C,), NaN where it has no example; and the classes that have one."""
    counts = multiclass_confusion_matrix(logits.argmax(-1), labels, num_classes, validate_args=False)
    totals = counts.sum(1)
    return counts.diagonal().double() / totals, totals.nonzero().flatten()


def _auroc(probabilities: Tensor, labels: Tensor, classes: Tensor) -> float:
    """Mean one-versus-rest area under the ROC curve: the Mann-Whitney statistic of each class's column, ties at half.

    Only the positives need ranks, and numpy sorts many times faster than torch on a CPU: this takes a tenth
    of the time of torchmetrics' multiclass_auroc, which would be most of a small round's evaluation.
    """
    columns, owner, areas = np.ascontiguousarray(probabilities.numpy().T), labels.numpy(), []
    for label in classes.tolist():
        ordered, positives = np.sort(columns[label]), columns[label][owner == label]
        below, upto = (np.searchsorted(ordered, positives, side) for side in ("left", "right"))
        count = len(positives)
        wins = ((below + upto + 1) / 2).sum() - count * (count + 1) / 2
        areas.append(wins / (count * (len(ordered) - count)))
    return float(np.mean(areas))


def _over_clients(shares: Iterable[tuple[Tensor, Tensor]], prefix: str) -> dict[str, float]:
    """Mean, example-weighted mean and minimum of the clients' accuracies."""
    held = [(_accuracy(logits, labels), len(labels)) for logits, labels in shares if len(labels)]
    if not held:
        raise ValueError("at least one client needs an example; none has any")
    accuracies, sizes = zip(*held, strict=True)
    return {
        f"{prefix}_mean/acc": sum(accuracies) / len(held),
        f"{prefix}_weighted/acc": sum(a * n for a, n in held) / sum(sizes),
        f"{prefix}_worst/acc": min(accuracies),
    }


def _checked(logits: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Both on the CPU without gradient, labels int64, after a look at shapes and range."""
    if logits.ndim != 2 or logits.shape[1] != num_classes or (*labels.shape,) != (len(logits),):
        shapes = f"{(*logits.shape,)} and {(*labels.shape,)}"
        raise ValueError(f"logits and labels must have shapes (N, {num_classes}) and (N,), got {shapes}")
    logits, labels = logits.detach().cpu(), labels.detach().cpu().long()
    if len(labels) and not (labels.min() >= 0 and labels.max() < num_classes):
        raise ValueError(f"labels must lie in [0, {num_classes}), got {labels.min()} to {labels.max()}")
    return logits, labels
