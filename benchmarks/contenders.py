"""The methods that benchmarks.convergence compares: each a schedule of three stages, on the same samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Our choices, the same for all: the first batch, that of the large-batch runs and of VBS's enlargement, the factor by
# which a baseline would divide lr at each of the two boundaries. The enlargement exceeds that decay.
FIRST, LARGE, DECAY = 64, 512, 4
LR, WEIGHT_DECAY = 0.05, 5.0e-4
MICRO_BATCH = 32


@dataclass(frozen=True)
class Method:
    """``schedule`` and other sections of the config; ``branches``: from stage 1 of the vbs run of its seed."""

    schedule: dict[str, Any]
    sections: dict[str, Any] = field(default_factory=dict)
    branches: bool = False


def methods(samples: int, epochs: int) -> dict[str, Method]:
    """All methods by name, for ``samples`` in an epoch and ``epochs`` in each of three stages. The first is the
    reference."""
    length = samples * epochs
    total = {"samples": 3 * length}
    start = {
        "global_batch": FIRST,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "warmup": {"samples": _warmup(samples, epochs)},
    }
    large = start | {"global_batch": LARGE, "lr": LR * LARGE / FIRST}  # linear scaling, Goyal et al., arXiv 1706.02677
    equal = {"stage_samples": [length] * 3}
    # Lengths 1, 2, 3: with equal stages the first alone takes a third of the reference's updates.
    growing = {"stage_samples": [length // 2, length, 3 * length - length // 2 - length]}
    workers = LARGE // MICRO_BATCH
    extrapolated = {
        "extrapolation": {"direction": "local_past", "virtual_workers": workers, "ratio": workers**-0.5},
    }
    result = {
        "reference": Method({"method": "constant", **total, **start}),
        "classical": Method({"method": "classical", **equal, **start, "growth": DECAY}),
        "large": Method({"method": "constant", **total, **large}),
        "large-stepped": Method({"method": "classical", **equal, **large, "growth": DECAY}),
        "extrapolation": Method({"method": "constant", **total, **large}, extrapolated),
        "sebs": Method({"method": "sebs", **equal, **start, "growth": DECAY}),
        "sebs-growing": Method({"method": "sebs", **growing, **start, "growth": 6}),
    }
    for mode in ("off", "rule", "band"):
        result[f"vbs-{mode}"] = Method(vbs(samples, epochs, 3, LARGE, mode), branches=True)
    return result


def _warmup(samples: int, epochs: int) -> int:
    """An epoch, or less where the shortest first stage, half of the others, is shorter."""
    return max(1, min(samples, samples * epochs // 2))


def vbs(samples: int, epochs: int, stages: int, largest: int, mode: str, decay: float = DECAY) -> dict[str, Any]:
    """VBS with stages of equal length: the batch grows once, to ``largest``."""
    return {
        "method": "vbs",
        "stage_samples": [samples * epochs] * stages,
        "global_batch": FIRST,
        "largest_batch": largest,
        "factor": 1 / decay,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "warmup": {"samples": _warmup(samples, epochs)},
        "autotune": {"mode": mode},
    }
