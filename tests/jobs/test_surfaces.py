"""A known loss surface under a real launcher: stopped as one process, resumed on two ranks, read by the report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job, Run, assert_same_bits, assert_same_training, end_of, ended

pytestmark = pytest.mark.timeout(600)  # each job has a shorter limit of its own


def test_a_bowl_is_the_same_on_two_ranks_and_after_a_stop(start: Callable[..., Job], tmp_path: Path) -> None:
    """Law 4 bitwise on one rank (weights.csv too); law 1 on two, 1e-12 for every logged weight."""
    whole, pair, cut = tmp_path / "whole", tmp_path / "pair", tmp_path / "cut"
    end_of(start("plain", 1, "bowl", whole))
    end_of(start("mpi", 2, "bowl", pair))
    assert_same_training(Run(pair), Run(whole))
    rows = zip(Run(pair).table("weights.csv"), Run(whole).table("weights.csv"), strict=True)
    assert max(abs(float(a[w]) - float(b[w])) for a, b in rows for w in ("w1", "w2")) < 1e-12

    job = start("plain", 1, "bowl", cut)
    job.until_update(20)
    (cut / "stop").touch()
    assert job.wait() == 75, job.text()
    assert ended(cut) == ("stopped", 75)
    end_of(start("plain", 1, "bowl", cut, "--resume", "auto"))
    assert_same_bits(Run(cut), Run(whole))
    assert (cut / "weights.csv").read_bytes() == (whole / "weights.csv").read_bytes()

    said = subprocess.run(
        [sys.executable, "-m", "hvdbs.report", str(cut)], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert "holds it" in said
    assert (cut / "surface.png").is_file()
