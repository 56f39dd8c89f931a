"""CLIP in a federation: the whole model, the vision half that a client holds, the text half that the server trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.func import functional_call

from fl_lightning.data.examples import DataInfo, Examples
from fl_lightning.losses.contrastive import symmetric_contrastive
from fl_lightning.losses.grpo import GRPO, advantages, exact_kl, grpo_loss, mix_reference, rewards, sample_actions
from fl_lightning.models.clip import CLIP, LoRA, TextTower, VisionTower, build_clip, export_clip
from fl_lightning.rng import torch_generator
from fl_lightning.tasks.base import Batch, FederatedTask
from fl_lightning.tasks.prefix import PrefixCache

Objective = Literal["sft", "grpo", "sft_kl"]
Reference = Mapping[str, Tensor]
# Of a policy, what the stage of a fit is.
_STAGE = ("objective", "old", "references", "reference_text", "mix_probabilities", "statistics", "num_rl_steps")


class ClipPolicy(FederatedTask):
    """Classification by cosine to class text embeddings: p(c | x) = softmax_c(cos(z_v, z_text^c) / tau).

    Trained by cross-entropy ("sft"), by GRPO ("grpo"), or by cross-entropy with the same pull to the reference ("sft_kl");
    the callback `GRPOStageSwitch` says which, and freezes the old policy.

    Args:
        visual: Vision tower.
        text: Text tower, or None where class embeddings are given with the message (group "text").
        tokens: (C, L) prompts of all classes, for ``text``.
        logit_scale: 1 / tau.
        num_base: Number of classes trained on, the first ones.
        optimizer: Builds the local optimizer.
        cache: Cache of the vision tower's frozen prefix, or None.
    """

    visual: VisionTower
    text: TextTower | None
    tokens: Tensor
    logit_scale: Tensor

    resumes = True

    def __init__(
        self,
        visual: VisionTower,
        text: TextTower | None,
        tokens: Tensor | None,
        logit_scale: Tensor,
        num_base: int,
        optimizer: OptimizerCallable,
        cache: PrefixCache | None,
    ) -> None:
        super().__init__(optimizer)
        self._adopt(visual, text, tokens, logit_scale, num_base, cache)

    def _adopt(
        self,
        visual: VisionTower,
        text: TextTower | None,
        tokens: Tensor | None,
        logit_scale: Tensor,
        num_base: int,
        cache: PrefixCache | None,
    ) -> None:
        self.visual, self.text, self.num_base, self.cache = visual, text, num_base, cache
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("logit_scale", logit_scale.detach().clone(), persistent=False)
        self.objective: Objective = "sft"
        self.grpo = GRPO()
        self.noise: torch.Generator | None = None
        self.old: Reference | None = None
        self.references: list[tuple[float, Reference]] = []
        self.reference_text: Tensor | None = None
        self.mix_probabilities = False
        self.statistics: dict[str, Tensor] = {}
        self.num_rl_steps = 0

    def persistent_buffers(self) -> dict[str, Tensor]:
        return {}  # nothing of CLIP's has running statistics

    # ---- the frozen prefix

    def cached(self, examples: Examples) -> Examples | None:
        return None if self.cache is None else self.cache.wrap(examples)

    # ---- the policy

    def embeddings(self, inputs: Tensor) -> Tensor:
        """Raw class-token embeddings (B, d) of images, or of activations from the frozen prefix."""
        return self.visual.suffix(inputs) if self.inputs_are_cached else self.visual(inputs)

    def unit_embeddings(self, inputs: Tensor) -> Tensor:
        """L2-normalised embeddings (B, d)."""
        return F.normalize(self.embeddings(inputs).float(), dim=-1)

    def class_embeddings(self, num_classes: int | None = None) -> Tensor:
        """Unit text embeddings (C, d) of the first classes, or of all: the given ones, or one's own tower's."""
        if self.text is None:
            return self.given["text"]["embeddings"][:num_classes]
        return F.normalize(self.text(self.tokens[:num_classes]).float(), dim=-1)

    def logits(self, inputs: Tensor) -> Tensor:
        """Class scores (B, C) over all classes that have a text embedding."""
        return self.logit_scale * self.unit_embeddings(inputs) @ self.class_embeddings().T

    def forward(self, inputs: Tensor, part: str = "logits") -> Tensor:
        """Dispatch, so that `torch.func.functional_call` can run any part under other parameters."""
        return getattr(self, part)(inputs)

    def base_log_probabilities(self, inputs: Tensor) -> Tensor:
        """log p(c | x) over the base classes, (B, num_base)."""
        logits = self.logit_scale * self.unit_embeddings(inputs) @ self.class_embeddings(self.num_base).T
        return F.log_softmax(logits, dim=-1)

    @torch.no_grad()
    def log_probabilities_under(self, parameters: Reference, inputs: Tensor, text: Tensor | None = None) -> Tensor:
        """log p(c | x) of the policy with other LoRA factors (and, where given, other class embeddings)."""
        kept, training = self.given, self.training
        if text is not None:
            self.given = {**self.given, "text": {"embeddings": text}}
        self.eval()  # LoRA's dropout would make the ratio to one's own policy differ from 1
        try:
            return functional_call(self, dict(parameters), (inputs, "base_log_probabilities"))
        finally:
            self.given = kept
            self.train(training)

    # ---- losses

    def loss(self, batch: Batch) -> Tensor:
        if self.objective == "sft":  # FedDTL, L_ce
            return F.nll_loss(self.base_log_probabilities(batch.inputs), batch.labels)
        # Before the policy's own forward pass, since these run the same modules under other parameters.
        references = [
            (weight, self.log_probabilities_under(reference, batch.inputs, self.reference_text))
            for weight, reference in self.references
        ]
        if self.mix_probabilities:
            references = [(1.0, mix_reference([r for _, r in references], [w for w, _ in references]))]
        old = None if self.old is None else self.log_probabilities_under(self.old, batch.inputs)
        raw = self.embeddings(batch.inputs).float()
        text = self.class_embeddings(self.num_base)
        policy = F.log_softmax(self.logit_scale * F.normalize(raw, dim=-1) @ text.T, dim=-1)
        if self.objective == "sft_kl":  # a control: the anchor without the reinforcement
            divergence = torch.stack([w * exact_kl(policy, r).mean() for w, r in references]).sum()
            self._count({"kl": divergence.detach()})
            return F.nll_loss(policy, batch.labels) + self.grpo.beta * divergence
        assert self.noise is not None
        # FedDTL, L_rl: actions from noisy embeddings, the update from the clean ones.
        actions = sample_actions(raw.detach(), text.detach(), self.logit_scale, self.grpo, self.noise)
        reward = rewards(actions, batch.labels)
        loss, statistics = grpo_loss(
            policy,
            policy.detach() if old is None else old,
            references,
            actions,
            advantages(reward, self.grpo.advantage_std),
            self.grpo,
            rewards=reward,
        )
        self._count(statistics)
        return loss

    def _count(self, statistics: Mapping[str, Tensor]) -> None:
        self.num_rl_steps += 1
        for name, value in statistics.items():
            self.statistics[name] = self.statistics.get(name, torch.zeros_like(value)) + value

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.statistics, self.num_rl_steps = {}, 0

    def fit_state(self) -> dict[str, Any]:
        noise = None if self.noise is None else self.noise.get_state()
        return {**super().fit_state(), **{name: getattr(self, name) for name in _STAGE}, "noise": noise}

    def load_fit_state(self, state: Mapping[str, Any]) -> None:
        super().load_fit_state(state)
        for name in _STAGE:
            setattr(self, name, state[name])
        self.noise = None
        if state["noise"] is not None:
            self.noise = torch.Generator(self.device)
            self.noise.set_state(state["noise"].cpu())

    def fit_metrics(self) -> dict[str, float]:
        return super().fit_metrics() | {
            name: float(value) / self.num_rl_steps for name, value in self.statistics.items()
        }

    def freeze_old_policy(self) -> None:
        """Remember the policy as it is, for the ratios of GRPO."""
        self.old = {name: p.detach().clone() for name, p in self.trainable().items()}


class ClipTask(ClipPolicy):
    """A whole CLIP, both towers with LoRA: what a YAML names, and what FedLoRA trains.

    Args:
        name: "tiny-clip-32" (ours), or a model of open_clip, for example "ViT-B-16".
        pretrained: Its weights: "glyphs" (ours), a tag of open_clip ("openai"), or a file; null draws random ones.
        lora: Low-rank adapters of both towers.
        prompt: Class names stand for the braces (the paper: "a photo of a {}").
        logit_scale: 1 / tau; null takes the model's own (100 for OpenAI's weights).
        optimizer: Builds the local optimizer. The paper: Adam, learning rate 1e-3; its state starts afresh in every fit.
        cache_gib: Memory in GiB for activations of the blocks below the first LoRA, which never change and are so computed
            once per image; a set that needs more is not cached. 0 turns it off.
        cache_dir: Where open_clip keeps downloaded weights.
    """

    resumes = True

    def __init__(
        self,
        name: str = "tiny-clip-32",
        pretrained: str | None = "glyphs",
        lora: LoRA = LoRA(),  # noqa: B008  (frozen)
        prompt: str = "a photo of a {}",
        logit_scale: float | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=1e-3),
        cache_gib: float = 2.0,
        cache_dir: str | None = None,
    ) -> None:
        FederatedTask.__init__(self, optimizer)
        if "{}" not in prompt:
            raise ValueError(f"prompt is {prompt!r}; it needs braces {{}} where the class name stands")
        if cache_gib < 0 or (logit_scale is not None and logit_scale <= 0):
            raise ValueError(f"cache_gib {cache_gib} must be at least 0, logit_scale {logit_scale} above 0")
        self.name, self.pretrained, self.lora, self.prompt = name, pretrained, lora, prompt
        self.scale, self.cache_gib, self.cache_dir = logit_scale, cache_gib, cache_dir

    def prompts(self, info: DataInfo) -> list[str]:
        """One prompt a class, with underscores of folder names as spaces."""
        return [self.prompt.format(name.replace("_", " ")) for name in info.class_names]

    def build(self, info: DataInfo, seed: int) -> None:
        clip = build_clip(self.name, self.pretrained, lora=self.lora, seed=seed, cache_dir=self.cache_dir)
        expected = (3, *clip.image_size)
        if tuple(info.input_shape) != expected:
            raise ValueError(
                f"{self.name} takes images {expected}, the data have {tuple(info.input_shape)}; "
                f"set data.image_size: {expected[1]} and data.channels: 3"
            )
        scale = clip.logit_scale if self.scale is None else torch.tensor(float(self.scale))
        tokens = clip.text.tokenize(self.prompts(info))
        cache = PrefixCache(self._encode, int(self.cache_gib * 2**30)) if self.cache_gib else None
        if clip.visual.first_adapted == 0:
            cache = None  # the first block trains: there is no prefix
        self._adopt(clip.visual, clip.text, tokens, scale, len(info.base_classes), cache)

    @torch.no_grad()
    def _encode(self, images: Tensor) -> Tensor:
        """The vision tower's prefix, wherever the tower is now."""
        device = next(self.visual.parameters()).device
        training = self.visual.training
        self.visual.eval()
        try:
            return self.visual.prefix(images.to(device)).float().cpu()
        finally:
            self.visual.train(training)

    def vision_half(self) -> ClipPolicy:
        """What a client holds: the vision tower, and no parameter of the text tower."""
        return ClipPolicy(self.visual, None, None, self.logit_scale, self.num_base, self.optimizer, self.cache)

    def text_half(self) -> ClipTextTask:
        """What the server trains."""
        assert self.text is not None
        return ClipTextTask(self.text, self.tokens, self.logit_scale, self.num_base, self.optimizer)

    def preprocessing(self) -> dict[str, Any]:
        return {
            "image_size": list(self.visual.image_size),
            "mean": self.visual.mean.tolist(),
            "std": self.visual.std.tolist(),
            "prompt": self.prompt,
        }


