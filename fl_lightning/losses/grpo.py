"""Group-relative policy optimisation (GRPO) over the classes of an image: the reinforcement stage of FedDTL.

The policy is the classifier itself, π(c | x) = softmax of the class logits. A group of actions per image comes from a
noisy copy of its embedding, the update from the clean one, so nothing here that is sampled carries a gradient.

Reference: Ma, Cheng, Xu, "Decoupled Training with Local Reinforcement Fine-Tuning in Federated Learning", ICML 2026
(arXiv 2605.27900). What no public text of that paper states is marked *inferred* and is an option.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

NoiseSpace = Literal["unit", "raw"]
Action = Literal["argmax", "sample"]
AdvantageStd = Literal["population", "sample", "none"]
KL = Literal["k3", "exact"]


@dataclass(frozen=True)
class GRPO:
    """Options of the reinforcement stage; the defaults are the paper's where it states them.

    Attributes:
        group_size: G, actions per image, at least 2 because a lone reward has nothing to be compared with. *paper: 3*
        sigma: Noise standard deviation per coordinate of the embedding, finite, >= 0. *paper: 0.1*
        epsilon: Clip range of the probability ratio, in (0, 1). *paper: 0.2*
        beta: Weight of the KL term, finite, >= 0. *paper: 0.5*
        noise_space: What the noise is added to. *inferred: "unit"*, the L2-normalised embedding; on a raw CLIP
            embedding of norm about 10 the same sigma leaves almost no group with two different rewards.
        action: What is done with the noisy logits. *inferred: "argmax"*; a draw from their softmax would make the noise
            superfluous.
        advantage_std: What centred rewards are divided by. *inferred: "population"*, the group's standard deviation
            with divisor G; "sample" has divisor G - 1, "none" only centres.
        kl: "k3" at the group's actions, or "exact" over all classes. *inferred: "k3"*; the paper says "unbiased
            estimate", which k3 is only for actions drawn from the policy, and these are not.

    Raises:
        ValueError: A value out of the range given above.
    """

    group_size: int = 3
    sigma: float = 0.1
    epsilon: float = 0.2
    beta: float = 0.5
    noise_space: NoiseSpace = "unit"
    action: Action = "argmax"
    advantage_std: AdvantageStd = "population"
    kl: KL = "k3"

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"group_size must be at least 2, got {self.group_size}")
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon must lie in (0, 1), got {self.epsilon}")
        for name in ("sigma", "beta"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and >= 0, got {value}")
        choices = {"noise_space": NoiseSpace, "action": Action, "advantage_std": AdvantageStd, "kl": KL}
        for name, allowed in choices.items():
            _check_choice(name, getattr(self, name), get_args(allowed))


@torch.no_grad()
def sample_actions(
    embeddings: Tensor, text: Tensor, logit_scale: float | Tensor, options: GRPO, generator: torch.Generator
) -> Tensor:
    """Draw a group of class guesses per image from noisy copies of its embedding.

    Noisy logits are cosines times ``logit_scale``, as the policy's own are. The noise passes through the text matrix by
    itself and is then added, so that with sigma = 0 the guesses of a group are equal to the last bit.

    Args:
        embeddings: Image embeddings before normalisation, (B, d).
        text: L2-normalised class embeddings, (C, d).
        logit_scale: 1/τ, positive; matters only to ``action="sample"``.
        options: ``group_size``, ``sigma``, ``noise_space`` and ``action`` are read.
        generator: Owner of the noise; may live on another device than the embeddings.

    Returns:
        Class indices, (B, G), int64, without gradient.

    Raises:
        ValueError: ``embeddings`` and ``text`` are not matrices of the same width.
    """
    if embeddings.ndim != 2 or text.ndim != 2 or embeddings.shape[1] != text.shape[1]:
        raise ValueError(f"embeddings (B, d) and text (C, d) must agree, got {(*embeddings.shape,)}, {(*text.shape,)}")
    # In half precision the scores would tie, and argmax would prefer the first classes.
    with torch.autocast(embeddings.device.type, enabled=False):
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        clean, text = embeddings.to(dtype), text.to(dtype)
        if options.noise_space == "unit":
            clean = F.normalize(clean, dim=-1)
        shape = (len(clean), options.group_size, clean.shape[1])
        noise = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype).to(clean.device)
        noise *= options.sigma
        scores = (clean @ text.T)[:, None] + noise @ text.T
        if options.action == "argmax":  # no positive factor changes it
            return scores.argmax(-1)
        norms = (clean[:, None] + noise).norm(dim=-1, keepdim=True).clamp_min(1e-12)
        probabilities = (logit_scale * scores / norms).softmax(-1).flatten(0, 1).to(generator.device)
        return torch.multinomial(probabilities, 1, generator=generator).view(shape[:2]).to(clean.device)


def rewards(actions: Tensor, labels: Tensor) -> Tensor:
    """1 where a guess is the label, else 0: (B, G) guesses and (B,) labels to (B, G) float32."""
    return (actions == labels[:, None]).float()


def advantages(rewards: Tensor, std: AdvantageStd = "population") -> Tensor:
    """Rewards relative to their group: A_ij = (r_ij - mean_j r_ij) / (std_j r_ij + 1e-6).

    Args:
        rewards: (B, G), G >= 2, real numbers.
        std: Divisor: "population", "sample" or "none" (see :class:`GRPO`).

    Returns:
        (B, G); every group sums to 0 up to rounding, and a group of equal rewards is exactly 0.

    Raises:
        ValueError: Another shape or another ``std``.
    """
    _check_choice("std", std, get_args(AdvantageStd))
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be (B, G) with G >= 2, got shape {(*rewards.shape,)}")
    centred = rewards - rewards.mean(-1, keepdim=True)
    if std != "none":
        centred = centred / (rewards.std(-1, correction=int(std == "sample"), keepdim=True) + 1e-6)
    # The mean of equal numbers can miss them by a rounding error, which 1e-6 would blow up.
    return centred.masked_fill((rewards == rewards[:, :1]).all(-1, keepdim=True), 0.0)


def k3_kl(logp: Tensor, ref_logp: Tensor, actions: Tensor) -> Tensor:
    """The k3 estimate of KL(π ‖ π_ref) at given actions: q - log q - 1 with q = π_ref(a) / π(a).

    Its mean over a ~ π is the exact divergence, but its gradient at fixed actions is not that of KL(π ‖ π_ref), and q
    is unbounded where the policy is sure that ``a`` is wrong.

    Args:
        logp: Log-probabilities of the policy, (B, C).
        ref_logp: Log-probabilities of the reference, (B, C).
        actions: Class indices, (B, G), int64.

    Returns:
        (B, G), >= 0, and 0 where the two agree.
    """
    log_ratio = (ref_logp - logp).gather(1, actions)
    return torch.expm1(log_ratio) - log_ratio


def exact_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL(π ‖ π_ref) = Σ_c π(c) (log π(c) - log π_ref(c)): (B, C) finite log-probabilities to (B,), >= 0."""
    return (logp.exp() * (logp - ref_logp)).sum(-1)


