"""Nodes on one machine: network namespaces with links shaped to a rate, and Horovod's ranks started in them. Linux.

    if not nodes.inside():
        sys.exit(nodes.enter(sys.orig_argv))     # the same command again, where nodes can be made
    nodes.build(4)
    nodes.shape(4, "100mbit")
    nodes.launch("gloo", 4, ["python", "-m", "benchmarks.shaped"], 300)

All of it stands in namespaces of its own (network, mounts, processes): nothing of it can be seen outside, and with the
first process the kernel ends all others and takes the links away, also where that one was killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdbs.errors import HvdbsError

_INSIDE = "HVDBS_NODES"
_NETWORK, _SWITCH = "10.0.0", "switch"
_ROOM = Path("/run")  # a file system in memory that only these processes see
_TOOLS = ("unshare", "ip", "tc", "mount", "hostname")
_SHAPING = ("burst", "128kb", "latency", "50ms")
_PROBE = f"""mount -t tmpfs tmpfs {_ROOM} && ip netns add probe &&
ip link add port type veth peer name eth0 netns probe &&
tc qdisc add dev port root tbf rate 1gbit {" ".join(_SHAPING)} && ip netns exec probe unshare --uts hostname probe"""
_IN_NODE = f"""#!/bin/sh
exec ip netns exec "$1" unshare --uts sh -c 'hostname "$0"; export TMPDIR={_ROOM}/$0; shift; exec "$@"' "$1" "$@"
"""
_AGENT = f"""#!/bin/sh
node=$1
shift
exec {_ROOM}/in-node "$node" sh -c "$*"
"""

BACKENDS: dict[str, dict[str, str]] = {
    "gloo": {},
    "mpi": {},
    "mpi-ring": {
        "OMPI_MCA_btl_tcp_flags": "send",
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    },
}


def _private() -> list[str]:
    own = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return own if os.geteuid() == 0 else [*own, "--map-root-user"]


def not_permitted() -> str | None:
    """Why nodes cannot be made here, in one line, or None if they can."""
    missing = [name for name in _TOOLS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found (packages iproute2, util-linux)"
    done = subprocess.run([*_private(), "sh", "-c", _PROBE], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode == 0:
        return None
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"network namespaces with shaped links are not permitted here ({said}); as root they mostly are"


def inside() -> bool:
    """Whether this process is the first of namespaces of its own, or descends from it."""
    return _INSIDE in os.environ


def enter(command: Sequence[str]) -> int:
    """Run ``command`` as the first process of its own namespaces; its exit code."""
    library = ctypes.CDLL(None)

    def die_with_parent() -> None:
        library.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_DEATHSIG; unshare holds SIGTERM back

    environment = os.environ | {_INSIDE: "1"}
    with subprocess.Popen([*_private(), *command], env=environment, preexec_fn=die_with_parent) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # it has got the same signal


def name(number: int) -> str:
    return f"node{number}"


def hosts(count: int) -> str:
    """As Horovod and Open MPI take them, one slot on each."""
    return ",".join(f"{name(at)}:1" for at in range(1, count + 1))


def build(count: int) -> None:
    """``count`` nodes at one switch, not shaped; each has eth0, a name, and knows those of the others.

    Raises HvdbsError, also where this process is not ``inside``: it would change the machine's own network.
    """
    if not inside() or os.getpid() != 1:
        raise HvdbsError("nodes are made in namespaces of their own alone: call enter first")
    _run("mount", "-t", "tmpfs", "tmpfs", str(_ROOM))
    for file, text in (("in-node", _IN_NODE), ("agent", _AGENT)):
        (_ROOM / file).write_text(text)
        (_ROOM / file).chmod(0o755)
    lines = ["127.0.0.1 localhost", *(f"{_NETWORK}.{at} {name(at)}" for at in range(1, count + 1))]
    (_ROOM / "hosts").write_text("\n".join([*lines, ""]))
    _run("mount", "--bind", str(_ROOM / "hosts"), "/etc/hosts")
    _run("ip", "netns", "add", _SWITCH)
    _run("ip", "-n", _SWITCH, "link", "add", "name", _SWITCH, "type", "bridge")
    _run("ip", "-n", _SWITCH, "link", "set", _SWITCH, "up")
    for at in range(1, count + 1):
        node, port = name(at), f"port{at}"
        (_ROOM / node).mkdir()
        _run("ip", "netns", "add", node)
        _run("ip", "-n", _SWITCH, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", node)
        _run("ip", "-n", _SWITCH, "link", "set", port, "master", _SWITCH, "up")
        _run("ip", "-n", node, "addr", "add", f"{_NETWORK}.{at}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", node, "link", "set", device, "up")


def shape(count: int, rate: str) -> None:
    """Both directions of every node's link to ``rate``, in the words of tc (100mbit, 1gbit), or none; also from a node.

    At the node what it sends is held back, at its port of the switch what it is sent.
    """
    for at in range(1, count + 1):
        for space, device in ((name(at), "eth0"), (_SWITCH, f"port{at}")):
            there = ("dev", device, "root")
            subprocess.run(["tc", "-n", space, "qdisc", "del", *there], capture_output=True, check=False)
            if rate != "none":
                _run("tc", "-n", space, "qdisc", "add", *there, "tbf", "rate", rate, *_SHAPING)


def bytes_per_second(rate: str) -> float:
    """Of a ``rate`` as ``shape`` takes it: 100mbit is 12.5e6. Infinite for none."""
    if rate == "none":
        return float("inf")
    for unit, bits in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * bits / 8
    raise HvdbsError(f"rate: {rate} has no unit that is known; mbit or gbit, as in 100mbit, or none")


def sent_bytes() -> int:
    """What this process's node has put on its link since it was made, headers and all."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def in_node(number: int, program: Sequence[str]) -> list[str]:
    """The command that runs ``program`` in a node."""
    return [str(_ROOM / "in-node"), name(number), *program]


