"""What a run directory says, read in whatever state it is in, and where each update stands on every axis."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hvdbs.errors import HvdbsError, refusal
from hvdbs.files import whole_lines
from hvdbs.metrics import TABLES
from hvdbs.records import columns

_TYPES: dict[object, type] = {int: int, float: float, float | None: float, int | None: float}  # others are text

SECONDS = ("data_seconds", "compute_seconds", "exposed_communication_seconds", "optimizer_seconds")
CLOCKS = ("samples_seen", "step", "collectives", "seconds", "reduced_bytes")


@dataclass(frozen=True)
class Run:
    """One run directory; a row of a table is a row of the CSV of that name.

    ``plan``: the planned stages of plan.json. ``environment``, ``summary``, ``exit`` and ``parent``: those files, empty
    where there are none. ``config``: the text of config.yaml. ``missing``: a line for each thing that should be there.
    """

    path: Path
    label: str
    stages: pd.DataFrame
    steps: pd.DataFrame
    evals: pd.DataFrame
    layers: pd.DataFrame
    decisions: pd.DataFrame
    plan: Sequence[dict[str, Any]]
    environment: dict[str, Any]
    summary: dict[str, Any]
    exit: dict[str, Any]
    parent: dict[str, Any]
    config: str
    missing: Sequence[str]

    @property
    def classes(self) -> bool:
        """Whether its score is a top-1 accuracy; else it is the gap to the least loss."""
        return self.evals.empty or bool(self.evals.top1.notna().any())

    @property
    def outcome(self) -> str:
        """``finished``, ``stopped``, ``failed``, or that there is none yet."""
        return str(self.exit.get("outcome")) if self.exit else "under way or killed"

    @property
    def state(self) -> str:
        """``finished: end of the schedule``, ``under way or killed`` and the like."""
        if not self.exit:
            return "under way or killed: there is no exit.json"
        reason = self.exit.get("reason")
        return self.outcome if reason == self.outcome else f"{self.outcome}: {reason}"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs, labelled by the shortest ends of their paths that differ. Raises HvdbsError for what is none, and for
    a damaged table."""
    return [_read_run(path, label) for path, label in zip(paths, labels(paths), strict=True)]


def _read_run(path: Path, label: str) -> Run:
    present = {name: (path / name).is_file() for name in TABLES}
    if not any(present.values()):
        what = "holds no stages.csv" if path.is_dir() else "is not a folder"
        raise refusal("DIR", path, what, "name run directories, the --out of hvdbs.train, or CSV files of a benchmark")
    missing = [f"{name} is missing." for name, there in present.items() if not there]
    tables = {name: read_table(path, name) for name in TABLES}
    found: dict[str, dict[str, Any]] = {}
    for name in ("plan", "environment", "summary", "exit", "parent"):
        try:
            value = json.loads((path / f"{name}.json").read_bytes())
            found[name] = value if isinstance(value, dict) else {}
        except FileNotFoundError:
            found[name] = {}
            if name in ("plan", "environment"):
                missing.append(f"{name}.json is missing.")
        except (OSError, ValueError) as error:
            found[name] = {}
            missing.append(f"{name}.json cannot be read: {error}.")
    try:
        config = (path / "config.yaml").read_text(errors="replace")
    except OSError:
        config = ""
        missing.append("config.yaml is missing.")
    stages = found["plan"].get("stages")
    return Run(
        path=path,
        label=label,
        stages=tables["stages.csv"],
        steps=tables["steps.csv"],
        evals=tables["evals.csv"],
        layers=tables["layers.csv"],
        decisions=tables["decisions.csv"],
        plan=[row for row in stages if isinstance(row, dict)] if isinstance(stages, list) else [],
        environment=found["environment"],
        summary=found["summary"],
        exit=found["exit"],
        parent=found["parent"],
        config=config,
        missing=missing,
    )


