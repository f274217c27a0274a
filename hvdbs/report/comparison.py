"""Which of several runs communicated least for the score it reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from hvdbs.console import number, share, size
from hvdbs.report.runs import CLOCKS, Run, on_clock
from hvdbs.report.stages import totals

_MOST_LEVELS = 5
SAME_SAMPLES = 0.98  # runs that differ by less have seen as many samples, but for whole windows


@dataclass(frozen=True)
class Standing:
    """Where one run stands. ``higher``: its score is an accuracy; else it is a gap, of which less is better.

    ``final`` and ``best`` are scores, None before the first evaluation; ``samples`` those of the last evaluation. The
    others are totals on the clocks: samples_seen, step, collectives, seconds, reduced_bytes.
    """

    run: Run
    higher: bool
    final: float | None
    best: float | None
    samples: int
    spent: dict[str, float]

    @property
    def bytes_per_sample(self) -> float:
        """Of one rank, over the samples of all ranks."""
        seen = self.spent["samples_seen"]
        return self.spent["reduced_bytes"] / seen if seen else math.nan

    def reaches(self, score: float) -> bool:
        return self.best is not None and (self.best >= score if self.higher else self.best <= score)

    def up_to(self, score: float) -> dict[str, float] | None:
        """What had been spent on each clock at the first evaluation that was at least as good as ``score``; None if
        none was. NaN where the log does not reach that update yet."""
        values = scores(self.run)
        good = values >= score if self.higher else values <= score
        if not good.any():
            return None
        first = self.run.evals.step[good].iloc[:1]
        return {clock: float(on_clock(self.run, clock, first)[0]) for clock in CLOCKS}


def scores(run: Run) -> pd.Series:
    """The score at each evaluation: top-1 as a share, or the gap."""
    return run.evals.top1 if run.classes else run.evals.gap


def standing(run: Run) -> Standing:
    """Raises nothing: a run without evaluations has no score."""
    values = scores(run).dropna()
    higher = run.classes
    final = None if values.empty else float(values.iloc[-1])
    best = None if values.empty else float(values.max() if higher else values.min())
    samples = 0 if run.evals.empty else int(run.evals.samples.iloc[-1])
    return Standing(run, higher, final, best, samples, dict(totals(run)))


def levels(standings: Sequence[Standing]) -> list[float]:
    """The scores at which runs are compared, the one that all reached first: the best of each run, from the worst
    run's to the best run's, at most 5 of them. All of one kind."""
    best = sorted({one.best for one in standings if one.best is not None})
    if not standings or not standings[0].higher:
        best.reverse()
    if len(best) > _MOST_LEVELS:
        best = [best[round(at * (len(best) - 1) / (_MOST_LEVELS - 1))] for at in range(_MOST_LEVELS)]
    return best


def interval(right: float, samples: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy of ``right`` in [0, 1] over ``samples`` images, by Wilson's score.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927. It says what the
    size of the validation set leaves open, not what another seed would give.
    """
    z = 1.959964
    middle = (right + z**2 / (2 * samples)) / (1 + z**2 / samples)
    reach = z / (1 + z**2 / samples) * math.sqrt(right * (1 - right) / samples + z**2 / (4 * samples**2))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def marked(values: Sequence[float | None], *, most: bool) -> list[bool]:
    """Which of ``values`` are the greatest (``most``) or the least, ties included; none where fewer than two are known
    or all are the same."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if len(set(known)) < 2:
        return [False] * len(values)
    best = max(known) if most else min(known)
    return [value == best for value in values]


def shown_score(score: float, higher: bool) -> str:
    return f"top-1 {share(score, 2)}" if higher else f"a gap of {number(score)}"


def verdict(standings: Sequence[Standing]) -> list[str]:
    """In sentences: who communicated least up to the score that all reached, and who reached the best score. All of
    one kind."""
    scored = [one for one in standings if one.best is not None]
    lines = [f"{one.run.label} has no evaluation yet and is not compared." for one in standings if one.best is None]
    if len(scored) < 2:
        return lines
    common = levels(scored)[0]
    spent = [(one, at["reduced_bytes"]) for one in scored if (at := one.up_to(common)) is not None]
    spent = sorted(((one, value) for one, value in spent if not math.isnan(value)), key=lambda pair: pair[1])
    sentences = []
    if len(spent) > 1:
        least = spent[0][1]
        first = [one.run.label for one, value in spent if value == least]
        score = shown_score(common, scored[0].higher)
        everybody = "both runs" if len(scored) == 2 else f"all {len(scored)} runs"
        sentence = f"Least communication: {' and '.join(first)}. To reach {score}, as {everybody} did, "
        sentence += f"it reduced {size(least)}" if len(first) == 1 else f"they reduced {size(least)} each"
        others = [f"{one.run.label} {size(value)} ({_times(value, least)})" for one, value in spent[len(first) :]]
        sentences.append(sentence + (f"; {', '.join(others)}." if others else ", all the same."))
    best = (max if scored[0].higher else min)(one.best for one in scored if one.best is not None)
    winners = [one.run.label for one in scored if one.best == best]
    if len(winners) < len(scored):
        word = "Highest accuracy" if scored[0].higher else "Least gap"
        sentences.append(f"{word} at any evaluation: {' and '.join(winners)}, {shown_score(best, scored[0].higher)}.")
    return [*sentences, *lines]


def _times(value: float, least: float) -> str:
    return f"{value / least:.3g} times as much" if least else "the other reduced nothing"


def caveats(standings: Sequence[Standing]) -> list[str]:
    """What makes runs less comparable than they look."""
    lines = []
    ranks = {one.run.label: one.run.environment.get("world_size") for one in standings}
    if len(set(ranks.values())) > 1:
        said = ", ".join(f"{label} {many or 'unknown'}" for label, many in ranks.items())
        lines.append(
            f"The runs had different numbers of ranks ({said}). Reduced bytes count what one rank hands to "
            "allreduce, whatever their number; in a ring of P ranks each then sends 2 (P - 1) / P times as much."
        )
    seen = [one.spent["samples_seen"] for one in standings]
    if min(seen) < SAME_SAMPLES * max(seen):
        lines.append("The runs saw different numbers of samples: compare what they took to the same score, not totals.")
    if any(one.run.parent for one in standings):
        lines.append(
            "A branch counts what its parent had spent where its summary.json tells, else what its own files hold."
        )
    return lines