def command(backend: str, count: int, program: Sequence[str]) -> list[str]:
    """The command that starts ``program`` as one rank in each node, under Horovod with Gloo or MPI over TCP."""
    if backend == "gloo":
        server = [sys.executable, "-m", "hvdbs.launch.rendezvous", hosts(count)]
        return in_node(1, [*server, sys.executable, "-m", "benchmarks.nodes", *program])
    words = ["mpirun", "-np", str(count), "-H", hosts(count), "--bind-to", "none"]
    for parameter, value in {
        "plm_rsh_agent": str(_ROOM / "agent"),
        "plm_rsh_no_tree_spawn": "1",
        "oob_tcp_if_include": "eth0",
        "pml": "ob1",
        "btl": "tcp,self",
        "btl_tcp_if_include": "eth0",
    }.items():
        words += ["--mca", parameter, value]
    return in_node(1, [*words, "-x", "PATH", "-x", "PYTHONPATH", *program])


def environment(backend: str) -> dict[str, str]:
    """What ranks need that share this machine's cores although each has a node of its own."""
    own = {
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "HOROVOD_GLOO_IFACE": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    if os.geteuid() == 0:
        for prefix in ("OMPI", "PRTE"):
            own[f"{prefix}_ALLOW_RUN_AS_ROOT"] = own[f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return {**os.environ, **own, **BACKENDS[backend]}


def launch(backend: str, count: int, program: Sequence[str], limit_seconds: float) -> None:
    """Run ``program`` as one rank in each of ``count`` nodes. Raises HvdbsError if it fails or takes too long.

    Whatever happens no other process of these namespaces is left.
    """
    try:
        code = subprocess.call(
            command(backend, count, program),
            env=environment(backend),
            stdin=subprocess.DEVNULL,
            timeout=limit_seconds,
        )
    except subprocess.TimeoutExpired:
        raise HvdbsError(f"{backend} on {count} nodes: still running after {limit_seconds:g} s, ended") from None
    finally:
        _end_all()
    if code:
        raise HvdbsError(f"{backend} on {count} nodes: ended with exit code {code}")


def _end_all() -> None:
    """As the first process of its namespace, which is what -1 reaches: all others in it."""
    assert os.getpid() == 1
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.wait()
    except (ProcessLookupError, ChildProcessError):
        return


def start_ranks(variables: Mapping[str, str], program: Sequence[str]) -> int:
    """A rank of Gloo in each node that was built; the first exit code that is not 0, upon which all are ended."""
    count = len((_ROOM / "hosts").read_text().splitlines()) - 1
    ranks = []
    for rank in range(count):
        told = {"HOROVOD_RANK": rank, "HOROVOD_SIZE": count, "HOROVOD_CROSS_RANK": rank, "HOROVOD_CROSS_SIZE": count}
        told |= {"HOROVOD_LOCAL_RANK": 0, "HOROVOD_LOCAL_SIZE": 1, "HOROVOD_HOSTNAME": name(rank + 1)}
        own = {**variables, **{key: str(value) for key, value in told.items()}}
        ranks.append(subprocess.Popen(in_node(rank + 1, program), env=own, stdin=subprocess.DEVNULL))
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed:
            for rank in ranks:
                rank.kill()
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(0.05)


def _run(*words: str) -> None:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HvdbsError(f"{' '.join(words)}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(start_ranks(os.environ, sys.argv[1:]))
