"""Seconds of an update, from what computing and reductions take: pure functions of measured numbers.

A rank computes; its reductions go through one channel, first come first served, while the last backward pass of the
window goes on (wait-free back-propagation: Zhang et al., "Poseidon", USENIX ATC 2017, section 3). With a_k the time at
which the k-th reduction may start, in the order of their starts, and m_k its seconds,

    f_k = max(f_{k-1}, a_k + start) + m_k,      update = data + max(last backward, f_n) + optimizer,

where ``start`` is what passes before ranks have agreed that all are ready. On a core that computing shares with
whoever moves the bytes, a reduction also holds computing back: by ``busy`` of its seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from hvdbs.costs import ring_bytes


@dataclass(frozen=True)
class Link:
    """What reductions of one kind take: see ``seconds``; ``start_seconds`` and ``busy`` as in the module's text."""

    bytes_per_second: float
    latency_seconds: float = 0.0
    operation_seconds: float = 0.0
    start_seconds: float = 0.0
    busy: float = 0.0

    def seconds(self, sent_bytes: float, messages: float) -> float:
        """One operation in which a rank sends ``sent_bytes`` in ``messages``, one after the other."""
        return self.operation_seconds + messages * self.latency_seconds + sent_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Links:
    """Of summed gradients and of gathered factors. ``tree``: latencies are those of recursive halving and doubling,
    2 log2 P messages of the same bytes (Thakur et al., IJHPCA 2005): as few as any algorithm has."""

    allreduce: Link
    allgather: Link
    tree: bool = False

    def messages(self, gathered: bool, world_size: int) -> float:
        hops = math.ceil(math.log2(world_size)) if self.tree else world_size - 1
        return hops if gathered else 2 * hops

    def link(self, gathered: bool) -> Link:
        return self.allgather if gathered else self.allreduce


@dataclass(frozen=True)
class Transfer:
    """One reduction of an update. ``ready``: the share of the last backward pass after which it may start;
    ``gathered``: an allgather, of ``nbytes`` of all ranks together, else an allreduce of as many on each rank;
    ``after_seconds``: what its result takes before the optimizer can have it (the product of factors)."""

    ready: float
    nbytes: int
    gathered: bool = False
    after_seconds: float = 0.0

    def sent_bytes(self, world_size: int) -> float:
        """By one rank, in a ring."""
        return (world_size - 1) / world_size * self.nbytes if self.gathered else ring_bytes(self.nbytes, world_size)


@dataclass(frozen=True)
class Compute:
    """What one rank computes in a window, in seconds.

    ``forward`` and ``backward``: of its first micro-batch; ``again``: both of each further one, whose gradients are
    added to those before, ``backward_again`` the second part of that. ``optimizer``: all from the last sum to the
    next window. ``jitter``: standard deviation of one micro-batch. ``data``: in which the source gives a micro-batch;
    it takes the time of computing where it ``shares`` its cores, else it goes on beside it.
    """

    forward: float
    backward: float
    again: float
    backward_again: float
    optimizer: float
    jitter: float = 0.0
    data: float = 0.0
    shares: bool = False

    def scaled(self, factor: float) -> Compute:
        """For micro-batches that take ``factor`` times as long. The optimizer does not look at samples."""
        return replace(
            self,
            forward=self.forward * factor,
            backward=self.backward * factor,
            again=self.again * factor,
            backward_again=self.backward_again * factor,
            jitter=self.jitter * factor,
            data=self.data * factor,
        )

    def slowed(self, factor: float) -> Compute:
        """On cores that ``factor`` ranks share."""
        return replace(self.scaled(factor), optimizer=self.optimizer * factor)

    def before_last_backward(self, turns: int) -> float:
        """Seconds of ``turns`` micro-batches but for the last backward pass."""
        if turns == 1:
            return self.forward
        return self.forward + self.backward + (turns - 1) * self.again - self.backward_again

    def last_backward(self, turns: int) -> float:
        return self.backward if turns == 1 else self.backward_again


@dataclass(frozen=True)
class Overlap:
    """When each transfer ``ends``, and when the pass has ``computed``; seconds from the start of the pass."""

    ends: tuple[float, ...]
    computed: float