class ClipTextTask(FederatedTask):
    """The server's half of FedDTL: the text tower, trained on uploaded image embeddings (B, d) and their labels.

    Args:
        text: Text tower.
        tokens: (C, L) prompts of all classes.
        logit_scale: 1 / tau.
        num_base: Number of classes trained on, the first ones.
        optimizer: Builds the optimizer.
    """

    tokens: Tensor
    logit_scale: Tensor

    resumes = True

    def __init__(
        self, text: TextTower, tokens: Tensor, logit_scale: Tensor, num_base: int, optimizer: OptimizerCallable
    ) -> None:
        super().__init__(optimizer)
        self.text, self.num_base = text, num_base
        self.register_buffer("tokens", tokens.clone(), persistent=False)
        self.register_buffer("logit_scale", logit_scale.detach().clone(), persistent=False)
        self.prefix: Tensor | None = None

    def persistent_buffers(self) -> dict[str, Tensor]:
        return {}

    def loss(self, batch: Batch) -> Tensor:
        # Section 2, L_srv. The base prompts' activations below the first LoRA never change: computed once.
        tokens = self.tokens[: self.num_base]
        if self.prefix is None or self.prefix.device != tokens.device:
            with torch.no_grad():
                self.prefix = self.text.prefix(tokens)
        classes = F.normalize(self.text.suffix(self.prefix, tokens).float(), dim=-1)
        return F.cross_entropy(self.logit_scale * batch.inputs @ classes.T, batch.labels)

    def embed(self, tokens: Tensor) -> Tensor:
        """Unit text embeddings (B, d) of prompts (B, L)."""
        return F.normalize(self.text(tokens).float(), dim=-1)


