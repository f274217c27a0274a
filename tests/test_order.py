"""The training stream: every sample once per epoch, in an order that seed and epoch alone decide."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdbs.batching import Window
from hvdbs.data import order


def stream(seed: int, samples: int, begin: int, size: int) -> list[tuple[int, int]]:
    at = order.positions(seed, samples, begin, size)
    return list(zip(at.epoch.tolist(), at.index.tolist(), strict=True))


@given(seed=st.integers(0, 2**63 - 1), samples=st.integers(1, 300), epoch=st.integers(0, 2**31))
@settings(deadline=None)
def test_every_epoch_is_a_permutation_of_the_samples(seed: int, samples: int, epoch: int) -> None:
    at = order.positions(seed, samples, epoch * samples, samples)
    assert (at.epoch == epoch).all()
    assert sorted(at.index.tolist()) == list(range(samples))


@given(
    seed=st.integers(0, 2**63 - 1),
    samples=st.integers(1, 50),
    begin=st.integers(0, 500),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
)
@settings(deadline=None)
def test_the_stream_does_not_depend_on_how_it_is_cut(seed: int, samples: int, begin: int, sizes: list[int]) -> None:
    whole = stream(seed, samples, begin, sum(sizes))
    pieces, place = [], begin
    for size in sizes:
        pieces += stream(seed, samples, place, size)
        place += size
    assert pieces == whole


@given(
    samples=st.integers(1, 40),
    windows=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 9)), min_size=1, max_size=6),
    world_size=st.integers(1, 5),
)
@settings(deadline=None)
def test_ranks_share_windows_of_any_size_without_gap_or_overlap(
    samples: int, windows: list[tuple[int, int]], world_size: int
) -> None:
    seen, begin = [], 0
    for global_batch, micro_batch in windows:
        window = Window(begin, global_batch, micro_batch)
        for rank in range(world_size):
            for piece in window.dealt_to(rank, world_size):
                seen += stream(7, samples, piece.begin, piece.size)
        begin += global_batch
    assert seen == stream(7, samples, 0, begin)


def test_two_seeds_and_two_epochs_have_two_orders() -> None:
    orders = [order.epoch_order(seed, 100, epoch).tolist() for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len({tuple(one) for one in orders}) == 9


def test_first_places_are_uniform_over_the_samples() -> None:
    samples, draws = 10, 5000
    counts = np.bincount([order.epoch_order(seed, samples, 0)[0] for seed in range(draws)], minlength=samples)
    # Chi-squared with 9 degrees of freedom exceeds 27.9 once in a thousand; the seeds are fixed.
    assert ((counts - draws / samples) ** 2 / (draws / samples)).sum() < 27.9


def test_an_order_handed_out_cannot_be_changed_by_its_user() -> None:
    assert not order.epoch_order(0, 10, 0).flags.writeable
