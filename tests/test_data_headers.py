"""The first bytes of an image: size and orientation as Pillow reads them, and what is refused."""

from __future__ import annotations

import contextlib
import io
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_folders import encode, photo, small, variants, with_orientation
from PIL import Image

from hvdbs.data.headers import read_header


@pytest.mark.parametrize("name", variants())
def test_size_and_orientation_are_pillows(name: str) -> None:
    data = variants()[name]
    image = Image.open(io.BytesIO(data))
    assert read_header(data, exif=True) == (*image.size, image.getexif().get(0x0112, 1))
    assert read_header(data).orientation == 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [1, 3, 8, 9, 0])
def test_an_orientation_that_does_not_exist_counts_as_upright(kind: str, orientation: int) -> None:
    data = with_orientation(photo().resize((20, 10)), orientation, kind)
    assert read_header(data, exif=True) == (20, 10, orientation if 1 <= orientation <= 8 else 1)


def test_bytes_between_segments_and_fill_bytes_are_skipped() -> None:
    data = small()
    assert read_header(data[:2] + b"\xff\xff\xff" + data[3:]) == read_header(data)
    frame = data.index(b"\xff\xc0")
    assert read_header(data[:frame] + b"junk" + data[frame:]) == read_header(data)


def test_a_thumbnail_does_not_stand_for_the_image_or_its_end() -> None:
    thumbnail = small(size=(4, 4))
    data = small()
    segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 8) + b"Exif\0\0" + thumbnail
    data = data[:2] + segment + data[2:]
    assert read_header(data, exif=True) == (20, 12, 1)
    with pytest.raises(ValueError, match="no end-of-image marker"):
        read_header(data[:-2])


def deep_png() -> bytes:
    return encode(Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8)), "PNG")


def deep_jpeg(bits: int) -> bytes:
    data = bytearray(small())
    data[data.index(b"\xff\xc0") + 4] = bits
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"<html>404</html>", "is neither JPEG nor PNG"),
        (encode(photo().resize((8, 8)), "GIF"), "is neither JPEG nor PNG"),
        (deep_png(), "16-bit"),
        (deep_jpeg(12), "12-bit"),
        (deep_jpeg(16), "16-bit"),
        (encode(photo().resize((8, 8)), "PNG")[:30], "is truncated"),
        (small()[:100], "is truncated"),
        (small()[:-1], "is truncated"),
        (b"\xff\xd8\xff\xd9", "has no frame"),
        (b"\xff\xd8\xff", "is truncated"),
        (small()[: small().index(b"\xff\xc0") + 5] + bytes(4) + b"\xff\xd9", "0 x 0 pixels"),
        (small()[: small().index(b"\xff\xc0") + 5] + b"\xff" * 4 + b"\xff\xd9", "has 65535 x 65535 pixels; more than"),
        (encode(photo(), "PNG")[:16] + b"\xff" * 8 + encode(photo(), "PNG")[24:], "has 4294967295 x 4294967295 pixels"),
    ],
)
def test_what_is_no_8_bit_image_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_header(data, exif=True)


@given(st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"]))
def test_any_bytes_are_a_header_or_a_value_error(tail: bytes, start: bytes) -> None:
    with contextlib.suppress(ValueError):
        width, height, orientation = read_header(start + tail, exif=True)
        assert width > 0
        assert height > 0
        assert 1 <= orientation <= 8


@given(st.data())
def test_a_damaged_photograph_is_a_header_or_a_value_error(data: st.DataObject) -> None:
    damaged = bytearray(variants()["turned.jpg"][:2000] + b"\xff\xd9")
    for _ in range(data.draw(st.integers(1, 10))):
        damaged[data.draw(st.integers(2, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        assert 1 <= read_header(bytes(damaged), exif=True).orientation <= 8
