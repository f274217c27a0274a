"""What `make demo` runs once the environment and data/digits are there: a real training on two ranks,
watched.

Run it with the environment's python. It does what a person would do by hand, and says so: it starts
``horovodrun -np 2 python -m hvdbs.train ...`` with its output in a log file, follows the run directory as
``python -m hvdbs.follow`` does, and plots as ``python -m hvdbs.report`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from hvdbs.console import Display, duration, shown
from hvdbs.errors import HvdbsError
from hvdbs.follow import Patience, follow
from hvdbs.report.writing import report

ROOT = Path(__file__).resolve().parent.parent
DATA = Path("data/digits")
PATIENCE = Patience(wait=180, stale=300, poll=0.2)
_LOG_LINES = 25
_INTERRUPTED = 130

_EXAMPLES = """examples:
  .venv/bin/python tools/demo.py              what make demo does
  .venv/bin/python tools/demo.py --np 3       the same training, the same score"""


def main(arguments: Sequence[str] | None = None) -> int:
    command = argparse.ArgumentParser(
        description="Train on real digit images under horovodrun, watch it, plot it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--np", type=int, default=2, metavar="N", help="ranks (default: 2)")
    options = command.parse_args(arguments)
    os.chdir(ROOT)
    if not (DATA / "train").is_dir():
        return _fail(f"{DATA} is missing: python -m hvdbs.data digits --out {DATA}, or make demo", 2)

    begin = time.monotonic()
    out = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    log = out.with_suffix(".log")
    train = ["horovodrun", "-np", str(options.np), "python", "-m", "hvdbs.train"]
    train += ["--config", "digits", "--out", str(out)]
    print(
        f"Training a small ResNet on the real handwritten digits in {DATA}: {options.np} ranks, a global\n"
        f"batch that grows from stage to stage, scored on images it never trains on. Ctrl-C stops it.\n\n"
        f"  {shlex.join(train)}\n\n"
        f"Output of that command: {log}\n",
        flush=True,
    )
    code = watch(train, out, log, environment(os.environ))
    if code == 0:
        print(f"\n{report([out], out)}\n{what_next(out, log, time.monotonic() - begin)}")
    return code


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` with this interpreter's folder first on the PATH: horovodrun looks up mpirun and python
    there."""
    folder = str(Path(sys.executable).parent)
    return {**variables, "PATH": f"{folder}{os.pathsep}{variables.get('PATH', os.defpath)}"}


def watch(command: Sequence[str], out: Path, log: Path, variables: Mapping[str, str]) -> int:
    """Run ``command``, which trains into ``out``, and show its progress; 0 if it and the run did well."""
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(variables),
                start_new_session=True,
            )
    except FileNotFoundError:
        return _fail(f"{command[0]} is not installed; run make setup", 1)
    trouble = ""
    try:
        with _ended_by_signals():
            ended = follow(
                out,
                lambda total: Display(total, 5.0, sys.stdout),
                PATIENCE,
                alive=lambda: process.poll() is None,
            )
            status = process.wait(timeout=60)
        status = 128 - status if status < 0 else status  # as a shell puts death by a signal
        code = ended.exit_code if ended is not None else status
        if ended is None or ended.outcome != "finished":
            trouble = "training ended early" if ended is None else f"training {ended.outcome}: {ended.reason}"
        elif status:
            trouble, code = f"the launcher ended with status {status}", status
    except KeyboardInterrupt:
        stop(process)
        again = shlex.join([*command, "--resume", "auto"])
        return _fail(f"stopped on request; {shown(out)} and {shown(log)} stay. To go on: {again}", _INTERRUPTED)
    except HvdbsError as error:
        trouble, code = str(error), 1
    except subprocess.TimeoutExpired:
        trouble, code = "the run has ended, but its launcher has not", 1
    finally:
        stop(process)
    return _fail(f"{trouble}\n{tail(log)}\nwhole output: {shown(log)}", code or 1) if trouble else 0


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and a lost terminal act as Ctrl-C does: they end the training too, not this program alone."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group, gently first: mpirun takes its ranks, which are in other groups, with
    it."""
    for number, seconds in ((signal.SIGINT, 20), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C: less gently
            process.wait(seconds)


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join(f"  | {line}" for line in lines) or "  | (it printed nothing)"


def what_next(out: Path, log: Path, seconds: float) -> str:
    activate = f"{shown(Path(sys.executable).parent)}/activate"
    return f"""
Done in {duration(seconds)}. In {out}/:
  report.html    scores, communication, seconds and decisions on one page (report.png: its main picture)
  steps.csv      each logged update with its seconds and bytes (and stages.csv, evals.csv, decisions.csv)
  summary.json   the run as a whole (config.yaml, environment.json: what it was)
What the ranks printed: {log}

Next, after `source {activate}`:
  horovodrun -np 3 python -m hvdbs.train --config digits   the same score; so with -np 1
  python -m hvdbs.plan --config digits --np 64             what 64 ranks would do, without starting one
  python -m hvdbs.train --config digits --data.root DIR    your images: DIR/train/<class>/*, DIR/val/<class>/*
  tensorboard --logdir runs                                curves in the browser"""


def _fail(text: str, code: int) -> int:
    print(f"demo: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
