"""--max-restarts: what is started again, on which hosts, from where, and when it is given up."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdbs.launch.__main__ import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="launches adopt processes as Linux has it")

# Plays horovodrun and its ranks: notes how it was called, and does at each start what the plan says.
RUN = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
calls = pathlib.Path("calls.json")
seen = json.loads(calls.read_text()) if calls.exists() else []
step, outcome, code = json.loads(pathlib.Path("plan.json").read_text())[len(seen)]
calls.write_text(json.dumps([*seen, sys.argv[1:]]))
if step is None:  # refused, by a launcher that makes another code of it
    sys.exit(code)
(out / "checkpoints").mkdir(parents=True, exist_ok=True)
(out / "environment.json").unlink(missing_ok=True)
(out / "environment.json").write_text("{}")
if step:
    (out / "checkpoints" / "latest").write_text(f"step-{step}")
if outcome:
    (out / "exit.json").unlink(missing_ok=True)
    word = {"outcome": outcome, "reason": f"rank 1 on n2 fell at {step}", "exit_code": code}
    (out / "exit.json").write_text(json.dumps(word))
sys.exit(code)
"""
SSH = '#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\n[ "$1" != n2 ]\n'  # n2 is gone


def launch(folder: Path, plan: list[tuple[int | None, str, int]], *options: str) -> tuple[int, str, list[list[str]]]:
    """Exit code, what was said, and how the ranks' launcher was called each time."""
    (folder / "bin").mkdir()
    (folder / "run.py").write_text(RUN)
    (folder / "plan.json").write_text(json.dumps(plan))
    for name, text in {"horovodrun": f'#!/bin/sh\nexec {sys.executable} run.py "$@"\n', "ssh": SSH}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    environment |= {"PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "hvdbs.launch", *options, "--config", "digits", "--out", "run"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr, json.loads((folder / "calls.json").read_text())


def after(call: list[str], option: str) -> str:
    return call[call.index(option) + 1]


def test_a_run_that_fails_goes_on_from_its_checkpoint_on_the_hosts_that_are_left(tmp_path: Path) -> None:
    plan = [(40, "failed", 1), (60, "", 137), (90, "finished", 0)]
    hosts = ["--hosts", "n1:2,n2:2,n3:1"]
    code, said, calls = launch(tmp_path, plan, *hosts, "--max-restarts", "3", "--min-np", "3")
    assert code == 0, said
    assert [after(call, "-H") for call in calls] == ["n1:2,n2:2,n3:1", "n1:2,n3:1", "n1:2,n3:1"]
    assert [after(call, "-np") for call in calls] == ["5", "3", "3"]
    assert ["--resume" in call for call in calls] == [False, True, True]
    assert "restart 1 of 3 from step-40 without n2, which cannot be reached: rank 1 on n2 fell at 40" in said
    rows = list(csv.DictReader((tmp_path / "run" / "attempts.csv").read_text().splitlines()))
    assert [(row["attempt"], row["world_size"], row["outcome"], row["checkpoint"]) for row in rows] == [
        ("0", "5", "failed", "step-40"),
        ("1", "3", "failed", "step-60"),
        ("2", "3", "finished", "step-90"),
    ]
    assert rows[0]["cause"] == "rank 1 on n2 fell at 40"


def test_too_few_ranks_are_refused_with_the_cause(tmp_path: Path) -> None:
    options = ["--hosts", "n1:2,n2:2", "--max-restarts", "3", "--min-np", "3"]
    code, said, calls = launch(tmp_path, [(40, "failed", 1)], *options)
    assert (code, len(calls)) == (2, 1)
    assert "--min-np: 3 ranks are not left, only n1:2: rank 1 on n2 fell at 40" in said


@pytest.mark.parametrize(
    ("plan", "options", "code", "line"),
    [
        (
            [(40, "failed", 1)] * 3,
            ["9"],
            2,
            "it has failed twice after step-40 without a new one: rank 1",
        ),
        ([(10, "failed", 1), (20, "failed", 1), (30, "failed", 1)], ["2"], 1, "not started again after 2 restarts"),
        ([(40, "failed", 2)], ["9"], 2, ""),  # refused by all ranks: it would be again
        ([(None, "", 1)], ["9"], 1, ""),  # refused before it began, such as a run directory that another job has
        ([(40, "stopped", 75)], ["9"], 75, ""),
        ([(40, "failed", 1)], ["0"], 1, ""),
    ],
    ids=["no-progress", "limit", "refused", "not-begun", "stopped", "not-asked"],
)
def test_when_a_run_is_not_started_again(
    tmp_path: Path, plan: list[tuple[int | None, str, int]], options: list[str], code: int, line: str
) -> None:
    ended, said, calls = launch(tmp_path, plan, "--np", "2", "--max-restarts", *options)
    assert (ended, len(calls)) == (code, len(plan)), said
    assert line in said


def test_only_a_run_that_has_saved_a_checkpoint_leaves_what_it_was_started_from(tmp_path: Path) -> None:
    plan = [(0, "failed", 1), (40, "failed", 1), (90, "finished", 0)]
    code, said, calls = launch(tmp_path, plan, "--max-restarts", "2", "--branch-from", "old/checkpoints/step-7")
    assert code == 0, said
    assert [call[call.index("hvdbs.train") + 1 :] for call in calls] == [
        ["--branch-from", "old/checkpoints/step-7", "--config", "digits", "--out", "run"],
        ["--branch-from", "old/checkpoints/step-7", "--config", "digits", "--out", "run"],
        ["--config", "digits", "--out", "run", "--resume", "auto"],
    ]


@pytest.mark.parametrize(
    ("words", "variables", "line"),
    [
        (["--max-restarts", "-1"], {}, "--max-restarts: -1 must be at least 0; 0"),
        (["--min-np", "2"], {}, "--min-np: 2 is a limit of --max-restarts, which is not given; --max-restarts 3"),
        (
            ["--max-restarts", "1", "--min-np", "4"],
            {},
            "--min-np: 4 does not lie in 1 to 1, the ranks of localhost",
        ),
        (["--max-restarts", "1", "--", "true"], {}, "--max-restarts: 1 is for a run of hvdbs.train"),
        (["--max-restarts", "1"], {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}, "is for hosts without Slurm"),
        (["--max-restarts", "1", "--sbatch", "-", "--nodes", "2"], {}, "--sbatch: --max-restarts and --min-np do not"),
    ],
    ids=["negative", "alone", "too-many", "no-run", "slurm", "sbatch"],
)
def test_what_cannot_be_meant_is_one_line(
    words: list[str],
    variables: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = [] if "--" in words else ["--config", "digits", "--out", "run"]
    assert main([*run, *words]) == 2
    assert line in capsys.readouterr().err
