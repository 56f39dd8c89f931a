"""Distances of distributions against torchmetrics, numpy and values by hand; memorisation with both controls."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchmetrics.image.mifid import MemorizationInformedFrechetInceptionDistance

from fl_lightning.metrics import generation
from fl_lightning.metrics.generation import (
    copy_rate,
    feature_scores,
    features,
    frechet_distance,
    kid,
    memorisation,
    mifid,
    nearest_distances,
    nearest_neighbour_ratio,
    training_distances,
)
from fl_lightning.rng import torch_generator

torch.set_num_threads(1)


def normal(*shape: int, owner: str = "x") -> Tensor:
    return torch.randn(*shape, generator=torch_generator(0, owner, *shape), dtype=torch.float64)


# ---- distributions


def test_kid_by_hand() -> None:
    real, generated = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]])
    # k(x, y) = (xy + 1)³: real pair 1; generated pair 27; across 1, 1, 8, 27.
    assert kid(generated, real) == pytest.approx(1 + 27 - 2 * (1 + 1 + 8 + 27) / 4)


def test_kid_is_the_unbiased_estimate_on_everything_where_a_subset_is_everything() -> None:
    generated, real = normal(40, 5) + 0.5, normal(40, 5, owner="y")

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / 5 + 1) ** 3

    def within(a: Tensor) -> Tensor:
        return (kernel(a, a).sum() - kernel(a, a).diagonal().sum()) / (40 * 39)

    expected = within(real) + within(generated) - 2 * kernel(real, generated).mean()
    assert kid(generated, real) == pytest.approx(expected.item(), rel=1e-10)


def test_kid_draws_its_subsets_from_its_seed_alone() -> None:
    generated, real = normal(50, 4), normal(60, 4, owner="y")
    before = torch.get_rng_state()
    first = kid(generated, real, seed=1, subsets=5, subset_size=20)
    assert torch.equal(before, torch.get_rng_state())
    assert first == kid(generated, real, seed=1, subsets=5, subset_size=20)
    assert first != kid(generated, real, seed=2, subsets=5, subset_size=20)
    assert abs(kid(generated, real)) < 0.1 < kid(generated + 1, real)


def test_frechet_distance_is_the_formula() -> None:
    generated, real = normal(80, 4) * torch.tensor([1.0, 2.0, 0.5, 1.5]) + 0.3, normal(90, 4, owner="y")
    first, second = np.cov(generated.numpy().T), np.cov(real.numpy().T)
    mean = ((generated.mean(0) - real.mean(0)) ** 2).sum().item()
    expected = mean + np.trace(first + second - 2 * sqrtm(first @ second).real)
    assert frechet_distance(generated, real) == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(real, real) == pytest.approx(0, abs=1e-6)


def test_frechet_distance_by_hand() -> None:
    # Means 1 and 4, standard deviations √2 and √8: 9 + 2 + 8 − 2·√16.
    real, generated = torch.tensor([[0.0], [2.0]]), torch.tensor([[2.0], [6.0]])
    assert frechet_distance(generated, real) == pytest.approx(11.0)


def test_too_few_images_for_a_frechet_distance() -> None:
    with pytest.raises(ValueError, match="4 features needs more than 4 images each, got 4"):
        frechet_distance(normal(4, 4), normal(9, 4))
    assert frechet_distance(normal(5, 4), normal(5, 4, owner="y")) > 0


def torchmetrics_mifid(real: Tensor, fake: Tensor) -> float:
    metric = MemorizationInformedFrechetInceptionDistance(nn.Identity())
    metric.update(real, real=True)
    metric.update(fake, real=False)
    return metric.compute().item()


def test_mifid_takes_the_minimum_for_each_generated_image() -> None:
    train = normal(60, 3)
    generated = train[:6].repeat(5, 1) * (1 + 0.02 * normal(30, 3, owner="noise"))
    ours = mifid(generated, train)
    # torchmetrics' minimum is for each image passed as real: with the sets exchanged it is the published definition.
    assert ours == pytest.approx(torchmetrics_mifid(generated, train), rel=1e-6)
    # As it is meant to be called, it does not see that few images were copied many times.
    assert ours > 5 * torchmetrics_mifid(train, generated)
    assert ours > 5 * frechet_distance(generated, train)


def test_mifid_without_memorisation_is_the_frechet_distance_and_infinite_for_a_replay() -> None:
    train = normal(20, 12)
    generated = normal(20, 12, owner="y")
    assert mifid(generated, train) == frechet_distance(generated, train)
    assert mifid(train[:15], train) == math.inf
    assert mifid(train.flip(0), train) == math.inf
    with pytest.raises(ValueError, match=r"threshold must lie in \(0, 1\], got 0"):
        mifid(generated, train, threshold=0)


def test_mifid_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    train = normal(60, 3)
    generated = train[:20] + 0.01 * normal(20, 3, owner="y")
    whole = mifid(generated, train)
    monkeypatch.setattr(generation, "BLOCK_VALUES", 60 * 7)
    assert mifid(generated, train) == pytest.approx(whole, rel=1e-12)


def test_features_are_taken_in_evaluation_mode_and_leave_the_network_alone() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    network[2].eval()
    images = torch.rand(10, 3, 2, 2, generator=torch_generator(0))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = features(network, images, batch_size=3)
    assert (found.shape, found.dtype, found.requires_grad) == ((10, 4), torch.float64, False)
    torch.testing.assert_close(found, features(network, images), rtol=1e-5, atol=1e-6)
    assert [module.training for module in network.modules()] == [True, True, True, False, True]
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_names_of_scores_carry_the_features() -> None:
    images, others = torch.rand(20, 1, 2, 2, generator=torch_generator(0)), torch.rand(9, 1, 2, 2)
    found = feature_scores(others, images, nn.Flatten(), "pixels", measures=("KID", "FD", "MiFID"))
    assert found.keys() == {"KID(pixels)", "FD(pixels)", "MiFID(pixels)"}
    assert found["FD(pixels)"] == frechet_distance(others.flatten(1), images.flatten(1))
    assert feature_scores(others[:3], images, nn.Flatten(), "p", measures=["KID"]).keys() == {"KID(p)"}
    with pytest.raises(ValueError, match="more than 4 images"):
        feature_scores(others[:3], images, nn.Flatten(), "p")
    with pytest.raises(ValueError, match=r"got \['FID'\]"):
        feature_scores(others, images, nn.Flatten(), "p", measures=["FID"])


@pytest.mark.parametrize("measure", [kid, frechet_distance, mifid])
def test_shapes_that_do_not_fit(measure: object) -> None:
    for generated, real in ((normal(5, 2), normal(5, 3)), (normal(5), normal(5)), (normal(1, 2), normal(5, 2))):
        with pytest.raises(ValueError, match="features"):
            measure(generated, real)  # type: ignore[operator]


# ---- memorisation


def digits(label: int) -> tuple[Tensor, Tensor]:
    """Four fifths and one fifth of one digit's images, (N, 1, 8, 8) in [0, 1]."""
    images, labels = load_digits(return_X_y=True)
    found = torch.from_numpy(images[labels == label]).float().div(16).view(-1, 1, 8, 8)
    order = torch.randperm(len(found), generator=torch_generator(0, label))
    return found[order[: 4 * len(found) // 5]], found[order[4 * len(found) // 5 :]]


@pytest.mark.parametrize("label", [0, 1, 8])
def test_controls_of_memorisation(label: int) -> None:
    train, held_out = digits(label)
    replay = train[torch.randint(len(train), (200,), generator=torch_generator(1))]
    assert nearest_neighbour_ratio(replay, train, held_out) == 0
    assert copy_rate(replay, train, held_out) == 1
    noise = torch.randn(200, 1, 8, 8, generator=torch_generator(2))
    gaussian = (train.mean(0) + train.std(0) * noise).clamp(0, 1)
    assert nearest_neighbour_ratio(gaussian, train, held_out) >= 1
    assert copy_rate(gaussian, train, held_out) <= 0.02


def test_honest_samples_have_ratio_one_and_a_copy_rate_of_the_percentile() -> None:
    train, held_out, honest = normal(500, 6).split(500)[0], normal(8000, 6, owner="h"), normal(8000, 6, owner="g")
    found = training_distances(honest, train, held_out)
    assert found.ratio == pytest.approx(1, abs=0.03)
    assert found.copy_rate() == pytest.approx(0.01, abs=0.005)
    assert found.copy_rate(20) == pytest.approx(0.2, abs=0.02)
    # A copy in every tenth image shows in the rate, and hardly in the ratio.
    some = torch.cat([honest[:7200], train.repeat(2, 1)[:800]])
    assert copy_rate(some, train, held_out) == pytest.approx(0.1 + 0.009, abs=0.005)


def test_a_replay_is_found_though_held_out_images_are_duplicates_of_training_images() -> None:
    train, held_out = digits(0)
    both = torch.cat([held_out, train[:5]])  # so that the first percentile is 0
    assert copy_rate(train, train, both) == 1
    assert copy_rate(train * 0.9, train, both) == 0


def test_comparing_with_held_out_images_would_not_find_the_copies() -> None:
    train, held_out = digits(3)
    half = len(held_out) // 2
    assert copy_rate(train, held_out[:half], held_out[half:]) < 0.2
    assert copy_rate(train, train, held_out) == 1


def test_nearest_distances_in_blocks_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, references = normal(23, 2, 3).float(), normal(37, 2, 3, owner="y").float()
    queries[5] = references[30]
    plain = (queries.flatten(1)[:, None] - references.flatten(1)).double().norm(dim=-1).min(1).values
    whole = nearest_distances(queries, references)
    monkeypatch.setattr(generation, "BLOCK_VALUES", 6 * 4)
    for found in (whole, nearest_distances(queries, references)):
        assert (found.dtype, found[5].item()) == (torch.float64, 0)
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=0)
    assert nearest_distances(queries[:0], references).shape == (0,)


def test_memorisation_class_by_class() -> None:
    sets = {label: digits(label) for label in (0, 1)}
    train = (torch.cat([sets[0][0], sets[1][0]]), torch.tensor([0] * len(sets[0][0]) + [1] * len(sets[1][0])))
    held_out = (torch.cat([sets[0][1], sets[1][1]]), torch.tensor([0] * len(sets[0][1]) + [1] * len(sets[1][1])))
    # Class 0 is replayed; class 1 draws the training images of class 0, which are no copies of *its* training images.
    generated = (sets[0][0][:20].repeat(2, 1, 1, 1), torch.tensor([0] * 20 + [1] * 20))
    found = memorisation(generated, train, held_out, ["zero", "one", "two"])
    assert (found["nn_ratio/zero"], found["copy_rate/zero"], found["nn_distance/generated/zero"]) == (0, 1, 0)
    assert found["nn_ratio/one"] > 1
    assert found["copy_rate/one"] == 0
    assert found["nn_ratio"] == pytest.approx(found["nn_ratio/one"] / 2)
    assert found["copy_rate"] == 0.5
    one = found["nn_distance/generated/one"] / found["nn_distance/held_out/one"]
    assert found["nn_ratio/one"] == pytest.approx(one)
    assert not [key for key in found if "two" in key]
    with pytest.raises(ValueError, match="none of the 1 classes"):
        memorisation((generated[0], torch.ones(40)), train, held_out, ["zero"])


def test_refusals_of_the_meters_of_memorisation() -> None:
    with pytest.raises(ValueError, match="held-out"):
        training_distances(normal(3, 2), normal(3, 2), normal(0, 2))
    with pytest.raises(ValueError, match="shapes"):
        nearest_distances(normal(3, 2), normal(3, 3))
    with pytest.raises(ValueError, match=r"\[0, 100\], got 101"):
        copy_rate(normal(3, 2), normal(3, 2), normal(3, 2), percentile=101)
    assert math.isnan(nearest_neighbour_ratio(normal(3, 2), normal(3, 2), normal(3, 2)))


def test_nearest_others_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "BLOCK_ROWS", 7)
    points = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    points[20] = points[3]  # a copy is an other one
    expected = ((points[:, None] - points).double().norm(dim=2) + torch.eye(30) * 1e9).amin(1)
    found = generation.nearest_distances(points, points, others=True)
    assert torch.allclose(found, expected, atol=1e-6)
    assert found[3] == found[20] == 0
    monkeypatch.setattr(generation, "OWN", 10)
    apart = generation.training_distances(points[:4] + 1, points).held_out
    assert torch.allclose(apart, expected[:10], atol=1e-6)
    with pytest.raises(ValueError, match="a generated and two training images are needed, got 1 and 1"):
        generation.training_distances(points[:1], points[:1])
