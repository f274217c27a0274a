"""Which hosts a launch has and how many ranks each takes: from Slurm's variables, a host file or a list of hosts.

Pure functions of a mapping of variables. Formats and meanings are those of sbatch(1) and srun(1), "output environment
variables", checked against Slurm 22.05.8.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvdbs.errors import HvdbsError, refusal

_LIST_EXAMPLE = "a list such as n[1-3,7],gpu01"
_COUNTS_EXAMPLE = "counts such as 2(x3),1"
_MOST_HOSTS = 100_000
_ENTRY = r"(?:[\w.\-]|\[[^\[\]\s]*\])+"  # one host, or several that differ in the numbers in brackets


@dataclass(frozen=True)
class Host:
    """``slots``: ranks that it takes. ``cpus``: how many of its CPUs are this job's, where that is known."""

    name: str
    slots: int
    cpus: int | None = None


@dataclass(frozen=True)
class Allocation:
    """``hosts`` in the order of ranks. ``cpus_per_rank``: the same for every rank, or None where it is not known.

    ``slurm``: whether this is a job of Slurm's. ``uniform``: every host has the same number of slots.
    """

    hosts: tuple[Host, ...]
    cpus_per_rank: int | None = None
    slurm: bool = False

    @property
    def ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def uniform(self) -> bool:
        return len({host.slots for host in self.hosts}) == 1

    @property
    def host_slots(self) -> str:
        """``n1:2,n2:1``, as horovodrun and mpirun take it."""
        return ",".join(f"{host.name}:{host.slots}" for host in self.hosts)


def expand_hosts(text: str, what: str = "SLURM_JOB_NODELIST") -> list[str]:
    """The names of a compressed list: ``n[1-2,07]`` is n1, n2, n07; with several brackets the last runs fastest.

    Raises HvdbsError for what is no such list. Zeros in front of a range's first number are kept: ``n[08-10]``.
    """
    if not re.fullmatch(rf"{_ENTRY}(?:,{_ENTRY})*", text):
        raise refusal(what, text, "is no list of hosts", _LIST_EXAMPLE)
    names: list[str] = []
    for entry in re.findall(_ENTRY, text):
        parts = re.split(r"\[([^\]]*)\]", entry)
        choices = [[part] if at % 2 == 0 else _numbers(part, text, what) for at, part in enumerate(parts)]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
        if len(names) > _MOST_HOSTS:
            raise refusal(what, text, f"names more than {_MOST_HOSTS} hosts", _LIST_EXAMPLE)
    return names


