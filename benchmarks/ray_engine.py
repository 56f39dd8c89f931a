"""What processes of Ray give: seconds to start them, and of a round's client work beside the serial engine's; same bits.

Sixteen clients on digits, a ResNet-8, two local epochs; the serial engine's rounds, then Ray's, in one run.

    python benchmarks/ray_engine.py
    python benchmarks/ray_engine.py --workers 3
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from fl_lightning.cli import quiet
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.sources import Digits
from fl_lightning.federation.engines.ray import RayEngine
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.state import digest
from fl_lightning.methods import FedAvg
from fl_lightning.models import ResNet8
from fl_lightning.tasks import ClassificationTask


def main() -> None:
    """Measure; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    quiet()
    report: dict[str, Any] = {"workers": options.workers}
    digests = set()
    for engine in ("serial", "ray"):
        loop = FederationLoop(
            engine=engine, num_workers=options.workers, progress=False, validate=False, evaluate_every=options.rounds
        )
        data = FederatedDataModule(Digits(), num_clients=16, batch_size=16)
        trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 2}
        loop.assemble(FedAvg(rounds=options.rounds), ClassificationTask(ResNet8), data, trainer, 0)
        if isinstance(loop.engine, RayEngine):
            started = time.perf_counter()
            loop.engine._start()
            report["start_seconds"] = round(time.perf_counter() - started, 1)
        loop.fit()
        report[f"{engine}_seconds"] = round(min(row["time/clients"] for row in loop.history[1:]), 3)
        digests.add(digest(loop.method.state_dict()))
    print(
        json.dumps(
            {
                **report,
                "ratio": round(report["serial_seconds"] / report["ray_seconds"], 2),
                "same_bits": len(digests) == 1,
            }
        )
    )


if __name__ == "__main__":
    main()
