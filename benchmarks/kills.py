"""kill -9 in the middle of a run, and on again: is it the run that nobody killed, to the last bit?

For every method on a tiny configuration: one uninterrupted run; then, for every phase and as often as ``--times`` says, a
run that kills itself with SIGKILL inside of the phase (at a drawn call, after a drawn part of what that call usually takes;
for checkpoint writing at a drawn fsync), and ``fit --ckpt_path last`` until its end. Compared are the last checkpoint's
method state and client memories, and the rows of metrics.csv without the clock. Counted are the requests (fits and forward
passes of clients and server) and the optimizer steps that were done before the kill, and those of them that were done
again. Everything is journalled at once (``federation.journal_seconds: 0``), so a training leaves a snapshot after every
step. Runs are forks of one process, so that no kill lands in an import.

    python benchmarks/kills.py
    python benchmarks/kills.py --methods fedavg dense --phases client_fit checkpoint --times 2

The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fl_lightning.__main__ import main as command
from fl_lightning.federation import state
from fl_lightning.federation.engines.base import BlockReducer, Total
from fl_lightning.federation.evaluation import Evaluator
from fl_lightning.federation.journal import FOLDER, Journal
from fl_lightning.federation.participant import Participant
from fl_lightning.federation.recorder import Recorder
from fl_lightning.methods import FedAvg
from fl_lightning.methods.base import Fit
from fl_lightning.tasks.base import FederatedTask

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
QUICK = [
    *("--trainer.logger=false", "--federation.progress=false", "--data.num_clients=4", "--trainer.max_steps=4"),
    *("--federation.validate=false", "--federation.callbacks=null", "--federation.journal_seconds=0"),
]
ROUNDS = ["--method.init_args.rounds=3", "--federation.sampler.init_args.size=3"]
STUDENT = ["--method.init_args.student.steps=4"]
INVERSION = [
    *STUDENT,
    *("--method.init_args.images_per_client=8", "--method.init_args.batch=4", "--method.init_args.iterations=6"),
]
GENERATOR = [*STUDENT, "--method.init_args.images=16", "--method.init_args.width=2", "--method.init_args.latent=8"]
FACTORY = [
    *("--data.partitioner=Shards", "--data.train_fraction=0.2", "--method.init_args.samples_per_class=4"),
    *(
        "--method.init_args.training={steps: 2, batch_size: 8}",
        "--method.init_args.classifier={steps: 2, batch_size: 8}",
    ),
    *("--method.init_args.generator.init_args.steps=2", "--model.init_args.network.init_args.width=4"),
    "--method.init_args.generator.init_args.network.init_args.width=8",
]
RESNET = ["--model.init_args.network.init_args.width=2"]
METHODS = {
    "fedavg": ROUNDS,
    "fedadam": ROUNDS,
    "scaffold": ROUNDS,
    "feddyn": ROUNDS,
    "fednsam": ROUNDS,
    "noise_distillation": [*STUDENT, "--method.init_args.images=40"],
    "dense": [*GENERATOR, *RESNET, "--method.init_args.epochs=2", "--method.init_args.generator_steps=3"],
    "fedftg": [*GENERATOR, *RESNET, "--method.init_args.iterations=2"],
    "co_boosting": [*GENERATOR, *RESNET, "--method.init_args.epochs=2", "--method.init_args.generator_steps=3"],
    "deep_inversion": [*INVERSION, *RESNET],
    "fedmitr": [*INVERSION, "--method.init_args.epochs=2", "--method.init_args.events=[2, 4]"],
    "federated_factory": FACTORY,
    "federated_factory_p2p": FACTORY,
    "feddtl": ["--method.init_args.rounds=2", "--data.num_clients=5", "--data.train_fraction=0.2"],
}
PHASES = (
    *("client_fit", "between_clients", "aggregation", "server_fit", "synthesis"),
    *("journal", "snapshot", "checkpoint", "evaluation"),
)


def places() -> dict[str, tuple[Any, str, Callable[..., bool]]]:
    """Where each phase happens: whose function, its name, and which of its calls."""

    def server(kind: bool) -> Callable[..., bool]:
        def asked(self: Any, request: Any, *owner: Any) -> bool:
            learns = isinstance(request, Fit) and request.task in ("model", "text")  # FedDTL's server trains text
            return owner[1:] == ("server",) and learns is kind

        return asked

    def in_checkpoint(handle: int) -> bool:
        return FOLDER not in os.readlink(f"/proc/self/fd/{handle}")

    every: Callable[..., bool] = lambda *a, **k: True  # noqa: E731
    return {
        "client_fit": (
            Participant,
            "execute",
            lambda self, request, *owner: isinstance(request, Fit) and owner[1] not in ("server", "evaluate"),
        ),
        "between_clients": (Total, "take", every),
        "aggregation": (BlockReducer, "finish", every),
        "server_fit": (Participant, "execute", server(True)),
        "server_step": (FedAvg, "step", every),
        "synthesis": (Participant, "execute", server(False)),
        "journal": (Journal, "write", every),
        "snapshot": (Journal, "_replace_training", every),
        "checkpoint": (state.os, "fsync", in_checkpoint),
        "evaluation": (Evaluator, "model", every),
    }


def watch(found: dict[str, list[float]], armed: tuple[str, int, float] | None) -> None:
    """Note how long the calls of each phase take; kill this process within the one that is armed (phase, number, delay)."""
    for phase, (owner, name, wanted) in places().items():
        given = getattr(owner, name)

        def around(*args: Any, given: Any = given, phase: str = phase, wanted: Any = wanted, **options: Any) -> Any:
            if not wanted(*args, **options):
                return given(*args, **options)
            number = len(found[phase])
            doomed = armed is not None and armed[:2] == (phase, number)
            if doomed and armed is not None:
                threading.Thread(target=lambda: (time.sleep(armed[2]), _die()), daemon=True).start()
            started = time.perf_counter()
            result = given(*args, **options)
            if doomed:  # it was quicker than the clock
                _die()
            found[phase].append(time.perf_counter() - started)
            return result

        setattr(owner, name, around)


def count_work() -> None:
    """Leave a byte in the file ``done`` for every request of a client or the server that has been carried out, and in the
    file ``steps`` for every step of an optimizer."""
    given, step = Participant.execute, FederatedTask.optimizer_step
    done, steps = (os.open(name, os.O_CREAT | os.O_APPEND | os.O_WRONLY) for name in ("done", "steps"))

    def execute(worker: Any, request: Any, *owner: Any) -> Any:
        result = given(worker, request, *owner)
        if owner[1] != "evaluate" and owner[-1] != "evaluate":
            os.write(done, b".")
        return result

    def optimizer_step(task: Any, *arguments: Any) -> None:
        step(task, *arguments)
        os.write(steps, b".")

    Participant.execute = execute  # type: ignore[method-assign]
    FederatedTask.optimizer_step = optimizer_step  # type: ignore[method-assign]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def child(folder: Path, arguments: list[str], armed: tuple[str, int, float] | None, queue: Any) -> None:
    """One run of the command line."""
    os.chdir(folder)
    with open("log", "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    found: dict[str, list[float]] = defaultdict(list)
    count_work()
    watch(found, armed)
    command(["fit", *arguments])
    queue.put(dict(found))


def be_quick() -> None:
    """Do once, or not at all, what takes longer than such a run: pictures, parsers of other verbs, imports."""
    Recorder.figure = lambda *_: None  # type: ignore[method-assign]
    import sklearn.datasets  # noqa: F401


def run(folder: Path, arguments: list[str], armed: tuple[str, int, float] | None = None) -> tuple[int, Any]:
    """Exit code of a run (-9 for one that was killed), and the calls of its phases."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(folder, arguments, armed, queue))
    process.start()
    deadline = time.monotonic() + 300
    found = None
    while process.is_alive() and time.monotonic() < deadline:
        if not queue.empty():
            found = queue.get()
        process.join(0.05)
    process.kill()
    process.join()
    if found is None and not queue.empty():
        found = queue.get()
    return process.exitcode or 0, found


