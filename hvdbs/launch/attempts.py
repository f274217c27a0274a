"""Elastic by restart: a run whose rank or host has failed is started again, on the hosts that are left.

The global batch is the schedule's, so the training stays what it was, whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
import csv
import io
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from hvdbs.errors import HvdbsError, refusal
from hvdbs.files import write_atomically
from hvdbs.launch import network
from hvdbs.launch.allocation import Allocation
from hvdbs.launch.commands import Launch
from hvdbs.launch.job import Ended, say, supervise
from hvdbs.records import AttemptRow, cells, columns

SLURM_RESTARTS = "Slurm itself queues a job again when one of its nodes fails, and it goes on from its checkpoint"
_REACH_SECONDS = 10
_CHECKS_AT_ONCE = 32

Start = Callable[[Allocation, bool, bool], Launch]


@dataclass(frozen=True)
class Limits:
    """``restarts`` after failures, 0 for none; never with fewer than ``ranks``."""

    restarts: int
    ranks: int


def limits(restarts: int | None, ranks: int | None, there: Allocation, out: Path | None) -> Limits:
    """What --max-restarts and --min-np ask for, None where they are not given. Raises HvdbsError if it cannot be."""
    if restarts is None:
        if ranks is not None:
            raise refusal("--min-np", ranks, "is a limit of --max-restarts, which is not given", "--max-restarts 3")
        return Limits(0, 1)
    if restarts < 0:
        raise refusal("--max-restarts", restarts, "must be at least 0", "0")
    if there.slurm:
        raise refusal("--max-restarts", restarts, "is for hosts without Slurm", f"leave it out: {SLURM_RESTARTS}")
    if out is None:
        raise refusal("--max-restarts", restarts, "is for a run of hvdbs.train, which can be resumed", "leave it out")
    if ranks is not None and not 1 <= ranks <= there.ranks:
        rule = f"does not lie in 1 to {there.ranks}, the ranks of {there.host_slots}"
        raise refusal("--min-np", ranks, rule, str(min(max(ranks, 1), there.ranks)))
    return Limits(restarts, ranks or 1)


def run(
    start: Start,
    there: Allocation,
    out: Path | None,
    again: Sequence[str],
    variables: Mapping[str, str],
    limits: Limits,
) -> int:
    """Launch on ``there`` until the run has finished, was stopped, or cannot go on; returns its exit code.

    ``start``: the launch on an allocation; it is told whether this is a restart, and whether the run has saved a
    checkpoint since the first start. ``again`` as in ``supervise``. Raises HvdbsError where too few ranks are left, or
    where the run has failed twice on the same hosts without a new checkpoint.
    """
    attempt, begun, saved = 0, False, False
    idle = 0  # starts in a row that left the checkpoint and the hosts as they were
    while True:
        launch = start(there, attempt > 0, saved)
        print(f"hvdbs.launch: ranks {there.host_slots}: {launch}", flush=True)
        moment = time.monotonic()
        ended = supervise(launch, out, again, variables)
        begun, saved = begun or ended.began, saved or ended.after != ended.before
        if out is None or not limits.restarts or not begun:  # what fails before it has begun would do so again
            return ended.code
        _record(out, attempt, there, time.monotonic() - moment, ended)
        if ended.code == 0 or ended.outcome == "stopped" or ended.asked or ended.refused:
            return ended.code
        if attempt == limits.restarts:
            say(f"not started again after {attempt} restarts (--max-restarts): {ended.cause}")
            return ended.code
        left = what_is_left(there)
        if left.ranks < limits.ranks:
            rule = f"ranks are not left, only {left.host_slots or 'none'}: {ended.cause}"
            raise refusal("--min-np", limits.ranks, rule)
        idle = idle + 1 if ended.after == ended.before and left.hosts == there.hosts else 0
        place = ended.after or "the beginning"
        if idle == 2:
            raise HvdbsError(f"--max-restarts: it has failed twice after {place} without a new one: {ended.cause}")
        attempt += 1
        gone = [host.name for host in there.hosts if host not in left.hosts]
        lost = f" without {', '.join(gone)}, which cannot be reached" if gone else ""
        say(f"restart {attempt} of {limits.restarts} from {place}{lost}: {ended.cause}")
        there = left


def what_is_left(there: Allocation) -> Allocation:
    """``there`` without the hosts on which no command can be run."""
    with ThreadPoolExecutor(_CHECKS_AT_ONCE) as pool:
        reached = list(pool.map(_reached, [host.name for host in there.hosts]))
    return replace(there, hosts=tuple(host for host, here in zip(there.hosts, reached, strict=True) if here))


def _reached(host: str) -> bool:
    """Whether a command can be run there, as launchers do it."""
    own = socket.gethostname()
    if host in ("localhost", own, own.partition(".")[0], socket.getfqdn(), *network.interfaces().values()):
        return True
    options = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", f"ConnectTimeout={_REACH_SECONDS}"]
    command = ["ssh", *options, host, "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=3 * _REACH_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _record(out: Path, attempt: int, there: Allocation, seconds: float, ended: Ended) -> None:
    """A row of attempts.csv; a launch that comes later in the same folder goes on below."""
    path = out / "attempts.csv"
    outcome = ended.outcome or ("failed" if ended.code else "finished")
    cause = None if outcome == "finished" else ended.cause
    row = AttemptRow(attempt, there.ranks, there.host_slots, round(seconds, 1), outcome, ended.after, cause)
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells(row))
    with contextlib.suppress(OSError):
        before = path.read_bytes() if path.exists() else f"{','.join(columns(AttemptRow))}\n".encode()
        write_atomically(path, before + line.getvalue().encode(errors="surrogateescape"))