class ClipPretrainTask(FederatedTask):
    """Pre-training of a small CLIP from scratch by the symmetric contrastive loss.

    The learning rate rises linearly over the first steps and falls to 0 along a cosine by the end of the fit. Without the
    rise, and with a fit per epoch (whose optimizer starts afresh), the tiny model did not leave chance.

    Args:
        name: A configuration in the package's assets, or a model of open_clip.
        prompts: Templates of captions; one is drawn for every class and step.
        eval_prompt: The template that accuracy is measured with.
        warmup_steps: Steps of the linear rise, at least 0.
        optimizer: Builds the optimizer.
    """

    clip: CLIP
    tokens: Tensor

    def __init__(
        self,
        name: str = "tiny-clip-32",
        prompts: list[str] = ["a photo of a {}"],  # noqa: B006  (read only)
        eval_prompt: str = "a photo of a {}",
        warmup_steps: int = 100,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.05),
    ) -> None:
        super().__init__(optimizer)
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps is {warmup_steps}; it must be at least 0")
        self.warmup_steps = warmup_steps
        self.name, self.prompts, self.eval_prompt = name, list(prompts), eval_prompt

    def build(self, info: DataInfo, seed: int) -> None:
        self.clip = build_clip(self.name, None, lora=None, seed=seed)
        tokens = [
            self.clip.text.tokenize([prompt.format(name.replace("_", " ")) for name in info.class_names])
            for prompt in [self.eval_prompt, *self.prompts]
        ]
        self.register_buffer("tokens", torch.stack(tokens), persistent=False)  # (1 + prompts, C, L)
        self.seed = seed
        self.draw: torch.Generator | None = None

    def on_fit_start(self) -> None:
        super().on_fit_start()
        # The fit's own randomness is lent to the global generator; a generator seeded from it stays the fit's own.
        self.draw = torch_generator(self.seed, int(torch.randint(2**31, ())), "prompts")

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = int(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / max(self.warmup_steps, 1)) * 0.5 * (1 + math.cos(math.pi * step / total))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)  # type: ignore[arg-type]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def loss(self, batch: Batch) -> Tensor:
        number = 1 + int(torch.randint(len(self.prompts), (), generator=self.draw))
        captions = self.clip.text(self.tokens[number])
        return symmetric_contrastive(self.clip.visual(batch.inputs), captions, batch.labels, self.clip.logit_scale)

    def export(self, path: str, half: bool = True) -> None:
        """Write weights that ``ClipTask(pretrained=path)`` takes: float16 always."""
        export_clip(self.clip, path)

    def logits(self, inputs: Tensor) -> Tensor:
        """Class scores (B, C) of images (B, 3, H, W) in [0, 1]."""
        return self.clip(inputs, self.tokens[0])