def outcome(folder: Path) -> tuple[str, list[dict[str, str]]]:
    """Digest of the newest run's last checkpoint, and its record without the clock."""
    runs = sorted(folder.glob("lightning_logs/*/version_*"))
    last = state.CheckpointFolder(runs[-1] / "checkpoints").list()[-1]
    kept, _ = state.read_checkpoint(last)
    with open(runs[-1] / "metrics.csv", newline="") as file:
        rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]
    return state.digest({"method": kept["method"], "memory": kept["memory"]}), rows


def work(folder: Path) -> tuple[int, int]:
    """Requests that have been carried out in a folder, and steps that have been taken, over all of its runs."""
    return (folder / "done").stat().st_size, (folder / "steps").stat().st_size


def kills(methods: list[str], phases: list[str], times: int, seed: int = 0) -> dict[str, Any]:
    """Kill and compare; counts by phase, and what went wrong."""
    result: dict[str, Any] = {"kills": 0, "equal": 0, "by_phase": defaultdict(int), "by_method": defaultdict(int)}
    result |= {"requests_before_kills": 0, "of_these_done_again": 0, "steps_before_kills": 0, "steps_done_again": 0}
    wrong = []
    be_quick()
    for method in methods:
        arguments = ["--config", str(CONFIGS / f"{method}.yaml"), *QUICK, *METHODS[method]]
        with tempfile.TemporaryDirectory() as root:
            code, calls = run(Path(root), arguments)
            if code or not calls:
                raise SystemExit(f"{method}: the run ends with {code}\n{(Path(root) / 'log').read_text()[-2000:]}")
            expected, whole = outcome(Path(root)), work(Path(root))
        for phase in phases:
            at = "server_step" if phase == "server_fit" and not calls.get("server_fit") else phase
            for time_ in range(times if calls.get(at) else 0):
                draw = random.Random(f"{seed} {method} {phase} {time_}")
                number = draw.randrange(len(calls[at]))
                armed = (at, number, draw.random() * calls[at][number])
                with tempfile.TemporaryDirectory() as root:
                    folder, label = Path(root), f"{method} {phase} call {number} after {armed[2]:.4f} s"
                    code, _ = run(folder, arguments, armed)
                    if code != -signal.SIGKILL:
                        wrong.append(f"{label}: was not killed ({code})")
                        continue
                    before = work(folder)
                    result["kills"] += 1
                    result["by_phase"][phase] += 1
                    result["by_method"][method] += 1
                    code, _ = run(folder, [*arguments, "--ckpt_path", "last"])
                    try:
                        equal = code == 0 and outcome(folder) == expected
                    except (OSError, ValueError, IndexError) as error:
                        code, equal = f"{code}, {error!r}", False  # type: ignore[assignment]
                    result["equal"] += equal
                    again = [now - once for now, once in zip(work(folder), whole, strict=True)]
                    result["requests_before_kills"] += before[0]
                    result["of_these_done_again"] += again[0]
                    result["steps_before_kills"] += before[1]
                    result["steps_done_again"] += again[1]
                    said = f"{before[0]} of {whole[0]} requests done before, {again[0]} of them again; "
                    said += f"{before[1]} of {whole[1]} steps, {again[1]} again"
                    print(f"{label}: {'equal' if equal else 'DIFFERS'}; {said}", flush=True)
                    if not equal:
                        log = (folder / "log").read_text()[-600:]
                        wrong.append(f"{label}: {'another result' if code == 0 else f'ended with {code}: {log}'}")
        print(f"{method}: {result['kills']} kills so far, {result['equal']} equal", flush=True)
    return {**result, "by_phase": dict(result["by_phase"]), "by_method": dict(result["by_method"]), "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--times", type=int, default=2, help="kills for each method and phase that it has")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    result = kills(options.methods, options.phases, options.times, options.seed)
    result["seconds"] = round(time.perf_counter() - started, 1)
    wrong = result.pop("wrong")
    for line in wrong:
        print(line, file=sys.stderr)
    print(json.dumps({**result, "wrong": len(wrong)}))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
