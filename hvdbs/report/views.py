"""What the page shows of several runs, compared, as tables and pictures that its template only has to lay out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from markupsafe import Markup

from hvdbs.console import count, duration, number, plural, share
from hvdbs.report import charts, comparison
from hvdbs.report.charts import Look
from hvdbs.report.comparison import Standing
from hvdbs.report.figures import COLOURS
from hvdbs.report.runs import Run
from hvdbs.report.svg import GRID, INK, PAPER, inline
from hvdbs.report.tables import MOST_ROWS, Cell, Table, of_bytes, per_sample, words

VARIABLES = {
    **{shade: f"--c{at}" for at, shade in enumerate(COLOURS[:-1])},
    **{"#000000": "--ink", INK: "--ink", GRID: "--grid", PAPER: "--paper"},
}


@dataclass(frozen=True)
class Chart:
    svg: Markup
    caption: str = ""
    note: str = ""


@dataclass
class Pictures:
    """Makes each picture of a page once, with ids of its own."""

    made: int = 0

    def chart(self, figure: Any, caption: str, note: str = "", title: str = "") -> Chart:
        self.made += 1
        # The one place where text becomes markup: matplotlib has escaped what stands in its pictures.
        return Chart(Markup(inline(figure, f"p{self.made}", title or caption, VARIABLES)), caption, note)


@dataclass(frozen=True)
class Group:
    """Runs whose scores are of one kind, compared."""

    title: str
    verdict: Sequence[str]
    caveats: Sequence[str]
    standings: Table
    levels: Table | None
    legend: Sequence[Chart]
    curves: Sequence[Chart] = field(default_factory=list)


def group(pictures: Pictures, runs: Sequence[tuple[Look, Run]]) -> Group:
    """``runs`` are scored alike."""
    found = [comparison.standing(run) for _, run in runs]
    title = "Runs by top-1 accuracy" if runs[0][1].classes else "Runs by the gap to the least loss"
    legend = [pictures.chart(charts.legend_mark(look), run.label, charts.described(look)) for look, run in runs]
    curves = [
        pictures.chart(
            charts.score(runs, clock), f"{'Accuracy' if runs[0][1].classes else 'Gap'} against {words_.split(' (')[0]}"
        )
        for clock, words_ in charts.LABELS.items()
    ]
    curves += [
        pictures.chart(charts.loss(runs, clock), f"Loss against {words_.split(' (')[0]}")
        for clock, words_ in charts.LABELS.items()
    ]
    curves.append(pictures.chart(charts.batch(runs), "Global batch, grown at stage boundaries"))
    curves.append(pictures.chart(charts.rate(runs, "lr", "learning rate"), "Learning rate"))
    curves.append(pictures.chart(charts.rate(runs, "gradient_norm", "gradient 2-norm"), "Norm of the mean gradient"))
    return Group(
        title,
        comparison.verdict(found),
        comparison.caveats(found) if len(found) > 1 else [],
        _standings(found),
        _levels(found) if len(found) > 1 else None,
        legend,
        curves,
    )


def _standings(found: Sequence[Standing]) -> Table:
    higher = found[0].higher
    score, word = ("top-1", "highest") if higher else ("gap to the least loss", "least")
    final = comparison.marked([one.final for one in found], most=higher)
    best = comparison.marked([one.best for one in found], most=higher)
    # A total is small where a run is short: those compete that have seen as many samples as the longest, or nearly.
    enough = comparison.SAME_SAMPLES * max(one.spent["samples_seen"] for one in found)
    spent = {
        clock: comparison.marked(
            [one.spent[clock] if one.spent["samples_seen"] >= enough else None for one in found], most=False
        )
        for clock in ("step", "collectives", "seconds", "reduced_bytes")
    }
    rows = []
    for at, one in enumerate(found):
        fewest, least = (
            {clock: said if marks[at] else "" for clock, marks in spent.items()} for said in ("fewest", "least")
        )
        total = one.spent
        rows.append(
            [
                Cell(one.run.label, more=_how(one.run)),
                words(method(one.run)),
                _score(one, one.final, word if final[at] else ""),
                _score(one, one.best, word if best[at] else ""),
                Cell(count(round(total["samples_seen"]))),
                Cell(count(round(total["step"])), fewest["step"]),
                Cell(count(round(total["collectives"])), fewest["collectives"]),
                of_bytes(total["reduced_bytes"], least["reduced_bytes"], per_sample(one.bytes_per_sample)),
                Cell(f"{total['seconds']:,.1f} s", least["seconds"], duration(total["seconds"])),
            ]
        )
    header = ["run", "method", f"last {score}", f"best {score}", "samples", "updates"]
    header += ["communication rounds (collectives)", "reduced bytes", "time of training"]
    notes = [
        "Communication rounds: collectives that one rank started. Reduced bytes: what one rank handed to allreduce, "
        "and the factors that all ranks together handed to allgather. Time: of rank 0, evaluations and checkpoints "
        "left out."
    ]
    if higher:
        notes.append(
            "In brackets: the 95% interval (Wilson) that the size of the validation set leaves open. Scores whose "
            "intervals overlap are not told apart by it, and another seed moves a score too."
        )
    return Table(header, rows, notes)


def _how(run: Run) -> str:
    ranks = run.environment.get("world_size")
    return ", ".join([*([plural(ranks, "rank")] if isinstance(ranks, int) else []), run.outcome])


def _score(one: Standing, value: float | None, mark: str) -> Cell:
    if value is None:
        return Cell("none yet")
    if not one.higher:
        return Cell(number(value), mark, exact=repr(value))
    low, high = comparison.interval(value, one.samples)
    right = f"{count(round(value * one.samples))} of {count(one.samples)}"
    return Cell(share(value, 2), mark, f"{right} [{share(low, 1)}, {share(high, 1)}]")


def _levels(found: Sequence[Standing]) -> Table | None:
    wanted = comparison.levels([one for one in found if one.best is not None])
    if not wanted:
        return None
    at = [[one.up_to(level) for level in wanted] for one in found]
    rows = [[words(one.run.label)] for one in found]
    for column in range(len(wanted)):
        reached = [row[column] for row in at]
        least = comparison.marked([spent["reduced_bytes"] if spent else None for spent in reached], most=False)
        for row, spent, mark in zip(rows, reached, least, strict=True):
            if spent is None:
                row.append(Cell("not reached"))
            elif math.isnan(spent["reduced_bytes"]):
                row.append(Cell("reached, not logged yet"))
            else:
                more = f"{plural(round(spent['step']), 'update')}, {plural(round(spent['collectives']), 'round')}, "
                more += f"{spent['seconds']:,.1f} s"
                row.append(of_bytes(spent["reduced_bytes"], "least" if mark else "", more))
    names = [comparison.shown_score(level, found[0].higher) for level in wanted]
    notes = [
        "Counted up to the first evaluation that was at least as good; nothing is interpolated between evaluations, so "
        "a run may have been there up to one evaluation earlier. The first column is what every run reached, the "
        "others what some did."
    ]
    return Table(["run", *(f"reduced bytes to {name}" for name in names)], rows, notes)


def method(run: Run) -> str:
    """``sebs``, ``vbs, hybrid``, ``table, fp16 wire``: what the config says of schedule and communication."""
    config = settings(run)
    said = [config.get("schedule.method") or (str(run.stages.method.iloc[0]) if len(run.stages) else "")]
    scheme, wire = config.get("communication.scheme", "dense"), config.get("communication.wire")
    said += [scheme] if scheme != "dense" else []
    said += [f"{wire} wire"] if wire not in (None, "none") else []
    direction = config.get("extrapolation.direction", "none")
    said += [f"extrapolation {direction}"] if direction != "none" else []
    return ", ".join(word for word in said if word)


def settings(run: Run) -> dict[str, str]:
    """config.yaml as ``schedule.method: sebs``, a list being one value; empty if it cannot be read."""
    try:
        return flat(yaml.safe_load(run.config))
    except (yaml.YAMLError, RecursionError):
        return {}


def flat(value: Any, before: str = "") -> dict[str, str]:
    """Nested mappings as one, keys joined by points."""
    if not isinstance(value, Mapping):
        return {before: str(value)} if before else {}
    found: dict[str, str] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{before}.{key}" if before else str(key))
    return found


def differences(tables: Mapping[str, Mapping[str, str]], *, all_rows: bool = False) -> Table:
    """Rows of the settings in which runs differ, or all; columns are the runs by their labels."""
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    rows = []
    for name in names:
        values = [table.get(name, "") for table in tables.values()]
        if all_rows or len(set(values)) > 1:
            rows.append([words(name), *(words(value) for value in values)])
    notes = [f"{count(len(rows) - MOST_ROWS)} more rows are left out."] if len(rows) > MOST_ROWS else []
    return Table(["setting", *tables], rows[:MOST_ROWS], notes)
