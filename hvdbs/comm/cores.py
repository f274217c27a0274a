"""Cores that ranks have to themselves or share, and what is chosen for it unless it is given."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

from hvdbs.comm import Communicator, first_number
from hvdbs.launch.commands import CORES

_CYCLE, _YIELD = "HOROVOD_CYCLE_TIME", "OMPI_MCA_mpi_yield_when_idle"


def cores_before_start(variables: MutableMapping[str, str], allowed: int) -> float:
    """Cores of this rank as far as its launcher's ``variables`` tell; ``allowed``: how many it may run on."""
    given = first_number(variables, (CORES, "SLURM_CPUS_PER_TASK"))
    if given:
        return float(given)
    names = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
    return allowed / max(1, first_number(variables, names) or 1)


def choose(variables: MutableMapping[str, str], allowed: int) -> None:
    """Set what MPI reads when it starts, for a rank with less than two cores of its own. What is set already stays.

    Open MPI spins while it waits, and Horovod's own thread waits beside the one that computes: on a shared core that is
    the time of the very rank it waits for. Yielding there made steps 1.4 to 1.7 times as fast; Horovod's cycle stays at
    its 1 ms, because none of 2.5, 5 and 10 ms was better under MPI (benchmarks/README.md).
    """
    if cores_before_start(variables, allowed) < 2:
        variables.setdefault(_YIELD, "1")


def chosen(threads: int) -> dict[str, Any]:
    """What stands now, to be written down: the rank's ``threads``, Horovod's cycle, MPI's waiting."""
    return {
        "threads": threads,
        "horovod_cycle_milliseconds": float(os.environ.get(_CYCLE, "1")),
        "mpi_yields_when_idle": os.environ.get(_YIELD) == "1",
    }


def own_cores(comm: Communicator) -> float:
    """Collective. This rank's share of the cores that it may run on: one that k ranks of its node may use is 1/k.

    Never more than python -m hvdbs.launch has given it: where Slurm binds no tasks, a rank may run on cores of others.
    """
    host, cores = socket.gethostname(), sorted(os.sched_getaffinity(0))
    everyone = [json.loads(text) for text in comm.gather_bytes(json.dumps([host, cores]).encode())]
    own = share(cores, [others for where, others in everyone if where == host])
    return min(own, first_number(os.environ, (CORES,)) or own)


def share(cores: Collection[int], of_ranks: Sequence[Collection[int]]) -> float:
    """The part of ``cores`` that is one rank's, where ``of_ranks`` are those of every rank on the node, itself too."""
    return sum(1 / sum(core in other for other in of_ranks) for core in cores)
