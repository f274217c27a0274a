"""What communication costs, in bytes: pure functions of sizes."""

from __future__ import annotations

from collections.abc import Sequence

CARRY_SLOTS = 3  # loss, stop request, checkpoint due; see step.py
CARRY_ITEM_BYTES = 8  # float64


def bucket_sizes(nbytes: Sequence[int], bucket_bytes: int) -> list[int]:
    """How many consecutive tensors of ``nbytes`` each bucket takes: it closes once it holds ``bucket_bytes`` or more.

    A bucket is never empty; a tensor is never split.
    """
    counts: list[int] = []
    held = bucket_bytes
    for size in nbytes:
        if held >= bucket_bytes:
            counts.append(0)
            held = 0
        counts[-1] += 1
        held += size
    return counts


def reduced_bytes(parameter_bytes: int, statistics: int) -> int:
    """Bytes that one rank hands to allreduce in one update, whatever its accumulation.

    All gradients (``parameter_bytes``), and the carry: its slots and ``statistics`` batch-norm running values, float64.
    """
    return parameter_bytes + CARRY_ITEM_BYTES * (CARRY_SLOTS + statistics)


def ring_bytes(nbytes: int, world_size: int) -> float:
    """Bytes that one rank sends in a ring allreduce of ``nbytes``: 2 (P - 1) / P times as many.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
    """
    return 2 * (world_size - 1) / world_size * nbytes
