"""The towers are open_clip's, attention taken apart, LoRA added exactly once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_lightning.data.glyphs import DIGITS, LETTERS, DigitDomains
from fl_lightning.data.scenes import COLOURS, PAIRS, SHAPES, Scenes
from fl_lightning.models.clip import CLIP, LoRA, SplitAttention, TextTower, VisionTower, build_clip, export_clip

PROMPTS = ["a photo of a red circle", "a photo of a seven", "a photo of a letter q"]


@pytest.fixture
def images():
    return torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def adapted():
    """A tiny CLIP whose LoRA factors are all non-zero."""
    clip = build_clip("tiny-clip-32", lora=LoRA(rank=3, alpha=6.0, projections=("q", "k", "v", "out")), seed=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in clip.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return clip


def trainable(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("masked", [False, True])
def test_split_attention_equals_the_fused_one(masked):
    torch.manual_seed(0)
    fused = nn.MultiheadAttention(24, 3, batch_first=True)
    nn.init.normal_(fused.in_proj_bias)
    x = torch.randn(2, 7, 24)
    mask = torch.full((7, 7), float("-inf")).triu(1) if masked else None
    expected = fused(x, x, x, need_weights=False, attn_mask=mask)[0]
    torch.testing.assert_close(SplitAttention(fused)(x, x, x, attn_mask=mask)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "fused",
    [
        nn.MultiheadAttention(8, 2),
        nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1),
        nn.MultiheadAttention(8, 2, batch_first=True, kdim=4, vdim=4),
        nn.MultiheadAttention(8, 2, batch_first=True, bias=False),
    ],
)
def test_attention_of_another_kind_is_refused(fused):
    with pytest.raises(ValueError, match="attention must have"):
        SplitAttention(fused)


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_towers_equal_open_clips(quick_gelu):
    from open_clip import CustomTextCLIP

    torch.manual_seed(3)
    vision = {"image_size": 64, "patch_size": 32, "width": 64, "head_width": 32, "layers": 3}
    text = {"context_length": 9, "vocab_size": 50, "width": 48, "heads": 4, "layers": 3}
    original = CustomTextCLIP(32, vision, text, quick_gelu=quick_gelu)
    for name, parameter in original.named_parameters():  # open_clip starts these at zero, where an error would hide
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    ours = copy.deepcopy(original)
    images, tokens = torch.rand(4, 3, 64, 64), torch.randint(1, 49, (6, 9))
    visual = VisionTower(ours.visual, [0.2, 0.3, 0.4], [0.5, 0.6, 0.7])
    normalised = (images - torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)) / torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    torch.testing.assert_close(visual(images), original.encode_image(normalised), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(TextTower(ours.text, len)(tokens), original.encode_text(tokens), rtol=1e-5, atol=2e-6)


def test_the_delta_is_added_exactly_once(adapted, images):
    merged = build_clip("tiny-clip-32", lora=None, seed=1)
    state = adapted.state_dict()
    for name, parameter in merged.named_parameters():
        owner, _, kind = name.rpartition(".")
        if f"{owner}.base_layer.{kind}" in state:
            parameter.data = state[f"{owner}.base_layer.{kind}"].clone()
            if kind == "weight":  # alpha / rank = 2
                factors = [state[f"{owner}.lora_{x}.default.weight"] for x in "BA"]
                parameter.data += 2 * factors[0] @ factors[1]
        else:
            parameter.data = state[name]
    tokens = adapted.text.tokenize(PROMPTS)
    frozen = build_clip("tiny-clip-32", lora=None, seed=1)
    assert not torch.allclose(frozen.visual(images), merged.visual(images), atol=1e-2)
    torch.testing.assert_close(adapted.visual(images), merged.visual(images), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(adapted.text(tokens), merged.text(tokens), rtol=1e-4, atol=1e-5)


def test_without_training_lora_changes_no_logit(images):
    frozen = build_clip("tiny-clip-32", lora=None, seed=5)
    fresh = build_clip("tiny-clip-32", lora=LoRA(), seed=5)
    tokens = frozen.text.tokenize(PROMPTS)
    assert torch.equal(frozen(images, tokens), fresh(images, tokens))


@pytest.mark.parametrize("last_blocks", [1, 2, 4])
def test_prefix_and_suffix_make_the_whole(images, last_blocks):
    clip = build_clip("tiny-clip-32", lora=LoRA(last_blocks=last_blocks), seed=2)
    tokens = clip.text.tokenize(PROMPTS)
    activations = clip.visual.prefix(images)
    assert activations.shape == (5, 17, 96)
    assert not activations.requires_grad
    torch.testing.assert_close(clip.visual.suffix(activations), clip.visual(images))
    activations = clip.text.prefix(tokens)
    assert activations.shape == (3, 12, 64)
    torch.testing.assert_close(clip.text.suffix(activations, tokens), clip.text(tokens))


def test_the_prefix_does_not_see_the_factors(adapted, images):
    before = adapted.visual.prefix(images)
    for parameter in trainable(adapted.visual).values():
        parameter.data *= 3
    assert torch.equal(adapted.visual.prefix(images), before)


@pytest.mark.parametrize("projections", [("q", "k", "v"), ("q", "v"), ("out",), ["q", "k", "v", "out"]])
def test_only_the_factors_train(projections):
    clip = build_clip("tiny-clip-32", lora=LoRA(rank=5, projections=projections, last_blocks=1), seed=0)
    for tower, width in ((clip.visual, 96), (clip.text, 64)):
        names = trainable(tower)
        assert sum(p.numel() for p in names.values()) == len(projections) * 5 * (width + width)
        expected = [
            f"trunk.transformer.resblocks.3.attn.{p}.lora_{x}.default.weight" for p in projections for x in "AB"
        ]
        assert sorted(names) == sorted(expected)
        assert all(p.any() == ("lora_A" in name) for name, p in names.items())


def test_a_step_moves_factors_of_its_own_tower_only(adapted, images):
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    adapted.visual(images).square().sum().backward()
    optimizer.step()
    for name, parameter in adapted.named_parameters():
        assert torch.equal(parameter, before[name]) == (not (name.startswith("visual") and "lora_" in name)), name


def test_the_vision_tower_stands_alone(images):
    clip = build_clip("tiny-clip-32", lora=LoRA(), seed=0)
    alone = copy.deepcopy(clip.visual)
    reachable = {id(m) for m in alone.modules()}
    assert not reachable & {id(m) for m in clip.text.modules()}
    assert not any(isinstance(m, TextTower | nn.Embedding | CLIP) for m in alone.modules())
    assert torch.equal(alone(images), clip.visual(images))


def test_weights_come_from_the_seed_alone():
    torch.manual_seed(0)
    one = build_clip("tiny-clip-32", lora=LoRA(), seed=7).state_dict()
    state = torch.get_rng_state()
    torch.rand(3)
    two = build_clip("tiny-clip-32", lora=LoRA(), seed=7).state_dict()
    other = build_clip("tiny-clip-32", lora=LoRA(), seed=8).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    key = "visual.trunk.transformer.resblocks.3.attn.q.lora_A.default.weight"
    assert not torch.equal(one[key], other[key])
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_exported_weights_come_back(tmp_path, images):
    clip = build_clip("tiny-clip-32", lora=None, seed=4)
    clip.logit_scale.fill_(33.0)
    export_clip(clip, tmp_path / "own.safetensors")
    back = build_clip("tiny-clip-32", str(tmp_path / "own.safetensors"), lora=LoRA(), seed=0)
    assert back.logit_scale == 33
    assert F.cosine_similarity(back.visual(images), clip.visual(images)).min() > 0.9999
    with pytest.raises(ValueError, match="with LoRA"):
        export_clip(back, tmp_path / "again.safetensors")


@pytest.mark.parametrize("shape", [(2, 3, 28, 28), (2, 1, 32, 32), (3, 32, 32)])
def test_images_of_another_size_are_refused(shape):
    clip = build_clip("tiny-clip-32", lora=None, seed=0)
    with pytest.raises(ValueError, match=r"must be \(B, 3, 32, 32\)"):
        clip.visual(torch.zeros(shape))


def test_tokens():
    text = build_clip("tiny-clip-32", lora=None, seed=0).text
    tokens = text.tokenize(["A photo of a zero.", "circle"])
    assert tokens.shape == (2, 12)
    assert tokens.dtype == torch.int64
    assert tokens.argmax(1).tolist() == [6, 2]
    assert tokens[:, 0].tolist() == [1, 1]
    with pytest.raises(ValueError, match="'unicorn'"):
        text.tokenize(["a photo of a unicorn"])
    with pytest.raises(ValueError, match="at most 10"):
        text.tokenize(["a " * 11])
    with pytest.raises(ValueError, match="must be"):
        text(tokens[:, :5])


@pytest.mark.parametrize(
    "bad",
    [
        {"rank": 0},
        {"alpha": 0.0},
        {"dropout": 1.0},
        {"projections": ("q", "x")},
        {"projections": ()},
        {"last_blocks": 0},
    ],
)
def test_lora_out_of_range(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LoRA(**bad)


def test_more_blocks_than_there_are():
    with pytest.raises(ValueError, match=r"last_blocks is 5, must be in 1\.\.4"):
        build_clip("tiny-clip-32", lora=LoRA(last_blocks=5), seed=0)


@pytest.mark.parametrize(
    ("name", "pretrained", "message"),
    [
        ("tiny-clip-32", "nothing", "must be one of"),
        ("no-such-model", None, "no-such-model"),
        ("ViT-B-16", "no-such-tag", "must be one of"),
        ("RN50", None, "ModifiedResNet"),
    ],
)
def test_what_cannot_be_built_is_named(name, pretrained, message):
    with pytest.raises(ValueError, match=message):
        build_clip(name, pretrained, lora=None, seed=0)


def test_openai_weights_get_their_activation(monkeypatch):
    import open_clip

    asked = {}

    def create(*args, **kwargs):
        asked.update(kwargs)
        raise RuntimeError("no network")

    monkeypatch.setattr(open_clip, "create_model", create)
    with pytest.raises(RuntimeError, match="without network, give a file"):
        build_clip("ViT-B-16", "openai", lora=None, seed=0)
    assert asked["force_quick_gelu"]


def test_every_class_of_our_own_data_can_be_said():
    names = [f"{COLOURS[colour]} {SHAPES[shape]}" for colour, shape in PAIRS]
    tokens = build_clip("tiny-clip-32", lora=None, seed=0).text.tokenize([*DIGITS, *LETTERS, *names])
    assert len(tokens.unique(dim=0)) == 100


def zero_shot(clip, examples, names, classes):
    """Accuracy on the examples of ``classes``, told apart among their names only."""
    own = examples.of_classes(classes)
    with torch.no_grad():
        tokens = clip.text.tokenize([f"a photo of a {names[label]}" for label in classes])
        logits = clip(own.fetch(torch.arange(len(own))), tokens)
    return (torch.tensor(classes)[logits.argmax(1)] == own.labels).float().mean().item()


@pytest.mark.parametrize(
    ("weights", "source", "base", "novel"),
    [
        ("glyphs", DigitDomains(["handwritten"], test_fraction=0.5), range(5), range(5, 10)),
        ("scenes", Scenes(1, 15, shift=0.3), range(32), range(32, 64)),
    ],
)
def test_shipped_weights_are_decent_but_not_perfect(weights, source, base, novel):
    clip = build_clip("tiny-clip-32", weights, lora=LoRA(), seed=0)
    splits = source.load(image_size=32, channels=3, seed=0)
    for classes in (base, novel):
        assert 0.35 < zero_shot(clip, splits.test, splits.class_names, list(classes)) < 0.85


@pytest.mark.slow
def test_the_papers_backbone():
    clip = build_clip("ViT-B-16", lora=LoRA(), seed=0)
    assert isinstance(clip, CLIP)
    assert (clip.embed_dim, clip.image_size, len(clip.visual.blocks), clip.visual.first_adapted) == (
        512,
        (224, 224),
        12,
        10,
    )
    assert sum(p.numel() for p in trainable(clip.visual).values()) == 2 * 3 * 4 * (768 + 768) == 36864
    assert sum(p.numel() for p in trainable(clip.text).values()) == 2 * 3 * 4 * (512 + 512) == 24576
    with torch.no_grad():
        tokens = clip.text.tokenize(["a photo of a dog", "a photo of a cat"])
        activations = clip.visual.prefix(torch.rand(1, 3, 224, 224))
        assert tokens.shape == (2, 77)
        assert activations.shape == (1, 197, 768)
        assert clip.visual.suffix(activations).shape == (1, 512)
        assert clip.text(tokens).shape == (2, 512)
