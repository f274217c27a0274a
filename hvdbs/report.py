"""python -m hvdbs.report DIR...: one picture and a few tables of one or several runs, from their CSV
files."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import pandas as pd

from hvdbs import contour, entry, norms
from hvdbs.console import above_minimum, count, duration, number, plural, share, shown, size, table
from hvdbs.errors import HvdbsError, refusal
from hvdbs.files import atomic_writer, whole_lines
from hvdbs.metrics import TABLES
from hvdbs.records import columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EXAMPLES = """examples:
  python -m hvdbs.report runs/demo-20260101-120000        writes report.png into the run
  python -m hvdbs.report runs/constant runs/growing --out plots

A run may still be going on. Several runs share their axes; report.png then goes to --out, by default here."""

_TYPES: dict[object, type] = {int: int, float: float, float | None: float}

# Okabe and Ito's colours: told apart by everyone, and in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")


def _colour(at: int) -> str:
    return _COLOURS[at % len(_COLOURS)]


@dataclass(frozen=True)
class Run:
    """The tables of one run directory; a row is a row of the CSV of that name."""

    path: Path
    label: str
    stages: pd.DataFrame
    steps: pd.DataFrame
    evals: pd.DataFrame
    layers: pd.DataFrame


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs, labelled by the shortest ends of their paths that differ. Raises HvdbsError for what is
    none."""
    return [
        Run(path, label, *(read_table(path, f"{name}.csv") for name in ("stages", "steps", "evals", "layers")))
        for path, label in zip(paths, labels(paths), strict=True)
    ]


