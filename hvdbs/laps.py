"""Where the time of a traced window goes on one rank."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from hvdbs.timeline import Lap


class Laps:
    """Intervals one after the other, each named when it ends: ``laps("forward", 3)``.

    On a GPU they are those of its stream, in which work may still be queued when the host has gone on; nothing waits
    for it between ``begin`` and ``take``. Elsewhere they are those of ``clock``.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._names: list[tuple[str, int | None]] = []
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        self._names, self._times, self._events = [], [], []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._note()

    def __call__(self, name: str, micro_batch: int | None = None) -> None:
        self._names.append((name, micro_batch))
        self._note()

    def take(self) -> tuple[Lap, ...]:
        """The laps since ``begin``, in seconds of the clock."""
        times = self._times
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            first = self._events[0]
            times = [self._times[0] + first.elapsed_time(event) / 1e3 for event in self._events]
        spans = zip(self._names, times[:-1], times[1:], strict=True)
        return tuple(Lap(name, begin, end, micro_batch) for (name, micro_batch), begin, end in spans)

    def _note(self) -> None:
        self._times.append(self._clock())
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)


def no_lap(name: str, micro_batch: int | None = None) -> None:
    """In windows that are not traced."""
