"""Fashion-MNIST (Xiao, Rasul and Vollgraf, arXiv 1708.07747) as an image folder of grey PNGs, without loss.

From Debian's package dataset-fashion-mnist, which is unpacked and not installed, or from a copy of the four IDX files.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import secrets
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from hvdbs.data.folder import shown
from hvdbs.data.kept import NAME
from hvdbs.errors import HvdbsError, refusal

PACKAGE = "dataset-fashion-mnist"
# In the order of the labels, which the byte order of the names keeps.
CLASSES = (
    "0-t-shirt-top",
    "1-trouser",
    "2-pullover",
    "3-dress",
    "4-coat",
    "5-sandal",
    "6-shirt",
    "7-sneaker",
    "8-bag",
    "9-ankle-boot",
)
# Of what the files hold once unpacked, in version 0.0~git20200523.55506a9-1 of Debian's package: a gzip header has a
# time and a name, so that equal data comes as different .gz files.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
TRAIN, VAL = 60_000, 10_000
_PREFIX = {"train": "train", "val": "t10k"}
_MISSING = "give the folder of the four IDX files with --from"

Bytes = npt.NDArray[np.uint8]


class Split(NamedTuple):
    """Grey ``images`` [N, H, W] and their ``labels`` [N]."""

    images: Bytes
    labels: Bytes


def write(
    out: str, source: str | None = None, samples: int | None = None, known: Mapping[str, str] = SHA256
) -> tuple[int, int] | None:
    """Make ``out`` the folder train/<class>/*, val/<class>/*; how many images went to each, None if they are there.

    ``source``: the folder of the IDX files, gzipped or not; by default they come from Debian's package. ``samples``:
    only so many training images, the first of each class and equally many of each. ``known``: sha256 of each unpacked
    file. The folder appears whole or not at all. Raises HvdbsError if ``out`` holds anything else or cannot be
    written, if the files are missing, damaged or others, and if ``samples`` cannot be met.
    """
    each = _each(samples)
    folder = Path(out).expanduser().resolve()
    if folder.is_dir() and (found := {path for path in folder.iterdir() if path.name != NAME}):
        if _is_complete(folder, each):
            return None
        nearest = "give an empty or a new folder"
        raise refusal("--out", shown(str(folder)), f"holds {len(found)} entries that are not these images", nearest)
    splits = read(Path(source).expanduser(), known) if source is not None else _of_the_package(known)
    chosen = {"train": _balanced(splits["train"].labels, each), "val": np.arange(len(splits["val"].labels))}
    partial = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        for name, indices in chosen.items():
            _write_split(partial / name, splits[name], indices)
        partial.rename(folder)  # an empty folder is replaced
    except OSError as error:
        raise refusal("--out", shown(str(folder)), f"cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(chosen["train"]), len(chosen["val"])


def read(folder: Path, known: Mapping[str, str] = SHA256) -> dict[str, Split]:
    """Both splits of the four IDX files in ``folder``. Raises HvdbsError unless each is whole and the ``known`` one."""
    result = {}
    for name, prefix in _PREFIX.items():
        images, labels = (parse(path, _content(path, known)) for path in _places(folder, prefix))
        if len(images) != len(labels):
            raise HvdbsError(
                f"fashion-mnist: {shown(str(folder))} has {len(images)} {name} images, {len(labels)} labels"
            )
        result[name] = Split(images, labels)
    return result


def parse(path: Path, data: bytes) -> Bytes:
    """The array of unsigned bytes in IDX ``data``: two zeros, type 8, the number of dimensions, each as 4 bytes.

    Raises HvdbsError naming ``path`` if the header or the length is not that of such a file.
    """
    wanted = 3 if "images" in path.name else 1
    header = 4 + 4 * wanted
    if data[:4] != bytes((0, 0, 8, wanted)) or len(data) < header:
        rule = f"does not begin like IDX data of unsigned bytes in {wanted} dimensions"
        raise refusal("fashion-mnist", shown(str(path)), f"{rule}: {data[:4].hex(' ') or 'it is empty'}", _MISSING)
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", wanted, 4))
    if len(data) - header != np.prod(shape):
        rule = f"holds {len(data) - header} bytes where its header says {' x '.join(map(str, shape))}"
        raise refusal("fashion-mnist", shown(str(path)), rule, "copy it again")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _each(samples: int | None) -> int | None:
    """Training images of each class; None for all."""
    if samples is None:
        return None
    if not 1 <= samples <= TRAIN or samples % len(CLASSES):
        nearest = min(max(round(samples / 10) * 10, 10), TRAIN)
        rule = f"must be a multiple of {len(CLASSES)}, the classes, from {len(CLASSES)} to {TRAIN}"
        raise refusal("--samples", samples, rule, f"such as {nearest}")
    return samples // len(CLASSES)


def _is_complete(folder: Path, each: int | None) -> bool:
    def counts(split: str) -> list[int]:
        return [len(list((folder / split / name).glob("[0-9]*.png"))) for name in CLASSES]

    only_these = all((folder / split).is_dir() for split in _PREFIX) and len(list(folder.glob("*/*"))) == 2 * len(
        CLASSES
    )
    train = TRAIN // len(CLASSES) if each is None else each
    return only_these and set(counts("train")) == {train} and set(counts("val")) == {VAL // len(CLASSES)}


def _places(folder: Path, prefix: str) -> list[Path]:
    return [folder / f"{prefix}-{what}-ubyte" for what in ("images-idx3", "labels-idx1")]


def _content(path: Path, known: Mapping[str, str]) -> bytes:
    packed = path.with_name(f"{path.name}.gz")
    try:
        data = path.read_bytes() if path.is_file() else gzip.decompress(packed.read_bytes())
    except FileNotFoundError:
        raise refusal(
            "--from", shown(str(path.parent)), f"holds neither {path.name} nor {packed.name}", _MISSING
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise refusal("fashion-mnist", shown(str(path)), f"cannot be read: {error}", "copy it again") from None
    parse(path, data)  # says more of a damaged file than its digest
    if (found := hashlib.sha256(data).hexdigest()) != known[path.name]:
        rule = f"is not Fashion-MNIST's: sha256 {found[:12]}... where {known[path.name][:12]}... is known"
        raise refusal("fashion-mnist", shown(str(path)), rule, "copy it again")
    return data


def _of_the_package(known: Mapping[str, str]) -> dict[str, Split]:
    with tempfile.TemporaryDirectory(prefix="hvdbs-") as folder:
        _run(["apt-get", "download", PACKAGE], folder)
        archives = sorted(Path(folder).glob(f"{PACKAGE}_*.deb"))
        if not archives:
            raise HvdbsError(f"fashion-mnist: apt-get download left no {PACKAGE}_*.deb; {_MISSING}")
        _run(["dpkg-deb", "-x", archives[0].name, "."], folder)
        return read(Path(folder) / "usr/share/datasets/fashion-mnist", known)


def _run(command: list[str], folder: str) -> None:
    name = " ".join(command[:2])
    variables = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    except OSError as error:
        raise HvdbsError(f"fashion-mnist: {name} cannot be run: {error.strerror}; {_MISSING}") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        why = next((line for line in said if line.startswith("E:")), said[-1])
        raise HvdbsError(f"fashion-mnist: {name} {PACKAGE} failed: {why}; {_MISSING}")


def _balanced(labels: Bytes, each: int | None) -> npt.NDArray[np.intp]:
    """Indices of the first ``each`` images of every class, in the order of the file; of all for None."""
    if each is None:
        return np.arange(len(labels))
    most = int(np.bincount(labels, minlength=len(CLASSES)).min())
    if each > most:
        raise refusal("--samples", each * len(CLASSES), f"needs {each} of each class, of which one has {most}")
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:each] for label in range(len(CLASSES))]))


def _write_split(place: Path, split: Split, indices: npt.NDArray[np.intp]) -> None:
    for name in CLASSES:
        (place / name).mkdir(parents=True)

    def write_one(index: int) -> None:
        Image.fromarray(split.images[index]).save(place / CLASSES[split.labels[index]] / f"{index:05d}.png", "PNG")

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(write_one, indices.tolist()):
            pass
