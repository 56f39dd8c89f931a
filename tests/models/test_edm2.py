"""The EDM2 network: preconditioning identities, magnitudes, forced weight normalisation, sizes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.losses.edm import EDMLoss
from fl_lightning.models.edm2 import (
    SILU_GAIN,
    DiffusersUNet,
    EDM2UNet,
    MPConv,
    MPFourier,
    Precond,
    mp_concat,
    mp_silu,
    mp_sum,
    normalise,
    normalise_weights,
)
from fl_lightning.rng import owned_global_rng, torch_generator

SHAPE = (1, 8, 8)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch_generator(seed, *shape), dtype=dtype)


def made(*args: object, kind: type[nn.Module] = EDM2UNet, seed: int = 0, **options: object) -> nn.Module:
    with owned_global_rng(seed):
        return kind(*(args or (SHAPE,)), **options)


def drawn_loss() -> EDMLoss:
    with owned_global_rng(1):
        return EDMLoss()


def opened(network: nn.Module) -> nn.Module:
    """With gains that are not 0, as after some training."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 0:
                parameter.fill_(0.7)
    return network


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


class Constant(nn.Module):
    """F = 1 whatever the input."""

    def forward(self, x: Tensor, c_noise: Tensor, class_labels: Tensor | None = None) -> Tensor:
        return torch.ones_like(x)


def test_preconditioning_identities() -> None:
    sigma = torch.logspace(-3, 1.7, 50, dtype=torch.float64)
    c_skip, c_out, c_in, c_noise = Precond(Constant(), 0.5).coefficients(sigma)
    for left, right in (
        (c_in**2 * (sigma**2 + 0.25), torch.ones_like(sigma)),
        (EDMLoss().weight(sigma) * c_out**2, torch.ones_like(sigma)),
        (c_skip**2 * (sigma**2 + 0.25) + c_out**2, torch.full_like(sigma, 0.25)),
        (c_noise.mul(4).exp(), sigma),
    ):
        assert torch.allclose(left, right, rtol=1e-12, atol=1e-12)


def test_limits_of_little_and_much_noise() -> None:
    denoiser = Precond(opened(made(dropout=0.0))).eval()
    x = normal(4, *SHAPE)
    near = denoiser(x, torch.tensor(1e-4))
    assert (near - x).abs().max() < 1e-3
    far = denoiser(x * 1e4, torch.tensor(1e4))
    assert far.abs().max() < 10
    # c_skip vanishes and c_out is sigma_data
    assert torch.allclose(Precond(Constant())(x * 1e4, torch.tensor(1e4)), torch.tensor(0.5), atol=1e-3)


def test_at_initialisation_only_the_skip_speaks_and_the_gain_learns() -> None:
    denoiser, loss = Precond(made()), drawn_loss()
    x, sigma = normal(4, *SHAPE), torch.tensor([0.1, 0.5, 2.0, 40.0])
    c_skip = denoiser.coefficients(sigma)[0]
    assert torch.equal(denoiser(x, sigma), c_skip.view(-1, 1, 1, 1) * x)
    loss(denoiser, x, generator=torch_generator(0)).backward()
    assert denoiser.backbone.output_gain.grad.abs() > 1e-3


def test_magnitudes_are_kept() -> None:
    x, y = normal(4096, 64), normal(4096, 64, seed=1)
    layer = made(64, 64, kind=MPConv)
    assert rms(layer(x)) == pytest.approx(1, abs=0.01)
    assert rms(mp_sum(x, y, 0.3)) == pytest.approx(1, abs=0.01)
    assert rms(mp_silu(x)) == pytest.approx(1, abs=0.01)
    joined = mp_concat(x[:, :16], y)
    assert rms(joined) == pytest.approx(1, abs=0.01)
    energy = joined.square().sum(0)
    assert float(energy[:16].sum() / energy.sum()) == pytest.approx(0.5, abs=0.01)
    assert rms(made(128, kind=MPFourier)(normal(4096))) == pytest.approx(1, abs=0.05)
    images = normal(64, 16, 8, 8)
    assert rms(made(16, 32, 3, kind=MPConv)(images)[..., 1:-1, 1:-1]) == pytest.approx(1, abs=0.05)
    assert torch.allclose(normalise(3 * images, dim=1).square().mean(1), torch.ones(64, 8, 8), atol=1e-3)


def test_a_layer_is_what_its_equation_says() -> None:
    layer, x = made(5, 7, 3, kind=MPConv).double(), normal(2, 5, 6, 6, dtype=torch.float64)
    weight = layer.weight / (layer.weight.flatten(1).square().mean(1).sqrt().view(-1, 1, 1, 1) + 1e-4)
    expected = torch.nn.functional.conv2d(x, weight, padding=1) * 1.5 / 45**0.5
    assert torch.allclose(layer(x, 1.5), expected, rtol=1e-12)
    with torch.no_grad():
        layer.weight.mul_(3)  # rows count by direction
    assert torch.allclose(layer(x, 1.5), expected, rtol=1e-3)
    draw = torch.nn.functional.silu(normal(1_000_000))
    assert rms(draw) * SILU_GAIN == pytest.approx(1, abs=0.005)


