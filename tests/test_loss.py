"""The loss against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from hvdbs.loss import correct, summed_cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_summed_cross_entropy_is_the_formula(smoothing: float) -> None:
    """-sum_k q_k log p_k with q = (1 - s) onehot + s / K; float64, 1e-12, seed 0, B = 7, K = 5."""
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 5, (7,))
    total = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        log_sum = math.log(sum(math.exp(x) for x in row))
        for k, x in enumerate(row):
            total -= ((1 - smoothing) * (k == label) + smoothing / 5) * (x - log_sum)
    assert summed_cross_entropy(logits, labels, smoothing).item() == pytest.approx(total, rel=1e-12)


def test_correct_counts_labels_among_the_k_largest() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [2.0, 3.0, 1.0]])
    labels = torch.tensor([0, 0, 0])
    assert [correct(logits, labels, k).item() for k in (1, 2, 3, 5)] == [1, 2, 3, 3]


def test_not_a_number_is_never_correct() -> None:
    assert correct(torch.full((4, 6), math.nan), torch.zeros(4, dtype=torch.int64), 5).item() == 0
