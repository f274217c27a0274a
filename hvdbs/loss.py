"""The loss as a sum over samples: it is divided once, by the window's true count, and never averaged twice."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Sum over the micro-batch of the cross entropy of ``logits`` [B, K] against ``labels`` [B]; 0-dimensional.

    Label smoothing as in Szegedy et al., arXiv 1512.00567, section 7.
    """
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)


def correct(logits: torch.Tensor, labels: torch.Tensor, k: int) -> torch.Tensor:
    """How many ``labels`` [B] are among the ``k`` largest ``logits`` [B, K]; with fewer classes, among all of them.

    0-dimensional int64. A label is found if fewer than k logits are larger: the same on every device, ties included.
    NaN logits find nothing.
    """
    own = logits.gather(1, labels[:, None])
    return ((~(logits <= own)).sum(1) < k).sum()
