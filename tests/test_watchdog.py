"""When a rank counts as stuck, what it says then, and that a job which was stopped as a whole is not stuck."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdbs import ancestors, pulse
from hvdbs.pulse import Pulse


def test_the_limit_grows_with_what_is_under_way_and_who_waits_for_others_speaks_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(pulse, "monotonic", lambda: clock[0])
    one = Pulse(since=100.0)
    assert one.limit_seconds(600) == 1800  # at the start
    assert one.limit_seconds(2) == pulse.START_SECONDS
    one.enter("window", 0, 32)
    assert one.limit_seconds(600) == 1800  # the first, which may compile
    clock[0] += 8
    one.enter("window", 1, 32)
    assert one.limit_seconds(600) == 600 + 10 * 8
    one.enter("window", 2, 3200)
    assert one.limit_seconds(600) == 600 + 10 * 800
    one.peers = "gradients.0"
    assert one.limit_seconds(600) == pytest.approx(1.1 * 8600 + 2)
    one.peers = None
    one.enter("evaluation", 3)
    assert one.limit_seconds(600) == 1800
    clock[0] += 1000
    one.enter("evaluation", 4)
    assert one.limit_seconds(600) == 1800 + 10 * 1000


def test_a_beat_for_each_batch_and_words_for_what_is_waited_for() -> None:
    one = Pulse()
    one.enter("window", 7, 64)
    before = one.beats
    supply = one.batches(iter("ab"))
    assert (next(supply), one.beats - before) == ("a", 1)
    one.data = True
    assert one.described == "after update 7, in the window of 64 samples: waits for data"
    one.peers = "gradients.1"
    assert one.described.endswith("waits for the other ranks (gradients.1)")
    assert list(supply) == ["b"]


HANGS = """
import sys, time
from pathlib import Path
from hvdbs.pulse import Pulse
from hvdbs.watchdog import Watchdog
one = Pulse()
one.enter("window", 0, 1)
one.enter("window", 41, 1)
one.data = True
dog = Watchdog(one, 3, float(sys.argv[1]), lambda reason: Path(sys.argv[2]).write_text(reason))
print("begun", flush=True)
def reads():
    time.sleep(60)
if len(sys.argv) < 4:
    reads()
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    time.sleep(0.01)
    one.beats += 1
time.sleep(0.2)
dog.close()
"""


def test_a_rank_that_hangs_ends_itself_and_says_where(tmp_path: Path) -> None:
    word = tmp_path / "word"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGS, "0.5", word], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert time.monotonic() - began < 30
    assert "hvdbs: error: rank 3 on " in done.stderr
    assert "after update 41, in the window of 1 samples: waits for data (<string>:" in done.stderr
    assert "in reads" in word.read_text()


def test_a_job_that_is_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, "0.5", tmp_path / "word", "2.5"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 0


def test_the_launcher_above_a_rank_is_found_through_shells_and_its_end_is_seen(tmp_path: Path) -> None:
    # As under horovodrun --mpi: a shell with mpirun's command line, mpirun, the rank. A user's shell is above them.
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\n"$@" & wait\n')
    mpirun.chmod(0o755)
    rank = (
        "import json, time\nfrom hvdbs import ancestors\n"
        "above = ancestors.launcher()\nprint(json.dumps([p.pid for p in above]), flush=True)\n"
        "while not ancestors.gone(above): time.sleep(0.02)\nprint('gone', flush=True)"
    )
    (tmp_path / "rank.py").write_text(rank)
    launch = f"mpirun {sys.executable} rank.py; true"
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(ancestors.__file__).parents[1]),
    }
    command = [sys.executable, "-c", f"import subprocess; subprocess.call(['sh', '-c', {launch!r}])"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path, start_new_session=True
    ) as user:
        assert user.stdout is not None
        above = json.loads(user.stdout.readline())
        assert len(above) == 2
        assert user.pid not in above
        os.kill(above[1], signal.SIGKILL)
        assert user.stdout.readline() == "gone\n"
