"""CLIP with LoRA (Hu et al. 2022) in two towers that can be parted: a client holds the vision tower only.

Weights and architectures are open_clip's; LoRA is peft's. The one thing taken apart is attention: open_clip fuses q, k
and v inside `nn.MultiheadAttention`, where peft can adapt no projection alone and adds the delta of the output
projection twice. `SplitAttention` holds four ordinary linear layers, so that a delta is (alpha / r) B A exactly once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.rng import owned_global_rng

PROJECTIONS = ("q", "k", "v", "out")
_ASSETS = Path(__file__).parents[1] / "assets"


@dataclass(frozen=True)
class LoRA:
    """Low-rank updates W + (alpha / rank) B A of attention projections in the last blocks of a tower.

    Args:
        rank: r, at least 1. FedDTL states 4.
        alpha: Numerator of the scale alpha / rank, above 0. Not stated in FedDTL; alpha = rank gives scale 1.
        dropout: Dropout before A, in [0, 1). Not stated in FedDTL. Above 0, two passes of one policy differ.
        projections: Which of "q", "k", "v", "out"; each has factors of its own. Not stated in FedDTL.
        last_blocks: Adapted blocks, counted from the top of each tower, at least 1. FedDTL states 2 of 12.

    Raises:
        ValueError: A value is outside its range.
    """

    rank: int = 4
    alpha: float = 4.0
    dropout: float = 0.0
    projections: tuple[str, ...] = ("q", "k", "v")
    last_blocks: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "projections", tuple(self.projections))  # a YAML gives a list
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}, must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"alpha is {self.alpha}, must be above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, must be in [0, 1)")
        if not self.projections or not set(self.projections) <= set(PROJECTIONS):
            raise ValueError(f"projections is {self.projections}, must be some of {PROJECTIONS}")
        if self.last_blocks < 1:
            raise ValueError(f"last_blocks is {self.last_blocks}, must be at least 1")


class SplitAttention(nn.Module):
    """Self-attention with separate q, k, v and out layers, equal to the `nn.MultiheadAttention` it is made from."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear

    def __init__(self, fused: nn.MultiheadAttention) -> None:
        super().__init__()
        if fused.in_proj_weight is None or fused.in_proj_bias is None or fused.dropout or not fused.batch_first:
            raise ValueError(f"attention must have one width, biases, no dropout and batches first, this is {fused}")
        self.num_heads = fused.num_heads
        width = fused.embed_dim
        for name, weight, bias in zip("qkv", fused.in_proj_weight.chunk(3), fused.in_proj_bias.chunk(3), strict=True):
            self.add_module(name, _linear(width, weight, bias))
        self.out = _linear(width, fused.out_proj.weight, fused.out_proj.bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Attend.

        Args:
            query: (B, T, w).
            key: (B, S, w).
            value: (B, S, w).
            need_weights: Must be False; here because the block that calls us passes it.
            attn_mask: (T, S), added to the scores, or None.

        Returns:
            (B, T, w), and None in place of the weights.
        """

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        x = F.scaled_dot_product_attention(
            heads(self.q(query)), heads(self.k(key)), heads(self.v(value)), attn_mask=attn_mask
        )
        return self.out(x.transpose(1, 2).flatten(2)), None


def _linear(width: int, weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, width, width)  # draws nothing
    layer.weight, layer.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
    return layer


class _Tower(nn.Module):
    """What both towers share: blocks of which the last few are adapted and all before them never change.

    Attributes:
        embed_dim: Width d of the joint space.
        first_adapted: Number of the first block that can train; blocks before it are the frozen prefix. 0 without LoRA.
    """

    embed_dim: int
    first_adapted: int = 0

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        from open_clip.transformer import ResidualAttentionBlock

        for block in trunk.transformer.resblocks:
            if type(block) is not ResidualAttentionBlock or not trunk.transformer.batch_first:
                raise ValueError(f"blocks are {type(block).__name__}, must be those of a plain CLIP transformer")
            block.attn = SplitAttention(block.attn)
        self.trunk = trunk

    @property
    def blocks(self) -> nn.ModuleList:
        return self.trunk.transformer.resblocks

    def _run(self, x: Tensor, start: int, stop: int | None, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks[start:stop]:
            x = block(x, attn_mask=mask)
        return x

    def _adapt(self, lora: LoRA, seed: int, owner: str) -> None:
        """Freeze the tower and add LoRA factors, B = 0, A drawn for (seed, owner)."""
        from peft import LoraConfig, inject_adapter_in_model

        depth = len(self.blocks)
        if lora.last_blocks > depth:
            raise ValueError(
                f"last_blocks is {lora.last_blocks}, must be in 1..{depth}, the depth of the {owner} tower"
            )
        self.first_adapted = depth - lora.last_blocks
        numbers = "|".join(map(str, range(self.first_adapted, depth)))
        target = rf"trunk\.transformer\.resblocks\.({numbers})\.attn\.({'|'.join(lora.projections)})"
        self.requires_grad_(False)
        with owned_global_rng(seed, "lora", owner):
            inject_adapter_in_model(
                LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=target), self
            )


class VisionTower(_Tower):
    """Images to raw (not normalised) class-token embeddings in the joint space.

    Without LoRA every parameter trains; with it, the factors alone.

    Attributes:
        image_size: (H, W) that it takes.
        mean: Channel means that pixels are normalised by, (3,).
        std: Channel deviations, (3,).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, trunk: Any, mean: Sequence[float], std: Sequence[float]) -> None:
        from open_clip.transformer import VisionTransformer

        if not isinstance(trunk, VisionTransformer) or trunk.pool_type == "none" or trunk.proj is None:
            raise ValueError(f"vision tower {type(trunk).__name__} is not supported, only CLIP's own ViT")
        super().__init__(trunk)
        trunk.output_tokens = False
        self.embed_dim: int = trunk.output_dim
        self.image_size: tuple[int, int] = tuple(trunk.image_size)
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Embed images (B, 3, H, W) with values in [0, 1] as (B, d).

        Raises:
            ValueError: The images have another size or number of channels.
        """
        return self.suffix(self.prefix(images))

    def prefix(self, images: Tensor) -> Tensor:
        """Activations (B, T, w) that enter the first adapted block. They never change while LoRA trains: cache them.

        Raises:
            ValueError: The images have another size or number of channels.
        """
        if tuple(images.shape[1:]) != (3, *self.image_size):
            raise ValueError(
                f"images are {tuple(images.shape)}, must be (B, 3, {self.image_size[0]}, {self.image_size[1]})"
            )
        x = (images - self.mean.view(3, 1, 1)) / self.std.view(3, 1, 1)
        return self._run(self.trunk._embeds(x), 0, self.first_adapted)

    def suffix(self, activations: Tensor) -> Tensor:
        """Embeddings (B, d) from what `prefix` returned, (B, T, w)."""
        pooled, _ = self.trunk._pool(self._run(activations, self.first_adapted, None))
        return pooled @ self.trunk.proj


class TextTower(_Tower):
    """Prompts to raw (not normalised) embeddings in the joint space.

    Attributes:
        context_length: L, tokens per prompt.
    """

    def __init__(self, trunk: Any, tokenizer: Callable[[list[str]], Tensor]) -> None:
        from open_clip.transformer import TextTransformer

        if not isinstance(trunk, TextTransformer) or trunk.cls_emb is not None or trunk.use_pad_mask:
            raise ValueError(f"text tower {type(trunk).__name__} is not supported, only CLIP's own with an end token")
        super().__init__(trunk)
        trunk.output_tokens = False
        self.embed_dim: int = trunk.output_dim
        self.context_length: int = trunk.context_length
        self.tokenizer = tokenizer

    def tokenize(self, prompts: Iterable[str]) -> Tensor:
        """Token ids (C, L), int64, of C prompts.

        Raises:
            ValueError: The tiny model's vocabulary lacks a word, or a prompt is too long for it.
        """
        return self.tokenizer(list(prompts))

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed token ids (C, L) as (C, d)."""
        return self.suffix(self.prefix(tokens), tokens)

    def prefix(self, tokens: Tensor) -> Tensor:
        """Activations (C, L, w) that enter the first adapted block, from token ids (C, L).

        Raises:
            ValueError: The prompts have another length than L.
        """
        if tokens.ndim != 2 or tokens.shape[1] != self.context_length:
            raise ValueError(f"tokens are {tuple(tokens.shape)}, must be (C, {self.context_length})")
        x, mask = self.trunk._embeds(tokens)
        return self._run(x, 0, self.first_adapted, mask)

    def suffix(self, activations: Tensor, tokens: Tensor) -> Tensor:
        """Embeddings (C, d) from what `prefix` returned and the token ids (C, L), which say where each prompt ends."""
        from open_clip.transformer import text_global_pool

        x = self.trunk.ln_final(self._run(activations, self.first_adapted, None, self.trunk.attn_mask))
        pooled = text_global_pool(x, tokens, self.trunk.pool_type, eos_token_id=self.trunk.eos_id)
        projection = self.trunk.text_projection
        if projection is None:
            return pooled
        return projection(pooled) if isinstance(projection, nn.Module) else pooled @ projection


