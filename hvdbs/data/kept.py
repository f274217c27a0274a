"""The index as a file: beside the data or in a cache, made by rank 0 alone and handed to every rank."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from hvdbs.data.folder import shown
from hvdbs.data.index import Index, class_times, is_current, parse, scan
from hvdbs.errors import HvdbsError
from hvdbs.files import write_atomically

NAME = ".hvdbs-index.npz"


class Ranks(Protocol):
    """What sharing needs of a Communicator."""

    @property
    def rank(self) -> int: ...

    def broadcast_bytes(self, data: bytes | None) -> bytes: ...


class Kept(NamedTuple):
    """An index as bytes, the file it is kept in (None if it is not), and whether it was listed just now."""

    data: bytes
    path: Path | None
    listed: bool


def places(root: str, index_dir: str | None, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where the index of ``root`` may be kept, best first.

    That is ``index_dir`` alone if given; else beside the data, then in a cache. The cache is $HVDBS_CACHE,
    else $XDG_CACHE_HOME/hvdbs, else ~/.cache/hvdbs. Outside of ``root`` the file is named by a digest of its
    real path.
    """
    digest = hashlib.blake2b(os.fsencode(os.path.realpath(root)), digest_size=16).hexdigest()
    if index_dir is not None:
        return [Path(index_dir).expanduser() / f"{digest}.npz"]
    cache = environ.get("HVDBS_CACHE") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "hvdbs")
    return [Path(root) / NAME, Path(cache).expanduser() / "index" / f"{digest}.npz"]


def keep(data: bytes, where: Sequence[Path]) -> Path | None:
    """Write ``data`` to the first of ``where`` that can be written, whole or not at all; None if none can.

    Trying is the only sure test: permission bits say nothing of read-only mounts, quotas or root squashing.
    """
    for path in where:
        try:
            if path.name != NAME:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
        except OSError:
            continue
        return path
    return None


def load_or_scan(
    root: str,
    index_dir: str | None,
    notice: Callable[[str], None] = lambda text: None,
    rescan: bool = False,
    write: bool = True,
) -> Kept:
    """The kept index of ``root`` if it is current, else a new one, which is kept if ``write``.

    ``rescan`` makes a new one always. ``notice`` is told before a listing begins, since that takes minutes
    for a million files on a parallel file system. Raises HvdbsError (see ``folder``).
    """
    where = places(root, index_dir)
    if not rescan:
        times = class_times(root)
        for path in where:
            try:
                if not path.is_file():  # a pipe or a device would be read for ever
                    continue
                data = path.read_bytes()
            except OSError:
                continue
            if is_current(data, times):
                return Kept(data, path, listed=False)
    notice(f"listing {shown(root)}")
    data = scan(root)
    return Kept(data, keep(data, where) if write else None, listed=True)


def share_index(
    root: str, index_dir: str | None, ranks: Ranks, notice: Callable[[str], None] = lambda text: None
) -> Index:
    """Collective. The index of ``root``; rank 0 alone looks at the file system.

    Raises HvdbsError with the same text on every rank if rank 0 could not make it, whatever the cause.
    """
    message: bytes | None = None
    if ranks.rank == 0:
        try:
            message = b"+" + load_or_scan(root, index_dir, notice).data
        except HvdbsError as error:
            message = b"-" + str(error).encode("utf-8", "backslashreplace")
        except Exception as error:
            # The others wait for an answer: an unforeseen failure must reach them as well.
            message = b"-" + f"data.root: {shown(root)} cannot be listed: {error!r}".encode("utf-8", "backslashreplace")
    answer = ranks.broadcast_bytes(message)
    if answer[:1] == b"-":
        raise HvdbsError(answer[1:].decode())
    return parse(answer[1:], root)