def read_table(path: Path, name: str) -> pd.DataFrame:
    """A CSV of a run: whole lines only, in the present columns, those that an older version had not being
    empty; no rows if it is not there. Raises HvdbsError for a damaged one."""
    wanted = columns(TABLES[name])
    try:
        data = whole_lines((path / name).read_bytes())
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise HvdbsError(f"{path / name}: cannot be read: {error.strerror}") from None
    # Types are asked for, not guessed: a damaged cell would turn its whole column into text.
    hints = get_type_hints(TABLES[name])
    types = {column: _TYPES.get(kind, str) for column, kind in hints.items() if column in wanted}
    if not data:
        return pd.DataFrame({column: pd.Series(dtype=types[column]) for column in wanted})
    try:
        # Words such as None or NA are text where text is due; only empty cells of numbers are empty.
        frame = pd.read_csv(io.BytesIO(data), dtype=types, keep_default_na=False, na_values=_empty(types))
    except ValueError as error:
        raise HvdbsError(f"{path / name}: not a file of hvdbs, or damaged: {error}") from None
    if not set(wanted) & set(frame.columns):
        raise HvdbsError(f"{path / name}: none of its columns is one of hvdbs")
    return frame.reindex(columns=wanted)


def _empty(types: dict[str, type]) -> dict[str, list[str]]:
    return {column: ["", "nan"] for column, kind in types.items() if kind is float}


def rows_of(frame: pd.DataFrame) -> Iterator[Any]:
    """Its rows, each with its cells by name."""
    return frame.itertuples(index=False)


def labels(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as few as make all different."""
    # Fonts have no glyphs for bytes that are no text.
    full = [[os.fsencode(part).decode("utf-8", "backslashreplace") for part in path.resolve().parts] for path in paths]
    names: list[str] = []
    for depth in range(1, max(map(len, full), default=0) + 1):
        names = ["/".join(parts[-depth:]) for parts in full]
        if len(set(names)) == len(set(map(tuple, full))):
            break
    return names


def clocks(run: Run) -> pd.DataFrame:
    """Each logged update on all of CLOCKS, from the beginning of the run on: row 0 is where its files begin.

    ``collectives``, ``reduced_bytes`` and ``seconds`` are sums of steps.csv, of one rank. A branch begins with what
    its parent had spent, where that is known: summary.json counts the whole of it, the CSV what was logged.
    """
    steps = run.steps
    rows = pd.DataFrame(
        {
            "samples_seen": steps.samples_seen,
            "step": steps.step,
            "collectives": steps.collectives.cumsum(),
            "seconds": steps[list(SECONDS)].sum(axis=1).cumsum(),
            "reduced_bytes": steps.reduced_bytes.cumsum(),
        }
    ).astype(float)
    first = dict.fromkeys(CLOCKS, 0.0)
    if run.parent:
        first |= {name: float(run.parent.get(name, 0)) for name in ("samples_seen", "step")}
    table = pd.concat([pd.DataFrame([first]), rows], ignore_index=True)
    counted = ("collectives", "seconds", "reduced_bytes")
    whole = {name: float(run.summary[name]) for name in counted if name in run.summary}
    if len(whole) == len(counted) and len(rows):
        last = table.iloc[-1]
        if last.step < run.summary.get("steps", 0) and not run.parent:  # updates after the last logged one
            end = {"samples_seen": float(run.summary["samples_seen"]), "step": float(run.summary["steps"]), **whole}
            table = pd.concat([table, pd.DataFrame([end])], ignore_index=True)
        elif run.parent and last.step == run.summary.get("steps"):
            table[list(counted)] += [whole[name] - last[name] for name in counted]
    return table


def on_clock(run: Run, clock: str, steps: pd.Series) -> NDArray[np.float64]:
    """Where the updates ``steps`` stand on the axis ``clock``; between logged updates in proportion, beyond the last
    not at all (NaN)."""
    table = clocks(run)
    found = np.interp(steps.to_numpy(float), table.step.to_numpy(), table[clock].to_numpy(), right=np.nan)
    return np.asarray(found, float)


def extents(run: Run, clock: str) -> list[tuple[int, int, int]]:
    """(begin, end, global_batch) of each stage on the axis ``clock``; the stage under way ends where the log
    does."""
    begin = int(run.parent.get(clock, 0))
    ends = run.stages.samples_end if clock == "samples_seen" else begin + run.stages.steps.cumsum()
    found = []
    for end, batch in zip(ends, run.stages.global_batch, strict=True):
        found.append((begin, int(end), int(batch)))
        begin = int(end)
    under_way = run.steps[run.steps[clock] > begin]
    if len(under_way):
        found.append((begin, int(under_way[clock].iloc[-1]), int(under_way.global_batch.iloc[-1])))
    return found
