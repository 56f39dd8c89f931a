"""How flat a loss is around a model: Hessian eigenvalues, sharpness, distances of flat regions, pictures of the surface.

Functions of a loss over named parameters. Nothing here knows data, a task or a federation. Every derivative is exact; a loss
that is a `MeanLoss` is differentiated one part at a time, so that memory holds the graph of one part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Params = Mapping[str, Tensor]
Loss = Callable[[Params], Tensor]


@dataclass(frozen=True)
class MeanLoss:
    """A weighted sum of losses.

    Attributes:
        parts: (weight, loss) of each part; weights sum to 1 where the sum is a mean.
    """

    parts: tuple[tuple[float, Loss], ...]

    def __call__(self, params: Params) -> Tensor:
        return torch.stack([weight * part(params) for weight, part in self.parts]).sum()


@dataclass(frozen=True)
class Spectrum:
    """The top of a Hessian's spectrum.

    Attributes:
        values: Largest eigenvalues by algebraic value, descending; those that converged.
        products: Hessian-vector products that were taken.
        converged: Whether all that were asked for converged.
    """

    values: tuple[float, ...]
    products: int
    converged: bool


# ---- vectors of named tensors


def dot(a: Params, b: Params) -> float:
    """Inner product over the tensors of ``a``, summed in float64. ``b`` may hold more."""
    return sum(float((value.detach().double() * b[name].detach().double()).sum()) for name, value in a.items())


def norm(a: Params) -> float:
    """Euclidean norm over all tensors together."""
    return math.sqrt(dot(a, a))


def cosine(a: Params, b: Params) -> float:
    """Cosine of the angle between ``a`` and the same tensors of ``b``, in [-1, 1]; nan where one of them is zero."""
    lengths = norm(a) * norm({name: b[name] for name in a})
    return dot(a, b) / lengths if lengths > 0 else math.nan


def moved(params: Params, direction: Params, by: float = 1.0) -> dict[str, Tensor]:
    """params + by * direction."""
    return {name: value.detach() + by * direction[name] for name, value in params.items()}


def scaled_to(direction: Params, length: float) -> dict[str, Tensor]:
    """The direction at a given length, at least 0; zero stays zero."""
    factor = length / norm(direction) if norm(direction) > 0 else 0.0
    return {name: value * factor for name, value in direction.items()}


def random_direction(params: Params, generator: torch.Generator) -> dict[str, Tensor]:
    """A direction uniform on the unit sphere, drawn on the generator's device."""
    drawn = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device) for n, p in params.items()}
    return scaled_to(drawn, 1.0)


def flatten(tensors: Params) -> Tensor:
    """All tensors end to end, (P,)."""
    return torch.cat([value.detach().reshape(-1) for value in tensors.values()])


def unflatten(vector: Tensor, like: Params) -> dict[str, Tensor]:
    """The inverse of `flatten`, with the names, shapes, dtypes and devices of ``like``."""
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.view_as(value).to(value) for part, (name, value) in zip(parts, like.items(), strict=True)}


# ---- derivatives


def _parts(loss: Loss) -> tuple[tuple[float, Loss], ...]:
    return loss.parts if isinstance(loss, MeanLoss) else ((1.0, loss),)


@torch.no_grad()
def value(loss: Loss, params: Params) -> float:
    """The loss at a point."""
    return sum(weight * float(part(params)) for weight, part in _parts(loss))


