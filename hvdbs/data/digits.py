"""scikit-learn's real handwritten digits as an ImageNet-style folder: small, and in no need of a download."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from hvdbs.data.folder import shown
from hvdbs.data.kept import NAME
from hvdbs.errors import HvdbsError, refusal

TRAIN, TOTAL = 1437, 1797
# 8 x 8 pixels are one JPEG block. At this quality it loses 0.06 of 255 levels on average, 1 at most.
QUALITY = 100


def write(out: str) -> int:
    """Make ``out`` the digits' folder, train/0..9 and val/0..9, and return how many images were written.

    That is 0 if they are all there already. The folder appears whole or not at all. Raises HvdbsError if
    ``out`` holds anything else, if it cannot be written, or if scikit-learn is missing.
    """
    folder = Path(out).expanduser().resolve()
    if folder.is_dir() and (found := {path for path in folder.iterdir() if path.name != NAME}):
        if _is_complete(folder):
            return 0
        nearest = "give an empty or a new folder"
        raise refusal("--out", shown(str(folder)), f"holds {len(found)} entries that are not the digits", nearest)
    partial = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        _write_all(partial)
        partial.rename(folder)  # an empty folder is replaced
    except OSError as error:
        raise refusal("--out", shown(str(folder)), f"cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return TOTAL


def _name(number: int) -> tuple[str, str]:
    return "train" if number < TRAIN else "val", f"digit-{number:04d}.jpg"


def _is_complete(folder: Path) -> bool:
    found = [path.relative_to(folder).parts for path in folder.glob("*/[0-9]/*")]
    return sorted((parts[0], parts[2]) for parts in found) == [_name(number) for number in range(TOTAL)]


def _write_all(folder: Path) -> None:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise HvdbsError(f"digits: {error}; they come with scikit-learn: pip install scikit-learn") from None
    digits = load_digits()
    levels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # 17 grey levels, [1797, 8, 8]
    for number, (pixels, digit) in enumerate(zip(levels, digits.target.tolist(), strict=True)):
        split, name = _name(number)
        place = folder / split / str(digit)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / name, "JPEG", quality=QUALITY)
