"""One sample as it lies on disk: its file's bytes, checked, with the cut that its place in the stream asks for.

Both back-ends call ``encoded`` on their reading threads (``ahead.look_ahead``), so what they decode is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hvdbs.batching import MicroBatch
from hvdbs.config import AugmentConfig
from hvdbs.data import augment, order
from hvdbs.data.augment import Cut, Rectangle
from hvdbs.data.folder import shown, unreadable
from hvdbs.data.headers import read_header
from hvdbs.data.index import Files
from hvdbs.errors import HvdbsError, refusal


@dataclass(frozen=True, slots=True)
class Sample:
    """One image of one epoch; ``epoch`` is None for validation, which augments nothing."""

    epoch: int | None
    index: int


class Encoded(NamedTuple):
    """An image file's bytes, what to cut out of it, its label and its path."""

    data: bytes
    cut: Cut
    label: int
    path: str


@dataclass(frozen=True)
class Rules:
    """All that decides a sample's pixels besides its file: ``image_size`` and ``resize`` in pixels."""

    seed: int
    image_size: int
    resize: int
    exif: Literal["ignore", "apply"]
    augment: AugmentConfig

    def rectangle(self, sample: Sample, width: int, height: int) -> tuple[Rectangle, bool]:
        """Rectangle and mirroring of ``sample``, whose upright image has ``width`` x ``height`` pixels."""
        if sample.epoch is None:
            return augment.centre(width, height, self.resize, self.image_size), False
        return augment.training(self.seed, sample.epoch, sample.index, width, height, self.augment)


def training_samples(requests: Iterable[MicroBatch], seed: int, samples: int) -> Iterator[list[Sample]]:
    """The samples at each micro-batch's positions of the training stream; lazy."""
    for request in requests:
        at = order.positions(seed, samples, request.begin, request.size)
        yield [Sample(*pair) for pair in zip(at.epoch.tolist(), at.index.tolist(), strict=True)]


def validation_samples(requests: Iterable[MicroBatch], samples: int) -> Iterator[list[Sample]]:
    """Positions as sample indices; lazy. Raises ValueError for positions beyond the ``samples`` there are."""
    for request in requests:
        if not 0 <= request.begin <= request.begin + request.size <= samples:
            raise ValueError(f"positions {request.begin}+{request.size} of {samples} validation samples")
        yield [Sample(None, index) for index in range(request.begin, request.begin + request.size)]


def read_file(files: Files, i: int, root: str) -> bytes:
    """The bytes of image ``i``. Raises HvdbsError with its path if it is gone, unreadable or not as long as indexed."""
    path = files.path(i)
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read()
    except OSError as error:
        raise unreadable(path, error) from None
    if len(data) != files.sizes[i]:
        raise refusal(
            "image",
            shown(path),
            f"has {len(data)} bytes, but had {files.sizes[i]} when it was indexed",
            f"restore it or run: python -m hvdbs.data index {shown(root)}",
        )
    return data


def encoded(files: Files, root: str, rules: Rules, sample: Sample) -> Encoded:
    """Read one sample. Raises HvdbsError with the path of a file that is missing, changed or no 8-bit image."""
    data, path = read_file(files, sample.index, root), files.path(sample.index)
    try:
        width, height, orientation = read_header(data, rules.exif == "apply")
    except ValueError as error:
        raise undecodable(path, str(error)) from None
    rectangle, flip = rules.rectangle(sample, *augment.upright_size(width, height, orientation))
    cut = augment.cut(rectangle, flip, width, height, orientation)
    return Encoded(data, cut, int(files.labels[sample.index]), path)


def undecodable(path: str, reason: str) -> HvdbsError:
    """The one line for a file that is no usable image; ``reason`` begins with a verb."""
    return refusal("image", shown(path), reason)
