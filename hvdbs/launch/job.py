"""A launch from its start to its end: stop requests, how the run ended, and whether it goes back into the queue."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdbs.errors import refusal
from hvdbs.launch import processes, requeue
from hvdbs.launch.commands import Launch
from hvdbs.records import EXIT_CODES, STOP_FILE

_REFUSED = 2  # exit code of hvdbs.train


@dataclass(frozen=True)
class Ended:
    """How a launch ended. ``outcome``: what its run says of itself, None where it left no word; ``code``: as it exits.

    ``cause``: the run's reason, or what the launcher said. ``before`` and ``after``: the newest checkpoint when it
    began, and now. ``began``: whether it came to write in its run directory. ``asked``: whether it was told to stop.
    ``refused``: all ranks ended in good order because of an error that they would meet again.
    """

    outcome: str | None
    cause: str
    code: int
    before: str | None
    after: str | None
    began: bool
    asked: bool
    refused: bool


def supervise(launch: Launch, out: Path | None, again: Sequence[str], variables: Mapping[str, str]) -> Ended:
    """Run ``launch`` to its end. Its run's own word counts more than its exit code, because launchers lose those.

    ``out``: the run directory, None where the program is no run. A signal becomes the file ``stop`` in it. After
    SIGUSR1, which Slurm sends before the time limit and before preemption, a stopped run of a job is queued again;
    ``again`` is the command that a dependent job would run. A second SIGINT or SIGTERM ends everything at once.
    """
    came: list[int] = []

    def asked(signals: list[int]) -> bool:
        if len(signals) > len(came):
            came[:] = signals
            names = ", ".join(signal.Signals(number).name for number in signals)
            say(f"{names}: the run is asked to stop" if out else f"{names}: ending")
        if out is not None and out.is_dir():  # a run that is starting takes away an old stop file: ask until it ends
            with contextlib.suppress(OSError):
                (out / STOP_FILE).touch()
        return out is None or sum(number != signal.SIGUSR1 for number in signals) > 1

    before = newest(out)
    said_before, began_before = _written(out, "exit.json"), _written(out, "environment.json")
    try:
        code = processes.run(launch.command, launch.environment(variables), asked)
    except OSError as error:
        rule = f"cannot be started ({error.strerror or error})"
        raise refusal(
            "launcher", launch.command[0], rule, "another --launcher, or module load what brings it"
        ) from None
    word = {} if _written(out, "exit.json") == said_before else _word(out)  # else it is an earlier job's
    ended = outcome(word)
    told = bool(came) or (out is not None and (out / STOP_FILE).exists())
    if came and out is not None and ended is not None:
        (out / STOP_FILE).unlink(missing_ok=True)
    if wants_requeue(variables, came, ended, before, newest(out)):
        say(requeue.back_into_the_queue(variables, again))
    no_word = f"{launch.command[0]} ended with exit code {code}, and no rank left a word: killed, or out of memory"
    return Ended(
        outcome=ended,
        cause=str(word.get("reason") or no_word),
        code=exit_code(ended, code),
        before=before,
        after=newest(out),
        began=_written(out, "environment.json") != began_before,
        asked=told,
        refused=word.get("exit_code", code) == _REFUSED,
    )


def newest(out: Path | None) -> str | None:
    """The newest whole checkpoint of a run, by its name."""
    try:
        return None if out is None else (out / "checkpoints" / "latest").read_text().strip()
    except OSError:
        return None


def _written(out: Path | None, name: str) -> tuple[int, int] | None:
    """What tells one file of this name from the next that is written in its place."""
    try:
        status = None if out is None else (out / name).stat()
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_mtime_ns)


def _word(out: Path | None) -> dict[str, Any]:
    """exit.json; empty while there is none."""
    try:
        found: object = None if out is None else json.loads((out / "exit.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def outcome(word: Mapping[str, Any]) -> str | None:
    """finished, stopped or failed, as exit.json has it."""
    found = word.get("outcome")
    return found if isinstance(found, str) else None


def wants_requeue(
    variables: Mapping[str, str], signals: Sequence[int], ended: str | None, before: str | None, after: str | None
) -> bool:
    """Whether a job goes on by itself. ``before`` and ``after``: its newest checkpoint when it began, and now.

    Raises HvdbsError where it would go on for ever: no update fits into the time that the job has.
    """
    if "SLURM_JOB_ID" not in variables or signal.SIGUSR1 not in signals or ended != "stopped":
        return False
    if before == after:
        raise refusal(
            "checkpoints/latest",
            after or "none",
            "is where this job began: not one update fits into its time, and it is not queued again",
            "a longer --time, more nodes or a smaller global_batch",
        )
    return True


def exit_code(ended: str | None, code: int) -> int:
    """0 finished, 75 stopped, else what the launcher said, but never 0 for a run that has failed."""
    if ended == "finished" or ended == "stopped":
        return EXIT_CODES["finished" if ended == "finished" else "stopped"]
    if ended == "failed":
        return code if code > 0 else 1
    return code if code >= 0 else 128 - code


def say(text: str) -> None:
    sys.stdout.write(f"hvdbs.launch on {os.uname().nodename}: {text}\n")
    sys.stdout.flush()
