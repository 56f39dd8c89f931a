"""A ViT on some of its patches: the numbers, the gradients and the cost of the patches that it looks at, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.__main__ import main
from fl_lightning.data.examples import DataInfo
from fl_lightning.data.sources import Digits, PublicSplit
from fl_lightning.models import SparseViT
from fl_lightning.rng import torch_generator
from fl_lightning.tasks import ClassificationTask

SHAPE = (3, 16, 16)  # 4 x 4 patches of 4 x 4 pixels
DEIT = "deit_tiny_patch16_224"


def images(shape: tuple[int, ...] = SHAPE, count: int = 3) -> Tensor:
    return torch.randn(count, *shape, generator=torch_generator(0, "images"))


def tiny(shape: tuple[int, int, int] = SHAPE, **options: Any) -> SparseViT:
    torch.manual_seed(0)
    network = SparseViT(shape, 5, **{"embed_dim": 24, "depth": 2, "num_heads": 3, **options}).eval()
    for name, value in network.named_parameters():  # biases and heads start at 0, which would hide what reads them
        value.data += 0.1 * torch.randn(value.shape, generator=torch_generator(0, name))
    return network


def subsets(count: int, kept: int, batch: int = 3) -> Tensor:
    return torch.stack([torch.randperm(count, generator=torch_generator(0, "keep", b))[:kept] for b in range(batch)])


def test_all_patches_are_timms_own_model() -> None:
    network = tiny()
    assert torch.equal(network(images()), network.model(images()))
    everything = torch.arange(16).expand(3, -1)
    assert torch.equal(network(images(), everything, dense_embedding=True), network.model(images()))
    assert torch.allclose(network(images(), everything), network.model(images()), atol=1e-5)
    shuffled = subsets(16, 16)
    assert not torch.equal(shuffled, everything)
    assert torch.allclose(network(images(), shuffled), network.model(images()), atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 16), (3, 32, 32), (1, 8, 12)], ids=str)
def test_a_sparse_pass_is_timms_on_the_tokens_that_are_left(shape: tuple[int, int, int]) -> None:
    """The reference embeds everything and drops tokens afterwards, image by image."""
    network = tiny(shape)
    model = network.model
    count = shape[1] * shape[2] // 16
    assert (network.grid, network.num_patches) == ((shape[1] // 4, shape[2] // 4), count)
    keep, x = subsets(count, 2), images(shape)
    embedded = model._pos_embed(model.patch_embed(x))
    for row, kept in enumerate(keep):
        tokens = embedded[row : row + 1, [0, *(kept + 1).tolist()]]
        features = model.norm(model.blocks(tokens))
        assert torch.allclose(network(x, keep)[row], model.head(features[0, 0]), atol=1e-5)
        assert torch.allclose(network(x, keep, dense_embedding=True)[row], model.head(features[0, 0]), atol=1e-5)
        assert torch.allclose(network.tokens(x, keep)[row], model.head(features[0, 1:]), atol=1e-5)
    features = model.norm(model.blocks(embedded))
    assert torch.allclose(network.tokens(x), model.head(features[:, 1:]), atol=1e-5)


def unfused_attention(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits by timm's path without fused attention, and the last block's weights (B, heads, T, T) as it multiplied them."""
    seen: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
    handle = model.blocks[-1].attn.attn_drop.register_forward_hook(lambda _, __, out: seen.append(out))
    logits = model.forward_head(model.norm(model.blocks(tokens)))
    handle.remove()
    for block in model.blocks:
        block.attn.fused_attn = True
    return logits, seen[0]


def test_attention_is_the_weights_that_the_last_block_multiplies_by() -> None:
    network, x = tiny(), images()
    model = network.model
    everything = model._pos_embed(model.patch_embed(x))
    logits, weights = unfused_attention(model, everything)
    assert torch.allclose(network.attention(x), weights[:, :, 0, 1:].mean(1), atol=1e-6)
    assert torch.allclose(network(x), logits, atol=1e-5)
    assert (network.attention(x).sum(1) <= 1).all()
    keep = subsets(16, 6)
    dropped = torch.stack([everything[row, [0, *(kept + 1).tolist()]] for row, kept in enumerate(keep)])
    logits, weights = unfused_attention(model, dropped)
    assert torch.allclose(network.attention(x, keep), weights[:, :, 0, 1:].mean(1), atol=1e-6)
    both = network.forward_with_attention(x, keep)
    assert torch.allclose(both[0], logits, atol=1e-5)
    assert torch.equal(both[0], network(x, keep))
    assert torch.equal(both[1], network.attention(x, keep))


