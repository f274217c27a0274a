"""How much of the communication was hidden behind backward passes: read from the Chrome trace of ``hvdbs.chrome``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdbs.timeline import Span


@dataclass(frozen=True)
class Overlap:
    """One traced window, in seconds.

    ``communication_seconds``: while at least one of its collectives was being performed, from when all ranks had handed
    it over and its turn had come until its end, as rank 0's core saw it. ``hidden_seconds``: of these, while a rank was
    still in a backward pass; the mean over ranks. ``imbalance_seconds``: how long a rank that has handed over all its
    gradients waits until the last rank has; the mean over ranks, so with one of P ranks late by d it is d (P - 1) / P.
    ``slowest``: that last rank. ``collectives`` and ``reduced_bytes``: rank 0's, as in steps.csv.
    """

    step: int
    communication_seconds: float
    hidden_seconds: float
    imbalance_seconds: float
    slowest: int
    collectives: int
    reduced_bytes: int


def union(spans: Iterable[Span]) -> list[Span]:
    """The same times as ``spans``, in order and without overlap."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def common(some: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The times that lie both in ``some`` and in ``others``."""
    pairs = ((max(a, c), min(b, d)) for a, b in union(some) for c, d in union(others))
    return [(begin, end) for begin, end in pairs if begin < end]


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def read(trace: Mapping[str, Any]) -> list[Overlap]:
    """Every window of ``trace``, a parsed file, in the order of steps."""
    by_step: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in ("compute", "reduction"):
            by_step[event["args"]["step"]].append(event)
    return [_window(step, events) for step, events in sorted(by_step.items())]


def _window(step: int, events: Iterable[Mapping[str, Any]]) -> Overlap:
    backward: dict[int, list[Span]] = defaultdict(list)
    done: dict[int, float] = {}
    moved: list[Span] = []
    collectives = reduced_bytes = 0
    for event in events:
        rank, span = event["args"]["rank"], (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        if event["cat"] == "reduction":
            if rank == 0:
                moved.append(span)
                collectives += 1
                reduced_bytes += event["args"]["reduced_bytes"]
        elif event["name"] == "wait":
            done[rank] = span[0]
        elif event["name"] == "backward":
            backward[rank].append(span)
    last = max(done.values())
    return Overlap(
        step,
        length(union(moved)),
        sum(length(common(moved, backward[rank])) for rank in done) / len(done),
        sum(last - at for at in done.values()) / len(done),
        max(done, key=lambda rank: done[rank]),
        collectives,
        reduced_bytes,
    )
