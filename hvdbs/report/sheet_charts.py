"""Pictures of a benchmark's CSV: medians with their intervals, a panel for each combination of settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from hvdbs.report.benchmarks import Part, Sheet, median, shown_setting, unit
from hvdbs.report.charts import Look, log_scale, panel, thin
from hvdbs.report.svg import GRID, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 12
_MOST_BARS = 40
_MOST_TICKS = 8
_LOG_FROM = 20  # a range of measured values from which on an axis is logarithmic


def lines(part: Part) -> dict[Any, Look]:
    """How each value of ``part.line`` is drawn."""
    if part.axis is None or part.line is None:
        return {None: Look(0)}
    return {value: Look(at) for at, value in enumerate(part.rows[part.line].drop_duplicates())}


def pieces(part: Part) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each panel that has something to draw, and what is said of it; all rows where there is no axis."""
    drawn = part.rows[part.rows[part.measures[0]].notna()]
    if part.axis is None or not part.panels:
        return [("", drawn)]
    return [
        (", ".join(f"{name} {shown_setting(value)}" for name, value in zip(part.panels, key, strict=True)), rows)
        for key, rows in drawn.groupby(part.panels, sort=True, dropna=False)
    ]


def panels(part: Part) -> Iterator[tuple[str, Figure]]:
    """Caption and picture of each panel, at most MOST_PANELS; all on the same axes."""
    for caption, rows in pieces(part)[:MOST_PANELS]:
        height = 2.9 if part.axis is not None else 0.7 + 0.28 * min(_MOST_BARS, len(_categories(part, rows)))
        result, axis = panel(*_labels(part), height, 0.19 if part.axis is not None else 0.46)
        _draw(axis, part, rows)
        yield caption, result


def picture(sheet: Sheet) -> Figure:
    """All panels of a CSV in one picture, each part's in rows of three."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    tiles = [(part, caption, rows) for part in sheet.parts for caption, rows in pieces(part)[:MOST_PANELS]]
    across = min(3, len(tiles))
    down = -(-len(tiles) // across)
    result = Figure(figsize=(max(7.0, 4.2 * across), 0.6 + 3.1 * down), dpi=110, layout="constrained")
    result.subplots(down, across)
    for axis, (part, caption, rows) in zip(result.axes, tiles, strict=False):
        _draw(axis, part, rows)
        across_label, up_label = _labels(part)
        axis.set_xlabel(across_label)
        axis.set_ylabel(up_label)
        axis.set_title(f"{part.name} {caption}".strip(), fontsize=9, parse_math=False)
        axis.grid(color=GRID, linewidth=0.6)
        handles = [
            Line2D([], [], color=look.colour, marker=look.marker, linestyle=look.dash, label=str(shown_setting(value)))
            for value, look in lines(part).items()
            if value is not None
        ]
        if handles:
            legend = axis.legend(handles=handles, fontsize=7.5, frameon=False, title=part.line, title_fontsize=7.5)
            for said in legend.get_texts():
                said.set_parse_math(False)
    for axis in result.axes[len(tiles) :]:
        axis.axis("off")
    result.suptitle(sheet.label, fontsize=11, parse_math=False)
    return result


def agreement(part: Part, measure: str) -> Figure:
    """Measured against predicted, a point for each group, and the diagonal on which they are equal."""
    column = part.predicted[measure]
    rows = pd.DataFrame([group[[column, measure]].median() for _, group in part.groups()]).dropna()
    result, axis = panel(f"predicted {measure}{_in(measure)}", f"measured {measure}{_in(measure)}", left=0.19)
    x, y = thin(*rows.sort_values(column).to_numpy(float).T)
    axis.plot(x, y, "o", color=Look(0).colour, markersize=4)
    if len(x):
        low, high = min(x.min(), y.min()), max(x.max(), y.max())
        axis.plot([low, high], [low, high], "--", color=INK, linewidth=0.8)
        if low > 0 and high / low > _LOG_FROM:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            log_scale(axis)
    return result


def _in(measure: str) -> str:
    return f" ({unit(measure)})" if unit(measure) else ""


def _labels(part: Part) -> tuple[str, str]:
    measured = part.measures[0].replace("_", " ") + _in(part.measures[0])
    return (measured, "") if part.axis is None else (part.axis.replace("_", " "), measured)


def _categories(part: Part, rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    names = [*part.panels, *([part.line] if part.line else [])]
    if not names:
        return [(part.name or "all rows", rows)]
    return [(", ".join(map(shown_setting, key)), group) for key, group in rows.groupby(names, sort=True, dropna=False)]


def _draw(axis: Axes, part: Part, rows: pd.DataFrame) -> None:
    if part.axis is None:
        _bars(axis, part, rows)
        return
    measure = part.measures[0]
    for value, look in lines(part).items():
        own = rows if value is None else rows[rows[part.line].isna() if pd.isna(value) else rows[part.line] == value]
        points = [(x, median(group[measure].tolist())) for x, group in own.groupby(part.axis, sort=True)]
        if not points:
            continue
        x = [float(str(at)) for at, _ in points]
        middle = [one.value for _, one in points]
        reach = [[one.value - one.low for _, one in points], [one.high - one.value for _, one in points]]
        axis.errorbar(
            *(x, middle, reach),
            linestyle=look.dash,
            marker=look.marker,
            color=look.colour,
            markersize=4,
            linewidth=1.3,
            elinewidth=0.9,
            capsize=2.5,
        )
    _common_axes(axis, part)


def _common_axes(axis: Axes, part: Part) -> None:
    """Those of all panels of a part, from all its rows."""
    from matplotlib.ticker import NullLocator

    assert part.axis is not None
    values = part.rows[part.measures[0]].dropna()
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low > _LOG_FROM:
        axis.set_ylim(low / 1.2, high * 1.2)
        log_scale(axis)
    else:
        axis.set_ylim(min(0.0, low), high * 1.05 if high > 0 else 0.05)
        if part.measures[0] in ("top1", "top5"):  # of which the upper end is what matters
            axis.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    at = sorted({float(value) for value in part.rows[part.axis].dropna()})
    if at[0] > 0 and at[-1] / at[0] >= 8:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    if len(at) <= _MOST_TICKS:
        axis.set_xticks(at, labels=[shown_setting(value) for value in at])
        axis.xaxis.set_minor_locator(NullLocator())


def _bars(axis: Axes, part: Part, rows: pd.DataFrame) -> None:
    """A point with its interval for each group, one below the other."""
    groups = _categories(part, rows)[:_MOST_BARS]
    middles = [median(group[part.measures[0]].tolist()) for _, group in groups]
    for at, one in enumerate(middles):
        axis.plot([one.low, one.high], [at, at], "-", color=Look(0).colour, linewidth=2)
        axis.plot([one.value], [at], "o", color=Look(0).colour, markersize=5)
    axis.set_yticks(range(len(groups)), labels=[name for name, _ in groups])
    axis.set_ylim(len(groups) - 0.4, -0.6)
    known = [one for one in middles if not math.isnan(one.value)]
    low, high = min(one.low for one in known), max(one.high for one in known)
    if low > 0 and high / low > _LOG_FROM:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    else:
        axis.set_xlim(min(0.0, low), high * 1.05 if high > 0 else 0.05)


def legend(part: Part) -> Sequence[tuple[str, Look]]:
    """The lines of a part by their names, where it has several."""
    return [(shown_setting(value), look) for value, look in lines(part).items() if value is not None]
