"""A benchmark's CSV: which of its columns say what was set, which what was measured, and medians with intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hvdbs.console import count, number, size, table
from hvdbs.errors import HvdbsError, refusal
from hvdbs.metrics import TABLES
from hvdbs.records import columns
from hvdbs.report.runs import labels

REPEATS = ("round", "seed", "repeat", "repetition")
# What a row stands on, not what was compared (benchmarks/measure.py writes them).
FACTS = (
    *("cpu", "cores", "platform", "hvdbs", "python", "torch", "torchvision", "horovod", "mpi4py", "numpy", "dali"),
    *("threads", "horovod_cycle_milliseconds", "mpi_yields_when_idle", "commit", "command", "date"),
)
_LINES = ("contender", "source", "method", "scheme", "algorithm", "what", "yields", "wire", "distance", "backend")
_AXIS = (
    *("bytes", "message_bytes", "tensors", "bucket_bytes", "global_batch", "accumulation_steps", "cycle_milliseconds"),
    *("lr", "stage", "world_size", "micro_batch"),
)
_MORE = re.compile(r"(_per_(cpu_)?second(_per_core)?|bandwidth.*|efficiency|speed_?up|top1|top5|accuracy|later_gain)$")
_LESS = re.compile(r"(seconds|gap|loss|latency|bytes(_per_sample)?|share_of_\w+|updates|collectives|error)$")
_COUNTS = ("images", "samples", "train_samples")
_LENGTHS = ("seconds", "cpu_seconds", "updates", "images")  # of a measurement, where its rate is there too
_FIRST = ("samples_per_second", "images_per_second", "top1", "gap", "seconds")  # what a table is about, best first


@dataclass(frozen=True)
class Median:
    """Of ``n`` values: the median, and the interval that holds that of their distribution 95 times in 100; ``sure`` is
    False for fewer than 6, when it is the range."""

    value: float
    low: float
    high: float
    n: int
    sure: bool


@dataclass(frozen=True)
class Part:
    """Rows of a benchmark that answer one question.

    ``settings`` tell its groups apart; of them ``axis`` is drawn to the right and ``line`` is a line of its own (None
    where there is none), the ``panels`` are a picture for each combination. ``measures``: the measured columns, the
    first being what is drawn. ``predicted``: by measure, the column that predicts it.
    """

    name: str
    rows: pd.DataFrame
    settings: Sequence[str]
    axis: str | None
    line: str | None
    measures: Sequence[str]
    predicted: dict[str, str]

    @property
    def panels(self) -> list[str]:
        return [name for name in self.settings if name not in (self.axis, self.line)]

    def groups(self) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
        """Rows of one setting, in the order in which settings first appear on a line."""
        if not self.settings:
            yield {}, self.rows
            return
        order = [*self.panels, *(name for name in (self.axis, self.line) if name)]
        for key, rows in self.rows.groupby(order, sort=True, dropna=False):
            yield dict(zip(order, key, strict=True)), rows


@dataclass(frozen=True)
class Sheet:
    """One CSV. ``about``: the facts of its rows, values that differ one after the other; ``settled``: settings that
    are the same in all rows."""

    path: Path
    label: str
    parts: Sequence[Part]
    about: dict[str, str]
    settled: dict[str, str]


def median(values: Sequence[float]) -> Median:
    """Distribution-free: the interval between the k-th least and the k-th greatest value, with the largest k for which
    the chance that a binomial(n, 1/2) lies below k is at most 0.025 (Hollander, Wolfe and Chicken, "Nonparametric
    Statistical Methods", 2014, section 3.6). From 6 values on there is one. NaN if there are no values."""
    kept = sorted(float(value) for value in values if not math.isnan(value))
    n = len(kept)
    if not n:
        return Median(math.nan, math.nan, math.nan, 0, False)
    k, below = 0, 1
    while below <= 0.025 * 2**n:
        k += 1
        below += math.comb(n, k)
    at = max(k, 1)
    return Median(float(np.median(kept)), kept[at - 1], kept[n - at], n, k > 0)


def read_sheets(paths: Sequence[Path]) -> list[Sheet]:
    """Raises HvdbsError for what is no table of a benchmark."""
    return [_sheet(path, label) for path, label in zip(paths, labels(paths), strict=True)]


def _sheet(path: Path, label: str) -> Sheet:
    try:
        rows = pd.read_csv(path)
    except OSError as error:
        raise HvdbsError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise HvdbsError(f"{path}: not a CSV file, or damaged: {error}") from None
    if path.name in TABLES and set(rows.columns) <= set(columns(TABLES[path.name])):
        raise refusal("FILE", path, "is a table of a run", f"name its folder: {path.parent}")
    varying = "part" if "part" in rows.columns else None
    pieces = rows.groupby(varying, sort=False) if varying else [("", rows)]
    parts = [part for name, piece in pieces if (part := _part(str(name), piece.dropna(axis=1, how="all"))) is not None]
    if not parts:
        raise refusal(
            "FILE", path, "has no rows, or no column that hvdbs knows as measured", "seconds, samples_per_second, ..."
        )
    about = {name: ", ".join(map(str, rows[name].dropna().unique())) for name in FACTS if name in rows.columns}
    used = {name for part in parts for name in (*part.settings, *part.measures, *part.predicted.values())}
    settled = {
        str(name): str(rows[name].iloc[0])
        for name in rows.columns
        if name not in used and name not in (*FACTS, *REPEATS) and rows[name].nunique(dropna=False) == 1
    }
    return Sheet(path, label, parts, about, settled)


def _part(name: str, rows: pd.DataFrame) -> Part | None:
    names = [str(column) for column in rows.columns if column not in (*FACTS, *REPEATS, "part")]
    predicted = {}
    for column in names:
        base = re.sub(r"^(predicted|expected)_", "", column)
        measured = next((word for word in (base, f"measured_{base}") if word in names and word != column), None)
        if base != column and measured is not None and _numeric(rows[column]):
            predicted[measured] = column
    measures = [column for column in names if _measured(column, rows) and column not in predicted.values()]
    measures = [column for column in measures if rows[column].nunique() > 1] or measures
    measures.sort(key=lambda column: _FIRST.index(column) if column in _FIRST else len(_FIRST))
    if any(column.endswith("_per_second") for column in measures):
        measures = [column for column in measures if column not in _LENGTHS]
    if not measures or rows.empty:
        return None
    known = {*measures, *predicted.values(), *_COUNTS, *_LENGTHS}
    settings = [column for column in names if column not in known and rows[column].nunique(dropna=False) > 1]
    settings = _needed(rows, settings)
    # That with the most values is drawn to the right, the first of the list where several have as many.
    axes = [column for column in _AXIS if column in settings and _numeric(rows[column])]
    axis = max(axes, key=lambda column: rows[column].nunique(), default=None)
    line = next((column for column in (*_LINES, *settings) if column in settings and column != axis), None)
    return Part(name, rows, settings, axis, line, measures, predicted)


def _numeric(values: pd.Series) -> bool:
    return bool(pd.api.types.is_numeric_dtype(values)) and not pd.api.types.is_bool_dtype(values)


def _measured(column: str, rows: pd.DataFrame) -> bool:
    if not _numeric(rows[column]) or column in (*_AXIS[1:], "largest_batch"):
        return False
    if column == "bytes":  # of a message, where what it took stands beside; else what is measured
        others = [name for name in rows.columns if name == "seconds" or _MORE.search(str(name))]
        return not (others and rows.bytes[rows[others].notna().any(axis=1)].notna().all())
    return bool(_MORE.search(column) or _LESS.search(column))


def _needed(rows: pd.DataFrame, settings: list[str]) -> list[str]:
    """``settings`` without those that follow from the others, as the back-end may from the number of ranks."""
    order = ["model", *_LINES[:-1], *_AXIS]
    kept = list(settings)
    for name in sorted(settings, key=lambda name: order.index(name) if name in order else len(order), reverse=True):
        others = [other for other in kept if other != name]
        if others and _many(rows, others) == _many(rows, kept):
            kept = others
    return kept


def _many(rows: pd.DataFrame, names: list[str]) -> int:
    return len(rows[names].drop_duplicates())


def direction(measure: str) -> str:
    """``highest`` or ``lowest``: the word for the best value of ``measure``; empty where there is no better."""
    return "highest" if _MORE.search(measure) else "lowest" if _LESS.search(measure) else ""


def unit(measure: str) -> str:
    """That of a column, read off its name."""
    if measure.endswith("_per_second"):
        return f"{measure.removesuffix('_per_second').split('_')[-1]}/s"
    words = {"seconds": "s", "bytes": "bytes", "top1": "share of images", "top5": "share of images"}
    return next((word for ending, word in words.items() if measure.endswith(ending)), "")


def shown_value(measure: str, value: float) -> str:
    """A number of a measured column as text, bytes in their units."""
    if math.isnan(value):
        return ""
    return size(value) if unit(measure) == "bytes" and abs(value) >= 1 else number(value)


def shown_setting(value: Any) -> str:
    """A number of a setting as text: whole ones without a point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return count(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def shown_median(measure: str, middle: Median) -> str:
    """``1,350 [1,340, 1,362]``; a range in round brackets, a single value alone."""
    value = shown_value(measure, middle.value)
    if middle.low == middle.high or not middle.n:
        return value
    low, high = (shown_value(measure, end) for end in (middle.low, middle.high))
    return f"{value} [{low}, {high}]" if middle.sure else f"{value} ({low} to {high})"


def text(sheet: Sheet) -> str:
    """Its tables as text: settings, how many rows, median and interval of what is drawn."""
    lines = [sheet.label]
    for part in sheet.parts:
        measure = part.measures[0]
        groups = list(part.groups())
        header = [*groups[0][0], "rows", measure]
        body = []
        for setting, rows in groups:
            middle = median(rows[measure].tolist())
            body.append([*map(shown_setting, setting.values()), str(len(rows)), shown_median(measure, middle)])
        lines += [part.name] * bool(part.name) + [table(header, body)]
    return "\n".join([*lines, "median [95% interval], or (range) of fewer than 6"])
