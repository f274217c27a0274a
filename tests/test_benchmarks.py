"""The pure parts of the benchmarks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks import throughput
from benchmarks.measure import facts, ratio_interval, write


def test_the_interval_of_a_ratio_holds_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        drift = generator.lognormal(0, 0.5, size=25)  # of the machine, the same for both of a pair
        ours, theirs = (drift * generator.lognormal(mean, 0.1, size=25) for mean in (np.log(1.1), 0.0))
        _, low, high = ratio_interval(ours, theirs, resamples=500)
        hits += low <= 1.1 <= high
    assert 0.91 <= hits / 400 <= 0.99  # 95 % within four standard errors


def test_a_machine_that_drifts_does_not_change_the_ratio() -> None:
    drift = np.linspace(1, 3, 20)
    assert ratio_interval(2 * drift, drift) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("pair", [([1.0], [1.0, 2.0]), ([], [])])
def test_only_pairs_are_compared(pair: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="pairs"):
        ratio_interval(*pair)


def test_rows_carry_what_a_figure_cannot_be_read_without_and_can_be_added_to(tmp_path: Path) -> None:
    about = facts(2, "horovod-mpi")
    assert {"cpu", "cores", "torch", "horovod", "commit", "command", "date", "threads"} <= about.keys()
    write(pd.DataFrame({"seconds": [1.0]}), tmp_path / "a" / "b.csv", about)
    write(pd.DataFrame({"seconds": [2.0], "world_size": [3]}), tmp_path / "a" / "b.csv", about, append=True)
    table = pd.read_csv(tmp_path / "a" / "b.csv")
    assert list(table.seconds) == [1.0, 2.0] and list(table.world_size) == [2, 3]


def test_a_verdict_compares_rates_of_the_same_round() -> None:
    rows = [
        {
            "model": "m",
            "world_size": 1,
            "accumulation_steps": 4,
            "contender": name,
            "round": n,
            "samples_per_second": rate,
        }
        for n, speed in enumerate((100.0, 50.0, 200.0))
        for name, rate in (("hvdbs", speed), ("bare", speed / 1.25))
    ]
    (verdict,) = throughput.verdicts(pd.DataFrame(rows)).to_dict("records")
    assert verdict["against"] == "bare" and verdict["ratio"] == verdict["low"] == pytest.approx(1.25)
