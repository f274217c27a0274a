"""The command line that starts the ranks of an allocation, for each launcher: pure functions of what is chosen.

What each launcher does with Slurm's variables was looked at on Slurm 22.05.8 with Open MPI 5.0.11 and Horovod 0.28.1.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdbs.errors import refusal, suggestion
from hvdbs.launch.allocation import Allocation

LAUNCHERS = {
    "srun": "srun --mpi=pmix: MPI, started by Slurm itself; no ssh",
    "srun-gloo": "Gloo, started by srun; no MPI, no ssh",
    "mpirun": "Open MPI's own; in a job of Slurm's it starts its daemons with srun, elsewhere with ssh",
    "horovodrun-mpi": "horovodrun --mpi: checks ssh to each host, then mpirun",
    "horovodrun-gloo": "horovodrun --gloo: Gloo over ssh; no MPI",
}
CORES = "HVDBS_CORES_PER_RANK"

# A step of srun with these gives a GPU to each task, or all of the job's to one. mpirun's tasks are daemons, one on
# each node but its own: all ranks of a node would see the one GPU of its daemon, or the step would ask for too many.
# Without them the step still has the job's request, unless it has another.
_GPUS_OF_STEPS = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK", "SLURM_GPUS")
# sbatch --export=NONE leaves it, and steps would start without the environment of the batch script.
_EXPORT = ("SLURM_EXPORT_ENV",)
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", CORES)
_PASSED_ON_PREFIXES = ("HOROVOD_", "NCCL_")


@dataclass(frozen=True)
class Choice:
    """``launcher``: one of LAUNCHERS. ``nic``: the network interface between ranks; None leaves it to the launcher.

    ``python``: the interpreter of the ranks. ``as_root``: whether the launch is root's, which Open MPI has to be told.
    """

    launcher: str
    python: str
    nic: str | None = None
    as_root: bool = False


@dataclass(frozen=True)
class Launch:
    """A ``command`` and the environment it needs: what to ``set`` and what to leave out."""

    command: tuple[str, ...]
    set: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if name not in self.unset} | dict(self.set)

    def __str__(self) -> str:
        """One line for a shell."""
        words = [word for name in self.unset for word in ("-u", name)]
        words += [f"{name}={value}" for name, value in self.set.items()]
        return shlex.join([*(["env", *words] if words else []), *self.command])


def default_launcher(allocation: Allocation) -> str:
    return "srun" if allocation.slurm else "horovodrun-gloo"


def launch(allocation: Allocation, choice: Choice, program: Sequence[str], variables: Mapping[str, str]) -> Launch:
    """The command that starts ``program`` as all ranks of ``allocation``. Raises HvdbsError for what does not fit."""
    if choice.launcher not in LAUNCHERS:
        raise refusal("--launcher", choice.launcher, "is none that is known", suggestion(choice.launcher, LAUNCHERS))
    if choice.launcher.startswith("srun") and not allocation.slurm:
        raise refusal("--launcher", choice.launcher, "needs a job of Slurm's", "sbatch, salloc, or horovodrun-gloo")
    make = {
        "srun": _srun_pmix,
        "srun-gloo": _srun_gloo,
        "mpirun": _mpirun,
        "horovodrun-mpi": _horovodrun_mpi,
        "horovodrun-gloo": _horovodrun_gloo,
    }[choice.launcher]
    return make(allocation, choice, program, variables)


def _threads(allocation: Allocation, variables: Mapping[str, str]) -> dict[str, str]:
    """Threads of one rank: its CPUs, as far as they are known. A number that is set already stays."""
    cores = allocation.cpus_per_rank
    if cores is None:
        return {}
    return {"OMP_NUM_THREADS": variables.get("OMP_NUM_THREADS") or str(cores), CORES: str(cores)}


def _mpi_nic(choice: Choice) -> dict[str, str]:
    if choice.nic is None:
        return {}
    return {"OMPI_MCA_btl_tcp_if_include": choice.nic, "NCCL_SOCKET_IFNAME": choice.nic}


def _srun(allocation: Allocation, mpi: str, variables: Mapping[str, str]) -> list[str]:
    words = ["srun", f"--mpi={mpi}", f"--nodes={len(allocation.hosts)}", f"--ntasks={allocation.ranks}"]
    if allocation.uniform and not variables.get("SLURM_NTASKS_PER_GPU"):  # which excludes the other
        words.append(f"--ntasks-per-node={allocation.hosts[0].slots}")
    if allocation.cpus_per_rank is not None:  # since 22.05 a step no longer has the job's
        words.append(f"--cpus-per-task={allocation.cpus_per_rank}")
    # Ranks in the order of hosts; one that fails ends all; the whole environment, whatever sbatch was told.
    return [*words, "--distribution=block", "--kill-on-bad-exit=1", "--export=ALL"]


def _srun_pmix(allocation: Allocation, choice: Choice, program: Sequence[str], variables: Mapping[str, str]) -> Launch:
    command = (*_srun(allocation, "pmix", variables), *program)
    return Launch(command, {**_threads(allocation, variables), **_mpi_nic(choice)})


def _srun_gloo(allocation: Allocation, choice: Choice, program: Sequence[str], variables: Mapping[str, str]) -> Launch:
    server = (choice.python, "-m", "hvdbs.launch.rendezvous", allocation.host_slots)
    task = (choice.python, "-m", "hvdbs.launch.task")
    nic = {} if choice.nic is None else {"HOROVOD_GLOO_IFACE": choice.nic, "NCCL_SOCKET_IFNAME": choice.nic}
    command = (*server, *_srun(allocation, "none", variables), *task, *program)
    return Launch(command, {**_threads(allocation, variables), **nic})


def _gpus_of_nodes(allocation: Allocation, variables: Mapping[str, str]) -> dict[str, str]:
    """For a launcher whose daemon on a node is one task: all of the node's GPUs in its place, where nodes are alike."""
    if allocation.uniform and variables.get("SLURM_GPUS_ON_NODE") and _present(_GPUS_OF_STEPS, variables):
        return {"SLURM_GPUS_PER_NODE": variables["SLURM_GPUS_ON_NODE"]}
    return {}


