"""The run directory (DESIGN section 4): append-only CSV files and a few small files, written by rank 0 alone.

Every row is one write of whole lines, so a reader never sees half a row but for a killed writer's last one.
Each file is written only from its end; the one time it is rewritten is a resume, which cuts it back to the
checkpoint's step.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from hvdbs.errors import HvdbsError, refusal
from hvdbs.files import lock, sync_folder, whole_lines, write_atomically
from hvdbs.progress import Progress
from hvdbs.records import (
    EXIT_CODES,
    SCHEMA_VERSION,
    DecisionRow,
    EvalRow,
    Exit,
    LayerRow,
    Outcome,
    PlanRow,
    Record,
    StageRow,
    StepRow,
    Summary,
    WeightRow,
    cells,
    columns,
    weight_row,
)

TABLES: dict[str, type[Record]] = {
    "stages.csv": StageRow,
    "steps.csv": StepRow,
    "layers.csv": LayerRow,
    "evals.csv": EvalRow,
    "decisions.csv": DecisionRow,
}


def tables(weights: int) -> dict[str, type[Record]]:
    """The tables of a run in which ``weights`` weights are logged."""
    return TABLES | ({"weights.csv": weight_row(weights)} if weights else {})


_LOCK = ".lock"
_PATIENCE_SECONDS = 5.0  # for the last of a job that was just killed


class EventWriter(Protocol):
    """What is used of tensorboard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class RunDirectory:
    """Rank 0's open files of one run. A class because they must be released; ``with`` does.

    The order that makes a resumed run's files equal to an undisturbed one's: what belongs to update s (its
    step, its evaluation, the stage it ends) is written before the checkpoint of step s, ``sync`` is called,
    then the checkpoint is made; decisions for the next window are written after it (see DecisionRow).
    """

    def __init__(self, path: Path, files: dict[str, BinaryIO], events: EventWriter | None, locked: BinaryIO) -> None:
        self.path = path
        self._files = files
        self._locked = locked
        self._events = events

    @classmethod
    def create(
        cls,
        path: Path,
        config_yaml: str,
        environment: dict[str, Any],
        plan: Sequence[PlanRow] = (),
        tensorboard: bool = False,
        weights: int = 0,
    ) -> Self:
        """A new run in ``path``, which is made if it does not exist. Raises HvdbsError if it holds anything.

        ``weights``: how many each row of weights.csv has; 0 for no such file."""
        _make(path)
        if any(path.iterdir()):
            raise refusal("--out", path, "is not empty", "continue it with --resume auto, or name another --out")
        with _locked(path) as locked:
            return cls._open(path, Progress(), config_yaml, environment, plan, tensorboard, tables(weights), locked)

    @classmethod
    def resume(
        cls,
        path: Path,
        progress: Progress,
        config_yaml: str,
        environment: dict[str, Any],
        plan: Sequence[PlanRow] = (),
        tensorboard: bool = False,
        weights: int = 0,
    ) -> Self:
        """Go on in ``path`` from a checkpoint at ``progress``: later rows are cut off, and how the run ended
        before.

        A run killed before its first checkpoint resumes from Progress(0, 0). Raises HvdbsError for a file
        whose header is not that of hvdbs, or while another job writes there, before anything is changed.
        """
        _make(path)
        kinds = tables(weights)
        with _locked(path) as locked:
            present = {name: path / name for name in kinds if (path / name).exists()}
            # All are read before the first is replaced, so that a refusal leaves the directory as it was.
            for name, data in [(name, _cut(file, kinds[name], progress)) for name, file in present.items()]:
                write_atomically(path / name, data)
            for stale in (path / "exit.json", path / "summary.json", *path.glob(".*.tmp")):
                stale.unlink(missing_ok=True)
            return cls._open(path, progress, config_yaml, environment, plan, tensorboard, kinds, locked)

    @classmethod
    def _open(
        cls,
        path: Path,
        progress: Progress,
        config_yaml: str,
        environment: dict[str, Any],
        plan: Sequence[PlanRow],
        tensorboard: bool,
        kinds: dict[str, type[Record]],
        locked: BinaryIO,
    ) -> Self:
        write_atomically(path / "config.yaml", config_yaml.encode())
        write_atomically(path / "environment.json", as_json(environment))
        write_atomically(path / "plan.json", as_json(plan_json(plan)))
        files: dict[str, BinaryIO] = {}
        for name, kind in kinds.items():
            files[name] = (path / name).open("ab")
            if files[name].tell() == 0:
                _append(files[name], [columns(kind)])
        sync_folder(path)
        return cls(path, files, _events(path / "tensorboard", progress) if tensorboard else None, locked)

    def stage(self, row: StageRow) -> None:
        self._write("stages.csv", [row])

    def step(self, row: StepRow) -> None:
        self._write("steps.csv", [row])
        self._scalars("step", row, row.samples_seen)

    def weights(self, row: WeightRow) -> None:
        self._write("weights.csv", [row])

    def layers(self, rows: Sequence[LayerRow]) -> None:
        self._write("layers.csv", rows)

    def evaluation(self, row: EvalRow) -> None:
        self._write("evals.csv", [row])
        self._scalars("evaluation", row, row.samples_seen)

    def decision(self, row: DecisionRow) -> None:
        self._write("decisions.csv", [row])

    def sync(self) -> None:
        """Make all rows so far survive a crash of the machine; before a checkpoint, lest it be newer than its
        rows."""
        for file in self._files.values():
            os.fsync(file.fileno())
        if self._events is not None:
            self._events.flush()

    def finish(self, summary: Summary) -> None:
        """Write summary.json; the rows it sums up are made durable first."""
        self.sync()
        write_atomically(self.path / "summary.json", as_json(dataclasses.asdict(summary)))

    def exit(self, outcome: Outcome, reason: str, exit_code: int | None = None) -> None:
        """Write exit.json, the last thing a run does: whoever follows the run stops when it appears."""
        code = EXIT_CODES[outcome] if exit_code is None else exit_code
        record = Exit(outcome, " ".join(reason.split()), code)
        write_atomically(self.path / "exit.json", as_json(dataclasses.asdict(record)))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._events is not None:
            self._events.close()
        self._locked.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, rows: Sequence[Record]) -> None:
        _append(self._files[name], [cells(row) for row in rows])

    def _scalars(self, group: str, row: Record, samples_seen: int) -> None:
        if self._events is None:
            return
        for name in columns(type(row)):
            value = getattr(row, name)
            if name not in ("step", "samples_seen") and value is not None:
                self._events.add_scalar(f"{group}/{name}", value, samples_seen)


