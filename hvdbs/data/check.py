"""Every file of an image folder decoded once and whole, lest a run find the bad ones days later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

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


def with_pillow(index: Index, threads: int) -> Iterator[HvdbsError]:
    """One error with its path for each file that cannot be read or decoded by Pillow, found lazily."""

    def work(item: Item) -> HvdbsError | None:
        read = _read(index, item)
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


def with_dali(index: Index, threads: int) -> Iterator[HvdbsError]:
    """The same for DALI on the CPU. Raises ImportError if it is missing."""
    from hvdbs.data import imagenet

    trial = imagenet.Trial(imagenet.Decoder(_WHOLE.image_size, _AT_ONCE, threads))
    with closing(look_ahead(_items(index), partial(_read, index), threads, _AHEAD)) as results:
        for items in results:
            yield from (item for item in items if isinstance(item, HvdbsError))
            yield from trial.errors([item for item in items if isinstance(item, Encoded)])


def _read(index: Index, item: Item) -> Encoded | HvdbsError:
    files, number = item
    try:
        return encoded(files, index.root, _WHOLE, Sample(0, number))
    except HvdbsError as error:
        return error


def _items(index: Index) -> Iterator[list[Item]]:
    for files in (index.train, index.val):
        for begin in range(0, len(files), _AT_ONCE):
            yield [(files, number) for number in range(begin, min(begin + _AT_ONCE, len(files)))]
