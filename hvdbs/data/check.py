"""Every file of an image folder decoded once and whole, lest a run find the bad ones days later, and those of val
held against those of train."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np

from hvdbs.config import AugmentConfig
from hvdbs.data import fallback
from hvdbs.data.ahead import look_ahead
from hvdbs.data.index import Files, Index
from hvdbs.data.reader import Encoded, Rules, Sample, encoded
from hvdbs.errors import HvdbsError

_AT_ONCE = 64
_AHEAD = 4
# The whole image, so that no damage hides outside of a cut; a small square, which nobody looks at.
_WHOLE = Rules(0, 32, 32, "ignore", AugmentConfig(crop="none", flip=False))

Item = tuple[Files, int]


class Digests:
    """64 bits of BLAKE2b for each file of which the other split has one of the same size: 8 bytes a file.

    Filled by the threads that read the files anyway.
    """

    def __init__(self, index: Index) -> None:
        shared = np.intersect1d(index.train.sizes, index.val.sizes)
        self._index = index
        self._of = {id(files): np.zeros(len(files), np.uint64) for files in (index.train, index.val)}
        self._wanted = {id(files): np.isin(files.sizes, shared) for files in (index.train, index.val)}

    def take(self, files: Files, number: int, data: bytes) -> None:
        if self._wanted[id(files)][number]:
            digest = hashlib.blake2b(data, digest_size=8).digest()
            self._of[id(files)][number] = max(1, int.from_bytes(digest))  # 0 is for files without one

    def copies(self) -> list[tuple[str, str]]:
        """The paths in val and in train of the images that are in both, each of val's once."""
        train, val = self._of[id(self._index.train)], self._of[id(self._index.val)]
        both = np.setdiff1d(np.intersect1d(train, val), np.zeros(1, np.uint64))
        first = dict(zip(train[::-1].tolist(), range(len(train) - 1, -1, -1), strict=True)) if len(both) else {}
        return [
            (self._index.val.path(number), self._index.train.path(first[int(val[number])]))
            for number in np.flatnonzero(np.isin(val, both)).tolist()
        ]


def with_pillow(index: Index, threads: int, digests: Digests) -> Iterator[HvdbsError]:
    """One error with its path for each file that cannot be read or decoded by Pillow, found lazily."""

    def work(item: Item) -> HvdbsError | None:
        read = _read(index, digests, item)
        if isinstance(read, HvdbsError):
            return read
        try:
            fallback.square(read, _WHOLE.image_size)
        except HvdbsError as error:
            return error
        return None

    with closing(look_ahead(_items(index), work, threads, _AHEAD)) as results:
        for errors in results:
            yield from filter(None, errors)


def with_dali(index: Index, threads: int, digests: Digests) -> Iterator[HvdbsError]:
    """The same for DALI on the CPU. Raises ImportError if it is missing."""
    from hvdbs.data import imagenet

    trial = imagenet.Trial(imagenet.Decoder(_WHOLE.image_size, _AT_ONCE, threads))
    with closing(look_ahead(_items(index), partial(_read, index, digests), threads, _AHEAD)) as results:
        for items in results:
            yield from (item for item in items if isinstance(item, HvdbsError))
            yield from trial.errors([item for item in items if isinstance(item, Encoded)])


def _read(index: Index, digests: Digests, item: Item) -> Encoded | HvdbsError:
    files, number = item
    try:
        read = encoded(files, index.root, _WHOLE, Sample(0, number))
    except HvdbsError as error:
        return error
    digests.take(files, number, read.data)
    return read


def _items(index: Index) -> Iterator[list[Item]]:
    for files in (index.train, index.val):
        for begin in range(0, len(files), _AT_ONCE):
            yield [(files, number) for number in range(begin, min(begin + _AT_ONCE, len(files)))]