def test_weights_are_normalised_by_the_call_and_never_by_a_forward_pass() -> None:
    network = opened(made(dropout=0.0, attention=(4,), head=16))
    with torch.no_grad():
        for layer in network.modules():
            if isinstance(layer, MPConv):
                layer.weight.mul_(1.7)
    before = {name: p.clone() for name, p in network.named_parameters()}
    x, c = normal(3, *SHAPE), torch.tensor([-1.0, 0.0, 1.0])
    for mode in (True, False):
        out = network.train(mode)(x, c)
        assert all(torch.equal(p, before[name]) for name, p in network.named_parameters())
    network.normalise_weights()
    for layer in network.modules():
        if isinstance(layer, MPConv):
            assert torch.allclose(layer.weight.flatten(1).square().mean(1), torch.ones(()), atol=1e-3)
    assert torch.allclose(network(x, c), out, atol=1e-3)  # the same function
    assert network.output_gain == 0.7  # gains are no rows


def test_counts_of_parameters() -> None:
    # FederatedFactory's published networks have 50,700,325 and 12,218,469, of which u(sigma) has 128.
    with torch.device("meta"):
        large = EDM2UNet((3, 32, 32), 0, 128, (1, 2, 2, 2), 3, (16, 8), 2)
        isic = EDM2UNet((3, 128, 128), 0, 64, (1, 2, 2, 2), 3, (16,), 2)
    assert parameters(large) == 50_700_325 - 128
    assert parameters(isic) == 12_218_469 - 128
    with torch.device("meta"):
        small = EDMLoss(features=16)  # the pilot's u(sigma)
    assert parameters(made()) + parameters(small) == 144_842
    assert parameters(made(kind=DiffusersUNet)) == 159_697


def test_fourier_features_are_the_builds_and_are_saved() -> None:
    a, b, other = made(), made(), made(seed=1)
    assert torch.equal(a.fourier.frequencies, b.fourier.frequencies)
    assert not torch.equal(a.fourier.frequencies, other.fourier.frequencies)
    assert {"fourier.frequencies", "fourier.phases"} <= a.state_dict().keys()


@pytest.mark.parametrize("kind", [EDM2UNet, DiffusersUNet])
def test_conditioning_on_classes(kind: type[nn.Module]) -> None:
    network = opened(made((2, 8, 12), 3, kind=kind, dropout=0.0, attention=(4,))).eval()
    x, c = normal(1, 2, 8, 12).expand(3, -1, -1, -1), torch.zeros(3)
    out = network(x, c, torch.tensor([0, 1, 1]))
    assert out.shape == (3, 2, 8, 12)
    assert (out[0] - out[1]).abs().max() > 1e-3
    assert torch.allclose(out[1], out[2])
    with pytest.raises(ValueError, match=r"class_labels is None; it must be .* \[0, 3\)"):
        network(x, c)
    with pytest.raises(ValueError, match="unconditional"):
        made(kind=kind)(normal(1, *SHAPE), torch.zeros(1), torch.zeros(1, dtype=torch.long))


def test_attention_by_hand() -> None:
    block = opened(made(dropout=0.0, attention=(4,), head=16)).double().decoder[0]
    x = normal(2, 32, 4, 4, dtype=torch.float64)
    qkv = normalise(block.qkv(x).reshape(2, 3, 2, 16, 16), dim=3)
    scores = torch.einsum("nhcq,nhck->nhqk", qkv[:, 0], qkv[:, 1]) / 4
    mixed = torch.einsum("nhqk,nhck->nhcq", scores.softmax(-1), qkv[:, 2]).reshape(2, 32, 4, 4)
    assert torch.allclose(block._attend(x), block.project(mixed), rtol=1e-6, atol=1e-9)


def test_diffusers_time_runs_from_0_to_1000() -> None:
    seen: list[Tensor] = []
    network = made(kind=DiffusersUNet)
    network.unet.time_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    Precond(network)(normal(2, *SHAPE), torch.tensor([0.002, 80.0]))
    assert torch.allclose(seen[0], torch.tensor([0.0, 1000.0]), atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (EDM2UNet, {"multipliers": (1, 2, 2, 2, 2)}, r"\(1, 8, 8\); with 5 levels .* divisible by 16"),
        (DiffusersUNet, {"multipliers": (1, 2, 2, 2, 2)}, r"\(1, 8, 8\); with 5 levels .* divisible by 16"),
        (EDM2UNet, {"dropout": 1.0}, r"dropout is 1.0; it must be in \[0, 1\)"),
        (EDM2UNet, {"middle": 0}, r"middle is 0; it must be in \[1, 2\]"),
        (EDM2UNet, {"width": 0}, "width is 0; it must be at least 1"),
        (EDM2UNet, {"attention": (16,)}, "no level has height 16"),
        (EDM2UNet, {"attention": (8,), "head": 5}, "head is 5; a level of 16 channels is not divided by 3 heads"),
        (DiffusersUNet, {"groups": 5}, "groups is 5; it must be at least 1 and divide width 16"),
    ],
)
def test_wrong_values_are_refused(kind: type[nn.Module], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(kind=kind, **options)
    with pytest.raises(ValueError, match="sigma_data is 0; it must be above 0"):
        Precond(Constant(), 0)


def test_28_pixels_need_three_levels() -> None:
    with pytest.raises(ValueError, match="divisible by 8"):
        made((1, 28, 28), multipliers=(1, 2, 2, 2))
    assert made((1, 28, 28), multipliers=(1, 2, 2))(normal(1, 1, 28, 28), torch.zeros(1)).shape == (1, 1, 28, 28)


def test_normalise_weights_reaches_every_layer_of_a_module() -> None:
    both = nn.ModuleList([made(), drawn_loss()])
    with torch.no_grad():
        both[1].head.weight.mul_(5)
    normalise_weights(both)
    assert rms(both[1].head.weight) == pytest.approx(1, abs=1e-3)
