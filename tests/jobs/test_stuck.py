"""A rank that stands still ends the run, with its name; ranks without a launcher save their state and end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job, ended, whole_steps, write_config

pytestmark = pytest.mark.timeout(600)

TIMEOUT = 3.0
ENDLESS = {"method": "table", "stages": [{"epochs": 1000, "global_batch": 32, "lr": 0.01}]}


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    changes = {"fault": {"timeout_seconds": TIMEOUT}, "evaluation": {"every_epochs": 0}}
    return write_config(tmp_path / "endless.yaml", schedule=ENDLESS, **changes)


@pytest.mark.parametrize("kind", ["mpi", "gloo"])
def test_a_stopped_rank_is_named_and_ended_with_all_the_others(
    start: Callable[..., Job], endless: Path, tmp_path: Path, kind: str
) -> None:
    job = start(kind, 2, endless, tmp_path / "run")
    job.until_update(3)
    at = time.monotonic()
    os.kill(job.pids()[1], signal.SIGSTOP)
    assert job.wait(60) != 0
    print(f"{kind}: all gone {time.monotonic() - at:.1f} s after SIGSTOP, limit {TIMEOUT} s")
    host = socket.gethostname()
    assert ended(tmp_path / "run") == ("failed", 1)
    reason = json.loads((tmp_path / "run" / "exit.json").read_text())["reason"]
    assert reason.startswith(f"rank 1 on {host}: no answer"), job.text()
    assert f"rank 0 on {host}: no progress for " in reason
    assert "waits for the other ranks (" in reason
    assert reason in job.errors


def test_ranks_whose_horovodrun_is_killed_save_their_state_and_end(
    start: Callable[..., Job], endless: Path, tmp_path: Path
) -> None:
    job = start("mpi", 2, endless, tmp_path / "run")
    job.until_update(3)
    os.kill(job.launch.pid, signal.SIGKILL)
    job.wait(60)
    assert ended(tmp_path / "run") == ("stopped", 75)
    assert whole_steps(tmp_path / "run")[-1] >= 3
    assert any("its launcher is gone" in error for error in job.errors)
