"""A thread in every rank that ends it when it is stuck, and stops it in good order when its launcher is gone.

It reads a Pulse some times a second; the training thread only writes there. What a rank does once it is stuck needs no
other rank and no answer of any: it says so, leaves a word in the run directory and exits hard. Its launcher, or what
Horovod makes of a lost connection, ends the others.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdbs import ancestors
from hvdbs.pulse import Pulse

STUCK_FOLDER = "stuck"  # in the run directory, one file for each rank that waited for others in vain
LOOK_SECONDS = 1.0  # between looks; shorter where the limit is
_ANSWER_SECONDS = 2.0  # for the others to say that they are stuck too
_WORDS_SECONDS = 10.0  # for a terminal or file system that is gone itself

Leave = Callable[[str], None]


class Watchdog:
    """Watches ``pulse`` of rank ``rank`` until ``close``.

    ``timeout`` in seconds, 0 for never (the launcher is watched all the same). ``leave`` writes the reason where a
    launcher finds it; ``orphaned`` is called, once, when the launcher is gone. ``hosts`` by rank and ``out``, the run
    directory, are told when they are known.
    """

    def __init__(
        self, pulse: Pulse, rank: int, timeout: float, leave: Leave, orphaned: Callable[[], None] | None = None
    ) -> None:
        self.hosts: Sequence[str] = ()
        self.out: Path | None = None
        self._pulse, self._rank, self._timeout, self._leave = pulse, rank, timeout, leave
        self._orphaned = orphaned
        self._above = ancestors.launcher() if orphaned is not None else []
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdbs-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = min(LOOK_SECONDS, self._timeout / 10) if self._timeout else LOOK_SECONDS
        beats, still, looked = self._pulse.beats, 0.0, time.monotonic()
        while not self._over.wait(pause):
            now = time.monotonic()
            # A whole job that was stopped for an hour and goes on (scontrol suspend, Ctrl-Z) is not stuck.
            still, looked = still + min(now - looked, 2 * pause), now
            if self._pulse.beats != beats:
                beats, still = self._pulse.beats, 0.0
            if self._timeout and still > self._pulse.limit_seconds(self._timeout):
                self._end(still)
            if self._above and self._orphaned is not None and ancestors.gone(self._above):
                self._above = []
                self._orphaned()

    def _end(self, still: float) -> None:
        said = f"rank {self._rank} on {socket.gethostname()}: no progress for {still:.0f} s {self._pulse.described}"
        if self._pulse.peers is None:
            said += f" ({self._place()})"
        # The pipe to the launcher may be full and the file system gone: neither keeps a stuck rank alive.
        words = threading.Thread(target=self._say, args=(said, self._pulse.peers is not None), daemon=True)
        words.start()
        words.join(_WORDS_SECONDS)
        os._exit(1)

    def _say(self, said: str, waits: bool) -> None:
        _complain(said)
        if not waits:
            self._leave(said)
            return
        missing, first = self._without_answer(said)
        if missing:
            named = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in missing[:8])
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            said = f"{named}{more}: no answer (stopped, hung, or cut off from the others); {said}"
        if first:
            _complain(said)
            self._leave(said)
        else:
            time.sleep(_ANSWER_SECONDS / 2)  # the first one's word before its end, which ends all

    def _without_answer(self, said: str) -> tuple[list[int], bool]:
        """The ranks that are not stuck in waiting as this one is, and whether this one is the first of those that are.

        All that wait for the same exchange have waited equally long, and say so within a second or two.
        """
        if self.out is None or not self.hosts:
            return [], self._rank == 0
        folder = self.out / STUCK_FOLDER
        try:
            folder.mkdir(exist_ok=True)
            (folder / f"rank-{self._rank}").write_text(f"{said}\n")
            time.sleep(_ANSWER_SECONDS)
            there = {path.name for path in folder.iterdir()}
        except OSError:
            return [], True
        stuck = [rank for rank in range(len(self.hosts)) if f"rank-{rank}" in there]
        missing = [rank for rank in range(len(self.hosts)) if f"rank-{rank}" not in there]
        return missing, stuck[:1] == [self._rank]

    def _place(self) -> str:
        """The innermost line of the training thread, and the innermost that is hvdbs's own."""
        frame = sys._current_frames().get(self._main)
        places = []
        while frame is not None:
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        own = [place for place in places if f"{os.sep}hvdbs{os.sep}" in place]
        return ", from ".join(dict.fromkeys([*places[:1], *own[:1]]))


def _complain(text: str) -> None:
    os.write(2, f"hvdbs: error: {text}\n".encode(errors="replace"))
