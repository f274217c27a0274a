"""Horovod's timeline, the merge into a Chrome trace and what is read from one: on traces made by hand."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import traces

from hvdbs import chrome, overlap, timeline
from hvdbs.chrome import RankWindow
from hvdbs.timeline import Call, Clock, Lap, Operation, Span

# As Horovod 0.28.1 writes it under MPI: an end without a beginning (of what was under way when it began to write), a
# negotiation with a tick for each rank, an allreduce, a gathering with two parts, and one that was still under way.
EVENTS = """[
{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1700000000000000}},
{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.meeting"}},
{"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
{"ph": "E", "ts": 900, "pid": 1},
{"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "allreduce.gradients.0"}},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 1000, "pid": 2},
{"ph": "X", "name": "0", "ts": 1000, "pid": 2, "dur": 0},
{"ph": "E", "ts": 1500, "pid": 2},{"ph": "B", "name": "ALLREDUCE", "ts": 1600, "pid": 2},
{"ph": "B", "name": "MPI_ALLREDUCE", "ts": 1610, "pid": 2},{"ph": "E", "ts": 1890, "pid": 2},
{"ph": "E", "ts": 1900, "pid": 2, "args": {"dtype": "float32", "shape": "[10]"}},
{"name": "process_name", "ph": "M", "pid": 3, "args": {"name": "allgather.factors.layers.0"}},
{"ph": "B", "name": "ALLGATHER", "ts": 2000, "pid": 3},{"ph": "B", "name": "ALLOCATE_OUTPUT", "ts": 2001, "pid": 3},
{"ph": "E", "ts": 2010, "pid": 3},{"ph": "B", "name": "MPI_ALLGATHER", "ts": 2010, "pid": 3},
{"ph": "E", "ts": 2400, "pid": 3},{"ph": "E", "ts": 2401, "pid": 3},
{"ph": "B", "name": "ALLREDUCE", "ts": 2500, "pid": 2}]"""


def test_operations_are_read_from_horovods_timeline() -> None:
    """On a clock that showed 0 at 1700000000 - 100 s after 1970, so that Horovod's began at 100."""
    first, second = timeline.operations(EVENTS, 1700000000 - 100)
    assert (first.name, first.operation) == ("gradients.0", "allreduce")
    assert (first.begin, first.end) == pytest.approx((100.0016, 100.0019), abs=1e-9)
    assert [part[0] for part in first.parts] == ["MPI_ALLREDUCE"]
    assert (second.name, second.operation) == ("factors.layers.0", "allgather")
    assert [part[0] for part in second.parts] == ["ALLOCATE_OUTPUT", "MPI_ALLGATHER"]
    assert second.parts[1][1:] == pytest.approx((100.00201, 100.0024), abs=1e-9)


def test_a_timeline_that_was_cut_off_gives_what_is_whole() -> None:
    """At every length: never an error, never an operation more; all of them once their ends are there."""
    whole = timeline.operations(EVENTS, 0.0)
    counts = []
    for length in range(len(EVENTS)):
        found = timeline.operations(EVENTS[:length], 0.0)
        assert found == whole[: len(found)]
        counts.append(len(found))
    assert counts == sorted(counts)
    assert counts[-1] == 2


@pytest.mark.parametrize("seed", range(20))
def test_clocks_are_known_within_their_uncertainty(seed: int) -> None:
    """A clock that is anything up to an hour off, meetings of any length in which ranks come and go as they like, but
    none goes before all have come."""
    draw = random.Random(seed)
    ahead = draw.uniform(-3600, 3600)
    own: list[Span] = []
    first: list[Span] = []
    at = 0.0
    for _ in range(8):
        came = [at + draw.uniform(0, 0.01), at + draw.uniform(0, 0.01)]
        left = [max(came) + draw.uniform(0, 0.003), max(came) + draw.uniform(0, 0.003)]
        first.append((came[0], left[0]))
        own.append((came[1] + ahead, left[1] + ahead))
        at = max(left)
    clock = timeline.aligned(own, first)
    assert abs(clock.ahead - ahead) <= clock.uncertainty + 1e-9
    assert clock.uncertainty < 0.013


def test_meetings_bound_a_clock_from_both_sides() -> None:
    """By hand: where the rank waited, it can be behind by 10 and ahead by 1; where rank 0 did, the other way around."""
    clock = timeline.aligned([(100, 110), (129, 130)], [(9, 10), (20, 30)])
    assert clock == Clock(100, 1)


def span(rank: int, category: str, name: str, begin: float, end: float, step: int = 7) -> dict[str, Any]:
    """``begin`` and ``end`` in milliseconds."""
    details = {"step": step, "rank": rank, "reduced_bytes": 100}
    at = {"ts": begin * 1e3, "dur": (end - begin) * 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": rank + 1, "tid": 1, "args": details, **at}


def test_what_was_hidden_is_what_lies_behind_backward() -> None:
    """By hand, in ms. Rank 0: backward 10-40 and 60-100; rank 1: 0-60. Moving: 30-50, 90-130, 120-140, together 70.
    Hidden: 10 + 10 on rank 0, 20 on rank 1; the mean is 20. Rank 1 has handed over all at 60, rank 0 at 100."""
    events = [
        span(0, "compute", "backward", 10, 40),
        span(0, "compute", "forward", 40, 60),
        span(0, "compute", "backward", 60, 100),
        span(0, "compute", "wait", 100, 140),
        span(1, "compute", "backward", 0, 60),
        span(1, "compute", "wait", 60, 141),
        span(0, "reduction", "a", 30, 50),
        span(0, "reduction", "b", 90, 130),
        span(0, "reduction", "c", 120, 140),
        span(0, "part", "MPI_ALLREDUCE", 120, 140),
        span(1, "reduction", "a", 30, 50),
        span(0, "compute", "wait", 200, 201, step=8),
        span(1, "compute", "wait", 204, 205, step=8),
    ]
    first, second = overlap.read({"traceEvents": events})
    assert (first.step, first.slowest, first.collectives, first.reduced_bytes) == (7, 0, 3, 300)
    seconds = (first.communication_seconds, first.hidden_seconds, first.imbalance_seconds)
    assert seconds == pytest.approx((0.07, 0.02, 0.02), abs=1e-12)
    assert (second.step, second.slowest, second.communication_seconds, second.hidden_seconds) == (8, 1, 0, 0)
    assert second.imbalance_seconds == pytest.approx(0.002)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("late", [0, 1])
def test_one_late_rank_costs_its_delay_times_the_share_of_the_others(world_size: int, late: int) -> None:
    """d (P - 1) / P, whoever is late, rank 0 or another."""
    events = [span(r, "compute", "wait", 10 + 6 * (r == late), 20) for r in range(world_size)]
    (seen,) = overlap.read({"traceEvents": events})
    assert seen.imbalance_seconds == pytest.approx(0.006 * (world_size - 1) / world_size)
    assert seen.slowest == late


def two_ranks(ahead: float) -> tuple[list[RankWindow], list[Operation]]:
    """Rank 1, whose clock is ``ahead``, is 20 ms late with b; a and b are performed at 30-50 and 70-90 ms, c, as NCCL
    does, in part beside b."""
    windows = []
    for rank in range(2):
        zero, late = rank * ahead, 0.02 * rank
        laps = (
            Lap("data", zero, zero + 0.01, 0),
            Lap("backward", zero + 0.01, zero + 0.04 + late, 0),
            Lap("wait", zero + 0.04 + late, zero + 0.1),
            Lap("update", zero + 0.1, zero + 0.11),
        )
        calls = (
            Call("allreduce", "a", 400, 400, zero + 0.02, zero + 0.055),
            Call("allgather", "b", 30, 60, zero + 0.04 + late, zero + 0.095),
            Call("broadcast", "c", 8, 8, zero + 0.04 + late, zero + 0.099),
            Call("allreduce", "unseen", 8, 8, zero + 0.04, zero + 0.1),
        )
        windows.append(RankWindow(f"host{rank}", Clock(zero, 1e-3 * rank), laps, calls))
    performed = [
        Operation("a", "allreduce", 0.03, 0.05, (("MPI_ALLREDUCE", 0.031, 0.05),)),
        Operation("b", "allgather", 0.07, 0.09),
        Operation("c", "broadcast", 0.08, 0.095),
        Operation("meeting", "allreduce", -0.01, -0.005),
    ]
    return windows, performed


@pytest.mark.parametrize("ahead", [0.0, 1234.5])
def test_ranks_are_merged_onto_one_clock(ahead: float) -> None:
    windows, performed = two_ranks(ahead)
    events = chrome.headings(["host0", "host1"]) + chrome.window_events(7, {"stage": 3}, windows, performed, 0.0)
    trace = json.loads(json.dumps({"traceEvents": events}))
    spans = traces.lanes(trace)
    named = {place: [e["name"] for e in own] for place, own in spans.items() if place[1] != "reductions"}
    assert named[0, "compute"] == named[1, "compute"] == ["update 7", "data", "backward", "wait", "update"]
    assert [e["name"] for e in spans[0, "reductions"]] == ["a", "MPI_ALLREDUCE", "b"]
    assert [e["name"] for e in spans[1, "reductions"]] == ["a", "b"]
    assert [e["name"] for e in spans[0, "reductions 2"]] == [e["name"] for e in spans[1, "reductions 2"]] == ["c"]
    begin = {e["name"]: e["ts"] for e in spans[1, "compute"]}
    assert begin == pytest.approx({"update 7": 0, "data": 0, "backward": 10e3, "wait": 60e3, "update": 100e3}, abs=0.01)
    expected = [
        ("a waits for its turn", 20e3, 30e3),  # on both ranks, who were equally early
        ("a waits for its turn", 20e3, 30e3),
        ("b waits for its turn", 60e3, 70e3),
        ("b waits for its turn", 60e3, 70e3),
        ("b waits for rank 1", 40e3, 60e3),
        ("c waits for its turn", 60e3, 80e3),
        ("c waits for its turn", 60e3, 80e3),
        ("c waits for rank 1", 40e3, 60e3),
    ]
    for got, wanted in zip(sorted(traces.waits(trace)), expected, strict=True):
        assert got[0] == wanted[0]
        assert got[1:] == pytest.approx(wanted[1:], abs=0.01)
    (seen,) = overlap.read(trace)
    assert (seen.collectives, seen.reduced_bytes, seen.slowest) == (3, 400 + 60, 1)
    seconds = (seen.communication_seconds, seen.hidden_seconds, seen.imbalance_seconds)
    assert seconds == pytest.approx((0.02 + 0.025, (0.01 + 0.02) / 2, 0.01), abs=1e-9)
