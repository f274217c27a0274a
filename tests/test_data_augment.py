"""Crops and flips: inside the image, distributed as torchvision's, and functions of (seed, epoch, index)
alone.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torchvision.transforms import RandomResizedCrop

from hvdbs.config import AugmentConfig
from hvdbs.data import augment
from hvdbs.data.augment import Rectangle

SIZES = st.integers(1, 5000)
UNIT = st.floats(0, 1, exclude_max=True)


def inside(rectangle: Rectangle, width: int, height: int) -> bool:
    x, y, w, h = rectangle
    return x >= 0 and y >= 0 and w >= 1 and h >= 1 and x + w <= width and y + h <= height


@given(
    width=SIZES,
    height=SIZES,
    draws=st.lists(UNIT, min_size=23, max_size=23),
    scale=st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(lambda pair: (min(pair), max(pair))),
    ratio=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)).map(lambda pair: (min(pair), max(pair))),
)
@example(width=1, height=1, draws=[0.5] * 23, scale=(1.0, 1.0), ratio=(5.0, 6.0))
@example(width=1, height=1, draws=[0.5] * 23, scale=(1.0, 1.0), ratio=(0.1, 0.2))
@example(width=5000, height=1, draws=[1 - 2**-53] * 23, scale=(1.0, 1.0), ratio=(0.75, 1.33))
@settings(max_examples=500)
def test_a_random_crop_lies_inside_the_image(
    width: int, height: int, draws: list[float], scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    assert inside(augment.random_resized(width, height, draws, scale, ratio), width, height)


@given(width=SIZES, height=SIZES, image_size=st.integers(1, 512), more=st.integers(0, 200))
def test_the_validation_cut_is_a_centred_square_of_the_right_share(
    width: int, height: int, image_size: int, more: int
) -> None:
    x, y, w, h = cut = augment.centre(width, height, image_size + more, image_size)
    assert inside(cut, width, height)
    assert w == h
    assert abs(w - min(width, height) * image_size / (image_size + more)) <= 1
    assert abs((width - w) / 2 - x) <= 0.5
    assert abs((height - h) / 2 - y) <= 0.5


def test_whole_small_images_stay_whole_in_validation() -> None:
    assert augment.centre(8, 8, 8, 8) == (0, 0, 8, 8)


def distance(ours: list[float], theirs: list[float]) -> float:
    """The Kolmogorov-Smirnov distance of two samples."""
    both = np.sort(np.concatenate([ours, theirs]))
    return float(
        np.abs(
            np.searchsorted(np.sort(ours), both, side="right") / len(ours)
            - np.searchsorted(np.sort(theirs), both, side="right") / len(theirs)
        ).max()
    )


# Long images take the fallback crop often, tiny ones are rounded hard.
@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (1000, 90), (8, 8)])
def test_crops_are_distributed_as_torchvisions(width: int, height: int) -> None:
    config, draws = AugmentConfig(), 2000
    ours = [augment.training(5, 0, index, width, height, config)[0] for index in range(draws)]
    torch.manual_seed(5)
    image = torch.empty(3, height, width)
    theirs = [RandomResizedCrop.get_params(image, list(config.scale), list(config.ratio)) for _ in range(draws)]
    # Two samples of one distribution are further apart than this once in a thousand; all seeds are fixed.
    limit = 1.95 * math.sqrt(2 / draws)
    rectangles = [Rectangle(j, i, w, h) for i, j, h, w in theirs]
    for of in (
        lambda r: r.width * r.height,
        lambda r: r.width / r.height,
        lambda r: r.x / max(1, width - r.width),
        lambda r: r.y / max(1, height - r.height),
    ):
        assert distance([of(r) for r in ours], [of(r) for r in rectangles]) < limit


def test_area_and_ratio_keep_to_their_ranges() -> None:
    config = AugmentConfig(scale=(0.2, 0.5), ratio=(0.5, 2.0))
    for index in range(500):
        _, _, w, h = augment.training(1, 2, index, 400, 300, config)[0]
        assert 0.2 * 0.98 < w * h / (400 * 300) < 0.5 * 1.02
        assert 0.5 * 0.98 < w / h < 2.0 * 1.02


def test_half_of_the_images_are_mirrored() -> None:
    flips = [augment.training(3, 0, index, 10, 10, AugmentConfig(crop="none"))[1] for index in range(4000)]
    assert abs(sum(flips) / 4000 - 0.5) < 0.026  # 3.3 standard deviations


def test_crop_none_is_the_whole_image_and_flip_can_be_off() -> None:
    config = AugmentConfig(crop="none", flip=False)
    assert augment.training(0, 0, 0, 30, 20, config) == ((0, 0, 30, 20), False)


def test_a_draw_depends_on_seed_epoch_and_index_and_on_nothing_else() -> None:
    keys = [(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in (0, 1)]
    config = AugmentConfig()
    first = {key: augment.training(*key, 500, 375, config) for key in keys}
    again = {key: augment.training(*key, 500, 375, config) for key in reversed(keys)}
    assert first == again
    assert len({cut for cut, _ in first.values()}) == len(keys)


def test_turning_flip_on_does_not_move_the_crops() -> None:
    with_flip, without = AugmentConfig(flip=True), AugmentConfig(flip=False)
    for index in range(20):
        ours = augment.training(0, 0, index, 500, 375, with_flip)[0]
        assert ours == augment.training(0, 0, index, 500, 375, without)[0]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("flip", [False, True])
def test_a_cut_of_the_stored_image_shows_what_the_upright_one_would(orientation: int, flip: bool) -> None:
    stored = Image.fromarray(np.arange(7 * 5, dtype=np.uint8).reshape(7, 5))
    exif = stored.getexif()
    exif[0x0112] = orientation
    upright = np.asarray(ImageOps.exif_transpose(stored))
    height, width = upright.shape
    assert augment.upright_size(5, 7, orientation) == (width, height)
    x, y, w, h = rectangle = Rectangle(1, 2, 3, 2)
    expected = upright[y : y + h, x : x + w]
    cut = augment.cut(rectangle, flip, 5, 7, orientation)
    left, top, columns, rows = cut.rectangle
    found = np.asarray(stored)[top : top + rows, left : left + columns, None]
    assert np.array_equal(augment.turned(found, cut)[:, :, 0], expected[:, ::-1] if flip else expected)
