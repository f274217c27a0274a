"""The run directory: its columns, rows that are appended and never rewritten, resumption from any moment."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import TOTAL_STEPS, create, eval_row, plan_rows, resume, step_row, summary, updates, whole_run

from hvdbs import metrics, records
from hvdbs.errors import HvdbsError
from hvdbs.metrics import TABLES, RunDirectory
from hvdbs.progress import Progress
from hvdbs.records import StepRow, cells, columns, parse

# DESIGN section 4, word for word: scripts and plots rely on it.
CONTRACT = {
    "stages.csv": "stage, method, samples_begin, samples_end, global_batch, micro_batch, accumulation_steps,"
    " world_size, lr, weight_decay, effective_lr, steps, reduced_bytes, seconds, samples_per_second,"
    " exposed_communication_seconds, data_seconds",
    "steps.csv": "step, samples_seen, epoch, stage, global_batch, lr, weight_decay, loss, gradient_norm,"
    " noise_scale, samples_per_second, data_seconds, compute_seconds, exposed_communication_seconds,"
    " imbalance_seconds, communication_seconds, optimizer_seconds, reduced_bytes, collectives, skipped",
    "layers.csv": "step, samples_seen, epoch, layer, group, weight_norm, gradient_norm, effective_lr",
    "evals.csv": "step, samples_seen, epoch, stage, loss, top1, top5, samples, gap, distance",
    "decisions.csv": "step, samples_seen, stage, source, quantity, old, new, inputs, reason",
}


def tables(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in TABLES}


@pytest.mark.parametrize("name", CONTRACT)
def test_every_file_has_the_columns_of_the_contract_in_order_under_one_header(tmp_path: Path, name: str) -> None:
    lines = (whole_run(tmp_path / "run") / name).read_text().splitlines()
    assert lines[0].split(",") == CONTRACT[name].split(", ")
    assert len(lines) > 2
    assert lines.count(lines[0]) == 1


@given(
    loss=st.floats(),
    lr=st.floats(0, 1),
    step=st.integers(0, 2**63),
    speed=st.none() | st.floats(allow_nan=False),
)
def test_a_row_reads_back_to_the_last_bit(loss: float, lr: float, step: int, speed: float | None) -> None:
    row = dataclasses.replace(step_row(), loss=loss, lr=lr, step=step, samples_per_second=speed)
    again = parse(StepRow, columns(StepRow), cells(row))
    same = again.loss == loss or (math.isnan(again.loss) and math.isnan(loss))
    assert same
    assert dataclasses.replace(again, loss=0.0) == dataclasses.replace(row, loss=0.0)


def test_a_cell_is_a_number_or_one_line_of_text_and_nothing_else() -> None:
    row = step_row()
    assert cells(dataclasses.replace(row, loss=np.float64(0.1)))[7] == "0.1"
    assert cells(dataclasses.replace(row, noise_scale=None))[9] == ""
    for wrong in (torch.tensor(0.1), np.zeros(1), True):
        with pytest.raises(TypeError, match=r"^loss: "):
            cells(dataclasses.replace(row, loss=wrong))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_killed_and_resumed_equals_never_stopped(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Law 4 for the files: killed after any update, in mid-line or not, resumed from any checkpoint."""
    folder = tmp_path_factory.mktemp("law")
    undisturbed = tables(whole_run(folder / "undisturbed"))
    every = list(updates())
    killed_at = data.draw(st.integers(0, TOTAL_STEPS), label="killed after update")
    saved_at = data.draw(st.integers(0, killed_at), label="checkpoint at")
    with create(folder / "run") as run:
        for update in every[:killed_at]:
            update.write(run)
    progress = every[saved_at - 1].progress if saved_at else Progress()
    for name in TABLES:
        if killed_at > saved_at and data.draw(st.booleans(), label=f"{name} is torn"):
            with (folder / "run" / name).open("ab") as file:
                line = undisturbed[name].splitlines(keepends=True)[-1]
                file.write(line[: data.draw(st.integers(0, len(line) - 1), label="bytes of the torn line")])
    with resume(folder / "run", progress) as run:
        for update in every[saved_at:]:
            update.write(run)
    assert tables(folder / "run") == undisturbed


