"""python -m hvdbs.follow RUN_DIR: watch a run from its own files, from any machine that sees them.

It reads what the run appends and nothing else, so it may be started before the run, stopped and started
again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from hvdbs import entry
from hvdbs.console import Display, duration, shown, stage_table
from hvdbs.errors import HvdbsError, refusal
from hvdbs.files import whole_lines
from hvdbs.records import EvalRow, Exit, PlanRow, Row, StageRow, StepRow, parse

_EXAMPLES = """examples:
  python -m hvdbs.follow runs/digits-20260101-120000
  python -m hvdbs.follow runs/imagenet --wait 3600        before the job has left the queue
  python -m hvdbs.follow runs/imagenet --line-seconds 60 >> progress.log

Never touches it. Exit status: the run's own; 1 if it went silent, 2 if there is none, 130 on Ctrl-C."""


@dataclass
class Tail(Generic[Row]):
    """The rows of a growing CSV, each returned once; all of them again after a resume has replaced the
    file."""

    path: Path
    kind: type[Row]
    _inode: int = 0
    _offset: int = 0
    _header: list[str] = field(default_factory=list)

    def poll(self) -> list[Row]:
        """Whole rows that are new since the last call. Raises HvdbsError for a file that is not of hvdbs."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._header = status.st_ino, 0, []
                file.seek(self._offset)
                data = whole_lines(file.read())
        except FileNotFoundError:
            return []
        self._offset += len(data)
        lines = list(csv.reader(data.decode(errors="replace").split("\n")[:-1]))
        if lines and not self._header:
            self._header = lines.pop(0)
        try:
            return [parse(self.kind, self._header, line) for line in lines]
        except (ValueError, TypeError) as error:
            raise HvdbsError(f"{self.path}: not a file of hvdbs, or damaged: {error}") from None


@dataclass(frozen=True)
class Patience:
    """In seconds: to wait for the directory, without a change until a run counts as dead (0: never), between
    looks."""

    wait: float = 60.0
    stale: float = 900.0
    poll: float = 0.5


class SilentError(HvdbsError):
    """A run whose files have not changed for too long."""


PATIENCE = Patience()


def read_plan(path: Path) -> list[PlanRow]:
    """The stages that the run planned; empty while there is no plan.json."""
    plan = _read_json(path / "plan.json")
    if plan is None:
        return []
    if not isinstance(plan, dict) or not isinstance(plan.get("stages"), list):
        raise HvdbsError(f"{path / 'plan.json'}: not a file of hvdbs, or damaged: it has no list of stages")
    return [_build(PlanRow, path / "plan.json", row) for row in plan["stages"]]


def read_exit(path: Path) -> Exit | None:
    """How the run ended; None while it goes on."""
    record = _read_json(path / "exit.json")
    return None if record is None else _build(Exit, path / "exit.json", record)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise HvdbsError(f"{path}: not a file of hvdbs, or damaged: {error}") from None


def _build(kind: type[Row], path: Path, values: Any) -> Row:
    if not isinstance(values, dict):
        raise HvdbsError(f"{path}: not a file of hvdbs, or damaged: {kind.__name__} is no mapping")
    known = {name: value for name, value in values.items() if name in kind.__dataclass_fields__}
    try:
        return kind(**known)
    except TypeError as error:
        raise HvdbsError(f"{path}: not a file of hvdbs, or damaged: {error}") from None


def follow(
    path: Path,
    make_display: Callable[[int | None], Display],
    patience: Patience = PATIENCE,
    alive: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Exit | None:
    """Show the run in ``path`` until it ends; how it did, or None if ``alive`` turned False without a word
    from it.

    ``make_display`` is given the total of samples. Raises HvdbsError when the directory never appears, and
    SilentError when none of its files changes for too long.
    """
    _await(path, patience, alive, clock, sleep)
    plan = read_plan(path)
    display = make_display(plan[-1].samples_end if plan else None)
    if plan:
        display.say(stage_table(plan))
    steps, evaluations = Tail(path / "steps.csv", StepRow), Tail(path / "evals.csv", EvalRow)
    stages = Tail(path / "stages.csv", StageRow)
    seen: set[int] = set()
    changed = clock()
    try:
        while True:
            # Asked before the files are read, so that nothing written before the end is missed.
            running, ended = alive(), read_exit(path)
            updates, scores, over = steps.poll(), evaluations.poll(), stages.poll()
            # Of the updates only the last: whoever starts late wants to see now, not then.
            fresh = [score for score in scores if score.step not in seen]
            news: list[StepRow | EvalRow] = [*updates[-1:], *fresh]
            for row in sorted(news, key=lambda row: (row.step, isinstance(row, EvalRow))):
                display.evaluation(row) if isinstance(row, EvalRow) else display.step(row)
            seen.update(score.step for score in fresh)
            if ended is not None or not running:
                return ended
            now = clock()
            if updates or scores or over:
                changed = now
            if patience.stale and now - changed >= patience.stale:
                raise SilentError(
                    f"{shown(path)}: no file changed for {duration(now - changed)}: the run is dead or stuck;"
                    " look at its own log, or follow on with a longer --stale"
                )
            sleep(patience.poll)
    finally:
        display.close()


def _await(
    path: Path,
    patience: Patience,
    alive: Callable[[], bool],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Until the run has written its plan and first file, or ended without."""
    until = clock() + patience.wait
    while alive() and not (path / "steps.csv").exists():
        if clock() >= until:
            what = "holds no run" if path.exists() else "does not exist"
            rule = f"{what} after {duration(patience.wait)}"
            raise refusal("RUN_DIR", path, rule, "wait longer with --wait SECONDS")
        sleep(patience.poll)


def main(arguments: Sequence[str] | None = None) -> int:
    command = argparse.ArgumentParser(
        prog="python -m hvdbs.follow",
        description="Show the progress of a run from its own files: a bar on a terminal, else lines.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("run", metavar="RUN_DIR", type=Path, help="the --out of the run")
    for name, default, text in (
        ("--wait", PATIENCE.wait, "for the directory to appear"),
        ("--stale", PATIENCE.stale, "without a change after which the run counts as dead; 0: never"),
        ("--line-seconds", 10.0, "between lines where there is no terminal"),
    ):
        text = f"{text} (default: {default:g})"
        command.add_argument(name, default=default, help=text, type=_seconds, metavar="SECONDS")
    options = command.parse_args(arguments)
    try:
        ended = follow(
            options.run,
            lambda total: Display(total, options.line_seconds, sys.stdout),
            Patience(options.wait, options.stale),
        )
    except HvdbsError as error:
        print(f"hvdbs.follow: {error}", file=sys.stderr)
        return 1 if isinstance(error, SilentError) else 2
    except KeyboardInterrupt:
        print(
            f"\nno longer followed; the run goes on: python -m hvdbs.follow {shown(options.run)}",
            file=sys.stderr,
        )
        return 130
    assert ended is not None
    reason = "" if ended.reason == ended.outcome else f": {ended.reason}"
    print(f"{shown(options.run)} {ended.outcome}{reason}")
    return ended.exit_code


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds, 0 or more")
    return value


if __name__ == "__main__":
    sys.exit(entry.run(main))
