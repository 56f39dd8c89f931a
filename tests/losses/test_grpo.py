"""FedDTL's reinforcement loss: the numbered invariants of the paper's specification, hand values, a plain reference."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.losses.grpo import (
    GRPO,
    advantages,
    exact_kl,
    grpo_loss,
    k3_kl,
    mix_reference,
    rewards,
    sample_actions,
)
from fl_lightning.rng import torch_generator

torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch_generator(seed, *shape), dtype=torch.float64)


def logps(batch: int = 6, classes: int = 5, seed: int = 0) -> Tensor:
    return (2 * normal(batch, classes, seed=seed)).log_softmax(-1)


def guesses(batch: int = 6, classes: int = 5, group: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(classes, (batch, group), generator=torch_generator(seed, "actions"))


class Encoder:
    """A linear encoder into a unit sphere with text rows: the smallest model with CLIP's policy."""

    def __init__(self, batch: int = 16, width: int = 8, classes: int = 4) -> None:
        self.weight = normal(width, width, seed=1).requires_grad_()
        self.inputs = normal(batch, width, seed=2)
        self.text = F.normalize(normal(classes, width, seed=3), dim=-1)
        self.labels = torch.arange(batch) % classes
        self.scale = 4.0

    def embeddings(self) -> Tensor:
        return self.inputs @ self.weight

    def logp(self) -> Tensor:
        return (self.scale * F.normalize(self.embeddings(), dim=-1) @ self.text.T).log_softmax(-1)

    def actions(self, options: GRPO, seed: int = 0) -> Tensor:
        return sample_actions(self.embeddings(), self.text, self.scale, options, torch_generator(seed, "noise"))

    def gradient(self, actions: Tensor, options: GRPO, ref_logp: Tensor) -> Tensor:
        logp = self.logp()
        gains = advantages(rewards(actions, self.labels).double(), options.advantage_std)
        loss, _ = grpo_loss(logp, logp.detach(), ref_logp, actions, gains, options)
        return torch.autograd.grad(loss, self.weight)[0]


def test_invariant_9_ratio_is_one_on_the_first_step() -> None:
    """With a fresh old policy L_p equals A: without KL the loss is minus the mean advantage, which is 0."""
    logp, actions = logps().requires_grad_(), guesses()
    for gains in (advantages(guesses(classes=2, seed=1).double()), normal(6, 3)):
        loss, stats = grpo_loss(logp, logp.detach(), logp, actions, gains, GRPO(beta=0))
        assert loss.item() == -gains.mean().item()
        assert stats["clip_fraction"] == 0
    loss, _ = grpo_loss(logp, logp.detach(), logp, actions, gains, GRPO(beta=0))
    gradient = torch.autograd.grad(loss, logp)[0]
    expected = torch.zeros_like(logp).scatter_add_(1, actions, -gains / gains.numel())
    torch.testing.assert_close(gradient, expected)  # the whole policy gradient passes, not one side of the minimum


@pytest.mark.parametrize(
    ("std", "one_hit", "two_hits"),
    [
        ("population", (1.4142, -0.7071, -0.7071), (0.7071, 0.7071, -1.4142)),
        ("sample", (1.1547, -0.5774, -0.5774), (0.5774, 0.5774, -1.1547)),
        ("none", (2 / 3, -1 / 3, -1 / 3), (1 / 3, 1 / 3, -2 / 3)),
    ],
)
def test_invariant_10_hand_values_for_groups_of_three(std: str, one_hit: tuple, two_hits: tuple) -> None:
    got = advantages(torch.tensor([[1.0, 0, 0], [1, 1, 0]], dtype=torch.float64), std)
    torch.testing.assert_close(got, torch.tensor([one_hit, two_hits], dtype=torch.float64), atol=6e-5, rtol=0)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=5), st.floats(-10, 10))
@settings(max_examples=50, deadline=None)
def test_invariant_10_groups_sum_to_zero_and_equal_groups_are_zero(groups: list[list[float]], value: float) -> None:
    given_rewards = torch.tensor([*groups, [value] * 4], dtype=torch.float64)
    for std in ("population", "sample", "none"):
        got = advantages(given_rewards, std)
        assert got.sum(-1).abs().max() < 1e-5
        assert (got[-1] == 0).all()


