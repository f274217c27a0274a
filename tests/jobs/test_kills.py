"""kill -9 of a random rank at random moments: nothing hangs, nothing is left, nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job, Run, assert_same_bits, end_of, ended, whole_steps, write_config

GONE_SECONDS = 30.0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "np", "kills", "seed"),
    [("mpi", 2, 10, 20260101), ("mpi", 2, 10, 20260103), ("gloo", 3, 3, 20260102)],
    ids=["mpi-2", "mpi-2-again", "gloo-3"],  # two tables of ten, so that two cores share them
)
def test_killed_at_random_moments_a_run_ends_in_the_bits_of_the_undisturbed_one(
    start: Callable[..., Job], tmp_path: Path, kind: str, np: int, kills: int, seed: int
) -> None:
    # A checkpoint at every second or third update, so that many kills fall into one.
    often = {"every_samples": 100, "every_minutes": 0, "keep_last": 2}
    config = write_config(tmp_path / "killed.yaml", checkpoint=often)
    job = start(kind, np, config, tmp_path / "undisturbed")
    job.until(lambda: started(job), "the stage table")
    start_seconds = job.seconds
    end_of(job)
    train_seconds = job.seconds - start_seconds
    undisturbed = Run(tmp_path / "undisturbed")
    print(f"seed {seed}: {start_seconds:.1f} s to start, {train_seconds:.1f} s to train")

    draw = random.Random(seed)
    chain = killed = newest = 0
    while killed < kills:
        out = tmp_path / f"chain-{chain}"
        rank, in_training, part = draw.randrange(np), draw.random() < 0.6, draw.random()
        job = start(kind, np, config, out, "--resume", "auto")
        if in_training:  # waited for, because how long a start takes varies more than how long the run does
            job.until(lambda job=job: started(job) or job.launch.poll() is not None, "the stage table")
            sleep(job, part * 0.4 * train_seconds)
        else:
            sleep(job, part * start_seconds)
        if not kill(job, rank):  # it had ended
            assert job.wait() == 0, job.text()
            assert_same_bits(Run(out), undisturbed)
            chain, newest = chain + 1, 0
            continue
        at = time.monotonic()
        code = job.wait(GONE_SECONDS)
        assert code != 0 or ended(out) == ("finished", 0)
        steps = whole_steps(out)
        killed += 1
        said = (
            f"kill {killed}: chain {chain}, rank {rank}, {part:.2f} into {'training' if in_training else 'the start'}"
        )
        print(f"{said}; all gone after {time.monotonic() - at:.1f} s; whole checkpoints {steps}", flush=True)
        assert max(steps, default=0) >= newest, "a whole checkpoint was lost"
        latest = out / "checkpoints" / "latest"
        assert not latest.exists() or latest.read_text().strip() in [f"step-{step}" for step in steps]
        newest = max(steps, default=0)

    out = tmp_path / f"chain-{chain}"
    last = start(kind, np, config, out, "--resume", "auto")
    assert last.wait() == 0, last.text()
    assert_same_bits(Run(out), undisturbed)


def started(job: Job) -> bool:
    return "samples on" in job.stdout


def sleep(job: Job, seconds: float) -> None:
    """Until then, or until ``job`` has ended."""
    moment = time.monotonic() + seconds
    while time.monotonic() < moment and job.launch.poll() is None:
        time.sleep(0.005)


def kill(job: Job, rank: int) -> bool:
    """Kill ``rank``, as soon as there is one; False if the job has ended before."""
    while (pid := job.pids().get(rank)) is None:
        if job.launch.poll() is not None:
            return False
        assert job.seconds < 120, job.text()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(400)
def test_a_run_whose_rank_is_killed_is_started_again_to_the_same_bits(
    start: Callable[..., Job], config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    job = start("launch", 2, config, out, "--max-restarts", "2")
    job.until_update(30)
    assert kill(job, 1)
    assert job.wait(240) == 0, job.text()
    assert "restart 1 of 2 from step-" in job.stdout
    assert_same_bits(Run(out), undisturbed)
