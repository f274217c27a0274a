"""Bad input that only one rank sees, or that all read from rank 0: every rank ends, with one first cause."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job, Run, ended, whole_steps

pytestmark = pytest.mark.timeout(600)  # each job has a shorter limit of its own

REFUSED_SECONDS = 60.0  # a second or two after the start, which is part of it

RANK_1_READS = """
from hvdbs.comm import launched_rank
if launched_rank() == 1:
    sys.argv += {words}
"""


def refused(job: Job) -> str:
    """The one line of a job that is refused on all ranks."""
    assert job.wait(REFUSED_SECONDS) != 0
    assert len(job.errors) == 1, job.text()
    assert "<stderr>:Traceback" not in job.stderr  # horovodrun has one of its own
    return job.errors[0]


@pytest.mark.parametrize("kind", ["mpi", "gloo"])
def test_a_config_that_only_one_rank_cannot_read_ends_all(
    start: Callable[..., Job], config: Path, tmp_path: Path, kind: str
) -> None:
    before = RANK_1_READS.format(words=["--schedule.lr", "high"])
    said = refused(start(kind, 2, config, tmp_path / "run", before=before))
    assert "schedule.lr: high is not a number or null" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--optimizer.momentum", "0.5"], "optimizer.momentum: 0.5 is not what rank 0 was started with, 0.9; the same"),
        (["--resume", "auto"], "--resume: auto is not what rank 0 was started with, None; the same config file and"),
    ],
    ids=["config", "resume"],
)
def test_ranks_that_were_started_differently_all_end_before_training(
    start: Callable[..., Job], config: Path, tmp_path: Path, words: list[str], line: str
) -> None:
    said = refused(start("gloo", 2, config, tmp_path / "run", before=RANK_1_READS.format(words=words)))
    assert said.startswith(f"rank 1: {line}")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_without_a_whole_one_ends_all_in_a_line(
    start: Callable[..., Job], undisturbed: Run, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed.out, out)
    steps = whole_steps(out)
    for step in steps:
        os.truncate(out / "checkpoints" / f"step-{step}" / "model.pt", 1000)
    said = refused(start("gloo", 2, config, out, "--resume", "auto"))
    assert said.startswith(
        f"rank 0: --resume: no whole checkpoint in {out}/checkpoints: step-{steps[-1]} (model.pt is not what"
    )


def test_a_damaged_checkpoint_is_passed_over_by_all(
    start: Callable[..., Job], undisturbed: Run, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed.out, out)
    last = out / "checkpoints" / f"step-{whole_steps(out)[-1]}"
    (last / "model.pt").write_bytes((last / "model.pt").read_bytes()[:-1] + b"\0\0")
    job = start("gloo", 2, config, out, "--resume", "auto")
    assert job.wait() == 0, job.text()
    assert f"passed over {last.name} (model.pt is not what manifest.json says)" in job.stdout
    assert ended(out) == ("finished", 0)
    assert Run(out).summary["parameter_digest"] == undisturbed.summary["parameter_digest"]