def as_json(value: object) -> bytes:
    """Indented JSON with a last newline, as every .json of a run directory is."""
    # What is no UTF-8 in a path is then a \udcXX of JSON.
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def plan_json(plan: Sequence[PlanRow]) -> dict[str, Any]:
    """plan.json: what lies ahead, so that a reader of the other files knows how far the run has come."""
    return {
        "schema_version": SCHEMA_VERSION,
        "samples": plan[-1].samples_end if plan else None,
        "stages": [dataclasses.asdict(row) for row in plan],
    }


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HvdbsError(f"--out: {path} cannot be made: {error.strerror}") from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """What keeps others out of ``path`` until it is closed. Raises HvdbsError while another job writes there.

    Two would cut off each other's rows and replace each other's checkpoints.
    """
    locked = lock(path / _LOCK, _PATIENCE_SECONDS)
    if locked is None:
        raise refusal("--out", path, "is being written by another job", f"touch {path}/stop ends that one")
    try:
        yield locked
    except BaseException:
        locked.close()
        raise


def _events(path: Path, progress: Progress) -> EventWriter:
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and many runs do without

    name, folder = str(path), None
    if any("\ud800" <= c <= "\udfff" for c in name):
        # tensorboard takes UTF-8 alone, whatever bytes a path has, and opens its file by name for each flush.
        path.mkdir(exist_ok=True)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        name = f"/proc/self/fd/{folder}"
    # Viewers drop what a killed run wrote after its checkpoint: earlier writers' events from purge_step on.
    writer: EventWriter = SummaryWriter(name, purge_step=progress.samples_seen + 1)
    if folder is not None:
        weakref.finalize(writer, os.close, folder)
    return writer


def _append(file: BinaryIO, lines: Sequence[Sequence[str]]) -> None:
    file.write(_encode(lines))
    file.flush()


def _encode(lines: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


def _cut(path: Path, kind: type[Record], progress: Progress) -> bytes:
    """``path`` under the present header, without the rows after ``progress``. Raises HvdbsError if it is not
    hvdbs's."""
    header = columns(kind)
    lines = whole_lines(path.read_bytes()).decode(errors="surrogateescape").split("\n")[:-1]
    if not lines:
        return _encode([header])
    found = next(csv.reader(lines[:1]), [])
    if found[: len(header)] == header and len(found) > len(header):
        raise HvdbsError(f"{path}: has the column {found[len(header)]} of a newer hvdbs; resume with that one")
    if not found or header[: len(found)] != found:
        raise HvdbsError(f"{path}: its first line is {lines[0][:40]!r}, no header of hvdbs; name another --out")
    key = "samples_end" if kind is StageRow else "step"
    last = progress.samples_seen if kind is StageRow else progress.step
    kept = [line for at, line in enumerate(lines[1:], 2) if _number(path, at, line, found, key) <= last]
    missing = "," * (len(header) - len(found))
    rows = "".join(f"{line}{missing}\n" for line in kept)
    return _encode([header]) + rows.encode(errors="surrogateescape")


def _number(path: Path, at: int, line: str, header: list[str], key: str) -> int:
    values = next(csv.reader([line]), [])
    try:
        if len(values) != len(header):
            raise ValueError
        return int(values[header.index(key)])
    except ValueError:
        raise HvdbsError(f"{path}: line {at} is not a row of {len(header)} columns; mend or remove it") from None
