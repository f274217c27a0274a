"""A launch on this machine: what its signals do, and that nothing of it is left, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

# One that obeys, one in a session of its own that obeys no SIGTERM, and a leader that waits.
FAMILY = "sleep 60 & setsid sh -c 'trap \"\" TERM; while true; do sleep 0.1; done' & echo begun > begun; {leader}"

# horovodrun's part is played by a program that says how it ended, as a run does.
RUN = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
(out / "checkpoints").mkdir(parents=True)
(out / "begun").touch()
while not (out / "stop").exists():
    time.sleep(0.02)
(out / "checkpoints" / "latest").write_text("step-1")
(out / "stop").unlink()
(out / "exit.json").write_text(json.dumps({"outcome": "stopped"}))
"""


class Launched:
    """``python -m hvdbs.launch`` in ``folder``, its ranks' launcher replaced by ``program``, a shell's."""

    def __init__(self, folder: Path, program: str, *arguments: str) -> None:
        stand_in = folder / "bin" / "horovodrun"
        stand_in.parent.mkdir()
        stand_in.write_text(f"#!/bin/sh\n{program}\n")
        stand_in.chmod(0o755)
        self.mark = f"launch-{folder.name}"
        path = f"{stand_in.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        environment |= {"PATH": path, ranks.MARK: self.mark, "PYTHONPATH": str(Path(__file__).parents[1])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hvdbs.launch", *arguments], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        ranks.end_marked(self.mark)
        self.process.communicate()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=60)
        assert ranks.processes_with(self.mark) == []
        return self.process.returncode, said


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    with ExitStack() as all_of_them:
        yield lambda *words: all_of_them.enter_context(Launched(tmp_path, *words))


@pytest.mark.parametrize("leader", ["exit 3", "sleep 0.3; exit 3"])
def test_what_a_launcher_leaves_behind_is_ended_and_its_exit_code_kept(
    launched: Callable[..., Launched], leader: str
) -> None:
    assert launched(FAMILY.format(leader=leader), "--", "true").end()[0] == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_makes_the_stop_file_of_the_run_and_reaches_the_launcher_in_no_other_way(
    launched: Callable[..., Launched], tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "run.py").write_text(RUN)
    launch = launched(f'exec {sys.executable} run.py "$@"', "--config", "digits", "--out", "run")
    launch.until((tmp_path / "run" / "begun").exists)
    launch.process.send_signal(number)
    code, said = launch.end()
    assert code == 75
    assert f"{number.name}: the run is asked to stop" in said
    assert not (tmp_path / "run" / "stop").exists()


def test_a_run_that_is_still_starting_is_asked_until_it_stops(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    # As a run does when it starts: it takes away what asked an earlier one.
    late = RUN.replace('(out / "begun").touch()', '(out / "begun").touch(); time.sleep(1)\n(out / "stop").unlink(True)')
    (tmp_path / "run.py").write_text(late)
    launch = launched(f'exec {sys.executable} run.py "$@"', "--config", "digits", "--out", "run")
    launch.until((tmp_path / "run" / "begun").exists)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end()[0] == 75


def test_a_second_ctrl_c_ends_everything_at_once(launched: Callable[..., Launched], tmp_path: Path) -> None:
    launch = launched(FAMILY.format(leader="sleep 60"), "--config", "digits", "--out", "run")
    launch.until((tmp_path / "begun").exists)
    for _ in range(2):
        launch.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert launch.end()[0] > 128


def test_a_killed_launch_takes_the_launcher_of_its_ranks_with_it(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    launch = launched("echo begun > begun; exec sleep 60", "--config", "digits", "--out", "run")
    launch.until((tmp_path / "begun").exists)
    launch.process.kill()
    launch.process.wait()
    ranks.wait_for_end_of(launch.mark, 10)
    assert ranks.processes_with(launch.mark) == []


@pytest.mark.parametrize(
    ("outcome", "launcher", "code"), [("finished", 1, 0), ("stopped", 0, 75), ("failed", 0, 1), ("", 7, 7)]
)
def test_a_run_s_own_word_counts_more_than_its_launcher_s_exit_code(
    launched: Callable[..., Launched], outcome: str, launcher: int, code: int
) -> None:
    word = f"mkdir run; echo '{json.dumps({'outcome': outcome})}' > run/exit.json; " if outcome else ""
    assert launched(f"{word}exit {launcher}", "--config", "digits", "--out", "run").end()[0] == code


def test_the_word_of_an_earlier_job_does_not_count(launched: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exit.json").write_text(json.dumps({"outcome": "stopped"}))
    assert launched("exit 2", "--config", "digits", "--out", "run").end()[0] == 2


def test_a_command_that_is_listened_to_has_a_limit_and_leaves_nothing(tmp_path: Path) -> None:
    mark = f"launch-{tmp_path.name}"
    program = (
        "import os, sys; from hvdbs.launch.processes import output_of; print(output_of(sys.argv[1:], os.environ, 2))"
    )
    environment = {**os.environ, ranks.MARK: mark, "PYTHONPATH": str(Path(__file__).parents[1])}
    for leader, said in (("sleep 60", "(None, 'heard\\n')"), ("exit 3", "(3, 'heard\\n')")):
        command = [sys.executable, "-c", program, "sh", "-c", f"echo heard; {FAMILY.format(leader=leader)}"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == said, done.stderr
        assert ranks.processes_with(mark) == []
