"""Runs in processes of their own: several devices, an interrupt, a run that goes on elsewhere, what is imported."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fl_lightning.federation.state import read_checkpoint

ROOT = Path(__file__).parents[2]
FIT = [
    *("fit", "--config", str(ROOT / "configs" / "fedavg.yaml"), "--federation.sampler.init_args.size", "3"),
    *("--data.num_clients", "20", "--trainer.max_epochs", "1", "--trainer.logger", "false"),
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fl_lightning", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(folder: Path, *arguments: str, timeout: int = 280) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done


def weights(run: Path, round: int) -> dict[str, torch.Tensor]:
    return read_checkpoint(run / "checkpoints" / f"round_{round:05d}")[0]["method"]["parameters"]


def rows(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        return [{n: v for n, v in row.items() if not n.startswith("time/")} for row in csv.DictReader(file)]


def test_two_devices_compute_what_one_does(tmp_path: Path) -> None:
    from fl_lightning.__main__ import main

    # Batches of 10 are ragged for two devices at the end of most clients; FedProx, so that a rule runs under DDP too.
    small = [*FIT, "--method", "FedProx", "--method.init_args.rounds", "3", "--seed_everything", "5"]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    two = run(
        tmp_path / "two",
        *(*small, "--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.accelerator", "cpu"),
    )
    main([*small, "--trainer.default_root_dir", str(tmp_path / "one")])
    runs = [tmp_path / name / "lightning_logs" / "fedavg" for name in ("one", "two")]
    assert [path.name for path in runs[1].iterdir()] == ["version_0"]
    one, two_weights = (weights(path / "version_0", 3) for path in runs)
    for name, value in one.items():
        torch.testing.assert_close(two_weights[name], value, rtol=0, atol=1e-6)
    tables = [rows(path / "version_0") for path in runs]
    assert [row["round"] for row in tables[1]] == ["0", "1", "2", "3"]
    for ours, theirs in zip(*tables, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("global/acc", "comm/bytes_up", "client/loss"):
            assert float(ours[name] or 0) == pytest.approx(float(theirs[name] or 0), abs=1e-5)
    assert two.stdout.count("round 3/3") == 1


COUNTING = """
import os, sys
from fl_lightning.__main__ import main
from fl_lightning.federation.participant import Participant

given, asked = Participant.execute, []

def execute(worker, request, *owner):
    if owner[1] != "evaluate":
        if len(asked) == int(os.environ.get("KILLED_BEFORE", "-1")):
            os._exit(9)
        asked.append(owner)
    return given(worker, request, *owner)

Participant.execute = execute
main(sys.argv[1:])
print("device", os.environ.get("LOCAL_RANK", "0"), "was asked", len(asked))
"""


@pytest.mark.slow
def test_two_devices_killed_at_the_server_go_on_there_and_end_where_one_does(tmp_path: Path) -> None:
    from fl_lightning.__main__ import main

    arguments = ["fit", "--config", str(ROOT / "configs/noise_distillation.yaml"), "--trainer.max_epochs", "1"]
    arguments += ["--trainer.logger", "false", "--federation.journal_seconds", "0"]
    arguments += ["--method.init_args.student.steps", "20", "--method.init_args.images", "50"]
    devices = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    (tmp_path / "counting.py").write_text(COUNTING)

    def counted(*more: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "counting.py", *arguments, *devices, *more],
            **{"cwd": tmp_path, "env": {**environment(), **variables}, "timeout": 280},  # type: ignore[arg-type]
            capture_output=True,
            text=True,
        )

    one = main([*arguments, "--trainer.default_root_dir", str(tmp_path / "one")])
    assert counted(KILLED_BEFORE="6").returncode == 9  # five clients and the ensemble's answers; then the student's fit
    again = counted("--ckpt_path", "last")
    assert again.returncode == 0, again.stderr
    assert "the journal's 5 replies and 1 results" in again.stderr
    asked = sorted(line for line in again.stdout.splitlines() if line.startswith("device"))
    assert asked == ["device 0 was asked 1", "device 1 was asked 1"]
    (folder,) = (tmp_path / "lightning_logs/noise_distillation").iterdir()
    method, expected = (
        read_checkpoint(path / "checkpoints/round_00001")[0]["method"]
        for path in (folder, one.run_folder)  # type: ignore[attr-defined]
    )
    for name, value in expected["student"].items():
        torch.testing.assert_close(method["student"][name], value, rtol=0, atol=1e-6)


def test_ctrl_c_saves_and_a_new_process_goes_on(tmp_path: Path) -> None:
    from fl_lightning.__main__ import main

    arguments = [*FIT, "--method.init_args.rounds", "5", "--trainer.max_epochs", "40"]
    adam = ("--method.init_args.server_optimizer", "torch.optim.Adam", "--method.init_args.server_optimizer.lr", "0.01")
    arguments += adam
    process = subprocess.Popen(
        command(*arguments),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a background job ignores it, and hands that on
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("round 1/"):
            break
    time.sleep(0.2)  # in the middle of a client's fit, most likely
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted after round" in err
    assert "Traceback" not in err
    (folder,) = (tmp_path / "lightning_logs/fedavg").iterdir()
    (hint,) = [line for line in err.splitlines() if line.startswith("to go on: ")]
    assert not (folder / "summary.json").exists()

    # As the hint says, in a new process; the uninterrupted run is this process's.
    words = hint.removeprefix("to go on: python -m fl_lightning ").split()
    run(tmp_path, *words)
    whole = main([*arguments, "--trainer.default_root_dir", str(tmp_path / "whole"), "--federation.progress", "false"])
    assert rows(folder) == rows(whole.run_folder)  # type: ignore[attr-defined]
    assert [row["round"] for row in rows(folder)] == [str(n) for n in range(6)]
    for name, value in weights(whole.run_folder, 5).items():  # type: ignore[attr-defined]
        assert torch.equal(weights(folder, 5)[name], value)


def test_help_and_version_import_little() -> None:
    program = (
        "import sys\nfrom fl_lightning.__main__ import main\nmain(['--version'])\nassert 'torch' not in sys.modules\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'diffusers', 'open_clip', 'peft', 'timm', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "partition" in done.stdout
