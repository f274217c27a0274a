"""What a rank is doing and since when: written by its training thread, read by its watchdog. No locks, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, TypeVar

T = TypeVar("T")

Doing = Literal["start", "window", "evaluation", "checkpoint", "end"]

STRETCH = 3.0  # of the limit where things happen once: reading a file list, compiling, warming up caches
START_SECONDS = 120.0  # at least, for a start: imports alone take that on a busy file system
PATIENCE = 10.0  # times what such a thing has taken so far


@dataclass
class Pulse:
    """``beats`` counts what this rank gets done: a batch received, an answer of the other ranks, something new begun.

    ``step``: updates made so far; ``samples``: of the window under way. ``data`` and ``peers``: whether it waits for a
    batch, and in which exchange with the other ranks it waits (None: in none).
    """

    beats: int = 0
    step: int = 0
    samples: int = 0
    doing: Doing = "start"
    since: float = field(default_factory=monotonic)
    data: bool = False
    peers: str | None = None
    seconds_per_sample: float | None = None
    longest: dict[str, float] = field(default_factory=dict)

    def enter(self, doing: Doing, step: int, samples: int = 0) -> None:
        """What was done is done, and ``doing`` begins at update ``step``; a window has so many ``samples``."""
        now = monotonic()
        spent = now - self.since
        self.longest[self.doing] = max(spent, self.longest.get(self.doing, 0.0))
        if self.doing == "window":
            self.seconds_per_sample = max(spent / self.samples, self.seconds_per_sample or 0.0)
        self.doing, self.step, self.samples, self.since = doing, step, samples, now
        self.beats += 1

    def batches(self, supply: Iterator[T]) -> Iterator[T]:
        """``supply``, each wait for it noted."""
        while True:
            self.data = True
            item = next(supply, None)
            self.data = False
            self.beats += 1
            if item is None:
                return
            yield item

    @property
    def expected_seconds(self) -> float | None:
        """How long what is under way may take, going by what this rank has seen so far; None before it has."""
        if self.doing == "window":
            return None if self.seconds_per_sample is None else self.seconds_per_sample * self.samples
        return self.longest.get(self.doing)

    def limit_seconds(self, timeout: float) -> float:
        """Without a beat for so long, this rank is stuck.

        ``timeout`` and ten times what this has taken before; three times ``timeout`` where it has not happened yet, in
        evaluations and checkpoints. Who waits for others waits a little longer, so that whoever holds them up speaks
        first.
        """
        expected = self.expected_seconds
        calm = self.doing == "window" and expected is not None
        limit = timeout * (1.0 if calm else STRETCH) + PATIENCE * (expected or 0.0)
        if self.doing == "start":
            limit = max(limit, START_SECONDS)
        return limit if self.peers is None else 1.1 * limit + 2.0

    @property
    def described(self) -> str:
        """In words, at an update and for what it waits."""
        where = f"in the {self.doing}" if self.doing != "start" else "at the start"
        what = f"of {self.samples} samples " if self.doing == "window" else ""
        if self.peers is not None:
            waits = f"waits for the other ranks ({self.peers})"
        else:
            waits = "waits for data" if self.data else "computes"
        return f"after update {self.step}, {where} {what}".rstrip() + f": {waits}"
