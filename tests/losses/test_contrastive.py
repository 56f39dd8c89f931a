"""The contrastive loss against the sums of its docstring."""

import math

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.losses.contrastive import symmetric_contrastive


def plain(images, captions, labels, scale):
    score = [[scale * float(F.cosine_similarity(i, c, dim=0)) for c in captions] for i in images]
    total = 0.0
    for i, y in enumerate(labels.tolist()):
        total -= math.log(math.exp(score[i][y]) / sum(map(math.exp, score[i])))
        others = sum(math.exp(score[j][y]) for j in range(len(images)) if labels[j] != y)
        total -= math.log(math.exp(score[i][y]) / (math.exp(score[i][y]) + others))
    return total / 2 / len(images)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0, 0, 2, 2, 2, 1], [3]])
def test_equals_a_plain_loop(labels):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(len(labels), 6, generator=generator, dtype=torch.float64)
    captions = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    labels = torch.tensor(labels)
    assert symmetric_contrastive(images, captions, labels, 5.0).item() == pytest.approx(
        plain(images, captions, labels, 5)
    )


def test_a_batch_of_one_caption_has_finite_gradients():
    images, captions = torch.randn(4, 6, requires_grad=True), torch.randn(2, 6, requires_grad=True)
    symmetric_contrastive(images, captions, torch.ones(4, dtype=torch.int64), 10.0).backward()
    assert images.grad.isfinite().all()
    assert captions.grad.isfinite().all()
    assert images.grad.abs().sum() > 0


def test_lengths_and_order_do_not_count():
    images, captions, labels = torch.randn(5, 6), torch.randn(3, 6), torch.tensor([0, 1, 2, 1, 1])
    order = torch.tensor([2, 0, 1])
    one = symmetric_contrastive(images, captions, labels, 7.0)
    two = symmetric_contrastive(images * 3, captions[order] * 0.1, order.argsort()[labels], torch.tensor(7.0))
    torch.testing.assert_close(one, two)
