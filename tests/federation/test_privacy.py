"""Client-level differential privacy: the sum by hand, the noise by its variance, epsilon by formulas written here."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from federation.tiny import federation, normalised, numbers, same

from fl_lightning.accounting import epsilon_of, noise_for
from fl_lightning.aggregation import Mean, Sum
from fl_lightning.federation.attacks import OneNaN
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.incoming import TooFewReplies
from fl_lightning.federation.privacy import PrivateMean
from fl_lightning.federation.sampling import PoissonSampler, UniformSampler
from fl_lightning.federation.system import System
from fl_lightning.message import Group
from fl_lightning.methods import SCAFFOLD, FedAvg, FedCM, FedDyn, LocalOnly

pytest.importorskip("dp_accounting")

SIZES = (8, 6, 8, 5, 7, 6, 8, 4, 6)
DELTA = 1e-5


def rdp(rate: float, z: float, rounds: int, delta: float) -> float:
    """Mironov et al. (2019), equation 6 (whole orders), then the conversion of Canonne et al. (2020), Proposition 12."""
    best = math.inf
    for a in range(2, 65):
        logs = [
            math.lgamma(a + 1)
            - math.lgamma(k + 1)
            - math.lgamma(a - k + 1)
            + (a - k) * math.log1p(-rate)
            + k * math.log(rate)
            + (k * k - k) / (2 * z * z)
            for k in range(a + 1)
        ]
        top = max(logs)
        divergence = rounds * (top + math.log(sum(math.exp(x - top) for x in logs))) / (a - 1)
        best = min(best, divergence + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1))
    return best


def test_epsilon_is_that_of_the_formulas() -> None:
    for rounds in (1, 20, 100):
        found = epsilon_of(((0.1, 1.2, rounds),), DELTA)
        assert found == pytest.approx(rdp(0.1, 1.2, rounds, DELTA), rel=1e-6)
    # Without sampling the exact curve is known (Balle and Wang, 2018): T rounds of z are one of z / sqrt(T).
    spent = ((1.0, 4.0, 4),)
    phi, mu = NormalDist().cdf, math.sqrt(4) / 4.0
    exact = epsilon_of(spent, DELTA, "pld")
    assert phi(mu / 2 - exact / mu) - math.exp(exact) * phi(-mu / 2 - exact / mu) == pytest.approx(DELTA, rel=1e-2)
    assert exact < epsilon_of(spent, DELTA) < 1.3 * exact
    # Events of several kinds add up: they cost more than either, and less than their sum.
    both = epsilon_of(((0.1, 1.2, 20), (0.1, 2.0, 20)), DELTA)
    parts = [epsilon_of(((0.1, z, 20),), DELTA) for z in (1.2, 2.0)]
    assert max(parts) < both < sum(parts)


@pytest.mark.parametrize("target", [0.5, 3.0])
def test_a_target_sets_the_noise(target: float) -> None:
    z = noise_for(target, DELTA, 0.2, 30)
    assert rdp(0.2, z, 30, DELTA) <= target < rdp(0.2, 0.99 * z, 30, DELTA)


class Replies(FederationCallback):
    def __init__(self) -> None:
        self.sent: dict[str, Any] = {}

    def on_reply(self, loop: Any, reply: Any) -> None:
        self.sent[reply.message.sender] = reply.message.tensors


NOISELESS = {"noise_multiplier": 1e-14, "delta": 0.01}


def test_one_clip_over_model_control_and_buffers_by_hand() -> None:
    seen, rule = Replies(), PrivateMean(clip=0.3, **NOISELESS)
    loop = federation(
        SCAFFOLD(rounds=1),
        (6, 9, 6, 6),
        network=normalised,
        batch_size=3,
        aggregator=rule,
        callbacks=[seen],
        sampler=PoissonSampler(0.6),
    )
    before = {n: p.detach().clone() for n, p in loop.method.parameters.items()}  # type: ignore[attr-defined]
    buffers = dict(loop.method.buffers)  # type: ignore[attr-defined]
    loop.fit()
    total: dict[str, Any] = {}
    cut = 0
    for tensors in seen.sent.values():
        flat = {(g, n): v for g, t in tensors.items() for n, v in t.items() if v.is_floating_point()}
        assert {g for g, _ in flat} == {"model", "buffers", "control"}
        norm = math.sqrt(sum(float(v.pow(2).sum()) for v in flat.values()))
        cut += norm > 0.3
        for key, value in flat.items():
            total[key] = total.get(key, 0) + value * min(1.0, 0.3 / norm)
    assert cut > 0
    assert 0 < len(seen.sent) < 4  # the denominator is q N = 2.4, whoever was drawn
    for name, value in before.items():
        torch.testing.assert_close(
            loop.method.parameters[name].detach(), value + total["model", name] / 2.4, rtol=0, atol=1e-12
        )  # type: ignore[attr-defined]
        torch.testing.assert_close(loop.method.control[name], total["control", name] / 4, rtol=0, atol=1e-12)  # type: ignore[attr-defined]
    name = "network.2.running_mean"
    torch.testing.assert_close(
        loop.method.buffers[name], buffers[name] + total["buffers", name] / 2.4, rtol=0, atol=1e-12
    )  # type: ignore[attr-defined]
    assert int(loop.method.buffers["network.2.num_batches_tracked"]) == 0  # type: ignore[attr-defined]  # not released


def ready(rule: PrivateMean, clients: int = 50, rate: float = 0.2, rounds: int = 10, seed: int = 0) -> PrivateMean:
    rule.setup(clients, rounds, rate, seed)
    return rule


LIKE = {"w": torch.zeros(40_000, dtype=torch.float64)}
UPLINK = {"model": Group("update", Mean(), like=LIKE), "control": Group("update", Sum(), like=LIKE)}


def gathered(*norms: float) -> dict[str, Any]:
    """Clients whose vectors over both groups have these norms."""
    ones = torch.ones(40_000, dtype=torch.float64) / math.sqrt(80_000)
    return {g: {str(k): {"w": norm * ones} for k, norm in enumerate(norms)} for g in UPLINK}


def test_noise_has_its_variance_and_a_zero_update_for_nobody() -> None:
    rule = ready(PrivateMean(clip=3.0, noise_multiplier=1.5))
    nobody = rule.aggregate({}, UPLINK, round=1)
    # z C / (q N) = 1.5 * 3 / 10 on the mean, z C on the sum; 40,000 draws have a deviation of 1 in 280 of their own.
    assert float(nobody["model"]["w"].std()) == pytest.approx(0.45, rel=0.02)
    assert float(nobody["control"]["w"].std()) == pytest.approx(4.5, rel=0.02)
    assert abs(float(nobody["model"]["w"].mean())) < 0.45 / 50
    some = rule.aggregate(gathered(1.0, 6.0, 2.0), UPLINK, round=1)  # norms 1, 3 (clipped), 2
    difference = (some["control"]["w"] - nobody["control"]["w"]) * math.sqrt(80_000)
    torch.testing.assert_close(difference, torch.full_like(difference, 6.0), rtol=0, atol=1e-8)
    assert not torch.equal(rule.aggregate({}, UPLINK, round=2)["model"]["w"], nobody["model"]["w"])
    other = ready(PrivateMean(clip=3.0, noise_multiplier=1.5), seed=1)
    assert not torch.equal(other.aggregate({}, UPLINK, round=1)["model"]["w"], nobody["model"]["w"])
    again = ready(PrivateMean(clip=3.0, noise_multiplier=1.5))
    assert torch.equal(again.aggregate({}, UPLINK, round=1)["model"]["w"], nobody["model"]["w"])


def test_adaptive_clipping_follows_the_quantile_and_pays_for_it() -> None:
    rule = ready(PrivateMean(clip=1.0, noise_multiplier=1.0, adapt=0.5, adapt_noise=2.0))
    assert rule.z_update == pytest.approx((1 - 1 / 16) ** -0.5)  # (z^-2 - (2 sigma_b)^-2)^(-1/2)
    out = rule.aggregate({}, UPLINK, round=1)
    assert float(out["control"]["w"].std()) == pytest.approx(rule.z_update, rel=0.02)
    # By hand, without noise on the count: two of three are short, so b~ = 0.5 + (2 - 1.5) / 10.
    rule = ready(PrivateMean(clip=1.0, noise_multiplier=1e-9, adapt=0.3, adapt_rate=0.2, adapt_noise=1e-8))
    rule.aggregate(gathered(0.5, 0.9, 5.0), UPLINK, round=1)
    assert rule.clip == pytest.approx(math.exp(-0.2 * (0.55 - 0.3)), rel=1e-6)
    rule = ready(PrivateMean(clip=0.01, noise_multiplier=1e-9, adapt=0.5, adapt_noise=1e-8), rate=1.0, clients=9)
    for round in range(1, 200):
        rule.aggregate(gathered(*map(float, range(1, 10))), UPLINK, round=round)
    assert 4.0 < rule.clip < 6.1  # the median of 1 ... 9 is 5
    with pytest.raises(ValueError, match=r"adapt_noise is 0.4; it must be above 0.5"):
        ready(PrivateMean(noise_multiplier=1.0, adapt=0.5, adapt_noise=0.4))


@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD, FedDyn])
def test_epsilon_grows_by_the_book_and_survives_a_resume(method: Any, tmp_path: Path) -> None:
    def make() -> Any:
        rule = PrivateMean(clip=0.5, noise_multiplier=1.3, delta=0.01, adapt=0.5)
        return federation(method(rounds=4), SIZES, aggregator=rule, sampler=PoissonSampler(0.4), keep_last=9)

    whole = make()
    whole.fit(tmp_path)
    found = [row["privacy/epsilon"] for row in whole.history[1:]]
    assert found == pytest.approx([rdp(0.4, 1.3, t, 0.01) for t in (1, 2, 3, 4)], rel=1e-6)
    resumed = make()
    resumed.fit(tmp_path, tmp_path / "checkpoints" / "round_00002")
    assert numbers(resumed) == numbers(whole)
    assert same(resumed.method.state_dict(), whole.method.state_dict())
    assert resumed.aggregator.clip == whole.aggregator.clip != 0.5


def test_an_extended_run_spends_no_more_than_its_budget(tmp_path: Path) -> None:
    def run(rounds: int, checkpoint: int | None = None, *, epsilon: float = 4.0, folder: Path = tmp_path) -> Any:
        rule = PrivateMean(epsilon=epsilon, delta=0.01, adapt=0.5)
        loop = federation(FedAvg(rounds), SIZES, aggregator=rule, sampler=PoissonSampler(0.4), keep_last=9)
        loop.fit(folder, None if checkpoint is None else tmp_path / "checkpoints" / f"round_{checkpoint:05d}")
        return loop

    def spent(loop: Any) -> float:
        return loop.history[-1]["privacy/epsilon"]

    aside = tmp_path / "aside"
    whole = run(4)
    assert spent(whole) <= 4.0
    again = run(4, 2, folder=aside)  # unchanged
    assert numbers(again) == numbers(whole)
    assert same(again.state_dict()["aggregator"], whole.state_dict()["aggregator"])
    longer = run(7, 2)
    first, second = longer.aggregator.spent
    assert (first, second[2]) == ((0.4, whole.aggregator.z, 2), 5)
    assert second[1] > whole.aggregator.z
    assert spent(longer) <= 4.0 < epsilon_of((first, (0.4, 0.99 * second[1], 5)), 0.01)
    assert repr(numbers(run(7, 5, folder=aside))) == repr(numbers(longer))  # goes on as a run of seven rounds
    with pytest.raises(ValueError, match=r"epsilon is 4.0, and .* of it is spent; nothing is left for 1 more rounds"):
        run(8, 7)
    assert 4.0 < spent(run(8, 7, epsilon=5.0, folder=aside)) <= 5.0
    assert len(run(7, 7, epsilon=5.0, folder=aside).history) == 8  # nothing to do


def test_a_changed_norm_outlasts_the_state_unless_it_adapts(tmp_path: Path) -> None:
    def run(clip: float, adapt: float | None, checkpoint: Path | None = None) -> float:
        rule = PrivateMean(clip=clip, noise_multiplier=1.0, delta=0.01, adapt=adapt)
        loop = federation(FedAvg(2), SIZES, aggregator=rule, keep_last=9)
        loop.fit(None if checkpoint else tmp_path, checkpoint)
        return loop.history[-1]["privacy/clip"]

    first = tmp_path / "checkpoints" / "round_00001"
    run(0.5, None)
    assert run(0.2, None, first) == 0.2
    assert run(0.2, 0.5, first) == 0.2  # adapts from now on
    adapted = run(0.5, 0.5)
    assert adapted != 0.5
    assert run(0.2, 0.5, first) == adapted
    assert run(0.2, None, first) == 0.2  # and no longer


def test_a_round_without_clients_is_noise_and_is_paid_for() -> None:
    rule = PrivateMean(clip=0.1, noise_multiplier=1.0, delta=0.01)
    loop = federation(FedAvg(6), (4, 4, 4), aggregator=rule, sampler=PoissonSampler(0.2), seed=1)
    loop.fit()
    clients = [row["round/clients"] for row in loop.history[1:]]
    assert 0 in clients
    empty = loop.history[1 + clients.index(0)]
    assert empty["server/update_norm"] > 0
    assert math.isnan(empty["server/client_drift"])
    assert loop.history[-1]["privacy/epsilon"] == pytest.approx(rdp(0.2, 1.0, 6, 0.01), rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"system": System(deadline=1e-9)},
        {"attack": OneNaN(share=1.0), "on_client_error": "skip"},
    ],
)
def test_a_round_whose_clients_are_all_lost_is_noise_and_is_paid_for(options: dict[str, Any]) -> None:
    def make(**more: Any) -> Any:
        rule = PrivateMean(clip=0.1, noise_multiplier=1.0, delta=0.01)
        return federation(FedAvg(2), (4, 4, 4), aggregator=rule, **options, **more)

    loop = make()
    loop.fit()
    assert [row["round/clients"] for row in loop.history[1:]] == [0, 0]
    # 15 weights and biases, of deviation z C / (q N) = 0.1 / 3 each.
    for row in loop.history[1:]:
        assert row["server/update_norm"] == pytest.approx(math.sqrt(15) * 0.1 / 3, rel=0.5)
    assert loop.history[-1]["privacy/epsilon"] == epsilon_of(((1.0, 1.0, 2),), 0.01)
    with pytest.raises(TooFewReplies, match=r"federation.min_clients is 2"):  # a quorum that was asked for
        make(min_clients=2).fit()


def test_noise_makes_no_variance_negative() -> None:
    rule = PrivateMean(clip=1.0, noise_multiplier=9.0, delta=0.01)
    loop = federation(FedAvg(1), (6, 9, 6), network=normalised, batch_size=3, aggregator=rule)
    before = {name: value.clone() for name, value in loop.method.buffers.items()}  # type: ignore[attr-defined]
    released: dict[str, Any] = {}
    aggregate = rule.aggregate
    rule.aggregate = lambda *args: released.update(aggregate(*args)) or released  # type: ignore[method-assign]
    loop.fit()
    after, changes = loop.method.buffers, released["buffers"]  # type: ignore[attr-defined]
    name = "network.2.running_var"
    noisy = before[name] + changes[name]
    assert noisy.min() < 0 < noisy.max()
    assert torch.equal(after[name], noisy.where(noisy > 0, 0.0))
    mean = before["network.2.running_mean"] + changes["network.2.running_mean"]
    assert mean.min() < 0  # a mean may be
    assert torch.equal(after["network.2.running_mean"], mean)
    assert math.isfinite(loop.history[-1]["global/loss"])


def test_a_mean_of_nobody_is_refused_before_training() -> None:
    loop = federation(FedAvg(6), (4, 4, 4), sampler=PoissonSampler(0.2), seed=1)
    with pytest.raises(ValueError, match="PoissonSampler draws nobody for round"):
        loop.fit()
    assert not loop.history


def test_feddyn_does_not_see_how_many_replied() -> None:
    rule = PrivateMean(clip=100.0, **NOISELESS)
    loop = federation(FedDyn(rounds=1, alpha=0.1), SIZES, aggregator=rule, sampler=PoissonSampler(0.5))
    start = {n: p.detach().clone() for n, p in loop.method.parameters.items()}  # type: ignore[attr-defined]
    loop.fit()
    for name, value in start.items():  # theta - theta_0 = mean - h / alpha, h = -alpha q mean: (1 + q) mean
        moved = loop.method.parameters[name].detach() - value  # type: ignore[attr-defined]
        torch.testing.assert_close(loop.method.dual[name], -0.1 * 0.5 / 1.5 * moved, rtol=0, atol=1e-12)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "rule", "options", "message"),
    [
        (FedAvg, {}, {"sampler": UniformSampler(size=3)}, "must be PoissonSampler or AllClients"),
        (FedAvg, {"delta": 0.2}, {}, r"delta is 0.2; it must be in \(0, 1 / 9\)"),
        (LocalOnly, {}, {}, "combines updates"),
        (FedCM, {}, {}, "numbers in clear: lr_sum"),
    ],
)
def test_refused_by_name(method: Any, rule: dict[str, Any], options: dict[str, Any], message: str) -> None:
    given = PrivateMean(**{"noise_multiplier": 1.0, "delta": 0.01, **rule})
    loop = federation(method(rounds=1), SIZES, aggregator=given, **options)
    with pytest.raises(ValueError, match=message):
        loop.fit()
    assert not loop.history  # before any training


def test_rounds_in_clear_cannot_be_made_private_afterwards(tmp_path: Path) -> None:
    federation(FedAvg(rounds=1), SIZES).fit(tmp_path)
    rule = PrivateMean(noise_multiplier=1.0, delta=0.01)
    loop = federation(FedAvg(rounds=2), SIZES, aggregator=rule)
    with pytest.raises(ValueError, match="the checkpoint's rounds were in clear"):
        loop.fit(tmp_path, tmp_path / "checkpoints" / "round_00001")
    assert not loop.participant.trained


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either noise_multiplier or epsilon"),
        ({"noise_multiplier": 1.0, "epsilon": 1.0}, "either noise_multiplier or epsilon"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"epsilon": 1.0, "clip": 0.0}, "clip is 0.0"),
        ({"epsilon": math.inf}, "epsilon is inf"),
        ({"noise_multiplier": math.inf}, "noise_multiplier is inf"),
        ({"epsilon": 1.0, "clip": math.inf}, "clip is inf; it must be above 0 and finite"),
        ({"epsilon": 1.0, "clip": math.nan}, "clip is nan"),
        ({"epsilon": 1.0, "adapt_rate": math.inf}, "adapt_rate is inf"),
        ({"epsilon": 1.0, "adapt_noise": math.inf}, "adapt_noise is inf"),
        ({"epsilon": 1.0, "adapt": math.nan}, "adapt is nan"),
        ({"epsilon": 1.0, "delta": math.nan}, "delta is nan"),
        ({"epsilon": 1.0, "delta": 1.0}, r"delta is 1.0; it must be in \(0, 1\)"),
        ({"epsilon": 1.0, "adapt": 1.0}, "adapt is 1.0"),
        ({"epsilon": 1.0, "accountant": "moments"}, "accountant is 'moments'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivateMean(**arguments)


def test_a_poisson_sampler_draws_everybody_by_himself() -> None:
    clients = [str(k) for k in range(200)]
    cohorts = [PoissonSampler(0.3).cohort(round, clients, 0) for round in range(1, 101)]
    sizes = [len(cohort) for cohort in cohorts]
    assert sum(sizes) / 100 == pytest.approx(60, abs=2)  # 6.5 / sqrt(100) is its deviation
    assert 4.5 < torch.tensor(sizes, dtype=torch.float64).std() < 8.5  # sqrt(200 * 0.3 * 0.7) = 6.5
    assert PoissonSampler(0.3).cohort(5, clients, 0) == cohorts[4]
    assert PoissonSampler(0.3).cohort(5, clients, 1) != cohorts[4]
    with pytest.raises(ValueError, match="probability is 0"):
        PoissonSampler(0.0)
