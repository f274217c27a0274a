"""Which windows are traced, and what is made of them: a Chrome trace of all ranks, and two columns of steps.csv."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from hvdbs import __version__, chrome, overlap, timeline
from hvdbs.chrome import RankWindow
from hvdbs.comm.traced import Traced
from hvdbs.config import LoggingConfig
from hvdbs.errors import HvdbsError, refusal
from hvdbs.files import write_atomically
from hvdbs.laps import Laps, no_lap
from hvdbs.overlap import Overlap
from hvdbs.progress import Progress
from hvdbs.schedule import Schedule
from hvdbs.step import Applied, Replica
from hvdbs.timeline import Call, Clock, Lap, Operation

MEETINGS = 8  # before each traced window, to compare clocks; each takes a cycle or two of Horovod's


class Tracer(Protocol):
    """What the loop calls around each window."""

    def begin(self, replica: Replica, schedule: Schedule, stage: int, progress: Progress) -> None:
        """Collective, where the window from ``progress`` on is to be traced."""
        ...

    def end(self, replica: Replica, applied: Applied) -> Applied:
        """Collective, in a traced window: ``applied``, on rank 0 with what only a trace can tell."""
        ...


class Untraced:
    """Nothing is traced: no collective, no clock."""

    def begin(self, replica: Replica, schedule: Schedule, stage: int, progress: Progress) -> None:
        return None

    def end(self, replica: Replica, applied: Applied) -> Applied:
        return applied


def writable(path: Path) -> None:
    """Raises HvdbsError unless a trace can come to ``path``."""
    if path.is_dir():
        raise refusal("--trace", path, "is a folder", f"for example {path / 'trace.json'}")
    if not path.parent.is_dir():
        raise refusal("--trace", path, "lies in a folder that does not exist", f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise refusal("--trace", path, "lies in a folder that cannot be written")


def first_traced(windows: int, chosen: LoggingConfig) -> int:
    """How many of the ``windows`` that are left of a stage go before its traced ones, at least one.

    ``chosen.trace_after``, or fewer where the stage is too short for that.
    """
    return max(1, min(chosen.trace_after, windows - chosen.trace_windows))


class ChromeTracer:
    """Traces ``chosen.trace_windows`` windows of each stage and writes all so far to ``path`` after each of them."""

    def __init__(self, comm: Traced, device: torch.device, path: Path, chosen: LoggingConfig) -> None:
        self._comm = comm
        self._path = path
        self._chosen = chosen
        self._laps = Laps(device, comm.clock)
        self._stage: int | None = None
        self._before = self._left = 0
        self._tracing = False
        self._step = 0
        self._about: dict[str, Any] = {}
        self._met: list[timeline.Span] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._zero: float | None = None
        self._clocks: list[Clock] = []
        self._events: list[chrome.Event] = []
        self.measured: list[Overlap] = []

    def begin(self, replica: Replica, schedule: Schedule, stage: int, progress: Progress) -> None:
        planned = schedule.stages[stage]
        if stage != self._stage:
            windows = -(-(planned.end - progress.samples_seen) // planned.global_batch)
            self._stage, self._before = stage, first_traced(windows, self._chosen)
            self._left = self._chosen.trace_windows
        if self._before or not self._left:
            self._before -= 1 if self._before else 0
            return
        self._left -= 1
        self._tracing = True
        self._step = progress.step + 1
        self._about = {"stage": stage, "global_batch": planned.global_batch}
        self._comm.meet(1)  # nobody has anything on its way when Horovod begins to write
        if (keeper := self._comm.timeline) is not None:
            self._folder = tempfile.TemporaryDirectory(prefix="hvdbs-trace-")
            keeper.start_timeline(self._timeline_file)
        self._met = self._comm.meet(MEETINGS)
        replica.lap = self._laps
        self._comm.begin()
        self._laps.begin()

    def end(self, replica: Replica, applied: Applied) -> Applied:
        if not self._tracing:
            return applied
        self._tracing = False
        replica.lap = no_lap
        laps, calls = self._laps.take(), self._comm.take()
        performed = self._performed()
        own = [self._comm.host, self._met, [asdict(lap) for lap in laps], [asdict(call) for call in calls]]
        everyone = [json.loads(text) for text in self._comm.gather_bytes(json.dumps(own).encode())]
        if self._comm.rank > 0:
            return applied
        seen = self._put_together(everyone, performed)
        return replace(
            applied, imbalance_seconds=seen.imbalance_seconds, communication_seconds=seen.communication_seconds
        )

    def _performed(self) -> list[Operation]:
        """What Horovod's timeline has of this window, on rank 0."""
        keeper = self._comm.timeline
        if keeper is None or self._folder is None:
            return []
        keeper.stop_timeline()
        written = self._timeline_file.read_text() if self._timeline_file.exists() else ""
        self._folder.cleanup()
        return timeline.operations(written, keeper.epoch)

    @property
    def _timeline_file(self) -> Path:
        """A new name for each window, as Horovod asks for."""
        assert self._folder is not None
        return Path(self._folder.name) / f"horovod-{self._step}.json"

    def _put_together(self, everyone: list[Any], performed: list[Operation]) -> Overlap:
        ranks = []
        for host, met, laps, calls in everyone:
            here = host == everyone[0][0]
            clock = Clock() if here else timeline.aligned(met, everyone[0][1])
            ranks.append(RankWindow(host[0], clock, *_records(laps, calls)))
        if self._zero is None:
            self._zero = ranks[0].laps[0].begin
            self._events = chrome.headings([seen.host for seen in ranks])
        self._clocks = [seen.clock for seen in ranks]
        events = chrome.window_events(self._step, self._about, ranks, performed, self._zero)
        self._events += events
        self.measured += overlap.read({"traceEvents": events})
        self._write()
        return self.measured[-1]

    def _write(self) -> None:
        clocks = [asdict(clock) for clock in self._clocks]
        trace = {
            "traceEvents": self._events,
            "displayTimeUnit": "ms",
            "otherData": {"hvdbs": __version__, "backend": self._comm.backend, "clocks_in_seconds": clocks},
        }
        try:
            write_atomically(self._path, json.dumps(trace).encode())
        except OSError as error:
            raise HvdbsError(f"--trace: {self._path} cannot be written: {error.strerror or error}") from None

    def summary(self) -> str:
        """In one line, on rank 0: the means over the traced windows, and where the trace lies."""
        seen = self.measured
        if not seen:
            return (
                f"no window was traced: none of this run's stages had more than one left; {self._path} is not written"
            )
        moved = sum(window.communication_seconds for window in seen)
        hidden = sum(window.hidden_seconds for window in seen)
        share = f", {100 * hidden / moved:.0f} % of it behind backward" if moved else ""
        waited = sum(window.imbalance_seconds for window in seen) / len(seen)
        slowest, times = Counter(window.slowest for window in seen).most_common(1)[0]
        unsure = max(clock.uncertainty for clock in self._clocks)
        return (
            f"trace of {len(seen)} windows: communication {1e3 * moved / len(seen):.2f} ms a window{share}, "
            f"imbalance {1e3 * waited:.2f} ms (rank {slowest} last in {times})"
            + (f", clocks of hosts known to {1e3 * unsure:.2f} ms" if unsure else "")
            + f": {self._path}"
        )


def _records(laps: list[Any], calls: list[Any]) -> tuple[tuple[Lap, ...], tuple[Call, ...]]:
    return tuple(Lap(**lap) for lap in laps), tuple(Call(**call) for call in calls)
