"""Counted randomness: every draw is a function of what it is for, never of what was drawn before.

One Philox generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by (seed, purpose);
the counter says which draw. Only its raw bits are used, which numpy guarantees to keep (NEP 19).
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

_ORDER, _AUGMENT, _SYNTHETIC, _ANALYTIC = 1, 2, 3, 4
_BLOCK = 4  # words that the generator makes at once


def _bits(seed: int, purpose: int, counter: tuple[int, int], count: int) -> NDArray[np.uint64]:
    # The lowest word is the generator's own running index, so it stays 0 here.
    generator = np.random.Philox(key=[seed, purpose], counter=[0, counter[0], counter[1], 0])
    raw: NDArray[np.uint64] = generator.random_raw(count)
    return raw


def order_bits(seed: int, epoch: int, samples: int) -> NDArray[np.uint64]:
    """One 64-bit sort key for each sample of ``epoch``."""
    return _bits(seed, _ORDER, (epoch, 0), samples)


def augment_uniforms(seed: int, epoch: int, index: int, count: int) -> NDArray[np.float64]:
    """``count`` uniforms in [0, 1) that belong to sample ``index`` in ``epoch``, with 53 bits each."""
    return (_bits(seed, _AUGMENT, (epoch, index), count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def synthetic_bits(seed: int, kind: int, index: int, count: int) -> NDArray[np.uint64]:
    """``count`` times 64 bits that belong to item ``index`` of one ``kind`` of synthetic data."""
    return _bits(seed, _SYNTHETIC, (kind, index), count)


def analytic_bits(seed: int, stream: int, begin: int, size: int, words: int) -> NDArray[np.uint64]:
    """[``size``, ``words``] times 64 bits: a row for each sample ``begin``, ``begin`` + 1, ... of one ``stream``.

    Samples take whole blocks of the generator that follow each other, so one call makes all of them, and a sample has
    the same bits whatever it is made together with.
    """
    blocks = -(-words // _BLOCK)
    generator = np.random.Philox(key=[seed, _ANALYTIC], counter=[begin * blocks, stream, 0, 0])
    raw: NDArray[np.uint64] = generator.random_raw(size * blocks * _BLOCK)
    return raw.reshape(size, blocks * _BLOCK)[:, :words]


def generator_seed(seed: int, step: int, micro_batch_index: int) -> int:
    """The 63-bit seed of the model's generator (dropout, stochastic depth) for one micro-batch."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, step, micro_batch_index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def noise_seed(seed: int, step: int, micro_batch_index: int) -> int:
    """The 63-bit seed of the noise that displaces the parameters for one micro-batch (``hvdbs.extrapolation``)."""
    words = struct.pack("<QQQ", seed, step, micro_batch_index)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8, person=b"noise").digest(), "little") >> 1
