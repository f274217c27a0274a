"""Tables of the page, and those of a single run: its stages, predictions, decisions and layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from hvdbs.console import count, number, plural, share, size
from hvdbs.report import charts, stages
from hvdbs.report.runs import Run, rows_of

MOST_ROWS = 200  # of a table of the page; the files have them all
_LONGEST = 2000  # characters of a cell


@dataclass(frozen=True)
class Cell:
    """``mark``: a word that sets it off; ``more``: a second, smaller line; ``exact``: shown where a mouse rests."""

    text: str
    mark: str = ""
    more: str = ""
    exact: str = ""
    number: bool = True


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()


def words(text: str, exact: str = "") -> Cell:
    return Cell(cut(text), exact=exact, number=False)


def cut(text: object) -> str:
    """Text of a file in one line, not endlessly long."""
    line = " ".join(str(text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ... ({count(len(line))} characters)"


def of_bytes(nbytes: float, mark: str = "", more: str = "") -> Cell:
    return (
        Cell("", more=more) if math.isnan(nbytes) else Cell(size(nbytes), mark, more, f"{count(round(nbytes))} bytes")
    )


def per_sample(nbytes: float) -> str:
    if math.isnan(nbytes):
        return ""
    return f"{size(nbytes) if nbytes >= 10 else f'{nbytes:.3g} B'} per sample"


def stage_table(costs: Sequence[stages.StageCost]) -> Table:
    """What each stage cost, with the parts of its seconds."""
    header = ["stage", "samples", "global batch (samples)", "lr", "updates", "reduced bytes", "seconds"]
    header += [f"{said} (s)" for _, said, _, _ in charts.PARTS]
    rows = []
    for cost in costs[:MOST_ROWS]:
        dealt = [] if cost.accumulation_steps is None else [f"accumulation {count(cost.accumulation_steps)}"]
        dealt += [] if cost.world_size is None else [plural(cost.world_size, "rank")]
        rate = _known(cost.samples_per_second)
        row = [
            Cell(str(cost.stage), more="" if cost.ended else "under way"),
            Cell(f"{count(cost.samples_begin)}\u2013{count(cost.samples_end)}"),
            Cell(count(cost.global_batch), more=", ".join(dealt)),
            Cell(number(cost.lr), more=f"weight decay {number(cost.weight_decay)}"),
            Cell(
                count(cost.steps),
                more="" if math.isnan(cost.collectives) else f"{count(round(cost.collectives))} collectives",
            ),
            of_bytes(
                cost.reduced_bytes, more=per_sample(cost.reduced_bytes / cost.samples if cost.samples else math.nan)
            ),
            Cell(f"{cost.seconds:.1f}", more=f"{rate} samples/s" if rate else ""),
        ]
        for name, _, _, _ in charts.PARTS:
            spent = float(getattr(cost, name))
            part = share(spent / cost.seconds) if cost.seconds and not math.isnan(spent) else ""
            row.append(Cell(_known(spent), more=part))
        rows.append(row)
    notes = [f"{count(len(costs) - MOST_ROWS)} more stages are in stages.csv."] if len(costs) > MOST_ROWS else []
    return Table(header, rows, notes)


def _known(value: float) -> str:
    return "" if math.isnan(value) else number(value)


def prediction_table(found: Sequence[stages.Prediction]) -> Table:
    header = ["stage", "quantity", "predicted", "measured", "measured / predicted"]
    rows = []
    for one in found[:MOST_ROWS]:
        show = of_bytes if one.unit == "bytes" else lambda value, unit=one.unit: Cell(f"{number(value)} {unit}")
        if one.predicted == one.measured:
            ratio = Cell("1", "exact")
        else:
            ratio = Cell(f"{one.ratio:.4g}" if one.ratio > 0 else "")
        rows.append([words(str(one.stage)), words(one.quantity), show(one.predicted), show(one.measured), ratio])
    notes = [f"{count(len(found) - MOST_ROWS)} more rows are left out."] if len(found) > MOST_ROWS else []
    return Table(header, rows, notes)


def prediction_line(found: Sequence[stages.Prediction]) -> str:
    """How well the plan foretold the stages, in a sentence."""
    if not found:
        return "Nothing to compare: no stage that has ended was planned as it was."
    off = [one for one in found if one.predicted != one.measured]
    said = f"{count(len(found) - len(off))} of {plural(len(found), 'predicted value')} exact"
    far = stages.worst(off)
    if far is None:
        return said + "."
    return f"{said}; the furthest off is {far.quantity} of stage {far.stage}, measured {far.ratio:.3g} times predicted."


def decision_table(run: Run) -> Table:
    header = ["update", "sample", "stage", "by", "what", "from", "to", "reason", "inputs"]
    rows = [
        [
            Cell(count(int(row.step))),
            Cell(count(int(row.samples_seen))),
            words(str(row.stage)),
            words(row.source),
            words(row.quantity),
            Cell("" if pd.isna(row.old) else number(row.old)),
            Cell(number(row.new)),
            words("" if pd.isna(row.reason) else row.reason),
            words("" if pd.isna(row.inputs) else row.inputs),
        ]
        for row in rows_of(run.decisions.head(MOST_ROWS))
    ]
    more = len(run.decisions) - len(rows)
    return Table(header, rows, [f"{count(more)} more rows are in decisions.csv."] if more else [])


def layer_table(run: Run) -> Table:
    """The last norms of each layer."""
    last = charts.last_values(run)
    rows = [
        [
            words(row.layer),
            words(row.group),
            Cell(number(row.epoch)),
            Cell(number(row.weight_norm)),
            Cell(number(row.gradient_norm)),
            Cell("" if pd.isna(row.effective_lr) else number(row.effective_lr)),
        ]
        for row in rows_of(last.head(MOST_ROWS))
    ]
    notes = [
        "Group: si weights whose scale does not matter, w other decayed weights, none what is not decayed. Effective "
        "lr: lr / ((1 - momentum) weight norm\u00b2)."
    ]
    if len(last) > MOST_ROWS:
        notes.append(f"{count(len(last) - MOST_ROWS)} more layers are in layers.csv.")
    header = ["layer", "group", "epoch", "weight norm", "gradient norm", "effective lr"]
    return Table(header, rows, notes)
