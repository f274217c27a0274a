"""The pictures of the page: small ones, one quantity each, all runs of a kind in the same axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hvdbs import norms
from hvdbs.console import count, size
from hvdbs.report.figures import COLOURS
from hvdbs.report.runs import Run, extents, on_clock
from hvdbs.report.stages import StageCost
from hvdbs.report.svg import GRID, INK, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "samples_seen": "training samples seen",
    "step": "updates (optimizer steps)",
    "collectives": "communication rounds (collectives)",
    "seconds": "seconds of training",
    "reduced_bytes": "bytes reduced, of one rank",
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
Dash = Literal["-", "--", ":", "-."]
DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")
POINTS = 1200  # of one line at most, however long the run was
BARS = 40  # stages of a run whose seconds are drawn
_LAYERS_DRAWN = 64

# Of a stage's seconds: name, words, colour, hatch.
PARTS = (
    ("compute_seconds", "compute", COLOURS[0], ""),
    ("exposed_communication_seconds", "exposed communication", COLOURS[1], "////"),
    ("data_seconds", "waiting for data", COLOURS[5], "\\\\\\\\"),
    ("optimizer_seconds", "optimizer", COLOURS[2], "xxxx"),
)


@dataclass(frozen=True)
class Look:
    """How run number ``at`` is drawn: three things tell it from the others, of which colour is one."""

    at: int

    @property
    def colour(self) -> str:
        return (*COLOURS[:-1], INK)[self.at % len(COLOURS)]

    @property
    def marker(self) -> str:
        return MARKERS[self.at % len(MARKERS)]

    @property
    def dash(self) -> Dash:
        return DASHES[self.at // len(COLOURS) % len(DASHES)]


def thin(x: Any, y: Any, points: int = POINTS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most ``points`` + 2 of the points (x, y), x ascending: the least and the greatest y of as many equal groups,
    the first and the last point. What is not finite is left out."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= points:
        return x, y
    edges = np.linspace(0, len(x), points // 2 + 1).astype(int)
    kept = {0, len(x) - 1}
    for begin, end in pairwise(edges):
        kept |= {begin + int(y[begin:end].argmin()), begin + int(y[begin:end].argmax())}
    chosen = sorted(kept)
    return x[chosen], y[chosen]


def panel(x_label: str, y_label: str, height: float = 2.9, left: float = 0.16) -> tuple[Figure, Axes]:
    """An empty picture 4.4 inches wide, in the colours that the page replaces."""
    from matplotlib.figure import Figure

    result = Figure(figsize=(4.4, height))
    result.subplots_adjust(left=left, right=0.96, top=0.96, bottom=0.5 / height)
    axis = result.subplots()
    axis.set_xlabel(x_label, color=INK, fontsize=9)
    axis.set_ylabel(y_label, color=INK, fontsize=9)
    axis.tick_params(colors=INK, labelsize=8.5, width=0.6)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(INK)
        axis.spines[side].set_linewidth(0.6)
    return result, axis


def _clock_axis(axis: Axes, clock: str) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    axis.set_xlim(left=0)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if clock == "reduced_bytes":
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    else:
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def score(runs: Sequence[tuple[Look, Run]], clock: str) -> Figure:
    """The score of all runs, which are of one kind, at their evaluations, against ``clock``."""
    classes = runs[0][1].classes
    result, axis = panel(LABELS[clock], "top-1 accuracy (%)" if classes else "gap to the least loss")
    positive = False
    for look, run in runs:
        values = run.evals.top1 * 100 if classes else run.evals.gap
        positive |= bool((values > 0).any())
        _points(axis, look, on_clock(run, clock, run.evals.step), values)
    if not classes and positive:
        log_scale(axis)
    _clock_axis(axis, clock)
    return result


def loss(runs: Sequence[tuple[Look, Run]], clock: str) -> Figure:
    """The loss of training, thin, and of validation, with markers, against ``clock``."""
    result, axis = panel(LABELS[clock], "loss (cross entropy)" if runs[0][1].classes else "loss")
    positive = False
    for look, run in runs:
        x, y = thin(on_clock(run, clock, run.steps.step), run.steps.loss)
        axis.plot(x, y, look.dash, color=look.colour, linewidth=0.7, alpha=0.45)
        _points(axis, look, on_clock(run, clock, run.evals.step), run.evals.loss)
        positive |= bool((y > 0).any())
    if positive:
        log_scale(axis)
    _clock_axis(axis, clock)
    return result


def _points(axis: Axes, look: Look, x: Any, y: Any) -> None:
    x, y = thin(x, y, 200)
    axis.plot(x, y, look.dash, marker=look.marker, color=look.colour, markersize=4, linewidth=1.3)


def log_scale(axis: Axes) -> None:
    """A logarithmic y axis whose numbers are written out."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high / low < 300:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def batch(runs: Sequence[tuple[Look, Run]]) -> Figure:
    """The global batch of each stage against samples."""
    from matplotlib.ticker import NullLocator

    result, axis = panel(LABELS["samples_seen"], "global batch (samples)")
    sizes: set[int] = set()
    for look, run in runs:
        held = extents(run, "samples_seen")
        if held:
            edges = [held[0][0], *(end for _, end, _ in held)]
            values = [value for _, _, value in held]
            sizes |= set(values)
            axis.stairs(values, edges, color=look.colour, linestyle=look.dash, linewidth=1.6, baseline=None)
    if sizes:
        axis.set_yscale("log", base=2)
        ticks = sorted(sizes) if len(sizes) <= 8 else sorted({2 ** round(np.log2(value)) for value in sizes})
        axis.set_yticks(ticks, labels=[count(value) for value in ticks])
        axis.set_ylim(min(sizes) / 1.5, max(sizes) * 1.5)
        axis.yaxis.set_minor_locator(NullLocator())
    _clock_axis(axis, "samples_seen")
    return result


