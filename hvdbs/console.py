"""What a person sees: the stage table, the progress of a run, what it wrote. Everything that formats is a
pure function.

A terminal gets a bar that moves. Everything else (a batch log, a pipe, a launcher that prefixes its ranks'
output in mid-line) gets whole lines, each in a single write, seldom enough for a log that is kept.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Never, TextIO

from tqdm import tqdm

from hvdbs.environment import launchers
from hvdbs.records import EvalRow, PlanRow, StepRow, Summary


def count(number: int) -> str:
    """1234567 -> 1,234,567"""
    return f"{number:,}"


def number(value: float) -> str:
    """Up to four significant digits, without a zero too many: 0.1, 0.0125, 1e-05, 12,800."""
    return f"{value:.4g}" if abs(value) < 999.95 else f"{value:,.0f}"


def share(part: float, digits: int = 0) -> str:
    """A part of one as a percentage: 0.143 -> 14%. What is neither 0 nor 1 never reads as if it were."""
    least = 10.0**-digits
    percent = part * 100
    if 0 < percent < least / 2:
        return f"<{least:.{digits}f}%"
    if 100 - least / 2 <= percent < 100:
        return f">{100 - least:.{digits}f}%"
    return f"{percent:.{digits}f}%"


def size(nbytes: float) -> str:
    """Bytes in decimal units, as networks count them: 1.24 GB."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 999.5 or unit == "PB":
            break
        value /= 1000
    return f"{nbytes:.0f} B" if unit == "B" else f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """0:42, 1:02:03, 2d 03:04:05"""
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{left:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def plural(many: int, word: str) -> str:
    return f"{count(many)} {word}" + ("" if many == 1 else "s")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], rule_before_last: bool = False) -> str:
    """Plain text, columns aligned to the right; a heading may have two lines, the last row be set off by a
    rule."""
    tops = [name.rpartition("\n")[0] for name in header]
    bottoms = [name.rpartition("\n")[2] for name in header]
    lines = [row for row in (tops, bottoms, *rows) if any(row)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths]
    lines.insert(len(lines) - len(rows), rule)
    if rule_before_last:
        lines.insert(-1, rule)
    padded = ([cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def stage_table(rows: Sequence[PlanRow]) -> str:
    """The stages of a run and their sum, with lines that say what the columns mean. At least one row."""
    header = [
        *("stage", "epochs", "global_batch", "micro-\nbatches", "idle", "lr", "weight_decay"),
        *("effective\nlr", "lr *\nweight_decay", "updates", "reduced"),
    ]
    body = [
        (
            str(row.stage),
            f"{number(row.epochs_begin)}-{number(row.epochs_end)}",
            count(row.global_batch),
            f"{count(row.micro_batches_busiest)}/{count(row.micro_batches_idlest)}",
            share(row.idle_share),
            number(row.lr),
            number(row.weight_decay),
            number(row.effective_lr),
            number(row.lr * row.weight_decay),
            count(row.steps),
            size(row.reduced_bytes),
        )
        for row in rows
    ]
    last = rows[-1]
    turns = [row.steps * row.micro_batches_busiest for row in rows]
    unused = sum(many * row.idle_share for many, row in zip(turns, rows, strict=True))
    idle = unused / sum(turns) if any(turns) else 0.0
    total = [
        *("total", number(last.epochs_end), "", "", share(idle), "", "", "", ""),
        *(count(sum(row.steps for row in rows)), size(sum(row.reduced_bytes for row in rows))),
    ]
    legend = (
        f"{count(last.samples_end)} samples on {plural(last.world_size, 'rank')}, "
        f"micro_batch {last.micro_batch}. micro-batches: in one update, of the busiest/idlest rank.\n"
        "effective lr: lr/(1-momentum). reduced: bytes that each rank hands to allreduce."
    )
    reasons = "".join(f"\nstage {row.stage}: {row.reason}." for row in rows if row.reason and row.stage)
    return table(header, [*body, total], rule_before_last=True) + "\n" + legend + reasons


def position(row: StepRow, total_samples: int | None) -> str:
    done = f"samples {count(row.samples_seen)}"
    if total_samples is None:
        return done
    return f"{done}/{count(total_samples)} ({share(row.samples_seen / total_samples, 1)})"


def readings(row: StepRow) -> list[str]:
    """What stands beside the position: stage, batch, lr, loss, speed, the share of time waited for data."""
    parts = [f"stage {row.stage}", f"batch {count(row.global_batch)}", f"lr {number(row.lr)}"]
    parts.append(f"loss {row.loss:.4f}")
    if row.samples_per_second is not None:
        parts.append(f"{number(row.samples_per_second)} samples/s")
    if (waiting := data_wait(row)) is not None:
        parts.append(f"data wait {share(waiting)}")
    return parts


def data_wait(row: StepRow) -> float | None:
    """The part of an update's time that was spent waiting for data; None if nothing was timed."""
    busy = row.compute_seconds + row.exposed_communication_seconds + row.optimizer_seconds
    whole = row.data_seconds + busy
    return row.data_seconds / whole if whole > 0 else None


def seconds_left(row: StepRow, total_samples: int | None, samples_per_second: float | None) -> float | None:
    if total_samples is None or not samples_per_second:
        return None
    return max(0, total_samples - row.samples_seen) / samples_per_second


def step_line(row: StepRow, total_samples: int | None, left: float | None) -> str:
    """``step 120  epoch 1.42  samples 2,048/14,370 (14.3%)  stage 1  batch 128  ...  left 0:42``"""
    parts = [f"step {count(row.step)}", f"epoch {row.epoch:.2f}", position(row, total_samples)]
    parts += readings(row)
    if left is not None:
        parts.append(f"left {duration(left)}")
    return "  ".join(parts)


def evaluation_line(row: EvalRow) -> str:
    parts = [f"evaluation at step {count(row.step)}", f"epoch {row.epoch:.2f}"]
    if row.top1 is not None:
        parts.append(f"top-1 {share(row.top1, 2)}")
    if row.top5 is not None:
        parts.append(f"top-5 {share(row.top5, 2)}")
    if row.gap is not None and row.distance is not None:
        parts.append(above_minimum(row.gap, row.distance))
    return "  ".join([*parts, f"loss {row.loss:.4f}", f"({plural(row.samples, 'sample')})"])


def above_minimum(gap: float, distance: float) -> str:
    """``gap 0.0012  distance 0.034``: loss above the least one, and 2-norm to where that is, both exact."""
    return f"gap {number(gap)}  distance {number(distance)}"


def shown(path: Path) -> str:
    """``path`` as a person would type it here: relative to the current folder where it lies below."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def closing(path: Path, summary: Summary) -> str:
    """The last lines of a run: the score, what was written, where."""
    score = "" if summary.top1 is None else f"top-1 {share(summary.top1, 2)}, "
    if summary.gap is not None and summary.distance is not None:
        score = f"{above_minimum(summary.gap, summary.distance)}, "
    done = f"{plural(summary.samples_seen, 'sample')} in {plural(summary.steps, 'update')}"
    cost = f"{duration(summary.seconds)}, {size(summary.reduced_bytes)} reduced per rank"
    here = shown(path)
    lines = [
        f"{summary.exit_reason}: {score}{done}, {cost}",
        f"wrote {here}/",
        "  summary.json   the run as a whole       config.yaml, environment.json   what it was",
        "  steps.csv      one row per logged update, with seconds and bytes",
        "  stages.csv     one row per stage        evals.csv       one row per evaluation",
        "  decisions.csv  why anything changed     checkpoints/    to resume from",
        f"plot: python -m hvdbs.report {here}",
    ]
    return "\n".join(lines)


def is_live(stream: TextIO, variables: Mapping[str, str] = os.environ) -> bool:
    """Whether a bar may be drawn: a real terminal, and no launcher between (Open MPI gives its ranks a false
    one)."""
    # The shell that salloc opens is itself a Slurm step, of one task.
    apart = {name: value for name, value in variables.items() if (name, value) != ("SLURM_STEP_NUM_TASKS", "1")}
    return stream.isatty() and not launchers(apart)


class Display:
    """Progress on ``stream``: a bar where ``live``, else whole lines at least ``line_seconds`` apart, the
    first at once.

    A class because the bar must be released (``close``) and the time of the last line kept. ``stream`` is
    looked at when the display is made, not at import.
    """

    def __init__(
        self,
        total_samples: int | None,
        line_seconds: float = 10.0,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total = total_samples
        self._line_seconds = line_seconds
        self._clock = clock
        self._due: float | None = None
        self._unshown: StepRow | None = None
        # A single update may have waited for a checkpoint or the file system; the median of a few has not.
        self._speeds: deque[float] = deque(maxlen=5)
        self._live = is_live(self._stream) if live is None else live
        self._bar: tqdm[Never] | None = None

    def step(self, row: StepRow) -> None:
        """Take note of an update; shown if it is time."""
        if row.samples_per_second is not None:
            self._speeds.append(row.samples_per_second)
        if self._live:
            self._move(row.samples_seen, self._beside(row))
            return
        self._unshown = row
        now = self._clock()
        if self._due is None or now >= self._due:
            self._due = now + self._line_seconds
            self._show(row)

    def evaluation(self, row: EvalRow) -> None:
        if self._bar is not None:
            self._move(row.samples_seen, None)
        if self._unshown is not None and self._unshown.step <= row.step:
            self._unshown = None
        self.say(evaluation_line(row))

    def say(self, text: str) -> None:
        """Whole lines, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Show where it ended and leave the terminal in order."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._unshown is not None:
            self._show(self._unshown)

    def _move(self, samples_seen: int, beside: str | None) -> None:
        if self._bar is None:  # not drawn before there is something to show, so that a table can come first
            ends = "{l_bar}{bar:16}| {n_fmt}/{total_fmt}{postfix}" if self._total else "{n_fmt} samples{postfix}"
            self._bar = tqdm(total=self._total, file=self._stream, bar_format=ends, dynamic_ncols=True)
        if beside is not None:
            self._bar.set_postfix_str(beside, refresh=False)
        self._bar.update(samples_seen - self._bar.n)

    def _left(self, row: StepRow) -> float | None:
        return seconds_left(row, self._total, statistics.median(self._speeds) if self._speeds else None)

    def _beside(self, row: StepRow) -> str:
        # The end of a line that is too long for the terminal is cut, so what matters most comes first.
        left = self._left(row)
        stage, batch, lr, *rest = readings(row)
        return "  ".join([f"left {'?' if left is None else duration(left)}", *rest, stage, batch, lr])

    def _show(self, row: StepRow) -> None:
        self._unshown = None
        self.say(step_line(row, self._total, self._left(row)))
