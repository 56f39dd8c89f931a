"""Tables over seeds: mean ± standard deviation per variant, and differences paired by seed.

Everything starts from rows (variant, seed, {metric: value}). A metric that a row lacks is left out of that metric's
statistics; a value that is NaN (a run that diverged) makes them NaN, so that it cannot be overlooked.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from csv import DictWriter
from dataclasses import asdict, dataclass, fields

import numpy as np

Row = tuple[str, int, Mapping[str, float]]


@dataclass(frozen=True)
class Spread:
    """A metric over seeds.

    Attributes:
        mean: Mean over seeds.
        std: Sample standard deviation (divisor n - 1); NaN for one seed.
        n: Number of seeds.
    """

    mean: float
    std: float
    n: int

    def text(self, digits: int, scale: float = 1.0) -> str:
        """ "mean ± std", or the value alone for one seed."""
        alone = f"{self.mean * scale:.{digits}f}"
        return alone if self.n == 1 else f"{alone} ± {self.std * scale:.{digits}f}"


@dataclass(frozen=True)
class Difference:
    """A variant minus the baseline, over the seeds that both have.

    Attributes:
        mean: Mean of the per-seed differences.
        std: Their sample standard deviation (divisor pairs - 1); NaN for one pair.
        low: Lower end of the 95 % t-interval of the mean, ``mean - t std / √pairs``; NaN for one pair.
        high: Its upper end.
        pairs: Number of common seeds.
    """

    mean: float
    std: float
    low: float
    high: float
    pairs: int

    def text(self, digits: int, scale: float = 1.0) -> str:
        """ "+mean [low, high]", or the signed difference alone for one pair."""
        alone = f"{self.mean * scale:+.{digits}f}"
        return alone if self.pairs == 1 else f"{alone} [{self.low * scale:.{digits}f}, {self.high * scale:.{digits}f}]"


Table = Mapping[str, Mapping[str, Spread | Difference]]


def mean_std(rows: Iterable[Row]) -> dict[str, dict[str, Spread]]:
    """Mean and standard deviation over seeds, {variant: {metric: spread}}, in order of appearance.

    Raises:
        ValueError: A (variant, seed) pair occurs twice.
    """
    return {
        variant: {
            metric: Spread(*_moments(list(by_seed.values())), len(by_seed)) for metric, by_seed in metrics.items()
        }
        for variant, metrics in _by_metric(rows).items()
    }


def paired_differences(rows: Iterable[Row], baseline: str) -> dict[str, dict[str, Difference]]:
    """Each variant minus the baseline, seed by seed, {variant: {metric: difference}}.

    Pairing takes out what the seeds share (partition, initial weights), which is often most of the spread. The intervals
    are not corrected for the number of comparisons.

    Args:
        rows: Rows of all variants.
        baseline: The variant to compare with; it has no entry of its own.

    Raises:
        ValueError: A (variant, seed) pair occurs twice, or no row is of the baseline.
    """
    variants = _by_metric(rows)
    if baseline not in variants:
        raise ValueError(f"baseline must be one of {', '.join(variants)}, got {baseline!r}")
    reference = variants.pop(baseline)
    table: dict[str, dict[str, Difference]] = {}
    for variant, metrics in variants.items():
        table[variant] = {}
        for metric, by_seed in metrics.items():
            other = reference.get(metric, {})
            differences = [value - other[seed] for seed, value in by_seed.items() if seed in other]
            if differences:
                table[variant][metric] = _difference(differences)
    return table


def markdown(table: Table, *, digits: int = 2, scale: float = 1.0, corner: str = "variant") -> str:
    """A GitHub table: a row per variant, a column per metric, in order of appearance.

    Args:
        table: What :func:`mean_std` or :func:`paired_differences` returned.
        digits: Decimals, >= 0.
        scale: Factor on every number; 100 turns shares into per cent.
        corner: Head of the first column.
    """
    metrics = _metrics(table)
    lines = [[corner, *metrics], ["---", *["---:"] * len(metrics)]]
    for variant, cells in table.items():
        lines.append([variant, *(cells[m].text(digits, scale) if m in cells else "–" for m in metrics)])
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def csv(table: Table) -> str:
    """One line per variant and metric, the statistics in full precision; an empty cell where one is undefined."""
    cells = [(variant, metric, cell) for variant, metrics in table.items() for metric, cell in metrics.items()]
    statistics = [field.name for field in fields(cells[0][2])] if cells else []
    out = io.StringIO()
    writer = DictWriter(out, ["variant", "metric", *statistics], lineterminator="\n")
    writer.writeheader()
    for variant, metric, cell in cells:
        values = {name: "" if math.isnan(value) else value for name, value in asdict(cell).items()}
        writer.writerow({"variant": variant, "metric": metric, **values})
    return out.getvalue()


def _by_metric(rows: Iterable[Row]) -> dict[str, dict[str, dict[int, float]]]:
    """{variant: {metric: {seed: value}}}."""
    variants: dict[str, dict[str, dict[int, float]]] = {}
    seen: set[tuple[str, int]] = set()
    for variant, seed, metrics in rows:
        if (variant, seed) in seen:
            raise ValueError(f"each variant must have one row per seed, got seed {seed} of {variant!r} twice")
        seen.add((variant, seed))
        for metric, value in metrics.items():
            variants.setdefault(variant, {}).setdefault(metric, {})[seed] = float(value)
    return variants


def _metrics(table: Table) -> list[str]:
    return list(dict.fromkeys(metric for cells in table.values() for metric in cells))


def _moments(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _difference(differences: list[float]) -> Difference:
    from scipy.stats import t  # slow to import, and only reports need it

    (mean, std), pairs = _moments(differences), len(differences)
    half = float(t.ppf(0.975, pairs - 1)) * std / math.sqrt(pairs) if pairs > 1 else math.nan
    return Difference(mean, std, mean - half, mean + half, pairs)