def value_and_gradient(loss: Loss, params: Params) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradient at a point."""
    total, sums = 0.0, {name: torch.zeros_like(p) for name, p in params.items()}
    for weight, part in _parts(loss):
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        found = part(leaves)
        total += weight * float(found.detach())
        for name, grad in zip(
            leaves, torch.autograd.grad(found, list(leaves.values()), allow_unused=True), strict=True
        ):
            if grad is not None:
                sums[name] += weight * grad
    return total, sums


def gradient(loss: Loss, params: Params) -> dict[str, Tensor]:
    """The gradient of the loss at a point."""
    return value_and_gradient(loss, params)[1]


def hessian_vector_product(loss: Loss, params: Params, vector: Params) -> dict[str, Tensor]:
    """The Hessian of the loss at a point times a vector, by differentiating twice in reverse (Pearlmutter, 1994)."""
    names, point = list(params), tuple(p.detach() for p in params.values())
    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    for weight, part in _parts(loss):

        def of_tuple(*values: Tensor, part: Loss = part) -> Tensor:
            return part(dict(zip(names, values, strict=True)))

        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            _, products = torch.autograd.functional.vhp(of_tuple, point, tuple(vector[name] for name in names))
        for name, product in zip(names, products, strict=True):
            sums[name] += weight * product
    return sums


def hessian_eigenvalues(
    loss: Loss,
    params: Params,
    k: int = 1,
    *,
    generator: torch.Generator,
    tolerance: float = 1e-4,
    max_iterations: int = 100,
) -> Spectrum:
    """The k largest eigenvalues of the Hessian by implicitly restarted Lanczos (ARPACK through SciPy).

    Largest by algebraic value: near a saddle, plain power iteration would return the eigenvalue of largest magnitude, which
    may be negative.

    Args:
        loss: The loss, twice differentiable almost everywhere.
        params: The point; P parameters in all.
        k: Number of eigenvalues, in [1, P - 1].
        generator: Draws the starting vector (and ARPACK's restarts).
        tolerance: Relative accuracy of an eigenvalue, above 0. Products in float32 allow about 1e-5.
        max_iterations: Restarts before giving up, at least 1; a restart takes about max(2k, 20) products.

    Raises:
        ValueError: An argument is out of range.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    size = sum(p.numel() for p in params.values())
    if not 1 <= k <= size - 1:
        raise ValueError(f"k is {k}; with {size} parameters it must be in [1, {size - 1}]")
    if tolerance <= 0 or max_iterations < 1:
        raise ValueError(f"tolerance {tolerance} must be above 0, max_iterations {max_iterations} at least 1")
    products = 0

    def product(vector: np.ndarray) -> np.ndarray:
        nonlocal products
        products += 1
        along = unflatten(torch.from_numpy(np.asarray(vector, dtype=np.float64).reshape(-1).copy()), params)
        return flatten(hessian_vector_product(loss, params, along)).double().cpu().numpy()

    start = torch.randn(size, generator=generator, dtype=torch.float64).numpy()
    rng = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    first = product(start)
    if not first.any():  # of a random vector: the Hessian is zero, which ARPACK takes for an error
        return Spectrum((0.0,) * k, products, True)
    if not np.isfinite(first).all():
        return Spectrum((), products, False)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    try:
        found = eigsh(
            operator,
            k,
            which="LA",
            v0=start,
            tol=tolerance,
            maxiter=max_iterations,
            return_eigenvectors=False,
            rng=rng,
        )
        converged = True
    except ArpackNoConvergence as error:
        found, converged = error.eigenvalues, False
    return Spectrum(tuple(sorted(map(float, found), reverse=True)), products, converged)


# ---- sharpness


def sharpness(
    loss: Loss, params: Params, rho: float, steps: int = 10, generator: torch.Generator | None = None
) -> float:
    """S_rho = max over ||e|| <= rho of loss(params + e) - loss(params), from below, by projected gradient ascent.

    The first step lands where sharpness-aware minimisation perturbs to (Foret et al., 2021, eq. 2); each step has length
    rho, along the normalised gradient, and is projected onto the ball. The best point of the way counts.

    Args:
        loss: The loss.
        params: The point.
        rho: Radius of the ball, above 0; the norm is over all parameters together.
        steps: Ascent steps, at least 1.
        generator: Draws a direction where the gradient is exactly zero; None: the ascent ends there.

    Returns:
        The increase, at least 0; not a finite number where the loss is none.
    """
    _positive(rho=rho)
    _at_least_one(steps=steps)
    offset = {name: torch.zeros_like(p) for name, p in params.items()}
    start, uphill = value_and_gradient(loss, params)
    best = 0.0
    for _ in range(steps):
        if norm(uphill) == 0:
            if generator is None:
                break
            uphill = random_direction(params, generator)
        offset = moved(offset, scaled_to(uphill, rho))
        if norm(offset) > rho:
            offset = scaled_to(offset, rho)
        here, uphill = value_and_gradient(loss, moved(params, offset))
        if not math.isfinite(here):
            return here - start
        best = max(best, here - start)
    return best


def random_increase(loss: Loss, params: Params, rho: float, directions: int, generator: torch.Generator) -> float:
    """Mean of loss(params + rho u) - loss(params) over random unit directions u.

    Every direction is taken both ways: the mean is the same and the slope, whose share of it would be pure noise, cancels.

    Args:
        loss: The loss.
        params: The point.
        rho: Length of the step, above 0.
        directions: Number of directions, at least 1.
        generator: Draws them.
    """
    _positive(rho=rho)
    _at_least_one(directions=directions)
    start, increases = value(loss, params), []
    for _ in range(directions):
        direction = random_direction(params, generator)
        increases += [value(loss, moved(params, direction, by)) - start for by in (rho, -rho)]
    return sum(increases) / len(increases)


# ---- candidates for a flatness distance
#
# FedNSAM's "flatness distance" says how far the flat regions of the clients' and of the global model lie apart. Its formula
# was not found. These are three candidates; none of them is the paper's, and none should be called so.


def perturbation(gradient: Params, rho: float) -> dict[str, Tensor]:
    """rho g / ||g||, the perturbation of sharpness-aware minimisation (Foret et al., 2021, eq. 2); zero where g is."""
    return scaled_to(gradient, rho)


def perturbed_model_distance(
    params: Params, gradient: Params, client_params: Params, client_gradient: Params, rho: float
) -> float:
    """Candidate FD1 for one client: ||(w_i + d_i) - (w + d)||^2, d the perturbation of length rho at each model.

    FD1 is its mean over clients. A candidate of ours, not the paper's formula.

    Args:
        params: Global model w.
        gradient: Gradient of the global loss at w.
        client_params: Client's model w_i.
        client_gradient: Gradient of the client's loss at w_i.
        rho: Length of the perturbations, above 0.
    """
    _positive(rho=rho)
    there = moved(client_params, perturbation(client_gradient, rho))
    return norm(moved(there, moved(params, perturbation(gradient, rho)), -1.0)) ** 2


def perturbation_inconsistency(cosines: Sequence[float], rho: float) -> float:
    """Candidate FD2: mean over clients of ||d_i - d||^2 = rho^2 (2 - 2 mean cos), both perturbations at the global model.

    A candidate of ours, not the paper's formula.

    Args:
        cosines: Cosine of each client's gradient with the global gradient, both at the global model, in [-1, 1].
        rho: Length of the perturbations, above 0.

    Returns:
        In [0, 4 rho^2]; 0 where all clients agree.
    """
    _positive(rho=rho)
    return rho**2 * (2 - 2 * sum(cosines) / len(cosines))


def sharpness_gap(of_global: float, of_clients: Sequence[float]) -> float:
    """Candidate FD3: S_rho(w; D) - mean_i S_rho(w_i; D_i), by which the global model is sharper than the clients'.

    A candidate of ours, not the paper's formula.

    Args:
        of_global: Sharpness of the global model on all clients' data.
        of_clients: Sharpness of each client's model on its own data.
    """
    return of_global - sum(of_clients) / len(of_clients)


# ---- pictures


def filter_normalised_direction(params: Params, generator: torch.Generator) -> dict[str, Tensor]:
    """A random direction whose every filter is as long as the model's (Li et al., 2018, section 4).

    A filter is a slice of a tensor along its first dimension: a convolution's output channel, a row of a linear layer.
    Tensors of fewer than two dimensions (biases, normalisation) keep still, as with the authors' option
    ``ignore='biasbn'``. The draw does not depend on the values of ``params``, so one seed gives all models the same draw.
    """
    direction = {}
    for name, p in params.items():
        if p.dim() < 2:
            direction[name] = torch.zeros_like(p)
            continue
        drawn = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
        lengths, own = (torch.linalg.vector_norm(t.detach().flatten(1), dim=1) for t in (drawn, p))
        direction[name] = drawn * (own / lengths.clamp_min(1e-12)).view(-1, *[1] * (p.dim() - 1))
    return direction


def loss_surface(loss: Loss, params: Params, first: Params, second: Params, coordinates: Iterable[float]) -> Tensor:
    """The loss on a square grid: entry [i, j] is the loss at params + x_i first + x_j second.

    Args:
        loss: The loss.
        params: The centre.
        first: Direction of the rows.
        second: Direction of the columns.
        coordinates: The n positions x along each direction.

    Returns:
        (n, n) float64.
    """
    at = list(coordinates)
    rows = [[value(loss, moved(moved(params, first, x), second, y)) for y in at] for x in at]
    return torch.tensor(rows, dtype=torch.float64)


def loss_slice(loss: Loss, params: Params, direction: Params, distances: Iterable[float]) -> Tensor:
    """The loss along a line: entry i is the loss at params + t_i u, u the unit vector along the direction.

    Raises:
        ValueError: The direction is zero.
    """
    unit = scaled_to({name: direction[name] for name in params}, 1.0)
    if norm(unit) == 0:
        raise ValueError("the direction of a slice is zero; it must have a length above 0")
    return torch.tensor([value(loss, moved(params, unit, t)) for t in distances], dtype=torch.float64)


def _positive(**values: float) -> None:
    for name, given in values.items():
        if not given > 0:
            raise ValueError(f"{name} is {given}; it must be above 0")


def _at_least_one(**values: int) -> None:
    for name, given in values.items():
        if given < 1:
            raise ValueError(f"{name} is {given}; it must be at least 1")
