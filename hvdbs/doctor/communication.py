"""An allreduce that is really run, by MPI and by Gloo, and the setting to use where one of them is slow."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hvdbs.doctor.findings import Finding, Word, amount
from hvdbs.doctor.machine import path
from hvdbs.errors import HvdbsError
from hvdbs.launch import commands, processes
from hvdbs.launch.allocation import Allocation

BYTES, SECONDS = 33_554_432, 1.0  # of one sum, and for how long it is repeated
_SLOWER = 1.4  # than the other: enough not to be noise on a machine that is shared
# Over TCP, Open MPI's default allreduce took up to twice as long as its ring, with the same bytes.
RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    "OMPI_MCA_btl_tcp_flags": "send",
}
_MARK = r"hvdbs\.trial (\{.*\})"
_FIXES = (  # what a launch says that failed, and what to do
    (r"Permission denied|Host key verification|ssh:|passwordless", "ssh HOST true must work without a password"),
    (
        r"cannot resolve",
        "the nodes in /etc/hosts, or the doctor on a node of the job (sbatch --wrap)",
    ),
    (r"not enough slots|not enough .*resources", "fewer ranks on a node: --hosts n1:1,n2:1"),
    (r"running as root|run as root", "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
    (r"PMI|pmix", "--launcher srun-gloo or mpirun: this Slurm and this MPI do not meet by PMIx"),
    (r"Horovod sees|undefined symbol|cannot be imported", "make setup with the MPI of this launcher on the PATH"),
    (r"No such file|not found|cannot be started", "another --launcher, or module load what brings it"),
)


@dataclass(frozen=True)
class Ran:
    """What became of a launch: ``trial`` as comm.trial prints it, or why there is none, in a line."""

    launcher: str
    trial: Mapping[str, Any] | None
    problem: str = ""
    fix: str = ""

    @property
    def seconds(self) -> float:
        return float(self.trial["seconds"]) if self.trial else float("inf")


def run(there: Allocation, launcher: str, nic: str | None, patience: float, more: Mapping[str, str]) -> Ran:
    """One launch of comm.trial on all ranks of ``there``, in at most ``patience`` seconds; ``more`` variables."""
    variables = {**os.environ, "PATH": path(), "OMP_NUM_THREADS": "1", **more}
    choice = commands.Choice(launcher, sys.executable, nic, as_root=os.geteuid() == 0)
    program = [sys.executable, "-m", "hvdbs.comm.trial", str(BYTES), str(SECONDS)]
    try:
        launch = commands.launch(there, choice, program, variables)
        code, text = processes.output_of(launch.command, launch.environment(variables), patience)
    except HvdbsError as error:
        return Ran(launcher, None, str(error))
    except OSError as error:
        return Ran(launcher, None, f"{launcher} cannot be started ({error.strerror})", _FIXES[-1][1])
    found = re.search(_MARK, text)
    if code == 0 and found:
        return Ran(launcher, json.loads(found.group(1)))
    fix = next((fix for pattern, fix in _FIXES if re.search(pattern, text)), "the same launch by hand: " + str(launch))
    if code is None:
        stuck = f"no answer in {patience:g} s"
        fix = "ports and interfaces between nodes (docs/security.md); --nic NAME; a longer --timeout"
        return Ran(launcher, None, stuck, fix if not found else "it hangs at its end")
    return Ran(launcher, None, f"exit code {code}: {first_cause(text)}", fix)


def first_cause(text: str) -> str:
    """The line of a failed launch's output that says most."""
    lines = [re.sub(r"^\[[\d,]+\]<std\w+>:?", "", line).strip(" -\t") for line in text.splitlines()]
    lines = [line for line in lines if re.search(r"[A-Za-z]{3}", line)]
    telling = [
        line for line in lines if re.search(r"error|denied|refused|cannot|unable|No such|not ", line, re.IGNORECASE)
    ]
    return " ".join(((telling or lines or ["it said nothing"])[0]).split())[:160]


def described(ran: Ran) -> str:
    """What a launch that succeeded says, in words."""
    assert ran.trial is not None
    ranks, hosts = ran.trial["world_size"], len(set(ran.trial["hosts"]))
    where = f"{ranks} ranks on {hosts} {'nodes' if hosts > 1 else 'node'}"
    moved = 2 * (ranks - 1) / ranks * ran.trial["bytes"] / ran.seconds
    took = f"{amount(ran.trial['bytes'])} summed in {1000 * ran.seconds:.0f} ms"
    return f"{where} by {ran.launcher}: {took}, {amount(moved)}/s"


