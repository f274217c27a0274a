"""What a study of methods says on each claim, by 95 % intervals of differences between runs of one seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pandas as pd

from benchmarks.measure import difference_interval

MARGIN = 0.003  # of top-1, a share: 0.3 points
YES, NO, OPEN = "yes", "no", "not resolved at this size"
Kind = Literal["within", "below", "above"]


def judge(kind: Kind, low: float, high: float, margin: float = MARGIN) -> str:
    """``within``: no more than ``margin`` lower; ``below``, ``above``: lower, higher at all. By the whole interval.

    An effect whose interval lies within ``margin`` on both sides of nothing is answered no.
    """
    if kind == "within":
        return YES if low >= -margin else NO if high < -margin else OPEN
    if kind == "above":
        low, high = -high, -low
    return YES if high < 0 else NO if low >= 0 or (low >= -margin and high <= margin) else OPEN


@dataclass(frozen=True)
class Comparison:
    """``ours`` is to be ``kind`` of ``theirs`` in ``column``."""

    ours: str
    kind: Kind
    theirs: str
    column: str = "top1"


@dataclass(frozen=True)
class Claim:
    """``text``, which ``comparisons`` of accuracy and limits to ``updates`` over the reference's would support."""

    text: str
    comparisons: tuple[Comparison, ...]
    updates: tuple[tuple[str, float], ...] = ()


CLAIMS = (
    Claim(
        "(i) a large batch from the start loses accuracy, the same batch after stage 1 does not",
        (
            Comparison("large", "below", "reference"),
            Comparison("large-stepped", "below", "classical"),  # the same question where both lower lr
            Comparison("vbs-rule", "within", "reference"),
            Comparison("vbs-rule", "within", "classical"),
        ),
    ),
    Claim(
        "(ii) VBS and SEBS are within 0.3 points of the reference with at most half / a quarter of its updates",
        (
            Comparison("vbs-rule", "within", "reference"),
            Comparison("sebs-growing", "within", "reference"),
            Comparison("sebs", "within", "classical"),  # its own theory's baseline, stage by stage
        ),
        (("vbs-rule", 1 / 2), ("sebs-growing", 1 / 4)),
    ),
    Claim(
        "(iii) extrapolation helps the large-batch run, mostly early",
        (
            Comparison("extrapolation", "above", "large", "early_top1"),
            Comparison("extrapolation", "above", "large"),
            Comparison("extrapolation", "below", "large", "later_gain"),
        ),
    ),
    Claim(
        "(iv) the engine matters when the enlargement exceeds the decay",
        (
            Comparison("vbs-band", "above", "vbs-off"),
            Comparison("vbs-rule", "above", "vbs-off"),
            Comparison("vbs-band", "above", "vbs-rule"),
        ),
    ),
)


def intervals(rows: pd.DataFrame, comparisons: tuple[Comparison, ...] = ()) -> pd.DataFrame:
    """For each comparison whose methods share two seeds or more: mean difference, its interval, and the answer."""
    lines = []
    for one in comparisons:
        ours, theirs = (rows[rows.method == name].set_index("seed")[one.column] for name in (one.ours, one.theirs))
        both = ours.index.intersection(theirs.index)
        if len(both) < 2:
            continue
        mean, low, high = difference_interval(ours[both].tolist(), theirs[both].tolist())
        about = {"ours": one.ours, "is": one.kind, "theirs": one.theirs, "in": one.column, "pairs": len(both)}
        lines.append(about | {"difference": mean, "low": low, "high": high, "answer": judge(one.kind, low, high)})
    return pd.DataFrame(lines, columns=["ours", "is", "theirs", "in", "pairs", "difference", "low", "high", "answer"])


def answered(claim: Claim, rows: pd.DataFrame) -> tuple[str, list[str]]:
    """The claim's answer, and what it rests on in lines. Yes needs a yes of each; one no is a no."""
    lines, answers = [], []
    for row in intervals(rows, claim.comparisons).to_dict("records"):
        what = f"{row['ours']} {row['is']} {row['theirs']} in {row['in']}"
        points = f"{100 * row['difference']:+.2f} points [{100 * row['low']:+.2f}, {100 * row['high']:+.2f}]"
        lines.append(f"{what}: {points} over {row['pairs']} seeds: {row['answer']}")
        answers.append(row["answer"])
    updates = rows.groupby("method")["updates"].mean()
    for name, limit in claim.updates:
        if {name, "reference"} <= set(updates.index):
            share = updates[name] / updates["reference"]
            answers.append(YES if share <= limit else NO)
            lines.append(f"{name} takes {share:.3f} of the reference's updates, at most {limit:.3g}: {answers[-1]}")
    missing = len(claim.comparisons) + len(claim.updates) - len(answers)
    if missing:
        lines.append(f"{missing} more not made: fewer than two seeds have both methods")
        answers.append(OPEN)
    return NO if NO in answers else OPEN if OPEN in answers else YES, lines
