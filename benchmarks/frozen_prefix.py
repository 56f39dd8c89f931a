"""What keeping the frozen prefix's activations saves: CPU seconds of a supervised client fit with and without, side by side.

    python benchmarks/frozen_prefix.py [--models tiny-clip-32 ViT-B-16]

The first epoch, which fills the cache, is not in the ratio: it costs one forward pass of the prefix, as without a cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from fl_lightning.cli import quiet
from fl_lightning.data.examples import DataInfo, TensorExamples
from fl_lightning.federation.participant import Participant
from fl_lightning.methods.base import Fit
from fl_lightning.models.clip import LoRA
from fl_lightning.tasks.clip import ClipTask

WORDS = ("zero", "one", "two", "three", "four")


def participant(model: str, size: int, batch: int, cache_gib: float) -> Participant:
    """A participant with a CLIP of random weights, LoRA on its last two blocks."""
    task = ClipTask(model, None, LoRA(), cache_gib=cache_gib)
    task.build(DataInfo(WORDS, (3, size, size), tuple(range(5))), seed=0)
    policy = task.vision_half()
    policy.given = {}
    return Participant({"policy": policy}, {"accelerator": "cpu", "devices": 1, "max_epochs": 1}, batch, seed=0)


def main() -> None:
    """Measure, print a table, and the same figures as JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-clip-32", "ViT-B-16"])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    print(f"{'model':<14} {'cached s':>9} {'uncached s':>11} {'ratio':>6}")
    for model in arguments.models:
        size, count, batch = (32, 256, 64) if model.startswith("tiny") else (224, 8, 8)
        draw = torch.Generator().manual_seed(0)
        images = torch.rand((count, 3, size, size), generator=draw)
        examples = TensorExamples(images, torch.arange(count) % 5)
        sides = {"cached": participant(model, size, batch, 2.0), "uncached": participant(model, size, batch, 0.0)}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for repeat in range(arguments.repeats + 1):
            for side, worker in sides.items():
                width = worker.tasks["policy"].visual.embed_dim  # type: ignore[union-attr]
                text = torch.nn.functional.normalize(torch.randn((5, width), generator=draw), dim=1)
                started = time.process_time()
                worker.execute(Fit("policy", examples, given={"text": {"embeddings": text}}), repeat, "client")
                if repeat:  # the first fills the cache and warms up
                    seconds[side].append(time.process_time() - started)
        cached, uncached = (statistics.median(seconds[side]) for side in ("cached", "uncached"))
        print(f"{model:<14} {cached:>9.3f} {uncached:>11.3f} {uncached / cached:>6.2f}")
        figures |= {f"{model}_cached_s": cached, f"{model}_uncached_s": uncached, f"{model}_ratio": uncached / cached}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
