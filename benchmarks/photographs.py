"""A folder of JPEG photographs for the loader's benchmark: crops of those that scikit-learn and scikit-image ship.

    python -m benchmarks.photographs

Nothing is downloaded. File number i is a function of i alone: the place and size of the crop, mirrorings, and the
JPEG quality that brings it near a number of bytes drawn for it. A call that was stopped is taken up by the next.
"""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from hvdbs.errors import HvdbsError

TRAIN, VAL = 2200, 22
SEED = 0
BYTES = range(80_000, 110_001)
QUALITY = range(60, 99)
SIDE = (300, 1000)  # of a crop, in pixels, at least half of the photograph's
# All colour photographs that come with the packages themselves, but for two too small to reach 80 KB (chelsea, color).
SKLEARN = ("china.jpg", "flower.jpg")
SKIMAGE = (
    "astronaut.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "motorcycle_right.png",
    "retina.jpg",
    "rocket.jpg",
)
DEFAULT = Path("data/bench-photographs")


@dataclass(frozen=True)
class Corpus:
    """What lies in the folder: bytes [N] and pixels (width x height) [N] of the training images."""

    root: Path
    sizes: Sequence[int]
    pixels: Sequence[int]

    def described(self) -> str:
        """Number, bytes and pixels in words: least, median, most."""
        kilobytes, mega = np.array(self.sizes) / 1e3, np.array(self.pixels) / 1e6
        return (
            f"{len(self.sizes)} photographs of {kilobytes.min():.1f} to {kilobytes.max():.1f} KB "
            f"(median {np.median(kilobytes):.1f}), {mega.min():.2f} to {mega.max():.2f} megapixels "
            f"(median {np.median(mega):.2f})"
        )


def originals() -> dict[str, Image.Image]:
    """The photographs by name. Raises HvdbsError if a package that brings them is missing."""
    found = {}
    for package, folder, names in (("sklearn", "datasets/images", SKLEARN), ("skimage", "data", SKIMAGE)):
        spec = find_spec(package)  # found and not imported: only files are wanted
        if spec is None or not spec.origin:
            raise HvdbsError(f"photographs: {package} is missing; pip install 'hvdbs[bench]'")
        for name in names:
            with Image.open(Path(spec.origin).parent / folder / name) as image:
                found[Path(name).stem] = image.convert("RGB")
    return found


def crop(photograph: Image.Image, generator: np.random.Generator) -> Image.Image:
    """A part of at least half the width and height, perhaps mirrored."""
    box = []
    for length in photograph.size:
        low, high = max(length // 2, min(SIDE[0], length)), min(length, SIDE[1])
        side = int(generator.integers(low, high + 1))
        begin = int(generator.integers(length - side + 1))
        box.append((begin, begin + side))
    part = photograph.crop((box[0][0], box[1][0], box[0][1], box[1][1]))
    if generator.random() < 0.5:
        part = ImageOps.mirror(part)
    return ImageOps.flip(part) if generator.random() < 0.5 else part


def jpeg(image: Image.Image, quality: int) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality)
    return out.getvalue()


def near(image: Image.Image, target: int) -> bytes | None:
    """The JPEG of the lowest quality of at least ``target`` bytes; None if that is not within ``BYTES``."""
    low, high = QUALITY.start, QUALITY.stop - 1
    while low < high:
        middle = (low + high) // 2
        if len(jpeg(image, middle)) >= target:
            high = middle
        else:
            low = middle + 1
    data = jpeg(image, low)
    return data if len(data) in BYTES else None


def photograph(number: int, of: dict[str, Image.Image]) -> tuple[str, bytes]:
    """File ``number``: the name of its original and its bytes."""
    name = list(of)[number % len(of)]
    generator = np.random.default_rng([SEED, number])
    for _ in range(1000):
        target = int(generator.integers(BYTES.start, BYTES.stop))
        if data := near(crop(of[name], generator), target):
            return name, data
    raise HvdbsError(f"photographs: no crop of {name} has {BYTES.start} to {BYTES.stop - 1} bytes")


def missing(root: Path, names: Sequence[str], train: int, val: int) -> Iterator[tuple[int, Path]]:
    """Number and path of each file that is not there."""
    for number in range(train + val):
        path = root / ("train" if number < train else "val") / names[number % len(names)] / f"{number:04d}.jpg"
        if not path.exists():
            yield number, path


def make(root: Path, train: int = TRAIN, val: int = VAL) -> Corpus:
    """Complete the folder ``root`` (train/<original>/*, val/<original>/*) and say what is in it."""
    of = originals()

    def write(work: tuple[int, Path]) -> None:
        number, path = work
        partial = path.with_suffix(f".{os.getpid()}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(photograph(number, of)[1])
        partial.rename(path)

    todo = list(missing(root, list(of), train, val))
    if todo:
        print(f"making {len(todo)} photographs in {root}: a few minutes, once", flush=True)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(write, todo):
                pass
    paths = sorted((root / "train").glob("*/*.jpg"))
    pixels = []
    for path in paths:
        with Image.open(path) as image:
            pixels.append(image.width * image.height)
    return Corpus(root, [path.stat().st_size for path in paths], pixels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT, help=f"the folder (default: {DEFAULT})")
    print(make(parser.parse_args().out).described())


if __name__ == "__main__":
    main()
