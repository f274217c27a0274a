"""Traced windows as a Chrome trace, for chrome://tracing and ui.perfetto.dev ("Trace Event Format").

Every rank is a process with two lanes: ``compute``, what it did, and ``reductions``, its collectives one after the
other as they were performed. Before that a collective waits, which several may do at a time: those spans are
asynchronous events, which viewers draw beside the lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdbs.timeline import Call, Clock, Lap, Operation

COMPUTE, REDUCTIONS = 1, 2  # lanes; viewers take thread 0 for the system's idle one

Event = dict[str, Any]


@dataclass(frozen=True)
class RankWindow:
    """What one rank saw of a window, on its own clock."""

    host: str
    clock: Clock
    laps: tuple[Lap, ...]
    calls: tuple[Call, ...]


def process(rank: int) -> int:
    """Viewers take process 0 for the system's."""
    return rank + 1


def headings(hosts: Sequence[str]) -> list[Event]:
    """The names of processes and lanes, by rank."""
    events = []
    for rank, host in enumerate(hosts):
        where = {"ph": "M", "pid": process(rank)}
        events.append({**where, "name": "process_name", "args": {"name": f"rank {rank} on {host}"}})
        events.append({**where, "name": "process_sort_index", "args": {"sort_index": rank}})
        events += _lane(rank, COMPUTE, "compute") + _lane(rank, REDUCTIONS, "reductions")
    return events


def _lane(rank: int, lane: int, name: str) -> list[Event]:
    where = {"ph": "M", "pid": process(rank), "tid": lane}
    return [
        {**where, "name": "thread_name", "args": {"name": name}},
        {**where, "name": "thread_sort_index", "args": {"sort_index": lane}},
    ]


def window_events(
    step: int, about: dict[str, Any], ranks: Sequence[RankWindow], performed: Iterable[Operation], zero: float
) -> list[Event]:
    """The events of update ``step``, with ``about`` at each rank's window; ``zero`` of the trace on rank 0's clock.

    Collectives that no operation was seen of are left out: there are none without Horovod.
    """
    known = {(operation.operation, operation.name): operation for operation in performed}
    last = _last_calls(ranks)
    events: list[Event] = []
    for rank, seen in enumerate(ranks):
        behind = zero + seen.clock.ahead
        own = {"step": step, "rank": rank}
        begin, end = seen.laps[0].begin, seen.laps[-1].end
        events.append(_span(rank, COMPUTE, "window", f"update {step}", begin - behind, end - behind, {**about, **own}))
        for lap in seen.laps:
            of = {} if lap.micro_batch is None else {"micro_batch": lap.micro_batch}
            since, until = lap.begin - behind, lap.end - behind
            events.append(_span(rank, COMPUTE, "compute", lap.name, since, until, {**own, **of}))
        ends: list[float] = []
        found = [(known.get((call.operation, call.name)), call) for call in seen.calls]
        pairs = [(operation, call) for operation, call in found if operation is not None]
        for operation, call in sorted(pairs, key=lambda pair: pair[0].begin):
            at, slowest = last[call.operation, call.name]
            begun, begin, end = call.begun - behind, operation.begin - zero, operation.end - zero
            ready = min(at - zero, begin)
            lane = _free(ends, begin, end)
            facts = {**own, **_facts(call), "handed_over": _micros(begun)}
            events.append(_span(rank, lane, "reduction", call.name, begin, end, facts))
            if rank == 0:
                parts = ((word, since - zero, until - zero) for word, since, until in operation.parts)
                events += (_span(rank, lane, "part", *part, own) for part in parts)
            events += _waiting(own, f"{call.name} waits for rank {slowest}", begun, ready)
            events += _waiting(own, f"{call.name} waits for its turn", max(begun, ready), begin)
        for place in range(1, len(ends)):
            events += _lane(rank, REDUCTIONS + place, f"reductions {place + 1}")
    return events


def _facts(call: Call) -> dict[str, Any]:
    reduced = {"allreduce": call.sent_bytes, "allgather": call.result_bytes}.get(call.operation, 0)
    return {"operation": call.operation, "sent_bytes": call.sent_bytes, "reduced_bytes": reduced}


def _last_calls(ranks: Sequence[RankWindow]) -> dict[tuple[str, str], tuple[float, int]]:
    """When the last rank handed each collective over, on rank 0's clock, and which one it was."""
    last: dict[tuple[str, str], tuple[float, int]] = {}
    for rank, seen in enumerate(ranks):
        for call in seen.calls:
            key = call.operation, call.name
            last[key] = max(last.get(key, (call.begun - seen.clock.ahead, rank)), (call.begun - seen.clock.ahead, rank))
    return last


def _free(ends: list[float], begin: float, end: float) -> int:
    """The first lane that is free at ``begin``; it is taken until ``end``. Only NCCL performs several at a time."""
    for place, until in enumerate(ends):
        if until <= begin:
            ends[place] = end
            return REDUCTIONS + place
    ends.append(end)
    return REDUCTIONS + len(ends) - 1


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _span(rank: int, lane: int, category: str, name: str, begin: float, end: float, details: Event) -> Event:
    at = _micros(begin)
    where = {"ph": "X", "pid": process(rank), "tid": lane, "cat": category, "name": name}
    return {**where, "ts": at, "dur": round(_micros(end) - at, 3), "args": details}


def _waiting(own: Event, name: str, begin: float, end: float) -> list[Event]:
    if _micros(begin) >= _micros(end):
        return []
    same = {"pid": process(own["rank"]), "tid": REDUCTIONS, "cat": "waiting", "name": name}
    same |= {"id": f"{own['step']}.{own['rank']}.{name}"}
    return [{**same, "ph": "b", "ts": _micros(begin), "args": own}, {**same, "ph": "e", "ts": _micros(end)}]
