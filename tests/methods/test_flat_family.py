"""What holds for every method of the averaging family: costs, memory, the wire, resuming, the order of clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation.tiny import CPU, federation, linear, normalised, numbers, same, sgd, task
from federation.wire import recorded, replay
from torch import nn

from fl_lightning.federation.sampling import FixedCohort, UniformSampler
from fl_lightning.methods import (
    SCAFFOLD,
    FedACG,
    FedASAM,
    FedAvg,
    FedCM,
    FedDyn,
    FedGAMMA,
    FedGloSS,
    FedLESAM,
    FedNesterov,
    FedNSAM,
    FedProx,
    FedSAM,
    FedSMOO,
    FedSpeed,
    MoFedSAM,
    OneShotEnsemble,
)

# Method, models down and up a client (section 5 of the papers' comparison: docs/methods/fednsam.md), backward passes a step.
FAMILY: dict[str, tuple[Callable[..., FedAvg], int, int, int]] = {
    "fedavg": (FedAvg, 1, 1, 1),
    "fedprox": (FedProx, 1, 1, 1),
    "fednesterov": (FedNesterov, 1, 1, 1),
    "fedacg": (FedACG, 1, 1, 1),
    "scaffold": (SCAFFOLD, 2, 2, 1),
    "feddyn": (FedDyn, 1, 1, 1),
    "fedcm": (FedCM, 2, 1, 1),
    "fedsam": (FedSAM, 1, 1, 2),
    "fedasam": (FedASAM, 1, 1, 2),
    "mofedsam": (MoFedSAM, 2, 1, 2),
    "fedgamma": (FedGAMMA, 2, 2, 2),
    "fedsmoo": (FedSMOO, 2, 2, 2),
    "fedlesam": (FedLESAM, 1, 1, 1),
    "fedgloss": (FedGloSS, 1, 1, 2),
    "fedgloss without local perturbation": (lambda **k: FedGloSS(local_rho=0.0, **k), 1, 1, 1),
    "fedspeed": (FedSpeed, 1, 1, 2),
    "fednsam paper": (FedNSAM, 2, 1, 1),
    "fednsam local": (lambda **k: FedNSAM(form="local", **k), 1, 1, 2),
}
every = pytest.mark.parametrize("name", FAMILY)


def wide(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """So many parameters that headers do not count."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 4000), nn.Linear(4000, num_classes)).double()


@every
def test_bytes_and_backward_passes(name: str) -> None:
    make, down, up, backward = FAMILY[name]
    loop = federation(make(rounds=1), (4, 8), network=wide)
    loop.fit()
    model = sum(p.numel() * 8 for p in loop.method.parameters.values())  # type: ignore[attr-defined]
    assert loop.history[1]["comm/bytes_down"] / (2 * model) == pytest.approx(down, rel=0.01)
    assert loop.history[1]["comm/bytes_up"] / (2 * model) == pytest.approx(up, rel=0.01)
    assert loop.history[1]["round/gradients"] == backward * 3  # one step and two


@every
def test_a_resumed_run_is_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    def run(rounds: int, folder: Path, checkpoint: Path | None = None) -> Any:
        loop = federation(
            FAMILY[name][0](rounds=rounds, lr_decay=0.9), sampler=UniformSampler(size=2), keep_last=9, batch_size=5
        )
        loop.fit(folder, checkpoint)
        return loop

    whole = run(5, tmp_path / "whole")
    resumed = run(5, tmp_path / "resumed", tmp_path / "whole" / "checkpoints" / "round_00003")
    assert same(resumed.method.state_dict(), whole.method.state_dict())
    assert same(resumed.memory.state_dict(), whole.memory.state_dict())
    assert numbers(resumed) == numbers(whole)


def test_clients_halves_need_nothing_but_the_message() -> None:
    parts = []
    for make, *_ in FAMILY.values():
        loop = federation(make(rounds=2), (4, 6), batch_size=3)
        with recorded(loop, task, CPU) as seen:
            loop.fit()
        parts += seen
    assert len(parts) == 4 * len(FAMILY)
    loop = federation(OneShotEnsemble(), (4, 6), batch_size=3)
    with recorded(loop, task, CPU) as seen:
        loop.fit()
    parts += seen
    replay(parts)


