"""Cohorts: from seed and round alone."""

from __future__ import annotations

import pytest

from fl_lightning.federation.sampling import AllClients, FixedCohort, UniformSampler

CLIENTS = tuple(str(k) for k in range(20))


def test_everybody() -> None:
    assert AllClients().cohort(3, CLIENTS, 0) == CLIENTS


def test_uniform_cohorts_follow_seed_and_round() -> None:
    cohorts = [UniformSampler(size=5).cohort(round, CLIENTS, 7) for round in range(1, 200)]
    # A new sampler that is asked for one round only, as in a resumed run, draws the same.
    assert UniformSampler(size=5).cohort(150, CLIENTS, 7) == cohorts[149]
    assert UniformSampler(fraction=0.25).cohort(150, CLIENTS, 7) == cohorts[149]
    assert UniformSampler(size=5).cohort(150, CLIENTS, 8) != cohorts[149]
    assert len(set(cohorts)) > 150
    for cohort in cohorts:
        assert len(set(cohort)) == 5
        assert list(cohort) == sorted(cohort, key=CLIENTS.index)
    counts = [sum(client in cohort for cohort in cohorts) for client in CLIENTS]
    assert min(counts) > 25  # each is expected 50 times
    assert max(counts) < 80


@pytest.mark.parametrize(("arguments", "size"), [({"size": 50}, 20), ({"fraction": 0.001}, 1), ({"fraction": 1.0}, 20)])
def test_sizes_are_bounded(arguments: dict, size: int) -> None:
    assert len(UniformSampler(**arguments).cohort(1, CLIENTS, 0)) == size


@pytest.mark.parametrize(
    "arguments", [{}, {"size": 1, "fraction": 0.5}, {"size": 0}, {"fraction": 0.0}, {"fraction": 1.5}]
)
def test_wrong_sizes(arguments: dict) -> None:
    with pytest.raises(ValueError, match=r"size|fraction"):
        UniformSampler(**arguments)


def test_fixed_cohort_keeps_the_order_of_the_clients() -> None:
    assert FixedCohort(["7", "2"]).cohort(9, CLIENTS, 3) == ("2", "7")
    with pytest.raises(ValueError, match="'99'"):
        FixedCohort(["99"]).cohort(1, CLIENTS, 0)
    with pytest.raises(ValueError, match="at least one"):
        FixedCohort([])
