"""The table and the figure of FedMITR's claims, from runs that are written here."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from fl_lightning.report import theory
from fl_lightning.report.theory import LINES, ROLES

SEEDS = (0, 1, 2)
RECORDS = {
    "dense": {s: {"L": 2.0 + s, "bound": 1.0, "beta": 3.0, "gap": 0.1} for s in SEEDS},
    "sparse": {s: {"L": 1.0 + 1.1 * s, "bound": 2.0 + 0.1 * s, "beta": [2.0, 3.5, 3.5][s]} for s in SEEDS},
    "relabelled": {1: {"L": 1.5, "gap": 0.3, "soft_low/spread": 0.5, "hard_low/spread": 2.0}, 2: {"gap": -0.2}},
}


def study(folder: Path) -> Path:
    """A finished study of these records, with a tuning run that must not count."""
    found = folder / "lightning_logs" / "compare" / "claims"
    found.mkdir(parents=True)
    with open(found / "runs.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["variant", "use", "seed", "round", "run"])
        for role, by_seed in RECORDS.items():
            for seed, record in by_seed.items():
                run = Path("lightning_logs") / role / f"version_{seed}"
                (folder / run).mkdir(parents=True)
                names = ["round", "global/acc", *(f"theory/{name}" for name in record)]
                rows = [names, [0, 0.1, *("" for _ in record)], [1, 0.5, *record.values()]]
                (folder / run / "metrics.csv").write_text("".join(f"{','.join(map(str, row))}\n" for row in rows))
                writer.writerow([f"my {role}", "result", seed, 1, run])
        writer.writerow(["my dense", "tuning", 9, 1, "lightning_logs/nowhere"])
        writer.writerow(["plain", "result", 0, 1, "lightning_logs/plain"])
    (folder / "lightning_logs" / "plain").mkdir()
    (folder / "lightning_logs" / "plain" / "metrics.csv").write_text("round,global/acc\n0,0.1\n")
    return found


def cells(text: str, left: str, right: str) -> list[str]:
    (line,) = [row for row in text.splitlines() if row.startswith(f"| {left} | {right} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


def test_table_and_figure_of_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = study(tmp_path)
    theory.main([str(folder), *(text for role in ROLES for text in (f"--{role}", f"my {role}"))])
    text = (folder / "theory.md").read_text()
    assert capsys.readouterr().out == f"{text}\n"
    assert "(0, 1, 2)" in text
    assert theory.CAVEAT in text
    assert (folder / "theory.png").stat().st_size > 3000
    # Differences -1, -0.9, -0.8: -0.9 ± 4.303 * 0.1 / sqrt(3).
    assert cells(text, "L (sparse)", "L (dense)") == ["2.1, 3", "-0.9 [-1.15, -0.652]", "3", "yes"]
    assert cells(text, "bound (sparse)", "bound (dense)") == ["2.1, 1", "+1.1 [0.852, 1.35]", "3", "no: larger"]
    assert cells(text, "beta (sparse)", "beta (dense)")[2:] == ["3", "undecided"]
    assert cells(text, "L (relabelled)", "L (dense)") == ["1.5, 3", "-1.5", "1", "one seed"]
    assert cells(text, "gap (relabelled)", "gap (dense)")[0] == "0.05, 0.1"
    within = cells(text, "soft_low/spread (relabelled)", "hard_low/spread (relabelled)")
    assert within == ["0.5, 2", "-1.5", "1", "one seed"]
    assert cells(text, "variance (relabelled)", "variance (sparse)") == ["–", "–", "0", "not recorded"]
    assert sum(row.startswith("| ") and "smaller" not in row for row in text.splitlines()) == len(LINES)


def test_figure_draws_relative_differences() -> None:
    figure = theory.figure(RECORDS)
    assert [axes.get_title("left") for axes in figure.axes] == ["claim (i)", "claim (ii)", "claim (iii)"]
    first, _, third = figure.axes
    labels = [label.get_text() for label in first.get_yticklabels()]
    place = labels.index("L (sparse) < L (dense)")
    (dots,) = [line for line in first.lines if list(line.get_ydata()) == [place] * 3]
    np.testing.assert_allclose(dots.get_xdata(), [-50, -30, -20])
    widths = {bar.get_y() + bar.get_height() / 2: bar.get_width() for bar in first.patches}
    assert widths[place] == pytest.approx(-100 / 3)
    assert widths[labels.index("gap (relabelled) < gap (dense)")] == pytest.approx((200 - 300) / 2)
    (bar,) = third.patches  # what was recorded
    assert bar.get_width() == pytest.approx(-75)
    figure.draw_without_rendering()


def test_every_claim_has_lines_of_roles_that_exist() -> None:
    assert {line.claim for line in LINES} == theory.CLAIMS.keys()
    assert {role for line in LINES for role, _ in (line.smaller, line.larger)} <= set(ROLES)


def test_a_study_is_read_from_wherever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = study(tmp_path)
    expected = theory.read(folder, {role: f"my {role}" for role in ROLES})
    for inside, path in ((folder, "."), (folder.parent, "claims"), (folder / "..", "../compare/claims")):
        monkeypatch.chdir(inside)
        assert theory.read(Path(path), {role: f"my {role}" for role in ROLES}) == expected


@pytest.mark.parametrize("variant", ["plain", "nobody"])
def test_a_variant_without_the_meter_is_refused(tmp_path: Path, variant: str) -> None:
    with pytest.raises(ValueError, match=f"sparse is '{variant}', which recorded no theory/ column.*my dense.*plain"):
        theory.read(study(tmp_path), {"dense": "my dense", "sparse": variant})
