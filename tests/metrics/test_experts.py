"""Products and means of experts: identities, finite logarithms, and prior correction against Bayes' rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fl_lightning.metrics.evaluation import scores
from fl_lightning.metrics.experts import mean_of_experts, product_of_experts
from fl_lightning.rng import torch_generator


def experts(number: int = 4, n: int = 50, classes: int = 5) -> Tensor:
    return 3 * torch.randn(number, n, classes, generator=torch_generator(0, number, n, classes))


def test_product_by_hand() -> None:
    probabilities = torch.tensor([[[0.5, 0.3, 0.2]], [[0.2, 0.2, 0.6]]], dtype=torch.float64)
    product = torch.tensor([[0.10, 0.06, 0.12]], dtype=torch.float64)
    torch.testing.assert_close(product_of_experts(probabilities.log()).exp(), product / product.sum())
    geometric = product.sqrt()
    found = product_of_experts(probabilities.log(), normalize=True).exp()
    torch.testing.assert_close(found, geometric / geometric.sum())
    torch.testing.assert_close(mean_of_experts(probabilities.log()).exp(), probabilities.mean(0))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("combine", ["product", "corrected", "mean"])
def test_order_of_experts_does_not_matter(combine: str, normalize: bool) -> None:
    logits, order = experts(), torch.tensor([2, 0, 3, 1])
    priors = torch.rand(4, 5, generator=torch_generator(1)) + 0.1
    if combine == "mean":
        first, second = mean_of_experts(logits), mean_of_experts(logits[order])
    else:
        given = priors if combine == "corrected" else None
        first = product_of_experts(logits, normalize=normalize, priors=given)
        second = product_of_experts(logits[order], normalize=normalize, priors=None if given is None else given[order])
    torch.testing.assert_close(first, second)


def test_identical_experts_agree_with_one() -> None:
    logits = experts(1)
    repeated = logits.repeat(6, 1, 1)
    alone = logits[0].double().log_softmax(-1)
    assert torch.equal(product_of_experts(repeated).argmax(-1), alone.argmax(-1))
    torch.testing.assert_close(product_of_experts(repeated, normalize=True), alone)
    torch.testing.assert_close(mean_of_experts(repeated), alone)
    # Not so without: agreement counts as evidence.
    assert (product_of_experts(repeated).exp().amax(-1) >= alone.exp().amax(-1)).all()


def test_a_uniform_expert_changes_no_decision() -> None:
    logits = experts(3)
    joined = torch.cat([logits, torch.zeros(1, 50, 5)])
    torch.testing.assert_close(product_of_experts(joined), product_of_experts(logits))
    assert torch.equal(
        product_of_experts(joined, normalize=True).argmax(-1), product_of_experts(logits, normalize=True).argmax(-1)
    )


def test_one_expert_is_its_softmax() -> None:
    logits = experts(1)
    for combined in (product_of_experts(logits), product_of_experts(logits, normalize=True), mean_of_experts(logits)):
        torch.testing.assert_close(combined, logits[0].double().log_softmax(-1))


def test_probabilities_of_zero_and_one_stay_finite() -> None:
    certain = torch.eye(3).log()[:, None]  # three experts, each certain of a class of its own
    found = product_of_experts(certain)
    assert found.isfinite().all()
    torch.testing.assert_close(found.exp(), torch.full((1, 3), 1 / 3, dtype=torch.float64))
    # Two certain votes against one: each factor is 1e-12, not 0.
    vote = product_of_experts(torch.stack([certain[0], certain[0], certain[1]]))
    assert vote[0, 1].item() == pytest.approx(math.log(1e-12), rel=1e-6)
    assert product_of_experts(torch.full((2, 1, 3), 1e4).mul(torch.tensor([1.0, -1.0, 0.0]))).isfinite().all()
    assert product_of_experts(torch.full((2, 1, 3), math.nan)).isnan().all()


def test_dividing_by_the_priors_undoes_them() -> None:
    """Experts that are right under their own shares of classes become right under balanced classes."""
    points = torch.linspace(-4, 4, 41, dtype=torch.float64)[:, None]
    likelihoods = -0.5 * (points - torch.tensor([-1.0, 0.0, 2.0])) ** 2
    priors = torch.tensor([[0.8, 0.1, 0.1], [1 / 3, 1 / 3, 1 / 3], [0.05, 0.05, 0.9]], dtype=torch.float64)
    logits = likelihoods + priors.log()[:, None]
    balanced = likelihoods.log_softmax(-1)
    found = product_of_experts(logits, normalize=True, priors=priors)
    # 1e-12 as the least factor touches the far ends a little.
    torch.testing.assert_close(found.exp(), balanced.exp(), rtol=0, atol=1e-6)
    counts = priors * torch.tensor([[10.0], [300.0], [7.0]])
    torch.testing.assert_close(product_of_experts(logits, normalize=True, priors=counts), found)
    assert not torch.equal(product_of_experts(logits).argmax(-1), balanced.argmax(-1))


def test_equal_priors_change_nothing_and_an_unseen_class_stays_improbable() -> None:
    logits = experts(2)
    torch.testing.assert_close(product_of_experts(logits, priors=torch.ones(2, 5)), product_of_experts(logits))
    logits[..., 4] = -30
    seen = torch.tensor([1.0, 1, 1, 1, 0]).repeat(2, 1)
    found = product_of_experts(logits, priors=seen)
    assert found.isfinite().all()
    assert (found[:, 4] < -20).all()


def test_the_result_serves_as_logits() -> None:
    logits, labels = experts(3), torch.arange(50) % 5
    found = scores(product_of_experts(logits), labels, 5)
    assert found["acc"] == scores(product_of_experts(logits, normalize=True), labels, 5)["acc"]
    assert found["loss"] >= scores(product_of_experts(logits, normalize=True), labels, 5)["loss"]


def test_refusals() -> None:
    for wrong in (torch.zeros(3, 4), torch.zeros(0, 3, 4)):
        for combine in (product_of_experts, mean_of_experts):
            with pytest.raises(ValueError, match="logits must have shape"):
                combine(wrong)
    for priors in (torch.ones(5), torch.ones(2, 4), torch.tensor([[0.0] * 5, [1.0] * 5]), -torch.ones(2, 5)):
        with pytest.raises(ValueError, match="priors must"):
            product_of_experts(experts(2), priors=priors)
