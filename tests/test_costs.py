"""Byte formulas against counted bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdbs.comm.local import Solo
from hvdbs.config import Config, ModelConfig
from hvdbs.costs import OWN_BUCKET_BYTES, Linear, LinkConfig, Sizes, buckets, choose, ring_bytes
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


# --- gradients or factors

EVERY_BYTE = LinkConfig(latency_seconds=0.0)
SIZES = Sizes(gradient=4, factor=4, bucket=2**20)
WIDTHS = [1, 3, 64, 1000, 4096, 25088]


@pytest.mark.parametrize("inputs", WIDTHS)
@pytest.mark.parametrize("outputs", WIDTHS)
def test_by_bytes_alone_the_rule_is_poseidon_s(inputs: int, outputs: int) -> None:
    """2 K (P - 1) (M + N) <= 2 M N (P1 + P2 - 2) / P2 with as many servers as workers, K rows on each, a tie to the
    factors (their BestScheme), and the same as rows <= 2 M N / (M + N). On 1 rank nothing is sent."""
    layer = Linear("fc", inputs, outputs, 1)
    assert min(inputs, outputs) <= layer.breakeven_rows <= 2 * min(inputs, outputs)
    for ranks in (1, 2, 3, 8, 64):
        for rows in (1, 2, 8, 31, 64, 512, 4096):
            choice = choose("hybrid", layer, ranks * rows, ranks, SIZES, EVERY_BYTE)
            paper = 2 * rows * (ranks - 1) * (inputs + outputs) * ranks <= 2 * inputs * outputs * (2 * ranks - 2)
            if 2 * rows * ranks * (inputs + outputs) == 4 * inputs * outputs:  # a tie, up to a rounding of either side
                continue
            assert choice.factors == (paper and ranks > 1)
            assert ranks == 1 or choice.factors == (ranks * rows <= layer.breakeven_rows)


def test_costs_by_hand() -> None:
    """4096 x 1000 on 4 ranks, 64 samples, 1 GB/s, 1 ms a message, 1 GFLOP/s. Ring: 3/4 of each gathered row are sent
    and twice 3/4 of a gradient; a gradient that fills an eighth of a bucket has an eighth of its messages."""
    layer = Linear("fc", 4096, 1000, 2)
    link = LinkConfig(1e9, 1e-3, 1e9)
    choice = choose("hybrid", layer, 64, 4, Sizes(4, 2, 8 * 4 * 4096000), link)
    assert choice.rows == 128
    assert choice.gradient_bytes == 1.5 * 4 * 4096000
    assert choice.factor_bytes == 0.75 * 128 * 5096 * 2
    assert choice.gathered_bytes(Sizes(4, 2, 1)) == 128 * 5096 * 2
    product = 2 * 128 * 4096000 / 1e9
    assert choice.gradient_seconds == pytest.approx(6 / 8 * 1e-3 + choice.gradient_bytes / 1e9 + product / 4)
    assert choice.factor_seconds == pytest.approx(3e-3 + choice.factor_bytes / 1e9 + product)
    assert not choice.factors
    assert choose("factors", layer, 64, 4, SIZES, link).factors
    assert not choose("dense", layer, 1, 4, SIZES, EVERY_BYTE).factors


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(2, 500), st.integers(1, 10_000))
def test_factors_never_come_back_as_the_batch_grows(inputs: int, outputs: int, ranks: int, batch: int) -> None:
    """Accumulation makes rows, and what is chosen is symmetric in the widths."""
    layer, turned = Linear("fc", inputs, outputs, 1), Linear("fc", outputs, inputs, 1)
    for link in (EVERY_BYTE, LinkConfig(), LinkConfig(flops_per_second=1e11)):
        small, large = (choose("hybrid", layer, b, ranks, SIZES, link) for b in (batch, 2 * batch))
        assert small.factors or not large.factors
        assert choose("hybrid", turned, batch, ranks, SIZES, link).factors == small.factors
        assert large.gradient_bytes == small.gradient_bytes
        assert large.factor_bytes == pytest.approx(2 * small.factor_bytes)
