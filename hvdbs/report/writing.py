"""What ``python -m hvdbs.report`` writes and prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdbs import contour, norms
from hvdbs.console import shown
from hvdbs.errors import HvdbsError
from hvdbs.files import atomic_writer, write_atomically
from hvdbs.report import benchmarks, sheet_charts
from hvdbs.report.comparison import standing, verdict
from hvdbs.report.figures import colour, figure
from hvdbs.report.page import page
from hvdbs.report.runs import Run, read_runs
from hvdbs.report.stages import last_score, stage_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def report(paths: Sequence[Path], out: Path) -> str:
    """Write report.html and the pictures of runs and benchmark CSVs into ``out``, which is made; the text to print.

    What is no folder and ends in .csv is a benchmark's. Raises HvdbsError.
    """
    files = [path for path in paths if path.suffix == ".csv" and not path.is_dir()]
    runs = read_runs([path for path in paths if path not in files])
    sheets = benchmarks.read_sheets(files)
    pictures: dict[str, Figure] = {}
    if runs:
        pictures["report.png"] = figure(runs)
        drawn = norms.figure([(run.label, colour(at), run.layers) for at, run in enumerate(runs)])
        if drawn is not None:
            pictures["norms.png"] = drawn
    for at, sheet in enumerate(sheets):
        name = f"report-{sheet.path.stem}.png"
        pictures[name if name not in pictures else f"report-{sheet.path.stem}-{at}.png"] = sheet_charts.picture(sheet)
    html = page(runs, sheets)
    lines: list[str] = []
    for run in runs:
        lines += [shown(run.path), *run.missing]
        lines += [stage_table(run) if len(run.stages) else "  no stage has ended yet", ""]
        if (bowl := contour.read_bowl(run.path)) is not None:
            said, picture = _bowl(bowl)
            if picture is not None and len(runs) == 1:
                pictures["surface.png"] = picture
            lines += [said, ""]
    for sheet in sheets:
        lines += [benchmarks.text(sheet), ""]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, made in pictures.items():
            with atomic_writer(out / name) as file:
                made.savefig(file, format="png")
        write_atomically(out / "report.html", html.encode(errors="backslashreplace"))
    except OSError as error:
        raise HvdbsError(f"--out: {out} cannot be written: {error.strerror}") from None
    lines += [*map(last_score, runs), *_verdicts(runs)]
    return "\n".join([*lines, *(f"wrote {shown(out / name)}" for name in (*pictures, "report.html"))])


def _verdicts(runs: Sequence[Run]) -> list[str]:
    kinds = [[run for run in runs if run.classes is classes] for classes in (True, False)]
    return [line for kind in kinds if len(kind) > 1 for line in verdict([standing(run) for run in kind])]


def _bowl(bowl: contour.Bowl) -> tuple[str, Figure | None]:
    """What the run says of its bowl, in words and as a picture."""
    try:
        estimate = bowl.estimate()
    except HvdbsError as error:  # the run has hardly begun, or its losses belong to other weights
        return str(error), None
    return contour.comparison(bowl.truth, estimate), contour.figure(bowl, estimate)
