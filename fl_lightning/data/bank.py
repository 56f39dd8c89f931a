"""Invented images with their origin: who made each, from which seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fl_lightning.data.augmentation import Augmentation
from fl_lightning.data.examples import TensorExamples


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
    """Synthetic labelled images as uint8, in runs of one factory each.

    Args:
        parts: (provenance, images (N, C, H, W) in [0, 1]) for each run; images are rounded to 256 levels.
        augmentation: Random changes when a model is fitted on the bank.
        columns: What else is known of every image, (N, ...) by name: masks, survivors.
    """

    def __init__(
        self,
        parts: Iterable[tuple[Provenance, Tensor]],
        augmentation: Sequence[Augmentation] = (),
        columns: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        runs = list(parts)
        if not runs:
            raise ValueError("a bank was made of no images; there must be a factory")
        self.provenance = tuple(origin for origin, _ in runs)
        for origin, images in runs:
            if len(origin.indices) != len(images):
                raise ValueError(f"{origin} has {len(origin.indices)} indices for {len(images)} images")
            if images.is_floating_point() and not images.isfinite().all():
                raise ValueError(
                    f"images of client {origin.client}, class {origin.label} are not finite: its factory diverged"
                )
        pixels = [i if i.dtype == torch.uint8 else (i * 255).round().clamp(0, 255).to(torch.uint8) for _, i in runs]
        labels = [torch.full((len(images),), origin.label) for origin, images in runs]
        super().__init__(torch.cat(pixels), torch.cat(labels))
        self.augmentation, self.columns = tuple(augmentation), dict(columns)
        for name, column in self.columns.items():
            if len(column) != len(self):
                raise ValueError(f"column {name!r} has {len(column)} rows for {len(self)} images")

    def extras(self, indices: Tensor) -> dict[str, Tensor]:
        return {name: column[indices] for name, column in self.columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """Images and their origin, for a checkpoint."""
        return {
            "images": self.inputs,
            "columns": dict(self.columns),
            "provenance": [{"client": p.client, "label": p.label, "indices": list(p.indices)} for p in self.provenance],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], augmentation: Sequence[Augmentation] = ()) -> Bank:
        """The bank that `state_dict` described."""
        origins = [Provenance(p["client"], int(p["label"]), tuple(map(int, p["indices"]))) for p in state["provenance"]]
        images = state["images"].split([len(origin.indices) for origin in origins])
        return cls(zip(origins, images, strict=True), augmentation, state.get("columns", {}))


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