def test_equal_rewards_that_rounding_would_separate_are_exactly_zero() -> None:
    """0.1 three times has a mean that is not 0.1, in both precisions."""
    for dtype in (torch.float32, torch.float64):
        assert (advantages(torch.full((1, 3), 0.1, dtype=dtype)) == 0).all()


@pytest.mark.parametrize("space", ["unit", "raw"])
@pytest.mark.parametrize("kl", ["k3", "exact"])
def test_invariant_11_without_noise_only_the_kl_pulls(space: str, kl: str) -> None:
    model, options = Encoder(), GRPO(sigma=0, noise_space=space, kl=kl)
    actions = model.actions(options)
    assert (actions == actions[:, :1]).all()
    assert (actions[:, 0] == model.logp().argmax(-1)).all()

    reference = logps(16, 4, seed=5)
    logp = model.logp()
    term = k3_kl(logp, reference, actions) if kl == "k3" else exact_kl(logp, reference)
    expected = torch.autograd.grad(options.beta * term.mean(), model.weight)[0]
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(model.gradient(actions, options, reference), expected)
    assert model.gradient(actions, options, model.logp()).abs().max() < 1e-15  # reference = policy: nothing moves


def test_invariant_12_and_16_kl_and_its_gradient_vanish_at_the_reference() -> None:
    """Also for the three readings of a hybrid reference whose parts coincide (first round after the switch)."""
    logp, actions, zeros = logps().requires_grad_(), guesses(), torch.zeros(6, 3, dtype=torch.float64)
    same = logp.detach().clone()
    for kl in ("k3", "exact"):
        for reference in (same, [(0.5, same), (0.5, same)], mix_reference([same, same], [0.5, 0.5])):
            loss, stats = grpo_loss(logp, same, reference, actions, zeros, GRPO(kl=kl))
            assert abs(stats["kl"].item()) < 1e-15
            # In log-probability space the exact KL keeps Σ_c dlogp(c) π(c), which any softmax parametrisation kills.
            gradient = torch.autograd.grad(loss, logp)[0]
            along = gradient - logp.detach().exp() * gradient.sum(-1, keepdim=True)
            assert along.abs().max() < 1e-15


@given(st.integers(0, 10_000), st.floats(0.1, 30))
@settings(max_examples=50, deadline=None)
def test_invariant_12_divergences_are_not_negative(seed: int, spread: float) -> None:
    logp, reference = ((spread * normal(4, 5, seed=seed + i)).log_softmax(-1) for i in range(2))
    assert (k3_kl(logp, reference, guesses(4, 5, seed=seed)) >= 0).all()
    assert (exact_kl(logp, reference) >= -1e-12).all()


