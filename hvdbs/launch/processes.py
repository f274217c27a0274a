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
from tempfile import TemporaryFile
from types import FrameType

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0  # between asking what is left to end and ending it

Signals = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def end_with_parent() -> None:
    """Between fork and exec: this process is asked to end when the one that started it has."""
    _LIBC.prctl(_SET_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)


def run(command: Sequence[str], environment: Mapping[str, str], asked: Callable[[list[int]], bool]) -> int:
    """The exit code of ``command``, once it and every process that came of it have ended.

    It runs in a process group of its own, so that a signal to this one reaches it through ``asked`` alone, which is
    called about five times a second with those of ``Signals`` that have come so far, if any have; once it answers True,
    all is ended. OSError if it cannot be started.
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
                if signals and child.poll() is None and asked(signals):
                    break
        finally:
            end_descendants(child)
    return child.wait()


def output_of(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
    """Exit code, None after so many ``seconds``, and all that ``command`` has said; what came of it has ended then.

    OSError if it cannot be started. No other thread of this process may have children meanwhile: they would end too.
    """
    _LIBC.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    with TemporaryFile() as said:
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            process_group=0,
            preexec_fn=end_with_parent,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(seconds)
        finally:
            end_descendants(child)
        said.seek(0)
        return code, said.read().decode(errors="replace")


def end_descendants(child: subprocess.Popen[bytes]) -> None:
    """End every process that descends from this one, and take its exit status; ``child`` keeps its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_SECONDS
        for pid in descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        while _reap(child) and time.monotonic() < deadline:
            time.sleep(0.02)


def _reap(child: subprocess.Popen[bytes]) -> bool:
    """Take the status of those that have ended; whether any is left."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if ended is None:
            return True
        if ended.si_pid == child.pid:
            child.wait()
        else:
            os.waitpid(ended.si_pid, 0)


def descendants() -> list[int]:
    """The processes below this one, each before those it has started."""
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
