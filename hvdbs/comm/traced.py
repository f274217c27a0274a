"""A communicator that keeps, in traced windows, when each collective was handed over and when its result was there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import NoReturn, Protocol, runtime_checkable

import torch

from hvdbs.comm import Communicator, Gathering, Handle
from hvdbs.timeline import Call, Span


@runtime_checkable
class KeepsTimeline(Protocol):
    """A communicator whose rank 0 can write Horovod's timeline. ``epoch``: see ``hvdbs.timeline.operations``."""

    epoch: float

    def start_timeline(self, path: Path) -> None: ...

    def stop_timeline(self) -> None: ...


class _Sum:
    def __init__(self, handle: Handle, ended: Callable[[], None]) -> None:
        self._handle = handle
        self._ended = ended

    def wait(self) -> None:
        self._handle.wait()
        self._ended()


class _Gathered:
    def __init__(self, gathering: Gathering, ended: Callable[[int], None]) -> None:
        self._gathering = gathering
        self._ended = ended

    def wait(self) -> torch.Tensor:
        rows = self._gathering.wait()
        self._ended(rows.nbytes)
        return rows


class Traced:
    """``comm``, whose sums, gatherings and broadcasts are kept between ``begin`` and ``take``.

    ``clock``: in seconds; one for all ranks of a ``host``, which is named by its name and its boot. ``core``: what may
    keep a timeline, where ``comm`` is wrapped around it.
    """

    def __init__(
        self,
        comm: Communicator,
        clock: Callable[[], float] = perf_counter,
        host: tuple[str, str] | None = None,
        core: Communicator | None = None,
    ) -> None:
        self._comm = comm
        self._core = core or comm
        self._calls: list[Call] | None = None
        self.clock = clock
        self.host = host or (socket.gethostname(), _boot())
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.local_rank = comm.local_rank
        self.local_size = comm.local_size
        self.backend = comm.backend

    def begin(self) -> None:
        self._calls = []

    def take(self) -> tuple[Call, ...]:
        """What was kept since ``begin``, in the order in which results were there."""
        calls, self._calls = tuple(self._calls or ()), None
        return calls

    def meet(self, times: int) -> list[Span]:
        """Collective. Meet ``times`` times: when this rank entered each meeting and when it left."""
        met = []
        for _ in range(times):
            entered = self.clock()
            self._comm.start_sum(torch.zeros(1), "meeting").wait()
            met.append((entered, self.clock()))
        return met

    @property
    def timeline(self) -> KeepsTimeline | None:
        """Of Horovod, on rank 0."""
        return self._core if self.rank == 0 and isinstance(self._core, KeepsTimeline) else None

    def start_sum(self, tensor: torch.Tensor, name: str) -> Handle:
        if self._calls is None:
            return self._comm.start_sum(tensor, name)
        begun = self.clock()
        handle = self._comm.start_sum(tensor, name)
        return _Sum(handle, lambda: self._keep("allreduce", name, tensor.nbytes, tensor.nbytes, begun))

    def start_gather(self, rows: torch.Tensor, name: str) -> Gathering:
        if self._calls is None:
            return self._comm.start_gather(rows, name)
        begun = self.clock()
        gathering = self._comm.start_gather(rows, name)
        return _Gathered(gathering, lambda nbytes: self._keep("allgather", name, rows.nbytes, nbytes, begun))

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        begun = self.clock()
        self._comm.broadcast(tensor, name)
        self._keep("broadcast", name, tensor.nbytes, tensor.nbytes, begun)

    def _keep(self, operation: str, name: str, sent_bytes: int, result_bytes: int, begun: float) -> None:
        if self._calls is not None:
            self._calls.append(Call(operation, name, sent_bytes, result_bytes, begun, self.clock()))

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        return self._comm.broadcast_bytes(data)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self._comm.gather_bytes(data)

    def barrier(self) -> None:
        self._comm.barrier()

    def close(self) -> None:
        self._comm.close()

    def abort(self, code: int) -> NoReturn:
        self._comm.abort(code)


def _boot() -> str:
    """What is the same for all processes that share a monotonic clock."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
