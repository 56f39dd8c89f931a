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
