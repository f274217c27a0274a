"""Byte formulas against counted bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdbs.comm.local import Solo
from hvdbs.config import Config, ModelConfig
from hvdbs.costs import OWN_BUCKET_BYTES, buckets, ring_bytes
from hvdbs.model import build_model
from hvdbs.planning import update_bytes
from hvdbs.step import Replica


@given(st.lists(st.integers(1, 2 * OWN_BUCKET_BYTES), min_size=1), st.integers(1, 3 * OWN_BUCKET_BYTES))
def test_buckets_hold_every_tensor_once_and_close_when_full(nbytes: list[int], limit: int) -> None:
    """Large tensors alone; the others in order, their bucket open until it holds the limit; none waits for another."""
    found = buckets(nbytes, limit)
    assert sorted(place for bucket in found for place in bucket) == list(range(len(nbytes)))
    assert [bucket[-1] for bucket in found[:-1]] == sorted(bucket[-1] for bucket in found[:-1])
    large = [bucket for bucket in found if nbytes[bucket[0]] >= min(limit, OWN_BUCKET_BYTES)]
    assert all(len(bucket) == 1 for bucket in large)
    shared = [bucket for bucket in found if bucket not in large]
    assert [place for bucket in shared for place in bucket] == sorted(place for bucket in shared for place in bucket)
    for number, bucket in enumerate(shared):
        held = [nbytes[place] for place in bucket]
        assert max(held) < min(limit, OWN_BUCKET_BYTES)
        assert sum(held[:-1]) < limit  # it was open when its last tensor came
        assert sum(held) >= limit or number == len(shared) - 1


def test_a_large_tensor_does_not_close_the_bucket_of_small_ones() -> None:
    assert buckets([10, 500, 20, 30, 700, 40], 50) == [[1], [0, 2, 3], [4], [5]]
    assert buckets([1, OWN_BUCKET_BYTES, 1, OWN_BUCKET_BYTES - 1], 2**30) == [[1], [0, 2, 3]]
    assert buckets([], 50) == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 2**30])
def test_planned_bytes_are_the_bytes_of_the_buffers(dtype: str, bucket_bytes: int) -> None:
    config = Config(dtype=dtype)  # type: ignore[arg-type]
    model = build_model(ModelConfig(name="resnet8", width=4), 10).to(getattr(torch, dtype))
    planned = update_bytes(model, config)
    replica = Replica(model, config, Solo())
    assert replica.reducer.reduced_bytes == planned
    assert sum(b.flat.nbytes for b in replica.reducer.buckets) + replica.carry.nbytes == planned


def test_a_ring_moves_nothing_alone_and_almost_twice_the_buffer_in_a_crowd() -> None:
    assert ring_bytes(1000, 1) == 0
    assert ring_bytes(1000, 2) == 1000
    assert ring_bytes(1000, 1000) == pytest.approx(1998)