def test_k3_averages_to_the_exact_divergence_under_the_policy() -> None:
    logp, reference = logps(), logps(seed=1)
    every_class = torch.arange(5).expand(6, 5)
    got = (logp.exp() * k3_kl(logp, reference, every_class)).sum(-1)
    torch.testing.assert_close(got, exact_kl(logp, reference))
    want = F.kl_div(reference, logp, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(exact_kl(logp, reference), want)


@pytest.mark.parametrize(
    ("advantage", "ratio", "passes"),
    [(1, 1.3, False), (1, 1.1, True), (1, 0.5, True), (-1, 0.7, False), (-1, 0.9, True), (-1, 1.5, True)],
)
def test_invariant_13_clip_cuts_the_gradient(advantage: int, ratio: float, passes: bool) -> None:
    """Only where the step would go further the way the advantage points."""
    logp = torch.tensor([[0.4, 0.35, 0.25]], dtype=torch.float64).log().requires_grad_()
    old = logp.detach() - math.log(ratio)
    actions = torch.zeros(1, 2, dtype=torch.int64)
    gains = torch.full((1, 2), float(advantage), dtype=torch.float64)
    loss, stats = grpo_loss(logp, old, logp.detach(), actions, gains, GRPO(group_size=2, beta=0))
    gradient = torch.autograd.grad(loss, logp)[0]
    assert gradient[0, 0].item() == pytest.approx(-ratio * advantage if passes else 0, abs=1e-12)
    assert stats["clip_fraction"] == (0 if passes else 1)


def test_invariant_14_noise_reaches_the_update_only_through_the_actions() -> None:
    model, options = Encoder(batch=4), GRPO(sigma=0.15)
    first = model.actions(options, seed=0)
    assert len({tuple(row.tolist()) for row in first}) > 1
    assert not first.requires_grad
    twin = next(seed for seed in range(1, 5000) if torch.equal(model.actions(options, seed), first))
    one, two = (model.gradient(model.actions(options, seed), options, logps(4, 4)) for seed in (0, twin))
    assert one.abs().max() > 0
    assert torch.equal(one, two)


@pytest.mark.parametrize("kl", ["k3", "exact"])
def test_invariant_15_class_order_does_not_matter(kl: str) -> None:
    model, options = Encoder(), GRPO(sigma=0.3, kl=kl)
    reference = logps(16, 4, seed=5)
    actions = model.actions(options)
    before = model.gradient(actions, options, reference)

    order = torch.tensor([2, 0, 3, 1])  # new position -> old class
    place = order.argsort()
    model.text, model.labels = model.text[order], place[model.labels]
    permuted = model.actions(options)
    assert torch.equal(permuted, place[actions])
    assert len(permuted.unique()) > 1
    torch.testing.assert_close(model.gradient(permuted, options, reference[:, order]), before)


@pytest.mark.parametrize(("space", "norm", "sigma"), [("unit", 10.0, 0.1), ("raw", 10.0, 0.1), ("raw", 10.0, 1.0)])
def test_invariant_18_flip_rate_is_the_normal_tail(space: str, norm: float, sigma: float) -> None:
    """Two classes at cosine 0.75, margin 0.05: the rival wins with Φ(-margin / (σ_eff √(2 (1 - cos))))."""
    cosine, margin, width, batch = 0.75, 0.05, 64, 20_000
    text = torch.zeros(2, width, dtype=torch.float64)
    text[0, 0], text[1, 0], text[1, 1] = 1, cosine, math.sqrt(1 - cosine**2)
    gap = text[0] - text[1]
    across = F.normalize(gap, dim=0) * margin / gap.norm()
    image = across.clone()
    image[2] = math.sqrt(1 - across.square().sum().item())  # the rest of the unit vector lies where no class looks
    options = GRPO(sigma=sigma, noise_space=space)
    actions = sample_actions(norm * image.expand(batch, -1), text, 100.0, options, torch_generator(7))
    effective = sigma if space == "unit" else sigma / norm
    expected = NormalDist().cdf(-margin / (effective * math.sqrt(2 * (1 - cosine))))
    error = math.sqrt(expected * (1 - expected) / actions.numel())
    assert actions.float().mean().item() == pytest.approx(expected, abs=4 * error + 1e-9)
    if space == "unit":
        assert expected == pytest.approx(0.24, abs=0.005)  # the figure of the specification


def test_sampled_actions_follow_the_softmax() -> None:
    text, image = torch.eye(3, dtype=torch.float64), torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64)
    options = GRPO(group_size=60_000, sigma=0, action="sample", noise_space="raw")
    actions = sample_actions(image, text, 2.0, options, torch_generator(0))
    expected = (2 * F.normalize(image, dim=-1)).softmax(-1)[0]
    torch.testing.assert_close(torch.bincount(actions[0]).double() / 60_000, expected, atol=0.01, rtol=0)


