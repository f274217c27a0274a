"""An image folder on disk: ``root/train/<class>/*`` and ``root/val/<class>/*``, listed by rank 0 alone.

Names are bytes here, as the file system has them: any encoding works, and they sort the same everywhere.
"""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdbs.errors import HvdbsError, refusal, suggestion

SUFFIXES = (b".jpg", b".jpeg", b".png")
_LISTING_THREADS = 16  # they wait for the file system's metadata servers, not for cores
_LAYOUT = "expected train/<class>/* and val/<class>/* with JPEG or PNG files"


class Listing(NamedTuple):
    """The images of one split: ``names``, ``sizes`` (bytes) and ``inodes`` (uint64, of what a link points to) for each
    class folder, in byte order.

    ``ignored`` counts what is not taken for an image: other suffixes, hidden files, sub-folders.
    """

    names: list[list[bytes]]
    sizes: list[list[int]]
    inodes: list[NDArray[np.uint64]]
    ignored: int


def shown(path: str | bytes) -> str:
    """A path as it can stand in a line of text: undecodable bytes and control characters are escaped."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unreadable(path: str | bytes, error: OSError) -> HvdbsError:
    """The one line for a path that the operating system will not give."""
    return refusal("data", shown(path), f"cannot be read: {error.strerror or error}")


def class_folders(root: str, split: str) -> dict[bytes, int]:
    """The class folders of ``split`` in byte order, each with its modification time in ns: one stat for each.

    Raises HvdbsError if ``root`` or the split is missing, is no folder, or has no class folders.
    """
    if not os.path.isdir(root):
        rule = "is not a folder" if os.path.exists(root) else "does not exist"
        raise refusal("data.root", shown(root), rule, _LAYOUT)
    place = os.path.join(os.fsencode(root), split.encode())
    found: list[bytes] = []
    images = 0
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.is_dir() and not entry.name.startswith(b"."):
                    found.append(entry.name)
                images += _is_image_name(entry.name)
        stamps = {name: os.stat(os.path.join(place, name)).st_mtime_ns for name in sorted(found)}
    except (FileNotFoundError, NotADirectoryError):
        raise refusal("data.root", shown(root), f"has no {split} folder", _nearest_root(root)) from None
    except OSError as error:
        raise unreadable(error.filename or place, error) from None
    if not stamps:
        if images:
            rule = f"holds {images} images but no class folders"
            raise refusal("data", shown(place), rule, "sort its images into one folder for each class")
        raise refusal("data", shown(place), "holds no class folders", _LAYOUT)
    if images:
        rule = f"holds {images} images beside its class folders, which would not be seen"
        raise refusal("data", shown(place), rule, "move them into a class folder or remove them")
    return stamps


def _nearest_root(root: str) -> str:
    """What may be meant instead of ``root``, which is a folder without the two splits."""
    above = os.path.dirname(os.path.abspath(root))
    for parent in (above, os.path.dirname(above)):
        if all(os.path.isdir(os.path.join(parent, split)) for split in ("train", "val")):
            return f"did you mean {shown(parent)}?"
    try:
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != ".")
    except OSError:
        folders = []
    if not folders or len(folders) > 10:
        return _LAYOUT
    return f"it has {', '.join(map(shown, folders))}; {_LAYOUT}"


def list_split(root: str, split: str, classes: list[bytes]) -> Listing:
    """All images of ``split``: one listing for each class folder and one stat for each file, in parallel.

    Raises HvdbsError for a class folder without images, a link that points nowhere, or what cannot be read.
    """
    places = [os.path.join(os.fsencode(root), split.encode(), name) for name in classes]
    with ThreadPoolExecutor(_LISTING_THREADS) as pool:
        listed = list(pool.map(_list_folder, places))
    empty = [place for place, (names, *_) in zip(places, listed, strict=True) if not names]
    if empty:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        nearest = "images stand directly in a class folder; remove empty ones"
        raise refusal("data", shown(empty[0]) + more, "has no images", nearest)
    names, sizes, inodes, ignored = zip(*listed, strict=True)
    return Listing(list(names), list(sizes), list(inodes), sum(ignored))


def check_classes(root: str, train: list[bytes], val: list[bytes]) -> None:
    """Raises HvdbsError if val has a class that train lacks, or is train.

    A class without validation images is allowed, and warned of (``Index.warnings``).
    """
    if os.path.samefile(os.path.join(root, "val"), os.path.join(root, "train")):
        raise refusal("data", shown(os.path.join(os.fsencode(root), b"val")), "is the same folder as train", _LAYOUT)
    unknown = sorted(set(val) - set(train))
    if unknown:
        place = os.path.join(os.fsencode(root), b"val", unknown[0])
        hint = suggestion(shown(unknown[0]), map(shown, train[:20]))
        raise refusal("data", shown(place), "is a class that train does not have", hint)


def _is_image_name(name: bytes) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(b".")


def _list_folder(place: bytes) -> tuple[list[bytes], list[int], NDArray[np.uint64], int]:
    found: list[tuple[bytes, int, int]] = []
    ignored = 0
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                status = entry.stat() if _is_image_name(entry.name) else None
                if status is not None and stat.S_ISREG(status.st_mode):
                    found.append((entry.name, status.st_size, status.st_ino))
                else:
                    ignored += 1
    except OSError as error:
        raise unreadable(error.filename or place, error) from None
    found.sort()
    inodes = np.array([inode for _, _, inode in found], np.uint64)
    return [name for name, _, _ in found], [size for _, size, _ in found], inodes, ignored
