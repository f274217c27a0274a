#!/usr/bin/env python3
"""Run the tests, sorted by how they must be launched; end with one table and a closing line like pytest's.

    unit       tests/ in a process on each core, to 4    all but the folders below, neither slow nor gpu
    parallel   tests/parallel on every rank of a launch  np 1, 2, 3, 4 with MPI, np 2 with Gloo; the last two run
                                                         some cases of each test, all with --only parallel
    jobs       tests/jobs, two at a time                 these start launches of their own
    gpu        all that is marked gpu, on as many ranks as there are GPUs; by --only gpu alone
    slurm      tests/slurm in one process, which starts a Slurm of its own; by --only slurm alone

A launch fails if any rank fails, dies, hangs or outlives it.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import ranks

TESTS = Path("tests")
LAUNCHES = ((1, "mpi"), (2, "mpi"), (3, "mpi"), (4, "mpi"), (2, "gloo"))
EVERY = {(4, "mpi"): 2, (2, "gloo"): 3}  # of the cases of each test, in `make test`
# A hang is a failure, not a wait. pytest's own limit for each test (pyproject.toml) comes first and says
# where.
LIMIT_SECONDS = {"unit": 900, "parallel": 900, "jobs": 2400, "gpu": 2400, "slurm": 3600}
NO_TESTS = 5  # pytest's exit code


@dataclass(frozen=True)
class Result:
    kind: str
    np: int
    backend: str
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""


def counts(report: Path) -> tuple[int, int, int]:
    """Passed, failed and skipped of a JUnit report; zeros where pytest did not live to write one."""
    if not report.exists():
        return 0, 0, 0
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, failures, errors, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    return total - failures - errors - skipped, failures + errors, skipped


def result(kind: str, np: int, backend: str, seconds: float, report: Path, problem: str) -> Result:
    """A launch with a problem that no test reported is one failure by itself."""
    passed, failed, skipped = counts(report)
    return Result(kind, np, backend, seconds, passed, failed or int(bool(problem)), skipped, problem)


def run_without_launcher(kind: str, options: Sequence[str], selected: bool) -> Result:
    banner(kind)
    with tempfile.TemporaryDirectory(prefix="hvdbs-tests-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}"]
        code, seconds = ranks.run_one(command, LIMIT_SECONDS[kind])
        if code is None:
            problem = f"still running after {LIMIT_SECONDS[kind]} s, ended"
        elif code == NO_TESTS:
            problem = "" if selected else "no tests found"
        else:
            problem = f"exit code {code}" if code else ""
        return result(kind, 1, "-", seconds, report, problem)


def run_on_ranks(np: int, backend: str, options: Sequence[str], selected: bool) -> Result:
    banner(f"parallel: np {np}, {backend}")
    with tempfile.TemporaryDirectory(prefix="hvdbs-tests-") as name:
        folder = Path(name)
        # One rank that hangs in MPI cannot be interrupted by a signal handler: the limit per test ends its
        # process.
        mine = ["--timeout-method=thread", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp-{{rank}}"]
        reports = [f"--junitxml={folder}/report-{{rank}}.xml"]
        outcome = ranks.run_ranks(np, backend, ["pytest", *options, *mine, *reports], folder, LIMIT_SECONDS["parallel"])
        no_tests = set(outcome.codes) == {NO_TESTS}
        problem = "" if no_tests and selected else "no tests found" if no_tests else outcome.problem
        if problem:
            show_what_rank_0_does_not(outcome, folder)
            print(f"\nparallel, np {np}, {backend}: {problem}", flush=True)
        return result("parallel", np, backend, outcome.seconds, folder / "report-0.xml", problem)


def show_what_rank_0_does_not(outcome: ranks.Outcome, folder: Path) -> None:
    for rank, code in enumerate(outcome.codes):
        if rank > 0 and code != 0:
            print(f"\n--- rank {rank} ({'no exit code' if code is None else f'exit code {code}'})")
            print(outcome.log(folder, rank), end="", flush=True)
    launcher = (folder / "launcher.log").read_text(errors="replace").strip()
    if launcher:
        print(f"\n--- horovodrun\n{launcher}", flush=True)


def banner(text: str) -> None:
    print(f"\n##### {text}", flush=True)


def table(results: Sequence[Result]) -> str:
    rows = [("launch", "np", "back-end", "seconds", "passed", "failed", "skipped", "")]
    rows += [
        (
            r.kind,
            str(r.np),
            r.backend,
            f"{r.seconds:.1f}",
            str(r.passed),
            str(r.failed),
            str(r.skipped),
            r.note,
        )
        for r in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2])]
            + [row[column].rjust(widths[column]) for column in range(3, 7)]
            + [row[7]]
        ).rstrip()
        for row in rows
    )


def closing_line(results: Sequence[Result], seconds: float) -> str:
    totals = {name: sum(getattr(r, name) for r in results) for name in ("failed", "passed", "skipped")}
    said = ", ".join(f"{count} {name}" for name, count in totals.items() if count) or "no tests ran"
    minutes, rest = divmod(int(seconds), 60)
    long = f" ({minutes // 60}:{minutes % 60:02d}:{rest:02d})" if seconds >= 60 else ""
    return f" {said} in {seconds:.2f}s{long} ".center(100, "=")


def run_on_gpus(selection: Sequence[str]) -> list[Result]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        sys.exit(
            "run_tests: --only gpu needs a GPU, and torch sees none: a machine where `nvidia-smi -L` lists one, "
            "and a CUDA_VISIBLE_DEVICES that names it or is unset"
        )
    selected = bool(selection)
    apart = [f"--ignore={TESTS / folder}" for folder in ("parallel", "slurm")]
    return [
        run_without_launcher("gpu", [str(TESTS), *apart, "-m", "gpu", *selection], selected),
        run_on_ranks(count, "mpi", [str(TESTS / "parallel"), "-m", "gpu", *selection], selected),
    ]


def side_by_side(most: int) -> list[str]:
    """pytest-xdist's options for a process on each core, each of one thread (ranks.environment).

    A module's tests stay together as far as that leaves none idle, for its fixtures' sake.
    """
    return ["-n", str(min(most, len(os.sched_getaffinity(0)))), "--dist", "worksteal"]


def run_all(args: argparse.Namespace) -> list[Result]:
    selection = ["-k", args.k] if args.k else []
    selected = bool(args.k)
    if args.only == "gpu":
        return run_on_gpus(selection)
    if args.only == "slurm":
        return [run_without_launcher("slurm", [str(TESTS / "slurm"), "-m", "slurm and not slow", *selection], selected)]
    results = []
    if args.only in (None, "unit") and not args.np:
        apart = [f"--ignore={TESTS / folder}" for folder in ("parallel", "slurm", "jobs")]
        options = [str(TESTS), *apart, "-m", "not slow and not gpu", *side_by_side(4), *selection]
        results.append(run_without_launcher("unit", options, selected))
    if args.only in (None, "parallel"):
        for np, backend in LAUNCHES:
            if args.np in (None, np):
                if not (TESTS / "parallel").is_dir():
                    results.append(Result("parallel", np, backend, 0.0, note="no tests/parallel"))
                    continue
                options = [str(TESTS / "parallel"), "-m", "parallel and not gpu", *selection]
                if args.only is None:
                    options += ["--every", str(EVERY.get((np, backend), 1))]
                results.append(run_on_ranks(np, backend, options, selected))
    if args.only in (None, "jobs") and not args.np:
        if (TESTS / "jobs").is_dir():
            options = [str(TESTS / "jobs"), "-m", "not gpu", *side_by_side(2), *selection]
            results.append(run_without_launcher("jobs", options, selected))
        else:
            results.append(Result("jobs", 1, "-", 0.0, note="no tests/jobs"))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["unit", "parallel", "jobs", "gpu", "slurm"], help="this kind alone")
    parser.add_argument(
        "--np", type=int, choices=sorted({np for np, _ in LAUNCHES}), help="only launches with so many ranks"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="pytest's selection by name")
    args = parser.parse_args()
    begin = time.monotonic()
    results = run_all(args)
    print(f"\n{table(results)}\n")
    print(closing_line(results, time.monotonic() - begin), flush=True)
    if any(r.failed for r in results):
        return 1
    return 0 if any(r.passed for r in results) else NO_TESTS


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
