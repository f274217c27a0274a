"""The page: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from hvdbs import __version__, contour
from hvdbs.console import count, shown
from hvdbs.errors import HvdbsError
from hvdbs.report import benchmarks, charts, comparison, sheet_charts, stages, tables, views
from hvdbs.report.benchmarks import Part, Sheet
from hvdbs.report.charts import Look
from hvdbs.report.runs import Run
from hvdbs.report.tables import Cell, Table, words
from hvdbs.report.views import Chart, Pictures


@dataclass(frozen=True)
class RunView:
    """What the page says of one run by itself."""

    label: str
    path: str
    state: str
    missing: Sequence[str]
    stages: Table
    seconds: Chart | None
    predictions: Table
    predicted: str
    unplanned: Sequence[str]
    norms: Chart | None
    layers: Table
    decisions: Table
    bowl: str
    surface: str
    config: str


@dataclass(frozen=True)
class PartView:
    """What the page says of one part of a benchmark."""

    name: str
    table: Table
    legend: Sequence[Chart]
    panels: Sequence[Chart]
    left_out: int
    agreement: Sequence[Chart]
    predicted: Sequence[str]


@dataclass(frozen=True)
class SheetView:
    """What the page says of one CSV of a benchmark."""

    label: str
    path: str
    settled: Mapping[str, str]
    about: Mapping[str, str]
    parts: Sequence[PartView]


def page(runs: Sequence[Run], sheets: Sequence[Sheet], now: datetime | None = None) -> str:
    """The HTML text. Whatever comes from files is escaped. Raises HvdbsError for a damaged weights.csv of a bowl."""
    pictures = Pictures()
    looks = [(Look(at), run) for at, run in enumerate(runs)]
    kinds = [[pair for pair in looks if pair[1].classes is classes] for classes in (True, False)]
    groups = [views.group(pictures, pairs) for pairs in kinds if pairs]
    environment = Environment(
        loader=PackageLoader("hvdbs.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = [*(run.label for run in runs), *(sheet.label for sheet in sheets)]
    return environment.get_template("page.html.j2").render(
        title=f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''} \u2013 hvdbs report",
        made=f"{now or datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=__version__,
        contents=f"{count(len(runs))} run{'' if len(runs) == 1 else 's'}, {count(len(sheets))} benchmark table"
        f"{'' if len(sheets) == 1 else 's'}",
        groups=groups,
        runs=_runs(pictures, looks),
        parts=[(pictures.chart(charts.part_mark(at), part[1]), part[1]) for at, part in enumerate(charts.PARTS)]
        if runs
        else [],
        configs=views.differences({run.label: views.settings(run) for run in runs}),
        environments=views.differences({run.label: views.flat(run.environment) for run in runs}, all_rows=True),
        sheets=[_sheet(pictures, sheet) for sheet in sheets],
    )


def _runs(pictures: Pictures, looks: Sequence[tuple[Look, Run]]) -> list[RunView]:
    costs = [stages.costs(run) for _, run in looks]
    longest = {
        classes: _longest(
            [c for (_, run), own in zip(looks, costs, strict=True) if run.classes is classes for c in own]
        )
        for classes in (True, False)
    }
    norms = charts.norm_tables([run for _, run in looks])
    drawn = [table for table in norms if table is not None]
    limits = (
        max((float(table.index.to_numpy(float)[-1]) for table in drawn), default=1.0),
        min((float(np.nanmin(table)) for table in drawn), default=0.0),
        max((float(np.nanmax(table)) for table in drawn), default=1.0),
    )
    found = []
    for (look, run), cost, table in zip(looks, costs, norms, strict=True):
        foretold, unplanned = stages.predictions(run)
        said, surface = _bowl(run)
        found.append(
            RunView(
                label=run.label,
                path=shown(run.path),
                state=tables.cut(run.state),
                missing=run.missing,
                stages=tables.stage_table(cost),
                seconds=pictures.chart(charts.seconds(cost[: charts.BARS], longest[run.classes]), run.label)
                if cost
                else None,
                predictions=tables.prediction_table(foretold),
                predicted=tables.prediction_line(foretold),
                unplanned=unplanned[: tables.MOST_ROWS],
                norms=None if table is None else pictures.chart(charts.weight_norms(look, table, limits), run.label),
                layers=tables.layer_table(run),
                decisions=tables.decision_table(run),
                bowl=said,
                surface=surface,
                config=run.config[:100_000],
            )
        )
    return found


def _longest(costs: Sequence[stages.StageCost]) -> float:
    """Where the axis of seconds ends: at the slowest stage that has ended, if any has."""
    ended = [cost for cost in costs if cost.ended] or costs
    rates = [sum(charts.per_thousand(cost, name) for name, *_ in charts.PARTS) for cost in ended]
    return max((rate for rate in rates if not math.isnan(rate)), default=0.0)


def _bowl(run: Run) -> tuple[str, str]:
    """What a run on a bowl says of it, and a data: address of its picture; nothing of other runs."""
    bowl = contour.read_bowl(run.path)
    if bowl is None:
        return "", ""
    try:
        estimate = bowl.estimate()
    except HvdbsError as error:
        return str(error), ""
    picture = io.BytesIO()
    contour.figure(bowl, estimate).savefig(picture, format="png", dpi=110)
    address = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    return contour.comparison(bowl.truth, estimate), address


def _sheet(pictures: Pictures, sheet: Sheet) -> SheetView:
    return SheetView(
        sheet.label, shown(sheet.path), sheet.settled, sheet.about, [_part(pictures, part) for part in sheet.parts]
    )


def _part(pictures: Pictures, part: Part) -> PartView:
    said = []
    for measure, column in part.predicted.items():
        both = part.rows[[column, measure]].dropna()
        errors = ((both[measure] - both[column]) / both[column]).abs()
        said.append(
            f"{measure} against {column}: {count(len(both))} rows, median absolute error {errors.median():.1%}, "
            f"worst {errors.max():.1%}."
        )
    return PartView(
        name=part.name,
        table=_part_table(part),
        legend=[
            pictures.chart(charts.legend_mark(look), f"{part.line} {name}", charts.described(look))
            for name, look in sheet_charts.legend(part)
        ],
        panels=[
            pictures.chart(figure, caption, title=f"{part.measures[0]} {caption}")
            for caption, figure in sheet_charts.panels(part)
        ],
        left_out=max(0, len(sheet_charts.pieces(part)) - sheet_charts.MOST_PANELS),
        agreement=[
            pictures.chart(sheet_charts.agreement(part, measure), f"{measure}: measured against predicted")
            for measure in part.predicted
        ],
        predicted=said,
    )


def _part_table(part: Part) -> Table:
    """Medians and intervals of each group; the best among those that differ in nothing but the line is marked."""
    shown_measures = part.measures
    groups = [
        (setting, {name: benchmarks.median(rows[name].tolist()) for name in shown_measures}, len(rows))
        for setting, rows in part.groups()
    ]
    columns = list(groups[0][0])
    body = [
        [*(words(benchmarks.shown_setting(value)) for value in setting.values()), Cell(count(n))]
        for setting, _, n in groups
    ]
    rivals: dict[str, list[int]] = {}
    for at, (setting, _, _) in enumerate(groups):
        rivals.setdefault(str([value for name, value in setting.items() if name != part.line]), []).append(at)
    for name in shown_measures:
        marks = [False] * len(groups)
        best = benchmarks.direction(name)
        for places in rivals.values():
            values = [groups[at][1][name].value for at in places]
            for at, mark in zip(places, comparison.marked(values, most=best == "highest"), strict=True):
                marks[at] = mark
        for row, (_, middles, _), mark in zip(body, groups, marks, strict=True):
            row.append(_median(name, middles[name], best if mark else ""))
    header = [*(name.replace("_", " ") for name in columns), "rows"]
    for name in shown_measures:
        unit = benchmarks.unit(name)
        header.append(name.replace("_", " ") + (f" ({unit})" if unit and unit not in name else ""))
    notes = [
        "Median, below it in square brackets its 95% interval by order statistics, or the range of fewer than 6 rows."
    ]
    if part.line is not None:
        notes.append(
            f"Highest, lowest: the best median among rows that differ in {part.line.replace('_', ' ')} alone; where "
            "intervals overlap, it may be chance."
        )
    if len(body) > tables.MOST_ROWS:
        notes.append(f"{count(len(body) - tables.MOST_ROWS)} more rows are left out.")
    return Table(header, body[: tables.MOST_ROWS], notes)


def _median(name: str, middle: benchmarks.Median, mark: str) -> Cell:
    value = benchmarks.shown_value(name, middle.value)
    if not value or middle.low == middle.high:
        return Cell(value, mark)
    low, high = (benchmarks.shown_value(name, end) for end in (middle.low, middle.high))
    return Cell(value, mark, f"[{low}, {high}]" if middle.sure else f"{low} to {high}")
