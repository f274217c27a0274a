"""A batch script for one run, ready for sbatch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hvdbs.errors import refusal

_EARLY_SECONDS = 60  # Slurm may send the signal so much earlier (sbatch(1), --signal)


@dataclass(frozen=True)
class Request:
    """What a job asks for; ``time`` as sbatch takes it. ``signal_seconds``: how long before the end it is told to stop.

    ``gpus_per_node``: one rank takes one. ``modules``: what ``module load`` is given. ``environment``: the virtual
    environment whose python runs, None for the python on the PATH. ``runs``: of a sweep, one for each task of an array.
    """

    name: str
    nodes: int
    ranks_per_node: int | None = None
    cpus_per_rank: int | None = None
    gpus_per_node: int | None = None
    time: str = "24:00:00"
    signal_seconds: int = 300
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    modules: Sequence[str] = ()
    environment: str | None = None
    runs: int | None = None


def script(request: Request, arguments: Sequence[str]) -> str:
    """The batch script of ``python -m hvdbs.launch ARGUMENTS``. Raises HvdbsError for what sbatch would refuse."""
    _check(request)
    ranks = request.ranks_per_node or request.gpus_per_node or 1
    options = {
        "job-name": request.name,
        "nodes": request.nodes,
        "ntasks-per-node": ranks,
        "cpus-per-task": request.cpus_per_rank,
        "gpus-per-node": request.gpus_per_node,
        "time": request.time,
        "signal": f"B:USR1@{request.signal_seconds}",
        "array": None if request.runs is None else f"0-{request.runs - 1}",
        "output": "%x-%j.out" if request.runs is None else "%x-%A_%a.out",
        "open-mode": "append",
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None)]
    lines += ["#SBATCH --requeue", "set -euo pipefail"]
    lines += [f"module load {shlex.join(request.modules)}"] if request.modules else []
    if request.environment is not None:
        lines.append(f'export PATH={shlex.quote(f"{request.environment}/bin")}:"$PATH"')
    return "\n".join([*lines, f"exec python -m hvdbs.launch {shlex.join(arguments)}", ""])


def _check(request: Request) -> None:
    for name, number in (
        ("--nodes", request.nodes),
        ("--ranks-per-node", request.ranks_per_node),
        ("--cpus-per-rank", request.cpus_per_rank),
        ("--gpus-per-node", request.gpus_per_node),
        ("--signal-seconds", request.signal_seconds),
    ):
        if number is not None and number < 1:
            raise refusal(name, number, "must be at least 1")
    for option, text in (
        ("--job-name", request.name),
        ("--partition", request.partition),
        ("--account", request.account),
        ("--qos", request.qos),
    ):
        if text is not None and not re.fullmatch(r"[\w.,+@/-]+", text):
            raise refusal(option, text, "is no name that sbatch takes", "letters, digits, and . , + @ / -")
    gpus, ranks = request.gpus_per_node, request.ranks_per_node
    if gpus is not None and ranks is not None and ranks > gpus:
        raise refusal(
            "--ranks-per-node", ranks, f"is more than the {gpus} GPUs of a node, one for each rank", str(gpus)
        )
    limit = seconds(request.time)
    if request.signal_seconds + _EARLY_SECONDS >= limit:
        raise refusal(
            "--signal-seconds",
            request.signal_seconds,
            f"and the {_EARLY_SECONDS} s that Slurm may be early leave nothing of --time {request.time}",
            f"less than {max(1, limit - _EARLY_SECONDS)}" if limit > _EARLY_SECONDS + 1 else "a longer --time",
        )


def seconds(time: str) -> int:
    """Seconds of minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]. Raises HvdbsError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not match:
        raise refusal("--time", time, "is no time that sbatch takes", "24:00:00 or 1-12 (a day and 12 hours)")
    days, first, second, third = (int(text or 0) for text in match.groups())
    if match.group(1) is not None or match.group(4) is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    return first * 60 + second
