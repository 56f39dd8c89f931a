"""Partitions are disjoint, complete and reproducible, whatever the numbers; measures agree with hand arithmetic."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.data.partition import (
    IID,
    BalancedDirichlet,
    ByDomain,
    BySite,
    Dirichlet,
    DomainDirichlet,
    Partition,
    Pathological,
    Shards,
    SingleClass,
    apportion,
    effective_classes,
    heterogeneity,
    jensen_shannon,
    label_counts,
    mirror,
    partition,
    plot_counts,
    stratified_take,
)

alphas = st.sampled_from([1e-3, 1e-2, 0.1, 1.0, 10.0, 1e3])
any_partitioner = st.one_of(
    st.just(IID()),
    alphas.map(Dirichlet),
    alphas.map(BalancedDirichlet),
    st.integers(1, 3).map(Pathological),
    st.just(SingleClass()),
    st.integers(1, 4).map(Shards),
    st.just(ByDomain()),
    st.just(BySite()),
    alphas.map(DomainDirichlet),
)


def labelled(per_class, num_domains=1, seed=0):
    """Labels with the given class sizes, shuffled, and domains drawn for them."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(per_class)), per_class))
    return labels, rng.integers(0, num_domains, len(labels))


def assert_divides(division, size):
    together = np.concatenate(list(division.indices.values()))
    assert sorted(together.tolist()) == list(range(size))
    assert all((np.diff(part) > 0).all() for part in division.indices.values())


@settings(max_examples=100, deadline=None)
@given(
    partitioner=any_partitioner,
    per_class=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    num_domains=st.integers(1, 4),
    num_clients=st.integers(1, 25),
    seed=st.integers(0, 10**6),
    allow_empty=st.booleans(),
)
def test_every_partition_is_disjoint_complete_and_reproducible(
    partitioner, per_class, num_domains, num_clients, seed, allow_empty
):
    labels, domains = labelled(per_class, num_domains, seed)

    def divide():
        return partition(partitioner, labels, domains, num_clients, seed, allow_empty=allow_empty)

    present = np.unique(domains)
    clients_of = {domain: len(range(k, num_clients, len(present))) for k, domain in enumerate(present)}
    kind, impossible = type(partitioner), not allow_empty and len(labels) < num_clients
    if kind is SingleClass:
        impossible |= num_clients % len(per_class) != 0
    elif kind is Pathological:
        wanted = partitioner.classes_per_client
        impossible |= wanted > len(per_class) or num_clients * wanted < len(per_class)
    elif kind is BySite:
        impossible |= num_clients != len(present)
    elif isinstance(partitioner, ByDomain):
        impossible |= num_clients < len(present)
        impossible |= not allow_empty and any((domains == d).sum() < count for d, count in clients_of.items())
    if impossible:
        with pytest.raises(ValueError, match=r"client|examples"):
            divide()
        return
    division = divide()
    assert_divides(division, len(labels))
    assert division.clients == tuple(map(str, range(num_clients)))
    assert allow_empty or division.sizes.min() >= 1
    assert divide().hash == division.hash


@pytest.mark.parametrize(
    "partitioner", [IID(), Dirichlet(1e-3), BalancedDirichlet(1e-3), Shards(2), DomainDirichlet(0.01)]
)
@pytest.mark.parametrize("min_size", [0, 1, 7])
def test_repair_reaches_the_least_size_and_counts_its_moves(partitioner, min_size):
    labels, domains = labelled([40] * 5, 2)
    division = partition(partitioner, labels, domains, 20, seed=3, min_size=min_size)
    assert_divides(division, 200)
    assert division.sizes.min() >= min_size
    raw = partition(partitioner, labels, domains, 20, seed=3, min_size=0)
    assert division.moved == np.maximum(min_size - raw.sizes, 0).sum()


def test_repair_may_move_any_example():
    class ToTheFirst(IID):
        def divide(self, labels, domains, num_clients, rng):
            return [np.arange(len(labels)), *[np.zeros(0, dtype=int)] * (num_clients - 1)]

    moved = {tuple(partition(ToTheFirst(), np.zeros(10), None, 2, seed).indices["1"]) for seed in range(60)}
    assert moved == {(number,) for number in range(10)}


