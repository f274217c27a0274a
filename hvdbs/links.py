"""Measures what reductions between ranks take, as the reducer starts them: several at once, one after the other."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch

from hvdbs.calibration import Fitted, fit_link
from hvdbs.comm import Communicator

_SIZES = tuple(4**power for power in range(5, 14))  # bytes of a message: 1 KB to 64 MB
_BURST = 4
_LONGEST_SECONDS = 0.5  # of one operation; larger messages are not tried


def timed(act: Callable[[], object], device: torch.device, times: int = 7) -> float:
    """The median seconds of ``act``, after one call that is not counted."""
    found = []
    for _ in range(times + 1):
        begin = perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(perf_counter() - begin)
    return statistics.median(found[1:])


def _operation(comm: Communicator, operation: str, tensor: torch.Tensor, name: str) -> Callable[[], object]:
    """Collective, begun now, ended by what it returns."""
    start = comm.start_sum if operation == "allreduce" else comm.start_gather
    return start(tensor, name).wait


def measure_operation(
    comm: Communicator, operation: str, dtype: torch.dtype, device: torch.device, nbytes: int
) -> tuple[float, float]:
    """Collective. Seconds of one operation of ``nbytes`` in a row of them, and what passes before the first begins.

    From one operation, s + m, and from _BURST at once, s + n m: of either the least over repetitions, as noise only
    adds, of the slowest rank.
    """
    share = nbytes if operation == "allreduce" else nbytes // comm.world_size
    tensors = [torch.zeros(max(1, share // dtype.itemsize), dtype=dtype, device=device) for _ in range(_BURST)]

    def run(count: int) -> float:
        comm.barrier()
        begin = perf_counter()
        waits = [_operation(comm, operation, t, f"{operation}.{k}.{nbytes}") for k, t in enumerate(tensors[:count])]
        for wait in waits:
            wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter() - begin

    run(_BURST)
    once = run(1)
    repeats = int(comm.broadcast_bytes(str(max(4, min(25, int(1.0 / (once * (1 + _BURST)))))).encode()))
    pairs = [(run(1), run(_BURST)) for _ in range(repeats)]
    ranks = [json.loads(text) for text in comm.gather_bytes(json.dumps(pairs).encode())]
    slowest = [[max(times) for times in zip(*(own[j] for own in ranks), strict=True)] for j in range(repeats)]
    single, burst = (min(times[k] for times in slowest) for k in (0, 1))
    each = max((burst - single) / (_BURST - 1), burst / _BURST / 4)  # at least a part of what four take
    return each, max(0.0, single - each)


def measure_busy(comm: Communicator, device: torch.device, dtype: torch.dtype, nbytes: int, seconds: float) -> float:
    """Collective. The share of a reduction, of ``nbytes`` and ``seconds`` alone, that computing beside it loses."""
    if device.type == "cuda":
        return 0.0
    a = torch.randn(192, 192)
    out = torch.empty_like(a)
    tensor = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    once = timed(lambda: torch.mm(a, a, out=out), device, 50)
    times = int(comm.broadcast_bytes(str(max(1, int(2 * seconds / once))).encode()))

    def compute(beside: bool) -> float:
        comm.barrier()
        wait = _operation(comm, "allreduce", tensor, "busy") if beside else lambda: None
        begin = perf_counter()
        for _ in range(times):
            torch.mm(a, a, out=out)
        took = perf_counter() - begin
        wait()
        return took

    lost = []
    for _ in range(int(comm.broadcast_bytes(str(max(4, min(15, int(2.0 / (5 * seconds))))).encode()))):
        alone = compute(False)
        lost.append((compute(True) - alone) / seconds)
    everyone: list[float] = [
        share for text in comm.gather_bytes(json.dumps(lost).encode()) for share in json.loads(text)
    ]
    return min(1.0, max(0.0, statistics.median(everyone)))


def measure_links(comm: Communicator, dtype: torch.dtype, device: torch.device) -> tuple[Fitted, ...]:
    """Collective. Allreduce and allgather over all ranks, fitted; none of a single rank."""
    if comm.world_size == 1:
        return ()
    fitted = []
    for operation in ("allreduce", "allgather"):
        rows, starts = [], []
        for nbytes in _SIZES:
            each, start = measure_operation(comm, operation, dtype, device, nbytes)
            rows.append((nbytes, each))
            if nbytes <= 2**20:
                starts.append(start)
            if each > _LONGEST_SECONDS / 4:  # the next size is four times as long
                break
        named = [
            {"operation": operation, "world_size": comm.world_size, "message_bytes": n, "seconds": s} for n, s in rows
        ]
        link, error = fit_link(named, operation)
        # A message that takes a while, so that a millisecond here or there does not matter.
        nbytes, seconds = next((row for row in rows if row[1] > 0.02), rows[-1])
        busy = measure_busy(comm, device, dtype, nbytes, seconds) if operation == "allreduce" else 0.0
        link = replace(link, start_seconds=statistics.median(starts), busy=busy)
        fitted.append(Fitted(operation, comm.world_size, link, error, tuple(rows)))
    return tuple(fitted)
