"""What a person sees: numbers that read well and do not lie, whole lines in a log, a bar on a terminal."""

from __future__ import annotations

import dataclasses
import io
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import TOTAL_SAMPLES, eval_row, plan_rows, step_row, summary

from hvdbs import console
from hvdbs.console import Display


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (console.count, 1234567, "1,234,567"),
        (console.number, 0.1, "0.1"),
        (console.number, 1e-5, "1e-05"),
        (console.number, 12800.4, "12,800"),
        (console.number, 0.0, "0"),
        (console.share, 0.143, "14%"),
        (console.share, 0.0, "0%"),
        (console.share, 1.0, "100%"),
        (console.share, 1e-9, "<1%"),
        (console.share, 1 - 1e-9, ">99%"),
        (console.size, 999, "999 B"),
        (console.size, 1_240_000_000, "1.24 GB"),
        (console.size, 999_600, "1 MB"),
        (console.size, 5e18, "5e+03 PB"),
        (console.duration, 0.4, "0:00"),
        (console.duration, 42, "0:42"),
        (console.duration, 59.7, "1:00"),
        (console.duration, 3723, "1:02:03"),
        (console.duration, 2 * 86400 + 3 * 3600 + 245, "2d 03:04:05"),
    ],
)
def test_numbers_read_well(function: Callable[[float], str], value: float, text: str) -> None:
    assert function(value) == text


@given(part=st.floats(0, 1), digits=st.integers(0, 3))
def test_a_share_reads_as_all_or_nothing_only_if_it_is(part: float, digits: int) -> None:
    text = console.share(part, digits)
    assert (text == f"{100:.{digits}f}%") == (part == 1)
    assert (text == f"{0:.{digits}f}%") == (part == 0)


def test_the_stage_table_shows_every_stage_and_adds_up() -> None:
    rows = plan_rows()
    lines = console.stage_table(rows).splitlines()
    names = lines[1].split()
    assert names[:3] == ["stage", "epochs", "global_batch"]
    cells = [line.split() for line in lines[3:6]]
    assert [line[0] for line in cells] == ["0", "1", "2"]
    assert [line[2] for line in cells] == ["10", "25", "40"]
    assert [line[3] for line in cells] == ["1/1", "3/2", "4/4"]
    assert [line[4] for line in cells] == ["0%", "17%", "0%"]
    assert [line[5:9] for line in cells] == [["0.1", "0.0001", "1", "1e-05"]] * 3
    assert [int(line[9]) for line in cells] == [row.steps for row in rows]
    total = lines[7].split()
    # Idle turns: 1/6 of the 12 that stage 1 takes (4 updates of 3), of 38 in all.
    assert total[:4] == ["total", "3.6", "5%", "15"]
    assert f"{TOTAL_SAMPLES} samples on 2 ranks" in lines[8]
    assert max(map(len, lines)) <= 110
    assert all(line == line.rstrip() for line in lines)


def test_a_step_line_says_what_is_promised() -> None:
    row = step_row(120, 2048, 1, 128, loss=0.43119, samples_per_second=1234.4)
    assert console.step_line(row, 14370, 42.0) == (
        "step 120  epoch 20.48  samples 2,048/14,370 (14.3%)  stage 1  batch 128  lr 0.1  loss 0.4312"
        "  1,234 samples/s  data wait 2%  left 0:42"
    )
    unknown = dataclasses.replace(row, samples_per_second=None)
    line = console.step_line(unknown, None, None)
    assert "samples 2,048  stage" in line
    assert "samples/s" not in line


def test_the_time_left_follows_from_the_samples_left_and_is_not_guessed() -> None:
    row = step_row(1, 400)
    assert console.seconds_left(row, 1000, 30.0) == 20.0
    assert console.seconds_left(row, 300, 30.0) == 0.0
    assert console.seconds_left(row, None, 30.0) is None
    assert console.seconds_left(row, 1000, None) is None


def test_the_closing_lines_give_the_score_and_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = console.closing(tmp_path / "runs" / "a", summary())
    assert text.startswith("finished: top-1 90.00%, 360 samples in 15 updates, 0:12, 61.4 kB reduced per rank\n")
    assert "wrote runs/a/\n" in text
    assert str(tmp_path) not in text


class Recorder(io.StringIO):
    """A stream that keeps each write apart."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.writes: list[str] = []
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(5))
def test_without_a_terminal_there_are_whole_lines_a_period_apart_and_never_a_carriage_return(
    seed: int,
) -> None:
    stream, clock, draw = Recorder(), Clock(), random.Random(seed)
    display = Display(1000, line_seconds=10, stream=stream, clock=clock)
    printed_at = []
    for step in range(1, 201):
        clock.now += draw.uniform(0, 4)
        before = len(stream.writes)
        display.step(step_row(step, 5 * step))
        printed_at += [clock.now] * (len(stream.writes) - before)
    gaps = [later - earlier for earlier, later in pairwise(printed_at)]
    assert stream.writes[0].startswith("step 1  "), "the first line comes at once"
    assert min(gaps) >= 10
    assert max(gaps) < 14, "and then one as soon as the period is over"
    display.close()
    assert stream.writes[-1].startswith("step 200  "), "the end is shown whatever the period"
    assert all(text.endswith("\n") and text.count("\n") == 1 for text in stream.writes)
    assert "\r" not in stream.getvalue()


def test_a_table_is_written_at_once_and_an_evaluation_is_not_throttled() -> None:
    stream = Recorder()
    display = Display(1000, line_seconds=3600, stream=stream, clock=Clock())
    display.say(console.stage_table(plan_rows()))
    display.step(step_row(1, 10))
    display.step(step_row(2, 20))
    display.evaluation(eval_row(2, 20))
    display.close()
    assert len(stream.writes) == 3, "the evaluation already said where step 2 stands"
    assert stream.writes[2] == (
        "evaluation at step 2  epoch 0.20  top-1 90.00%  top-5 99.00%  loss 0.2500  (360 samples)\n"
    )


@pytest.mark.parametrize(
    ("terminal", "variables", "live"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"OMPI_COMM_WORLD_SIZE": "2"}, False),
        (True, {"HOROVOD_SIZE": "2"}, False),
        (True, {"SLURM_JOB_ID": "3", "SLURM_STEP_NUM_TASKS": "1"}, True),
        (True, {"SLURM_JOB_ID": "3", "SLURM_STEP_NUM_TASKS": "2"}, False),
    ],
)
def test_a_bar_is_for_a_terminal_without_a_launcher(terminal: bool, variables: dict[str, str], live: bool) -> None:
    assert console.is_live(Recorder(terminal), variables) is live


def test_a_bar_moves_to_the_end_below_the_lines_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = Recorder(terminal=True)
    display = Display(100, stream=stream, live=True)
    display.say("a table\nof two lines")
    assert stream.getvalue() == "a table\nof two lines\n", "no bar is drawn before there is something to show"
    display.step(step_row(1, 40))
    display.evaluation(eval_row(2, 100))
    display.close()
    text = stream.getvalue()
    assert "\r" in text
    assert "100/100, left 0:00  loss" in text
    assert "\revaluation at step 2" in text.replace(" " * 100, "").replace("\r\r", "\r")
    assert text.endswith("\n")