def test_empty_clients_may_stay():
    labels, _ = labelled([50, 50])
    division = partition(Dirichlet(1e-3), labels, None, 10, seed=0, min_size=5, allow_empty=True)
    assert_divides(division, 100)
    assert (division.sizes == 0).any()
    assert division.sizes[division.sizes > 0].min() >= 5


def test_another_seed_or_draw_is_another_partition():
    labels, _ = labelled([50] * 4)
    hashes = {partition(Dirichlet(0.5), labels, None, 5, seed).hash for seed in range(20)}
    assert len(hashes) == 20


def test_hash_does_not_change_between_versions():
    labels = np.arange(12) % 3
    known = "5a3d19cc833badb19b41199746a4f5c3"
    assert partition(IID(), labels, None, 4, seed=0).hash.startswith(known)


def test_alpha_moves_from_one_holder_to_equal_shares():
    labels, _ = labelled([200] * 10)
    for kind in (Dirichlet, BalancedDirichlet):
        measured = [
            heterogeneity(label_counts(partition(kind(alpha), labels, None, 10, seed=1), labels, 10))["js_global"]
            for alpha in (1e-3, 1e-1, 1.0, 1e3)
        ]
        assert measured == sorted(measured, reverse=True)
        assert measured[0] > 0.5
        assert measured[-1] < 0.1


def test_dirichlet_at_tiny_alpha_gives_a_class_to_one_client():
    labels, _ = labelled([100] * 10)
    counts = label_counts(partition(Dirichlet(1e-3), labels, None, 5, seed=0, min_size=0), labels, 10)
    assert (counts.max(0) >= 99).all()


@pytest.mark.parametrize("alpha", [1e-3, 1.0, 1e3])
def test_balanced_dirichlet_has_equal_sizes(alpha):
    labels, _ = labelled([3, 100, 50, 1])
    sizes = partition(BalancedDirichlet(alpha), labels, None, 12, seed=0).sizes
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(("num_clients", "classes"), [(5, 2), (10, 2), (7, 3), (10, 10), (25, 4)])
def test_pathological_clients_hold_exactly_their_classes(num_clients, classes):
    labels, _ = labelled([100] * 10)
    counts = label_counts(partition(Pathological(classes), labels, None, num_clients, seed=0), labels, 10)
    assert ((counts > 0).sum(1) == classes).all()
    holders = (counts > 0).sum(0)
    assert holders.min() >= 1
    assert holders.max() - holders.min() <= 1
    if num_clients * classes == 10:
        assert (holders == 1).all()


def test_single_class_silos():
    labels, _ = labelled([30, 20, 10])
    counts = label_counts(partition(SingleClass(), labels, None, 6, seed=0), labels, 3)
    assert counts.tolist() == [[15, 0, 0], [0, 10, 0], [0, 0, 5]] * 2


def test_shards_bound_the_classes_of_a_client():
    labels, _ = labelled([60] * 10)
    counts = label_counts(partition(Shards(2), labels, None, 30, seed=0), labels, 10)
    assert (counts.sum(1) == 20).all()
    assert (counts > 0).sum(1).max() == 2  # 60 / 10 is a whole number of shards


@pytest.mark.parametrize("partitioner", [ByDomain(), DomainDirichlet(1e-2)])
def test_clients_keep_to_their_domain_even_after_repair(partitioner):
    labels, domains = labelled([60] * 3, 3)
    division = partition(partitioner, labels, domains, 8, seed=0, min_size=4)
    assert_divides(division, 180)
    for number, part in enumerate(division.indices.values()):
        assert len(part) >= 4
        assert (domains[part] == number % 3).all()


def test_sites_are_clients():
    labels, domains = labelled([20] * 3, 4)
    division = partition(BySite(), labels, domains, 4, seed=0)
    for number, part in enumerate(division.indices.values()):
        assert part.tolist() == np.flatnonzero(domains == number).tolist()
    with pytest.raises(ValueError, match="must equal the 4 sites, got 5"):
        partition(BySite(), labels, domains, 5, seed=0)


