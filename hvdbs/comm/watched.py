"""A Communicator that notes in a Pulse for which exchange its rank is waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from hvdbs.comm import Communicator, Gathering, Handle
from hvdbs.pulse import Pulse


class _Sum:
    def __init__(self, handle: Handle, name: str, pulse: Pulse) -> None:
        self._handle, self._name, self._pulse = handle, name, pulse

    def wait(self) -> None:
        self._pulse.peers = self._name
        self._handle.wait()
        self._pulse.peers = None
        self._pulse.beats += 1


class _Rows:
    def __init__(self, gathering: Gathering, name: str, pulse: Pulse) -> None:
        self._gathering, self._name, self._pulse = gathering, name, pulse

    def wait(self) -> torch.Tensor:
        with _noted(self._pulse, self._name):
            return self._gathering.wait()


@contextmanager
def _noted(pulse: Pulse, name: str) -> Iterator[None]:
    pulse.peers = name
    yield
    pulse.peers = None
    pulse.beats += 1


class Watched:
    """``comm``, each wait for the other ranks noted in ``pulse``."""

    def __init__(self, comm: Communicator, pulse: Pulse) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self.local_rank, self.local_size = comm.local_rank, comm.local_size
        self.backend = comm.backend
        self._comm, self._pulse = comm, pulse

    def start_sum(self, tensor: torch.Tensor, name: str) -> Handle:
        return _Sum(self._comm.start_sum(tensor, name), name, self._pulse)

    def start_gather(self, rows: torch.Tensor, name: str) -> Gathering:
        return _Rows(self._comm.start_gather(rows, name), name, self._pulse)

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        with _noted(self._pulse, name):
            self._comm.broadcast(tensor, name)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        with _noted(self._pulse, "broadcast_bytes"):
            return self._comm.broadcast_bytes(data)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        with _noted(self._pulse, "gather_bytes"):
            return self._comm.gather_bytes(data)

    def barrier(self) -> None:
        with _noted(self._pulse, "barrier"):
            self._comm.barrier()

    def close(self) -> None:
        with _noted(self._pulse, "close"):
            self._comm.close()

    def abort(self, code: int) -> NoReturn:
        self._comm.abort(code)
