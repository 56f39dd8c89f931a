"""What a data source is: it loads train and test examples and says what their classes and domains are called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from fl_lightning.data.examples import Examples


@dataclass(frozen=True)
class Splits:
    """What a source loads.

    Attributes:
        train: Examples to be divided among clients.
        test: Examples that nobody trains on.
        class_names: Names by label.
        domain_names: Names by domain number.
        val: Validation examples, where the source has such a split of its own.
    """

    train: Examples
    test: Examples
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...] = ("all",)
    val: Examples | None = None


class Source(ABC):
    """Where examples come from. Cheap to construct: reading happens in `load`."""

    @abstractmethod
    def load(self, *, image_size: int | None, channels: int | None, seed: int) -> Splits:
        """Read the data.

        Args:
            image_size: Height and width in pixels to bring images to; None keeps the source's own size.
            channels: 1 (grey) or 3 (RGB) to bring images to; None keeps the source's own.
            seed: Owner seed for draws that the source makes (a split that it has to draw, rendered images).

        Raises:
            FileNotFoundError: A file is missing; the message names the path and what to do.
            ValueError: A file is broken or does not fit its description; the message names it.
        """


def check_splits(splits: Splits, where: str, trained: bool = True) -> None:
    """Refuse what no classifier could be trained or tested on.

    Args:
        splits: What a source has loaded.
        where: Its name, for the message.
        trained: Whether the training split is used.

    Raises:
        ValueError: The training or the test split is empty, there is but one class, or labels or domains are out of range.
    """
    classes = len(splits.class_names)
    if classes < 2:
        raise ValueError(f"{where}: {classes} class ({', '.join(splits.class_names)}); a classifier needs at least 2")
    parts = {"test": splits.test} | ({"train": splits.train} if trained else {})
    parts |= {"val": splits.val} if splits.val is not None else {}
    for name, part in parts.items():
        if not len(part) and name != "val":  # a source may say so that it has none
            raise ValueError(f"{where}: the {name} split holds no example")
        for what, values, count in (
            ("labels", part.labels, classes),
            ("domains", part.domains, len(splits.domain_names)),
        ):
            wrong = values[(values < 0) | (values >= count)]
            if len(wrong):
                raise ValueError(
                    f"{where}: {len(wrong)} of {len(part)} {what} of the {name} split are out of range, the first is "
                    f"{int(wrong[0])}; they must be in [0, {count - 1}]"
                )
    if trained and len(splits.train.labels.unique()) < 2:
        raise ValueError(
            f"{where}: all {len(splits.train)} training examples are of class "
            f"{splits.class_names[int(splits.train.labels[0])]!r}; at least 2 classes must have some"
        )
