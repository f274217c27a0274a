"""Law 4 through the real entry: a run that is stopped and resumed ends where the undisturbed one does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job, Run, assert_same_bits, assert_same_training, end_of, ended, whole_steps

pytestmark = pytest.mark.timeout(600)  # each job has a shorter limit of its own

STOPPED = ("stopped", 75)
LAST_STEP = 65


def assert_stopped(out: Path) -> int:
    """The update it stopped after: not the last, and saved."""
    assert ended(out) == STOPPED
    summary = Run(out).summary
    assert summary["exit_reason"] == "stopped"
    assert 0 < summary["steps"] < LAST_STEP
    assert whole_steps(out)[-1] == summary["steps"] == Run(out).state.progress.step
    return summary["steps"]


def test_ctrl_c_of_a_plain_process_checkpoints_and_the_resumed_run_ends_in_the_same_bits(
    start: Callable[..., Job], config: Path, undisturbed_alone: Run, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    job = start("plain", 1, config, out)
    job.until_update(9)
    job.signal(signal.SIGINT)
    assert job.wait() == 75, job.text()
    assert_stopped(out)
    assert job.errors == []
    assert "stopping after this update" in job.stderr
    assert "--resume auto" in job.stdout

    end_of(start("plain", 1, config, out, "--resume", "auto"))
    assert_same_bits(Run(out), undisturbed_alone)

    # Killed between its last checkpoint and its summary, it is summed up by the next start.
    (out / "summary.json").unlink()
    (out / "exit.json").unlink()
    end_of(start("plain", 1, config, out, "--resume", "auto"))
    assert_same_bits(Run(out), undisturbed_alone)

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    again = start("plain", 1, config, out, "--resume", "auto")
    assert again.wait() == 0
    assert "has finished its schedule: nothing is left to train" in again.stdout
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_signal_to_one_rank_stops_all_at_one_update_and_they_resume_in_the_same_bits(
    start: Callable[..., Job], config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    job = start("mpi", 2, config, out)
    job.until_update(30)
    os.kill(job.pids()[1], signal.SIGTERM)
    assert job.wait() == 75, job.text()
    assert_stopped(out)
    assert job.errors == []

    end_of(start("mpi", 2, config, out, "--resume", "auto"))
    assert_same_bits(Run(out), undisturbed)


def test_the_stop_file_stops_a_launch_and_it_resumes_on_another_number_of_ranks(
    start: Callable[..., Job], config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    job = start("mpi", 2, config, out)
    job.until_update(3)
    assert f"touch {out}/stop" in job.stdout
    (out / "stop").touch()
    assert job.wait() == 75, job.text()
    first = assert_stopped(out)
    assert not (out / "stop").exists()

    # A Ctrl-C of `horovodrun --gloo`: it gives its ranks 5 seconds.
    job = start("gloo", 3, config, out, "--resume", "auto")
    job.until_update(first + 6)
    job.signal(signal.SIGINT)
    assert job.wait() != 0
    assert assert_stopped(out) > first
    assert job.errors == []

    (out / "stop").touch()  # left over: it asked an earlier run
    end_of(start("plain", 1, config, out, "--resume", "auto"))
    assert_same_training(Run(out), undisturbed)
    assert not (out / "stop").exists()


@pytest.mark.parametrize("kind", ["mpi", "mpirun"])
def test_ctrl_c_under_mpi_ends_all_ranks_and_loses_no_checkpoint(
    start: Callable[..., Job], config: Path, undisturbed: Run, tmp_path: Path, kind: str
) -> None:
    # Open MPI 5 kills its ranks 0.25 s after it has let them know, so a stop in good order is a matter of luck.
    out = tmp_path / "run"
    job = start(kind, 2, config, out)
    job.until_update(24)
    job.signal(signal.SIGINT)
    assert job.wait(30) != 0
    assert ended(out) in (STOPPED, None)
    assert whole_steps(out)[-1] >= 20
    if kind == "mpi":
        end_of(start("mpi", 2, config, out, "--resume", "auto"))
        assert_same_bits(Run(out), undisturbed)


def test_mpirun_passes_on_the_signal_that_slurm_sends_before_the_time_limit(
    start: Callable[..., Job], config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    job = start("mpirun", 2, config, out)
    job.until_update(9)
    job.signal(signal.SIGUSR1)
    assert job.wait() == 75, job.text()
    assert_stopped(out)
