"""The loss that CLIP is pre-trained by."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def symmetric_contrastive(images: Tensor, captions: Tensor, labels: Tensor, scale: Tensor | float) -> Tensor:
    """Symmetric InfoNCE (Radford et al. 2021) between images and distinct captions, several images to a caption.

    With s_ic = scale cos(image_i, caption_c), the mean over i of half the sum of

    - image to caption: -log exp(s_iy) / sum_c exp(s_ic), y = labels_i, over all C captions;
    - caption to image: -log exp(s_iy) / (exp(s_iy) + sum_{j: labels_j != y} exp(s_jy)). The other images of caption y
      are left out of the sum: as negatives they would push apart what belongs together.

    Args:
        images: (B, d) embeddings of any length, B >= 1.
        captions: (C, d) embeddings of any length; no caption twice.
        labels: (B,) int64 in [0, C), the caption of each image.
        scale: 1 / temperature, above 0.

    Returns:
        A scalar, at least 0.
    """
    scores = scale * F.normalize(images, dim=-1) @ F.normalize(captions, dim=-1).T
    own = labels[:, None] == labels.new_tensor(range(len(captions)))
    negatives = scores.masked_fill(own, float("-inf")).logsumexp(0)
    matched = scores.gather(1, labels[:, None]).squeeze(1)
    return 0.5 * (F.cross_entropy(scores, labels) + F.softplus(negatives[labels] - matched).mean())
