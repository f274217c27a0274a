"""The auto-tuning engine of VBS: lr and weight decay of a stage from those of the stage before.

Hu, Xiao et al., "A Variable Batch Size Strategy for Large Scale Distributed DNN Training", ISPA 2019, say what it is
for: after the batch has jumped, lr stays and weight decay is tuned so that the effective learning rate stays bounded.
Their equations were not available; those here are this project's own, from the theory of scale-invariant layers (van
Laarhoven, arXiv 1706.05350; Wan et al., arXiv 2006.08419).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AutotuneConfig:
    """How a VBS run tunes lr and weight decay at stage boundaries.

    Args:
        mode: off (the schedule's lr decay alone) or rule (lr * weight_decay / global_batch falls by the decay exactly).
    """

    mode: Literal["off", "rule"] = "rule"


def rule(lr: float, weight_decay: float, growth: float, decay: float) -> tuple[float, float]:
    """lr and weight decay after a boundary: the batch grows ``growth``-fold, the baseline would divide lr by ``decay``.

    lr * weight_decay / global_batch, how far weights turn per sample, falls by exactly ``decay``. A batch that grows as
    much or more stands for the decay: lr stays and weight decay takes the excess. One that grows less stands for a part
    of it, and lr takes the rest.
    """
    if growth >= decay:
        return lr, weight_decay * (growth / decay)
    return lr * (growth / decay), weight_decay
