"""Following a run by its files alone: nothing twice, nothing half, the run's own end."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rows import STAGES, TOTAL_SAMPLES, TOTAL_STEPS, create, resume, updates, whole_run

from hvdbs import follow as follow_module
from hvdbs.console import Display
from hvdbs.errors import HvdbsError
from hvdbs.follow import Patience, SilentError, Tail, follow, main, read_exit, read_plan
from hvdbs.progress import Progress
from hvdbs.records import Exit, StepRow


class Time:
    """A clock that only sleeping moves; ``during`` happens in each sleep."""

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self.now = 0.0
        self.during = during

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during()


def watched(
    path: Path, time: Time, patience: Patience, alive: Callable[[], bool] = lambda: True
) -> tuple[Exit | None, list[str]]:
    stream = io.StringIO()
    ended = follow(path, lambda total: Display(total, 0.0, stream, live=False), patience, alive, time.clock, time.sleep)
    return ended, stream.getvalue().splitlines()


def append(file: Path, data: bytes) -> None:
    with file.open("ab") as end:
        end.write(data)


def test_every_row_comes_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    whole = (whole_run(tmp_path / "whole") / "steps.csv").read_bytes()
    file = tmp_path / "steps.csv"
    tail = Tail(file, StepRow)
    assert tail.poll() == []
    seen = []
    for end in range(0, len(whole) + 1, 7):
        append(file, whole[max(0, end - 7) : end])
        rows = tail.poll()
        seen += [row.step for row in rows]
        assert len(seen) == max(0, whole[:end].count(b"\n") - 1)
    append(file, whole[file.stat().st_size :])
    seen += [row.step for row in tail.poll()]
    assert seen == list(range(1, TOTAL_STEPS + 1))


def test_a_resume_that_replaces_the_file_is_noticed(tmp_path: Path) -> None:
    path = whole_run(tmp_path / "run")
    tail = Tail(path / "steps.csv", StepRow)
    assert len(tail.poll()) == TOTAL_STEPS
    resume(path, Progress(3, 30)).close()
    assert [row.step for row in tail.poll()] == [1, 2, 3]
    # Even if by then the new file has grown past where the old one was left.
    every = list(updates())
    with resume(path, Progress(1, 10)) as run:
        for update in every[1:]:
            update.write(run)
    assert [row.step for row in tail.poll()] == list(range(1, TOTAL_STEPS + 1))


def test_a_run_is_followed_from_before_its_start_to_its_own_end(tmp_path: Path) -> None:
    """The run makes one update in each sleep of the follower, who started first."""
    path = tmp_path / "run"

    def run() -> object:
        yield
        with create(path) as files:
            for update in updates():
                update.write(files)
                yield
            files.exit("stopped", "asked to")
            yield

    running = run()
    ended, lines = watched(path, Time(lambda: next(running)), Patience(wait=10, stale=10, poll=1))  # type: ignore
    assert ended == Exit("stopped", "asked to", 75)
    assert sum(line.startswith("evaluation ") for line in lines) == 4
    steps = [line.split()[1] for line in lines if line.startswith("step ")]
    assert steps == [str(step) for step in range(1, TOTAL_STEPS + 1)], "each sleep made one update"
    last = next(line for line in lines if line.startswith(f"step {TOTAL_STEPS} "))
    assert f"samples {TOTAL_SAMPLES}/{TOTAL_SAMPLES} (100.0%)" in last
    assert any(line.startswith("total") for line in lines), "the stage table comes first"


def test_whoever_comes_late_sees_the_last_update_and_all_scores(tmp_path: Path) -> None:
    ended, lines = watched(whole_run(tmp_path / "run"), Time(), Patience())
    assert ended == Exit("finished", "end of the schedule", 0)
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [str(TOTAL_STEPS)]
    assert sum(line.startswith("evaluation ") for line in lines) == 4


def test_scores_are_not_shown_again_after_a_resume(tmp_path: Path) -> None:
    path, every = tmp_path / "run", list(updates())
    with create(path) as run:
        for update in every[:9]:
            update.write(run)

    def go_on() -> None:
        time.during = lambda: None
        with resume(path, every[3].progress) as run:
            for update in every[4:]:
                update.write(run)
            run.exit("finished", "end")

    time = Time(go_on)
    _, lines = watched(path, time, Patience())
    shown = [line.split()[3] for line in lines if line.startswith("evaluation ")]
    assert shown == ["4", "8", "12", "15"]


def test_a_run_that_never_appears_and_one_that_goes_silent_are_told_apart(tmp_path: Path) -> None:
    time = Time()
    with pytest.raises(HvdbsError, match=r"RUN_DIR: .*nowhere does not exist after 0:30; .*--wait") as never:
        watched(tmp_path / "nowhere", time, Patience(wait=30, stale=5, poll=1))
    assert not isinstance(never.value, SilentError)
    assert time.now == 30
    create(tmp_path / "run").close()
    time = Time()
    with pytest.raises(SilentError, match=r"no file changed for 1:00"):
        watched(tmp_path / "run", time, Patience(wait=0, stale=60, poll=1))
    assert time.now == 60


def test_stale_0_waits_for_ever(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        time = Time(lambda: run.exit("failed", "late") if time.now > 10**6 else None)
        ended, _ = watched(tmp_path / "run", time, Patience(stale=0, poll=1000))
    assert ended == Exit("failed", "late", 1)


def test_a_process_that_ends_without_a_word_ends_the_watch(tmp_path: Path) -> None:
    assert watched(tmp_path / "nowhere", Time(), Patience(), alive=lambda: False)[0] is None
    with create(tmp_path / "run") as run:
        next(updates()).write(run)
    ended, lines = watched(tmp_path / "run", Time(), Patience(), alive=lambda: False)
    assert ended is None
    assert lines[-1].startswith("step 1 "), "what it wrote before is shown all the same"


def test_a_damaged_file_is_named_in_one_line(tmp_path: Path) -> None:
    path = whole_run(tmp_path / "run")
    append(path / "evals.csv", b"1,2,x\n")
    with pytest.raises(HvdbsError, match=r"evals\.csv: not a file of hvdbs, or damaged: 3 cells under 10"):
        watched(path, Time(), Patience())
    (path / "plan.json").write_text("{")
    with pytest.raises(HvdbsError, match=r"plan\.json: not a file of hvdbs, or damaged"):
        read_plan(path)
    for text in ("[]", "3", "null", '{"stages": 3}', '{"stages": [3]}', '{"stages": [{}]}', "\\udc00"):
        (path / "plan.json").write_text(text)
        (path / "exit.json").write_text(text)
        for read in (read_plan, read_exit):
            if text != "null":
                with pytest.raises(HvdbsError, match=r"\.json: not a file of hvdbs, or damaged"):
                    read(path)


def test_a_plan_of_a_newer_version_is_read(tmp_path: Path) -> None:
    path = whole_run(tmp_path / "run")
    plan = json.loads((path / "plan.json").read_text())
    for row in plan["stages"]:
        row["added_later"] = 1
    (path / "plan.json").write_text(json.dumps(plan))
    assert [row.global_batch for row in read_plan(path)] == [batch for _, _, batch in STAGES]


def test_the_command_ends_as_the_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = whole_run(tmp_path / "run")
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{path} finished: end of the schedule"
    (path / "exit.json").write_text('{"outcome": "failed", "reason": "loss: nan", "exit_code": 7}')
    assert main([str(path)]) == 7
    assert main([str(tmp_path / "nowhere"), "--wait", "0"]) == 2
    (path / "exit.json").unlink()
    assert main([str(path), "--stale", "0.01"]) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2
    assert all(line.startswith("hvdbs.follow: ") for line in error)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow_module, "follow", interrupted)
    assert main([str(path)]) == 130


@pytest.mark.parametrize("arguments", [[], ["a", "--wait", "soon"], ["a", "--stale", "-1"], ["a", "--wait", "nan"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