class CLIP(nn.Module):
    """Two towers with one joint space (Radford et al. 2021).

    Attributes:
        visual: The vision tower; holds no text parameter, so it can travel alone.
        text: The text tower.
        logit_scale: 1 / tau that cosines are multiplied by, a buffer (), 100 for OpenAI's weights.
        embed_dim: Width d of the joint space.
        image_size: (H, W) of the images.
        mean: Channel means that the vision tower normalises by, (3,).
        std: Channel deviations, (3,).
    """

    logit_scale: Tensor

    def __init__(self, visual: VisionTower, text: TextTower, logit_scale: float) -> None:
        super().__init__()
        self.visual, self.text = visual, text
        self.register_buffer("logit_scale", torch.tensor(float(logit_scale)))
        self.embed_dim, self.image_size = visual.embed_dim, visual.image_size

    @property
    def mean(self) -> Tensor:
        return self.visual.mean

    @property
    def std(self) -> Tensor:
        return self.visual.std

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Logits (B, C): scaled cosines of images (B, 3, H, W) in [0, 1] and prompts (C, L)."""
        images, texts = F.normalize(self.visual(images), dim=-1), F.normalize(self.text(tokens), dim=-1)
        return self.logit_scale * images @ texts.T


class WordTokenizer:
    """One token per word: 0 pads, 1 begins, the highest id ends, so that open_clip's "argmax" pooling finds the end.

    Args:
        vocabulary: Words in lower case; position + 2 = token id.
        context_length: L, with begin and end.
    """

    def __init__(self, vocabulary: Sequence[str], context_length: int) -> None:
        self.ids = {word: number for number, word in enumerate(vocabulary, start=2)}
        self.context_length, self.end = context_length, len(vocabulary) + 2

    def __call__(self, prompts: list[str]) -> Tensor:
        """Token ids (C, L), int64.

        Raises:
            ValueError: A word is not in the vocabulary, or a prompt has more than L - 2 words.
        """
        tokens = torch.zeros(len(prompts), self.context_length, dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            words = re.findall(r"\w+", prompt.lower())
            if len(words) > self.context_length - 2:
                raise ValueError(f"prompt {prompt!r} has {len(words)} words, at most {self.context_length - 2} fit")
            for word in words:
                if word not in self.ids:
                    raise ValueError(f"word {word!r} of {prompt!r} is not in the vocabulary: {', '.join(self.ids)}")
            row[: len(words) + 2] = torch.tensor([1, *(self.ids[word] for word in words), self.end])
        return tokens


def build_clip(
    name: str, pretrained: str | None = None, *, lora: LoRA | None, seed: int, cache_dir: str | None = None
) -> CLIP:
    """Build our own "tiny-clip-32", or any CLIP of open_clip whose towers are CLIP's own transformers.

    Args:
        name: A configuration in ``fl_lightning/assets``, or a model name of open_clip, for example "ViT-B-16".
        pretrained: Weights. For ours a name in the assets ("glyphs") or the path of a file that `export_clip` wrote;
            for open_clip's one of its tags or a checkpoint's path. None draws random weights.
        lora: LoRA for both towers, with all other parameters frozen; None leaves every parameter trainable.
        seed: Owner seed of random weights and of LoRA's A.
        cache_dir: Where open_clip keeps downloads.

    Raises:
        ValueError: An unknown name or tag, a tower that is not CLIP's own, or more adapted blocks than there are.
        RuntimeError: Weights could not be downloaded.
    """
    config = _ASSETS / f"{name}.json"
    if config.is_file():
        clip = _tiny(name, json.loads(config.read_text()), pretrained, seed)
    else:
        clip = _from_open_clip(name, pretrained, seed, cache_dir)
    if lora is not None:
        for owner, tower in (("visual", clip.visual), ("text", clip.text)):
            tower._adapt(lora, seed, owner)
    return clip


def export_clip(clip: CLIP, path: str | Path) -> None:
    """Write the weights of a CLIP without LoRA as float16 safetensors, for `build_clip(..., pretrained=path)`.

    Raises:
        ValueError: The model holds LoRA factors.
    """
    from safetensors.torch import save_file

    state = {key: value.detach().to("cpu", torch.float16).contiguous() for key, value in clip.state_dict().items()}
    if any("lora_" in key for key in state):
        raise ValueError("a CLIP with LoRA cannot be exported as pretrained weights, build it with lora=None")
    save_file(state, path)


def _tiny(name: str, config: dict[str, Any], pretrained: str | None, seed: int) -> CLIP:
    from open_clip import CustomTextCLIP
    from safetensors.torch import load_file

    words = config["vocabulary"]
    text_cfg = config["text_cfg"] | {"vocab_size": len(words) + 3}
    with owned_global_rng(seed, "clip", name):
        trunks = CustomTextCLIP(config["embed_dim"], config["vision_cfg"], text_cfg)
    visual = VisionTower(trunks.visual, config["mean"], config["std"])
    text = TextTower(trunks.text, WordTokenizer(words, text_cfg["context_length"]))
    clip = CLIP(visual, text, config["logit_scale"])
    if pretrained is not None:
        shipped = {path.name.split(".")[1]: path for path in sorted(_ASSETS.glob(f"{name}.*.safetensors"))}
        path = shipped.get(pretrained, Path(pretrained))
        if not path.is_file():
            raise ValueError(f"pretrained is {pretrained!r}, must be one of {list(shipped)} or a file")
        clip.load_state_dict(load_file(path))
    return clip


def _from_open_clip(name: str, pretrained: str | None, seed: int, cache_dir: str | None) -> CLIP:
    import open_clip

    quick = False
    if ":" not in name:
        config = open_clip.get_model_config(name)
        if config is None:
            raise ValueError(f"name is {name!r}, must be a model of open_clip (see open_clip.list_models()) or of ours")
        if pretrained is not None and not Path(pretrained).is_file():
            tags = open_clip.list_pretrained_tags_by_model(name)
            tag = open_clip.get_pretrained_cfg(name, pretrained)
            if not tag:
                raise ValueError(f"pretrained is {pretrained!r}, must be one of {tags} or a file, for model {name}")
            # The activation belongs to the weights; the wrong one loads without a word and costs accuracy.
            quick = tag.get("quick_gelu", False)
    try:
        with owned_global_rng(seed, "clip", name):
            trunks = open_clip.create_model(
                name, pretrained, force_quick_gelu=quick, force_custom_text=True, cache_dir=cache_dir
            )
    except RuntimeError as error:
        raise RuntimeError(
            f"could not create {name} with weights {pretrained!r}; without network, give a file"
        ) from error
    tokenizer = open_clip.get_tokenizer(name, context_length=trunks.text.context_length, cache_dir=cache_dir)
    visual = VisionTower(trunks.visual, trunks.visual.image_mean, trunks.visual.image_std)
    return CLIP(visual, TextTower(trunks.text, tokenizer), trunks.logit_scale.exp().item())
