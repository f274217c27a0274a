"""What every trace must be, whoever wrote it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
EPSILON = 0.01  # microseconds; the file has three decimals


def parsed(path: Path) -> dict[str, Any]:
    """The trace at ``path``: JSON by the letter, in which no number is NaN or infinite."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    trace: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return trace


def lanes(trace: dict[str, Any]) -> dict[tuple[int, str], list[Event]]:
    """The spans of each lane by rank and the lane's name, in order; each is checked to lie wholly within or wholly
    beside every other of its lane."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    spans: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            assert event["args"]["rank"] == event["pid"] - 1, event
            spans[event["pid"] - 1, names[event["pid"], event["tid"]]].append(event)
    for own in spans.values():
        own.sort(key=lambda e: (e["ts"], -e["dur"]))
        around: list[float] = []
        for event in own:
            while around and around[-1] <= event["ts"] + EPSILON:
                around.pop()
            end = event["ts"] + event["dur"]
            assert not around or end <= around[-1] + EPSILON, f"{event} overlaps what is around it"
            around.append(end)
    return spans


def waits(trace: dict[str, Any]) -> list[tuple[str, float, float]]:
    """The asynchronous spans: name, begin and end in microseconds; each has both."""
    begun = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "b"}
    ended = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert len(begun) == sum(e["ph"] == "b" for e in trace["traceEvents"])
    return [(e["name"], e["ts"], ended[name]["ts"]) for name, e in begun.items()]