def _mpirun(allocation: Allocation, choice: Choice, program: Sequence[str], variables: Mapping[str, str]) -> Launch:
    chosen = {**_threads(allocation, variables), **_mpi_nic(choice), **_gpus_of_nodes(allocation, variables)}
    names = [name for name in {**variables, **chosen} if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)]
    words = ["mpirun", "-np", str(allocation.ranks), "-H", allocation.host_slots]
    words += ["--bind-to", "none", "--map-by", "slot"]
    words += ["--allow-run-as-root"] if choice.as_root else []
    words += [word for name in sorted(names) for word in ("-x", name)]
    return Launch((*words, *program), chosen, _present((*_GPUS_OF_STEPS, *_EXPORT), variables))


def _horovodrun(allocation: Allocation, choice: Choice, back_end: str) -> list[str]:
    words = ["horovodrun", f"--{back_end}", "-np", str(allocation.ranks), "-H", allocation.host_slots]
    # It would otherwise believe for an hour, in ~/.horovod, what it has once seen of a host.
    return [*words, "--disable-cache", *(["--network-interface", choice.nic] if choice.nic else [])]


def _horovodrun_mpi(
    allocation: Allocation, choice: Choice, program: Sequence[str], variables: Mapping[str, str]
) -> Launch:
    # Its own words for this have one dash, which Open MPI 5 does not take; both take two.
    binding = "--binding-args=--bind-to none --map-by slot"
    chosen = {**_threads(allocation, variables), **_gpus_of_nodes(allocation, variables)}
    gone = _present((*_GPUS_OF_STEPS, *_EXPORT), variables)
    return Launch((*_horovodrun(allocation, choice, "mpi"), binding, *program), chosen, gone)


def _horovodrun_gloo(
    allocation: Allocation, choice: Choice, program: Sequence[str], variables: Mapping[str, str]
) -> Launch:
    return Launch((*_horovodrun(allocation, choice, "gloo"), *program), _threads(allocation, variables))


def _present(names: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in variables)
