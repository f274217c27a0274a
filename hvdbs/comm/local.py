"""Communicators within one process: Solo (a plain run) and ThreadWorld (ranks as threads, for tests)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

from hvdbs.comm import PeerFailure

T = TypeVar("T")


class _Done:
    def wait(self) -> None:
        return None


class _Gathered:
    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish = finish

    def wait(self) -> torch.Tensor:
        return self._finish()


class Solo:
    """The only rank there is. A sum over one rank is the tensor itself."""

    rank = 0
    world_size = 1
    local_rank = 0
    local_size = 1
    backend = "solo"

    def start_sum(self, tensor: torch.Tensor, name: str) -> _Done:
        return _Done()

    def start_gather(self, rows: torch.Tensor, name: str) -> _Gathered:
        return _Gathered(lambda: rows)

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        return None

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert data is not None
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None

    def abort(self, code: int) -> NoReturn:
        raise SystemExit(code)


class ThreadWorld:
    """``world_size`` ranks as threads of this process, meeting at a barrier for each collective.

    For tests of the logic between ranks without a launcher. torch's global generator is shared by all threads, so
    models that draw random numbers need real ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        self._slots: list[object] = [None] * world_size

    def run(self, main: Callable[[ThreadRank], T]) -> list[T]:
        """``main(rank)`` in every thread; the results by rank. Raises the first failing rank's exception."""
        results: list[T | None] = [None] * self.world_size
        errors: list[tuple[bool, int, BaseException]] = []

        def one(rank: int) -> None:
            try:
                results[rank] = main(ThreadRank(self, rank))
            except BaseException as error:
                errors.append((isinstance(error, PeerFailure), rank, error))
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise min(errors, key=lambda entry: entry[:2])[2]
        return results  # type: ignore[return-value]  # every rank that did not fail has set its own

    def exchange(self, rank: int, item: T) -> list[T]:
        """Every rank's ``item`` by rank."""
        self._slots[rank] = item
        self._wait()
        everyone: list[T] = list(self._slots)  # type: ignore[arg-type]  # all ranks put the same type in
        self._wait()
        return everyone

    def _wait(self) -> None:
        try:
            self._barrier.wait(timeout=60)
        except threading.BrokenBarrierError:
            raise PeerFailure("another thread failed") from None


class _Pending:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        self._finish()


class ThreadRank:
    """One rank of a ThreadWorld. Sums run when waited for, in the same order on every rank, and add up by rank."""

    backend = "threads"

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self.rank = self.local_rank = rank
        self.world_size = self.local_size = world.world_size

    def start_sum(self, tensor: torch.Tensor, name: str) -> _Pending:
        def finish() -> None:
            everyone = self._world.exchange(self.rank, (name, tensor.clone()))
            names = {entry[0] for entry in everyone}
            assert names == {name}, f"ranks reduce different tensors: {sorted(names)}"
            tensor.copy_(torch.stack([entry[1] for entry in everyone]).sum(0))

        return _Pending(finish)

    def start_gather(self, rows: torch.Tensor, name: str) -> _Gathered:
        def finish() -> torch.Tensor:
            everyone = self._world.exchange(self.rank, (name, rows.clone()))
            names = {entry[0] for entry in everyone}
            assert names == {name}, f"ranks gather different rows: {sorted(names)}"
            return torch.cat([entry[1] for entry in everyone])

        return _Gathered(finish)

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        tensor.copy_(self._world.exchange(self.rank, tensor.clone())[0])

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        result = self._world.exchange(self.rank, data)[0]
        assert result is not None
        return result

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self._world.exchange(self.rank, data)

    def barrier(self) -> None:
        self._world.exchange(self.rank, None)

    def close(self) -> None:
        self.barrier()

    def abort(self, code: int) -> NoReturn:
        raise SystemExit(code)
