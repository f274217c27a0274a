"""The command: what is looked at, in which order, and how it is told."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from hvdbs.doctor import communication, machine, nodes, software, storage, surroundings
from hvdbs.doctor.findings import Finding, Look, all_looked_at, merged, page, worst
from hvdbs.errors import HvdbsError, refusal
from hvdbs.launch import allocation, commands, network
from hvdbs.launch.allocation import Allocation

_PROBE_MARK = "hvdbs.probe"
_LONGEST_SECONDS = 3600.0

_EXAMPLES = """examples:
  python -m hvdbs.doctor                              this machine, in some 15 seconds
  python -m hvdbs.doctor --data /scratch/imagenet     and how fast these files are read
  python -m hvdbs.doctor --hosts node1:4,node2:4      every node, over ssh
  salloc --nodes 4 python -m hvdbs.doctor             every node of a job of Slurm, over srun
  python -m hvdbs.doctor --json | jq '.findings[] | select(.word != "ok")'

FAIL: training on several ranks does not start here, goes wrong or breaks off. note: it works, but slower, or without
something that some runs need. Exit code: 1 if there is a FAIL, 0 without, whatever the notes; 2 for a wrong option."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise HvdbsError(f"{message}; --help lists all options")


def parser() -> argparse.ArgumentParser:
    result = _Parser(
        prog="python -m hvdbs.doctor",
        description="What works here and what does not, with the fix in a line each.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--data", metavar="DIR", type=Path, help="measure how fast the files below it are read")
    result.add_argument("--out", metavar="DIR", type=Path, default=Path("runs"), help="where runs go (default: runs)")
    result.add_argument(
        "--hosts", metavar="n1:2,...", help="every one of these, instead of this machine or Slurm's job"
    )
    result.add_argument("--hostfile", metavar="FILE", help="the same, a line for each")
    result.add_argument("--launcher", metavar="NAME", help="try this one alone; see python -m hvdbs.launch --help")
    result.add_argument("--nic", metavar="NAME", help="network interface between ranks, such as ib0")
    result.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=60.0, help="for each launch and each look (default: 60)"
    )
    result.add_argument("--no-trial", action="store_true", help="start no ranks")
    result.add_argument("--json", action="store_true", help="the same as JSON")
    result.add_argument("--this-node", action="store_true", help=argparse.SUPPRESS)  # asked by the doctor of a job
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Look, tell. Returns 1 if there is a FAIL, else 0; 2 for a wrong option."""
    begin = time.monotonic()
    try:
        options = parser().parse_args(argv)
        if options.this_node:
            sys.stdout.write(f"{nodes.clock()}\n")
            sys.stdout.flush()
            sys.stdout.write(f"{nodes.told(of_this_machine(options, probe(options.timeout), several=True))}\n")
            return 0
        there = _where(options)
    except HvdbsError as error:
        sys.stderr.write(f"hvdbs: error: {error}\n")
        return 2
    findings, count = _all(options, there)
    if options.json:
        sys.stdout.write(as_json(findings, time.monotonic() - begin))
    else:
        where = f"{count} nodes" if count > 1 else socket.gethostname()
        title = f"hvdbs doctor, {where}, {time.strftime('%Y-%m-%d %H:%M')}, {time.monotonic() - begin:.0f} s"
        sys.stdout.write(f"{page(findings, title, count)}\n")
    return 1 if worst(findings) == "FAIL" else 0


def as_json(findings: Sequence[Finding], seconds: float) -> str:
    word = worst(findings)
    content = {
        "schema_version": 1,
        "word": word,
        "seconds": round(seconds, 1),
        "findings": [asdict(f) for f in findings],
    }
    return f"{json.dumps(content, indent=2)}\n"


def _where(options: argparse.Namespace) -> Allocation:
    """The hosts that are looked at. Raises HvdbsError for options that do not fit."""
    if options.launcher is not None and options.launcher not in commands.LAUNCHERS:
        raise refusal("--launcher", options.launcher, "is none that is known", ", ".join(commands.LAUNCHERS))
    if not 0 < options.timeout <= _LONGEST_SECONDS:
        raise refusal("--timeout", options.timeout, "is not in (0, 3600], in seconds", "60 is the default")
    host_file = None
    if options.hostfile is not None:
        try:
            host_file = (options.hostfile, Path(options.hostfile).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise refusal("--hostfile", options.hostfile, f"cannot be read ({error})") from None
    if options.nic is not None:
        network.address_of(options.nic)
    return allocation.find(os.environ, None, None, options.hosts, host_file)


def _all(options: argparse.Namespace, there: Allocation) -> tuple[list[Finding], int]:
    """All lines, and of how many nodes they are."""
    several = there.slurm or options.hosts is not None or options.hostfile is not None
    if not several:
        found = probe(options.timeout)
        findings = of_this_machine(options, found, several=False)
        count = 1
    else:
        asked = ["--timeout", str(options.timeout), "--out", str(options.out)]
        asked += ["--data", str(options.data)] if options.data is not None else []
        answers = nodes.ask_all(there, asked, 4 * options.timeout)  # it has three steps, each with a limit
        found = probe(options.timeout)
        findings = nodes.reached(answers, there.slurm)
        findings += [line for line in [nodes.clocks(answers)] if line is not None]
        findings += merged({answer.node: answer.findings for answer in answers if not answer.problem})
        count = len(answers)
    if not options.no_trial:
        findings += communication.trials(there, options.launcher, options.nic, options.timeout, found)
    return findings, count


def of_this_machine(options: argparse.Namespace, found: Mapping[str, Any], several: bool) -> list[Finding]:
    """What is looked at on each machine. ``found``: what ``probe`` says; ``several``: whether it is one of a job's."""
    facts = found.get("horovod", {})
    missing = "error" in facts or not facts
    looks: list[Look] = [
        ("software", "hvdbs", software.hvdbs),
        ("software", "Python", machine.python),
        ("software", "packages", software.packages),
        ("software", "torch", lambda: software.torch(found)),
        ("software", "Horovod", lambda: software.horovod(found)),
        ("software", "MPI", lambda: software.mpi(found)),
        ("software", "mpi4py", lambda: software.mpi4py(found)),
        ("software", "compiler", lambda: machine.compiler(missing)),
        ("software", "DALI", software.dali),
        ("GPU", "driver", lambda: software.driver(found)),
        ("GPU", "GPUs", lambda: software.gpus(found)),
        ("GPU", "NCCL", lambda: software.nccl(found)),
        ("machine", "cores", machine.cores),
        ("machine", "memory", machine.memory),
        ("machine", "memlock", lambda: machine.locked_memory(surroundings.infiniband() is not None)),
        ("machine", "nofile", machine.open_files),
        ("machine", "/dev/shm", machine.shared_memory),
        ("network", "host name", lambda: surroundings.host_name(several)),
        ("network", "interfaces", surroundings.interfaces),
        ("network", "InfiniBand", surroundings.infiniband),
        ("cluster", "Slurm", surroundings.slurm),
        ("files", "runs", lambda: storage.run_directory(options.out)),
    ]
    lines = all_looked_at(looks, options.timeout)
    if options.data is not None:  # by itself, because it is a measurement
        measured: Look = ("files", "data", lambda: storage.data(options.data, len(os.sched_getaffinity(0))))
        lines += all_looked_at([measured], options.timeout)
    return lines


def probe(seconds: float) -> dict[str, Any]:
    """What torch and Horovod say of themselves in a process of their own; ``problem`` why they do not."""
    done, text = machine.said(sys.executable, "-m", "hvdbs.doctor.probe", seconds=seconds)
    told = [line for line in text.splitlines() if line.startswith(_PROBE_MARK)]
    found: dict[str, Any] = json.loads(told[-1].removeprefix(_PROBE_MARK)) if told else {}
    if not done:
        found["problem"] = (
            " ".join(text.splitlines()[-1:])[:200] or "the process that imported it was ended by a signal"
        )
    return found
