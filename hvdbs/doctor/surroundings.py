"""What is around this machine: its name, its network, Slurm."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from hvdbs.doctor.findings import Finding, Word
from hvdbs.doctor.machine import said, which
from hvdbs.launch import network

_NETWORKS, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_BETWEEN_CONTAINERS = ("docker", "br-", "virbr", "lxcbr", "lxdbr", "podman", "cni", "vbox", "vmnet")


def host_name(several: bool) -> Finding:
    """``several``: whether ranks on other nodes have to find this one by its name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        word: Word = "FAIL" if several else "note"
        fix = f"a line for it in /etc/hosts: {next(iter(_outward().values()), '127.0.1.1')} {name}"
        return Finding("network", "host name", word, f"{name} has no address ({error.strerror or error})", fix)
    if several and address.startswith("127."):
        own = next(iter(_outward().values()), "its address")
        fix = f"in /etc/hosts, {own} in place of {address}: other nodes are told this address"
        return Finding("network", "host name", "note", f"{name} is {address}, this machine alone", fix)
    return Finding("network", "host name", "ok", f"{name} is {address}")


def _outward() -> dict[str, str]:
    return {name: address for name, address in network.interfaces().items() if not address.startswith("127.")}


def interfaces() -> Finding:
    """Those with an address: ranks may take any of them."""
    there = _outward()
    if not there:
        return Finding("network", "interfaces", "ok", "only lo: ranks on this machine alone")
    shown = ", ".join(f"{name} {address}{speed(_NETWORKS / name)}" for name, address in there.items())
    virtual = [name for name in there if name.startswith(_BETWEEN_CONTAINERS)]
    real = [name for name in there if name not in virtual]
    if len(there) > 1:
        best = max(real or there, key=lambda name: _megabits(_NETWORKS / name) or 0)
        why = f"; {', '.join(virtual)} lead to no other node" if virtual else ""
        fix = f"--nic {best} of python -m hvdbs.launch, or whichever leads to the other nodes"
        return Finding("network", "interfaces", "note", f"{shown}: ranks may take the wrong one{why}", fix)
    return Finding("network", "interfaces", "ok", shown)


def speed(interface: Path) -> str:
    """In words, with a blank in front; empty where the kernel does not know it, as of virtual ones."""
    megabits = _megabits(interface)
    if megabits is None:
        return ""
    return f" {megabits / 1000:g} Gbit/s" if megabits >= 1000 else f" {megabits} Mbit/s"


def _megabits(interface: Path) -> int | None:
    try:
        number = int((interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def infiniband(folder: Path = _INFINIBAND) -> Finding | None:
    """Ports of InfiniBand or RoCE; None where there are none."""
    shown, down = [], []
    for port in sorted(folder.glob("*/ports/*")):
        name = f"{port.parents[1].name}:{port.name}"
        state = (port / "state").read_text().strip().partition(": ")[2]
        rate = re.sub(r"\s*Gb/sec.*", " Gbit/s", (port / "rate").read_text().strip())
        shown.append(f"{name} {rate} {state}")
        if state != "ACTIVE":
            down.append(name)
    if not shown:
        return None
    if len(down) == len(shown):
        fix = "the cable, or the subnet manager (ibstat); until then ranks talk over TCP"
        return Finding("network", "InfiniBand", "note", ", ".join(shown), fix, "down")
    return Finding("network", "InfiniBand", "ok", ", ".join(shown), alike="up")


def slurm() -> Finding:
    if which("srun") is None:
        fix = "on a cluster: module load slurm; else python -m hvdbs.launch --hosts n1:4,n2:4, over ssh"
        return Finding("cluster", "Slurm", "note", "no srun on the PATH: one machine, or hosts over ssh", fix, "none")
    known, version = said("srun", "--version")
    version = version.strip()
    if not known:
        fix = "SLURM_CONF, if this is a node of a cluster"
        return Finding("cluster", "Slurm", "note", "srun is there, but knows no cluster", fix, "none")
    answers, status = said("scontrol", "ping")
    if not answers:
        fix = "SLURM_CONF, and whether munge and slurmctld run: scontrol ping"
        return Finding(
            "cluster", "Slurm", "note", f"{version}, but no controller answers ({_one(status)})", fix, version
        )
    job = os.environ.get("SLURM_JOB_ID")
    where = f"in job {job}, {os.environ.get('SLURM_JOB_NUM_NODES', '1')} nodes" if job else "outside of a job"
    _, kinds = said("srun", "--mpi=list")
    if "pmix" not in kinds:
        fix = "--launcher srun-gloo or mpirun of python -m hvdbs.launch: --launcher srun needs PMIx"
        return Finding("cluster", "Slurm", "note", f"{version}, {where}; srun knows no pmix", fix, version)
    _, config = said("scontrol", "show", "config")
    if re.search(r"^JobRequeue\s*=\s*0", config, re.MULTILINE):
        where += "; requeueing is off by default, and #SBATCH --requeue asks for it"
    return Finding("cluster", "Slurm", "ok", f"{version}, {where}; srun knows pmix", alike=version)


def _one(text: str) -> str:
    return " ".join(text.split())[:100]
