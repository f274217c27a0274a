"""Files that are whole at every moment, whatever kills the writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of ``path``, durably, when the block ends without an exception.

    Until then readers see the old file, or none. The temporary file lies in the same folder (a rename is
    atomic only within one file system) and its name, ``.<name>.<host>.<pid>.tmp``, is this process's own.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``: temporary file, fsync, rename, fsync of the folder."""
    with atomic_writer(path) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable, as fsync makes contents."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and say so in one of these ways.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def lock(path: Path, patience: float) -> BinaryIO | None:
    """The open file ``path``, locked until it is closed or its process ends; None if another holds it for ``patience``
    seconds. A file system without locks gives one to everybody."""
    file = path.open("ab")
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                return None
            time.sleep(0.1)
        except OSError:
            return file


def whole_lines(data: bytes) -> bytes:
    """``data`` without a last line that has no end: that of a writer which was killed, or is at it right
    now."""
    return data[: data.rfind(b"\n") + 1]
