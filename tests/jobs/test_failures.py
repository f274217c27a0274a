"""Law 10: a rank that fails ends every rank, with a non-zero exit and the first cause on stderr and in exit.json."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import DIGITS, Job, ended, whole_steps, write_config

from hvdbs.data import digits

pytestmark = pytest.mark.timeout(600)  # each job has a shorter limit of its own

HOST = socket.gethostname()
GONE_SECONDS = 60.0  # a second or two after the failure; the start is part of it

RANK_1_RAISES = """
import hvdbs.data.synthetic as synthetic
from hvdbs.comm import launched_rank
def sample(self, item, original=synthetic.SyntheticSource.sample):
    if launched_rank() == 1 and item.epoch == 1:
        raise ValueError("the disk\\nis on fire")
    return original(self, item)
synthetic.SyntheticSource.sample = sample
"""

DISK_IS_FULL = """
import errno, os, torch
def save(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
torch.save = save
"""


def reason(out: Path) -> str:
    return json.loads((out / "exit.json").read_text())["reason"]


@pytest.mark.parametrize("kind", ["mpi", "gloo"])
def test_an_exception_in_one_rank_ends_all(start: Callable[..., Job], config: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "run"
    job = start(kind, 2, config, out, before=RANK_1_RAISES)
    assert job.wait(GONE_SECONDS) != 0
    cause = f"rank 1 on {HOST}: ValueError: the disk is on fire"
    assert job.errors.count(cause) == 1, job.text()
    assert set(job.errors) <= {cause, f"rank 0 on {HOST} ends because another rank has failed"}
    assert "Traceback" in job.stderr  # nobody foresaw it, so somebody will want to see where it was
    assert ended(out) == ("failed", 1)
    assert reason(out) == cause
    assert whole_steps(out) == [20]


def test_an_error_of_rank_0_ends_all_in_good_order(start: Callable[..., Job], config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = start("gloo", 2, config, out, before=DISK_IS_FULL)
    assert job.wait(GONE_SECONDS) != 0
    cause = f"rank 0: checkpoint {out}/checkpoints/step-20: cannot be written ([Errno 28] No space left on device)"
    assert job.errors == [f"{cause}; last whole one: none"], job.text()
    assert "<stderr>:Traceback" not in job.stderr  # horovodrun has one of its own
    assert ended(out) == ("failed", 2)
    assert reason(out) == job.errors[0]


def test_an_image_that_cannot_be_decoded_ends_all_with_its_path(start: Callable[..., Job], tmp_path: Path) -> None:
    root, out = tmp_path / "digits", tmp_path / "run"
    digits.write(str(root))
    damaged = sorted((root / "train" / "7").iterdir())[5]
    data = damaged.read_bytes()
    frame = data.index(b"\xff\xc0")  # the header says what it should, and that is all there is
    damaged.write_bytes(data[: frame + 2 + int.from_bytes(data[frame + 2 : frame + 4])] + b"\xff\xd9")
    config = write_config(tmp_path / "digits.yaml", **{**DIGITS, "data": {**DIGITS["data"], "root": str(root)}})
    job = start("mpi", 2, config, out)
    assert job.wait(GONE_SECONDS) != 0
    (cause,) = {error for error in job.errors if not error.endswith("ends because another rank has failed")}
    assert str(damaged) in cause, job.text()
    assert cause.startswith((f"rank 0 on {HOST}: image", f"rank 1 on {HOST}: image"))
    assert "Traceback" not in job.stderr
    assert ended(out) == ("failed", 1)
    assert str(damaged) in reason(out)