def read_table(path: Path, name: str) -> pd.DataFrame:
    """A CSV of a run: whole lines only, in the present columns, those that an older version had not being
    empty."""
    try:
        data = whole_lines((path / name).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = f"holds no {name}" if path.is_dir() else "is not a folder"
        raise refusal("DIR", path, what, "name run directories, the --out of hvdbs.train") from None
    wanted = columns(TABLES[name])
    if not data:
        return pd.DataFrame(columns=wanted)
    # Types are asked for, not guessed: a damaged cell would turn its whole column into text.
    types = {column: _TYPES[kind] for column, kind in get_type_hints(TABLES[name]).items() if kind in _TYPES}
    try:
        frame = pd.read_csv(io.BytesIO(data), dtype=types)
    except ValueError as error:
        raise HvdbsError(f"{path / name}: not a file of hvdbs, or damaged: {error}") from None
    if not set(wanted) & set(frame.columns):
        raise HvdbsError(f"{path / name}: none of its columns is one of hvdbs")
    return frame.reindex(columns=wanted)


def labels(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as few as make all different."""
    # Fonts have no glyphs for bytes that are no text.
    full = [[os.fsencode(part).decode("utf-8", "backslashreplace") for part in path.resolve().parts] for path in paths]
    for depth in range(1, max(map(len, full)) + 1):
        names = ["/".join(parts[-depth:]) for parts in full]
        if len(set(names)) == len(set(map(tuple, full))):
            break
    return names


def stage_table(run: Run) -> str:
    """What each stage that ended cost, measured."""
    header = ["stage", "samples", "global_batch", "lr", "weight_decay", "updates", "seconds", "samples/s"]
    header += ["exposed\ncommunication", "data\nwait", "reduced"]
    rows = [
        [
            str(row.stage),
            f"{count(row.samples_begin)}-{count(row.samples_end)}",
            count(row.global_batch),
            number(row.lr),
            number(row.weight_decay),
            count(row.steps),
            f"{row.seconds:.1f}",
            "" if pd.isna(row.samples_per_second) else number(row.samples_per_second),
            share(row.exposed_communication_seconds / row.seconds) if row.seconds else "",
            share(row.data_seconds / row.seconds) if row.seconds else "",
            size(row.reduced_bytes),
        ]
        for row in _rows(run.stages)
    ]
    return table(header, rows)


def _rows(frame: pd.DataFrame) -> Iterator[Any]:
    return frame.itertuples(index=False)


def last_score(run: Run) -> str:
    """One line: where the run stands."""
    if run.evals.empty:
        return f"{run.label}: no evaluation yet, {plural(len(run.steps), 'logged update')}"
    last = run.evals.iloc[-1]
    if pd.isna(last.top1):
        score = above_minimum(last.gap, last.distance)
    else:
        right = round(last.top1 * last.samples)
        score = f"top-1 {share(last.top1, 2)} ({count(right)} of {count(int(last.samples))})"
    took = "" if run.stages.empty else f", {duration(run.stages.seconds.sum())}"
    return (
        f"{run.label}: {score}, loss {last.loss:.4f} after {plural(int(last.samples_seen), 'sample')}"
        f" in {plural(int(last.step), 'update')}{took}"
    )


def figure(runs: Sequence[Run]) -> Figure:
    """Score, loss and global batch of all runs, against samples on the left and against updates on the right.

    The score is the top-1 accuracy, or the gap to the least loss if no run has classes.
    """
    # Figure without pyplot: no display is looked for, and nothing is kept in a global state.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    result = Figure(figsize=(10, 7.2), dpi=150, layout="constrained")
    axes = result.subplots(3, 2, sharex="col", sharey="row", gridspec_kw={"height_ratios": [3, 3, 1.6]})
    classes = any(run.evals.top1.notna().any() or run.evals.empty for run in runs)
    colours = [_colour(at) for at in range(len(runs))]
    for column, clock in enumerate(("samples_seen", "step")):
        for run, colour in zip(runs, colours, strict=True):
            _draw(run, colour, clock, classes, *axes[:, column])
        if len(runs) == 1:
            _shade(runs[0], clock, axes[:, column])
        axes[2, column].set_xlabel("training samples seen" if column == 0 else "updates (optimizer steps)")
        axes[2, column].set_xlim(left=0)
    _dress(axes, classes, sorted({int(size) for run in runs for size in run.steps.global_batch.unique()}))
    names = [
        Line2D([], [], color=colour, linewidth=3, label=f"{run.label}{_score(run)}")
        for run, colour in zip(runs, colours, strict=True)
    ]
    styles = [
        Line2D([], [], color="0.3", marker="o", markersize=3.5, label="validation"),
        Line2D([], [], color="0.3", alpha=0.4, linewidth=1, label="training, single updates"),
    ]
    result.legend(handles=[*names, *styles], loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return result


def _score(run: Run) -> str:
    if run.evals.empty:
        return ""
    last = run.evals.iloc[-1]
    score = f"gap {number(last.gap)}" if pd.isna(last.top1) else share(last.top1, 2)
    return f" ({score} after {plural(int(last.step), 'update')})"


def _draw(run: Run, colour: str, clock: str, classes: bool, score: Axes, loss: Axes, batch: Axes) -> None:
    steps, evals = run.steps, run.evals
    score.plot(evals[clock], evals.top1 * 100 if classes else evals.gap, "o-", color=colour, markersize=3.5)
    loss.plot(steps[clock], steps.loss, color=colour, alpha=0.35, linewidth=1)
    loss.plot(evals[clock], evals.loss, "o-", color=colour, markersize=3.5)
    if held := extents(run, clock):
        edges = [held[0][0], *(end for _, end, _ in held)]
        batch.stairs([size for _, _, size in held], edges, color=colour, linewidth=1.6, baseline=None)


def extents(run: Run, clock: str) -> list[tuple[int, int, int]]:
    """(begin, end, global_batch) of each stage on the axis ``clock``; the stage under way ends where the log
    does."""
    ends = run.stages.samples_end if clock == "samples_seen" else run.stages.steps.cumsum()
    found, begin = [], 0
    for end, batch in zip(ends, run.stages.global_batch, strict=True):
        found.append((begin, int(end), int(batch)))
        begin = int(end)
    under_way = run.steps[run.steps[clock] > begin]
    if len(under_way):
        found.append((begin, int(under_way[clock].iloc[-1]), int(under_way.global_batch.iloc[-1])))
    return found


def _shade(run: Run, clock: str, axes: Sequence[Axes]) -> None:
    """Every other stage on a grey ground."""
    for begin, end, _ in extents(run, clock)[1::2]:
        for axis in axes:
            axis.axvspan(begin, end, color="0.5", alpha=0.12, linewidth=0, zorder=0)


def _dress(axes: Any, classes: bool, batches: Sequence[int]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

    (score, _), (loss, _), (batch, _) = axes
    score.set_ylabel("top-1 accuracy (%)" if classes else "gap to the least loss")
    loss.set_ylabel("loss (cross entropy)" if classes else "loss")
    if not classes:
        score.set_yscale("log")
    batch.set_ylabel("global batch\n(samples)")
    if batches:  # nothing to draw yet is no reason to fail, but a logarithmic axis does without data
        loss.set_yscale("log")
        loss.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        loss.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        loss.yaxis.set_minor_formatter(NullFormatter())
        batch.set_yscale("log", base=2)
        batch.set_yticks(batches, labels=[count(size) for size in batches])
        batch.set_ylim(batches[0] / 1.5, batches[-1] * 1.5)
        batch.yaxis.set_minor_locator(NullLocator())
    for axis in axes.flat:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def main(arguments: Sequence[str] | None = None) -> int:
    command = argparse.ArgumentParser(
        prog="python -m hvdbs.report",
        description="Plot score, loss and global batch of runs, and print what their stages cost.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("runs", metavar="DIR", nargs="+", type=Path, help="run directories")
    command.add_argument("--out", metavar="DIR", type=Path, help="folder for report.png")
    options = command.parse_args(arguments)
    out = options.out or (options.runs[0] if len(options.runs) == 1 else Path())
    try:
        print(report(options.runs, out))
    except HvdbsError as error:
        print(f"hvdbs.report: {error}", file=sys.stderr)
        return 2
    return 0


def report(paths: Sequence[Path], out: Path) -> str:
    """Write report.png of the runs into ``out``, which is made; the text to print. Raises HvdbsError."""
    runs = read_runs(paths)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with atomic_writer(out / "report.png") as file:
            figure(runs).savefig(file, format="png")
        drawn = norms.figure([(run.label, _colour(at), run.layers) for at, run in enumerate(runs)])
        if drawn is not None:
            with atomic_writer(out / "norms.png") as file:
                drawn.savefig(file, format="png")
    except OSError as error:
        raise HvdbsError(f"--out: {out} cannot be written: {error.strerror}") from None
    lines: list[str] = []
    for run in runs:
        lines += [shown(run.path), stage_table(run) if len(run.stages) else "  no stage has ended yet", ""]
        if (bowl := contour.read_bowl(run.path)) is not None:
            lines += [*_bowl(bowl, out / "surface.png" if len(runs) == 1 else None), ""]
    pictures = ["report.png"] if drawn is None else ["report.png", "norms.png"]
    return "\n".join([*lines, *map(last_score, runs), *(f"wrote {shown(out / name)}" for name in pictures)])


def _bowl(bowl: contour.Bowl, picture: Path | None) -> list[str]:
    """What the run says of its bowl, drawn into ``picture``."""
    try:
        estimate = bowl.estimate()
    except HvdbsError as error:  # the run has hardly begun, or its losses belong to other weights
        return [str(error)]
    lines = [contour.comparison(bowl.truth, estimate)]
    if picture is not None:
        with atomic_writer(picture) as file:
            contour.figure(bowl, estimate).savefig(file, format="png")
        lines.append(f"wrote {shown(picture)}")
    return lines


if __name__ == "__main__":
    sys.exit(entry.run(main))
