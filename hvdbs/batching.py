"""How one window is cut into micro-batches and dealt to the ranks (DESIGN: micro-batches are dealt, not sliced)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatch:
    """``size`` consecutive positions of the sample stream from ``begin``: micro-batch ``index`` of its window."""

    index: int
    begin: int
    size: int


@dataclass(frozen=True)
class Window:
    """The ``global_batch`` stream positions from ``begin``, cut into micro-batches of ``micro_batch`` samples.

    The last micro-batch may be short. What a micro-batch holds depends neither on world_size nor on the rank that runs
    it; only who runs it does.
    """

    begin: int
    global_batch: int
    micro_batch: int

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the window has over all ranks."""
        return -(-self.global_batch // self.micro_batch)

    def dealt_to(self, rank: int, world_size: int) -> Iterator[MicroBatch]:
        """Those of ``rank``: every j with floor(j * world_size / n) == rank, consecutive and in stream order.

        Work is proportional to the rank's own share, not to the window or the world. Ranks differ by one micro-batch at
        most; with fewer micro-batches than ranks some ranks get none.
        """
        n = self.micro_batches
        for j in range(-(-rank * n // world_size), -(-(rank + 1) * n // world_size)):
            offset = j * self.micro_batch
            yield MicroBatch(j, self.begin + offset, min(self.micro_batch, self.global_batch - offset))


@dataclass(frozen=True)
class Dealing:
    """What a global batch costs in turns: micro-batches of the ``busiest`` and the ``idlest`` rank in one window."""

    micro_batches: int
    busiest: int
    idlest: int
    idle_share: float


def dealing(global_batch: int, micro_batch: int, world_size: int) -> Dealing:
    """How evenly a window falls on the ranks; ``idle_share`` is the part of all ranks' turns that nobody uses."""
    n = Window(0, global_batch, micro_batch).micro_batches
    busiest, idlest = -(-n // world_size), n // world_size
    return Dealing(n, busiest, idlest, 1.0 - n / (world_size * busiest))


def less_idle_micro_batch(global_batch: int, micro_batch: int, world_size: int) -> int | None:
    """The micro_batch closest to the asked one, at most half or double of it, that leaves the least idle share.

    None if none does better than the asked one.
    """
    candidates = range(max(1, micro_batch // 2), 2 * micro_batch + 1)
    best = min(
        candidates,
        key=lambda m: (round(dealing(global_batch, m, world_size).idle_share, 3), abs(m - micro_batch)),
    )
    gain = (
        dealing(global_batch, micro_batch, world_size).idle_share - dealing(global_batch, best, world_size).idle_share
    )
    return best if gain > 0.01 else None