def _numbers(text: str, whole: str, what: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (match.group(1), match.group(2) or match.group(1)) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise refusal(what, whole, f"has [{text}], no numbers and ranges from low to high", _LIST_EXAMPLE)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def expand_counts(text: str, what: str) -> list[int]:
    """One number for each host: ``2(x3),1`` is 2, 2, 2, 1. Raises HvdbsError for what is none."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part.strip())
        if not match:
            raise refusal(what, text, "is no number for each host", _COUNTS_EXAMPLE)
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def gpu_count(text: str, what: str) -> int:
    """``4``, ``a100:4`` or ``a100:2,v100:1``, as --gpus-per-node takes it: the sum. Raises HvdbsError."""
    numbers = [part.rpartition(":")[2] for part in text.split(",")]
    if not all(number.isdigit() for number in numbers):
        raise refusal(what, text, "is no number of GPUs", "4, or a100:4")
    return sum(int(number) for number in numbers)


def from_slurm(variables: Mapping[str, str], ranks_per_node: int | None = None) -> Allocation:
    """The allocation that a batch script, or a shell of salloc, stands in.

    Ranks on a node, by the first that applies: ``ranks_per_node``; the tasks that were asked for
    (SLURM_TASKS_PER_NODE, which counts CPUs, not tasks, where SLURM_NTASKS is unset); one for each GPU; as many as
    SLURM_CPUS_PER_TASK lets fit; one. Raises HvdbsError where ranks have no CPU or Slurm's variables are no whole.
    """
    _refuse_step(variables)
    what = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in variables else "SLURM_NODELIST"
    names = expand_hosts(variables.get(what, ""), what)
    cpus = _for_each(names, variables, "SLURM_JOB_CPUS_PER_NODE")
    per_task = _number(variables, "SLURM_CPUS_PER_TASK")
    slots, why = _slots(names, variables, cpus, per_task, ranks_per_node)
    known: Sequence[int | None] = cpus or [None] * len(names)
    hosts = tuple(Host(name, taken, own) for name, taken, own in zip(names, slots, known, strict=True))
    for host in hosts:
        each = per_task or 1
        if host.cpus is not None and host.slots * each > host.cpus:
            raise refusal(
                "SLURM_JOB_CPUS_PER_NODE",
                host.cpus,
                f"is too few on {host.name} for {host.slots} ranks ({why}) with {each} each",
                f"sbatch --ntasks-per-node={host.slots} --cpus-per-task={each}, or --ranks-per-node "
                f"{max(1, host.cpus // each)}",
            )
    return Allocation(hosts, per_task or _share(hosts), slurm=True)


def _slots(
    names: Sequence[str],
    variables: Mapping[str, str],
    cpus: Sequence[int] | None,
    per_task: int | None,
    ranks_per_node: int | None,
) -> tuple[list[int], str]:
    """Ranks on each host, and what decided it."""
    if ranks_per_node is not None:
        return [ranks_per_node] * len(names), "--ranks-per-node"
    asked = _number(variables, "SLURM_NTASKS")
    tasks = None if asked is None else _for_each(names, variables, "SLURM_TASKS_PER_NODE")
    if tasks is not None:
        if sum(tasks) != asked:
            rule = f"is not what SLURM_TASKS_PER_NODE {variables['SLURM_TASKS_PER_NODE']} comes to, {sum(tasks)}"
            raise refusal(
                "SLURM_NTASKS", asked, rule, f"unset it, or --ranks-per-node {max(1, (asked or 0) // len(names))}"
            )
        return tasks, "SLURM_TASKS_PER_NODE"
    per_node = _number(variables, "SLURM_NTASKS_PER_NODE")
    if per_node:
        return [per_node] * len(names), "SLURM_NTASKS_PER_NODE"
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        gpus = gpu_count(variables[name], name) if variables.get(name) else 0
        if gpus:
            return [gpus] * len(names), f"one for each of {name}"
    if per_task and cpus:
        return [max(1, own // per_task) for own in cpus], "SLURM_CPUS_PER_TASK"
    return [1] * len(names), "one on each node"


def _refuse_step(variables: Mapping[str, str]) -> None:
    tasks = _number(variables, "SLURM_STEP_NUM_TASKS") or 1
    if tasks > 1:
        raise refusal(
            "SLURM_STEP_NUM_TASKS",
            tasks,
            "tasks of srun would each start a whole launch",
            "call python -m hvdbs.launch once, in the batch script, without srun",
        )
    components = _number(variables, "SLURM_HET_SIZE") or 1
    if components > 1:
        raise refusal(
            "SLURM_HET_SIZE", components, "components of a heterogeneous job are not joined", "one, without sbatch's :"
        )


def _for_each(names: Sequence[str], variables: Mapping[str, str], name: str) -> list[int] | None:
    if not variables.get(name):
        return None
    counts = expand_counts(variables[name], name)
    if len(counts) != len(names):
        raise refusal(name, variables[name], f"is for {len(counts)} hosts, and the job has {len(names)}")
    return counts


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    if text and not text.isdigit():
        raise refusal(name, text, "is no whole number")
    return int(text) if text else None


def _share(hosts: Sequence[Host]) -> int | None:
    """CPUs that every rank can have, on the tightest host."""
    known = [host.cpus // host.slots for host in hosts if host.cpus]
    return max(1, min(known)) if len(known) == len(hosts) else None


def from_hosts(text: str) -> Allocation:
    """``n1:2,n2:2`` or ``n[1-4]:2``; one rank on a host without a number. Raises HvdbsError."""
    hosts = []
    for entry in re.split(r",(?![^\[]*\])", text):
        name, colon, slots = entry.partition(":")
        if colon and not (slots.isdigit() and int(slots) > 0):
            raise refusal("--hosts", text, f"has no number of ranks in {entry}", "n1:2,n2:2")
        hosts += [Host(one, int(slots or 1)) for one in expand_hosts(name, "--hosts")]
    return Allocation(_different(hosts, "--hosts"))


def from_host_file(text: str, path: str) -> Allocation:
    """Lines of ``n1``, ``n1:2`` or ``n1 slots=2``; # begins a comment. Raises HvdbsError."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        match = re.fullmatch(r"([\w.\-]+)(?:(?::|\s+slots\s*=\s*)([1-9]\d{0,5}))?", words)
        if words and not match:
            raise refusal("--hostfile", path, f"has no host in line {number}: {words}", "n1, n1:2 or n1 slots=2")
        if match:
            hosts.append(Host(match.group(1), int(match.group(2) or 1)))
    if not hosts:
        raise refusal("--hostfile", path, "names no host", "a line such as n1 slots=2 for each")
    return Allocation(_different(hosts, "--hostfile"))


def _different(hosts: Sequence[Host], what: str) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise refusal(
            what, twice, "stands there twice", f"once, as {twice}:{sum(h.slots for h in hosts if h.name == twice)}"
        )
    return tuple(hosts)


def first_ranks(allocation: Allocation, ranks: int) -> Allocation:
    """``allocation`` with only so many ranks, the first hosts filled first. Raises HvdbsError if it has fewer."""
    if not 1 <= ranks <= allocation.ranks:
        raise refusal("--np", ranks, f"does not lie in 1 to {allocation.ranks}, the slots of {allocation.host_slots}")
    hosts, left = [], ranks
    for host in allocation.hosts:
        hosts.append(replace(host, slots=min(host.slots, left)))
        left -= hosts[-1].slots
    return replace(allocation, hosts=tuple(host for host in hosts if host.slots))


def local(ranks: int) -> Allocation:
    """So many ranks on this machine alone."""
    if ranks < 1:
        raise refusal("--np", ranks, "must be at least 1")
    return Allocation((Host("localhost", ranks),))


def find(
    variables: Mapping[str, str],
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    hosts: str | None = None,
    host_file: tuple[str, str] | None = None,
) -> Allocation:
    """What a launch has: ``hosts`` or ``host_file`` (its path and text) if given, else Slurm's, else this machine.

    ``ranks`` leaves out the last ones. Raises HvdbsError.
    """
    if ranks_per_node is not None and ranks_per_node < 1:
        raise refusal("--ranks-per-node", ranks_per_node, "must be at least 1")
    if hosts is not None and host_file is not None:
        raise HvdbsError("--hosts and --hostfile: both are given; one of them says where ranks run")
    if hosts is not None or host_file is not None:
        found = from_hosts(hosts) if hosts is not None else from_host_file(*reversed(host_file or ("", "")))
        if ranks_per_node is not None:
            found = replace(found, hosts=tuple(replace(host, slots=ranks_per_node) for host in found.hosts))
    elif variables.get("SLURM_JOB_ID"):
        found = from_slurm(variables, ranks_per_node)
    else:
        return local(ranks if ranks is not None else ranks_per_node or 1)
    return found if ranks is None else first_ranks(found, ranks)
