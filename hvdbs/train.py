"""``python -m hvdbs.train``: one run, from its config to its run directory."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch
from jsonargparse import ArgumentParser, Namespace

from hvdbs import __version__, command_line, console, entry, planning
from hvdbs.assembly import Assembled, agreed, assemble, run_directory, same_on_all
from hvdbs.comm import AgreedError, Communicator, PeerFailure, agree, connect, launched_rank
from hvdbs.comm.traced import Traced
from hvdbs.comm.watched import Watched
from hvdbs.config import Config, FaultConfig, digest
from hvdbs.errors import HvdbsError, refusal
from hvdbs.files import write_atomically
from hvdbs.loop import Outcome, train
from hvdbs.metrics import as_json
from hvdbs.pulse import Pulse
from hvdbs.records import EXIT_CODES, STOP_FILE, Exit, Summary
from hvdbs.records import Outcome as Ended
from hvdbs.replicas import parameter_digest
from hvdbs.step import Requests
from hvdbs.tracing import ChromeTracer
from hvdbs.watchdog import Watchdog

EXAMPLES = """examples:
  python -m hvdbs.train --config digits                       one process
  horovodrun -np 4 python -m hvdbs.train --config digits      four ranks, the same training
  horovodrun -np 4 python -m hvdbs.train --config my.yaml --schedule.epochs 30 --out runs/a
  horovodrun -np 2 python -m hvdbs.train --config my.yaml --out runs/a --resume auto
  horovodrun -np 2 python -m hvdbs.train --config other.yaml --branch-from runs/a/checkpoints/step-900 --out runs/b
  python -m hvdbs.train --config digits --print_config        every field, to start a file of your own"""

INTERRUPTED = 130  # what a shell reports of a command that Ctrl-C ended


def parser() -> ArgumentParser:
    result = command_line.parser(
        "python -m hvdbs.train", "Train a model as its config says, on all ranks of the job.", EXAMPLES
    )
    result.add_argument("--out", type=str | None, help="run directory; by default runs/<recipe>-<time>")
    result.add_argument(
        "--resume",
        type=str | None,
        metavar="auto|PATH",
        help="go on from the newest whole checkpoint of --out, or from PATH, a checkpoint or a run",
    )
    result.add_argument(
        "--branch-from",
        type=str | None,
        metavar="CHECKPOINT|RUN",
        help="start a new run from the state of another, under this config, at that sample",
    )
    result.add_argument(
        "--trace",
        type=str | None,
        metavar="FILE",
        help="write a Chrome trace of a few windows of each stage: what each rank does, and its reductions",
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Train. Returns 0 when finished, 75 when stopped on request, 2 when refused; other failures end all ranks at
    once."""
    error, parsed = None, None
    try:
        # Every rank reads the command line, one of them answers --help and --print_config.
        with contextlib.redirect_stdout(io.StringIO()) if launched_rank() else contextlib.nullcontext():
            parsed = command_line.parse(parser(), argv)
    except HvdbsError as problem:
        error = str(problem)
    try:
        trace = parsed is not None and parsed[1].trace is not None
        comm = connect(timeline=trace, autotune=parsed is not None and parsed[0].communication.autotune)
    except HvdbsError as problem:
        if launched_rank() == 0:
            _complain(str(problem))
        return 2
    return _end_together(comm, error, parsed)


def _end_together(comm: Communicator, error: str | None, parsed: tuple[Config, Namespace] | None) -> int:
    """Run; end all ranks in good order where all know of an error, else at once, with the first cause on stderr."""
    out: list[Path] = []  # the run directory, once it is this run's
    requests, pulse = Requests(), Pulse()
    timeout = parsed[0].fault.timeout_seconds if parsed else FaultConfig().timeout_seconds
    watchdog = Watchdog(
        pulse,
        comm.rank,
        timeout,
        lambda reason: _leave_word(comm, out, reason, 1),
        None if comm.backend == "solo" else lambda: _orphaned(comm, requests),
    )
    core, comm = comm, Watched(comm, pulse)
    if parsed is not None and parsed[1].trace is not None:
        comm = Traced(comm, core=core)
    try:
        agree(comm, error)
        assert parsed is not None
        code = _run(comm, *parsed, out, requests, pulse, watchdog)
        comm.close()
        return code
    except AgreedError as problem:
        if comm.rank == 0:
            _complain(str(problem))
            _leave_word(comm, out, str(problem), 2)
        comm.close()
        return 2
    except PeerFailure:
        said = f"{_named(comm)} ends because another rank has failed"
        _complain(said)
        _leave_word(comm, out, f"{said}, without a word: killed, out of memory, or its host is lost", 1)
        comm.abort(1)
    except HvdbsError as problem:
        _complain(f"{_named(comm)}: {problem}")
        _leave_word(comm, out, str(problem), 1)
        comm.abort(1)
    except KeyboardInterrupt:
        _complain("interrupted; --resume auto goes on from the newest checkpoint")
        _leave_word(comm, out, "interrupted", INTERRUPTED)
        comm.abort(INTERRUPTED)
    except BaseException as problem:
        if _out_of_memory(problem):
            said = f"out of memory ({problem}); a smaller micro_batch, data.image_size, data.read_ahead or model"
            _complain(f"{_named(comm)}: {said}")
            _leave_word(comm, out, f"{_named(comm)}: {said}", 1)
            comm.abort(1)
        traceback.print_exc()
        _complain(f"{_named(comm)}: {type(problem).__name__}: {problem}")
        _leave_word(comm, out, f"{_named(comm)}: {type(problem).__name__}: {problem}", 1)
        comm.abort(1)
    finally:
        watchdog.close()


