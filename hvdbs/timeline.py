"""What one traced window was on each rank, and what Horovod's own timeline says of its collectives.

Horovod 0.28.1 writes the timeline on rank 0 alone (``docs/timeline.rst``, ``horovod/common/timeline.cc``): for each
tensor a NEGOTIATE_* span, from the cycle in which rank 0's core learns of the first rank that has it to the one in
which all have, then the operation, with its parts nested in it. Timestamps are microseconds of the monotonic clock
since Horovod was started, and the file begins with that moment as microseconds since 1970.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Span = tuple[float, float]


@dataclass(frozen=True)
class Lap:
    """What a rank did from ``begin`` to ``end``, in seconds; of ``micro_batch``, by its index in the window."""

    name: str
    begin: float
    end: float
    micro_batch: int | None = None


@dataclass(frozen=True)
class Call:
    """One collective on one rank: ``begun`` when it was handed over, ``ended`` when its result was there, in seconds.

    ``operation``: allreduce, allgather or broadcast. ``sent_bytes``: what this rank handed over; ``result_bytes``: of
    what it got.
    """

    operation: str
    name: str
    sent_bytes: int
    result_bytes: int
    begun: float
    ended: float


@dataclass(frozen=True)
class Operation:
    """One collective as rank 0's core performed it, from ``begin`` to ``end`` in seconds, its ``parts`` by name."""

    name: str
    operation: str
    begin: float
    end: float
    parts: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True)
class Clock:
    """How far a rank's clock is ahead of rank 0's, within ``uncertainty``, in seconds."""

    ahead: float = 0.0
    uncertainty: float = 0.0


def aligned(own: Sequence[Span], first: Sequence[Span]) -> Clock:
    """The clock of a rank against rank 0's from meetings: when each of both entered and left, on its own clock.

    Nobody leaves a meeting that somebody has not entered yet. So if the rank's clock is d ahead, own entry - rank 0's
    leaving <= d <= own leaving - rank 0's entry, for every meeting. All that is assumed is that clocks run at one speed
    meanwhile; ``uncertainty`` is a bound, not a deviation.
    """
    lowest = max(mine[0] - theirs[1] for mine, theirs in zip(own, first, strict=True))
    highest = min(mine[1] - theirs[0] for mine, theirs in zip(own, first, strict=True))
    return Clock((lowest + highest) / 2, max(0.0, highest - lowest) / 2)


def operations(text: str, epoch: float) -> list[Operation]:
    """The operations of the timeline ``text``, in the order in which they began, on a clock that shows 0 ``epoch``
    seconds after 1970.

    What was under way when it began or ended is left out, and so is a last event that was cut off.
    """
    started = 0.0
    names: dict[int, str] = {}
    found: list[Operation] = []
    open_spans: dict[int, list[tuple[str, float, list[tuple[str, float, float]]]]] = {}
    for event in _events(text):
        place, details = event.get("pid", 0), event.get("args", {})
        if event["ph"] == "M":
            if "start_time_since_epoch_in_micros" in details:
                started = details["start_time_since_epoch_in_micros"] / 1e6 - epoch
            if "name" in details:
                names[place] = details["name"]
        elif event["ph"] == "B":
            open_spans.setdefault(place, []).append((event["name"], event["ts"], []))
        elif event["ph"] == "E" and open_spans.get(place):
            word, begin, parts = open_spans[place].pop()
            at, until = started + begin / 1e6, started + event["ts"] / 1e6
            if open_spans[place]:
                open_spans[place][-1][2].append((word, at, until))
            elif not word.startswith("NEGOTIATE_"):
                found.append(Operation(names[place].partition(".")[2], word.lower(), at, until, tuple(parts)))
    return sorted(found, key=lambda operation: operation.begin)


def _events(text: str) -> Iterable[dict[str, Any]]:
    try:
        return list(json.loads(text))
    except ValueError:
        ends = [match.start() + 1 for match in re.finditer(r"\},\s*\{", text)]
        return list(json.loads(text[: ends[-1]] + "]")) if ends else []
