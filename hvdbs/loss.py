"""The loss as a sum over samples: it is divided once, by the window's true count, and never averaged twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from hvdbs.config import Config

# (outputs, labels) of a micro-batch -> the sum of its losses, 0-dimensional.
SummedLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def summed_loss(config: Config, label_smoothing: float) -> SummedLoss:
    """The loss that the data asks for: cross entropy over classes, else the one that its surface is the mean of."""
    if config.data.kind != "analytic":
        return partial(summed_cross_entropy, label_smoothing=label_smoothing)
    return summed_logistic if config.data.analytic.surface == "logistic" else summed_squared_error


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Sum over the micro-batch of the cross entropy of ``logits`` [B, K] against ``labels`` [B]; 0-dimensional.

    Label smoothing as in Szegedy et al., arXiv 1512.00567, section 7.
    """
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)


def summed_squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum over the micro-batch of (output - target)^2 / 2; ``outputs`` and ``targets`` [B]; 0-dimensional."""
    return 0.5 * (outputs - targets.to(outputs.dtype)).square().sum()


def summed_logistic(outputs: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Sum over the micro-batch of log(1 + exp(-sign * output)); ``outputs`` [B], ``signs`` -1 or 1 [B]."""
    # Not softplus, which torch cuts off where its argument is large.
    return -F.logsigmoid(signs.to(outputs.dtype) * outputs).sum()


def correct(logits: torch.Tensor, labels: torch.Tensor, k: int) -> torch.Tensor:
    """How many ``labels`` [B] are among the ``k`` largest ``logits`` [B, K]; with fewer classes, among all of them.

    0-dimensional int64. A label is found if fewer than k logits are larger: the same on every device, ties included.
    NaN logits find nothing.
    """
    own = logits.gather(1, labels[:, None])
    return ((~(logits <= own)).sum(1) < k).sum()
