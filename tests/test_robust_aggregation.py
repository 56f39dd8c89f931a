"""Robust rules: by hand in float64, against plain references, and within a federation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from federation.tiny import federation, normalised, numbers, same
from torch import Tensor

from fl_lightning.aggregation import (
    BLOCK_SIZE,
    Aggregator,
    Concatenate,
    CoordinateMedian,
    GeometricMedian,
    Keep,
    Krum,
    Mean,
    MultiKrum,
    NormClipping,
    Sum,
    TrimmedMean,
)
from fl_lightning.federation.attacks import (
    Attack,
    GaussianNoise,
    InnerProduct,
    LabelFlip,
    OneNaN,
    Scaling,
    SignFlip,
)
from fl_lightning.federation.engines.base import BlockReducer
from fl_lightning.federation.sampling import FixedCohort, UniformSampler
from fl_lightning.message import Group, Message
from fl_lightning.methods import SCAFFOLD, FedAvg, FedCM, FedDyn, LocalOnly

RULES = [CoordinateMedian(), TrimmedMean(0.2), Krum(2), MultiKrum(2), NormClipping(), GeometricMedian()]


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- by hand


def test_median_by_hand() -> None:
    assert CoordinateMedian().combine(rows([1, 9], [5, -2], [3, 100])).tolist() == [3, 9]
    assert CoordinateMedian().combine(rows([1, 9], [5, -2], [3, 100], [4, 0])).tolist() == [3.5, 4.5]


def test_trimmed_mean_by_hand() -> None:
    values = rows([0, 7], [1, -50], [2, 8], [30, 9], [3, 70])
    assert TrimmedMean(0.2).combine(values).tolist() == [2, 8]
    assert TrimmedMean(0.25).combine(values).tolist() == [2, 8]  # rounded up: two at either end
    assert TrimmedMean(0.0).combine(values).tolist() == [7.2, 8.8]
    assert TrimmedMean(0.07)._cut(100) == 7


def test_krum_by_hand() -> None:
    # n = 5, f = 1: the 2 nearest others count. Scores 1 + 4, 1 + 1, 1 + 4, 49 + 64, 4 + 4 + ... of the far ones.
    values = rows([0], [1], [2], [9], [-20])
    assert Krum(1).combine(values).tolist() == [1]
    assert MultiKrum(1, keep=3).combine(values).tolist() == [1]  # 0, 1, 2
    assert MultiKrum(1).combine(values).tolist() == [3]  # n - f = 4: 0, 1, 2, 9
    assert Krum(1).combine(rows([0], [0], [1], [1], [1])).tolist() == [1]
    assert Krum(0).combine(rows([4], [5], [4])).tolist() == [4]  # of equal scores the first
    # One of two hostile clients is known: f = 1 is left, and 2 of the 5 others count again.
    assert torch.equal(MultiKrum(2).combine(values, refused=1), MultiKrum(1).combine(values))


def test_norm_clipping_by_hand() -> None:
    values = rows([3, 4], [0, 1], [0, 0], [30, 40])
    assert NormClipping(5.0).combine(values).tolist() == [1.5, 2.25]
    assert NormClipping().combine(values).tolist() == pytest.approx([0.9, 1.45])  # norms 0, 1, 5, 50: median 3


def test_geometric_median_by_hand() -> None:
    # Of four points in convex position it is where the diagonals cross; of three on a line the one in the middle.
    square = rows([0, 0], [1, 0], [1, 1], [0, 3])  # the diagonals are y = x and y = 3 - 3 x
    crossing = rows([0.75, 0.75])[0]
    torch.testing.assert_close(GeometricMedian(steps=2000).combine(square), crossing, rtol=0, atol=1e-4)
    line = GeometricMedian(steps=2000).combine(rows([0], [1], [50]))
    torch.testing.assert_close(line, rows([1])[0], rtol=0, atol=1e-3)


# ---- against plain references


def plain_krum(values: Tensor, f: int, m: int) -> Tensor:
    n = len(values)
    scores = []
    for i in range(n):
        away = sorted(float((values[i] - values[j]).pow(2).sum()) for j in range(n) if j != i)
        scores.append(sum(away[: n - f - 2]))
    best = sorted(range(n), key=lambda i: scores[i])[:m]
    return sum(values[i] for i in best) / m  # type: ignore[return-value]


def plain_trimmed(values: Tensor, cut: int) -> Tensor:
    columns = [sorted(column)[cut : len(column) - cut] for column in values.T.tolist()]
    return torch.tensor([sum(c) / len(c) for c in columns], dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_against_plain_references(seed: int) -> None:
    values = drawn(11, 6, seed) * torch.arange(1, 12)[:, None]
    close: Any = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)  # noqa: E731
    for f, m in ((0, 1), (2, 1), (4, 1), (3, 5), (4, 11)):
        close(MultiKrum(f, keep=m).combine(values), plain_krum(values, f, m))
    close(TrimmedMean(0.2).combine(values), plain_trimmed(values, 3))
    close(CoordinateMedian().combine(values), values.median(0).values)
    close(CoordinateMedian().combine(values), plain_trimmed(values, 5))
    # No point near the geometric median has a smaller sum of distances.
    found = GeometricMedian(steps=1000).combine(values)
    least = float((values - found).norm(dim=1).sum())
    for step, axis in itertools.product((-1e-3, 1e-3), range(6)):
        moved = found.clone()
        moved[axis] += step
        assert float((values - moved).norm(dim=1).sum()) >= least - 1e-9


def test_without_hostile_clients_in_mind_rules_are_the_mean() -> None:
    values = drawn(9, 20)
    for rule in (TrimmedMean(0.0), MultiKrum(0, keep=9), MultiKrum(0), NormClipping(1e9)):
        torch.testing.assert_close(rule.combine(values), values.mean(0), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_minority_cannot_carry_the_result_away(rule: Aggregator) -> None:
    honest = drawn(8, 5) * 0.1 + 1
    hostile = torch.full((2, 5), -1e6, dtype=torch.float64)
    found = rule.combine(torch.cat([hostile, honest]))
    assert (found - 1).norm() < 1.5
    assert not (torch.cat([hostile, honest]).mean(0) - 1).norm() < 1e5


# ---- groups


def reduced(rule: Aggregator, uplink: dict[str, Group], replies: list[dict[str, dict[str, Tensor]]]) -> dict[str, Any]:
    reducer = BlockReducer(rule.gathering(uplink), lambda message: 3.0)
    for number, tensors in enumerate(replies, 1):
        reducer.add(Message(1, str(number), tensors, num_examples=number))
        if number % BLOCK_SIZE == 0:
            reducer.close_block()
    return rule.aggregate(reducer.finish(), uplink)


def test_groups_are_one_vector_and_come_back_as_their_reducers_have_them() -> None:
    uplink = {"model": Group("update"), "control": Group("update", Sum()), "rows": Group("rows", Concatenate())}
    values = drawn(19, 7)
    replies = [
        {
            "model": {"a": v[:2].view(1, 2), "n": torch.tensor(number)},
            "control": {"a": v[2:].float()},
            "rows": {"r": torch.full((1,), number)},
        }
        for number, v in enumerate(values)
    ]
    found = reduced(Krum(3), uplink, replies)
    joint = torch.cat([values[:, :2], values[:, 2:].float().double()], 1)
    best = plain_krum(joint, 3, 1)
    assert torch.equal(found["model"]["a"], best[None, :2])
    assert torch.equal(found["control"]["a"], (19 * best[2:]).float())
    assert found["control"]["a"].dtype == torch.float32
    assert found["model"]["n"].dtype == torch.int64
    assert int(found["model"]["n"]) == 9  # the median
    assert found["rows"]["r"].tolist() == list(range(19))


def test_what_a_rule_cannot_take_is_named() -> None:
    uplink = {"model": Group("update")}
    good = {"model": {"w": torch.ones(2)}}
    with pytest.raises(ValueError, match=r"client 2 sent .*'w'.* as \(3,\)"):
        reduced(CoordinateMedian(), uplink, [good, {"model": {"w": torch.ones(3)}}])
    with pytest.raises(ValueError, match="finite updates; those of 2 are not"):
        reduced(CoordinateMedian(), uplink, [good, {"model": {"w": torch.tensor([1.0, torch.nan])}}])
    with pytest.raises(ValueError, match=r"n >= 2 f \+ 3 = 5 replies; there are 4"):
        reduced(Krum(1), uplink, [good] * 4)
    reduced(Krum(1), uplink, [good] * 5)
    Krum(2).check(5, refused=1)
    with pytest.raises(ValueError, match="leaves out 2 replies at either end"):
        TrimmedMean(0.4).check(4)
    with pytest.raises(ValueError, match="keeps 9 replies; there are 8"):
        MultiKrum(1, keep=9).check(8)

    class Own(Mean):
        def copies(self, replies: int) -> float | None:
            return None

    with pytest.raises(ValueError, match="cannot stand in for Own, which reduces 'model'"):
        Krum(1).gathering({"model": Group("update", Own())})
    assert isinstance(Krum(1).gathering(uplink)["model"].reduce, Keep)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: TrimmedMean(0.5), "share is 0.5"),
        (lambda: Krum(-1), "byzantine is -1"),
        (lambda: MultiKrum(1, keep=0), "keep is 0"),
        (lambda: NormClipping(0.0), "max_norm is 0.0"),
        (lambda: GeometricMedian(smoothing=0.0), "smoothing is 0.0"),
        (lambda: GeometricMedian(steps=0), "steps is 0"),
        (lambda: GeometricMedian(tolerance=-1.0), "tolerance is -1"),
        (lambda: SignFlip(factor=0.0, share=0.1), "factor is 0.0"),
        (lambda: InnerProduct(factor=0.0, share=0.1), "factor is 0.0"),
        (lambda: GaussianNoise(std=-1.0, share=0.1), "std is -1.0"),
        (lambda: Scaling(), "either share or clients"),
        (lambda: Scaling(share=1.1), "share is 1.1"),
    ],
)
def test_wrong_values_are_refused(make: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()


# ---- in a federation

SIZES = (4, 10, 6, 7, 6, 4, 8)


def run(method: Any, aggregator: Aggregator | None = None, attack: Attack | None = None, **options: Any) -> Any:
    loop = federation(method, SIZES, aggregator=aggregator, attack=attack, **options)
    loop.fit()
    return loop


@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD, FedDyn, FedCM])
@pytest.mark.parametrize("engine", ["serial", "vectorized"])
def test_nothing_trimmed_is_the_mean_for_every_method(method: Any, engine: Any) -> None:
    uniform = {} if method is FedDyn else {"weighting": "uniform"}
    if method is FedCM:  # its number, the summed learning rate, is a median where a rule is chosen: equal where all are
        options: dict[str, Any] = {"trainer": {"max_steps": 1}, "engine": engine}
    else:
        options = {"engine": engine}
    mean = run(method(rounds=3, **uniform), **options)
    trimmed = run(method(rounds=3, **uniform), TrimmedMean(0.0), **options)
    for name, value in mean.method.state().items():
        torch.testing.assert_close(trimmed.method.state()[name], value, rtol=1e-10, atol=1e-12)
    median = run(method(rounds=3, **uniform), CoordinateMedian(), **options)
    assert not same(median.method.state(), mean.method.state())


def test_buffers_and_counters_go_with_the_model() -> None:
    mean = run(FedAvg(rounds=2, weighting="uniform"), network=normalised)
    trimmed = run(FedAvg(rounds=2, weighting="uniform"), TrimmedMean(0.0), network=normalised)
    for name, value in mean.method.state().items():
        if value.is_floating_point():
            torch.testing.assert_close(trimmed.method.state()[name], value, rtol=1e-10, atol=1e-12)
    assert int(trimmed.method.state()["network.2.num_batches_tracked"]) == 4  # batches 1 3 2 2 2 1 2, twice


def test_a_rule_whose_condition_fails_refuses_before_training() -> None:
    for options in ({}, {"sampler": UniformSampler(size=4)}):
        loop = federation(FedAvg(rounds=2), SIZES, aggregator=Krum(3 if not options else 1), **options)
        with pytest.raises(ValueError, match=r"federation.aggregator: Krum with byzantine=. needs n >= .*\(round 1\)"):
            loop.fit()
        assert loop.history == []
    with pytest.raises(ValueError, match="Krum combines updates; this method's replies hold"):
        run(LocalOnly(rounds=1), Krum(1))


# ---- attackers


def test_attackers_are_drawn_from_the_seed_and_nested() -> None:
    clients = [str(k) for k in range(20)]
    few, many = SignFlip(share=0.2).attackers(clients, 3), SignFlip(share=0.4).attackers(clients, 3)
    assert (len(few), len(many)) == (4, 8)
    assert few < many
    assert SignFlip(share=0.2).attackers(clients, 4) != few
    assert SignFlip(clients=["7"]).attackers(clients, 0) == {"7"}
    with pytest.raises(ValueError, match=r"names \['x'\]"):
        SignFlip(clients=["x"]).attackers(clients, 0)


def replies_of(attack: Attack | None, rounds: int = 1, **options: Any) -> list[dict[str, Any]]:
    """Replies by client, one dictionary a round."""
    seen: list[dict[str, Any]] = []
    loop = federation(FedAvg(rounds=rounds), SIZES, attack=attack, **options)
    given = loop.engine.run

    def keeping(program: Any, message: Any, cohort: Any, *rest: Any) -> Any:
        seen.append({"": message})
        return given(program, message, cohort, *rest[:-1], lambda r: seen[-1].update({r.message.sender: r}))

    loop.engine.run = keeping  # type: ignore[method-assign]
    loop.fit()
    return seen


def model(reply: Any) -> Tensor:
    return torch.cat([value.flatten() for _, value in sorted(reply.message.tensors["model"].items())])


@pytest.mark.parametrize("engine", ["serial", "vectorized"])
def test_what_attackers_send(engine: Any) -> None:
    honest = replies_of(None, engine=engine)[0]
    for attack, expected in (
        (SignFlip(2.0, clients=["1"]), lambda u: -2 * u),
        (Scaling(10.0, clients=["1"]), lambda u: 10 * u),
        (InnerProduct(0.5, clients=["1"]), lambda u: -0.5 * u),
    ):
        sent = replies_of(attack, engine=engine)[0]
        assert torch.equal(model(sent["1"]), expected(model(honest["1"])))
        assert torch.equal(model(sent["2"]), model(honest["2"]))
    sent = replies_of(LabelFlip(clients=["1"]), engine=engine)[0]
    assert not torch.equal(model(sent["1"]), model(honest["1"]))
    assert torch.equal(model(sent["2"]), model(honest["2"]))


def test_noise_has_its_spread_and_an_owner() -> None:
    attack = GaussianNoise(200.0, clients=["1", "2"])
    first, again = replies_of(attack, rounds=2), replies_of(attack, rounds=2)
    assert torch.equal(model(first[1]["1"]), model(again[1]["1"]))
    draws = torch.cat([model(r[k]) for r in first for k in ("1", "2")])
    assert len(draws.unique()) == len(draws) == 60
    assert 150 < float(draws.std()) < 250


def test_label_flip_reverses_the_labels() -> None:
    loop = federation(FedAvg(rounds=1), SIZES)
    train = loop.data.train("1")
    flipped = LabelFlip(clients=["1"]).data(train, 3)
    assert torch.equal(flipped.labels, 2 - train.labels)
    assert torch.equal(flipped.fetch(torch.arange(3)), train.fetch(torch.arange(3)))


def test_inner_product_attackers_all_send_minus_the_models_last_movement() -> None:
    rounds = replies_of(InnerProduct(0.5, clients=["1", "4"]), rounds=3)
    start, after = rounds[0][""].tensors["model"], rounds[1][""].tensors["model"]
    moved = torch.cat([(after[name] - start[name]).flatten() for name in sorted(start)])
    assert torch.equal(model(rounds[1]["1"]), -0.5 * moved)
    assert torch.equal(model(rounds[1]["1"]), model(rounds[1]["4"]))
    assert not torch.equal(model(rounds[2]["1"]), model(rounds[1]["1"]))


def test_one_nan_is_one() -> None:
    loop = federation(FedAvg(rounds=1), SIZES)
    groups = {"model": {"w": torch.ones(40), "n": torch.tensor(3)}, "buffers": {}}
    sent = OneNaN(clients=["1"]).corrupt(groups, loop.engine.client("1", 1), Message(1, "server"))  # type: ignore[attr-defined]
    assert int(sent["model"]["w"].isnan().sum()) == 1
    assert groups["model"]["w"].isfinite().all()


def test_a_known_attacker_is_one_of_those_that_krum_allows_for() -> None:
    """7 clients, f = 2; both send a NaN, and f = 0 is left for the 5 others."""
    attack = OneNaN(share=0.3)
    loop = run(FedAvg(rounds=2), MultiKrum(2, keep=5), attack, on_client_error="skip")
    assert [row["round/failures"] for row in loop.history[1:]] == [2, 2]
    assert [row["round/clients"] for row in loop.history[1:]] == [5, 5]
    attackers = attack.attackers(loop.info.clients, 0)
    others = FixedCohort([key for key in loop.info.clients if key not in attackers])
    honest = run(FedAvg(rounds=2), MultiKrum(0, keep=5), sampler=others)
    assert same(loop.method.state(), honest.method.state())


def test_an_attacked_run_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    attack = InnerProduct(0.5, share=0.3)
    whole = run(FedAvg(rounds=3), CoordinateMedian(), attack)
    half = federation(FedAvg(rounds=2), SIZES, aggregator=CoordinateMedian(), attack=attack)
    half.fit(tmp_path)
    loop = federation(FedAvg(rounds=3), SIZES, aggregator=CoordinateMedian(), attack=attack)
    loop.fit(checkpoint=tmp_path / "checkpoints" / "round_00002")
    assert numbers(loop) == numbers(whole)
    assert same(loop.method.state(), whole.method.state())
