"""``python -m hvdbs.launch.task COMMAND``: what srun starts for a rank of Gloo: COMMAND with Horovod's variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from hvdbs.errors import HvdbsError, refusal
from hvdbs.launch import network
from hvdbs.launch.allocation import expand_counts


def main(argv: Sequence[str] | None = None) -> int:
    """Become COMMAND. Returns only if the rank cannot start."""
    command = list(sys.argv[1:] if argv is None else argv)
    try:
        told = rank_variables(os.environ)
        if "HOROVOD_GLOO_IFACE" not in os.environ:
            nic = network.interface_towards(os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"])
            told |= {"HOROVOD_GLOO_IFACE": nic}
    except HvdbsError as error:
        sys.stderr.write(f"hvdbs: error: {error}\n")
        return 2
    os.execvpe(command[0], command, os.environ | told)


def rank_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Horovod's variables of a rank, from those of a task of srun.

    The cross rank counts the nodes that have a rank with this local rank. Raises HvdbsError outside of srun's tasks.
    """
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS")
    missing = [name for name in (*names, "SLURM_STEP_TASKS_PER_NODE") if name not in variables]
    if missing:
        raise refusal(missing[0], "none", "is set: this is no task of srun", "start it with python -m hvdbs.launch")
    rank, local_rank, node, size = (int(variables[name]) for name in names)
    tasks = expand_counts(variables["SLURM_STEP_TASKS_PER_NODE"], "SLURM_STEP_TASKS_PER_NODE")
    peers = [at for at, count in enumerate(tasks) if count > local_rank]
    return {
        "HOROVOD_HOSTNAME": variables.get("SLURMD_NODENAME", str(node)),
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(tasks[node]),
        "HOROVOD_CROSS_RANK": str(peers.index(node)),
        "HOROVOD_CROSS_SIZE": str(len(peers)),
    }


if __name__ == "__main__":
    sys.exit(main())
