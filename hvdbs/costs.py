"""What communication costs, in bytes and seconds, and which of two ways is the cheaper: pure functions of sizes.

The gradient of a fully connected layer is a product of two thin matrices, its inputs and the gradients of its outputs,
so ranks may exchange these (sufficient factors) and multiply, instead of summing the product (hybrid communication of
Zhang et al., "Poseidon", USENIX ATC 2017; ``hvdbs.factors``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

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


@dataclass(frozen=True)
class LinkConfig:
    """What the choice between gradients and factors goes by (scheme hybrid).

    Args:
        bytes_per_second: what one rank can send, in bytes; 1.25e9 is 10 Gbit/s.
        latency_seconds: of one message.
        flops_per_second: of one rank's matrix products; none leaves the time of products out.
    """

    bytes_per_second: float = 1.25e9
    latency_seconds: float = 5e-5
    flops_per_second: float | None = None


@dataclass(frozen=True)
class Linear:
    """A fully connected layer that could go by factors: weight [N, M] with ``outputs`` N and ``inputs`` M; each sample
    makes ``positions`` rows of its input."""

    name: str
    inputs: int
    outputs: int
    positions: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    @property
    def breakeven_rows(self) -> float:
        """2 M N / (M + N), the harmonic mean of the widths: with as many rows both ways send as much."""
        return 2 * self.weights / (self.inputs + self.outputs)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one number on its way: of a summed ``gradient`` and of a ``factor``; ``bucket``: of a whole bucket."""

    gradient: int
    factor: int
    bucket: int


@dataclass(frozen=True)
class Choice:
    """How the gradient of ``layer`` travels. ``rows``: of all ranks in one window. The bytes are those that one rank
    sends, on average, the seconds those of the cost model, for either way."""

    layer: Linear
    factors: bool
    rows: int
    gradient_bytes: float
    factor_bytes: float
    gradient_seconds: float
    factor_seconds: float

    def gathered_bytes(self, sizes: Sizes) -> int:
        """The factors of all ranks together."""
        return self.rows * (self.layer.inputs + self.layer.outputs) * sizes.factor

    def inputs(self, link: LinkConfig) -> str:
        """What was read and what came of it, as JSON."""
        return json.dumps({**asdict(self), "breakeven_rows": self.layer.breakeven_rows, "link": asdict(link)})

    def reason(self, scheme: str) -> str:
        """In words: why the gradient travels as it does."""
        way = "factors are exchanged" if self.factors else "the gradient is summed"
        why = "as communication.scheme says" if scheme == "factors" else "which takes less time in the cost model"
        if scheme != "factors" and not self.factors and self.gradient_seconds == self.factor_seconds:
            why = "with nobody to send to"
        factors = f"{self.factor_bytes / 1e6:.3g} MB in {self.factor_seconds:.3g} s as factors of {self.rows} rows"
        gradient = f"{self.gradient_bytes / 1e6:.3g} MB in {self.gradient_seconds:.3g} s as its gradient"
        return f"{way}, {why}: each rank would send {factors}, {gradient}"


def choose(
    scheme: Literal["dense", "hybrid", "factors"],
    layer: Linear,
    global_batch: int,
    world_size: int,
    sizes: Sizes,
    link: LinkConfig,
) -> Choice:
    """Gradient or factors of ``layer`` in windows of ``global_batch`` samples: with R rows, P ranks, latency a, B bytes
    per second, F products per second, s bytes a number,

        gradient: 2 (P - 1) a l + 2 (P - 1) / P M N s / B + 2 R / P M N / F    (ring allreduce)
        factors:    (P - 1) a   +   (P - 1) / P R (M + N) s / B + 2 R M N / F  (ring allgather of both in one message).

    l <= 1 is the layer's share of a bucket, whose messages it may share with others. Without a and F, and with equal s,
    factors win where R <= 2 M N / (M + N): the rule 2 K (P1 - 1) (M + N) <= 2 M N (P1 + P2 - 2) / P2 of Poseidon's
    authors (petuum/autodist, poseidon_strategy.py) with as many servers P2 as workers P1 and R = P1 K, ties included;
    a, F and l are ours. A single rank has nothing to send.
    """
    rows, others = global_batch * layer.positions, world_size - 1
    gradient = layer.weights * sizes.gradient
    gradient_bytes = ring_bytes(gradient, world_size)
    factor_bytes = others / world_size * rows * (layer.inputs + layer.outputs) * sizes.factor
    product = 2 * rows * layer.weights / link.flops_per_second if link.flops_per_second else 0.0
    share = min(1.0, gradient / sizes.bucket)
    gradient_seconds = (
        2 * others * share * link.latency_seconds + gradient_bytes / link.bytes_per_second + product / world_size
    )
    factor_seconds = others * link.latency_seconds + factor_bytes / link.bytes_per_second + product
    cheaper = world_size > 1 and factor_seconds <= gradient_seconds
    return Choice(
        layer,
        scheme == "factors" or (scheme == "hybrid" and cheaper),
        rows,
        gradient_bytes,
        factor_bytes,
        gradient_seconds,
        factor_seconds,
    )
