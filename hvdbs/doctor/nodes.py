"""Every node of an allocation: each is asked for its own lines, by srun or ssh, and what differs is shown."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hvdbs.doctor.findings import Finding, shortened
from hvdbs.launch.allocation import Allocation

MARK = "hvdbs.doctor"
_AT_ONCE = 16
_SKEW_SECONDS = 1.0
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Answer:
    """Of one node. ``ahead``: its clock less ours, in seconds; None if it did not answer."""

    node: str
    findings: list[Finding] = field(default_factory=list)
    ahead: float | None = None
    problem: str = ""


def told(findings: Sequence[Finding]) -> str:
    """What a node prints: one line for each finding."""
    return "\n".join(f"{MARK} {json.dumps(asdict(finding))}" for finding in findings)


def clock() -> str:
    """What a node prints first: its own time."""
    return f"{MARK} {json.dumps(time.time())}"


def command(node: str, slurm: bool, words: Sequence[str]) -> list[str]:
    """How ``words`` are run on ``node``: a step of Slurm's job, ssh, or neither on this one."""
    if slurm:
        one = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap", "--mpi=none", "--export=ALL"]
        return [*one, "--cpu-bind=none", "--input=none", *words]
    if node in ("localhost", "127.0.0.1", socket.gethostname()):
        return list(words)
    environment = [f"{name}={os.environ[name]}" for name in _PASSED_ON if name in os.environ]
    line = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*environment, *words])}"
    return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", node, line]


def ask(node: str, slurm: bool, words: Sequence[str], patience: float) -> Answer:
    """The lines of ``node``, or why there are none, in at most ``patience`` seconds."""
    with TemporaryFile() as complaints:
        try:
            child = subprocess.Popen(
                command(node, slurm, words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                errors="replace",
            )
        except OSError as error:
            return Answer(node, problem=f"{'srun' if slurm else 'ssh'} cannot be started ({error.strerror})")
        with child, ThreadPoolExecutor(1) as timer:
            late = timer.submit(_end_after, child, patience)
            assert child.stdout is not None
            lines: list[Any] = []
            heard = 0.0
            for line in child.stdout:
                if line.startswith(MARK):
                    heard = heard if lines else time.time()
                    lines.append(json.loads(line.removeprefix(MARK)))
            code = child.wait()
        complaints.seek(0)
        complaint = complaints.read().decode(errors="replace")
    if late.result():
        return Answer(node, problem=f"no answer in {patience:g} s")
    if code not in (0, 1) or not lines:
        return Answer(node, problem=" ".join(complaint.split())[-160:] or f"exit code {code}")
    stamp, findings = lines[0], [Finding(**{**line, "nodes": ()}) for line in lines[1:]]
    # It looked at its clock between our start and our hearing of it, most likely just before the latter.
    return Answer(node, findings, stamp - heard)


def _end_after(child: subprocess.Popen[str], seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        return True
    return False


def ask_all(there: Allocation, options: Sequence[str], patience: float) -> list[Answer]:
    """Every node's answer, in the order of ranks."""
    words = [sys.executable, "-m", "hvdbs.doctor", "--this-node", *options]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        asked: Callable[[str], Answer] = lambda node: ask(node, there.slurm, words, patience)  # noqa: E731
        return list(threads.map(asked, [host.name for host in there.hosts]))


def reached(answers: Sequence[Answer], slurm: bool) -> list[Finding]:
    """Whether nodes answer."""
    silent = [answer for answer in answers if answer.problem]
    lines = []
    for answer in silent[:8]:
        fix = "scontrol show node; the same folder and environment on every node"
        if not slurm:
            fix = f"ssh {answer.node} true, without a password; the same folder and environment on every node"
        lines.append(Finding("nodes", "reached", "FAIL", f"{answer.node}: {answer.problem}", fix))
    names = [answer.node for answer in answers if not answer.problem]
    if names:
        how = "srun" if slurm else "ssh"
        lines.insert(
            0, Finding("nodes", "reached", "ok", f"{len(names)} of {len(answers)} by {how}: {shortened(names)}")
        )
    return lines


def clocks(answers: Sequence[Answer]) -> Finding | None:
    """How far apart the nodes' clocks are, as well as an answer by srun or ssh can tell."""
    known = {answer.node: answer.ahead for answer in answers if answer.ahead is not None}
    if len(known) < 2:
        return None
    first, last = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    apart = known[last] - known[first]
    if apart > _SKEW_SECONDS:
        text = f"{last} is {apart:.1f} s ahead of {first}"
        fix = "chronyc tracking on both: times in files and logs are wrong, munge refuses 300 s and more"
        return Finding("nodes", "clocks", "FAIL" if apart > 300 else "note", text, fix)
    return Finding("nodes", "clocks", "ok", f"agree to {max(0.1, apart):.1f} s")
