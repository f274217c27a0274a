"""Which sample stands at which position of the endless, reshuffled training stream.

Pure in (seed, samples, position): no state, no stream of random numbers, nothing that depends on rank or world_size.
An epoch is ``samples`` consecutive positions and holds every sample once, in an order of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hvdbs.data import streams


@dataclass(frozen=True)
class Positions:
    """Samples of consecutive stream positions: ``epoch`` and sample ``index`` of each, both int64 [B]."""

    epoch: NDArray[np.int64]
    index: NDArray[np.int64]


@lru_cache(maxsize=2)  # a micro-batch touches two epochs at most; 8 bytes a sample each
def epoch_order(seed: int, samples: int, epoch: int) -> NDArray[np.int64]:
    """The order of one epoch: a permutation of range(``samples``), uniform over (``seed``, ``epoch``).

    Sorting 64-bit keys of a counted generator rather than calling a library's shuffle: the raw bits of numpy's bit
    generators are guaranteed to stay the same over its versions, its shuffles are not (NEP 19).
    """
    keys = streams.order_bits(seed, epoch, samples)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def positions(seed: int, samples: int, begin: int, size: int) -> Positions:
    """The samples at stream positions [``begin``, ``begin + size``); they may lie in several epochs."""
    place = np.arange(begin, begin + size, dtype=np.int64)
    epoch, offset = np.divmod(place, samples)
    index = np.empty_like(offset)
    for e in np.unique(epoch):
        here = epoch == e
        index[here] = epoch_order(seed, samples, int(e))[offset[here]]
    return Positions(epoch, index)
