"""Traces of real jobs: Horovod's own timeline, merged, under MPI and Gloo; they change no bit of the training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import traces
from launching import Job, Run, end_of, rows, write_config

from hvdbs import overlap

pytestmark = pytest.mark.timeout(600)  # each job has a shorter limit of its own

DELAY = 0.3  # seconds
LATE = f"""
import os, time
from torch import nn
import hvdbs.step
class Late(hvdbs.step.Replica):
    def run(self, *words, **more):
        if self.comm.rank == 1 and not hasattr(self, "late"):
            self.late = self.model.register_forward_pre_hook(lambda *_: time.sleep({DELAY}))
        return super().run(*words, **more)
hvdbs.step.Replica = Late
"""


def traced_config(folder: Path, **changes: Any) -> Path:
    """Several buckets, a layer whose factors are exchanged, clipping: allreduces, an allgather and a broadcast."""
    return write_config(
        folder / "traced.yaml",
        communication={"bucket_bytes": 4000, "scheme": "factors"},
        optimizer={"clip_norm": 0.5},
        logging={"trace_after": 4, "trace_windows": 3},
        **changes,
    )


@pytest.fixture(scope="module")
def untraced(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("untraced")
    with Job("mpi", 2, traced_config(folder), folder / "run") as job:
        end_of(job)
    return Run(folder / "run")


@pytest.mark.parametrize("kind", ["mpi", "gloo"])
def test_a_trace_has_what_ranks_did_and_changes_no_bit(
    start: Callable[..., Job], untraced: Run, tmp_path: Path, kind: str
) -> None:
    """65 updates in three stages at np 2, the last three of each traced: parameters, buffers and momentum are those of
    the untraced run under MPI, bit for bit; every collective of a traced window is there once, with its bytes."""
    path, out = tmp_path / "trace.json", tmp_path / "run"
    job = start(kind, 2, traced_config(tmp_path), out, "--trace", str(path))
    end_of(job)
    run = Run(out)
    for name, tensor in untraced.tensors.items():
        assert torch.equal(run.tensors[name], tensor), name
    for name in ("parameter_digest", "collectives", "reduced_bytes"):
        assert run.summary[name] == untraced.summary[name]

    trace = traces.parsed(path)
    spans = traces.lanes(trace)
    assert set(spans) == {(rank, lane) for rank in range(2) for lane in ("compute", "reductions")}
    traced = [row for row in rows(out, "steps.csv") if row["communication_seconds"]]
    assert len(traced) == 9
    seen = overlap.read(trace)
    assert [window.step for window in seen] == [int(row["step"]) for row in traced]
    for window, row in zip(seen, traced, strict=True):
        assert window.collectives == int(row["collectives"])
        assert window.reduced_bytes == int(row["reduced_bytes"])
        assert window.communication_seconds == float(row["communication_seconds"]) > 0
        assert window.imbalance_seconds == float(row["imbalance_seconds"]) >= 0
        assert 0 <= window.hidden_seconds <= window.communication_seconds
        for rank in range(2):
            own = [e for e in spans[rank, "reductions"] if e["args"]["step"] == window.step and e["cat"] == "reduction"]
            names = [e["name"] for e in own]
            assert sorted(names) == sorted({e["name"] for e in own})
            assert {"carry", "factors.fc", "clip"} <= set(names)
            assert sum(name.startswith("gradients.") for name in names) == len(names) - 3 > 2
            assert len(names) == window.collectives
            laps = {e["name"]: e for e in spans[rank, "compute"] if e["args"]["step"] == window.step}
            if rank == 0:  # the two clocks of rank 0, Horovod's and ours, are one: within what its microseconds cut off
                wait = laps["wait"]
                summed = [e for e in own if e["name"] != "clip"]
                assert max(e["ts"] + e["dur"] for e in summed) <= wait["ts"] + wait["dur"] + 2
                assert all(e["args"]["handed_over"] <= e["ts"] + 2 for e in own)
    (line,) = [line for line in job.stdout.splitlines() if "trace of 9 windows: communication" in line]
    assert "% of it behind backward" in line and line.endswith(f": {path}")
    parts = {e["name"] for e in spans[0, "reductions"] if e["cat"] == "part"}
    assert f"{kind.upper()}_ALLREDUCE" in parts


def test_a_late_rank_shows_in_the_trace(start: Callable[..., Job], tmp_path: Path) -> None:
    """np 3, 0.3 s of sleep in each forward of rank 1, one micro-batch for each rank: 0.2 s of imbalance a window. A
    machine whose cores are shared delays ranks as well: the median of six windows, within 40 %."""
    stages = [{"samples": 240, "global_batch": 24, "lr": 0.01}]
    config = traced_config(tmp_path, schedule={"stages": stages}, data={"train_samples": 240})
    path = tmp_path / "trace.json"
    job = start("mpi", 3, config, tmp_path / "run", "--trace", str(path), "--logging.trace_windows", "6", before=LATE)
    end_of(job)
    seen = overlap.read(traces.parsed(path))
    assert len(seen) == 6
    assert median(window.imbalance_seconds for window in seen) == pytest.approx(DELAY * 2 / 3, rel=0.4)
    assert [window.slowest for window in seen].count(1) >= 5
    # The carry goes ahead of the last backward; that it waits for rank 1 can be seen.
    waits = [end - begin for name, begin, end in traces.waits(traces.parsed(path)) if name == "carry waits for rank 1"]
    assert median(waits) / 1e6 == pytest.approx(DELAY, rel=0.4)


def test_what_horovods_autotune_does_is_thrown_away(start: Callable[..., Job], untraced: Run, tmp_path: Path) -> None:
    """A search of a few points at np 2, where a sum has one order only, however tensors are grouped: the training
    that follows is that of the run without, bit for bit, and what was found is written down."""
    short = {"STEPS_PER_SAMPLE": "1", "WARMUP_SAMPLES": "1", "BAYES_OPT_MAX_SAMPLES": "3"}
    variables = {f"HOROVOD_AUTOTUNE_{name}": value for name, value in short.items()}
    words = ["--communication.autotune", "true", "--deterministic", "false"]
    job = start("mpi", 2, traced_config(tmp_path), tmp_path / "run", *words, env=variables)
    end_of(job)
    run = Run(tmp_path / "run")
    for name, tensor in untraced.tensors.items():
        assert torch.equal(run.tensors[name], tensor), name
    for name in ("parameter_digest", "steps", "samples_seen", "collectives", "reduced_bytes"):
        assert run.summary[name] == untraced.summary[name]
    found = json.loads((tmp_path / "run" / "environment.json").read_text())["horovod_autotune"]
    assert 1 <= float(found["cycle_time_ms"]) <= 100
    assert 0 <= float(found["tensor_fusion_threshold"]) <= 64
    assert "updates: hierarchical_allreduce" in job.stdout