def test_the_gradient_is_zero_on_dropped_patches_and_nowhere_else() -> None:
    network, keep = tiny(), subsets(16, 6)
    x = images().requires_grad_()
    nn.functional.cross_entropy(network(x, keep), torch.tensor([0, 1, 2])).backward()
    assert x.grad is not None
    strength = x.grad.unflatten(3, (4, 4)).unflatten(2, (4, 4)).abs().amax((1, 3, 5)).flatten(1)  # (B, N)
    mask = torch.zeros(3, 16, dtype=torch.bool).scatter(1, keep, True)
    assert (strength[~mask] == 0).all()
    assert (strength[mask] > 1e-6).all()


def flops(network: nn.Module, *arguments: Any, **options: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(*arguments, **options)
    return counter.get_total_flops()


def test_flops_of_deit_tiny_on_46_of_196_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    network = SparseViT((3, 224, 224), 10, DEIT).eval()
    assert sum(p.numel() for p in network.parameters()) == 5_526_346  # section 1 of FedMITR's specification
    for block in network.model.blocks:
        monkeypatch.setattr(block.attn, "fused_attn", False)  # the counter does not see into the fused one
    x, keep = torch.zeros(1, 3, 224, 224), torch.arange(46)[None]
    dense, sparse = flops(network, x), flops(network, x, keep)
    # 2.4: 12 N d^2 + 2 N^2 d in each of 12 blocks, and 768 d for each patch that is embedded.
    by_hand = [
        2 * (12 * (12 * n * 192**2 + 2 * n**2 * 192) + embedded * 768 * 192 + 192 * 10)
        for n, embedded in ((197, 196), (47, 46), (47, 196))
    ]
    assert [dense, sparse, flops(network, x, keep, dense_embedding=True)] == by_hand
    assert dense / sparse == pytest.approx(4.70, rel=0.01)
    assert dense / by_hand[2] == pytest.approx(4.34, rel=0.01)


def vision_transformer(**options: Any) -> Any:
    return VisionTransformer(16, 4, 3, 5, embed_dim=24, depth=2, num_heads=3, **options)


@pytest.mark.parametrize(
    "options",
    [{"reg_tokens": 2}, {"reg_tokens": 2, "no_embed_class": True}, {"pos_embed": "none"}, {"pre_norm": True}],
    ids=str,
)
def test_kinds_of_timms_transformers(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.models.sparse_vit.create_timm", lambda *_: vision_transformer(**options))
    network = SparseViT(SHAPE, 5, "made up").eval()
    x, everything = images(), torch.arange(16).expand(3, -1)
    for value in network.parameters():
        value.data += 0.1 * torch.randn(value.shape, generator=torch_generator(0, "more"))
    assert torch.allclose(network(x, everything), network.model(x), atol=1e-5)
    assert network.attention(x, everything[:, :4]).shape == (3, 4)
    assert network.tokens(x, everything[:, :4]).shape == (3, 4, 5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deit_tiny_distilled_patch16_224", "has a distillation token"),
        ("vit_base_patch16_siglip_224", "has no class token"),
        ("vit_base_r50_s16_224", "whose patch_embed is a HybridEmbed"),
        ("vit_little_patch16_reg1_gap_256", "has no class token"),
        ("resnet18", "it must be a plain VisionTransformer"),
        ("no_such_model", "must be a model of timm"),
    ],
)
def test_other_models_are_refused_by_name(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side = 256 if name.endswith("256") else 224
    created = timm.create_model

    def weightless(*arguments: Any, **options: Any) -> nn.Module:
        with torch.device("meta"):
            return created(*arguments, **options)

    monkeypatch.setattr(timm, "create_model", weightless)
    with pytest.raises(ValueError, match=reason):
        SparseViT((3, side, side), 5, name)


def test_a_model_that_does_not_classify_by_its_class_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    averaging = vision_transformer(global_pool="avg")
    monkeypatch.setattr("fl_lightning.models.sparse_vit.create_timm", lambda *_: averaging)
    with pytest.raises(ValueError, match="pools by 'avg'; it must classify by its class token"):
        SparseViT(SHAPE, 5, "made up")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"patch_size": 5}, "patch_size is 5; it must divide"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"depth": 0}, "depth is 0"),
        ({"embed_dim": 25}, "embed_dim is 25; it must be a multiple of num_heads, 3"),
        ({"pretrained": True}, "pretrained is True"),
        ({"weights": "no-such"}, "weights is 'no-such'; it must be one of"),
        ({"name": DEIT}, r"input_shape is \(3, 16, 16\); deit_tiny_patch16_224 takes 224"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tiny(**options)


def test_a_classification_task_passes_options_to_its_network() -> None:
    task = ClassificationTask(lambda *_: tiny(), mean=[0.2], std=[0.4])
    task.build(DataInfo(tuple("abcde"), SHAPE, tuple(range(5))), 0)
    task.eval()
    x, keep = images().sigmoid(), subsets(16, 6)
    expected = task.network((x - 0.2) / 0.4, keep)
    assert torch.allclose(task.logits(x, keep=keep), expected, atol=1e-6)
    assert torch.allclose(task(x, keep=keep), expected, atol=1e-6)
    assert torch.allclose(functional_call(task, task.state(), (x,), {"keep": keep}), expected, atol=1e-6)
    assert not torch.allclose(task.logits(x), expected, atol=1e-3)


def test_wrong_patches_and_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"keep has shape \(2, 4\); it must be \(3, k >= 1\)"):
        tiny()(images(), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"images have shape \(3, 3, 8, 8\)"):
        tiny()(images((3, 8, 8)), torch.zeros(3, 1, dtype=torch.int64))


