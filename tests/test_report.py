"""The report: numbers and picture from what the run wrote, whatever state it is in."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from rows import STAGES, TOTAL_SAMPLES, TOTAL_STEPS, create, plan_rows, updates, whole_run

from hvdbs.errors import HvdbsError
from hvdbs.metrics import TABLES
from hvdbs.records import columns
from hvdbs.report.__main__ import main
from hvdbs.report.runs import extents, labels, read_runs, read_table
from hvdbs.report.stages import last_score, stage_table
from hvdbs.report.writing import report


def part_of_a_run(path: Path, many: int) -> Path:
    with create(path) as run:
        for update in list(updates())[:many]:
            update.write(run)
    return path


def png_size(file: Path) -> tuple[int, int]:
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("many", [0, 1, 5, 8, TOTAL_STEPS])
def test_a_run_is_reported_in_any_state(tmp_path: Path, many: int) -> None:
    path = part_of_a_run(tmp_path / "run", many)
    text = report([path], path)
    assert png_size(path / "report.png") == (1500, 1080)
    assert f"wrote {path / 'report.png'}" in text.splitlines()
    assert text.splitlines()[-1] == f"wrote {path / 'report.html'}"
    assert ("no evaluation yet" in text) == (many < 4)
    assert ("no stage has ended yet" in text) == (many < 6)


def test_the_stage_table_and_the_score_are_those_of_the_files(tmp_path: Path) -> None:
    (run,) = read_runs([whole_run(tmp_path / "run")])
    lines = [line.split() for line in stage_table(run).splitlines()[3:]]
    assert [int(line[2]) for line in lines] == [batch for _, _, batch in STAGES]
    assert [int(line[5]) for line in lines] == [steps for _, steps, _ in STAGES]
    assert [line[7:10] for line in lines] == [["33.33", "5%", "10%"]] * 3
    assert last_score(run) == (
        f"run: top-1 75.00% (270 of 360), loss 0.2500 after {TOTAL_SAMPLES} samples in {TOTAL_STEPS} updates, 0:06"
    )


@pytest.mark.parametrize("clock", ["samples_seen", "step"])
def test_the_drawn_stages_are_the_planned_ones(tmp_path: Path, clock: str) -> None:
    """A stage that has ended is drawn to its very end, whichever updates were logged; the last to the log's."""
    (run,) = read_runs([whole_run(tmp_path / "run")])
    (partial,) = read_runs([part_of_a_run(tmp_path / "partial", 8)])
    held = extents(run, clock)
    assert [batch for _, _, batch in held] == [row.global_batch for row in plan_rows()]
    if clock == "samples_seen":
        assert [(begin, end) for begin, end, _ in held] == [(row.samples_begin, row.samples_end) for row in plan_rows()]
        assert extents(partial, clock) == [(0, 60, 10), (60, 110, 25)]
    else:
        assert [end - begin for begin, end, _ in held] == [steps for _, steps, _ in STAGES]
        assert extents(partial, clock) == [(0, 6, 10), (6, 8, 25)]


def test_a_torn_line_is_left_out_and_numbers_are_read_to_the_last_bit(tmp_path: Path) -> None:
    path = whole_run(tmp_path / "run")
    with (path / "steps.csv").open("ab") as file:
        file.write(b"16,400,4.0,2,")
    steps = read_table(path, "steps.csv")
    assert len(steps) == TOTAL_STEPS
    assert steps.gradient_norm.tolist() == [1 / 3] * TOTAL_STEPS
    assert read_table(path, "stages.csv").samples_per_second.tolist() == [100 / 3] * 3


def test_a_file_of_an_older_version_has_empty_cells_in_the_columns_it_did_not_know(tmp_path: Path) -> None:
    path = whole_run(tmp_path / "run")
    old = pd.read_csv(path / "evals.csv").drop(columns=["top5", "samples"])
    old.to_csv(path / "evals.csv", index=False)
    table = read_table(path, "evals.csv")
    assert list(table.columns) == columns(TABLES["evals.csv"])
    assert table.top5.isna().all()
    assert len(table) == len(old)


def test_several_runs_share_one_picture_and_are_told_apart(tmp_path: Path) -> None:
    paths = [part_of_a_run(tmp_path / name / "run", many) for name, many in (("a", 15), ("b", 7), ("c", 0))]
    text = report(paths, tmp_path / "plots" / "new")
    assert png_size(tmp_path / "plots" / "new" / "report.png") == (1500, 1080)
    assert [line.split(":")[0] for line in text.splitlines() if ": " in line][:3] == ["a/run", "b/run", "c/run"]


def test_labels_are_as_short_as_they_can_be() -> None:
    assert labels([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert labels([Path("/x/run"), Path("/y/run")]) == ["x/run", "y/run"]
    assert labels([Path("/x/run"), Path("/x/run")]) == ["run", "run"]
    assert labels([Path("/only")]) == ["only"]


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    foreign = whole_run(tmp_path / "foreign")
    (foreign / "steps.csv").write_text("date,price\n1,2\n")
    damaged, ragged = whole_run(tmp_path / "damaged"), whole_run(tmp_path / "ragged")
    for run, line in ((damaged, "16,x,4.0,2,0.2,0.9,0.9,360\n"), (ragged, "1,2,3,4,5,6,7,8,9,10,11\n")):
        with (run / "evals.csv").open("a") as file:
            file.write(line)
    for name, says in (
        ("file", "is not a folder"),
        ("folder", "holds no stages.csv"),
        ("foreign", "steps.csv"),
        ("damaged", "evals.csv: not a file of hvdbs, or damaged"),
        ("ragged", "evals.csv: not a file of hvdbs, or damaged"),
    ):
        assert main([str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert says in error
        assert not (tmp_path / name / "report.png").exists()
    with pytest.raises(HvdbsError, match=r"--out: .* cannot be written"):
        report([whole_run(tmp_path / "run")], tmp_path / "file")


def test_plotting_needs_no_display_and_leaves_no_state(tmp_path: Path) -> None:
    path = whole_run(tmp_path / "run")
    code = (
        "import sys; from hvdbs.report.__main__ import main; code = main(sys.argv[1:]);"
        " assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"wrote {path / 'report.html'}\n")


def test_a_run_whose_name_is_no_text_is_reported(tmp_path: Path) -> None:
    """A byte that is no UTF-8 stands in paths as a surrogate, for which no font has a glyph."""
    path = whole_run(tmp_path / "k\udce4")
    assert labels([path]) == ["k\\xe4"]
    report([path], path)
    assert png_size(path / "report.png") == (1500, 1080)
