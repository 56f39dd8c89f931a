"""Inversion of classifiers: against a plain loop, under both client loops, and what stops, stays and never changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation.tiny import CPU, same
from torch import Tensor, nn

from fl_lightning.callbacks import SparseModelInversion
from fl_lightning.data.examples import DataInfo
from fl_lightning.federation.participant import Participant
from fl_lightning.methods.base import Fit, Result
from fl_lightning.models import MLP, ResNet8, SparseViT
from fl_lightning.rng import owned_global_rng, torch_generator
from fl_lightning.synthesis.inversion import jensen_shannon, total_variation
from fl_lightning.tasks import ClassificationTask, InversionTask
from fl_lightning.tasks.base import Batch
from fl_lightning.tasks.inversion import targets

SHAPE, CLASSES, COUNT = (3, 16, 16), 5, 4
MEAN, STD = [0.4, 0.5, 0.3], [0.25, 0.3, 0.2]
LABELS = torch.tensor([3, 0, 4, 0])
SEED = 7


def vit(*_: Any) -> SparseViT:
    return SparseViT(SHAPE, CLASSES, embed_dim=24, depth=2, num_heads=3)


def classifier(network: Any = vit, seed: int = 0, scale: float = 0.3) -> ClassificationTask:
    task = ClassificationTask(network, mean=MEAN, std=STD)
    task.build(DataInfo(tuple("abcde"), SHAPE, tuple(range(CLASSES))), seed)
    for name, value in task.named_parameters():  # a network as it is drawn gives all images the same scores
        value.data += scale * torch.randn(value.shape, generator=torch_generator(seed, name))
    return task


def noise(count: int = COUNT) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch_generator(0, "noise"))


def invert(
    task: InversionTask,
    states: Sequence[dict[str, Tensor]],
    steps: int,
    *callbacks: SparseModelInversion,
    client_loop: Any = "lean",
    labels: Tensor = LABELS,
    given: Any = None,
    **trainer: Any,
) -> Result:
    worker = Participant({"inversion": task}, {**CPU, **trainer}, 2, SEED, client_loop=client_loop)
    given = {**{f"teacher/{number}": state for number, state in enumerate(states)}, **(given or {})}
    overrides = {"max_steps": steps, "max_epochs": 10**6, "batch_size": len(labels)}
    fit = Fit("inversion", targets(labels), {"pixels": noise(len(labels))}, given, (), callbacks, overrides)
    return worker.execute(fit, 1, "server")


def ready(task: InversionTask, states: Sequence[dict[str, Tensor]], given: Any = None) -> InversionTask:
    """A task outside of a fit, whose loss can be asked for."""
    task.load({"pixels": noise()})
    task.given = {**{f"teacher/{number}": state for number, state in enumerate(states)}, **(given or {})}
    return task


BATCH = Batch(torch.arange(COUNT), LABELS)
PLAIN: dict[str, Any] = {"jitter": 0.0, "flip": False}


# ---------------------------------------------------------------------------------------------------------------------
# Against a plain loop


def plain_smi(
    teacher: ClassificationTask,
    steps: int,
    schedule: dict[int, int],
    *,
    jitter: float,
    flip: bool,
    tv: float,
    hard: bool,
    on_the_way: list[dict[str, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Section 2.1 in a loop: everything is embedded, tokens are dropped behind it, one image at a time."""
    model = copy.deepcopy(teacher.network.model).eval()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    x = noise().requires_grad_()
    adam = torch.optim.Adam([x], lr=0.25, betas=(0.5, 0.99))
    alive = [list(range(16)) for _ in range(COUNT)]
    pending, held, side = None, None, int(16 * jitter)

    def run(images: Tensor, kept: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
        logits, scores = [], []
        for image, patches in zip(images, kept, strict=True):
            tokens = model._pos_embed(model.patch_embed(image[None]))[:, [0, *(p + 1 for p in patches)]]
            tokens = model.blocks[0](tokens)
            attn, h = model.blocks[1].attn, model.blocks[1].norm1(tokens)
            query, key, _ = attn.qkv(h).view(1, -1, 3, 3, 8).permute(2, 0, 3, 1, 4)
            scores.append((query @ key.transpose(2, 3) / 8**0.5).softmax(-1)[0, :, 0, 1:].mean(0))
            logits.append(model.head(model.norm(model.blocks[1](tokens))[:, 0]))
        return torch.cat(logits), scores

    with owned_global_rng(SEED, 1, "server", "fit"):
        for step in range(steps):
            if step in schedule:
                assert pending is not None
                alive, held = pending, x.detach().clone()
            if step + 1 in schedule:
                with torch.no_grad():
                    _, scores = run(x, alive)
                on_the_way.append({"pixels": x.detach().clone(), "scores": torch.stack(scores)})
                pending = [
                    sorted(sorted(a, key=lambda p, s=s, a=a: -float(s[a.index(p)]))[: schedule[step + 1]])  # type: ignore[misc]
                    for a, s in zip(alive, scores, strict=True)
                ]
            down, right = (int(torch.randint(-side, side + 1, ())) for _ in range(2))
            mirrored = flip and bool(torch.randint(2, ()))
            view = x.roll((down, right), (2, 3))
            view = view.flip(3) if mirrored else view
            there = []
            for patches in alive:
                cells = [((p // 4 + round(down / 4)) % 4, (p % 4 + round(right / 4)) % 4) for p in patches]
                there.append([4 * r + (3 - c if mirrored else c) for r, c in cells])
            logits, _ = run(view, there)
            loss = F.cross_entropy(logits, LABELS) + tv * total_variation(x)
            adam.zero_grad()
            loss.backward()
            adam.step()
            with torch.no_grad():
                if hard and held is not None:
                    for row, patches in enumerate(alive):
                        for p in set(range(16)) - set(patches):
                            r, c = 4 * (p // 4), 4 * (p % 4)
                            x[row, :, r : r + 4, c : c + 4] = held[row, :, r : r + 4, c : c + 4]
                x.copy_(torch.max(torch.min(x, (1 - mean) / std), -mean / std))
    mask = torch.zeros(COUNT, 16, dtype=torch.bool)
    for row, patches in enumerate(alive):
        mask[row, patches] = True
    return (x.detach() * std + mean), mask


@pytest.mark.parametrize("freeze", ["hard", "smi_compat"])
@pytest.mark.parametrize(("jitter", "flip"), [(0.0, False), (0.2, True)])
def test_sparse_inversion_is_that_of_a_plain_loop(jitter: float, flip: bool, freeze: Any) -> None:
    teacher, seen = classifier(), list[dict[str, Tensor]]()
    options: dict[str, Any] = {"jitter": jitter, "flip": flip, "tv": 0.01}
    pixels, mask = plain_smi(teacher, 9, {3: 11, 6: 7}, hard=freeze == "hard", on_the_way=seen, **options)
    sparse = SparseModelInversion((3, 6), (0.3, 0.3), freeze)
    result = invert(InversionTask(teacher, **options), [teacher.state()], 9, sparse)
    assert torch.equal(result.buffers["mask"], mask)
    assert torch.allclose(result.params["pixels"], pixels, atol=2e-3)
    assert (result.params["pixels"] - pixels).abs().mean() < 1e-4
    # Every patch has the score of when it was last judged: at event 6 those that had passed event 3.
    last = result.buffers["attention"]
    order = last.argsort(1)
    assert torch.allclose(last.sort(1).values, last.gather(1, order))
    judged_first = seen[0]["scores"]
    survived = torch.zeros(COUNT, 16, dtype=torch.bool).scatter(1, judged_first.topk(11).indices, True)
    assert torch.allclose(last[~survived], judged_first[~survived], atol=1e-3)
    assert torch.allclose(last[survived].view(COUNT, 11), seen[1]["scores"], atol=1e-3)
    assert (last[survived].view(COUNT, 11).sum(1) <= 1).all()


@pytest.mark.parametrize("trainer", [{}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.01}], ids=str)
def test_lean_and_trainer_give_the_same_bits(trainer: dict[str, Any]) -> None:
    teacher = classifier()
    found = []
    for client_loop in ("lean", "trainer"):
        for callbacks in ((), (SparseModelInversion((2, 4), (0.3, 0.3)),)):
            task = InversionTask(teacher)
            found.append(invert(task, [teacher.state()], 6, *callbacks, client_loop=client_loop, **trainer))
    for lean, whole in zip(found[:2], found[2:], strict=True):
        assert same(lean.params, whole.params)
        assert same(lean.buffers, whole.buffers)
        assert lean.metrics == whole.metrics
        assert lean.num_steps == whole.num_steps == 6
    assert found[0].buffers["mask"].all()
    assert found[1].buffers["mask"].sum(1).tolist() == [7] * COUNT


# ---------------------------------------------------------------------------------------------------------------------
# Who stops


class Planted(nn.Module):
    """A model whose attention is fixed: to some patches more than to others."""

    grid, patch, num_patches = (4, 4), (4, 4), 16

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        cells = x.unflatten(3, (4, 4)).unflatten(2, (4, 4)).mean((3, 5)).flatten(2)  # (B, 3, 16)
        kept = cells if keep is None else cells.gather(2, keep[:, None].expand(-1, 3, -1))
        return self.head(kept.mean(2))

    def attention(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        scores = (torch.arange(16)[None] * 5 + 3 * torch.arange(len(x))[:, None]) % 16 / 16
        return scores if keep is None else scores.gather(1, keep)


def test_planted_attention_keeps_exactly_the_planted_patches() -> None:
    teacher = classifier(Planted)
    task, went_on = InversionTask(teacher), list[Tensor]()
    go_on_with = task.go_on_with
    task.go_on_with = lambda kept: (went_on.append(kept), go_on_with(kept))  # type: ignore[method-assign, assignment, func-returns-value]
    result = invert(task, [teacher.state()], 8, SparseModelInversion((2, 3, 7), (0.3, 0.0, 0.5)))
    scores = Planted().attention(noise())
    assert [kept.shape[1] for kept in went_on] == [11, 5]  # a ratio of 0 is no event
    for kept in went_on:
        assert kept.sort(1).values.tolist() == scores.topk(kept.shape[1], 1).indices.sort(1).values.tolist()
        assert all(row.unique().numel() == kept.shape[1] for row in kept)
    mask = torch.zeros(COUNT, 16, dtype=torch.bool).scatter(1, went_on[-1], True)
    assert torch.equal(result.buffers["mask"], mask)
    assert torch.equal(result.buffers["attention"], scores)
    assert all(set(after.tolist()) < set(before.tolist()) for before, after in zip(*went_on, strict=True))


def test_the_score_is_that_of_the_images_before_the_last_dense_step() -> None:
    """One event at 5: the survivors are the top of the attention to the images that a fit of 4 steps ends with."""
    teacher = classifier()
    before = invert(InversionTask(teacher), [teacher.state()], 4).params["pixels"]
    mask = invert(InversionTask(teacher), [teacher.state()], 6, SparseModelInversion((5,), (0.4,))).buffers["mask"]
    network = copy.deepcopy(teacher.network).eval()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    attention = network.attention((before - mean) / std)
    assert torch.equal(mask, torch.zeros_like(mask).scatter(1, attention.topk(9, 1).indices, True))


@pytest.mark.parametrize("schedule", [((), ()), ((2, 4), (0.0, 0.0)), ((30,), (0.5,))], ids=str)
def test_without_events_the_fit_is_the_dense_one_bit_for_bit(schedule: Any) -> None:
    teacher = classifier()
    dense = invert(InversionTask(teacher), [teacher.state()], 6)
    sparse = invert(InversionTask(teacher), [teacher.state()], 6, SparseModelInversion(*schedule))
    assert same(dense.params, sparse.params)
    assert dense.metrics == sparse.metrics
    assert sparse.buffers["mask"].all()


def test_the_gradient_reaches_stopped_pixels_through_total_variation_alone() -> None:
    teacher = classifier()
    kept = torch.tensor([[0, 1, 4, 5]]).expand(COUNT, -1)
    for tv in (0.0, 0.1):
        task = ready(InversionTask(teacher, tv=tv, **PLAIN), [teacher.state()])
        task.go_on_with(kept)
        task.loss(BATCH).backward()
        assert task.pixels.grad is not None
        inside, outside = task.pixels.grad[:, :, :8, :8], task.pixels.grad[:, :, 8:, 8:]
        assert (inside != 0).all()
        assert (outside != 0).all() if tv else (outside == 0).all()


def test_hard_freeze_keeps_bits_and_smi_compat_drifts_by_momentum() -> None:
    teacher = classifier()
    options: dict[str, Any] = {**PLAIN, "tv": 0.0}
    before = invert(InversionTask(teacher, **options), [teacher.state()], 3).params["pixels"]
    ends = {}
    for freeze in ("hard", "smi_compat"):
        sparse = SparseModelInversion((3,), (0.5,), freeze)  # type: ignore[arg-type]
        result = invert(InversionTask(teacher, **options), [teacher.state()], 15, sparse)
        alive = (
            result.buffers["mask"]
            .view(COUNT, 1, 4, 4)
            .repeat_interleave(4, 2)
            .repeat_interleave(4, 3)
            .expand(-1, 3, -1, -1)
        )
        ends[freeze] = (result.params["pixels"] - before) / torch.tensor(STD).view(3, 1, 1)  # in units of the network
        assert (ends[freeze][alive] != 0).float().mean() > 0.9
        drift = ends[freeze][~alive]
        if freeze == "hard":
            assert (drift == 0).all()
        else:
            assert (drift != 0).float().mean() > 0.5
            assert drift.abs().max() < 2 * 0.25  # beta_1 is 1/2: half a step, a quarter, ...
    moving = InversionTask(teacher, **{**options, "tv": 1.0})
    result = invert(moving, [teacher.state()], 15, SparseModelInversion((3,), (0.5,), "smi_compat"))
    alive = (
        result.buffers["mask"]
        .view(COUNT, 1, 4, 4)
        .repeat_interleave(4, 2)
        .repeat_interleave(4, 3)
        .expand(-1, 3, -1, -1)
    )
    drift = (result.params["pixels"] - before) / torch.tensor(STD).view(3, 1, 1)
    assert drift[~alive].abs().max() > 2 * 0.25  # total variation goes on pulling


# ---------------------------------------------------------------------------------------------------------------------
# What it minimises, and what it leaves alone


def test_the_loss_is_the_sum_of_its_terms() -> None:
    teachers = [classifier(seed=seed) for seed in range(2)]
    student = classifier(seed=5)
    scores = [teacher.network.eval()(noise()) for teacher in (*teachers, student)]
    ce = {
        "logits": F.cross_entropy((scores[0] + scores[1]) / 2, LABELS),
        "probs": F.nll_loss(((scores[0].softmax(1) + scores[1].softmax(1)) / 2).log(), LABELS),
    }
    assert abs(ce["logits"] - ce["probs"]) > 1e-3
    states, given = [teacher.state() for teacher in teachers], {"student": student.state()}

    def loss(**options: Any) -> Tensor:
        return ready(InversionTask(teachers[0], **{**PLAIN, "tv": 0.0, **options}), states, given).loss(BATCH)

    for combine, expected in ce.items():
        assert torch.allclose(loss(combine=combine), expected, atol=1e-5)
    assert torch.allclose(loss(tv=0.3), ce["logits"] + 0.3 * total_variation(noise()), atol=1e-4)
    norms = noise().flatten(1).square().sum(1).sqrt().mean()
    assert torch.allclose(loss(l2=0.7), ce["logits"] + 0.7 * norms, atol=1e-4)
    for combine in ("logits", "probs"):
        mixed = (
            (scores[0] + scores[1]) / 2 if combine == "logits" else (scores[0].softmax(1) + scores[1].softmax(1)).log()
        )
        expected = ce[combine] + 0.5 * (1 - jensen_shannon(scores[2], mixed))
        assert torch.allclose(loss(adversarial=0.5, combine=combine), expected, atol=1e-5)


def test_images_keep_their_classes_though_the_loader_shuffles() -> None:
    teacher = classifier()
    task = ready(InversionTask(teacher, **PLAIN), [teacher.state()])
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(task.loss(Batch(order, LABELS[order])), task.loss(BATCH))
    wrong = task.loss(Batch(torch.arange(COUNT), LABELS[order]))
    assert not torch.allclose(wrong, task.loss(BATCH), atol=1e-3)
    with pytest.raises(ValueError, match="saw 2 of 4 images; it must see all"):
        task.loss(Batch(order[:2], LABELS[:2]))


def normalised(*_: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, CLASSES),
    )


def test_batch_norm_statistics_of_the_teachers_are_matched() -> None:
    teacher = classifier(normalised)
    states = []
    for seed in range(2):
        state = teacher.state()
        for name in state:
            if "running" in name:
                state[name] = torch.rand(state[name].shape, generator=torch_generator(seed, name)) + 0.5
        states.append(state)
    task = ready(InversionTask(teacher, batch_norm=0.2, tv=0.0, **PLAIN), states)
    expected, logits = torch.zeros(()), []
    for state in states:
        reference = copy.deepcopy(teacher)
        reference.load(state)
        network = reference.network.eval()
        first = network[0](noise())
        last = network[:5](noise())
        for inputs, layer in ((first.transpose(0, 1).flatten(1), network[1]), (last.T, network[5])):
            expected = expected + (inputs.mean(1) - layer.running_mean).norm()
            expected = expected + (inputs.var(1, unbiased=False) - layer.running_var).norm()
        logits.append(network(noise()))
    ce = F.cross_entropy((logits[0] + logits[1]) / 2, LABELS)
    assert torch.allclose(task.loss(BATCH), ce + 0.2 * expected / 2, atol=1e-5)
    assert torch.allclose(task.loss(BATCH), ce + 0.2 * expected / 2, atol=1e-5)  # nothing piles up


@pytest.mark.parametrize("network", [vit, lambda *a: ResNet8(*a, norm="batch"), MLP], ids=["vit", "resnet8", "mlp"])
def test_images_are_found_and_teachers_stay_as_they_were(network: Any) -> None:
    teacher = classifier(network, scale=0.1)
    state = teacher.state()
    given = {name: value.clone() for name, value in state.items()}
    teacher.train()
    weights = {name: value.clone() for name, value in teacher.state_dict().items()}
    task = InversionTask(teacher, tv=1e-3, **PLAIN, optimizer=lambda p: torch.optim.Adam(p, lr=0.05))
    assert list(task.trainable()) == ["pixels"]
    assert sorted(task.state_dict()) == ["attention", "mask", "pixels"]
    start, done = (invert(task, [state], steps, client_loop="auto") for steps in (1, 40))
    assert done.metrics["confidence"] > start.metrics["confidence"] + 0.1
    assert done.metrics["loss"] < start.metrics["loss"]
    pixels = done.params["pixels"]
    assert (pixels.min() >= 0, pixels.max() <= 1) == (True, True)
    teacher.eval()
    with torch.no_grad():
        confidence = float(teacher(pixels).softmax(1).gather(1, LABELS[:, None]).mean())
    assert confidence == pytest.approx(done.metrics["confidence"], abs=0.05)  # of the images, by the usual way in
    assert same(given, state)
    assert same(weights, teacher.state_dict())
    assert not any(module.training for module in task.network.modules())
    assert all(p.grad is None and not p.requires_grad for p in task.network.parameters())
    assert all(value.grad is None and not value.requires_grad for value in state.values())
    again = invert(task, [state], 40, client_loop="auto")
    assert same(again.params, done.params)
    assert again.metrics == done.metrics


def test_a_fit_starts_dense_and_with_as_many_images_as_it_is_given() -> None:
    teacher = classifier()
    task = InversionTask(teacher)
    first = invert(task, [teacher.state()], 3, SparseModelInversion((1,), (0.5,)))
    more = invert(task, [teacher.state()], 3, labels=torch.tensor([1, 2, 3, 4, 0, 1]))
    assert more.params["pixels"].shape == (6, *SHAPE)
    assert more.buffers["mask"].shape == more.buffers["attention"].shape == (6, 16)
    assert more.buffers["mask"].all()
    assert same(invert(task, [teacher.state()], 3, SparseModelInversion((1,), (0.5,))).params, first.params)
    with pytest.raises(ValueError, match=r"pixels have shape \(3, 16, 16\); it must be"):
        task.load({"pixels": noise()[0]})


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tv": -1.0}, "tv is -1.0; it must be at least 0"),
        ({"l2": float("nan")}, "l2 is nan"),
        ({"adversarial": -0.1}, "adversarial is -0.1"),
        ({"jitter": 1.0}, r"jitter is 1.0; it must be in \[0, 1\)"),
        ({"combine": "votes"}, "combine is 'votes'; allowed: 'logits', 'probs'"),
        ({"batch_norm": 1.0}, "batch_norm is 1.0; it must be 0 for SparseViT"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        InversionTask(classifier(), **options)


def test_wrong_teachers_and_networks_are_refused() -> None:
    teacher = classifier()
    with pytest.raises(ValueError, match="asked without teachers; given: nothing"):
        invert(InversionTask(teacher), [], 1)
    with pytest.raises(ValueError, match=r"adversarial is 1.0; a group 'student'"):
        invert(InversionTask(teacher, adversarial=1.0), [teacher.state()], 1)
    with pytest.raises(ValueError, match=r"teacher/0 is of another model: SparseViT has no such 'network.model"):
        invert(InversionTask(teacher), [{name: value[..., :2] for name, value in teacher.state().items()}], 1)
    with pytest.raises(ValueError, match=r"events are \[1\], but MLP cannot leave out patches"):
        invert(InversionTask(classifier(MLP)), [classifier(MLP).state()], 1, SparseModelInversion((1,), (0.3,)))
    with pytest.raises(ValueError, match=r"of 16 patches they leave .*at least 1 must stay"):
        invert(InversionTask(teacher), [teacher.state()], 1, SparseModelInversion((1, 2), (0.9, 0.9)))
    with pytest.raises(ValueError, match="is a ClassificationTask; only a built ClassificationTask"):
        InversionTask(ClassificationTask(vit))
    with pytest.raises(ValueError, match="freeze is 'soft'; allowed"):
        SparseModelInversion(freeze="soft")  # type: ignore[arg-type]
