"""Which device a rank trains on: a GPU of its own, or the CPU, and the same kind on every rank."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from hvdbs.comm import Communicator
from hvdbs.config import Config
from hvdbs.environment import cpu_model
from hvdbs.errors import refusal

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Seat:
    """What a rank sees of its node. ``gpus``: their UUIDs, in torch's order; ``visible``: CUDA_VISIBLE_DEVICES."""

    host: str
    local_rank: int
    gpus: Sequence[str]
    visible: str | None

    def __str__(self) -> str:
        return f"{self.host} ({VISIBLE} {'unset' if self.visible is None else self.visible or 'empty'})"


def choose_device(config: Config, comm: Communicator) -> torch.device:
    """Collective. This rank's GPU or the CPU. Raises HvdbsError, with one text on all ranks, where ``assign`` does."""
    gpus: list[str] = []
    if config.device != "cpu" and torch.cuda.is_available():
        gpus = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    mine = Seat(socket.gethostname(), comm.local_rank, gpus, os.environ.get(VISIBLE))
    seats = [Seat(**json.loads(text)) for text in comm.gather_bytes(json.dumps(asdict(mine)).encode())]
    index = assign(config.device, seats)[comm.rank]
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def assign(asked: str, seats: Sequence[Seat]) -> list[int | None]:
    """The GPU of each rank, as its index among those that the rank sees; None: the CPU. ``seats`` by rank.

    A rank takes number local_rank modulo those it sees: right where all see the whole node, and where the launcher
    shows each its own (``--gpus-per-task``), which is then number 0 everywhere. A UUID tells whether two have taken the
    same one: NCCL refuses that, and it would halve the speed of both. Raises HvdbsError.
    """
    blind = [rank for rank, seat in enumerate(seats) if not seat.gpus]
    if asked == "cpu" or (asked == "auto" and len(blind) == len(seats)):
        return [None] * len(seats)
    if len(blind) == len(seats):
        raise refusal("device", asked, "is asked for, but torch sees no GPU", "device: cpu")
    if blind:
        there = next(rank for rank, seat in enumerate(seats) if seat.gpus)
        rule = f"finds GPUs for rank {there} on {seats[there]} and none for rank {blind[0]} on {seats[blind[0]]}"
        raise refusal("device", asked, rule, "show every rank a GPU, or device: cpu")
    indices = [seat.local_rank % len(seat.gpus) for seat in seats]
    takers: dict[str, list[int]] = {}
    for rank, (seat, index) in enumerate(zip(seats, indices, strict=True)):
        takers.setdefault(seat.gpus[index], []).append(rank)
    shared = next((ranks for ranks in takers.values() if len(ranks) > 1), None)
    if shared is not None:
        seat = seats[shared[0]]
        node = [other for other in seats if other.host == seat.host]
        most = len({gpu for other in node for gpu in other.gpus})
        fewer = f"{most} {'rank' if most == 1 else 'ranks'} on that node, or " if most < len(node) else ""
        raise refusal(
            "device",
            f"cuda:{indices[shared[0]]} of {seat}",
            f"is taken by ranks {', '.join(map(str, shared))}, and a GPU is for one of them",
            f"{fewer}another {VISIBLE} for each (srun --gpus-per-task=1 sets it), or device: cpu",
        )
    return list(indices)


def alike(config: Config, comm: Communicator, device: torch.device) -> None:
    """Collective. Raises HvdbsError, with one text on all ranks, where ranks that multiply the same factors would not
    get the same bits, so that replicas would part."""
    if config.communication.scheme == "dense":
        return
    kinds = [json.loads(text) for text in comm.gather_bytes(json.dumps(arithmetic(device)).encode())]
    refuse_mixed(config.communication.scheme, kinds)


def arithmetic(device: torch.device) -> str:
    """What the bits of a matrix product depend on: the kind of GPU, or of CPU with its instructions and threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    many = f"{threads} thread{'' if threads == 1 else 's'}"
    return f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()}, {many})"


def refuse_mixed(scheme: str, kinds: Sequence[str]) -> None:
    """Raises HvdbsError unless all ``kinds`` of ``arithmetic``, by rank, are one."""
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        rule = f"needs the same device on every rank, not {kinds[0]} on rank 0 and {kinds[other]} on rank {other}"
        raise refusal("communication.scheme", scheme, rule, "communication.scheme: dense, or threads: 1 for CPUs alike")
