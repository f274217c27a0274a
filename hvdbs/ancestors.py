"""The launcher above a rank: the processes of this host that started it, and whether they still live. Linux."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "orted", "prted", "prte", "horovodrun"}


@dataclass(frozen=True)
class Process:
    """``began``: in the kernel's clock ticks since boot; with it a process is told from a later one of its id."""

    pid: int
    began: int


def launcher() -> list[Process]:
    """The processes above this one up to and with its launcher; its parent alone where none is known to be one.

    ``horovodrun --mpi`` becomes a shell which starts mpirun; killed, it leaves mpirun and the ranks behind, whose own
    parent is alive then. A shell of the user is none of these: that may go while its jobs go on.
    """
    above: list[Process] = []
    pid = os.getppid()
    while pid > 1 and (status := _status(pid)) is not None:
        above.append(Process(pid, status[1]))
        pid = status[0]
    launching = [_launches(process.pid) for process in above]
    if True not in launching:
        return above[:1]
    first = launching.index(True)
    return above[: launching.index(False, first) if False in launching[first:] else None]


def gone(processes: list[Process]) -> bool:
    """Whether one of them has ended."""
    return any((status := _status(process.pid)) is None or status[1] != process.began for process in processes)


def _status(pid: int) -> tuple[int, int] | None:
    """Parent and beginning of a process; None where there is none, or only what its parent has not taken note of."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def _launches(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    if os.path.basename(words[0]) in ("sh", "dash", "bash") and words[1:2] == ["-c"]:
        words = words[2].split()[:1] or [""]  # what horovodrun became: a shell with mpirun's whole command line
    return any(os.path.basename(word) in _LAUNCHERS for word in words[:2])
