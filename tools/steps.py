"""What the set-up tools share: one-line refusals, logged commands, locks. Standard library only."""

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

LINES = 12  # of a failed command's output are shown


class Refusal(Exception):
    """The set-up cannot go on; the message is one line: the value, the rule it breaks, what to do."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Options(argparse.ArgumentParser):
    """Command-line options; a wrong one is one line like every other refusal."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(message)


class Log:
    """A file for the output of commands; one that fails shows its telling lines and the file's path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def run(
        self,
        command: Sequence[str | Path],
        what: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Run `command`; raise Refusal naming `what` could not be done if it fails."""
        words = [str(word) for word in command]
        with self.path.open("a") as log:
            log.write(f"\n$ {shlex.join(words)}\n")
            log.flush()
            start = log.tell()
            code = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env
            ).returncode
        if code == 0:
            return
        with self.path.open(errors="replace") as log:
            log.seek(start)
            output = log.read()
        say("\n".join(f"    {line}" for line in telling(output.splitlines())))
        raise Refusal(f"{what} failed (exit code {code}): {advice(output)}details in {self.path}")

    def pip(self, python: Path, what: str, *words: str | Path, env: Mapping[str, str] | None = None) -> None:
        """Run `python`'s pip; `what` names what it does."""
        # A `user = true` in the site's configuration has no place in an environment.
        env = {**(os.environ if env is None else env), "PIP_USER": "0"}
        self.run([python, "-m", "pip", "--disable-pip-version-check", "--no-input", *words], what, env)


def telling(lines: list[str]) -> list[str]:
    """The lines from the first that reports an error on (compilers bury it), else the last ones."""
    first = next((i for i, line in enumerate(lines) if re.search(r"CMake Error|: (fatal )?error:|^ERROR:", line)), None)
    return lines[-LINES:] if first is None else lines[first : first + LINES]


def advice(output: str) -> str:
    """What the output of a failed command suggests, ending in `; `; empty where it suggests nothing."""
    network = (
        "name resolution",
        "NewConnectionError",
        "Network is unreachable",
        "Connection refused",
        "timed out",
    )
    if any(word in output for word in network):
        return (
            "no package index could be reached: `make wheels WHEELS=DIR` on a machine that has a "
            "network, then `make setup WHEELS=DIR` here; "
        )
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return "the disk is full (the environment takes 8 GB; VENV=DIR and TMPDIR choose other places); "
    return ""


def output_of(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
    """stdout and stderr of a short command, empty where it cannot be run or fails."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=env,
        )
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def main_guard(main: Callable[[], None], name: str) -> None:
    """Run `main`; a Refusal becomes one line on stderr and exit code 1."""
    try:
        main()
    except Refusal as refusal:
        say(f"{name}: {refusal}")
        sys.exit(1)
    except KeyboardInterrupt:
        say(f"{name}: interrupted; the next call goes on where this one stopped")
        sys.exit(130)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@contextlib.contextmanager
def locked(path: Path, message: str) -> Iterator[None]:
    """Hold a lock file; say `message` where somebody else holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"    {message}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: two builds may do the work twice, the rename keeps it whole
        yield
