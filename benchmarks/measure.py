"""What every benchmark's report carries, and how two contenders are compared."""

from __future__ import annotations

import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats

from hvdbs.comm.cores import chosen
from hvdbs.environment import cpu_model, git_commit, versions


def ratio_interval(
    ours: Sequence[float], theirs: Sequence[float], seed: int = 0, resamples: int = 10_000
) -> tuple[float, float, float]:
    """Median of the ratios ``ours`` / ``theirs``, pair by pair, with its 95 % bootstrap interval.

    Percentile bootstrap over pairs (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13). Raises
    ValueError unless there are as many of one as of the other, and at least one pair.
    """
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f"{len(ours)} against {len(theirs)} measurements: they are compared in pairs")
    ratios = np.asarray(ours, dtype=float) / np.asarray(theirs, dtype=float)
    drawn = np.random.default_rng(seed).integers(len(ratios), size=(resamples, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def difference_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Mean of the differences ``ours`` - ``theirs``, pair by pair, with its 95 % interval by Student's t.

    Not a bootstrap, as for ratios: of the five pairs that a study of trainings has, percentile intervals hold the truth
    83 times in 100. Raises ValueError unless there are as many of one as of the other, and at least two pairs.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ValueError(f"{len(ours)} against {len(theirs)} measurements: they are compared in pairs, two at least")
    differences = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    mean, pairs = float(differences.mean()), len(differences)
    reach = float(stats.t.ppf(0.975, pairs - 1) * differences.std(ddof=1) / math.sqrt(pairs))
    return mean, mean - reach, mean + reach


def facts(world_size: int, backend: str) -> dict[str, Any]:
    """What a figure cannot be read without: hardware, versions, commit, command, date."""
    return {
        "world_size": world_size,
        "backend": backend,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.system() + " " + platform.machine(),
        **{name: version or "" for name, version in versions().items()},
        **chosen(torch.get_num_threads()),
        "commit": git_commit(Path(__file__).parent) or "",
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def write(rows: pd.DataFrame, out: Path, about: dict[str, Any], *, append: bool = False) -> None:
    """``rows`` as CSV, each followed by ``about``; what the rows have themselves they keep. Says where it went."""
    table = rows.assign(**{name: value for name, value in about.items() if name not in rows.columns})
    if append and out.exists():
        table = pd.concat([pd.read_csv(out), table])
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    print(f"{len(rows)} rows {'added to' if append else 'in'} {out}", flush=True)
