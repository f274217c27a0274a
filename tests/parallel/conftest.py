"""The tests of this folder run on every rank of a launch, the same ones in the same order (tools/run_tests.py).

``horovodrun -np N python -m pytest tests/parallel``; a plain ``pytest tests/parallel`` is a launch of one. After
each test the ranks tell each other how it ended, so one that fails on one rank fails on all, and none goes on alone.
A rank that fails in the middle of a test leaves the others waiting in a collective: it gives them a while, then ends
the launch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from hvdbs.comm import Communicator, PeerFailure, connect
from hvdbs.errors import HvdbsError

EVERY = "--every"  # of ``make test``; ``make test-parallel`` leaves it out
PATIENCE_SECONDS = 30.0  # more than ranks can be apart within a test

_COMM = pytest.StashKey[Communicator]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(EVERY, type=int, default=1, metavar="N", help="of the cases of each test run every Nth")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with many cases every Nth, of one with fewer than N one; from one test to the next others."""
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        tables.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept, every = set(), config.getoption(EVERY)
    for turn, cases in enumerate(tables.values()):
        kept |= set(cases[turn % min(every, len(cases)) :: every])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.stash[_COMM] = connect()
    except HvdbsError as error:
        raise pytest.UsageError(str(error)) from None
    torch.set_num_threads(1)  # so that bits can be compared


@pytest.fixture(scope="session")
def comm(pytestconfig: pytest.Config) -> Communicator:
    """All ranks of this launch."""
    return pytestconfig.stash[_COMM]


@pytest.fixture
def shared(comm: Communicator, tmp_path: Path) -> Path:
    """One temporary folder for all ranks: rank 0's."""
    return Path(comm.broadcast_bytes(str(tmp_path).encode()).decode())


def pytest_collection_finish(session: pytest.Session) -> None:
    names = "\n".join([f"{session.testsfailed} errors", *(item.nodeid for item in session.items)])
    everyone = session.config.stash[_COMM].gather_bytes(names.encode())
    if len(set(everyone)) > 1:
        raise pytest.UsageError("ranks collected different tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" or (call.when == "setup" and not report.passed):
        _compare_outcomes(item, report)
    return report


def _compare_outcomes(item: pytest.Item, report: pytest.TestReport) -> None:
    """Collective. Fail ``report`` if any rank's failed, or if ranks ended differently."""
    comm = item.config.stash[_COMM]
    text = report.longreprtext if report.failed else ""

    def give_up() -> None:
        if (capture := item.config.pluginmanager.getplugin("capturemanager")) is not None:
            capture.suspend_global_capture(in_=True)
        why = f"rank {comm.rank} {report.outcome} {item.nodeid} while others are still in it: ending all of them"
        sys.stderr.write(f"\n{text}\n{why}\n")
        comm.abort(1)

    watch = threading.Timer(PATIENCE_SECONDS, give_up)
    watch.daemon = True
    if report.failed:
        watch.start()
    try:
        everyone = comm.gather_bytes(f"{item.nodeid}\n{report.outcome}\n{text}".encode())
    except PeerFailure:
        pytest.exit(f"rank {comm.rank}: another rank is gone in {item.nodeid}", 1)
    finally:
        watch.cancel()
    answers = [answer.decode(errors="replace").split("\n", 2) for answer in everyone]
    if any(len(answer) < 3 or answer[0] != item.nodeid for answer in answers):
        give_up()  # what was gathered belongs to a collective of the test itself
    outcomes = [outcome for _, outcome, _ in answers]
    if not report.failed and len(set(outcomes)) > 1:
        said = [f"by rank: {', '.join(outcomes)}"]
        said += [f"rank {rank}: {why}" for rank, (_, _, why) in enumerate(answers) if why]
        report.outcome = "failed"
        report.longrepr = "\n".join(said)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.config.stash[_COMM].close()
