"""Image folders for tests: real photographs in every kind of file that hvdbs reads."""

from __future__ import annotations

import io
import os
from functools import cache
from pathlib import Path

import numpy as np
import sklearn.datasets
from PIL import Image

LONG_AGO = 1_000_000_000  # seconds since 1970


@cache
def photo(name: str = "china.jpg") -> Image.Image:
    """One of scikit-learn's two photographs, 640 x 427 pixels, RGB, without metadata."""
    image = Image.open(Path(sklearn.datasets.__file__).parent / "images" / name).convert("RGB")
    return Image.fromarray(np.asarray(image))


def encode(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def with_orientation(image: Image.Image, orientation: int, kind: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, kind, exif=exif)


@cache
def variants() -> dict[str, bytes]:
    """File name -> content: the same photograph in each colour space and container."""
    china, flower = photo(), photo("flower.jpg")
    alpha = Image.fromarray((np.indices((427, 640)).sum(0) % 256).astype(np.uint8))
    see_through = china.copy()
    see_through.putalpha(alpha)
    grey_alpha = china.convert("L")
    grey_alpha.putalpha(alpha)
    palette = china.convert("P", palette=Image.Palette.ADAPTIVE, colors=255)
    cmyk = encode(china.convert("CMYK"), quality=90)
    ycck = bytearray(cmyk)
    ycck[ycck.index(b"Adobe") + 11] = 2  # the same numbers, to be read as YCCK
    return {
        "plain.jpg": encode(china, quality=90),
        "FLOWER.JPEG": encode(flower, quality=80),
        "full chroma.jpg": encode(flower, quality=95, subsampling=0),
        "half chroma.jpg": encode(flower, quality=90, subsampling=1),
        "progressive.Jpg": encode(china, quality=85, progressive=True),
        "gray.jpg": encode(china.convert("L"), quality=90),
        "cmyk.jpg": cmyk,
        "ycck.jpg": bytes(ycck),
        "restarts.jpg": encode(flower, quality=90, restart_marker_rows=1),
        "odd.jpg": encode(china.crop((3, 5, 336, 216)), quality=90),
        "plain.PNG": encode(china, "PNG"),
        "really a PNG.JPEG": encode(flower, "PNG"),
        "really a JPEG.png": encode(china, quality=90),
        "gray.png": encode(china.convert("L"), "PNG"),
        "alpha.png": encode(see_through, "PNG"),
        "gray alpha.png": encode(grey_alpha, "PNG"),
        "palette.png": encode(palette, "PNG"),
        "transparent palette.png": encode(palette, "PNG", transparency=bytes(range(255))),
        "transparent colour.png": encode(china, "PNG", transparency=(0, 0, 0)),
        "bits.png": encode(china.convert("1"), "PNG"),
        "turned.jpg": with_orientation(china, 6, "JPEG"),
    }


def small(colour: tuple[int, int, int] = (200, 30, 60), size: tuple[int, int] = (20, 12)) -> bytes:
    return encode(Image.new("RGB", size, colour))


def write(root: Path, files: dict[str, bytes]) -> Path:
    """Write ``files`` (path below ``root`` -> content) and make all folders look old, so that an index
    settles.
    """
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    settle(root)
    return root


def settle(root: Path) -> None:
    for folder, _, _ in os.walk(os.fsencode(root)):
        os.utime(folder, (LONG_AGO, LONG_AGO))


def two_classes(root: Path, train: int = 5, val: int = 3) -> Path:
    """A folder of tiny images: classes cat and dog with ``train`` and ``val`` images each."""
    counts = {"train": train, "val": val}

    def blue(split: str, name: str) -> int:  # which no two of them share
        return (200 if name == "dog" else 20) + (40 if split == "val" else 0)

    return write(
        root,
        {
            f"{split}/{name}/{k}.jpg": small((40 * k % 256, 10 * k % 256, blue(split, name)))
            for split, count in counts.items()
            for name in ("cat", "dog")
            for k in range(count)
        },
    )