@pytest.mark.parametrize(
    ("partitioner", "num_clients", "complaint"),
    [
        (Pathological(2), 4, r"classes_per_client must be in \[3, 10\]"),
        (Pathological(11), 4, r"4 clients with classes_per_client=11"),
        (SingleClass(), 15, "multiple of the 10 classes, got 15"),
        (ByDomain(), 2, "at least the 3 domains, got 2"),
        (IID(), 101, "100 examples cannot give 101 clients 1 each"),
        (IID(), 0, "num_clients must be at least 1"),
    ],
)
def test_impossible_numbers_are_refused(partitioner, num_clients, complaint):
    labels = np.arange(100) % 10
    with pytest.raises(ValueError, match=complaint):
        partition(partitioner, labels, np.arange(100) % 3, num_clients, seed=0)


def test_a_domain_too_small_for_its_clients_is_refused():
    domains = np.array([0] * 20 + [1])
    with pytest.raises(ValueError, match="client 3 cannot reach min_size=1"):
        partition(ByDomain(), np.zeros(21, dtype=int), domains, 4, seed=0)


@pytest.mark.parametrize("kind", [Dirichlet, BalancedDirichlet, DomainDirichlet])
@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_alpha_is_refused(kind, alpha):
    with pytest.raises(ValueError, match="alpha must be"):
        kind(alpha)


