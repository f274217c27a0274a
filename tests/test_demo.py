"""The demo's watch over a training command: shown from its files, ended as a whole, failures explained."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType

import pytest

from hvdbs.follow import Patience

TESTS = Path(__file__).parent
_RUN = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from rows import *
out = Path(sys.argv[1])
"""


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", TESTS.parent / "tools" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def training(body: str, out: Path) -> list[str]:
    """A command that stands for horovodrun: ``body`` with rows.py at hand, training into ``out``."""
    return [sys.executable, "-c", _RUN.format(tests=str(TESTS)) + textwrap.dedent(body), str(out)]


def watch(demo: ModuleType, tmp_path: Path, body: str) -> int:
    out = tmp_path / "runs" / "demo"
    code = demo.watch(training(body, out), out, out.with_suffix(".log"), demo.environment(os.environ))
    assert isinstance(code, int)
    return code


def test_a_run_that_finishes_is_shown_and_the_code_is_0(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watch(demo, tmp_path, "whole_run(out)") == 0
    shown = capsys.readouterr()
    assert shown.out.lstrip().startswith("micro-"), "the stage table comes first"
    assert shown.out.count("evaluation at step") == 4
    assert "\r" not in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("body", "code", "cause"),
    [
        ("print('no such option'); sys.exit(2)", 2, "training ended early"),
        (
            "print('cut off'); run = create(out); import os; os.kill(os.getpid(), 9)",
            137,
            "training ended early",
        ),
        ("print('nan'); create(out).exit('failed', 'loss: nan', 3)", 3, "training failed: loss: nan"),
        ("print('late'); whole_run(out); sys.exit(5)", 5, "the launcher ended with status 5"),
        ("print('early'); sys.exit(0)", 1, "training ended early"),
    ],
)
def test_a_run_that_fails_says_why_with_the_end_of_its_log_and_its_place(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, code: int, cause: str
) -> None:
    assert watch(demo, tmp_path, body) == code
    error = capsys.readouterr().err.splitlines()
    assert error[0] == f"demo: {cause}"
    printed = (tmp_path / "runs" / "demo.log").read_text().splitlines()
    assert error[1:-1] == [f"  | {line}" for line in printed]
    assert error[-1] == f"whole output: {tmp_path / 'runs' / 'demo.log'}"


def test_a_missing_launcher_is_one_line(demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "demo.log"
    assert demo.watch(["no-such-horovodrun"], tmp_path / "demo", log, os.environ) == 1
    assert capsys.readouterr().err == "demo: no-such-horovodrun is not installed; run make setup\n"


@pytest.mark.parametrize(
    ("begin", "wait", "says"),
    [("", 4, "does not exist after 0:04"), ("create(out)", 30, "no file changed for 0:01")],
)
def test_a_run_that_hangs_is_given_up_and_ended(
    demo: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    begin: str,
    wait: int,
    says: str,
) -> None:
    monkeypatch.setattr(demo, "PATIENCE", Patience(wait=wait, stale=1, poll=0.1))
    note = f"import os; Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    assert watch(demo, tmp_path, f"{note}; {begin}; time.sleep(60)".replace("; ;", ";")) == 1
    assert says in capsys.readouterr().err.splitlines()[0]
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_takes_the_whole_group_with_it(tmp_path: Path, number: signal.Signals) -> None:
    """The training is a shell with a child, as horovodrun is; the signal goes to the demo's process alone."""
    out = tmp_path / "demo"
    note = f"import os; Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    child = training(f"{note}; create(out); time.sleep(60)", out)
    code = (
        f"import os, sys; sys.path.insert(0, {str(TESTS.parent / 'tools')!r})\n"
        # SIGINT is ignored where tests were started in the background.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path; import demo\n"
        f"command = ['sh', '-c', '\"$@\"; exit $?', 'sh', *{child!r}]\n"
        f"sys.exit(demo.watch(command, Path({str(out)!r}), Path({str(tmp_path / 'log')!r}), os.environ))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert "micro-" in run.stdout.readline(), "the stage table: it is being followed"
        run.send_signal(number)
        assert run.wait(30) == 130
        assert run.stderr.read().startswith("demo: stopped on request; ")
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_the_launcher_is_looked_up_beside_this_python_first(demo: ModuleType) -> None:
    folder = str(Path(sys.executable).parent)
    assert demo.environment({"PATH": "/usr/bin", "A": "1"}) == {"PATH": f"{folder}:/usr/bin", "A": "1"}
    assert demo.environment({})["PATH"].startswith(f"{folder}:")
