"""A command and all that comes of it, ended together. Linux: it adopts what its descendants leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0  # between asking what is left to end and ending it

Signals = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def end_with_parent() -> None:
    """Between fork and exec: this process is asked to end when the one that started it has."""
    _LIBC.prctl(_SET_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)


def run(command: Sequence[str], environment: Mapping[str, str], asked: Callable[[list[int]], None]) -> int:
    """The exit code of ``command``, once it and every process that came of it have ended.

    It runs in a process group of its own, so that a signal to this one reaches it through ``asked`` alone, which is
    called about five times a second with the numbers of those of ``Signals`` that have come so far, if any have.
    OSError if it cannot be started.
    """
    _LIBC.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    with _noted() as signals:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=end_with_parent
        )
        try:
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_SECONDS)
                if signals and child.poll() is None:
                    asked(signals)
        finally:
            end_descendants()
    return child.wait()


def end_descendants() -> None:
    """End every process that descends from this one, and take its exit status."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        deadline = time.monotonic() + seconds
        for pid in descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        while _reap() and time.monotonic() < deadline:
            time.sleep(0.02)


def _reap() -> bool:
    """Take the status of those that have ended; whether any is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def descendants() -> list[int]:
    """The processes below this one, children before theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents.setdefault(int(parent), []).append(int(entry.name))
    found, ahead = [], [os.getpid()]
    while ahead:
        below = parents.get(ahead.pop(0), [])
        found += below
        ahead += below
    return found


@contextlib.contextmanager
def _noted() -> Iterator[list[int]]:
    """The numbers of signals that came meanwhile, instead of what they did."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in Signals}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
