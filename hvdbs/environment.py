"""What a run stood on: versions, machines, launcher and the few environment variables that change its speed
or result."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdbs import __version__
from hvdbs.records import SCHEMA_VERSION

# An allow list: whoever publishes a run directory must not publish a token with it.
_NAMES = (
    "OMP_NUM_THREADS",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS",
    "CUDA_VISIBLE_DEVICES",
    "HVDBS_CORES_PER_RANK",
)
_PREFIXES = ("HOROVOD_", "OMPI_MCA_", "NCCL_")
# Launchers hand keys to their processes under names that the prefixes would let through.
_NEVER = ("SECRET", "TOKEN", "PASSWORD", "KEY", "CREDENTIAL", "PRECONDITION_TRANSPORTS")

# By whom a process was started: the variable that each launcher sets in its ranks, and in them alone.
LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun --gloo",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "PMI",
    "SLURM_STEP_NUM_TASKS": "srun",
}

_PACKAGES = ("torch", "torchvision", "horovod", "mpi4py", "numpy")
_DALI = ("nvidia-dali-cuda130", "nvidia-dali-cuda120", "nvidia-dali-cuda110")


def environment(
    world_size: int, backend: str, hosts: Sequence[str] = (), devices: Sequence[str] = ()
) -> dict[str, Any]:
    """environment.json of a run of ``world_size`` ranks over ``backend``. ``hosts`` and ``devices`` by rank.

    Rank 0's versions, processor and variables stand for all; its own host name, where no ``hosts`` are given.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": versions(),
        "git_commit": git_commit(Path(__file__).parent),
        "world_size": world_size,
        "backend": backend,
        "hosts": list(hosts) or [socket.gethostname()],
        "devices": list(devices),
        "launcher": launchers(os.environ),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "variables": allowed(os.environ),
    }


def versions() -> dict[str, str | None]:
    """Installed versions; None for what is not there."""
    found = {name: _version(name) for name in _PACKAGES}
    dali = next((version for name in _DALI if (version := _version(name))), None)
    return {"hvdbs": __version__, "python": platform.python_version(), **found, "dali": dali}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def launchers(variables: Mapping[str, str]) -> list[str]:
    """The launchers whose variables are set, e.g. ["Open MPI"]; empty for a plain process."""
    return [launcher for name, launcher in LAUNCHERS.items() if name in variables]


def allowed(variables: Mapping[str, str]) -> dict[str, str]:
    """Those variables that may be written down."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if (name in _NAMES or name.startswith(_PREFIXES)) and not any(word in name.upper() for word in _NEVER)
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "") or (
        platform.machine()
    )


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that holds ``folder``, with "-dirty" if files were changed; None outside of
    one.

    A package installed into an environment inside some other checkout is not that checkout's: ``folder``
    itself must be tracked.
    """

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(folder), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", "--error-unmatch", "__init__.py"):
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}-dirty" if commit and git("status", "--porcelain", "--untracked-files=no") else commit
