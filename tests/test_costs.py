"""Byte formulas against counted bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdbs.comm.local import Solo
from hvdbs.config import Config, ModelConfig
from hvdbs.costs import bucket_sizes, ring_bytes
from hvdbs.model import build_model
from hvdbs.planning import update_bytes
from hvdbs.step import Replica


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 2000))
def test_buckets_hold_every_tensor_once_and_close_when_full(nbytes: list[int], limit: int) -> None:
    counts = bucket_sizes(nbytes, limit)
    assert sum(counts) == len(nbytes)
    assert all(counts)
    at = 0
    for number, count in enumerate(counts):
        held = nbytes[at : at + count]
        assert sum(held[:-1]) < limit  # it was open when its last tensor came
        assert sum(held) >= limit or number == len(counts) - 1
        at += count


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
