"""Start a Python module on several ranks, bound its time, learn how each rank ended. Standard library only.

    outcome = run_ranks(4, "mpi", ["pytest", "tests/parallel"], folder, limit_seconds=600)

`horovodrun` keeps neither a rank's exit code nor its lines whole, and a signal to it need not reach the
ranks. So each rank writes its output and its exit code to files of its own in `folder`, and everything a
launch started carries its mark in the environment, by which it is found and ended whatever its process group
is. Where the ranks run on other hosts, this file does not reach them: it is for tests and the demo.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "HVDBS_LAUNCH"
GRACE_SECONDS = 5.0  # between asking processes to end and ending them; MPI clears its shared memory meanwhile


def environment() -> dict[str, str]:
    """The environment that ranks need on one shared, small machine: a laptop, CI, a container.

    The only place where these are set. A user on a cluster needs none of them; what the shell has set stays.
    """
    env = {
        # Ranks share the cores: one thread each, and who waits lets the others work. One step of a small
        # model on two cores, in ms: at np 2 with one thread 1.2 (MPI) and 2.6 (Gloo), with torch's default
        # 21 and 57; at np 4 2.5 with the yield, 48 without. HOROVOD_CYCLE_TIME=10, which helps long steps,
        # made all of these 10: not set.
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # More ranks than cores are fine; horovodrun says so itself, mpirun has to be told (Open MPI 4, 5).
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    if os.geteuid() == 0:
        # mpirun refuses root unless told twice (Open MPI 4, then 5). Containers and CI are root.
        for prefix in ("OMPI", "PRTE"):
            env[f"{prefix}_ALLOW_RUN_AS_ROOT"] = env[f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    env |= os.environ
    # horovodrun takes mpirun and the ranks' python from the PATH.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return env


@dataclass(frozen=True)
class Outcome:
    codes: tuple[int | None, ...]  # by rank; None: the rank died before it could write one
    seconds: float
    problem: str  # one line; empty where every rank ended with 0 and nothing was left behind

    def log(self, folder: Path, rank: int) -> str:
        path = rank_log(folder, rank)
        return path.read_text(errors="replace") if path.exists() else ""


def rank_log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def run_ranks(
    np: int, backend: str, module: Sequence[str], folder: Path, limit_seconds: float, show_rank_0: bool = True
) -> Outcome:
    """Run `python -m MODULE ARGS...` on np ranks under `horovodrun --BACKEND`; `{rank}` in ARGS is replaced.

    What rank 0 prints is passed on while it runs.
    """
    launcher = [str(Path(sys.executable).parent / "horovodrun"), f"--{backend}", "-np", str(np)]
    command = [*launcher, sys.executable, __file__, str(folder), *module]
    begin = time.monotonic()
    with (folder / "launcher.log").open("w") as log, marked(command, log) as (launch, mark):
        tail = Tail(rank_log(folder, 0)) if show_rank_0 else None
        while launch.poll() is None and time.monotonic() - begin < limit_seconds:
            time.sleep(0.05)
            if tail:
                tail.pass_on()
        timed_out = launch.poll() is None
        if not timed_out:
            wait_for_end_of(mark, GRACE_SECONDS)
        left = end_marked(mark)
        if tail:
            tail.pass_on()
    codes = tuple(read_code(folder, rank) for rank in range(np))
    if timed_out:
        problem = f"still running after {limit_seconds:.0f} s, ended"
    elif any(codes) or None in codes:
        ends = (
            f"rank {rank}: {'no exit code' if code is None else code}" for rank, code in enumerate(codes) if code != 0
        )
        problem = "exit codes: " + ", ".join(ends)
    elif launch.returncode != 0:
        problem = f"every rank ended with 0, horovodrun with {launch.returncode}"
    else:
        problem = f"{left} processes outlived the launch" if left else ""
    return Outcome(codes, time.monotonic() - begin, problem)


def run_one(command: Sequence[str], limit_seconds: float) -> tuple[int | None, float]:
    """Run an ordinary command, its output shown, in bounded time: its exit code (None: ended) and seconds."""
    begin = time.monotonic()
    with marked(command, None) as (process, mark):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit_seconds)
        code = process.poll()
        end_marked(mark)
    return code, time.monotonic() - begin


@contextlib.contextmanager
def marked(command: Sequence[str], log) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start `command` so that all that comes of it can be found; nothing is left at the end."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment() | {MARK: mark},
        start_new_session=True,  # Ctrl-C reaches us alone, and we end the launch in order
    )
    try:
        yield process, mark
    finally:
        end_marked(mark)
        process.wait()


def processes_with(mark: str) -> list[int]:
    """The processes whose environment carries `mark`, zombies apart (they have none)."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def wait_for_end_of(mark: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)


def end_marked(mark: str) -> int:
    """End the processes with `mark`, and say how many there were."""
    there = processes_with(mark)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        wait_for_end_of(mark, GRACE_SECONDS if there else 0)
    return len(there)


class Tail:
    """Passes on what a growing file has got since the last time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def pass_on(self) -> None:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.offset)
                new = file.read()
            self.offset += len(new)
            sys.stdout.buffer.write(new)
            sys.stdout.flush()


def read_code(folder: Path, rank: int) -> int | None:
    path = folder / f"rank-{rank}.code"
    return int(path.read_text()) if path.exists() else None


def be_a_rank(folder: Path, module: str, *args: str) -> None:
    """What every rank runs: the module, with its output and its exit code written to files."""
    rank = next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK") if name in os.environ)
    with rank_log(folder, int(rank)).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.path[0] = os.getcwd()  # as `python -m` has it
    sys.argv = [module, *(arg.replace("{rank}", rank) for arg in args)]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    (folder / f"rank-{rank}.code").write_text(str(int(code)))
    # This process ends with 0 whatever the code is: mpirun would end the other ranks at the first one that
    # does not, before they have said what they saw.


if __name__ == "__main__":
    be_a_rank(Path(sys.argv[1]), *sys.argv[2:])
