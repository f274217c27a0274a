"""Dealing: every sample of a window once, the same micro-batches whoever runs them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdbs.batching import Window, dealing, less_idle_micro_batch

sizes = st.integers(1, 400)
worlds = st.integers(1, 40)


@given(sizes, st.integers(1, 64), worlds, st.integers(0, 10**12))
def test_a_window_is_dealt_whole_and_in_stream_order(
    global_batch: int, micro_batch: int, world_size: int, begin: int
) -> None:
    window = Window(begin, global_batch, micro_batch)
    dealt = [micro for rank in range(world_size) for micro in window.dealt_to(rank, world_size)]
    positions = [p for micro in dealt for p in range(micro.begin, micro.begin + micro.size)]
    assert positions == list(range(begin, begin + global_batch))
    assert [micro.index for micro in dealt] == list(range(window.micro_batches))


@given(sizes, st.integers(1, 64), worlds)
def test_micro_batches_do_not_depend_on_world_size(global_batch: int, micro_batch: int, world_size: int) -> None:
    window = Window(7, global_batch, micro_batch)
    alone = list(window.dealt_to(0, 1))
    assert [micro for rank in range(world_size) for micro in window.dealt_to(rank, world_size)] == alone
    assert all(micro.size == micro_batch for micro in alone[:-1])
    assert 1 <= alone[-1].size <= micro_batch


@given(sizes, st.integers(1, 64), worlds)
def test_micro_batch_j_goes_to_rank_floor_of_j_p_over_n(global_batch: int, micro_batch: int, world_size: int) -> None:
    window = Window(0, global_batch, micro_batch)
    n = window.micro_batches
    for rank in range(world_size):
        assert [m.index for m in window.dealt_to(rank, world_size)] == [
            j for j in range(n) if j * world_size // n == rank
        ]


@given(sizes, st.integers(1, 64), worlds)
def test_dealing_counts_what_the_ranks_really_get(global_batch: int, micro_batch: int, world_size: int) -> None:
    window = Window(0, global_batch, micro_batch)
    shares = [len(list(window.dealt_to(rank, world_size))) for rank in range(world_size)]
    dealt = dealing(global_batch, micro_batch, world_size)
    assert (dealt.busiest, dealt.idlest, dealt.micro_batches) == (max(shares), min(shares), sum(shares))
    turns = world_size * max(shares)
    assert dealt.idle_share == (1 - sum(shares) / turns)


@given(st.integers(1, 5000), st.integers(1, 64), worlds)
def test_the_micro_batch_that_is_advised_does_better(global_batch: int, micro_batch: int, world_size: int) -> None:
    better = less_idle_micro_batch(global_batch, micro_batch, world_size)
    if better is not None:
        assert (
            dealing(global_batch, better, world_size).idle_share
            < dealing(global_batch, micro_batch, world_size).idle_share - 0.009
        )
        assert micro_batch // 2 <= better <= 2 * micro_batch