def test_actions_belong_to_their_generator() -> None:
    model, options = Encoder(), GRPO(sigma=0.5)
    state = torch.get_rng_state()
    assert torch.equal(model.actions(options, 1), model.actions(options, 1))
    assert not torch.equal(model.actions(options, 1), model.actions(options, 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_mixture_is_the_log_of_the_mean_probability() -> None:
    one, two = logps(seed=0), logps(seed=1)
    got = mix_reference([one, two], [0.3, 0.7])
    torch.testing.assert_close(got, (0.3 * one.exp() + 0.7 * two.exp()).log())
    assert torch.equal(mix_reference([one, two], [1.0, 0.0]), one)
    far = torch.tensor([[0.0, -2000.0]], dtype=torch.float64)  # exp would underflow
    assert mix_reference([far, far], [0.5, 0.5])[0, 1].item() == pytest.approx(-2000)


@pytest.mark.parametrize("kl", ["k3", "exact"])
def test_agrees_with_a_plain_loop(kl: str) -> None:
    logp, old, anchor, latest = (logps(seed=i) for i in range(4))
    old = (logp + 0.4 * (old - logp)).log_softmax(-1)
    actions, hits = guesses(seed=3), guesses(classes=2, seed=4).double()
    options = GRPO(kl=kl, epsilon=0.3, beta=0.7)
    gains = advantages(hits)
    pairs = [(0.25, anchor), (0.75, latest)]
    loss, stats = grpo_loss(logp, old, pairs, actions, gains, options, rewards=hits)

    total = kl_total = clipped = mixed = 0.0
    for i in range(6):
        row = hits[i].tolist()
        mean = sum(row) / 3
        deviation = math.sqrt(sum((r - mean) ** 2 for r in row) / 3)
        mixed += len(set(row)) > 1
        for j in range(3):
            a = int(actions[i, j])
            gain = (row[j] - mean) / (deviation + 1e-6)
            rho = math.exp(logp[i, a] - old[i, a])
            bounded = min(max(rho, 0.7), 1.3)
            clipped += bounded * gain < rho * gain
            divergence = 0.0
            for weight, reference in pairs:
                if kl == "k3":
                    q = math.exp(reference[i, a] - logp[i, a])
                    divergence += weight * (q - math.log(q) - 1)
                else:
                    p = [math.exp(v) for v in logp[i]]
                    divergence += weight * sum(p[c] * (math.log(p[c]) - float(reference[i, c])) for c in range(5))
            kl_total += divergence
            total += min(rho * gain, bounded * gain) - 0.7 * divergence
    assert 0 < clipped < 18
    assert 0 < mixed < 6
    assert loss.item() == pytest.approx(-total / 18, rel=1e-12)
    got = {name: value.item() for name, value in stats.items()}
    want = {"mixed_groups": mixed / 6, "kl": kl_total / 18, "clip_fraction": clipped / 18, "reward": hits.mean().item()}
    assert got == pytest.approx(want, rel=1e-12)


def test_without_kl_weight_an_overflown_k3_does_no_harm() -> None:
    logp = torch.tensor([[0.0, -900.0]], dtype=torch.float64, requires_grad=True)
    actions, gains = torch.tensor([[1, 0]]), torch.tensor([[-1.0, 1.0]], dtype=torch.float64)
    loss, _ = grpo_loss(logp, logp, logp.detach().flip(1), actions, gains, GRPO(group_size=2, beta=0))
    assert torch.autograd.grad(loss, logp)[0].isfinite().all()


def test_only_the_policy_receives_a_gradient() -> None:
    logp, old, reference = (logps(seed=i).requires_grad_() for i in range(3))
    loss, stats = grpo_loss(logp, old, reference, guesses(), normal(6, 3), GRPO())
    loss.backward()
    assert logp.grad is not None
    assert old.grad is None
    assert reference.grad is None
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize(
    "change",
    [
        {"group_size": 1},
        {"sigma": -0.1},
        {"sigma": math.nan},
        {"epsilon": 0.0},
        {"epsilon": 1.0},
        {"beta": -1.0},
        {"beta": math.inf},
        {"noise_space": "pixel"},
        {"action": "best"},
        {"advantage_std": "l1"},
        {"kl": "k1"},
    ],
)
def test_options_out_of_range_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        GRPO(**change)


def test_misfits_are_refused() -> None:
    logp, actions, gains = logps(), guesses(), torch.zeros(6, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="old_logp"):
        grpo_loss(logp, logp[:5], logp, actions, gains, GRPO())
    with pytest.raises(ValueError, match="actions"):
        grpo_loss(logp, logp, logp, actions[:, :2], gains, GRPO())
    with pytest.raises(ValueError, match="advantages"):
        grpo_loss(logp, logp, logp, actions, gains[:, :1], GRPO())
    with pytest.raises(ValueError, match="sum to 1"):
        grpo_loss(logp, logp, [(0.5, logp), (0.6, logp)], actions, gains, GRPO())
    with pytest.raises(ValueError, match="sum to 1"):
        mix_reference([logp, logp], [1.5, -0.5])
    with pytest.raises(ValueError, match="one weight"):
        mix_reference([logp], [0.5, 0.5])
    with pytest.raises(ValueError, match="std"):
        advantages(gains, "l1")
    with pytest.raises(ValueError, match="G >= 2"):
        advantages(gains[:, :1])
    with pytest.raises(ValueError, match="agree"):
        sample_actions(normal(2, 3), normal(2, 4), 1.0, GRPO(), torch_generator(0))
