"""Record-level privacy: DP-SGD written plainly, the noise by its variance, epsilon by Opacus' own accountant."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation.tiny import examples, federation, normalised, numbers, same
from torch import Tensor, nn

from fl_lightning.__main__ import main
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.participant import BatchLoader
from fl_lightning.federation.record_privacy import RecordPrivacy
from fl_lightning.federation.sampling import UniformSampler
from fl_lightning.methods import SCAFFOLD, FedAvg, FedProx, FedSAM
from fl_lightning.rng import torch_generator
from fl_lightning.tasks import ClassificationTask

pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

SIZES, BATCH, LR = (7, 12, 3), 2, 0.1
CONFIG = str(Path(__file__).parents[2] / "configs" / "fedavg_record_dp.yaml")


def private(
    method: Any = None, sizes: tuple[int, ...] = SIZES, *, privacy: Any = None, **options: Any
) -> FederationLoop:
    privacy = {"noise_multiplier": 0.0, "clip": 1e9, "delta": 0.01, **(privacy or {})}
    loop_options = {"record_privacy": RecordPrivacy(**privacy), "batch_size": BATCH, **options}
    return federation(method or FedAvg(rounds=1), sizes, **loop_options)


def poisson(count: int, batch_size: int, batches: int, *owner: object) -> list[Tensor]:
    draw = torch_generator(*owner)  # type: ignore[arg-type]
    rate = min(1.0, batch_size / count)
    return [
        torch.nonzero(torch.rand(count, generator=draw, dtype=torch.float64) < rate).flatten() for _ in range(batches)
    ]


def plain_fit(loop: FederationLoop, start: dict[str, Tensor], client: str, clip: float, epochs: int = 1) -> Any:
    """DP-SGD without noise, one example at a time; the updated weights, and the mean loss of batches with examples."""
    weights = {name: value.clone() for name, value in start.items()}
    data = loop.data.train(client)
    count, losses, empty = len(data), [], 0
    per_epoch = math.ceil(count / BATCH)
    for batch in poisson(count, BATCH, epochs * per_epoch, 0, 1, client, "fit", "shuffle"):
        total = {name: torch.zeros_like(value) for name, value in weights.items()}
        values = []
        for index in batch:
            leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
            inputs = data.fetch(index[None]).flatten(1)
            loss = F.cross_entropy(
                inputs @ leaves["network.1.weight"].T + leaves["network.1.bias"], data.labels[index[None]]
            )
            gradient = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            norm = math.sqrt(sum(float(g.pow(2).sum()) for g in gradient.values()))
            for name, g in gradient.items():
                total[name] += g * min(1.0, clip / max(norm, 1e-9))
            values.append(float(loss.detach()))
        if values:
            losses.append(sum(values) / len(values))
        empty += not values
        for name, value in weights.items():
            weights[name] = value - LR * total[name] / min(BATCH, count)
    return weights, sum(losses) / max(len(losses), 1), empty


def replies(loop: FederationLoop) -> dict[str, Any]:
    """Updates and losses by client, of round 1."""
    message, found = loop.method.broadcast(1), {}
    for client in loop.info.clients:
        steps = loop.program.update(loop.engine.client(client, 1), message)  # type: ignore[attr-defined]
        reply = loop.participant.run(steps, 1, client)
        found[client] = reply.message.tensors["model"], reply.metrics["loss"], reply.memory
    return found


@pytest.mark.parametrize("client_loop", ["lean", "trainer"])
@pytest.mark.parametrize("clip", [1e9, 0.05])
def test_without_noise_it_is_clipped_sgd_by_hand(client_loop: Any, clip: float) -> None:
    sizes = (7, 12, 5, 9, 1)  # the last has fewer examples than a batch
    loop = private(sizes=sizes, client_loop=client_loop, trainer={"max_epochs": 4}, privacy={"clip": clip})
    outlier = loop.data.train("0")
    outlier.source.inputs[outlier.indices[2]] *= 30  # type: ignore[attr-defined]
    start, empties = {n: v.clone() for n, v in loop.model.state().items()}, 0
    found = replies(loop)
    for client, (update, loss, _) in found.items():
        weights, expected, empty = plain_fit(loop, start, client, clip, 4)
        empties += empty
        for name, value in weights.items():
            # Opacus adds 1e-6 to a norm before it divides by it.
            assert torch.allclose(update[name], value - start[name], rtol=1e-4, atol=1e-9)
        assert loss == pytest.approx(expected, rel=1e-4)
    assert empties  # a batch without examples has been taken
    task = loop.participant.tasks["model"]
    assert not hasattr(task, "autograd_grad_sample_hooks")
    assert not any(hasattr(p, "grad_sample") for p in task.parameters())


def test_one_outlier_moves_the_weights_by_its_share_at_most() -> None:
    """Two clients' data differ in one example, which is enormous: their steps differ by lr C / B at most."""
    ends = []
    for size in (1.0, 1e5):
        loop = private(sizes=(4,), privacy={"clip": 0.3}, batch_size=4)
        data = loop.data.train("0")
        data.source.inputs[data.indices[1]] *= size  # type: ignore[attr-defined]
        data.source.labels[data.indices[1]] = 0  # type: ignore[attr-defined]
        ends.append(torch.cat([v.flatten() for v in replies(loop)["0"][0].values()]))
    gap = float((ends[0] - ends[1]).norm())
    assert 0.1 * LR * 0.3 / 4 < gap <= 2 * LR * 0.3 / 4 * (1 + 1e-6)  # one that is there instead of another: twice


