"""The cost model against closed forms, an event simulation in small steps, and what must only grow."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdbs.prediction import (
    Compute,
    Link,
    Links,
    Transfer,
    efficiency,
    overlap,
    slowest,
    update,
    without_overlap,
)

seconds = st.floats(0.001, 2.0)
passes = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6)
busy_shares = st.sampled_from([0.0, 0.3, 0.8, 1.0])


def simulated(compute: float, ready: list[float], needed: list[float], start: float, busy: float, dt: float) -> tuple:
    """One clock, tick by tick: computing goes on at 1 - busy while the channel moves something, else at 1."""
    queue: list[tuple[float, int]] = []  # when agreed on, which
    left = list(needed)
    ends = [math.inf] * len(ready)
    clock = done = 0.0
    computed = math.inf
    asked, serving = 0, None
    while not (computed < math.inf and all(end < math.inf for end in ends)):
        while asked < len(ready) and done >= ready[asked] - 1e-12:
            queue.append((clock + start, asked))
            asked += 1
        if serving is None and queue and queue[0][0] <= clock + 1e-12:
            serving = queue.pop(0)[1]
        if computed == math.inf:
            done += dt * (1 - busy if serving is not None else 1)
            if done >= compute - 1e-12:
                computed = clock + dt
        clock += dt
        if serving is not None:
            left[serving] -= dt
            if left[serving] <= 1e-12:
                ends[serving] = clock
                serving = None
    return ends, computed


@settings(max_examples=20, deadline=None)
@given(passes, seconds, st.sampled_from([0.0, 0.01, 0.5]), busy_shares)
def test_the_recurrence_is_what_a_simulation_in_small_steps_does(
    pairs: list[tuple[float, float]], rest: float, start: float, busy: float
) -> None:
    ready = list(np.cumsum([at for at, _ in pairs]))
    needed = [m for _, m in pairs]
    compute = ready[-1] + rest
    found = overlap(compute, ready, needed, start, busy)
    dt = 1e-3
    ends, computed = simulated(compute, ready, needed, start, busy, dt)
    within = dt * 8 * (len(pairs) + 1)
    assert found.computed == pytest.approx(computed, abs=within)
    assert found.ends == pytest.approx(ends, abs=within)


@given(passes, seconds)
def test_wait_free_is_the_papers_recurrence_and_between_its_bounds(
    pairs: list[tuple[float, float]], rest: float
) -> None:
    """max(sum of c, c_L + sum of m) <= end <= sum of c + sum of m, and no overlap is possible with one layer."""
    c, m = [at for at, _ in pairs], [needed for _, needed in pairs]
    ready = list(np.cumsum(c))
    found = overlap(ready[-1], ready, m)
    t = f = 0.0
    for c_l, m_l in pairs:
        t += c_l
        f = max(f, t) + m_l
    end = max(found.computed, found.ends[-1])
    assert end == pytest.approx(f)
    assert max(sum(c), c[0] + sum(m)) <= end * (1 + 1e-12)
    assert end <= (sum(c) + sum(m)) * (1 + 1e-12)
    assert overlap(c[0], c[:1], m[:1]).ends == pytest.approx((c[0] + m[0],))
    assert overlap(ready[-1] + rest, ready, m).ends == pytest.approx(found.ends)


@given(passes, seconds, busy_shares)
def test_reductions_that_hold_computing_back_cost_no_more_than_doing_one_after_the_other(
    pairs: list[tuple[float, float]], rest: float, busy: float
) -> None:
    ready, needed = list(np.cumsum([at for at, _ in pairs])), [m for _, m in pairs]
    compute = ready[-1] + rest
    free, held = overlap(compute, ready, needed), overlap(compute, ready, needed, busy=busy)
    assert held.computed >= free.computed * (1 - 1e-12)
    assert max(held.computed, held.ends[-1]) <= (compute + sum(needed)) * (1 + 1e-12)
    assert held.computed <= (compute + busy * sum(needed)) * (1 + 1e-12)


COMPUTE = Compute(forward=1.0, backward=2.0, again=3.5, backward_again=2.4, optimizer=0.25, jitter=0.1)
LINKS = Links(Link(100.0, 0.01, 0.02), Link(50.0, 0.01, 0.03))
TRANSFERS = [Transfer(0.25, 40.0), Transfer(1.0, 20.0), Transfer(0.5, 30.0, gathered=True, after_seconds=0.5)]


def test_an_update_by_hand() -> None:
    """4 ranks, 3 micro-batches: 1 + 2 + 3.5 + 1.1 before the last backward of 2.4, and 1.03 * 0.1 * sqrt(3) late.
    Sums send 3/2 of their bytes in 6 messages, the gathering 3/4 in 3. Order by readiness: 40 at 0.6, 30 at 1.2,
    20 at 2.4; the product of the gathered starts when computing has ended."""
    found = update(COMPUTE, TRANSFERS, 3, 4, LINKS)
    summed = [0.02 + 6 * 0.01 + 1.5 * n / 100 for n in (40, 20)]
    gathered = 0.03 + 3 * 0.01 + 0.75 * 30 / 50
    assert [round(s, 6) for s in (*summed, gathered)] == [0.68, 0.38, 0.51]
    late = slowest(4) * 0.1 * math.sqrt(3)
    assert found.compute == pytest.approx(1 + 2 + 3.5 + 1.1 + 2.4 + late)
    assert found.exposed == pytest.approx(max(2.4 + 0.5, 2.4 + 0.38) - 2.4)
    assert found.seconds == pytest.approx(found.compute + found.exposed + 0.25)
    assert found.sent_bytes == pytest.approx(1.5 * 60 + 0.75 * 30)


def test_one_rank_sends_nothing_and_waits_for_nobody() -> None:
    found = update(COMPUTE, TRANSFERS, 1, 1)
    assert (found.seconds, found.exposed, found.imbalance, found.sent_bytes) == (3.25, 0.0, 0.0, 0.0)
    assert update(COMPUTE, [], 2, 1).seconds == 1 + 2 + 3.5 + 0.25
    assert efficiency(found.seconds, found.seconds, 1) == 1


@given(st.integers(2, 300), st.integers(1, 20), st.floats(1.01, 10))
def test_more_bytes_latency_ranks_and_turns_never_take_less(world_size: int, turns: int, more: float) -> None:
    base = update(COMPUTE, TRANSFERS, turns, world_size, LINKS).seconds * (1 - 1e-12)
    larger = [Transfer(t.ready, t.nbytes * more, t.gathered, t.after_seconds) for t in TRANSFERS]
    slower = Links(Link(100.0 / more, 0.01, 0.02), Link(50.0, 0.01 * more, 0.03))
    held = Links(Link(100.0, 0.01, 0.02, busy=0.5), LINKS.allgather)
    assert update(COMPUTE, larger, turns, world_size, LINKS).seconds >= base
    assert update(COMPUTE, TRANSFERS, turns, world_size, slower).seconds >= base
    assert update(COMPUTE, TRANSFERS, turns, world_size, held).seconds >= base
    assert update(COMPUTE, TRANSFERS, turns, world_size + 1, LINKS).seconds >= base
    assert update(COMPUTE, TRANSFERS, turns + 1, world_size, LINKS).seconds >= base
    assert update(COMPUTE.slowed(more), TRANSFERS, turns, world_size, LINKS).seconds >= base
    assert without_overlap(COMPUTE, TRANSFERS, turns, world_size, LINKS) >= base
    tree = Links(LINKS.allreduce, LINKS.allgather, tree=True)
    assert update(COMPUTE, TRANSFERS, turns, world_size, tree).seconds <= base * (1 + 1e-11)


def test_the_limits() -> None:
    """An infinitely fast link leaves computing; a slow one its bytes; long accumulation hides any reduction's share."""
    fast = Links(Link(math.inf), Link(math.inf))
    plain = [Transfer(t.ready, t.nbytes, t.gathered) for t in TRANSFERS]
    alone = update(COMPUTE, plain, 2, 1).seconds
    two = update(COMPUTE, plain, 2, 2, fast)
    assert (two.exposed, two.seconds) == pytest.approx((0.0, alone + two.imbalance), abs=1e-12)
    slow = Links(Link(1e-3), Link(1e-3))
    assert update(COMPUTE, plain, 1, 2, slow).seconds == pytest.approx((60 + 15) / 1e-3, rel=1e-3)
    shares = [update(COMPUTE, plain, turns, 4, LINKS) for turns in (1, 10, 1000)]
    exposed = [one.exposed / one.seconds for one in shares]
    assert exposed[0] > exposed[1] > exposed[2]
    assert exposed[2] < 1e-3


def test_data_waits_only_where_it_is_slower_unless_it_shares_the_cores() -> None:
    def with_data(data: float, shares: bool) -> float:
        return update(Compute(1.0, 2.0, 3.0, 2.0, 0.5, data=data, shares=shares), [], 2, 1).seconds

    assert with_data(3.0, False) == 6.5
    assert with_data(4.0, False) == 8.0
    assert with_data(1.0, True) == 8.5


def test_the_slowest_of_many_normal_ranks() -> None:
    """The mean largest of n normal numbers, against 200,000 draws (seed 0; standard error below 0.002)."""
    draws = np.random.default_rng(0)
    assert slowest(1) == 0.0
    for ranks in (2, 4, 16, 64):
        mean = draws.standard_normal((200_000 // ranks * 4, ranks)).max(1).mean()
        assert slowest(ranks) == pytest.approx(mean, rel=0.05)
    assert slowest(256) > slowest(64)
