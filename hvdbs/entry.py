"""What all commands make of standard streams that are closed, full or of an encoding without a path's characters."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

CLOSED_PIPE = 141  # what a shell reports of a command that SIGPIPE ended


class _Stream:
    """``stream`` without failures: at the first one it is silenced, and ``failed`` told of it."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._failed = failed

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            # What is still in the buffer would fail again, at exit at the latest.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            self._failed(error)


def run(main: Callable[[], int], keep_on: bool = False) -> int:
    """The exit code of ``main``, whose output may have nowhere to go.

    A command whose output is all it is for ends when that is no longer read (``plan | head``), or with one line if it
    cannot be written. With ``keep_on`` it goes on in silence: no training dies of a closed terminal.
    """

    def stop(error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise SystemExit(CLOSED_PIPE)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"hvdbs: error: standard output cannot be written: {error.strerror}\n")
        raise SystemExit(2)

    def ignore(error: OSError) -> None:
        return None

    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this process
            stream = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, _Stream(stream, ignore if keep_on or name == "stderr" else stop))
    code = main()
    sys.stdout.flush()
    return code
