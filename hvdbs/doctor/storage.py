"""The file systems of the run and of the data: kind, room, and how fast the data is really read."""

from __future__ import annotations

import fcntl
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdbs.doctor.findings import Finding, amount

_ROOM_BYTES = 2e9
_FOLDERS = 1000  # that a walk looks into: links may lead round in circles
_SECONDS, _FILES, _BYTES, _PART, _THREADS = 2.5, 400, 400_000_000, 1 << 20, 8  # of one measurement
_IMAGES_PER_CORE = 500  # of some 90 kB, that DALI decodes in a second (benchmarks/results/loader.csv)
_OVER_A_NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "panfs", "pvfs2", "9p", "fuse.")


def mounted(path: Path) -> tuple[str, str]:
    """Kind of file system under ``path`` and where it is mounted, by /proc/self/mountinfo."""
    real = path.resolve()
    best = ("unknown", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        place = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4])  # a blank is \040 there
        if real.is_relative_to(place) and len(place) >= len(best[1]):
            best = (after.split()[0], place)
    return best


def run_directory(path: Path) -> Finding:
    """Whether a run can be written at ``path``: there, or in the nearest folder that exists."""
    if path.exists() and not path.is_dir():
        return Finding("files", "runs", "FAIL", f"{path} is a file", "--out DIR, a folder or a name that is free")
    folder = next(place for place in (path, *path.absolute().parents) if place.is_dir())
    kind, place = mounted(folder)
    status = os.statvfs(folder)
    free = status.f_frsize * status.f_bavail
    text = f"{folder.resolve()}: {kind} on {place}, {amount(free)} free"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            locks = _locks(file.fileno())
    except OSError as error:
        fix = "--out DIR in a folder that can be written"
        return Finding("files", "runs", "FAIL", f"{text}; cannot be written ({error.strerror})", fix)
    if free < _ROOM_BYTES:
        return Finding("files", "runs", "note", text, "room for checkpoints: 3 of them, of 8 to 12 bytes per parameter")
    if not locks:
        fix = "take care of it yourself: no two jobs with one --out (Lustre: mount it with flock)"
        return Finding("files", "runs", "note", f"{text}; it has no locks, so that a second job is not refused", fix)
    return Finding("files", "runs", "ok", text)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Reading:
    """What was read in ``seconds``."""

    files: int
    bytes: int
    seconds: float


def data(path: Path, cores: int) -> Finding:
    """The file system of the data and the rate at which it is read, by 8 threads, past this machine's cache."""
    if not path.is_dir():
        why = "is a file" if path.exists() else "does not exist"
        return Finding("files", "data", "FAIL", f"{path} {why}", "--data DIR, the folder with train/ and val/")
    kind, place = mounted(path)
    try:
        files = sample(path, _FILES)
        if not files:
            return Finding(
                "files", "data", "FAIL", f"{path} holds no file", "the folder with train/<class>/ and val/<class>/"
            )
        done = read(files)
    except OSError as error:
        reason = f"{error.filename or path}: {error.strerror}"
        return Finding(
            "files", "data", "FAIL", f"{path} cannot be read ({reason})", "its permissions; python -m hvdbs.data check"
        )
    rate, each = done.bytes / done.seconds, done.files / done.seconds
    text = f"{path}: {kind} on {place}, {amount(rate)}/s, {each:,.0f} files/s of {amount(done.bytes / done.files)}"
    cores = min(cores, _THREADS)  # what so many threads read is enough, or not, for as many that decode
    needed = _IMAGES_PER_CORE * cores
    if done.bytes / done.files < 2e6 and each < needed:
        far = kind.startswith(_OVER_A_NETWORK)
        fix = "a copy on a disk of the node" if far else "a faster disk"
        text += f"; {cores} cores decode about {needed:,} images/s"
        return Finding("files", "data", "note", text, f"{fix}, or more data.threads and data.read_ahead")
    return Finding("files", "data", "ok", text)


def sample(root: Path, most: int) -> list[Path]:
    """Files below ``root`` from here and there, without listing all of them: a walk that ends when it has ``most``."""
    chance = random.Random(0)
    found: list[Path] = []
    ahead = [root]
    for _ in range(_FOLDERS):
        if not ahead or len(found) >= most:
            break
        folder = ahead.pop(chance.randrange(len(ahead)))
        with os.scandir(folder) as entries:
            below = list(entries)
        ahead += [Path(entry.path) for entry in below if entry.is_dir()]
        files = [Path(entry.path) for entry in below if entry.is_file() and entry.stat().st_size > 0]
        found += chance.sample(files, min(len(files), max(8, most // 16)))
    return found[:most]


def read(files: Sequence[Path]) -> Reading:
    """Read them by several threads until time or bytes are up."""
    begin = time.monotonic()
    counted = [0, 0]

    def one(path: Path) -> None:
        if time.monotonic() - begin < _SECONDS and counted[1] < _BYTES:
            for size in _parts(path):
                counted[1] += size
            counted[0] += 1

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(one, files))
    return Reading(max(1, counted[0]), counted[1], max(1e-6, time.monotonic() - begin))


def _parts(path: Path) -> Iterator[int]:
    """Sizes of what is read of the file, at most 64 MB."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # What this machine's memory has of it would tell nothing of the file system.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for _ in range(64):
            size = len(os.read(descriptor, _PART))
            if size == 0:
                return
            yield size
    finally:
        os.close(descriptor)