def _named(comm: Communicator) -> str:
    return f"rank {comm.rank}" + (f" on {socket.gethostname()}" if comm.world_size > 1 else "")


def _orphaned(comm: Communicator, requests: Requests) -> None:
    _complain(f"{_named(comm)}: its launcher is gone; stopping after this update")
    requests.stop = True


def _out_of_memory(problem: BaseException) -> bool:
    # torch has an error of its own for a GPU's memory, and for the CPU's only words.
    words = ("DefaultCPUAllocator", "can't allocate memory")
    return isinstance(problem, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(problem, RuntimeError) and any(word in str(problem) for word in words)
    )


def _run(
    comm: Communicator,
    config: Config,
    arguments: Namespace,
    out: list[Path],
    requests: Requests,
    pulse: Pulse,
    watchdog: Watchdog,
) -> int:
    def say(text: str) -> None:
        if comm.rank == 0:
            print(text, flush=True)

    with agreed(comm):
        words = {"resume": arguments.resume, "branch-from": arguments.branch_from, "trace": arguments.trace}
        same_on_all(comm, config, words)
        if arguments.branch_from and arguments.resume:
            rule = "are given, but one starts a new run and the other goes on with its own"
            raise refusal("--branch-from and --resume", "both", rule, "--resume alone, once the branch has begun")
        if arguments.branch_from == "auto":
            raise refusal(
                "--branch-from", "auto", "is no checkpoint", "name a run for its newest, or checkpoints/step-N"
            )
        path = run_directory(comm, arguments.config, arguments.out, arguments.resume)
    trace = None if arguments.trace is None else Path(arguments.trace)
    made = assemble(config, comm, path, arguments.resume, requests, say, arguments.branch_from, trace, pulse)
    if made.complete:
        say(f"{console.shown(path)} has finished its schedule: nothing is left to train")
        return 0
    out.append(path)
    watchdog.hosts, watchdog.out = made.hosts, path
    say(console.stage_table(made.plan))
    beside = planning.extrapolation_lines(made.run.config, made.run.replica.model, made.plan)
    beside += planning.communication_lines(made.run.config, made.layers, made.plan)
    for line in (*beside, *planning.warnings(made.plan)):
        say(line)
    if comm.backend != "solo":
        say(f"to stop it and keep its state: touch {console.shown(path)}/{STOP_FILE}")
    try:
        with _signals(requests):
            outcome = train(made.run, made.progress, made.best_merit)
            pulse.enter("end", outcome.progress.step)
            code = _finish(comm, made, outcome)
            if isinstance(made.run.tracer, ChromeTracer):
                say(made.run.tracer.summary())
            return code
    finally:
        if made.display is not None and made.files is not None:
            made.display.close()
            made.files.close()


@contextlib.contextmanager
def _signals(requests: Requests) -> Iterator[None]:
    """Ctrl-C and the scheduler's signals ask for a stop at the next window boundary; a second Ctrl-C ends at once.

    Launchers take what they give no time: of a Ctrl-C, Open MPI 5 lets its ranks know 0.25 s before it kills them,
    Horovod's Gloo launcher 5 s. The file ``stop`` in the run directory works under all of them.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if requests.stop:
                raise KeyboardInterrupt
            # Not print: the handler may stand in the middle of one.
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this update; Ctrl-C again ends at once\n")
        requests.stop = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(comm: Communicator, made: Assembled, outcome: Outcome) -> int:
    """Collective. Write how the run ended; returns its exit code."""
    memory = _peak_memory_bytes(comm)
    ended: Ended = "finished" if outcome.finished else "stopped"
    with agreed(comm):
        if made.files is not None and made.display is not None and made.account is not None:
            sums = made.account.counted.run
            scores = outcome.scores
            summary = Summary(
                hvdbs_version=__version__,
                config_digest=digest(made.run.config),
                world_size=comm.world_size,
                steps=outcome.progress.step,
                samples_seen=outcome.progress.samples_seen,
                loss=scores.loss if scores else None,
                top1=scores.top1 if scores else None,
                top5=scores.top5 if scores else None,
                parameter_digest=parameter_digest(made.run.replica.model),
                collectives=sums.collectives,
                reduced_bytes=sums.reduced_bytes,
                seconds=sums.seconds,
                peak_memory_bytes=memory,
                exit_reason=ended,
                gap=scores.gap if scores else None,
                distance=scores.distance if scores else None,
            )
            made.display.close()
            (made.out / STOP_FILE).unlink(missing_ok=True)
            made.files.finish(summary)
            made.files.exit(ended, ended)
            print(console.closing(made.out, summary), flush=True)
            if not outcome.finished:
                print(
                    f"stopped on request; go on with --out {console.shown(made.out)} --resume auto",
                    flush=True,
                )
    return EXIT_CODES[ended]


def _peak_memory_bytes(comm: Communicator) -> int:
    """Collective. The largest peak of any rank: on its GPU where it has one, else of its process."""
    if torch.cuda.is_initialized():
        own = torch.cuda.max_memory_allocated()
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(int(text) for text in comm.gather_bytes(str(own).encode()))


def _complain(text: str) -> None:
    sys.stderr.write(f"hvdbs: error: {' '.join(text.split())}\n")
    sys.stderr.flush()


def _leave_word(comm: Communicator, out: Sequence[Path], reason: str, code: int) -> None:
    """The first cause into exit.json, by the rank that knows it: launchers lose exit codes."""
    for path in out:
        if not (path / "exit.json").exists():
            word = Exit("failed", " ".join(reason.split()), code, rank=comm.rank, host=socket.gethostname())
            with contextlib.suppress(OSError):
                write_atomically(path / "exit.json", as_json(asdict(word)))


if __name__ == "__main__":
    sys.exit(entry.run(main, keep_on=True))