def overlap(
    compute: float, ready: Sequence[float], seconds: Sequence[float], start: float = 0.0, busy: float = 0.0
) -> Overlap:
    """The recurrence of the module's text. ``ready``: seconds of computing before each transfer, in rising order."""
    clock = done = 0.0  # where we are; seconds of computing that are behind us
    taken: list[tuple[float, float]] = []  # when the channel was in use and computing may still be
    free = 0.0

    def go_on(until: float) -> None:
        nonlocal clock, done
        while taken:
            begin, end = taken[0]
            gap = max(0.0, begin - clock)
            if until - done <= gap:
                break
            clock, done = clock + gap, done + gap
            speed = 1.0 - busy
            if until - done <= speed * (end - clock):
                clock, done = clock + (until - done) / speed if speed else clock, until
                return
            clock, done = end, done + speed * (end - clock)
            del taken[0]
        clock, done = clock + until - done, until

    ends = []
    for at, needed in zip(ready, seconds, strict=True):
        go_on(max(at, done))
        begin = max(free, clock + start)
        free = begin + needed
        taken.append((begin, free))
        ends.append(free)
    go_on(max(compute, done))
    return Overlap(tuple(ends), clock)


def slowest(ranks: int) -> float:
    """The mean of the largest of ``ranks`` standard normal numbers, within 5 %: Blom's approximation
    ("Statistical Estimates and Transformed Beta-Variables", 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


@dataclass(frozen=True)
class Update:
    """One update of a rank with the most micro-batches, in seconds: ``seconds`` is the sum of the others.

    ``exposed``: from the end of the last backward pass until all sums are there; ``compute`` includes what reductions
    hold back and the wait for the slowest rank (``imbalance``); ``data``: waiting for it. ``sent_bytes``: by one rank.
    """

    seconds: float
    compute: float
    imbalance: float
    exposed: float
    optimizer: float
    data: float
    sent_bytes: float


def update(
    compute: Compute, transfers: Sequence[Transfer], turns: int, world_size: int, links: Links | None = None
) -> Update:
    """An update of ``world_size`` ranks, of which the busiest has ``turns`` micro-batches.

    Ranks wait for the slowest: their windows differ by jitter * sqrt(turns) if micro-batches are independent and
    about normal. ``links`` may be missing for one rank, which sends nothing.
    """
    first = compute.before_last_backward(turns) + (turns * compute.data if compute.shares else 0.0)
    last = compute.last_backward(turns)
    late = slowest(world_size) * compute.jitter * math.sqrt(turns)
    order = sorted(transfers, key=lambda transfer: transfer.ready) if world_size > 1 else []
    ready, needed = [], []
    for one in order:
        assert links is not None
        seconds = links.link(one.gathered).seconds(one.sent_bytes(world_size), links.messages(one.gathered, world_size))
        ready.append(one.ready * last)
        needed.append(seconds)
    channel = links.allreduce if links is not None else Link(math.inf)
    found = overlap(last, ready, needed, channel.start_seconds, channel.busy)
    end = found.computed
    for one, there in zip(order, found.ends, strict=True):
        end = max(end, there) + one.after_seconds
    computing = first + late + found.computed
    exposed = end - found.computed
    whole = computing + exposed + compute.optimizer
    waiting = 0.0 if compute.shares else max(0.0, turns * compute.data - whole)
    sent = sum(one.sent_bytes(world_size) for one in order)
    return Update(whole + waiting, computing, late, exposed, compute.optimizer, waiting, sent)


def without_overlap(
    compute: Compute, transfers: Sequence[Transfer], turns: int, world_size: int, links: Links | None = None
) -> float:
    """Seconds of the same update if reductions began when the last backward pass has ended: an upper bound."""
    at_end = [replace(transfer, ready=1.0) for transfer in transfers]
    return update(compute, at_end, turns, world_size, links).seconds


def efficiency(update_seconds: float, alone_seconds: float, world_size: int) -> float:
    """Of ``world_size`` ranks against one rank that makes the same update alone: the same training on fewer ranks."""
    return alone_seconds / (world_size * update_seconds)
