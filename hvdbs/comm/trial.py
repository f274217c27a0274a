"""``python -m hvdbs.comm.trial BYTES SECONDS``: an allreduce that is really run, as every rank of a launch.

Rank 0 prints one line, ``hvdbs.trial {...}``, the JSON of a Trial.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from hvdbs.comm import Communicator, connect
from hvdbs.errors import HvdbsError

MARK = "hvdbs.trial"
_FEWEST = 5  # rounds; the first ones pay for connections and buffers


@dataclass(frozen=True)
class Trial:
    """``right``: whether every rank got the sum. ``seconds``: of the fastest round, as the slowest rank saw it."""

    world_size: int
    backend: str
    hosts: list[str]
    bytes: int
    right: bool
    seconds: float


def allreduce(comm: Communicator, size: int, patience: float) -> Trial:
    """Collective. Sum ``size`` bytes of float32 over all ranks, for about ``patience`` seconds."""
    where = torch.device("cuda", comm.local_rank % torch.cuda.device_count()) if "nccl" in comm.backend else "cpu"
    # Sums of small whole numbers, which no order of summation rounds.
    own = torch.arange(size // 4, dtype=torch.float32, device=where) % 251 + comm.rank
    tensor = own.clone()
    comm.start_sum(tensor, "trial.sum").wait()
    wanted = (own - comm.rank) * comm.world_size + sum(range(comm.world_size))
    right = torch.equal(tensor, wanted)
    times: list[float] = []
    more = torch.ones(1)
    deadline = time.monotonic() + patience
    while more.item() > 0:
        comm.barrier()
        begin = time.monotonic()
        comm.start_sum(tensor, "trial.sum").wait()
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
        times.append(time.monotonic() - begin)
        tensor.copy_(own)
        # Ranks agree on when to end: rank 0's clock counts.
        more = torch.tensor([1.0 if len(times) < _FEWEST or time.monotonic() < deadline else 0.0])
        comm.broadcast(more, "trial.more")
    everyone = [
        json.loads(text) for text in comm.gather_bytes(json.dumps([socket.gethostname(), right, times]).encode())
    ]
    slowest = [max(rank[2][at] for rank in everyone) for at in range(len(times))]
    hosts = [rank[0] for rank in everyone]
    return Trial(comm.world_size, comm.backend, hosts, size, all(rank[1] for rank in everyone), min(slowest))


def main(argv: Sequence[str] | None = None) -> int:
    size, patience = sys.argv[1:] if argv is None else argv
    torch.set_num_threads(1)
    try:
        comm = connect()
    except HvdbsError as error:
        sys.stderr.write(f"hvdbs: error: {error}\n")
        return 2
    trial = allreduce(comm, int(size), float(patience))
    if comm.rank == 0:
        sys.stdout.write(f"{MARK} {json.dumps(asdict(trial))}\n")
        sys.stdout.flush()
    comm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