def wide(input_shape: Any, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 800), nn.Linear(800, num_classes)).double()


@pytest.mark.parametrize("z", [0.5, 2.0])
def test_noise_has_its_variance_and_is_each_fits_own(z: float) -> None:
    quiet, loud = ({"clip": 0.1, "noise_multiplier": noise} for noise in (0.0, z))
    without, with_noise = (
        replies(private(sizes=(4, 4), network=wide, privacy=privacy, batch_size=4)) for privacy in (quiet, loud)
    )
    noise = {}
    for client in without:
        pair = [torch.cat([v.flatten() for v in found[client][0].values()]) for found in (without, with_noise)]
        noise[client] = (pair[1] - pair[0]) / (LR * z * 0.1 / 4)
    for value in noise.values():
        assert abs(float(value.mean())) < 5 / math.sqrt(len(value))
        assert float(value.std()) == pytest.approx(1.0, abs=5 / math.sqrt(2 * len(value)))
    assert abs(float((noise["0"] * noise["1"]).mean())) < 5 / math.sqrt(len(noise["0"]))


def spending(rounds: int, **options: Any) -> FederationLoop:
    return private(
        SCAFFOLD(rounds=rounds),
        (7, 12, 3, 8),
        sampler=UniformSampler(2),
        privacy={"clip": 0.5, "noise_multiplier": 1.3},
        trainer={"max_epochs": 2},
        **options,
    )


def test_epsilon_is_opacus_own_of_the_worst_client_and_a_resume_goes_on(tmp_path: Path) -> None:
    from opacus.accountants import RDPAccountant

    loop = spending(4)
    loop.fit(tmp_path)
    sizes = dict(zip(loop.info.clients, (7, 12, 3, 8), strict=True))
    books = {client: RDPAccountant() for client in sizes}
    for round in range(1, 5):
        for client in loop._cohort(round):
            for _ in range(2 * math.ceil(sizes[client] / BATCH)):
                rate = min(1.0, BATCH / sizes[client])
                books[client].step(noise_multiplier=1.3, sample_rate=rate)
        orders = [*range(2, 65), 80, 96, 128, 192, 256, 512, 1024]
        worst = max(b.get_epsilon(0.01, alphas=orders) for b in books.values() if b.history)
        assert loop.history[round]["privacy/record_epsilon"] == pytest.approx(worst, rel=1e-6)
    assert "privacy/record_epsilon" not in loop.history[0]
    assert loop.history[4]["privacy/record_epsilon"] > loop.history[1]["privacy/record_epsilon"]
    assert all(len(memory) == 2 for memory in loop.memory.state_dict().values())  # SCAFFOLD's own, and what was spent
    resumed = spending(4)
    resumed.fit(checkpoint=tmp_path / "checkpoints" / "round_00003")
    assert numbers(resumed) == numbers(loop)
    assert same(resumed.memory.state_dict(), loop.memory.state_dict())