def mix_reference(ref_logps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Log-probabilities of a mixture of policies, log Σ_m w_m π_m(c), without leaving log space.

    This is the "probabilities" reading of FedDTL's hybrid reference. The "0.5 KL + 0.5 KL" reading is the mean of two
    KL terms, for which :func:`grpo_loss` takes pairs; mixed parameters need no function here.

    Args:
        ref_logps: Log-probabilities of the parts, each (B, C).
        weights: One weight per part, >= 0, summing to 1.

    Returns:
        (B, C).

    Raises:
        ValueError: Lengths that differ, or weights that are not a distribution.
    """
    if len(ref_logps) != len(weights):
        raise ValueError(f"one weight per reference, got {len(weights)} weights for {len(ref_logps)} references")
    _check_distribution(weights)
    parts = [logp + math.log(weight) for logp, weight in zip(ref_logps, weights, strict=True) if weight > 0]
    return torch.stack(parts).logsumexp(0)


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor | Sequence[tuple[float, Tensor]],
    actions: Tensor,
    advantages: Tensor,
    options: GRPO,
    *,
    rewards: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """FedDTL's reinforcement loss L_rl = -(1/G) Σ_j (1/bs) Σ_i (L_p - β D_KL).

    L_p = min(ρ A, clip(ρ, 1 - ε, 1 + ε) A) with ρ = π(a | x) / π_old(a | x). Only ``logp`` receives a gradient.

    Args:
        logp: Log-probabilities of the policy without noise, (B, C), finite.
        old_logp: Those of the policy that the ratio is taken against, (B, C). ``logp.detach()`` gives ρ = 1 exactly,
            and then the clip never acts.
        ref_logp: Those of the reference, (B, C); or (weight, (B, C)) pairs, whose KL terms are averaged with these
            weights (>= 0, summing to 1).
        actions: (B, G) int64, see :func:`sample_actions`.
        advantages: (B, G), see :func:`advantages`.
        options: ``group_size``, ``epsilon``, ``beta`` and ``kl`` are read.
        rewards: (B, G); if given, their mean is among the statistics.

    Returns:
        The scalar loss, and detached scalars: ``mixed_groups``, the share of images whose guesses disagree in reward
        (if near 0 the stage only pulls to the reference, if near 1 the noise swamps the signal); ``kl``, the mean KL
        term; ``clip_fraction``, the share of actions whose policy gradient the clip removes; ``reward``, the mean
        reward.

    Raises:
        ValueError: Shapes that do not fit each other, or weights that are not a distribution.
    """
    references = [(1.0, ref_logp)] if isinstance(ref_logp, Tensor) else list(ref_logp)
    _check_distribution([weight for weight, _ in references])
    for name, tensor in [("old_logp", old_logp), *(("ref_logp", reference) for _, reference in references)]:
        _check_shape(name, tensor, (*logp.shape,))
    for name, tensor in [("actions", actions), ("advantages", advantages)]:
        _check_shape(name, tensor, (len(logp), options.group_size))

    advantages = advantages.detach()
    ratio = (logp - old_logp.detach()).gather(1, actions).exp()
    low, high = 1 - options.epsilon, 1 + options.epsilon
    policy = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    kl = logp.new_zeros(())
    for weight, reference in references:
        reference = reference.detach()
        term = k3_kl(logp, reference, actions) if options.kl == "k3" else exact_kl(logp, reference)
        kl = kl + weight * term.mean()
    loss = -policy.mean()
    if options.beta > 0:  # 0 times an overflown k3 would be NaN
        loss = loss + options.beta * kl

    with torch.no_grad():
        clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
        stats = {
            "mixed_groups": (advantages != 0).any(-1).to(logp.dtype).mean(),
            "kl": kl.detach(),
            "clip_fraction": clipped.to(logp.dtype).mean(),
        }
        if rewards is not None:
            stats["reward"] = rewards.mean()
    return loss, stats


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_distribution(weights: Sequence[float]) -> None:
    if not (all(weight >= 0 for weight in weights) and math.isclose(sum(weights), 1, abs_tol=1e-6)):
        raise ValueError(f"weights must be >= 0 and sum to 1, got {list(weights)}")


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if (*tensor.shape,) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {(*tensor.shape,)}")