@every
def test_the_order_in_which_clients_are_named_does_not_matter(name: str) -> None:
    states = []
    for keys in (["0", "1", "2"], ["2", "0", "1"]):
        loop = federation(FAMILY[name][0](rounds=3), sampler=FixedCohort(clients=keys))
        loop.fit()
        states.append(loop.method.state_dict())
    assert same(*states)


@pytest.mark.parametrize("name", ["fedsam", "fedasam", "mofedsam", "fedgamma", "fedsmoo", "fedspeed", "fednsam local"])
def test_batch_norm_sees_every_batch_once(name: str) -> None:
    options: dict[str, Any] = {"sizes": (6, 6), "batch_size": 3, "network": normalised, "optimizer": sgd(1e-30)}
    plain, ours = federation(FedAvg(rounds=1), **options), federation(FAMILY[name][0](rounds=1), **options)
    plain.fit()
    ours.fit()  # the learning rate is next to nothing: the same weights, so the same statistics
    assert same(ours.method.buffers, plain.method.buffers)
    assert any(bool(value.any()) for n, value in ours.method.buffers.items() if n.endswith("running_mean"))


@pytest.mark.parametrize("name", sorted(FAMILY.keys() - {"scaffold", "fedgamma", "fedcm", "mofedsam"}))
def test_any_torch_optimizer_serves_as_base(name: str) -> None:
    """But for methods that divide by the learning rates: there they say how far a unit gradient moves the weights."""
    loop = federation(FAMILY[name][0](rounds=2), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1))
    start = {n: value.detach().clone() for n, value in loop.method.parameters.items()}  # type: ignore[attr-defined]
    loop.fit()
    assert all(not torch.equal(value, start[n]) for n, value in loop.method.parameters.items())  # type: ignore[attr-defined]


class Dropping(nn.Module):
    """Remembers the masks that it draws."""

    masks: list[torch.Tensor] = []

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.linear = linear(input_shape, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(inputs.shape, dtype=inputs.dtype) > 0.5
        self.masks.append(mask)
        return self.linear(inputs * mask)


def test_both_passes_of_a_step_draw_the_same_dropout_mask() -> None:
    Dropping.masks.clear()
    loop = federation(FedSAM(rho=0.3, rounds=1), (4, 4), network=Dropping, batch_size=2, evaluate_every=2)
    loop.participant.execute(  # one fit alone: the loop's evaluations draw masks too
        next(loop.program.update(loop.engine.client("0", 1), loop.method.broadcast(1))),
        1,
        "0",  # type: ignore[attr-defined]
    )
    masks = Dropping.masks
    assert len(masks) == 4
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("name", ["fedsam", "fednsam paper", "fedlesam"])
def test_perturbed_gradients_refuse_accumulation_and_fp16(name: str) -> None:
    make = FAMILY[name][0]
    with pytest.raises(
        ValueError, match="accumulate_grad_batches is 2; it must be 1 where gradients are taken at perturbed"
    ):
        federation(make(rounds=1), trainer={"accumulate_grad_batches": 2}).fit()
    loop = federation(make(rounds=1))
    loop.participant.trainer.precision_plugin.precision = "16-mixed"  # type: ignore[misc]  # a CPU would not build it
    with pytest.raises(ValueError, match=r"16-mixed cannot run .*bf16-mixed"):
        loop.fit()
    federation(make(rounds=1), trainer={"precision": "bf16-mixed"}).fit()


def test_corrections_are_not_clipped() -> None:
    """Clipping acts on the gradient, inside the closure; the control variate is added after (lightning's own order)."""
    from fl_lightning.methods.base import Fit
    from fl_lightning.rules.correction import Correction

    loop = federation(FedAvg(rounds=1), optimizer=sgd(1.0), trainer={"gradient_clip_val": 1e-9}, batch_size=8)
    start = loop.method.state()  # type: ignore[attr-defined]
    ones = {name: torch.ones_like(value) for name, value in loop.method.parameters.items()}  # type: ignore[attr-defined]
    fit = Fit("model", loop.data.train("0"), start, {"control": ones}, (Correction((("control", 1.0),)),))
    after = loop.participant.execute(fit, 1, "0").params
    for name, value in after.items():
        torch.testing.assert_close(value, start[name] - 1, rtol=0, atol=1e-8)