def rate(runs: Sequence[tuple[Look, Run]], column: str, label: str) -> Figure:
    """A column of steps.csv, of positive numbers, against samples."""
    result, axis = panel(LABELS["samples_seen"], label, left=0.19)
    positive = False
    for look, run in runs:
        x, y = thin(run.steps.samples_seen, run.steps[column])
        axis.plot(x, y, look.dash, color=look.colour, linewidth=1.2)
        positive |= bool((y > 0).any())
    if positive:
        log_scale(axis)
    _clock_axis(axis, "samples_seen")
    return result


def seconds(costs: Sequence[StageCost], longest: float) -> Figure:
    """Where the seconds of each stage of one run went, for a thousand samples; the axis ends at ``longest``."""
    result, axis = panel("seconds per 1,000 samples", "", height=0.7 + 0.32 * len(costs), left=0.3)
    names = [f"stage {cost.stage}, batch {count(cost.global_batch)}" for cost in costs]
    begin = np.zeros(len(costs))
    for name, _, shade, hatch in PARTS:
        width = np.nan_to_num([per_thousand(cost, name) for cost in costs])
        axis.barh(range(len(costs)), width, 0.7, begin, color=shade, hatch=hatch, edgecolor=PAPER, linewidth=0.4)
        begin += width
    axis.set_yticks(range(len(costs)), labels=names)
    axis.invert_yaxis()
    end = longest * 1.03 or 1
    axis.set_xlim(0, end)
    for at, whole in enumerate(begin):
        if whole > end:  # a first few updates, say; the axis is for what can be compared
            said = f"{whole:.3g} s, beyond the axis "
            axis.text(end, at, said, ha="right", va="center", fontsize=8, color=INK, bbox={"color": PAPER, "pad": 1})
    axis.grid(visible=False, axis="y")
    return result


def per_thousand(cost: StageCost, name: str) -> float:
    """Seconds ``name`` of a stage per thousand of its samples."""
    return float(getattr(cost, name)) / cost.samples * 1000 if cost.samples else 0.0


def weight_norms(look: Look, table: pd.DataFrame, limits: tuple[float, float, float]) -> Figure:
    """The norms ``table`` (``norms.weights``) of one run: layers thin, or the band that holds them all where they are
    many, the median thick. ``limits``: the last epoch, least and greatest of all runs."""
    result, axis = panel("epoch", "weight norm / its first value")
    shown = table.iloc[np.unique(np.linspace(0, len(table) - 1, 200).astype(int))]
    epochs, values = shown.index.to_numpy(float), shown.to_numpy(float)
    if values.shape[1] <= _LAYERS_DRAWN:
        axis.plot(epochs, values, color=look.colour, alpha=0.35, linewidth=0.8)
    else:
        for bottom, top in ((0, 100), (25, 75)):
            bounds = np.nanpercentile(values, [bottom, top], axis=1)
            axis.fill_between(epochs, *bounds, color=look.colour, alpha=0.25, linewidth=0)
    axis.plot(epochs, np.nanmedian(values, axis=1), look.dash, marker=look.marker, color=look.colour, markersize=3)
    last, low, high = limits
    room = 0.05 * (high - low) or 0.05
    axis.set_xlim(0, last * 1.03)
    axis.set_ylim(low - room, high + room)
    return result


def norm_tables(runs: Sequence[Run]) -> list[pd.DataFrame | None]:
    """For each run what ``weight_norms`` draws; None where there are not two rows of a layer."""
    tables = [norms.weights(run.layers) for run in runs]
    return [table if len(table) > 1 else None for table in tables]


def described(look: Look) -> str:
    """Line and marker of a run in words, for whoever has no colours: ``solid line, circles``."""
    lines = {"-": "solid", "--": "dashed", ":": "dotted", "-.": "dash-dotted"}
    marks = ("circles", "squares", "triangles", "diamonds", "triangles down", "plus signs", "crosses", "stars")
    return f"{lines[look.dash]} line, {marks[look.at % len(MARKERS)]}"


def legend_mark(look: Look) -> Figure:
    """A short piece of a run's line with its marker."""
    from matplotlib.figure import Figure

    result = Figure(figsize=(0.6, 0.2))
    axis = result.add_axes((0, 0, 1, 1))
    axis.axis("off")
    axis.plot([0, 1, 2], [0, 0, 0], look.dash, marker=look.marker, markevery=[1], color=look.colour, markersize=5)
    return result


def part_mark(at: int) -> Figure:
    """A piece of the bar of PARTS[at]."""
    from matplotlib.figure import Figure

    result = Figure(figsize=(0.35, 0.2))
    axis = result.add_axes((0, 0, 1, 1))
    axis.axis("off")
    axis.set(xlim=(0, 1), ylim=(0, 1))
    _, _, shade, hatch = PARTS[at]
    axis.bar([0.5], [1], 1, color=shade, hatch=hatch, edgecolor=PAPER, linewidth=0)
    return result


def last_values(run: Run) -> pd.DataFrame:
    """The last row of each layer of layers.csv."""
    return run.layers.groupby("layer", sort=False).tail(1)
