"""What is cut out of an image: one rectangle, resized to a square, perhaps mirrored. Drawn outside of every decoder.

A cut is a pure function of (seed, epoch, sample index) and the image's width and height, so it is the same
for DALI and Pillow, on any rank, and after any restart. Rectangles are whole pixels of the upright image;
``cut`` maps them to the pixels as they are stored, where EXIF says that these lie otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hvdbs.config import AugmentConfig
from hvdbs.data import streams

ATTEMPTS = 10
# The draws of one sample. Each has its place whether it is used or not, so no setting shifts another's
# numbers.
_FLIP, _LEFT, _TOP, _FIRST_ATTEMPT = 0, 1, 2, 3
_DRAWS = _FIRST_ATTEMPT + 2 * ATTEMPTS

# EXIF orientation -> how the stored pixels become upright: mirror left-right, mirror top-bottom, then
# transpose.
_UPRIGHT = {
    1: (False, False, False),
    2: (True, False, False),
    3: (True, True, False),
    4: (False, True, False),
    5: (False, False, True),
    6: (False, True, True),
    7: (True, True, True),
    8: (True, False, True),
}


class Rectangle(NamedTuple):
    """Whole pixels: columns [x, x + width), rows [y, y + height)."""

    x: int
    y: int
    width: int
    height: int


class Cut(NamedTuple):
    """A rectangle of the stored image, and how the square it is resized to is then turned (in this order)."""

    rectangle: Rectangle
    mirror_x: bool
    mirror_y: bool
    transpose: bool


def random_resized(
    width: int, height: int, draws: Sequence[float], scale: tuple[float, float], ratio: tuple[float, float]
) -> Rectangle:
    """A rectangle of random area and aspect ratio.

    Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6, with the rule of torchvision's
    ``RandomResizedCrop.get_params``: area uniform in ``scale`` times the image's, log of width over height uniform
    in log ``ratio``, ten attempts, then the largest central crop whose ratio is in range. ``draws``: 23 uniforms in
    [0, 1).
    """
    area = width * height
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for k in range(_FIRST_ATTEMPT, _DRAWS, 2):
        target = area * (scale[0] + (scale[1] - scale[0]) * draws[k])
        aspect = math.exp(low + (high - low) * draws[k + 1])
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Rectangle(int(draws[_LEFT] * (width - w + 1)), int(draws[_TOP] * (height - h + 1)), w, h)
    w, h = width, height
    if width < ratio[0] * height:
        h = max(1, round(width / ratio[0]))
    elif width > ratio[1] * height:
        w = max(1, round(height * ratio[1]))
    return Rectangle((width - w) // 2, (height - h) // 2, w, h)


def centre(width: int, height: int, resize: int, image_size: int) -> Rectangle:
    """What a validation image shows: shorter side to ``resize``, then the central ``image_size`` square, in one step.

    That square covers image_size / resize of the shorter side, so it is cut first, rounded to whole pixels
    (at least one), and resized once. ``image_size`` <= ``resize``.
    """
    side = max(1, round(min(width, height) * image_size / resize))
    return Rectangle((width - side) // 2, (height - side) // 2, side, side)


def training(
    seed: int, epoch: int, index: int, width: int, height: int, augment: AugmentConfig
) -> tuple[Rectangle, bool]:
    """Rectangle and mirroring of sample ``index`` in ``epoch``; ``width`` and ``height`` of the upright image."""
    whole = Rectangle(0, 0, width, height)
    if augment.crop == "none" and not augment.flip:
        return whole, False
    draws = streams.augment_uniforms(seed, epoch, index, _DRAWS).tolist()
    if augment.crop == "random_resized":
        whole = random_resized(width, height, draws, augment.scale, augment.ratio)
    return whole, augment.flip and draws[_FLIP] < 0.5


def upright_size(width: int, height: int, orientation: int) -> tuple[int, int]:
    """Width and height of the upright image, given those of the stored one."""
    return (height, width) if _UPRIGHT[orientation][2] else (width, height)


def cut(rectangle: Rectangle, flip: bool, width: int, height: int, orientation: int) -> Cut:
    """A rectangle of the upright image as a cut of the stored image of ``width`` x ``height`` pixels.

    Turning the small square after the resize equals turning the whole image before the cut, and costs nothing
    where there is nothing to turn.
    """
    mirror_x, mirror_y, transpose = _UPRIGHT[orientation]
    x, y, w, h = rectangle
    if transpose:
        x, y, w, h = y, x, h, w
    stored = Rectangle(width - x - w if mirror_x else x, height - y - h if mirror_y else y, w, h)
    return Cut(stored, mirror_x != (flip and not transpose), mirror_y != (flip and transpose), transpose)


def turned(square: NDArray[Any], how: Cut) -> NDArray[Any]:
    """A view of ``square`` [S, S, C], turned as ``how`` says."""
    square = square[:: -1 if how.mirror_y else 1, :: -1 if how.mirror_x else 1]
    return square.swapaxes(0, 1) if how.transpose else square
