"""Flatness on losses whose Hessian is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.metrics import flatness
from fl_lightning.metrics.flatness import Loss, MeanLoss, Params
from fl_lightning.rng import torch_generator

EIGENVALUES = (5.0, 3.0, 1.0, 0.5, 0.1, -9.0)  # the largest in magnitude is negative
CONVEX = (5.0, 3.0, 1.0, 0.5, 0.1, 0.02)


def matrix(eigenvalues: tuple[float, ...]) -> Tensor:
    """A symmetric matrix of these eigenvalues in a random basis."""
    draw = torch.randn(6, 6, generator=torch_generator(0, "basis"), dtype=torch.float64)
    basis = torch.linalg.qr(draw).Q
    return basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T


def point(scale: float = 1.0) -> dict[str, Tensor]:
    draw = torch.randn(6, generator=torch_generator(0, "point"), dtype=torch.float64) * scale
    return {"weight": draw[:4].view(2, 2), "bias": draw[4:]}


def quadratic(a: Tensor, slope: Tensor | None = None) -> Loss:
    """x'Ax / 2 + s'x over the flat parameters."""

    def loss(params: Params) -> Tensor:
        x = torch.cat([params["weight"].reshape(-1), params["bias"]])
        return x @ a @ x / 2 + (0 if slope is None else slope @ x)

    return loss


def draw(*owner: object) -> torch.Generator:
    return torch_generator(1, *owner)


# ---- derivatives


def test_gradient_and_hessian_vector_product_of_a_quadratic() -> None:
    a, x = matrix(EIGENVALUES), point()
    flat, along = flatness.flatten(x), flatness.random_direction(x, draw())
    value, gradient = flatness.value_and_gradient(quadratic(a), x)
    assert value == pytest.approx(float(flat @ a @ flat / 2), rel=1e-12)
    assert value == flatness.value(quadratic(a), x)
    torch.testing.assert_close(flatness.flatten(gradient), a @ flat)
    product = flatness.hessian_vector_product(quadratic(a), x, along)
    torch.testing.assert_close(flatness.flatten(product), a @ flatness.flatten(along))
    assert flatness.norm(along) == pytest.approx(1)
    restored = flatness.unflatten(flat, x)
    assert all(torch.equal(restored[name], value) for name, value in x.items())


def test_a_mean_of_parts_is_differentiated_as_the_whole() -> None:
    a, b, x = matrix(EIGENVALUES), matrix(CONVEX), point()
    parts = MeanLoss(((0.25, quadratic(a)), (0.75, quadratic(b))))
    whole, along = quadratic(0.25 * a + 0.75 * b), flatness.random_direction(x, draw())
    assert float(parts(x)) == pytest.approx(float(whole(x)))
    assert flatness.value(parts, x) == pytest.approx(flatness.value(whole, x))
    for one, other in (
        (flatness.gradient(parts, x), flatness.gradient(whole, x)),
        (flatness.hessian_vector_product(parts, x, along), flatness.hessian_vector_product(whole, x, along)),
    ):
        torch.testing.assert_close(one, other)


def test_a_linear_loss_has_no_curvature_and_an_unused_parameter_no_slope() -> None:
    x = point()
    loss: Loss = lambda params: params["bias"].sum()  # noqa: E731
    assert torch.equal(flatness.gradient(loss, x)["weight"], torch.zeros(2, 2, dtype=torch.float64))
    assert flatness.norm(flatness.hessian_vector_product(loss, x, x)) == 0


def test_second_derivatives_go_through_fused_attention() -> None:
    module = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, activation="gelu").double()
    rng, x = draw("attention"), {}
    for name, p in module.named_parameters():
        x[name] = torch.randn(p.shape, generator=rng, dtype=torch.float64) / 2
    inputs = torch.randn(2, 3, 4, generator=rng, dtype=torch.float64)
    loss: Loss = lambda params: functional_call(module, dict(params), (inputs,)).pow(3).mean()  # noqa: E731
    along, step = flatness.random_direction(x, rng), 1e-5
    ends = [flatness.flatten(flatness.gradient(loss, flatness.moved(x, along, s))) for s in (step, -step)]
    product = flatness.flatten(flatness.hessian_vector_product(loss, x, along))
    torch.testing.assert_close(product, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-7)


# ---- eigenvalues


def test_the_largest_eigenvalues_are_the_algebraically_largest() -> None:
    loss, x = quadratic(matrix(EIGENVALUES)), point()
    found = flatness.hessian_eigenvalues(loss, x, 3, generator=draw(), tolerance=1e-8)
    assert found.values == pytest.approx((5, 3, 1), rel=1e-7)
    assert found.converged
    assert found.products >= 3
    assert flatness.hessian_eigenvalues(loss, x, 3, generator=draw(), tolerance=1e-8) == found  # every draw is owned


def test_eigenvalues_of_a_network_are_those_of_its_whole_hessian() -> None:
    inputs = torch.randn(30, 3, generator=draw("inputs"))
    labels = torch.randint(2, (30,), generator=draw("labels"))
    shapes = {"first": (5, 3), "second": (2, 5)}
    x = {name: torch.randn(shape, generator=draw(name)) for name, shape in shapes.items()}  # float32

    def loss(params: Params) -> Tensor:
        return nn.functional.cross_entropy((inputs @ params["first"].T).relu() @ params["second"].T, labels)

    whole = torch.autograd.functional.hessian(lambda v: loss(flatness.unflatten(v, x)), flatness.flatten(x))
    expected = torch.linalg.eigvalsh(whole.double()).flip(0)[:4]
    found = flatness.hessian_eigenvalues(loss, x, 4, generator=draw())
    assert found.values == pytest.approx(expected.tolist(), rel=1e-3)


def test_what_did_not_converge_is_said() -> None:
    diagonal = 1 + torch.linspace(0, 1e-3, 400, dtype=torch.float64)
    found = flatness.hessian_eigenvalues(
        lambda p: (diagonal * p["x"] ** 2).sum() / 2,
        {"x": torch.ones(400, dtype=torch.float64)},
        5,
        generator=draw(),
        tolerance=1e-12,
        max_iterations=1,
    )
    assert not found.converged
    assert len(found.values) < 5


def test_a_hessian_that_is_zero_or_no_number() -> None:
    x = point()
    flat = quadratic(torch.zeros(6, 6, dtype=torch.float64))
    assert flatness.hessian_eigenvalues(flat, x, 2, generator=draw()) == flatness.Spectrum((0.0, 0.0), 1, True)
    broken = quadratic(torch.full((6, 6), math.nan, dtype=torch.float64))
    assert flatness.hessian_eigenvalues(broken, x, 2, generator=draw()) == flatness.Spectrum((), 1, False)


# ---- sharpness


def largest_increase(a: Tensor, gradient: Tensor, rho: float) -> float:
    """max of g'e + e'Ae / 2 over ||e|| = rho for a convex quadratic: e = (mu - A)^-1 g, mu > lambda_max."""
    values, basis = np.linalg.eigh(a.numpy())
    g = basis.T @ gradient.numpy()
    mu = brentq(lambda m: np.linalg.norm(g / (m - values)) - rho, values.max() + 1e-12, 1e6, xtol=1e-14)
    e = g / (mu - values)
    return float(g @ e + e @ (values * e) / 2)


@pytest.mark.parametrize("rho", [0.05, 0.1, 2.0])
def test_sharpness_of_a_quadratic(rho: float) -> None:
    a, x = matrix(CONVEX), point()
    expected = largest_increase(a, a @ flatness.flatten(x), rho)
    assert flatness.sharpness(quadratic(a), x, rho) == pytest.approx(expected, rel=2e-3)
    assert flatness.sharpness(quadratic(a), x, rho, steps=300) == pytest.approx(expected, rel=1e-9)
    assert flatness.sharpness(quadratic(a), x, rho, steps=1) <= expected


def test_sharpness_at_a_minimum_is_half_rho_squared_lambda() -> None:
    a, x = matrix(CONVEX), {name: torch.zeros_like(value) for name, value in point().items()}
    assert flatness.sharpness(quadratic(a), x, 0.1, steps=300, generator=draw()) == pytest.approx(0.5 * 0.1**2 * 5)
    assert flatness.sharpness(quadratic(a), x, 0.1) == 0  # without a draw the ascent has no way to go
    assert flatness.sharpness(quadratic(-a), x, 0.1, generator=draw()) == 0  # a maximum


def test_sharpness_of_a_linear_loss_is_rho_times_slope() -> None:
    slope = torch.arange(6, dtype=torch.float64)
    loss = quadratic(torch.zeros(6, 6, dtype=torch.float64), slope)
    assert flatness.sharpness(loss, point(), 0.2) == pytest.approx(0.2 * float(slope.norm()))


def test_sharpness_of_a_loss_that_is_no_number() -> None:
    assert math.isnan(flatness.sharpness(lambda p: p["bias"].sum() * math.nan, point(), 0.1))


def test_random_increase_is_half_rho_squared_mean_curvature() -> None:
    isotropic = 3 * torch.eye(6, dtype=torch.float64)
    found = flatness.random_increase(quadratic(isotropic), point(10), 0.1, 1, draw())  # whatever the slope
    assert found == pytest.approx(0.5 * 0.1**2 * 3)
    mean = flatness.random_increase(quadratic(matrix(CONVEX)), point(), 0.1, 3000, draw())
    assert mean == pytest.approx(0.5 * 0.1**2 * sum(CONVEX) / 6, rel=0.05)


# ---- candidates for a flatness distance


def test_perturbed_model_distance_by_hand() -> None:
    one = lambda *values: {"x": torch.tensor(values, dtype=torch.float64)}  # noqa: E731
    found = flatness.perturbed_model_distance(one(0, 0), one(0, 3), one(1, 0), one(-2, 0), 0.5)
    assert found == pytest.approx((1 - 0.5) ** 2 + 0.5**2)  # (0.5, 0) and (0, 0.5)
    assert flatness.perturbed_model_distance(one(1, 2), one(3, 4), one(1, 2), one(6, 8), 0.5) == pytest.approx(0)


def test_perturbation_inconsistency_is_the_mean_square_distance_of_perturbations() -> None:
    x, rho = point(), 0.05
    gradients = [flatness.random_direction(x, draw(i)) for i in range(5)]
    whole = flatness.random_direction(x, draw("whole"))
    gaps = [
        flatness.norm(flatness.moved(flatness.perturbation(g, rho), flatness.perturbation(whole, rho), -1)) ** 2
        for g in gradients
    ]
    cosines = [flatness.cosine(g, whole) for g in gradients]
    assert flatness.perturbation_inconsistency(cosines, rho) == pytest.approx(sum(gaps) / 5)
    assert flatness.perturbation_inconsistency([1.0, 1.0], rho) == 0
    assert flatness.perturbation_inconsistency([0.0], rho) == pytest.approx(2 * rho**2)
    assert flatness.perturbation_inconsistency([-1.0], rho) == pytest.approx(4 * rho**2)


def test_sharpness_gap_is_global_minus_mean_of_clients() -> None:
    assert flatness.sharpness_gap(0.5, [0.1, 0.3]) == pytest.approx(0.3)


def test_cosine() -> None:
    x = point()
    assert flatness.cosine(x, flatness.moved(x, x, 2.0)) == pytest.approx(1)
    assert flatness.cosine(x, flatness.moved(x, x, -3.0)) == pytest.approx(-1)
    assert math.isnan(flatness.cosine(x, {name: torch.zeros_like(value) for name, value in x.items()}))
    assert flatness.cosine({"bias": x["bias"]}, x) == pytest.approx(1)  # of the tensors of the first alone


# ---- pictures


def test_filters_of_a_direction_are_as_long_as_the_models() -> None:
    rng = draw("model")
    x = {name: torch.randn(shape, generator=rng) for name, shape in {"conv": (4, 3, 2, 2), "linear": (5, 7)}.items()}
    x |= {"bias": torch.ones(5), "dead": torch.zeros(2, 3)}
    direction = flatness.filter_normalised_direction(x, draw("direction"))
    for name in ("conv", "linear"):
        torch.testing.assert_close(direction[name].flatten(1).norm(dim=1), x[name].flatten(1).norm(dim=1))
    assert not direction["bias"].any()
    assert not direction["dead"].any()
    # The same draw for every model: a rescaled filter rescales its own part of the direction and nothing else.
    rescaled = {**x, "linear": x["linear"] * torch.tensor([2.0, 1, 1, 1, 1]).view(-1, 1)}
    other = flatness.filter_normalised_direction(rescaled, draw("direction"))
    torch.testing.assert_close(other["linear"][0], 2 * direction["linear"][0])
    assert torch.equal(other["linear"][1:], direction["linear"][1:])


def test_surface_and_slice_of_a_quadratic() -> None:
    a, x = matrix(CONVEX), point()
    first, second = (flatness.random_direction(x, draw(i)) for i in range(2))
    at = [-1.0, 0.0, 0.5]
    grid = flatness.loss_surface(quadratic(a), x, first, second, at)
    assert grid.shape == (3, 3)
    for i, u in enumerate(at):
        for j, v in enumerate(at):
            y = flatness.flatten(x) + u * flatness.flatten(first) + v * flatness.flatten(second)
            assert float(grid[i, j]) == pytest.approx(float(y @ a @ y / 2))
    long = {**{name: 7 * value for name, value in first.items()}, "other": torch.ones(3)}
    line = flatness.loss_slice(quadratic(a), x, long, at)
    torch.testing.assert_close(line, grid[:, 1])  # along the unit vector, whatever the length


# ---- errors


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda f, x: flatness.sharpness(f, x, 0.0), "rho is 0.0; it must be above 0"),
        (lambda f, x: flatness.sharpness(f, x, math.nan), "rho is nan; it must be above 0"),
        (lambda f, x: flatness.sharpness(f, x, 0.1, steps=0), "steps is 0; it must be at least 1"),
        (lambda f, x: flatness.random_increase(f, x, -1, 1, draw()), "rho is -1; it must be above 0"),
        (lambda f, x: flatness.random_increase(f, x, 1, 0, draw()), "directions is 0; it must be at least 1"),
        (lambda f, x: flatness.hessian_eigenvalues(f, x, 6, generator=draw()), r"k is 6; .* in \[1, 5\]"),
        (lambda f, x: flatness.hessian_eigenvalues(f, x, 0, generator=draw()), r"k is 0; .* in \[1, 5\]"),
        (
            lambda f, x: flatness.hessian_eigenvalues(f, x, 1, generator=draw(), tolerance=0),
            "tolerance 0 must be above 0",
        ),
        (lambda f, x: flatness.perturbation_inconsistency([1.0], 0), "rho is 0; it must be above 0"),
        (lambda f, x: flatness.perturbed_model_distance(x, x, x, x, 0), "rho is 0; it must be above 0"),
        (lambda f, x: flatness.loss_slice(f, x, flatness.moved(x, x, -1), [0.0]), "direction of a slice is zero"),
    ],
)
def test_wrong_arguments_are_named(call: Callable, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(quadratic(matrix(CONVEX)), point())
