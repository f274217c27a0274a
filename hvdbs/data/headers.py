"""What the first bytes of a JPEG or PNG tell: width, height, orientation; and what is refused before decoding.

Read here and not by a decoder, so that both back-ends cut the same rectangle and refuse the same files for
the same reason. The kind is told by the content; the name's suffix plays no part.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
# SOF0 to SOF15, without the tables that share their range.
_FRAMES = frozenset(range(0xC0, 0xD0)) - frozenset((0xC4, 0xC8, 0xCC))
_BARE = frozenset(range(0xD0, 0xD9)) | {0x01}  # markers without a length
_START_OF_SCAN, _END_OF_IMAGE, _APP1 = 0xDA, 0xD9, 0xE1
_ORIENTATION = 0x0112
_MOST_PIXELS = 178_956_970  # Pillow refuses more; DALI would fill 2.7 GB and work for half a minute for 30,000 x 30,000


class Header(NamedTuple):
    """Pixels as stored, and the EXIF orientation (1 to 8; 1 where there is none)."""

    width: int
    height: int
    orientation: int


def read_header(data: bytes, exif: bool = False) -> Header:
    """The header of an encoded image; the orientation is looked for only if ``exif``.

    Raises ValueError with the reason, fit to stand after the path: neither JPEG nor PNG, 16-bit (or 12-bit),
    truncated, without pixels, or with more than any photograph has.
    """
    if data.startswith(_JPEG):
        header = _jpeg(data, exif)
    elif data.startswith(_PNG):
        header = _png(data, exif)
    elif not data:
        raise ValueError("is empty")
    else:
        raise ValueError("is neither JPEG nor PNG")
    if header.width < 1 or header.height < 1:
        raise ValueError(f"is damaged: its header says {header.width} x {header.height} pixels")
    if header.width * header.height > _MOST_PIXELS:
        size = f"{header.width} x {header.height} pixels"
        raise ValueError(f"has {size}; more than {_MOST_PIXELS} are taken for damage or a decompression bomb")
    return header


def _eight_bits(bits: int) -> None:
    if bits > 8:
        raise ValueError(f"is a {bits}-bit image; only 8 bits a channel are supported")


def _png(data: bytes, exif: bool) -> Header:
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise ValueError("is truncated: its PNG header is incomplete")
    width, height, bits = struct.unpack_from(">IIB", data, 16)
    _eight_bits(bits)
    return Header(width, height, _png_orientation(data) if exif else 1)


def _png_orientation(data: bytes) -> int:
    place = 8
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        if kind == b"eXIf":
            return _tiff_orientation(data[place + 8 : place + 8 + length])
        if kind == b"IDAT":
            break
        place += 12 + length
    return 1


def _jpeg(data: bytes, exif: bool) -> Header:
    place, orientation, seen = 2, 1, False
    try:
        while True:
            # Bytes before a marker that belong to nothing are skipped, as libjpeg does.
            while data[place] != 0xFF:
                place += 1
            while data[place] == 0xFF:
                place += 1
            marker = data[place]
            place += 1
            if marker == 0 or marker in _BARE:
                continue
            if marker in (_START_OF_SCAN, _END_OF_IMAGE):
                raise ValueError("is damaged: its JPEG header has no frame")
            length = (data[place] << 8) | data[place + 1]
            if marker in _FRAMES:
                bits, height, width = struct.unpack_from(">BHH", data, place + 2)
                break
            if exif and not seen and marker == _APP1 and data[place + 2 : place + 8] == b"Exif\0\0":
                orientation, seen = _tiff_orientation(data[place + 8 : place + length]), True
            place += length
    except (IndexError, struct.error):
        raise ValueError("is truncated: its JPEG header is incomplete") from None
    _eight_bits(bits)
    # A decoder that reads only the rows of a cut does not notice that later ones are missing. Looked for from
    # the end and not before the frame, where a thumbnail has an end of its own.
    if data.rfind(b"\xff\xd9", place) < 0:
        raise ValueError("is truncated: it has no end-of-image marker")
    return Header(width, height, orientation)


def _tiff_orientation(tiff: bytes) -> int:
    """The orientation in the first directory of an EXIF block; 1 for a block that makes no sense."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (place,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, place)
        for entry in range(entries):
            tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, place + 2 + 12 * entry)
            if tag == _ORIENTATION:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
