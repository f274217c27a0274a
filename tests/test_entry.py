"""Standard streams that are closed, full or of another encoding, under real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_bad_input import GOOD

PLAN, TRAIN = ["hvdbs.plan"], ["hvdbs.train", "--out", "run"]


def started(module: list[str], work: Path, shell: str, **env: str) -> tuple[int, str]:
    """Exit code and stderr of ``python -m module --config good.yaml`` with the redirections ``shell``."""
    (work / "good.yaml").write_text(GOOD)
    words = " ".join([sys.executable, "-m", module[0], "--config", "good.yaml", *module[1:]])
    done = subprocess.run(
        ["bash", "-c", f"{words} {shell}"],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def finished(work: Path, run: str = "run") -> bool:
    return bool(json.loads((work / run / "exit.json").read_text())["outcome"] == "finished")


def test_a_plan_that_nobody_reads_ends_as_a_closed_pipe_does(tmp_path: Path) -> None:
    assert started(PLAN, tmp_path, "| true; exit ${PIPESTATUS[0]}") == (141, "")


def test_a_plan_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    code, said = started(PLAN, tmp_path, ">/dev/full")
    assert (code, said) == (2, "hvdbs: error: standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize("shell", ["2>&1 | true; exit ${PIPESTATUS[0]}", ">/dev/full 2>&1", "<&- >&- 2>&-"])
def test_training_goes_on_when_nobody_listens(tmp_path: Path, shell: str) -> None:
    code, _ = started(TRAIN, tmp_path, shell)
    assert code == 0
    assert finished(tmp_path)


def test_a_path_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    code, _ = started(["hvdbs.train", "--out", "r\u2603n"], tmp_path, "> said", PYTHONIOENCODING="ascii")
    assert code == 0
    assert "plot: python -m hvdbs.report r\\u2603n" in (tmp_path / "said").read_text()
    assert finished(tmp_path, "r\u2603n")
