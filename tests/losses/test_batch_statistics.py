"""BatchNorm statistics as a prior of images, against moments worked out by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

from fl_lightning.losses.batch_statistics import batch_statistics_loss, statistics_layers, watched_statistics


def test_one_layer_by_hand() -> None:
    inputs = torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64)[:, :, None, None]  # means 2, 2; variances 1, 4
    mean, variance = torch.tensor([2.0, 5.0]).double(), torch.tensor([1.0, 0.0]).double()
    assert batch_statistics_loss(inputs, mean, variance).item() == 3 + 4
    flat = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    assert batch_statistics_loss(flat, mean[:1] + 3, variance[:1] + 4).item() == 3 + 4


def test_images_that_match_cost_nothing_and_have_a_gradient_of_zero() -> None:
    inputs = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    moments = inputs.detach().transpose(0, 1).flatten(1)
    loss = batch_statistics_loss(inputs, moments.mean(1), moments.var(1, unbiased=False))
    loss.backward()
    assert loss.item() < 1e-12
    assert inputs.grad is not None
    assert inputs.grad.isfinite().all()


def test_every_layer_of_every_pass_is_watched_under_the_weights_that_are_lent() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(8)).double()
    lent = {n: torch.rand_like(v) + 0.5 if v.is_floating_point() else v for n, v in network.state_dict().items()}
    network.eval()
    x = torch.randn(4, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    with watched_statistics(network) as losses:
        functional_call(network, lent, (x,))
        network(x)
    assert len(losses) == 4
    hidden = torch.einsum("oi,bihw->bohw", lent["0.weight"][:, :, 0, 0], x) + lent["0.bias"][:, None, None]
    means = hidden.mean((0, 2, 3))
    variances = (hidden - means[:, None, None]).square().mean((0, 2, 3))
    expected = (means - lent["1.running_mean"]).norm() + (variances - lent["1.running_var"]).norm()
    torch.testing.assert_close(losses[0], expected)
    (gradient,) = torch.autograd.grad(losses[0], x)
    (wanted,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(gradient, wanted)
    network(x)
    assert len(losses) == 4  # nobody watches any more


def test_layers_without_running_statistics_do_not_count() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.GroupNorm(1, 2))
    assert statistics_layers(layers) == [layers[0]]
