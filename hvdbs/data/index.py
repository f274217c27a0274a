"""The file list of an image folder: what it is made of, and how it is made.

A list is good as long as the class folders have the names and modification times it was made from: one stat
for each class, and nothing else is looked at. A file that was overwritten in place does not show there; the
reader notices its size.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdbs.data import folder, splits

K = TypeVar("K", bound=np.generic)

_FORMAT = 2
# A folder changed this shortly before it was listed may change again within the same tick of its file
# system's clock.
_SETTLED_NS = 2_000_000_000
_UNSETTLED = -1  # never equal to a modification time


@dataclass(frozen=True)
class Files:
    """The images of one split, in byte order of class and name: 21 bytes and a name for each.

    ``names``: all file names in one piece; ``offsets`` int64 [N + 1] into it; ``labels`` int32 [N]; ``sizes``
    int64 [N], in bytes.
    """

    place: bytes
    classes: tuple[bytes, ...]
    names: bytes
    offsets: NDArray[np.int64]
    labels: NDArray[np.int32]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, i: int) -> str:
        """The path of image ``i``; bytes that are no UTF-8 as surrogates, which ``open`` takes back."""
        name = self.names[self.offsets[i] : self.offsets[i + 1]]
        return os.fsdecode(b"/".join((self.place, self.classes[self.labels[i]], name)))


@dataclass(frozen=True)
class Index:
    """Both splits of ``root``. ``classes``: the sorted names of train's folders, which the labels count.

    ``ignored``: entries of class folders that are not taken for images; ``copies``: what to say of images of val that
    are copies of train's, if any were found when it was listed.
    """

    root: str
    classes: tuple[str, ...]
    train: Files
    val: Files
    ignored: int
    copies: str

    def warnings(self) -> list[str]:
        """What is allowed and probably not meant, a line for each."""
        lines = [self.copies] if self.copies else []
        unseen = np.flatnonzero(np.bincount(self.val.labels, minlength=len(self.classes)) == 0).tolist()
        if unseen:
            some = ", ".join(folder.shown(self.classes[label]) for label in unseen[:3])
            more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
            lines.append(f"{len(unseen)} of {len(self.classes)} classes have no images in val ({some}{more})")
        if len(self.val) > len(self.train):
            lines.append(f"val holds {len(self.val):,} images, train {len(self.train):,}: are they swapped?")
        return [f"warning: {folder.shown(self.root)}: {line}" for line in lines]


def class_times(root: str) -> dict[str, dict[bytes, int]]:
    """Modification times in ns of the class folders of each split: all that tells whether a list is current.

    Raises HvdbsError if ``root`` has not the layout of an image folder (see ``folder``).
    """
    return {split: folder.class_folders(root, split) for split in ("train", "val")}


def scan(root: str, now: Callable[[], int] = time.time_ns) -> bytes:
    """List ``root`` and return its index as bytes: an npz without pickles.

    ``now``: the time in ns since 1970. Raises HvdbsError (see ``folder``).
    """
    found = class_times(root)
    train, val = list(found["train"]), list(found["val"])
    folder.check_classes(root, train, val)
    settled = now() - _SETTLED_NS
    label = {name: number for number, name in enumerate(train)}
    arrays: dict[str, NDArray[np.generic]] = {}
    ignored = 0
    named = {"train": train, "val": val}
    listed = {split: folder.list_split(root, split, classes) for split, classes in named.items()}
    splits.refuse_same_files(root, named, listed)
    for split, classes in named.items():
        listing = listed[split]
        ignored += listing.ignored
        times = [changed if changed < settled else _UNSETTLED for changed in found[split].values()]
        labels = np.array([label[name] for name in classes], np.int32)
        arrays[f"{split}_times"] = np.array(times, np.int64)
        arrays[f"{split}_classes"], arrays[f"{split}_class_offsets"] = _packed(classes)
        arrays[f"{split}_names"], arrays[f"{split}_name_offsets"] = _packed(list(chain(*listing.names)))
        arrays[f"{split}_labels"] = np.repeat(labels, [len(names) for names in listing.names])
        arrays[f"{split}_sizes"] = np.array(list(chain(*listing.sizes)), np.int64)
    arrays["about"] = np.array([_FORMAT, ignored], np.int64)
    arrays["copies"] = np.frombuffer(splits.copies(root, named, listed).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def parse(data: bytes, root: str) -> Index:
    """The index in ``data``, for a folder at ``root``. Raises ValueError for anything that is not one."""
    return _index(_arrays(data), root)


def _index(arrays: Mapping[str, NDArray[np.generic]], root: str) -> Index:
    classes, place = _unpacked(arrays, "train_class"), os.fsencode(root)
    train, val = (
        Files(
            os.path.join(place, split.encode()),
            classes,
            _column(arrays, f"{split}_names", np.uint8).tobytes(),
            _column(arrays, f"{split}_name_offsets", np.int64),
            _column(arrays, f"{split}_labels", np.int32),
            _column(arrays, f"{split}_sizes", np.int64),
        )
        for split in ("train", "val")
    )
    _check(train)
    _check(val)
    ignored = int(_column(arrays, "about", np.int64)[1])
    copies = _column(arrays, "copies", np.uint8).tobytes().decode()
    return Index(root, tuple(os.fsdecode(name) for name in classes), train, val, ignored, copies)


def is_current(data: bytes, times: Mapping[str, Mapping[bytes, int]]) -> bool:
    """Whether ``data`` is a whole index, made from class folders with these modification ``times``."""
    try:
        arrays = _arrays(data)
        _index(arrays, "")
        return times == {split: _made_from(arrays, split) for split in ("train", "val")}
    except ValueError:
        return False


def _made_from(arrays: Mapping[str, NDArray[np.generic]], split: str) -> dict[bytes, int]:
    times = _column(arrays, f"{split}_times", np.int64).tolist()
    return dict(zip(_unpacked(arrays, f"{split}_class"), times, strict=True))


def _packed(texts: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    return np.frombuffer(b"".join(texts), np.uint8), offsets


def _unpacked(arrays: Mapping[str, NDArray[np.generic]], name: str) -> tuple[bytes, ...]:
    whole = _column(arrays, f"{name}es", np.uint8).tobytes()
    offsets = _column(arrays, f"{name}_offsets", np.int64).tolist()
    return tuple(whole[a:b] for a, b in pairwise(offsets))


def _column(arrays: Mapping[str, NDArray[np.generic]], name: str, kind: type[K]) -> NDArray[K]:
    column = arrays.get(name)
    if column is None or column.dtype != kind or column.ndim != 1:
        raise ValueError(f"not an index: {name}")
    return column.astype(kind, copy=False)


def _arrays(data: bytes) -> dict[str, NDArray[np.generic]]:
    # The file is a cache that anyone may have damaged or replaced: whatever is wrong with it, it is not an
    # index. numpy and zipfile raise a dozen kinds of errors for that, so all are taken together.
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            arrays = dict(stored)
        if arrays["about"].tolist()[0] != _FORMAT:
            raise ValueError("another format")
        return arrays
    except Exception as error:
        raise ValueError(f"not an index: {error}") from None


def _check(files: Files) -> None:
    n = len(files)
    whole = (
        n > 0
        and len(files.offsets) == n + 1
        and len(files.sizes) == n
        and files.offsets[0] == 0
        and files.offsets[-1] == len(files.names)
        and bool((np.diff(files.offsets) > 0).all())
        and 0 <= files.labels.min() <= files.labels.max() < len(files.classes)
        and b"/" not in files.names
        and not any(b"/" in name or not name for name in files.classes)
    )
    if not whole:
        raise ValueError("not an index: its parts do not fit together")
