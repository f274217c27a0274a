"""``python -m hvdbs.launch.rendezvous HOST:RANKS,... COMMAND``: Horovod's rendezvous for ranks that srun starts.

Each rank of Gloo asks a small HTTP server where the others are. horovodrun has it, and starts its ranks with ssh; here
the same server stands beside one srun, which needs neither ssh nor MPI. It listens on a free port of all interfaces for
as long as COMMAND runs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from hvdbs.errors import HvdbsError, refusal
from hvdbs.launch import network
from hvdbs.launch.processes import end_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run COMMAND beside the server; returns its exit code."""
    hosts, *command = sys.argv[1:] if argv is None else argv
    try:
        address = network.address_of(os.environ["HOROVOD_GLOO_IFACE"]) if "HOROVOD_GLOO_IFACE" in os.environ else ""
        address = address or _reached_by([entry.rpartition(":")[0] for entry in hosts.split(",")])
        port = _serve(hosts)
    except HvdbsError as error:
        sys.stderr.write(f"hvdbs: error: {error}\n")
        return 2
    told = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    return subprocess.call(command, env=os.environ | told, preexec_fn=end_with_parent)


def _serve(hosts: str) -> int:
    """Start the server; its port. It ends with this process."""
    try:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer
    except ImportError as error:
        raise refusal("--launcher", "srun-gloo", f"needs Horovod ({error})", "run make setup") from None
    plan = get_host_assignments(parse_hosts(hosts), sum(int(entry.rpartition(":")[2]) for entry in hosts.split(",")))
    server = RendezvousServer(False)
    port: int = server.start()
    server.init(plan)
    return port


def _reached_by(hosts: Sequence[str]) -> str:
    """An address of this machine that ``hosts`` reach: that of the route to the first of them that is another."""
    own = "127.0.0.1"
    for host in hosts:
        try:
            address = socket.gethostbyname(host)
        except OSError as error:
            raise refusal("--launcher", "srun-gloo", f"cannot resolve {host} ({error.strerror or error})") from None
        own = network.source_towards(address)
        if own != address:
            break
    return own


if __name__ == "__main__":
    sys.exit(main())
