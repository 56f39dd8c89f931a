"""Invented images with their origin: who made each, from which seed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fl_lightning.data.augmentation import Augmentation
from fl_lightning.data.examples import TensorExamples

ON_DISK = 2**30  # bytes of a bank's pixels above which they lie in a file


@dataclass(frozen=True)
class Provenance:
    """Where one run of images of a bank comes from.

    Attributes:
        client: Key of the client whose factory drew them.
        label: Their class.
        indices: Numbers of the images within (client, class): with these and the factory they can be drawn again.
    """

    client: str
    label: int
    indices: tuple[int, ...]


class Bank(TensorExamples):
    """Synthetic labelled images as uint8, in runs of one factory each. More than `ON_DISK` bytes of them lie in a temporary
    file (below ``$TMPDIR``) that is mapped, not read, and that goes with the bank.

    Args:
        parts: (provenance, images (N, C, H, W) in [0, 1]) for each run, taken one by one; images are rounded to 256 levels.
        augmentation: Random changes when a model is fitted on the bank.
        columns: What else is known of every image, (N, ...) by name: masks, survivors.
    """

    def __init__(
        self,
        parts: Iterable[tuple[Provenance, Tensor]],
        augmentation: Sequence[Augmentation] = (),
        columns: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        origins, labels, pixels = list[Provenance](), list[Tensor](), _Pixels()
        for origin, images in parts:
            if len(origin.indices) != len(images):
                raise ValueError(f"{origin} has {len(origin.indices)} indices for {len(images)} images")
            if images.is_floating_point() and not images.isfinite().all():
                raise ValueError(
                    f"images of client {origin.client}, class {origin.label} are not finite: its factory diverged"
                )
            pixels.add(images if images.dtype == torch.uint8 else (images * 255).round().clamp(0, 255).to(torch.uint8))
            origins.append(origin)
            labels.append(torch.full((len(images),), origin.label))
        if not origins:
            raise ValueError("a bank was made of no images; there must be a factory")
        self.provenance = tuple(origins)
        super().__init__(pixels.gathered(), torch.cat(labels))
        self.augmentation, self.columns = tuple(augmentation), dict(columns)
        for name, column in self.columns.items():
            if len(column) != len(self):
                raise ValueError(f"column {name!r} has {len(column)} rows for {len(self)} images")

    def extras(self, indices: Tensor) -> dict[str, Tensor]:
        return {name: column[indices] for name, column in self.columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """Images and their origin, for a checkpoint."""
        origins = [{"client": p.client, "label": p.label, "indices": list(p.indices)} for p in self.provenance]
        return {"images": self.inputs, "columns": dict(self.columns), "provenance": origins}

    def save(self, path: str | Path) -> None:
        """Write images and their origin, without columns, to a safetensors file."""
        save_file({"images": self.inputs}, path, {"provenance": json.dumps(self.state_dict()["provenance"])})

    @classmethod
    def load(cls, path: str | Path) -> Bank:
        """The bank that `save` wrote.

        Raises:
            ValueError: The file cannot be read, or holds no bank.
        """
        try:
            with safe_open(path, "pt") as file:
                return cls.from_state(
                    {"images": file.get_tensor("images"), "provenance": json.loads(file.metadata()["provenance"])}
                )
        except Exception as error:
            raise ValueError(f"{path} holds no bank: {error!r}") from error

    @classmethod
    def from_state(cls, state: dict[str, Any], augmentation: Sequence[Augmentation] = ()) -> Bank:
        """The bank that `state_dict` described."""
        origins = [Provenance(p["client"], int(p["label"]), tuple(map(int, p["indices"]))) for p in state["provenance"]]
        return cls(_runs(origins, state["images"]), augmentation, state.get("columns", {}))

    @property
    def parts(self) -> Iterator[tuple[Provenance, Tensor]]:
        """The runs, images as uint8."""
        return _runs(self.provenance, self.inputs)


def _runs(origins: Sequence[Provenance], images: Tensor) -> Iterator[tuple[Provenance, Tensor]]:
    return zip(origins, images.split([len(origin.indices) for origin in origins]), strict=True)


class _Pixels:
    """Runs of uint8 images that become one tensor, by way of a file where they are many."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self.file: IO[bytes] | None = None
        self.count = self.bytes = 0

    def add(self, images: Tensor) -> None:
        self.held.append(images)
        self.count, self.bytes = self.count + len(images), self.bytes + images.nbytes
        if self.bytes > ON_DISK:
            if self.file is None:
                self.file = tempfile.TemporaryFile()  # noqa: SIM115, the map outlives this method
            for run in self.held:
                self.file.write(run.contiguous().numpy().tobytes())
            self.shape, self.held = images.shape[1:], []

    def gathered(self) -> Tensor:
        if self.file is None:
            return torch.cat(self.held) if self.held else torch.empty(0)
        self.file.flush()
        mapped = np.memmap(self.file, np.uint8, mode="c", shape=(self.count, *self.shape))
        self.file.close()
        return torch.from_numpy(mapped)


def quotas(counts: dict[str, int], total: int) -> dict[str, int]:
    """Divide a number of images among clients in proportion to their training images.

    Args:
        counts: Training images of each client, at least one above 0.
        total: Images to divide, at least 0.

    Returns:
        Integers that sum to ``total``, each within 1 of its share; what is left over goes to the smallest contributors.
    """
    everything = sum(counts.values())
    if everything <= 0:
        raise ValueError(f"counts are {counts}; at least one must be above 0")
    shares = {client: total * count // everything for client, count in counts.items()}
    left = total - sum(shares.values())
    for client in sorted(counts, key=lambda key: (counts[key], key))[:left]:
        shares[client] += 1
    return shares
