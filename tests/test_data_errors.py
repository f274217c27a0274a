"""A file that cannot be used stops the run with one line that names it, whichever back-end meets it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_folders import encode, photo, small, two_classes, write
from PIL import Image
from test_data_decode import BACKENDS, cut, open_folder, threads

from hvdbs.data import order
from hvdbs.errors import HvdbsError

NAME = "train/cat/2 bad.jpg"


def refusal_of(root: Path, backend: str, path: Path) -> str:
    """The text that a run over one epoch ends with, after checking that no thread outlives it."""
    source = open_folder(root, backend, image_size=16, resize=16)
    list(source.train(cut(0, 1)))  # what the libraries start once and for all
    before = threads()
    with pytest.raises(HvdbsError) as refused:
        list(source.train(cut(0, *[4] * 3)))
    text = str(refused.value)
    assert str(path) in text
    assert "\n" not in text
    assert threads() == before
    return text


def deep_png() -> bytes:
    return encode(Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8)), "PNG")


def png_without_pixels() -> bytes:
    data = encode(photo().resize((40, 30)), "PNG")
    place = data.index(b"IDAT")
    return data[: place + 4] + bytes(100) + data[place + 104 :]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"", "is empty", id="empty"),
        pytest.param(b"not an image", "is neither JPEG nor PNG", id="text"),
        pytest.param(encode(photo().resize((9, 9)), "GIF"), "is neither JPEG nor PNG", id="gif"),
        pytest.param(deep_png(), "is a 16-bit image", id="16-bit"),
        pytest.param(small()[:-1], "is truncated", id="one byte short"),
        pytest.param(encode(photo())[:20_000], "is truncated", id="half a photograph"),
        pytest.param(png_without_pixels(), "cannot be decoded by", id="no pixels"),
        pytest.param(encode(photo().resize((40, 30)), "PNG")[:-500], "cannot be decoded by", id="half a png"),
    ],
)
def test_a_file_that_is_no_usable_image(tmp_path: Path, backend: str, data: bytes, reason: str) -> None:
    root = write(two_classes(tmp_path), {NAME: data})
    assert reason in refusal_of(root, backend, root / NAME)


def overwrite(path: Path) -> None:
    path.write_bytes(small() + b"\xff\xd9")


def cut_short(path: Path) -> None:
    os.truncate(path, 10)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(overwrite, f"bytes, but had {len(small())} when it was indexed", id="longer"),
        pytest.param(cut_short, f"has 10 bytes, but had {len(small())} when it was indexed", id="shorter"),
        pytest.param(Path.unlink, "cannot be read: No such file", id="gone"),
        pytest.param(make_folder, "cannot be read: Is a directory", id="a folder"),
    ],
)
def test_a_file_that_changed_after_it_was_listed(
    tmp_path: Path, backend: str, change: Callable[[Path], None], reason: str
) -> None:
    root = write(two_classes(tmp_path), {NAME: small()})
    source = open_folder(root, backend, image_size=16, resize=16)
    change(root / NAME)
    with pytest.raises(HvdbsError, match=str(root / NAME)) as refused:
        list(source.train(cut(0, *[4] * 3)))
    assert reason in str(refused.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_file_is_found_by_name_among_many_under_way(tmp_path: Path, backend: str) -> None:
    root = two_classes(tmp_path, train=40)
    bad = write(root, {"train/dog/17 bad.png": png_without_pixels()}) / "train/dog/17 bad.png"
    source = open_folder(root, backend, micro_batch=16, image_size=16, resize=16)
    with pytest.raises(HvdbsError, match=str(bad)):
        list(source.train(cut(0, *[16] * 5)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_before_the_bad_file_are_handed_over_first(tmp_path: Path, backend: str) -> None:
    root = write(two_classes(tmp_path), {NAME: b"not an image"})
    batches = open_folder(root, backend, image_size=16, resize=16).train(cut(0, *[1] * 11))
    place = order.positions(0, 11, 0, 11).index.tolist().index(2)
    assert place > 0
    for _ in range(place):
        next(batches)
    with pytest.raises(HvdbsError, match=NAME):
        next(batches)
