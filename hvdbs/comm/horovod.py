"""Ranks of a job under Horovod. The only module that imports it."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdbs.comm import AUTOTUNE_LOG, PeerFailure
from hvdbs.comm.cores import choose
from hvdbs.errors import refusal

_PART_BYTES = 2**30  # MPI counts in C ints
_TIMELINE, _DYNAMIC = "HOROVOD_TIMELINE", "DYNAMIC"  # the second: started and stopped by calls


@contextmanager
def _peers() -> Iterator[None]:
    """What Horovod raises once a rank is gone, as PeerFailure."""
    try:
        yield
    except HorovodInternalError as error:
        raise PeerFailure(str(error)) from None
    except ValueError as error:  # raised at the next call once the core has been shut down by a failing peer
        if "shut down" in str(error):
            raise PeerFailure(str(error)) from None
        raise


class _Sum:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def wait(self) -> None:
        with _peers():
            hvd.synchronize(self._handle)


class _Gathered:
    def __init__(self, handle: int, dtype: torch.dtype) -> None:
        self._handle = handle
        self._dtype = dtype

    def wait(self) -> torch.Tensor:
        with _peers():
            rows: torch.Tensor = hvd.synchronize(self._handle)
        return rows.view(self._dtype)


class Horovod:
    """All ranks that the launcher started.

    ``timeline``: whether rank 0 may be asked to write one. Horovod's messages between ranks are longer then, so all
    must agree, and on rank 0 a thread of Horovod's spins from here to the end, also while it has nothing to write.
    """

    def __init__(self, timeline: bool = False, autotune: bool = False) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if timeline and os.environ.setdefault(_TIMELINE, _DYNAMIC) != _DYNAMIC:
            rule = "has Horovod write a timeline of its own, and --trace another"
            raise refusal(
                _TIMELINE, os.environ[_TIMELINE], rule, "leave it unset, and horovodrun's --timeline-filename"
            )
        # Horovod's core would otherwise regroup small tensors by when they happen to arrive, which changes the order of
        # summation from run to run. The buckets of gradients.py are the only grouping, unless it searches for its own.
        if autotune:
            os.environ["HOROVOD_AUTOTUNE"] = "1"
            self._folder = tempfile.TemporaryDirectory(prefix="hvdbs-autotune-")
            os.environ.setdefault(AUTOTUNE_LOG, str(Path(self._folder.name) / "log.csv"))
        else:
            os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
        choose(os.environ, len(os.sched_getaffinity(0)))
        hvd.init()
        self.epoch = time.time() - time.perf_counter()  # both of Horovod's clocks, as it compared them a moment ago
        self.rank: int = hvd.rank()
        self.world_size: int = hvd.size()
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        if hvd.nccl_built() and torch.cuda.is_available():
            self.backend = "horovod-nccl"
        else:
            self.backend = "horovod-mpi" if hvd.mpi_enabled() else "horovod-gloo"

    def start_sum(self, tensor: torch.Tensor, name: str) -> _Sum:
        with _peers():
            return _Sum(hvd.allreduce_async_(tensor, name=name, op=hvd.Sum))

    def start_gather(self, rows: torch.Tensor, name: str) -> _Gathered:
        # Horovod knows no bfloat16; nothing is added up here, so any type of that size carries its bits.
        sent = rows.view(torch.int16) if rows.dtype is torch.bfloat16 else rows
        with _peers():
            return _Gathered(hvd.allgather_async(sent, name=name), rows.dtype)

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        dense = tensor.contiguous()  # Horovod takes no other layout: a channels_last weight goes through a copy
        with _peers():
            hvd.broadcast_(dense, root_rank=0, name=name)
        if dense is not tensor:
            tensor.copy_(dense)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        size = torch.tensor([len(data or b"")], dtype=torch.int64)
        self.broadcast(size, "broadcast_bytes.size")
        content = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.rank == 0 and data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        for part in content.split(_PART_BYTES):
            self.broadcast(part, "broadcast_bytes.data")
        return content.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self.start_sum(sizes, "gather_bytes.sizes").wait()
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        with _peers():
            whole = hvd.allgather(content, name="gather_bytes.data").numpy().tobytes()
        ends = sizes.cumsum(0).tolist()
        return [whole[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]

    def barrier(self) -> None:
        self.start_sum(torch.zeros(1), "barrier").wait()

    def close(self) -> None:
        self.barrier()
        hvd.shutdown()
        if self._folder is not None:
            self._folder.cleanup()

    def start_timeline(self, path: Path) -> None:
        hvd.start_timeline(str(path))

    def stop_timeline(self) -> None:
        """The file is whole when this returns."""
        hvd.stop_timeline()

    def abort(self, code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        if hvd.mpi_enabled():
            with suppress(ImportError):  # mpirun ends the others when it sees this one's exit status
                from mpi4py import MPI

                MPI.COMM_WORLD.Abort(code)
        os._exit(code)