def finding(name: str, ran: Ran, expected: int, word_of_failure: Word) -> Finding:
    """``expected`` ranks; ``word_of_failure``: FAIL where nothing else has worked."""
    if ran.trial is None:
        return Finding("communication", name, word_of_failure, f"{ran.launcher}: {ran.problem}", ran.fix)
    if not ran.trial["right"]:
        return Finding("communication", name, "FAIL", f"{described(ran)}, and the sum is WRONG", "make setup anew")
    if ran.trial["world_size"] != expected:
        seen = f"{ran.trial['world_size']} of {expected} ranks see each other"
        return Finding("communication", name, "FAIL", f"{ran.launcher}: {seen}", "the MPI that Horovod was built with")
    return Finding("communication", name, "ok", described(ran))


def compared(mpi: Ran, gloo: Ran, tuned: Ran | None) -> Finding:
    """MPI's allreduce against Gloo's, and with the settings of RING where that was tried (``tuned``)."""
    milliseconds = [1000 * ran.seconds for ran in (mpi, gloo)]
    text = "MPI {:.0f} ms, Gloo {:.0f} ms".format(*milliseconds)
    if tuned is not None and tuned.trial is not None:
        text += f", MPI with the settings below {1000 * tuned.seconds:.0f} ms"
        if tuned.seconds * 1.1 < mpi.seconds and tuned.seconds < 1.2 * gloo.seconds:
            fix = f"export {' '.join(f'{name}={value}' for name, value in RING.items())}"
            return Finding("communication", "MPI or Gloo", "note", text, fix)
        text = text.replace("the settings below", "a ring")
    if mpi.seconds > _SLOWER * gloo.seconds:
        return Finding("communication", "MPI or Gloo", "note", text, f"--launcher {gloo.launcher}")
    if gloo.seconds > _SLOWER * mpi.seconds:
        text += f": --launcher {mpi.launcher} is the faster"
    return Finding("communication", "MPI or Gloo", "ok", text)


def trials(
    there: Allocation, launcher: str | None, nic: str | None, patience: float, found: Mapping[str, Any]
) -> list[Finding]:
    """Run an allreduce by MPI and by Gloo on ``there``, by ``launcher`` alone if one is named."""
    facts = found.get("horovod", {})
    if "error" in facts or not facts:
        return [Finding("communication", "allreduce", "FAIL", "not tried: Horovod is not there", "the line of Horovod")]
    if len({host.name for host in there.hosts}) == 1 and there.ranks == 1:
        there = replace(there, hosts=(replace(there.hosts[0], slots=2),))
    by_mpi: tuple[str, ...] = ("srun", "mpirun") if there.slurm else ("mpirun", "horovodrun-mpi")
    by_gloo: tuple[str, ...] = ("srun-gloo",) if there.slurm else ("horovodrun-gloo",)
    if launcher is not None:
        gloo_only = launcher.endswith("gloo")
        by_mpi, by_gloo = ((), (launcher,)) if gloo_only else ((launcher,), ())
    mpi = _first_that_works(by_mpi if facts["mpi"] else (), there, nic, patience)
    gloo = _first_that_works(by_gloo if facts["gloo"] else (), there, nic, patience)
    worked = [ran for ran in (mpi, gloo) if ran and ran[-1].trial]
    lines = []
    for name, ran in (("MPI", mpi), ("Gloo", gloo)):
        word: Word = "note" if worked else "FAIL"
        lines += [finding(name, one, there.ranks, word) for one in ran]
    if not lines:
        by = launcher or " or ".join((*by_mpi, *by_gloo))
        text = f"not tried: Horovod is built without what {by} needs"
        return [Finding("communication", "allreduce", "FAIL", text, "another --launcher, or make setup")]
    if mpi and gloo and mpi[-1].trial and gloo[-1].trial:
        tuned = None
        if mpi[-1].seconds > _SLOWER * gloo[-1].seconds and _is_open_mpi(facts):
            tuned = run(there, mpi[-1].launcher, nic, patience, RING)
        lines.append(compared(mpi[-1], gloo[-1], tuned))
    return lines


def _is_open_mpi(facts: Mapping[str, Any]) -> bool:
    return "Open MPI" in (facts.get("library_says") or "")


def _first_that_works(launchers: tuple[str, ...], there: Allocation, nic: str | None, patience: float) -> list[Ran]:
    """What became of each launcher, until one works."""
    ran: list[Ran] = []
    for launcher in launchers:
        ran.append(run(there, launcher, nic, patience, {}))
        if ran[-1].trial is not None:
            break
    return ran
