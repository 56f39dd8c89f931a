"""FedDTL: the invariants of its specification, a hand-computed aggregation, and a round written plainly."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation.wire import recorded, replay
from methods.test_generator_distillation import watched
from PIL import Image
from torch import Tensor

from fl_lightning.__main__ import main
from fl_lightning.aggregation import Mean
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partition import Pathological
from fl_lightning.data.sources import Digits
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.sampling import UniformSampler
from fl_lightning.losses.grpo import GRPO
from fl_lightning.methods.averaging import FedAvg
from fl_lightning.methods.base import Client
from fl_lightning.methods.feddtl import FedDTL, ProductMean
from fl_lightning.models.clip import LoRA, build_clip
from fl_lightning.rng import derive_seed, torch_generator
from fl_lightning.tasks.clip import ClipTask

SEED = 3
TRAINER = {"accelerator": "cpu", "devices": 1, "max_epochs": 1}


def make_data(shots: int = 6, **kwargs: Any) -> FederatedDataModule:
    return FederatedDataModule(
        Digits(),
        Pathological(1),
        num_clients=5,
        base_classes=5,
        batch_size=4,
        image_size=32,
        channels=3,
        shots=shots,
        **kwargs,
    )


def make_loop(
    method: Any, data: FederatedDataModule | None = None, max_steps: int = -1, **model: Any
) -> FederationLoop:
    loop = FederationLoop(progress=False)
    options = {"pretrained": None, "lora": LoRA(rank=2, last_blocks=2), "logit_scale": 20.0}
    loop.assemble(
        method, ClipTask(**{**options, **model}), data or make_data(), {**TRAINER, "max_steps": max_steps}, SEED
    )
    return loop


def lora_of(loop: FederationLoop) -> dict[str, Tensor]:
    return loop.method.state_dict()["lora"]


def largest_gap(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# ---- structure and communication


def test_the_clients_limit_of_steps_is_not_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(FedDTL(rounds=1, server_epochs=2, server_batch_size=8), max_steps=1)
    rows = sum(len(loop.data.train(client)) for client in loop.info.clients)
    fits = watched(loop, monkeypatch)
    assert [result.num_steps for fit, result in fits if fit.key == ("text",)] == [2 * math.ceil(rows / 8)]


def test_client_holds_vision_lora_and_no_text() -> None:
    loop = make_loop(FedDTL(rounds=2))
    policy = loop.participant.tasks["policy"]
    assert not [name for name, _ in policy.named_parameters() if "text" in name]
    blocks = {int(name.split("resblocks.")[1].split(".")[0]) for name in policy.trainable()}
    depth = len(loop.model.visual.blocks)
    assert blocks == {depth - 2, depth - 1}
    width = loop.model.visual.blocks[0].attn.q.in_features
    # 2 blocks, q k v, r (d_in + d_out)
    assert sum(p.numel() for p in policy.trainable().values()) == 2 * 3 * 2 * (width + width)
    text = loop.participant.tasks["text"]
    assert all("lora_" in name and "text" in name for name in text.trainable())


def test_message_holds_lora_unit_embeddings_and_labels_and_is_counted() -> None:
    loop = make_loop(FedDTL(rounds=1, sft_share=1.0))
    engine, method = loop.engine, loop.method
    message = method.broadcast(1)
    assert set(message.tensors) == {"lora", "text"}
    assert message.tensors["text"]["embeddings"].shape == (5, loop.model.visual.embed_dim)  # base classes only
    sizes = []
    for key in loop.info.clients:
        client = engine.client(key, 1)
        reply = loop.participant.run(loop.program.update(client, message), 1, key)
        assert set(reply.message.tensors) == {"lora", "embeddings"}
        rows = reply.message.tensors["embeddings"]
        assert set(rows) == {"embedding", "label"}
        count = client.num_examples
        assert rows["embedding"].shape == (count, loop.model.visual.embed_dim)  # no patch axis
        assert torch.allclose(rows["embedding"].norm(dim=1), torch.ones(count), atol=1e-5)
        assert rows["label"].tolist() == client.train.labels.tolist()
        payload = 4 * sum(v.numel() for v in reply.message.tensors["lora"].values()) + 4 * rows["embedding"].numel()
        assert 0 < reply.message.nbytes - payload - 8 * count < 4096  # the rest is the header
        sizes.append(reply.message.nbytes)
    history = loop.fit()
    assert history[-1]["comm/bytes_up"] == sum(sizes)
    assert history[-1]["comm/bytes_down"] == 5 * message.nbytes


def test_zero_shot_is_row_zero() -> None:
    loop = make_loop(FedDTL(rounds=1))
    frozen = build_clip("tiny-clip-32", None, lora=None, seed=SEED)
    tokens = frozen.text.tokenize([f"a photo of a {name}" for name in loop.info.class_names])
    row = loop.evaluate()
    for name, classes in {"base": range(5), "novel": range(5, 10)}.items():
        examples = loop.data.test_sets()[name]
        with torch.no_grad():
            logits = frozen(examples.fetch(torch.arange(len(examples))), tokens)[:, list(classes)]
        accuracy = (logits.argmax(1) + classes[0] == examples.labels).float().mean()
        assert row[f"{name}/acc"] == pytest.approx(float(accuracy), abs=1e-6)
    assert row["base_novel/hm"] == pytest.approx(
        2 * row["base/acc"] * row["novel/acc"] / (row["base/acc"] + row["novel/acc"])
    )


def test_novel_images_reach_neither_clients_nor_server() -> None:
    data = make_data()
    loop = make_loop(FedDTL(rounds=1, sft_share=1.0), data)
    seen: list[Tensor] = []
    original = loop.method._train_text  # type: ignore[attr-defined]
    loop.method._train_text = lambda total, server: (  # type: ignore[attr-defined]
        seen.append(total.groups["embeddings"]["label"]),
        original(total, server),
    )[1]
    loop.fit()
    assert max(int(labels.max()) for labels in seen) < 5
    for key in loop.info.clients:
        assert int(data.train(key).labels.max()) < 5
    assert len(data.val_sets()["global"]) == 0 or int(data.val_sets()["global"].labels.max()) < 5


def test_server_changes_text_only_and_clients_vision_only() -> None:
    loop = make_loop(FedDTL(rounds=2))
    text_before = {k: v.clone() for k, v in loop.model.text.state_dict().items() if "lora_" not in k}
    frozen_before = {k: v.clone() for k, v in loop.model.visual.state_dict().items() if "lora_" not in k}
    before, text_lora = lora_of(loop), loop.method.state_dict()["text_lora"]
    loop.fit()
    after = loop.method.state_dict()
    assert largest_gap(before, after["lora"]) > 0
    assert largest_gap(text_lora, after["text_lora"]) > 0
    for k, v in text_before.items():
        assert torch.equal(loop.model.text.state_dict()[k], v)
    for k, v in frozen_before.items():
        assert torch.equal(loop.model.visual.state_dict()[k], v)


# ---- aggregation


def test_two_clients_by_hand() -> None:
    """N = 1 and 3, rank 1: the weighted mean of the factors, and the rank-1 mean of the products when A is shared."""
    name_a, name_b = "q.lora_A.w", "q.lora_B.w"
    start = {name_a: torch.tensor([[1.0, 2.0]]).double(), name_b: torch.tensor([[0.0], [0.0]]).double()}
    replies = [
        ({name_a: torch.zeros(1, 2).double(), name_b: torch.tensor([[4.0], [0.0]]).double()}, 1.0),
        ({name_a: torch.zeros(1, 2).double(), name_b: torch.tensor([[0.0], [8.0]]).double()}, 3.0),
    ]
    for reducer in (Mean(), ProductMean(start)):
        total = None
        for number, (update, weight) in enumerate(replies):
            total = reducer.add(total, update, weight, str(number))
        out = reducer.finish(total)
        product = (start[name_b] + out[name_b]) @ (start[name_a] + out[name_a])
        # B = 1/4 (4, 0) + 3/4 (0, 8) = (1, 6); B A = [[1, 2], [6, 12]]
        expected = torch.tensor([[1.0, 2.0], [6.0, 12.0]]).double()
        assert torch.allclose(product, expected, atol=1e-12)
    assert product.dtype == torch.float64


def test_product_mean_differs_from_factor_mean_when_a_differs_and_matches_a_plain_reference() -> None:
    draw = torch.Generator().manual_seed(0)
    start = {"q.lora_A.w": torch.randn(2, 5, generator=draw), "q.lora_B.w": torch.randn(4, 2, generator=draw)}
    updates = [{k: torch.randn(v.shape, generator=draw) for k, v in start.items()} for _ in range(2)]
    reducer, total = ProductMean(start), None
    for number, update in enumerate(updates):
        total = reducer.add(total, update, 1.0, str(number))
    out = reducer.finish(total)
    got = (start["q.lora_B.w"] + out["q.lora_B.w"]) @ (start["q.lora_A.w"] + out["q.lora_A.w"])
    products = [(start["q.lora_B.w"] + u["q.lora_B.w"]) @ (start["q.lora_A.w"] + u["q.lora_A.w"]) for u in updates]
    mean = sum(products) / 2
    u, s, v = torch.linalg.svd(mean)
    best = sum(s[i] * torch.outer(u[:, i], v[i]) for i in range(2))  # Eckart-Young: the nearest of rank 2
    assert torch.allclose(got, best, atol=1e-5)
    factors = {k: start[k] + (updates[0][k] + updates[1][k]) / 2 for k in start}
    assert not torch.allclose(got, factors["q.lora_B.w"] @ factors["q.lora_A.w"], atol=1e-2)


def test_product_aggregation_trains_from_zero_products() -> None:
    loop = make_loop(FedDTL(rounds=2, sft_share=1.0, aggregate="product"))
    loop.fit()
    assert max(float(v.abs().max()) for k, v in lora_of(loop).items() if "lora_B" in k) > 0


# ---- stages


def test_stage_flips_once_after_round_m() -> None:
    method = FedDTL(rounds=5, sft_share=0.5)
    loop = make_loop(method)
    assert method.sft_rounds == 3
    assert [method.stage(r) for r in range(1, 6)] == [0, 0, 0, 1, 1]
    for round, groups in {3: {"lora", "text"}, 4: {"lora", "text", "anchor"}}.items():
        assert set(method.broadcast(round).tensors) == groups
    method.limit_rounds(2)
    method.setup(loop.model, loop.info, SEED)
    assert [method.stage(r) for r in (1, 2)] == [0, 1]  # a dry run reaches both


def test_all_supervised_is_decoupled_only_bit_for_bit() -> None:
    a, b = make_loop(FedDTL(rounds=2, sft_share=1.0)), make_loop(FedDTL(rounds=2, sft_share=1.0, grpo=GRPO(sigma=9)))
    c = make_loop(FedDTL(rounds=2, sft_share=0.0))
    for loop in (a, b, c):
        loop.fit()
    assert largest_gap(lora_of(a), lora_of(b)) == 0
    assert largest_gap(lora_of(a), lora_of(c)) > 0
    assert all("client/mixed_groups" not in row for row in a.history)
    assert all("client/mixed_groups" in row for row in c.history[1:])


def test_without_noise_and_at_the_reference_nothing_moves() -> None:
    """sigma = 0: no advantage; M = 0 and round 1: the reference is the policy. Adam sees zeros."""
    loop = make_loop(FedDTL(rounds=1, sft_share=0.0, grpo=GRPO(sigma=0.0)))
    before = {k: v.clone() for k, v in lora_of(loop).items()}
    loop.fit()
    assert largest_gap(before, lora_of(loop)) < 1e-6
    assert loop.history[1]["client/mixed_groups"] == 0
    noisy = make_loop(FedDTL(rounds=1, sft_share=0.0, grpo=GRPO(sigma=0.1)))
    noisy.fit()
    assert largest_gap(before, lora_of(noisy)) > 1e-4


def test_first_reinforcement_step_starts_at_the_reference() -> None:
    """With the global anchor, dW_sft = dW_g in round M + 1: KL is 0 in the first step, and no longer in later ones."""
    method = FedDTL(rounds=2, sft_share=0.5, rl_epochs=1)
    loop = make_loop(method)
    loop.method.rounds = 1
    loop.fit()
    message = method.broadcast(2)
    assert message.scalars["stage"] == 1
    seen: list[float] = []
    policy = loop.participant.tasks["policy"]
    original = policy._count
    policy._count = lambda statistics: (seen.append(float(statistics["kl"])), original(statistics))[1]  # type: ignore[method-assign]
    loop.participant.run(loop.program.update(loop.engine.client("0", 2), message), 2, "0")
    assert seen[0] == pytest.approx(0.0, abs=1e-7)
    assert max(seen[1:]) > 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "within_round", "sft_epochs": 1, "rl_epochs": 1},
        {"second_stage": "sft_kl"},
        {"mix": "probabilities", "old_policy": "step"},
        {"mix": "kl", "old_policy": "round"},
        {"sft_anchor": "client", "anchor_text": "switch"},
        {"upload_limit": 3, "embedding_noise": 0.1},
        {"decoupled": False},
        {"grpo": GRPO(noise_space="raw", action="sample", advantage_std="sample", kl="exact")},
    ],
)
def test_every_option_runs_both_stages(options: dict[str, Any]) -> None:
    loop = make_loop(FedDTL(rounds=2, **options), make_data(shots=4))
    before = {k: v.clone() for k, v in lora_of(loop).items()}
    history = loop.fit()
    assert largest_gap(before, lora_of(loop)) > 0
    assert all(torch.isfinite(v).all() for v in lora_of(loop).values())
    reinforced = history[1:] if options.get("schedule") else history[2:]
    assert all("client/kl" in row for row in reinforced)
    if "upload_limit" in options:
        assert history[1]["server/embeddings"] == 15
    if options.get("sft_anchor") == "client":
        assert set(loop.memory.get("0")) == {"anchor"}
        assert set(loop.method.broadcast(2).tensors) == {"lora", "text", "anchor_text"}


def test_within_a_round_the_switch_is_by_epoch() -> None:
    loop = make_loop(FedDTL(rounds=1, schedule="within_round", sft_epochs=2, rl_epochs=1), make_data(shots=4))
    policy = loop.participant.tasks["policy"]
    objectives: list[str] = []
    original = policy.loss
    policy.loss = lambda batch: (objectives.append(policy.objective), original(batch))[1]  # type: ignore[method-assign]
    loop.participant.run(loop.program.update(loop.engine.client("0", 1), loop.method.broadcast(1)), 1, "0")
    steps = len(objectives) // 3
    assert objectives == ["sft"] * 2 * steps + ["grpo"] * steps
    assert policy.objective == "sft"  # nothing is left behind for the next client


def test_undecoupled_supervised_is_fedavg_of_both_loras() -> None:
    both = make_loop(FedDTL(rounds=2, sft_share=1.0, sft_epochs=1, decoupled=False))
    fedlora = make_loop(FedAvg(rounds=2))
    both.fit()
    fedlora.fit()
    assert largest_gap(lora_of(both), fedlora.method.state_dict()["parameters"]) < 1e-6
    assert any("text." in name for name in lora_of(both))


# ---- an independent reference, written plainly


def _plain_policy(clip: Any, factors: dict[str, Tensor], images: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    raw = torch.func.functional_call(clip.visual, factors, (images,))
    unit = raw / raw.norm(dim=1, keepdim=True)
    return raw, (20.0 * unit @ text.T).log_softmax(1)


def _shuffled(client: Client, epochs: int, size: int) -> list[Tensor]:
    draw = torch_generator(SEED, client.round, client.key, "fit", "shuffle")
    return [b for _ in range(epochs) for b in torch.randperm(client.num_examples, generator=draw).split(size)]


@pytest.mark.parametrize("reinforced", [False, True])
def test_a_round_against_a_plain_reference(reinforced: bool) -> None:
    """One round of two epochs: client fits, upload, weighted mean and server training, in plain loops."""
    epochs = 2
    method = FedDTL(rounds=1, sft_share=0.0 if reinforced else 1.0, sft_epochs=epochs, rl_epochs=epochs)
    data = make_data(shots=6)
    loop = make_loop(method, data)
    clip = build_clip("tiny-clip-32", None, lora=LoRA(rank=2, last_blocks=2), seed=SEED)
    tokens = clip.text.tokenize([f"a photo of a {name}" for name in loop.info.class_names])
    with torch.no_grad():
        text = F.normalize(clip.text(tokens), dim=1)[:5]
    start = {k: v.detach().clone() for k, v in clip.visual.named_parameters() if v.requires_grad}
    sums: dict[str, Tensor] = {k: torch.zeros_like(v) for k, v in start.items()}
    embeddings, labels, total = [], [], 0
    for key in loop.info.clients:
        client = loop.engine.client(key, 1)
        images = client.train.fetch(torch.arange(client.num_examples))
        factors = {k: v.clone().requires_grad_() for k, v in start.items()}
        optimizer = torch.optim.Adam(factors.values(), lr=1e-3)
        noise = torch_generator(derive_seed(SEED, 1, key, "grpo"), "noise")
        batches = _shuffled(client, epochs, 4)
        old: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            if number % (len(batches) // epochs) == 0:
                old = {k: v.detach().clone() for k, v in factors.items()}
            raw, logp = _plain_policy(clip, factors, images[batch], text)
            y = client.train.labels[batch]
            if not reinforced:
                loss = -logp[torch.arange(len(y)), y].mean()
            else:
                with torch.no_grad():
                    _, old_logp = _plain_policy(clip, old, images[batch], text)
                    _, ref_logp = _plain_policy(clip, start, images[batch], text)
                    eps = torch.randn(len(y), 3, raw.shape[1], generator=noise)
                    noisy = (raw / raw.norm(dim=1, keepdim=True))[:, None] + 0.1 * eps
                    actions = (noisy @ text.T).argmax(-1)
                loss = torch.zeros(())
                for i in range(len(y)):
                    r = [float(actions[i, j] == y[i]) for j in range(3)]
                    mean = sum(r) / 3
                    std = (sum((x - mean) ** 2 for x in r) / 3) ** 0.5
                    for j in range(3):
                        a = actions[i, j]
                        advantage = 0.0 if std == 0 else (r[j] - mean) / (std + 1e-6)
                        ratio = (logp[i, a] - old_logp[i, a]).exp()
                        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                        q = ref_logp[i, a] - logp[i, a]
                        loss = loss - (surrogate - 0.5 * (q.exp() - q - 1)) / (3 * len(y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            raw, _ = _plain_policy(clip, factors, images, text)
            embeddings.append(raw / raw.norm(dim=1, keepdim=True))
        labels.append(client.train.labels)
        total += client.num_examples
        for k, v in factors.items():
            sums[k] += client.num_examples * v.detach()
    loop.fit()
    expected = {f"visual.{k}": v / total for k, v in sums.items()}
    assert largest_gap(lora_of(loop), expected) < 2e-5

    # The server: cross-entropy of all embeddings against the text tower's class embeddings, one epoch, batches of 64.
    x, y = torch.cat(embeddings), torch.cat(labels)
    text_factors = {k: v.detach().clone().requires_grad_() for k, v in clip.text.named_parameters() if v.requires_grad}
    optimizer = torch.optim.Adam(text_factors.values(), lr=1e-3)
    draw = torch_generator(SEED, 1, "server", "text", "shuffle")
    for batch in torch.randperm(len(x), generator=draw).split(64):
        classes = F.normalize(torch.func.functional_call(clip.text, text_factors, (tokens[:5],)), dim=1)
        loss = F.cross_entropy(20.0 * x[batch] @ classes.T, y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    got = loop.method.state_dict()["text_lora"]
    assert largest_gap(got, {f"text.{k}": v.detach() for k, v in text_factors.items()}) < 2e-5


# ---- the frozen prefix


def test_cached_prefix_changes_nothing_but_time() -> None:
    cached, plain = make_loop(FedDTL(rounds=2)), make_loop(FedDTL(rounds=2), cache_gib=0.0)
    for loop in (cached, plain):
        loop.fit()
    assert cached.participant.tasks["policy"].cache is not None
    assert plain.participant.tasks["policy"].cache is None
    assert largest_gap(lora_of(cached), lora_of(plain)) < 1e-4
    assert cached.history[-1]["base/loss"] == pytest.approx(plain.history[-1]["base/loss"], abs=1e-4)


def test_cached_activations_do_not_depend_on_what_was_fetched_before() -> None:
    """To the last bit: a resumed run and another process fill the cache in another order."""
    loops = [make_loop(FedDTL(rounds=1)) for _ in range(2)]
    stores = [loop.model.cached(loop.data.test_sets()["global"]) for loop in loops]
    assert stores[0] is not None
    assert stores[1] is not None
    whole = stores[0].fetch(torch.arange(len(stores[0])))
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    for part in order.split(7):
        assert torch.equal(stores[1].fetch(part), whole[part])


# ---- privacy of the uploads


def balle_wang(epsilon: float, sigma: float) -> float:
    """Delta of Gaussian noise on a row that changes by 2 at most (Balle and Wang, 2018, Theorem 8)."""
    phi, mu = NormalDist().cdf, 2.0 / sigma
    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


def test_an_epsilon_sets_the_noise_and_the_record_says_what_is_spent(tmp_path: Path) -> None:
    def private(rounds: int) -> FederationLoop:
        loop = make_loop(
            FedDTL(rounds=rounds, sft_share=1.0, sft_epochs=1, embedding_epsilon=6.0, embedding_delta=1e-4),
            make_data(shots=2),
        )
        loop.sampler = UniformSampler(3)
        return loop

    loop = private(3)
    sigma = loop.program.embedding_noise  # type: ignore[attr-defined]
    assert balle_wang(6.0, sigma) == pytest.approx(1e-4, rel=1e-6)
    assert balle_wang(6.0, 0.99 * sigma) > 1e-4
    history = loop.fit(tmp_path)
    took: dict[str, int] = {}
    for number, row in enumerate(history[1:], 1):
        for client in loop._cohort(number):
            took[client] = took.get(client, 0) + 1
        assert row["privacy/embedding_epsilon"] == pytest.approx(6.0)
        assert row["privacy/embedding_delta"] == 1e-4
        together = sigma / math.sqrt(max(took.values()))  # T releases are one of 1 / sqrt(T) the noise
        assert balle_wang(row["privacy/embedding_epsilon_total"], together) == pytest.approx(1e-4, rel=1e-6)
    assert history[-1]["privacy/embedding_epsilon_total"] > history[1]["privacy/embedding_epsilon_total"]
    assert "privacy/label_epsilon" not in history[-1]
    resumed = private(3)
    resumed.fit(checkpoint=tmp_path / "checkpoints" / "round_00002")
    assert resumed.history[-1]["privacy/embedding_epsilon_total"] == history[-1]["privacy/embedding_epsilon_total"]


def as_client(loop: FederationLoop, key: str = "0", round: int = 1) -> Client:
    return loop.engine.client(key, round)  # type: ignore[attr-defined]


def test_rows_are_clipped_before_the_noise_and_unit_after_it() -> None:
    loop = make_loop(FedDTL(rounds=1, embedding_noise=0.2), make_data(shots=4))
    program, client = loop.program, as_client(loop)
    rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 30.0, 50)[:, None]
    found = program.blurred(rows, client)  # type: ignore[attr-defined]
    draw = torch_generator(client.seed, 1, "0", "embedding_noise")
    lengths = rows.norm(dim=1, keepdim=True)
    assert (lengths > 1).any()
    assert (lengths < 1).any()
    noisy = torch.where(lengths > 1, rows / lengths, rows) + 0.2 * torch.randn(50, 8, generator=draw)
    assert torch.allclose(found, noisy / noisy.norm(dim=1, keepdim=True), atol=1e-6)


def test_labels_are_answered_once_for_all_rounds() -> None:
    loop = make_loop(FedDTL(rounds=1, label_epsilon=0.5, upload_limit=30), make_data(shots=60))
    program = loop.program
    clients = [as_client(loop, "0", 1), as_client(loop, "0", 2), as_client(loop, "1", 1)]
    first, again, other = (program.answered(client, 5) for client in clients)  # type: ignore[attr-defined]
    assert torch.equal(first, again)
    true = clients[0].train.labels
    kept = float((first == true).float().mean())
    stays = math.exp(0.5) / (math.exp(0.5) + 4)
    assert abs(kept - stays) < 4 * math.sqrt(stays * (1 - stays) / len(true))
    assert not torch.equal((first - true) % 5, (other - clients[2].train.labels) % 5)  # each client draws its own
    # What is uploaded are those answers, of the images whose embeddings are.
    reply = loop.participant.run(program.update(clients[0], loop.method.broadcast(1)), 1, "0")
    assert torch.equal(reply.message.tensors["embeddings"]["label"], first[program.chosen(clients[0])])  # type: ignore[attr-defined]
    assert loop.fit()[-1]["privacy/label_epsilon"] == 0.5


def test_labels_in_clear_are_said_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for options, times in (({"embedding_epsilon": 1.0}, 1), ({"label_epsilon": 1.0}, 0), ({"decoupled": False}, 0)):
        loop = make_loop(FedDTL(rounds=2, sft_share=1.0, sft_epochs=1, **options), make_data(shots=1))  # type: ignore[arg-type]
        loop.fit()
        assert capsys.readouterr().err.count("FedDTL uploads labels in clear: label_epsilon is null") == times


# ---- what every method shows


def build_policy() -> ClipTask:
    return ClipTask(pretrained=None, lora=LoRA(rank=2, last_blocks=2), logit_scale=20.0)


def test_a_client_needs_its_message_its_data_and_its_memory_only() -> None:
    parts: list[Any] = []
    for options in ({}, {"sft_anchor": "client", "upload_limit": 3, "embedding_noise": 0.1}):
        loop = make_loop(FedDTL(rounds=2, **options), make_data(shots=3))  # type: ignore[arg-type]
        with recorded(loop, build_policy, TRAINER) as seen:
            loop.fit()
        parts += seen
    assert len(parts) == 20
    replay(parts)


def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = make_loop(FedDTL(rounds=3, sft_anchor="client"), make_data(shots=3))
    whole.keep_last = 5
    whole.fit(tmp_path)
    for round in (1, 2):
        again = make_loop(FedDTL(rounds=3, sft_anchor="client"), make_data(shots=3))
        again.fit(None, tmp_path / "checkpoints" / f"round_{round:05d}")
        assert largest_gap(lora_of(whole), lora_of(again)) == 0
        assert largest_gap(whole.method.state_dict()["text_lora"], again.method.state_dict()["text_lora"]) == 0
        for a, b in zip(whole.history, again.history, strict=True):
            assert {k: v for k, v in a.items() if "time/" not in k} == {k: v for k, v in b.items() if "time/" not in k}


def test_bf16_mixed_runs_both_stages() -> None:
    loop = FederationLoop(progress=False)
    loop.assemble(FedDTL(rounds=2), build_policy(), make_data(shots=3), {**TRAINER, "precision": "bf16-mixed"}, SEED)
    before = {k: v.clone() for k, v in lora_of(loop).items()}
    loop.fit()
    after = lora_of(loop)
    assert largest_gap(before, after) > 0
    assert all(v.dtype == torch.float32 and torch.isfinite(v).all() for v in after.values())


def test_a_run_can_be_tested_and_label_images_through_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Path(__file__).parents[2] / "configs" / "feddtl.yaml"
    quick = ["--method.init_args.rounds=2", "--data.shots=4", "--federation.progress=false", "--trainer.logger=false"]
    run = main(["fit", f"--config={config}", *quick])
    checkpoint = f"--ckpt_path={run.run_folder / 'checkpoints' / 'round_00002'}"
    scores = main(["test", checkpoint]).scores
    assert {name: scores[name] for name in ("base/acc", "novel/acc")} == {
        name: run.loop.history[-1][name] for name in ("base/acc", "novel/acc")
    }
    (tmp_path / "images").mkdir()
    digit = Digits().load(image_size=None, channels=None, seed=0).test
    seven = int((digit.labels == 7).nonzero()[0])
    pixels = (255 * digit.fetch(torch.tensor([seven]))[0, 0]).byte().numpy()
    Image.fromarray(pixels).save(tmp_path / "images" / "a.png")  # 8 x 8, grey: brought to the model's size and channels
    main(["predict", checkpoint, "--images=images", "--output=labels.csv"])
    path, label, confidence = (tmp_path / "labels.csv").read_text().splitlines()[1].split(",")
    assert Path(path).name == "a.png"
    assert label in run.loop.info.class_names
    assert 0.1 <= float(confidence) <= 1


# ---- state


def test_state_survives_a_round_trip() -> None:
    loop = make_loop(FedDTL(rounds=2))
    loop.fit()
    state = copy.deepcopy(loop.method.state_dict())
    other = make_loop(FedDTL(rounds=2))
    other.method.load_state_dict(state)
    a, b = loop.evaluate(), other.evaluate()
    assert a == b


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sft_share": 1.5}, "sft_share is 1.5"),
        ({"server_epochs": 0}, "server_epochs is 0"),
        ({"embedding_noise": -1.0}, "embedding_noise is -1.0"),
        ({"upload_limit": 0}, "upload_limit is 0"),
        ({"embedding_noise": math.nan}, "embedding_noise is nan"),
        ({"server_lr": -1.0}, "server_lr is -1.0; it must be above 0"),
        ({"mix": "foo"}, "mix is 'foo'; allowed: 'parameters', 'probabilities', 'kl'"),
        ({"old_policy": "foo"}, "old_policy is 'foo'; allowed: 'step', 'epoch', 'round'"),
        *(
            ({name: "foo"}, f"{name} is 'foo'; allowed: ")
            for name in ("schedule", "second_stage", "sft_anchor", "anchor_text", "aggregate")
        ),
        ({"embedding_epsilon": 0.0}, "embedding_epsilon is 0.0; it must be above 0"),
        ({"label_epsilon": -1.0}, "label_epsilon is -1.0; it must be above 0"),
        ({"embedding_noise": 0.1, "embedding_delta": 1.0}, "embedding_delta is 1.0"),
        ({"embedding_noise": 0.1, "embedding_epsilon": 1.0}, "give either embedding_noise or embedding_epsilon"),
        ({"label_epsilon": 1.0, "decoupled": False}, "with decoupled false there are none"),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FedDTL(**options)