def test_a_header_torn_by_a_kill_and_a_missing_file_are_made_again(tmp_path: Path) -> None:
    path = whole_run(tmp_path / "run")
    (path / "steps.csv").write_bytes(b"step,samp")
    (path / "evals.csv").unlink()
    resume(path, Progress()).close()
    assert (path / "steps.csv").read_text().splitlines() == [CONTRACT["steps.csv"].replace(" ", "")]
    assert (path / "evals.csv").read_text().splitlines() == [CONTRACT["evals.csv"].replace(" ", "")]


def test_appending_touches_neither_the_file_nor_its_earlier_bytes(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        file = tmp_path / "run" / "steps.csv"
        inode, before = file.stat().st_ino, file.read_bytes()
        for step in range(1, 50):
            run.step(step_row(step))
            now = file.read_bytes()
            assert now.startswith(before)
            assert now.count(b"\n") == step + 1
            before = now
        assert file.stat().st_ino == inode


def test_each_row_is_one_write_of_whole_lines(tmp_path: Path) -> None:
    writes: list[bytes] = []

    class Spy(io.FileIO):
        def write(self, data: object) -> int:
            writes.append(bytes(data))  # type: ignore[call-overload]
            return super().write(data)  # type: ignore[arg-type]

    spies = {name: io.BufferedWriter(Spy(str(tmp_path / name), "a")) for name in TABLES}
    with RunDirectory(tmp_path, spies, None, (tmp_path / ".lock").open("ab")) as run:
        rows = list(updates())
        for update in rows:
            count = len(writes)
            update.write(run)
            assert len(writes) > count, "a row must not wait in a buffer"
    assert all(data.endswith(b"\n") for data in writes)
    lines = {name: data.splitlines() for name, data in tables(tmp_path).items()}
    layer_groups = {line.split(b",")[0] for line in lines.pop("layers.csv")}  # all layers of an update at once
    assert len(writes) == sum(map(len, lines.values())) + len(layer_groups)


@dataclasses.dataclass(frozen=True)
class Wider(StepRow):
    temperature: float | None = None
    note: str | None = None


def test_the_header_of_an_older_version_is_extended_and_its_rows_keep_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = whole_run(tmp_path / "run")
    old = (path / "steps.csv").read_text().splitlines()
    monkeypatch.setitem(metrics.TABLES, "steps.csv", Wider)
    with resume(path, Progress(4, 40)) as run:
        run.step(Wider(**dataclasses.asdict(step_row(5, 50)), temperature=36.6, note="x"))
    new = (path / "steps.csv").read_text().splitlines()
    assert new[0] == old[0] + ",temperature,note"
    assert new[1:5] == [f"{line},," for line in old[1:5]]
    assert new[5].endswith(",36.6,x")
    # The older header is read as well as the new one.
    assert parse(Wider, old[0].split(","), old[1].split(",")).temperature is None


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("evals.csv", "date,price\n1,2\n", "no header of hvdbs"),
        ("evals.csv", CONTRACT["evals.csv"].replace(" ", "") + ",later\n", "column later of a newer hvdbs"),
        (
            "evals.csv",
            CONTRACT["evals.csv"].replace(" ", "") + "\n1,2\n1,2,3,4,5,6,7,8\n",
            "line 2 is not a row",
        ),
        ("evals.csv", "\n\n", "no header of hvdbs"),
    ],
)
def test_a_foreign_file_is_refused_in_one_line_and_nothing_is_changed(
    tmp_path: Path, name: str, content: str, says: str
) -> None:
    path = whole_run(tmp_path / "run")
    (path / name).write_text(content)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(HvdbsError, match=says) as caught:
        resume(path, Progress(3, 30))
    assert "\n" not in str(caught.value)
    assert str(path / name) in str(caught.value)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_used_folder_is_refused_without_resume_and_both_ways_out_are_named(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(HvdbsError, match=r"--out: .* is not empty; .*--resume auto.* another --out"):
        create(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_resume_takes_back_how_the_run_ended_and_what_a_killed_writer_left(tmp_path: Path) -> None:
    path = whole_run(tmp_path / "run")
    (path / ".config.yaml.elsewhere.7.tmp").write_bytes(b"half")
    resume(path, Progress(3, 30)).close()
    left = {file.name for file in path.iterdir()}
    assert left == {*TABLES, "config.yaml", "environment.json", "plan.json", ".lock"}


def test_a_folder_that_a_job_writes_is_refused_unchanged_until_that_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdbs.metrics._PATIENCE_SECONDS", 0.2)
    path = tmp_path / "run"
    with create(path):
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        with pytest.raises(HvdbsError, match=r"--out: .* is being written by another job; touch .*/stop"):
            resume(path, Progress(0, 0))
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    resume(path, Progress(0, 0)).close()


def test_the_small_files_say_what_they_are_given(tmp_path: Path) -> None:
    path = whole_run(tmp_path / "run")
    assert json.loads((path / "summary.json").read_text()) == dataclasses.asdict(summary())
    ended = {"outcome": "finished", "reason": "end of the schedule", "exit_code": 0, "schema_version": 1}
    ended |= {"rank": None, "host": None}
    assert json.loads((path / "exit.json").read_text()) == ended
    plan = json.loads((path / "plan.json").read_text())
    assert plan["samples"] == plan_rows()[-1].samples_end
    assert [records.PlanRow(**row) for row in plan["stages"]] == plan_rows()


def test_an_outcome_has_an_exit_code_unless_another_is_given(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        for outcome, code, expected in (("failed", None, 1), ("stopped", None, 75), ("failed", 2, 2)):
            run.exit(outcome, "two\nlines", code)  # type: ignore[arg-type]
            written = json.loads((tmp_path / "run" / "exit.json").read_text())
            assert (written["exit_code"], written["reason"]) == (expected, "two lines")


_ENDLESS = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from rows import create, step_row
run = create(Path(sys.argv[1]))
print("go", flush=True)
for step in itertools.count(1):
    run.step(step_row(step, 10 * step))
"""


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_at_a_random_moment_leaves_only_whole_rows(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-c", _ENDLESS, str(tmp_path / "run"), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"go\n"
        time.sleep(random.Random(seed).uniform(0.01, 0.3))
        writer.send_signal(signal.SIGKILL)
        assert writer.wait(10) == -signal.SIGKILL
    with resume(tmp_path / "run", Progress(10**9, 10**10)) as run:
        run.step(step_row(10**9))
    header, *lines = [line.split(",") for line in (tmp_path / "run" / "steps.csv").read_text().splitlines()]
    steps = [parse(StepRow, header, line).step for line in lines]
    assert steps == [*range(1, len(steps)), 10**9]


def test_tensorboard_counts_in_samples_and_forgets_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def scalars(tag: str) -> dict[int, float]:
        events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
        events.Reload()
        return {event.step: event.value for event in events.Scalars(tag)}

    with RunDirectory.create(tmp_path / "run", "", {}, tensorboard=True) as run:
        for step in (1, 2, 3):
            run.step(step_row(step, 10 * step, loss=float(step)))
    assert scalars("step/loss") == {10: 1.0, 20: 2.0, 30: 3.0}
    with RunDirectory.resume(tmp_path / "run", Progress(1, 10), "", {}, tensorboard=True) as run:
        run.step(step_row(2, 15, loss=5.0))
        run.evaluation(eval_row(2, 15))
    assert scalars("step/loss") == {10: 1.0, 15: 5.0}
    assert scalars("evaluation/top1") == {15: pytest.approx(0.9)}
