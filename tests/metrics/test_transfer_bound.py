"""The bound on Gaussian classes, where divergences, total variation and risks are known."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from fl_lightning.metrics.transfer_bound import (
    discriminator_accuracy,
    risk_gap,
    total_variation_lower_bound,
    transfer_bound,
)
from fl_lightning.rng import owned_global_rng, torch_generator

torch.set_num_threads(1)


def test_both_forms_by_hand() -> None:
    found = transfer_bound(torch.tensor([0.02, 0.18]), torch.tensor([0.75, 0.25]), loss_bound=2.0)
    assert found.per_class == pytest.approx(2 * (0.75 * 0.1 + 0.25 * 0.3))
    assert found.pooled == pytest.approx(2 * math.sqrt(0.75 * 0.01 + 0.25 * 0.09))
    counts = transfer_bound(torch.tensor([0.02, 0.18]), torch.tensor([6, 2]), loss_bound=2.0)
    assert counts.per_class == pytest.approx(found.per_class)


def test_the_form_by_class_is_the_tighter_one_and_equal_where_classes_are() -> None:
    generator = torch_generator(0)
    for _ in range(20):
        divergences, priors = torch.rand(6, generator=generator), torch.rand(6, generator=generator)
        found = transfer_bound(divergences, priors)
        assert found.per_class <= found.pooled
    same = transfer_bound(torch.full((6,), 0.3), priors)
    assert same.per_class == pytest.approx(same.pooled)
    assert transfer_bound(torch.zeros(6), priors).pooled == 0


def test_priors_that_differ_add_their_total_variation() -> None:
    divergences, priors, others = torch.tensor([0.02, 0.02]), torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.8])
    assert transfer_bound(divergences, priors, test_priors=others, loss_bound=2).per_class == pytest.approx(0.2 + 0.6)
    assert transfer_bound(divergences, priors, test_priors=priors).pooled == pytest.approx(0.1)


def test_a_class_that_is_never_drawn_does_not_count() -> None:
    found = transfer_bound(torch.tensor([0.02, math.inf]), torch.tensor([1.0, 0.0]))
    assert (found.per_class, found.pooled) == (pytest.approx(0.1), pytest.approx(0.1))
    assert transfer_bound(torch.tensor([0.02, math.inf]), torch.tensor([0.9, 0.1])).per_class == math.inf


@pytest.mark.parametrize("shift", [0.02, 0.2, 1.0])
def test_total_variation_lies_between_both_bounds(shift: float) -> None:
    """N(0, 1) and N(shift, 1): TV = 2Φ(shift/2) − 1, and the best classifier is right with probability Φ(shift/2)."""
    exact = 2 * norm.cdf(shift / 2) - 1
    upper = transfer_bound(torch.tensor([shift**2 / 2]), torch.ones(1)).per_class
    assert exact <= upper < 1.4 * exact  # a constant that is wrong by a factor of √2 would miss one side
    assert total_variation_lower_bound(norm.cdf(shift / 2)) == pytest.approx(exact)
    assert total_variation_lower_bound(norm.cdf(shift / 2) - 0.005) < exact


def draw(classes: list[MultivariateNormal], number: int, owner: str) -> tuple[Tensor, Tensor]:
    with owned_global_rng(0, owner):
        return torch.cat([c.sample((number,)) for c in classes]), torch.arange(len(classes)).repeat_interleave(number)


@pytest.mark.parametrize("error", [0.1, 0.3, 0.6, 1.0])
def test_bound_holds_for_a_discriminant_fitted_to_generated_gaussians(error: float) -> None:
    classes, number = 4, 5000
    means = torch.tensor([[1.5, 0], [0, 1.5], [-1.5, 0], [0, -1.5]])
    offsets = torch.randn(classes, 2, generator=torch_generator(0, "offsets"))
    real = [MultivariateNormal(mean, torch.eye(2)) for mean in means]
    generated = [
        MultivariateNormal(mean + error * off, 1.2 * torch.eye(2)) for mean, off in zip(means, offsets, strict=True)
    ]
    divergences = torch.stack([kl_divergence(p, q) for p, q in zip(real, generated, strict=True)])
    bound = transfer_bound(divergences, torch.ones(classes))

    fitted = LinearDiscriminantAnalysis().fit(*draw(generated, 1000, "fit"))

    def judged(where: list[MultivariateNormal], owner: str) -> tuple[Tensor, Tensor]:
        points, labels = draw(where, number, owner)
        return torch.from_numpy(fitted.predict_log_proba(points)), labels

    risks = risk_gap(judged(real, "real"), judged(generated, "generated"), classes)
    error_of_gap = math.sqrt(
        sum(r * (1 - r) for r in (risks["risk/real"], risks["risk/generated"])) / (classes * number)
    )
    assert abs(risks["risk/gap"]) <= bound.per_class + 3 * error_of_gap
    assert bound.per_class <= bound.pooled
    # What a classifier can tell apart is at most what the divergences allow, class by class.
    for p, q, divergence in zip(real, generated, divergences, strict=True):
        accuracy = discriminator_accuracy(draw([p], 1000, "p")[0], draw([q], 1000, "q")[0])
        upper = transfer_bound(divergence[None], torch.ones(1)).per_class
        assert total_variation_lower_bound(accuracy) <= upper + 2 * 3 * 0.5 / math.sqrt(2000)


def test_divergence_of_the_joint_distributions_is_the_mean_over_classes() -> None:
    """The equality that the bound rests on, on tables of probabilities p(x, y)."""
    p, q = (torch.rand(3, 7, generator=torch_generator(n)).double().softmax(-1) for n in range(2))
    priors = torch.tensor([0.5, 0.3, 0.2]).double()[:, None]
    joint = (priors * p * ((priors * p) / (priors * q)).log()).sum()
    by_class = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(joint, (priors[:, 0] * by_class).sum())
    variation = (priors * (p - q)).abs().sum() / 2
    assert variation <= transfer_bound(by_class, priors[:, 0]).per_class


def test_risks_are_balanced() -> None:
    logits = torch.tensor([[1.0, 0.0]] * 4)
    found = risk_gap((logits, torch.tensor([0, 0, 0, 1])), (logits[:2], torch.tensor([0, 0])), 2)
    assert found == {"risk/real": 0.5, "risk/generated": 0.0, "risk/gap": 0.5}


def test_a_discriminator_tells_what_differs_and_not_what_does_not() -> None:
    points = torch.randn(900, 3, generator=torch_generator(3))
    assert abs(discriminator_accuracy(points[:300], points[300:]) - 0.5) < 0.06
    assert discriminator_accuracy(points[:300], points[300:] + 5) > 0.99
    assert discriminator_accuracy(points[:300], points[300:], seed=1) == discriminator_accuracy(
        points[:300], points[300:], seed=1
    )


def test_refusals() -> None:
    two = torch.tensor([0.1, 0.1])
    for divergences, priors in ((two, torch.ones(3)), (-two, two), (two, -two), (two, 0 * two), (two * math.nan, two)):
        with pytest.raises(ValueError, match="must"):
            transfer_bound(divergences, priors)
    with pytest.raises(ValueError, match="loss_bound must be positive and finite, got 0"):
        transfer_bound(two, two, loss_bound=0)
    with pytest.raises(ValueError, match=r"\[0, 1\], got 1.2"):
        total_variation_lower_bound(1.2)
    assert total_variation_lower_bound(0.3) == 0
    with pytest.raises(ValueError, match=r"folds must lie in \[2, 3\], got 5"):
        discriminator_accuracy(torch.zeros(3, 2), torch.zeros(9, 2))
    with pytest.raises(ValueError, match="features"):
        discriminator_accuracy(torch.zeros(9, 2), torch.zeros(9, 3))
