"""The pure parts of the benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from benchmarks import loader, photographs, theory, throughput
from benchmarks.measure import facts, ratio_interval, write
from benchmarks.sources import OURS, REFERENCE, SOURCES, Batches, Setting

ROOT = Path(__file__).parent.parent


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


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 photographs to train and 10 to validate on, four and one of each original."""
    root = tmp_path_factory.mktemp("photographs")
    photographs.make(root, 40, 10)
    return root


def test_photographs_are_jpegs_of_the_asked_size_all_different(few: Path) -> None:
    files = sorted(few.glob("*/*/*.jpg"))
    data = {path.read_bytes() for path in files}
    assert len(files) == len(data) == 50
    assert all(80_000 <= len(one) <= 110_000 for one in data)
    for path in files:
        with Image.open(path) as image:
            assert image.format == "JPEG" and image.mode == "RGB" and min(image.size) >= 200
    assert not list(few.rglob("*.partial"))


def test_a_corpus_is_taken_up_where_it_was_left(few: Path) -> None:
    """Law: a file is a function of its number; one that is gone comes back the same, and the others are not touched."""
    lost, *others = sorted(few.glob("train/*/*.jpg"))
    data, times = lost.read_bytes(), [path.stat().st_mtime_ns for path in others]
    lost.unlink()
    corpus = photographs.make(few, 40, 10)
    assert lost.read_bytes() == data
    assert [path.stat().st_mtime_ns for path in others] == times
    assert len(corpus.sizes) == 40 and corpus.described().startswith("40 photographs of ")


# By torchvision 0.29, of its own decoders; they are compared with for as long as they are there.
@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities of TorchVision are deprecated")
@pytest.mark.parametrize("name", SOURCES)
def test_each_source_gives_every_image_once_an_epoch_and_another_order_in_the_next(few: Path, name: str) -> None:
    if "DALI" in name:
        pytest.importorskip("nvidia.dali")
    batches = SOURCES[name](Setting(few, 8, 32, 2, 2, seed=1))
    taken = [next(batches) for _ in range(2 * 40 // 8)]
    for images, labels in taken:
        assert images.dtype == torch.uint8 and labels.dtype == torch.int64
        assert images.shape in ((8, 32, 32, 3), (8, 3, 32, 32)) and labels.shape == (8,)
    first, second = (torch.cat([labels for _, labels in half]).tolist() for half in (taken[:5], taken[5:]))
    assert Counter(first) == Counter(second) == dict.fromkeys(range(10), 4)
    assert first != second


def test_a_spell_counts_whole_batches_and_what_they_took() -> None:
    def slow() -> Batches:
        while True:
            time.sleep(0.02)
            yield torch.zeros(3), torch.zeros(3)

    taken = loader.spell(slow(), 0.0, 5)
    assert taken.images == 15 and taken.seconds >= 0.1 and taken.cpu_seconds < taken.seconds
    longer = loader.spell(slow(), 0.3, 1)
    assert longer.seconds >= 0.3 and 3 <= longer.images <= 3 * longer.seconds / 0.02


def test_memory_is_a_process_s_own_and_counts_shared_pages_once() -> None:
    text = "55d0-7ffe ---p 0 00:00 0  [rollup]\nRss:  900 kB\nPss_Anon:  100 kB\nPss_File:  700 kB\nPss_Shmem:  20 kB\n"
    assert loader.memory(text) == 120 * 1024

    # A process of its own forks here: this one has threads, which a fork would leave behind with their locks.
    program = """
import os
from pathlib import Path
from benchmarks.loader import memory
def own():
    return memory(Path("/proc/self/smaps_rollup").read_text())
before = own()
held = b"x" * 200_000_000
alone = own()
read, write = os.pipe()
up, down = os.pipe()
if (child := os.fork()) == 0:
    os.write(write, str(own()).encode())
    os.read(up, 1)
    os._exit(0)
both = int(os.read(read, 100)) + own()
os.write(down, b"x")
os.waitpid(child, 0)
print(alone - before, both - alone)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=90, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    held, more = map(int, done.stdout.split())
    assert held == pytest.approx(200_000_000, rel=0.05)
    assert abs(more) < 50_000_000


def rates(ours: float, theirs: float) -> pd.DataFrame:
    """Ten rounds on a machine that drifts."""
    rows = []
    for number, drift in enumerate(np.linspace(1, 2, 10)):
        for name, rate in ((OURS, ours), (REFERENCE, theirs)):
            rate = rate * drift
            row = {"source": name, "round": number, "images_per_second": rate, "images_per_cpu_second": rate / 2}
            rows.append(row | {"images_per_second_per_core": rate / 2, "peak_memory_bytes": 1e6 * number})
    return pd.DataFrame(rows)


def test_the_loader_s_summary_is_of_pairs_in_the_order_of_the_sources() -> None:
    table = loader.summary(rates(900.0, 1000.0))
    assert list(table.source) == [OURS, REFERENCE]
    assert list(table["ours/theirs"]) == pytest.approx([1.0, 0.9])
    assert list(table.low) == pytest.approx(list(table.high))
    assert list(table.MB) == [9.0, 9.0]


@pytest.mark.parametrize(
    ("interval", "answer"),
    [((0.95, 0.9, 0.99), "met"), ((0.95, 0.89, 0.99), "not decided"), ((0.85, 0.8, 0.89), "missed")],
)
def test_the_loader_s_verdict_is_on_the_whole_interval(interval: tuple[float, float, float], answer: str) -> None:
    assert answer in loader.verdict(*interval).split(": ")[-1]


def test_the_best_batch_is_the_least_point_of_the_bound() -> None:
    """On the bound itself, a b + c / b, whose minimum is sqrt(c / a)."""
    means = [0.002 * b + 50 / b for b in theory.BATCHES]
    assert theory.best_batch(theory.BATCHES, means) == pytest.approx((50 / 0.002) ** 0.5, rel=0.01)


def test_the_slope_is_that_of_the_theory_where_gaps_are_the_bound() -> None:
    rows = [
        {"distance": d, "global_batch": b, "gap": d**2 * b / (4 * 0.25 * 65536) + 0.25 * 16 / (4 * b)}
        for d in theory.DISTANCES
        for b in theory.BATCHES
    ]
    slope, table = theory.slope(pd.DataFrame(rows))
    assert slope == pytest.approx(-1, abs=0.01)
    assert list(table.b_best) == pytest.approx(list(table.b_star), rel=0.03)


def test_the_stages_that_were_measured_are_those_of_the_exact_second_moments() -> None:
    """The committed results: each mean gap within four standard errors of what the recursion says, slope -1 +- 0.2."""
    rows = pd.read_csv(Path(__file__).parent.parent / "benchmarks" / "results" / "theory.csv")
    assert theory.slope(rows[rows.part == "sweep"])[0] == pytest.approx(-1, abs=0.2)
    for (method, stage), group in rows[rows.part == "stages"].groupby(["method", "stage"]):
        expected = theory.second_moments(str(method))[int(stage)]
        assert group.expected_gap.iloc[0] == pytest.approx(expected, rel=1e-12)
        assert abs(group.gap.mean() - expected) < 4 * group.gap.sem()


def test_a_staged_run_logs_the_exact_gap_before_every_update_and_at_its_end() -> None:
    log = theory.gaps({"method": "constant", "samples": 640, "global_batch": 64, "lr": 0.25}, 3.0, 0, 640)
    assert list(log.step) == list(range(1, 12)) and log.gap.iloc[0] == pytest.approx(4.5)
    assert log.gap.iloc[-1] < log.gap.iloc[0] / 10
