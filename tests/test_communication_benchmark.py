"""What benchmarks.communication makes of seconds; its contenders run in tests/parallel."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest

from benchmarks import communication as bench


def rows(seconds: dict[str, float], nbytes: int = bench.LARGE) -> pd.DataFrame:
    made = [
        {"kind": "message", "message_bytes": nbytes, "tensors": 1, "contender": name, "round": number}
        | {"bucket_bytes": 0, "seconds": took, "backend": "mpi", "world_size": 4}
        for name, took in seconds.items()
        for number in range(3)
    ]
    return bench.with_bandwidth(pd.DataFrame(made), 4)


def test_bandwidths_by_hand() -> None:
    """4 MiB in 2 ms are 2.1 GB/s; a ring of 4 moves 6/4 of them through each link; a copy that takes 1 ms is 4.2."""
    found = rows({"horovod": 2e-3, "copy": 1e-3}).groupby("contender").first()
    assert found.algorithm_bandwidth.horovod == pytest.approx(2.097152e9)
    assert found.bus_bandwidth.horovod == pytest.approx(1.5 * 2.097152e9)
    assert found.share_of_copy.horovod == pytest.approx(0.75)
    assert pd.isna(found.share_of_copy["copy"])
    assert bench.bus_factor(2) == 1


def test_our_reducer_is_judged_by_the_lower_end_against_raw_mpi() -> None:
    table = rows({"mpi4py": 1.9e-3, "reducer": 2e-3, "horovod": 4e-3})
    found = bench.verdicts(table).set_index("contender")
    assert found["of mpi4py"].reducer == pytest.approx(0.95) and found.required.reducer == "0.9: met"
    assert found.required.horovod == "0.9: missed"
    assert bench.verdicts(rows({"mpi4py": 1e-3, "horovod": 1e-3}, 1024)).empty
    assert "0.9: met" in bench.summary(table)


@pytest.mark.parametrize(("words", "said"), [(["--bytes", "7"], "try 4"), (["--inside"], "horovodrun -np 2 or more")])
def test_what_cannot_be_measured_is_refused_in_a_line(words: list[str], said: str) -> None:
    command = [sys.executable, "-m", "benchmarks.communication", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and said in done.stderr.splitlines()[-1]
