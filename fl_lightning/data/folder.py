"""A folder of unlabelled images."""

from __future__ import annotations

from pathlib import Path

from fl_lightning.data.examples import Examples
from fl_lightning.data.images import SUFFIXES
from fl_lightning.data.sources import FileExamples


def folder_images(folder: str, *, image_size: int, channels: int) -> tuple[list[str], Examples]:
    """Images of a folder and its subfolders, in the order of their paths.

    Args:
        folder: The folder.
        image_size: Height and width in pixels to bring images to.
        channels: 1 or 3.

    Returns:
        Paths, and examples whose labels mean nothing.

    Raises:
        FileNotFoundError: There is no such folder, or no image in it.
    """
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise FileNotFoundError(f"no image below {folder}; looked for files ending in {', '.join(sorted(SUFFIXES))}")
    return [str(path) for path in paths], FileExamples(paths, [0] * len(paths), None, image_size, channels)
