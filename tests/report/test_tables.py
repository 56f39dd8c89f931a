"""Tables over seeds, against numbers made by hand and scipy's paired test."""

from __future__ import annotations

import csv as standard_csv
import io
import math

import pytest
from scipy import stats

from fl_lightning.report.tables import Row, csv, markdown, mean_std, paired_differences

ROWS: list[Row] = [
    ("FedAvg", 0, {"acc": 0.50, "loss": 2.0}),
    ("FedAvg", 1, {"acc": 0.70, "loss": 1.0}),
    ("FedAvg", 2, {"acc": 0.60, "loss": 1.5}),
    ("FedNSAM", 2, {"acc": 0.66}),  # another order of seeds, on purpose
    ("FedNSAM", 0, {"acc": 0.52}),
    ("FedNSAM", 1, {"acc": 0.74}),
    ("FedNSAM", 9, {"acc": 0.00}),  # no partner
    ("one | seed", 1, {"acc": 0.75, "loss": 0.5}),
]


def test_mean_and_sample_deviation_by_hand() -> None:
    table = mean_std(ROWS)
    assert list(table) == ["FedAvg", "FedNSAM", "one | seed"]
    spread = table["FedAvg"]["acc"]
    assert (spread.mean, spread.std, spread.n) == (pytest.approx(0.6), pytest.approx(0.1), 3)
    assert math.isnan(table["one | seed"]["acc"].std)
    assert table["FedNSAM"].keys() == {"acc"}


def test_differences_pair_by_seed() -> None:
    """Differences 0.02, 0.04, 0.06: mean 0.04, std 0.02, half width 4.3027 * 0.02 / √3 = 0.04968."""
    table = paired_differences(ROWS, "FedAvg")
    assert "FedAvg" not in table
    got = table["FedNSAM"]["acc"]
    assert got.pairs == 3
    assert (got.mean, got.std) == (pytest.approx(0.04), pytest.approx(0.02))
    assert (got.low, got.high) == (pytest.approx(-0.00968, abs=1e-5), pytest.approx(0.08968, abs=1e-5))
    interval = stats.ttest_rel([0.52, 0.74, 0.66], [0.50, 0.70, 0.60]).confidence_interval()
    assert (got.low, got.high) == pytest.approx((interval.low, interval.high))
    assert "loss" not in table["FedNSAM"]

    single = table["one | seed"]["acc"]
    assert (single.pairs, single.mean) == (1, pytest.approx(0.05))
    assert math.isnan(single.low)


def test_no_common_seed_gives_no_difference() -> None:
    table = paired_differences([("a", 0, {"acc": 1.0}), ("b", 1, {"acc": 2.0})], "a")
    assert table == {"b": {}}


def test_a_diverged_run_is_not_averaged_away() -> None:
    rows = [*ROWS, ("FedAvg", 9, {"acc": math.nan})]
    assert math.isnan(mean_std(rows)["FedAvg"]["acc"].mean)
    assert math.isnan(paired_differences(rows, "FedAvg")["FedNSAM"]["acc"].mean)


def test_markdown_rows() -> None:
    assert markdown(mean_std(ROWS), digits=1, scale=100).splitlines() == [
        "| variant | acc | loss |",
        "| --- | ---: | ---: |",
        "| FedAvg | 60.0 ± 10.0 | 150.0 ± 50.0 |",
        "| FedNSAM | 48.0 ± 33.3 | – |",
        r"| one \| seed | 75.0 | 50.0 |",
    ]
    assert "| FedNSAM | +0.040 [-0.010, 0.090] | – |" in markdown(paired_differences(ROWS, "FedAvg"), digits=3)
    assert "| one \\| seed | +0.050 | -0.500 |" in markdown(paired_differences(ROWS, "FedAvg"), digits=3)


def test_csv_reads_back() -> None:
    lines = list(standard_csv.DictReader(io.StringIO(csv(mean_std(ROWS)))))
    assert [(line["variant"], line["metric"]) for line in lines[:2]] == [("FedAvg", "acc"), ("FedAvg", "loss")]
    assert float(lines[0]["std"]) == mean_std(ROWS)["FedAvg"]["acc"].std
    assert lines[-1]["std"] == ""
    differences = list(standard_csv.DictReader(io.StringIO(csv(paired_differences(ROWS, "FedAvg")))))
    assert differences[0]["pairs"] == "3"
    assert csv({}) == "variant,metric\n"


def test_misfits_are_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        mean_std([*ROWS, ROWS[0]])
    with pytest.raises(ValueError, match="FedProx"):
        paired_differences(ROWS, "FedProx")
