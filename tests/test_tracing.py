"""Traced windows with threads as ranks and in a plain process: which they are, what they say, and that they change
nothing. Under Horovod: tests/jobs/test_traces.py."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import rig
import torch
import traces
from reference import Stage
from torch import nn

from hvdbs import train as entry
from hvdbs.comm.local import ThreadRank, ThreadWorld
from hvdbs.comm.traced import Traced
from hvdbs.config import Config, LoggingConfig
from hvdbs.errors import HvdbsError
from hvdbs.loop import train
from hvdbs.progress import Progress
from hvdbs.replicas import state_digest
from hvdbs.tracing import ChromeTracer, first_traced, writable

CPU = torch.device("cpu")
CONFIG = """
micro_batch: 6
device: cpu
threads: 1
data: {kind: synthetic, image_size: 8, resize: 8, train_samples: 72, val_samples: 12, threads: 1}
model: {name: resnet8, classes: 5, width: 4}
schedule:
  method: table
  stages: [{epochs: 2, global_batch: 12, lr: 0.1}, {epochs: 1, global_batch: 24, lr: 0.1}]
checkpoint: {every_minutes: 0}
logging: {every_steps: 5, tensorboard: false, trace_after: 4, trace_windows: 2}
"""


def logged(config: Config, after: int, windows: int) -> Config:
    return dataclasses.replace(config, logging=LoggingConfig(trace_after=after, trace_windows=windows))


def traced_threads(
    world_size: int,
    config: Config,
    path: Path,
    make: Callable[[ThreadRank], Traced],
    disturb: Callable[[nn.Module, Traced], None] = lambda model, comm: None,
) -> list[tuple[str, ChromeTracer]]:
    """What each rank ended with, and its tracer."""
    first = rig.built(rig.mlp)
    models = [copy.deepcopy(first) for _ in range(world_size)]

    def main(rank: ThreadRank) -> tuple[str, ChromeTracer]:
        comm, model = make(rank), models[rank.rank]
        disturb(model, comm)
        tracer = ChromeTracer(comm, CPU, path, config.logging)
        run = rig.assembled(comm, config, model, rig.memory(rig.FLAT), path.parent)
        train(dataclasses.replace(run, tracer=tracer), Progress(), None)
        return state_digest(model, run.replica.optimizer), tracer

    return ThreadWorld(world_size).run(main)


@pytest.mark.parametrize("world_size", [2, 3])
def test_tracing_changes_no_bit_and_every_rank_has_its_lanes(tmp_path: Path, world_size: int) -> None:
    """Ten updates in three stages, float64, micro-batches of 8: the state of an untraced run, exactly. Stages of 4, 3
    and 3 windows, of which 2 are traced each: the third and fourth, the second and third, the second and third."""
    config = logged(rig.settings(rig.SHORT_STAGES), 10, 2)
    models = [rig.built(rig.mlp) for _ in range(world_size)]

    def untraced(rank: ThreadRank) -> str:
        return rig.trained(rank, config, models[rank.rank], rig.memory(rig.FLAT), tmp_path).digest

    plain = ThreadWorld(world_size).run(untraced)
    path = tmp_path / "trace.json"
    assert [digest for digest, _ in traced_threads(world_size, config, path, Traced)] == plain
    trace = traces.parsed(path)
    spans = traces.lanes(trace)
    assert sorted(place for place in spans if place[1] == "compute") == [(r, "compute") for r in range(world_size)]
    for rank in range(world_size):
        windows = [e for e in spans[rank, "compute"] if e["cat"] == "window"]
        assert [e["args"]["step"] for e in windows] == [3, 4, 6, 7, 9, 10]
        assert [e["args"]["global_batch"] for e in windows] == [50, 50, 77, 77, 131, 131]
        for window in windows:
            laps = [e for e in spans[rank, "compute"] if e["cat"] == "compute"]
            own = [e for e in laps if e["args"]["step"] == window["args"]["step"]]
            n = -(-window["args"]["global_batch"] // 8)
            mine = [j for j in range(n) if j * world_size // n == rank]
            assert [e["args"]["micro_batch"] for e in own if e["name"] == "backward"] == mine
            assert [e["args"]["micro_batch"] for e in own if e["name"] == "forward"] == mine
            # They tile the window: nothing of it is without a name.
            assert sum(e["dur"] for e in own) == pytest.approx(window["dur"], abs=traces.EPSILON * len(own))
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"compute", "reductions"}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_by_a_known_time_shows_as_imbalance(tmp_path: Path, world_size: int, late: int) -> None:
    """On clocks that tick 1 us each time they are read, and 0.3 s in the backward pass of one rank: 0.3 (P - 1) / P in
    the first traced window. Micro-batches differ by one between ranks, which is some ticks: 1e-3."""
    ticks = [itertools.count() for _ in range(world_size)]
    added = [0.0] * world_size

    def make(rank: ThreadRank) -> Traced:
        return Traced(rank, lambda: next(ticks[rank.rank]) * 1e-6 + added[rank.rank])

    def disturb(model: nn.Module, comm: Traced) -> None:
        def sleep(_: torch.Tensor) -> None:
            if comm.rank == late and comm._calls is not None and not added[late]:
                added[late] = 0.3

        next(model.parameters()).register_post_accumulate_grad_hook(sleep)

    config = logged(rig.settings((Stage(300, 50, 0.05),)), 2, 1)
    ended = traced_threads(world_size, config, tmp_path / "trace.json", make, disturb)
    (seen,) = ended[0][1].measured
    assert seen.step == 3
    assert seen.imbalance_seconds == pytest.approx(0.3 * (world_size - 1) / world_size, abs=1e-3)
    assert seen.slowest == late
    assert f"rank {late} last in 1" in ended[0][1].summary()


def test_clocks_of_other_hosts_are_compared(tmp_path: Path) -> None:
    """Rank 1's host has a clock 5000 s ahead: found within the bound that is stated, and its lane lies beside rank 0's.
    Rank 2's host is rank 0's, whose clock needs no comparing."""

    def make(rank: ThreadRank) -> Traced:
        ahead = 5000.0 if rank.rank == 1 else 0.0
        return Traced(rank, lambda: time.perf_counter() + ahead, ("b", "boot 2") if ahead else ("a", "boot 1"))

    config = logged(rig.settings((Stage(300, 50, 0.05),)), 2, 2)
    ended = traced_threads(3, config, tmp_path / "trace.json", make)
    trace = traces.parsed(tmp_path / "trace.json")
    same, other, too = trace["otherData"]["clocks_in_seconds"]
    assert same == too == {"ahead": 0.0, "uncertainty": 0.0}
    assert 0 < other["uncertainty"] < 1
    assert abs(other["ahead"] - 5000) <= other["uncertainty"]
    spans = traces.lanes(trace)
    begun = [spans[rank, "compute"][0]["ts"] / 1e6 for rank in range(3)]
    assert abs(begun[1] - begun[0]) < 1 + other["uncertainty"]
    assert "clocks of hosts known to" in ended[0][1].summary()


@pytest.mark.parametrize(
    ("windows", "after", "traced", "first"),
    [(100, 10, 5, 10), (15, 10, 5, 10), (14, 10, 5, 9), (6, 10, 5, 1), (3, 10, 5, 1), (1, 10, 5, 1), (9, 1, 1, 1)],
)
def test_short_stages_are_traced_at_their_end(windows: int, after: int, traced: int, first: int) -> None:
    """The first window of a stage never is: it makes buffers."""
    assert first_traced(windows, LoggingConfig(trace_after=after, trace_windows=traced)) == first


def run(folder: Path, *options: str) -> pd.DataFrame:
    (folder / "c.yaml").write_text(CONFIG)
    out = folder / f"run-{len(options)}"
    assert entry.main(["--config", str(folder / "c.yaml"), "--out", str(out), *options]) == 0
    return pd.read_csv(out / "steps.csv")


def test_a_traced_window_has_a_row_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a plain process. 12 + 3 updates, rows every 5; updates 5 and 6 and, as the second stage is short, 14 and 15
    are traced. The rows add up to what those of the untraced run add up to."""
    plain, path = run(tmp_path), tmp_path / "t.json"
    traced = run(tmp_path, "--trace", str(path))
    assert plain.step.tolist() == [5, 10, 15]
    assert traced.step.tolist() == [4, 5, 6, 10, 13, 14, 15]
    columns = ["imbalance_seconds", "communication_seconds"]
    assert traced[traced[columns].notna().all(axis=1)].step.tolist() == [5, 6, 14, 15]
    assert traced[columns].isna().all(axis=1).sum() == 3
    assert plain[columns].isna().all().all()
    for column in ("collectives", "reduced_bytes"):
        assert traced[column].sum() == plain[column].sum()
        assert traced[traced.step == 6][column].item() * 5 == plain[plain.step == 5][column].item()
    kept = ["loss", "gradient_norm", "samples_seen"]
    assert (traced[traced.step.isin([5, 10, 15])][kept].to_numpy() == plain[kept].to_numpy()).all()
    summaries = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("run-*/summary.json"))]
    assert summaries[0]["parameter_digest"] == summaries[1]["parameter_digest"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("trace of 4 windows: communication 0.00 ms a window, imbalance 0.00 ms")
    assert last.endswith(f": {path}")


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    words = ["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run"), "--trace"]
    assert entry.main([*words, str(tmp_path / "none" / "t.json")]) == 2
    assert "lies in a folder that does not exist; mkdir -p" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(HvdbsError, match=f"--trace: {tmp_path} is a folder; for example {tmp_path}/trace.json"):
        writable(tmp_path)
    assert entry.main([*words, str(tmp_path / "t.json"), "--logging.trace_windows", "0"]) == 2
    assert "logging.trace_windows: 0 must be at least 1" in capsys.readouterr().err
