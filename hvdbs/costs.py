"""What communication costs, in bytes: pure functions of sizes."""

from __future__ import annotations

from collections.abc import Sequence

CARRY_SLOTS = 3  # loss, stop request, checkpoint due; see step.py
CARRY_ITEM_BYTES = 8  # float64
OWN_BUCKET_BYTES = 2**20  # from here on copying a gradient to its bucket is felt, and one more message is not


def buckets(nbytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Which of the tensors of ``nbytes`` each bucket takes, by their places; in the order in which buckets are full.

    A tensor of OWN_BUCKET_BYTES, or of ``bucket_bytes`` if those are fewer, has a bucket of its own. The others share,
    one after the other; their bucket closes once it holds ``bucket_bytes`` or more.
    """
    closed: list[list[int]] = []
    shared: list[int] = []
    held = 0
    for place, size in enumerate(nbytes):
        if size >= min(OWN_BUCKET_BYTES, bucket_bytes):
            closed.append([place])
            continue
        shared.append(place)
        held += size
        if held >= bucket_bytes:
            closed.append(shared)
            shared, held = [], 0
    return [*closed, shared] if shared else closed


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
