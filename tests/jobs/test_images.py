"""Real images through DALI and the real entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launching import DIGITS, Job, Run, assert_same_bits, end_of, ended, write_config

from hvdbs.data import digits

pytestmark = pytest.mark.timeout(600)  # each job has a shorter limit of its own


def test_two_runs_on_real_images_have_the_same_bits_though_one_was_stopped_and_resumed(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    pytest.importorskip("nvidia.dali", reason="make setup installs it")
    digits.write(str(tmp_path / "digits"))
    changes = {**DIGITS, "data": {**DIGITS["data"], "root": str(tmp_path / "digits"), "backend": "dali"}}
    config = write_config(tmp_path / "digits.yaml", **changes)
    end_of(start("mpi", 2, config, tmp_path / "one"))
    one = Run(tmp_path / "one")
    assert one.summary["top1"] > 0.5

    out = tmp_path / "two"
    job = start("mpi", 2, config, out)
    job.until_update(6)
    (out / "stop").touch()
    assert job.wait() == 75, job.text()
    assert ended(out) == ("stopped", 75)
    end_of(start("mpi", 2, config, out, "--resume", "auto"))
    assert_same_bits(Run(out), one)