def test_save_and_load(tmp_path):
    labels, _ = labelled([20] * 3)
    division = partition(Dirichlet(0.05), labels, None, 6, seed=0)
    division.save(tmp_path / "partition.json")
    loaded = Partition.load(tmp_path / "partition.json")
    assert (loaded.hash, loaded.moved, loaded.clients) == (division.hash, division.moved, division.clients)
    content = json.loads((tmp_path / "partition.json").read_text())
    content["indices"]["0"] = content["indices"]["0"][:-1]
    (tmp_path / "partition.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"partition\.json: index lists have hash"):
        Partition.load(tmp_path / "partition.json")
    (tmp_path / "partition.json").write_text("[]")
    with pytest.raises(ValueError, match="not a partition file"):
        Partition.load(tmp_path / "partition.json")


@settings(max_examples=60, deadline=None)
@given(total=st.integers(0, 200), weights=st.lists(st.floats(0, 1e3), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_apportion_is_the_quota_up_to_one(total, weights, seed):
    counts = apportion(total, np.array(weights), np.random.default_rng(seed))
    assert counts.sum() == total
    share = np.array(weights) / sum(weights) if sum(weights) > 0 else np.full(len(weights), 1 / len(weights))
    assert (np.abs(counts - total * share) < 1 + 1e-6).all()


def test_apportion_by_hand():
    assert apportion(10, np.array([5.0, 3.0, 2.0]), np.random.default_rng(0)).tolist() == [5, 3, 2]
    assert apportion(4, np.array([5.0, 3.0, 2.0]), np.random.default_rng(0)).tolist() == [2, 1, 1]
    firsts = {tuple(apportion(1, np.ones(3), np.random.default_rng(seed))) for seed in range(30)}
    assert len(firsts) == 3  # ties go to anybody
    # 21 in proportion 5 to 9 is 7.5 and 13.5: a tie, though not in floating point
    assert {tuple(apportion(21, np.array([5, 9]), np.random.default_rng(seed))) for seed in range(30)} == {
        (7, 14),
        (8, 13),
    }


def test_stratified_take_keeps_proportions():
    labels, domains = labelled([100, 50, 10], 2)
    taken, left = stratified_take(labels, domains, 0.2, np.random.default_rng(0))
    assert sorted([*taken, *left]) == list(range(160))
    assert len(taken) == 32
    for label in range(3):
        for domain in range(2):
            stratum = (labels == label) & (domains == domain)
            assert abs(stratum[taken].sum() - 0.2 * stratum.sum()) < 1
    draws = {tuple(stratified_take(labels, domains, 0.2, np.random.default_rng(seed))[0]) for seed in range(20)}
    assert len({index for draw in draws for index in draw}) > 120  # any example may be drawn
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.5"):
        stratified_take(labels, domains, 1.5, np.random.default_rng(0))


@settings(max_examples=60, deadline=None)
@given(
    alpha=alphas, num_clients=st.integers(1, 12), per_class=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_mirror_divides_held_strata_completely_in_proportion(alpha, num_clients, per_class, seed):
    labels, domains = labelled([20, 30, 10], 2, seed)
    others, other_domains = labelled(per_class, 2, seed + 1)
    division = partition(Dirichlet(alpha), labels, domains, num_clients, seed)
    mirrored = mirror(labels, domains, division, others, other_domains, np.random.default_rng(seed))
    assert mirrored.clients == division.clients
    together = np.concatenate(list(mirrored.indices.values()))
    pairs = set(zip(labels.tolist(), domains.tolist(), strict=True))
    held = [k for k, pair in enumerate(zip(others.tolist(), other_domains.tolist(), strict=True)) if pair in pairs]
    assert sorted(together.tolist()) == held  # class 3 stays out: nobody trains on it
    for label, domain in pairs:
        mine = np.array([((labels[p] == label) & (domains[p] == domain)).sum() for p in division.indices.values()])
        got = np.array([((others[p] == label) & (other_domains[p] == domain)).sum() for p in mirrored.indices.values()])
        assert (np.abs(got - got.sum() * mine / mine.sum()) < 1 + 1e-6).all()
        assert (got[mine == 0] == 0).all()


def test_measures_by_hand():
    apart = np.array([[10, 0], [0, 10]])
    same = np.array([[5, 5], [10, 10], [0, 0]])  # the last client is left out
    measured = heterogeneity(apart)
    # Against (1/2, 1/2): divergence of (1, 0) is (log2(4/3) + (log2(2/3) + log2(2)) / 2) / 2 = 0.311278.
    assert measured["js_global"] == pytest.approx(np.sqrt(0.3112781244591328))
    assert measured["js_pairwise"] == pytest.approx(1)
    assert measured["effective_classes"] == pytest.approx(1)
    assert heterogeneity(same) == pytest.approx(
        {"js_global": 0, "js_pairwise": 0, "effective_classes": 2, "size_ratio": 2, "size_cv": 1 / 3}
    )
    assert heterogeneity(np.array([[4, 4]]))["js_pairwise"] == 0
    assert effective_classes(np.array([[1, 1, 1, 1], [2, 0, 0, 0]])).tolist() == pytest.approx([4, 1])
    assert jensen_shannon(np.array([0.3, 0.7]), np.array([0.3, 0.7])) == 0
    with pytest.raises(ValueError, match="no client holds"):
        heterogeneity(np.zeros((2, 2)))


def test_index_lists_are_views_on_one_array():
    division = Partition({"0": np.array([0, 1, 3]), "1": np.array([], dtype=np.int64), "2": np.array([2])})
    assert [part.tolist() for part in division.indices.values()] == [[0, 1, 3], [], [2]]
    assert all(np.shares_memory(part, division.flat) for part in division.indices.values() if len(part))
    assert (division.clients, division.sizes.tolist(), len(division.indices)) == (("0", "1", "2"), [3, 0, 1], 3)
    for key in ("3", "-1", "00", "x", ""):
        assert key not in division.indices
    with pytest.raises(ValueError, match=r"keys must be '0', '1', ... in order, got \['1', '0'\]"):
        Partition({"1": np.array([0]), "0": np.array([1])})


def test_label_counts():
    division = Partition({"0": np.array([0, 1, 3]), "1": np.array([2])})
    assert label_counts(division, np.array([2, 0, 1, 2]), 4).tolist() == [[1, 0, 2, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize(("num_clients", "num_classes"), [(1, 2), (10, 10), (100, 100)])
def test_plot_shows_every_count_and_names_what_fits(tmp_path, num_clients, num_classes):
    counts = np.random.default_rng(0).integers(0, 50, (num_clients, num_classes))
    names = [f"class {number}" for number in range(num_classes)]
    figure = plot_counts(counts, names, [str(number) for number in range(num_clients)])
    figure.savefig(tmp_path / "figure.png", dpi=40)
    bars, cells = figure.axes[:2]
    assert [patch.get_height() for patch in bars.patches] == counts.sum(1).tolist()
    assert np.array_equal(cells.images[0].get_array().filled(0), counts.T)
    shown = [text.get_text() for text in cells.get_yticklabels()]
    assert shown[0] == "class 0"
    assert len(shown) <= 50