ASSETS = Path(__file__).parents[2] / "fl_lightning" / "assets"
CONFIGS = Path(__file__).parents[2] / "configs" / "pretrain"
# By world: classes of the pretraining and its accuracy on the test images of all variants.
SHIPPED = {"digits": (30, 0.919)}


@pytest.mark.parametrize("world", SHIPPED)
def test_the_shipped_body_fits_its_configuration_and_is_small(world: str) -> None:
    config = yaml.safe_load((CONFIGS / f"tiny_vit_{world}.yaml").read_text())
    network = config["model"]["init_args"]["network"]["init_args"]
    side = config["data"].get("image_size", 28)
    loaded = SparseViT((1, side, side), 10, **network, weights=f"tiny-vit-{world}")
    state = load_file(ASSETS / f"tiny-vit-{world}.safetensors")
    assert state["network.model.head.weight"].shape[0] == SHIPPED[world][0]
    assert torch.equal(loaded.model.pos_embed, state["network.model.pos_embed"].float())
    assert (ASSETS / f"tiny-vit-{world}.safetensors").stat().st_size < 600_000


def test_the_shipped_body_reads_digits_that_it_was_not_trained_on() -> None:
    """The whole network on the test images of all variants; on those as they are, ten classes to choose from."""
    source = PublicSplit(Digits(), 0.3477, "public", variants=["none", "rotate90", "mirror"])
    test = source.load(image_size=16, channels=None, seed=5).test
    task = ClassificationTask(lambda *a: SparseViT(*a, embed_dim=48, depth=2, num_heads=4))
    task.build(DataInfo(tuple(map(str, range(30))), (1, 16, 16), tuple(range(30))), 0)
    task.load(load_file(ASSETS / "tiny-vit-digits.safetensors"))
    task.eval()
    with torch.no_grad():
        scores = task(test.fetch(torch.arange(len(test))))
    assert float((scores.argmax(1) == test.labels).float().mean()) == pytest.approx(SHIPPED["digits"][1], abs=0.002)
    as_they_are = test.labels < 10
    right = scores[as_they_are, :10].argmax(1) == test.labels[as_they_are]
    assert float(right.float().mean()) == pytest.approx(0.95, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("world", SHIPPED)
def test_the_configuration_still_makes_the_shipped_body(
    world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two minutes for digits. The same machine gives the same bits; others round differently over some thousand steps."""
    monkeypatch.chdir(tmp_path)
    cli = main(["fit", "--config", str(CONFIGS / f"tiny_vit_{world}.yaml")])
    made, shipped = (load_file(folder / f"tiny-vit-{world}.safetensors") for folder in (tmp_path, ASSETS))
    assert {name: value.shape for name, value in made.items()} == {name: v.shape for name, v in shipped.items()}
    accuracy = cli.loop.history[-1]["global/acc"]  # type: ignore[attr-defined]
    assert accuracy == pytest.approx(SHIPPED[world][1], abs=0.03)


@pytest.mark.parametrize("prefix", ["network.model.", "model.", ""])
def test_a_body_is_loaded_without_its_classifier(prefix: str, tmp_path: Path) -> None:
    source = tiny()
    path = str(tmp_path / "body.safetensors")
    save_file({prefix + name: value for name, value in source.model.state_dict().items()}, path)
    torch.manual_seed(1)
    loaded = SparseViT(SHAPE, 7, embed_dim=24, depth=2, num_heads=3, weights=path).eval()
    same = {
        name for name, value in loaded.model.state_dict().items() if torch.equal(value, load_file(path)[prefix + name])
    }
    assert set(source.model.state_dict()) - same == {"head.weight", "head.bias"}
    assert torch.equal(loaded.attention(images()), source.attention(images()))
    for wrong, reason in (
        ({"depth": 3}, r"of another model: they lack \['blocks.2"),
        ({"embed_dim": 48}, r"is \(1, 1, 24\) in weights"),
        ({"patch_size": 8}, r"in the model; image, patch and width must be those"),
    ):
        with pytest.raises(ValueError, match=reason):
            tiny(**{"weights": path, **wrong})