def test_rules_correct_the_private_gradient() -> None:
    """FedProx with mu = 0 is plain; its correction sees the clipped gradient, in the lean loop as in the Trainer."""
    options: dict[str, Any] = {"privacy": {"clip": 0.05, "noise_multiplier": 1.0}, "trainer": {"max_epochs": 2}}
    ends = {}
    for name, method, client_loop in (
        ("plain", FedAvg(rounds=2), "lean"),
        ("zero", FedProx(rounds=2, mu=0.0), "lean"),
        ("prox", FedProx(rounds=2, mu=1.0), "lean"),
        ("trainer", FedProx(rounds=2, mu=1.0), "trainer"),
    ):
        loop = private(method, client_loop=client_loop, **options)
        loop.fit()
        ends[name] = loop.method.state()  # type: ignore[attr-defined]
    assert same(ends["plain"], ends["zero"])
    assert same(ends["prox"], ends["trainer"])
    assert not same(ends["plain"], ends["prox"])


class Unknown(ClassificationTask):
    example_losses = ClassificationTask.__mro__[1].example_losses  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"network": normalised}, r"BatchNorm1d \(network.2\) mixes the examples of a batch; GroupNorm does not"),
        ({"network": lambda *_: nn.Sequential(nn.Flatten(), nn.MultiheadAttention(4, 1))}, "MultiheadAttention"),
        ({"method": FedSAM(rounds=1)}, "cannot serve SAM: it takes gradients at other parameters"),
        ({"privacy": {"delta": 0.2}}, r"delta is 0.2; it must be in \(0, 1 / 12\): client 1 has 12 examples"),
        ({"trainer": {"precision": "bf16-mixed"}}, "precision is bf16-mixed; federation.record_privacy needs 32-true"),
        ({"trainer": {"accumulate_grad_batches": 2}}, "accumulate_grad_batches is 2"),
    ],
)
def test_what_cannot_be_covered_is_refused_before_training(options: dict[str, Any], words: str) -> None:
    loop = private(**options)
    with pytest.raises(ValueError, match=words):
        loop.fit()
    assert loop.history == []
    assert loop.participant.num_gradients == 0


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"engine is 'vectorized', and federation.record_privacy is given"):
        private(engine="vectorized")
    with pytest.raises(ValueError, match=r"uploads is 'x', and federation.record_privacy is given"):
        private(uploads="x")
    for name, value in {"clip": 0.0, "noise_multiplier": -1.0, "delta": 1.0, "accountant": "moments"}.items():
        with pytest.raises(ValueError, match=f"RecordPrivacy.{name} is"):
            RecordPrivacy(**{name: value})  # type: ignore[arg-type]
    for name in ("clip", "noise_multiplier", "delta"):
        for endless in (math.inf, math.nan):
            with pytest.raises(ValueError, match=f"RecordPrivacy.{name} is {endless}"):
                RecordPrivacy(**{name: endless})  # type: ignore[arg-type]


def test_a_fit_that_fails_leaves_a_clean_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for client_loop in ("lean", "trainer"):
        loop = private(client_loop=client_loop)
        task = loop.participant.tasks["model"]
        monkeypatch.setattr(type(task), "loss", lambda self, batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            replies(loop)
        monkeypatch.undo()
        assert not hasattr(task, "autograd_grad_sample_hooks")
        replies(loop)  # and the next one runs


def test_poisson_batches() -> None:
    data = examples(50)
    sizes = []
    for seed in range(40):
        loader = BatchLoader(data, 10, torch.Generator().manual_seed(seed), poisson=True)
        batches = list(loader)
        assert len(batches) == len(loader) == 5
        sizes += [len(batch.labels) for batch in batches]
    mean = sum(sizes) / len(sizes)
    variance = sum((s - mean) ** 2 for s in sizes) / len(sizes)
    assert mean == pytest.approx(10, abs=5 * math.sqrt(8 / 200))
    assert variance == pytest.approx(8, rel=0.5)  # n q (1 - q)
    assert all(len(batch.labels) == 3 for batch in BatchLoader(examples(3), 10, torch.Generator(), poisson=True))


def test_the_configuration_runs(tmp_path: Path) -> None:
    arguments = ["--trainer.default_root_dir", str(tmp_path), "--method.init_args.rounds", "1"]
    main(["fit", "--config", CONFIG, *arguments, "--federation.progress", "false", "--trainer.max_epochs", "1"])
    (record,) = tmp_path.rglob("metrics.csv")
    assert "privacy/record_epsilon" in record.read_text()
