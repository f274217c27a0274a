"""report.png: score, loss and global batch of one or several runs in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from hvdbs.console import count, number, plural, share
from hvdbs.report.runs import Run, extents

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by everyone, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")


def colour(at: int) -> str:
    """That of run number ``at``."""
    return COLOURS[at % len(COLOURS)]


def figure(runs: Sequence[Run]) -> Figure:
    """Score, loss and global batch of all runs, against samples on the left and against updates on the right.

    The score is the top-1 accuracy, or the gap to the least loss if no run has classes.
    """
    # Figure without pyplot: no display is looked for, and nothing is kept in a global state.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    result = Figure(figsize=(10, 7.2), dpi=150, layout="constrained")
    axes = result.subplots(3, 2, sharex="col", sharey="row", gridspec_kw={"height_ratios": [3, 3, 1.6]})
    classes = any(run.classes for run in runs)
    colours = [colour(at) for at in range(len(runs))]
    for column, clock in enumerate(("samples_seen", "step")):
        for run, shade in zip(runs, colours, strict=True):
            _draw(run, shade, clock, classes, *axes[:, column])
        if len(runs) == 1:
            _shade(runs[0], clock, axes[:, column])
        axes[2, column].set_xlabel("training samples seen" if column == 0 else "updates (optimizer steps)")
        axes[2, column].set_xlim(left=0)
    _dress(axes, classes, sorted({int(size) for run in runs for size in run.steps.global_batch.unique()}))
    names = [
        Line2D([], [], color=shade, linewidth=3, label=f"{run.label}{_score(run)}")
        for run, shade in zip(runs, colours, strict=True)
    ]
    styles = [
        Line2D([], [], color="0.3", marker="o", markersize=3.5, label="validation"),
        Line2D([], [], color="0.3", alpha=0.4, linewidth=1, label="training, single updates"),
    ]
    legend = result.legend(handles=[*names, *styles], loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar in the name of a folder is a dollar
    return result


def _score(run: Run) -> str:
    if run.evals.empty:
        return ""
    last = run.evals.iloc[-1]
    score = f"gap {number(last.gap)}" if pd.isna(last.top1) else share(last.top1, 2)
    return f" ({score} after {plural(int(last.step), 'update')})"


def _draw(run: Run, colour: str, clock: str, classes: bool, score: Axes, loss: Axes, batch: Axes) -> None:
    steps, evals = run.steps, run.evals
    score.plot(evals[clock], evals.top1 * 100 if classes else evals.gap, "o-", color=colour, markersize=3.5)
    loss.plot(steps[clock], steps.loss, color=colour, alpha=0.35, linewidth=1)
    loss.plot(evals[clock], evals.loss, "o-", color=colour, markersize=3.5)
    if held := extents(run, clock):
        edges = [held[0][0], *(end for _, end, _ in held)]
        batch.stairs([size for _, _, size in held], edges, color=colour, linewidth=1.6, baseline=None)


def _shade(run: Run, clock: str, axes: Sequence[Axes]) -> None:
    """Every other stage on a grey ground."""
    for begin, end, _ in extents(run, clock)[1::2]:
        for axis in axes:
            axis.axvspan(begin, end, color="0.5", alpha=0.12, linewidth=0, zorder=0)


def _dress(axes: Any, classes: bool, batches: Sequence[int]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

    (score, _), (loss, _), (batch, _) = axes
    score.set_ylabel("top-1 accuracy (%)" if classes else "gap to the least loss")
    loss.set_ylabel("loss (cross entropy)" if classes else "loss")
    if not classes:
        score.set_yscale("log")
    batch.set_ylabel("global batch\n(samples)")
    if batches:  # nothing to draw yet is no reason to fail, but a logarithmic axis does without data
        loss.set_yscale("log")
        loss.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        loss.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        loss.yaxis.set_minor_formatter(NullFormatter())
        batch.set_yscale("log", base=2)
        batch.set_yticks(batches, labels=[count(size) for size in batches])
        batch.set_ylim(batches[0] / 1.5, batches[-1] * 1.5)
        batch.yaxis.set_minor_locator(NullLocator())
    for axis in axes.flat:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
