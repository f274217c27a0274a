"""The doctor: its lines from made-up machines, and itself where nothing is installed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
import venv
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hvdbs.doctor import __main__ as doctor
from hvdbs.doctor import communication, nodes, software, storage
from hvdbs.doctor.communication import RING, Ran
from hvdbs.doctor.findings import WIDTH, Finding, all_looked_at, merged, page, worst

ROOT = Path(__file__).parents[1]
HOROVOD = {"version": "0.28.1", "mpi": True, "gloo": True, "nccl": 0, "torch": "2.14.1"}
TORCH = {"version": "2.14.1", "cuda": None, "seconds": 1.0, "gpus": [], "nccl": None}


def test_without_packages_compiler_and_path_it_says_so_and_exits_with_1(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)  # this Python without packages
    command = [tmp_path / "bare" / "bin" / "python", "-m", "hvdbs.doctor"]
    bare = {"PATH": "/nowhere", "PYTHONPATH": str(ROOT)}
    said = {}
    for option in ("--json", "--no-trial"):
        done = subprocess.run([*command, option], cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (1, "")
        said[option] = done.stdout
    told = json.loads(said["--json"])
    assert (told["schema_version"], told["word"]) == (1, "FAIL")
    findings = [Finding(**{**line, "nodes": tuple(line["nodes"])}) for line in told["findings"]]
    words = {finding.name: finding.word for finding in findings}
    for name in ("packages", "torch", "Horovod", "compiler", "allreduce"):
        assert words[name] == "FAIL", name
    assert (words["Python"], words["MPI"], words["DALI"]) == ("ok", "note", "note")
    assert all(finding.fix for finding in findings if finding.word != "ok")
    lines = [
        line.split()[:2] for line in said["--no-trial"].splitlines() if line.startswith(("  ok ", "  note", "  FAIL"))
    ]
    assert lines == [[f.word, f.name.split()[0]] for f in findings if f.group != "communication"]


def test_an_older_python_gets_as_far_as_the_line_that_names_the_right_one() -> None:
    for name in ("__init__.py", "doctor/__init__.py", "doctor/__main__.py"):
        ast.parse((ROOT / "hvdbs" / name).read_text(), feature_version=(3, 6))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--launcher", "mpiexec"], "--launcher: mpiexec is none that is known"),
        (["--timeout", "nan"], "--timeout: nan is not in (0, 3600]"),
        (["--hostfile", "/nowhere"], "--hostfile: /nowhere cannot be read"),
        (["--hosts", "n1:0"], "--hosts"),
        (["--nic", "nowhere0"], "nowhere0"),
        (["--jsno"], "unrecognized arguments: --jsno"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hvdbs: error: ") and said in err and err.count("\n") == 1


def test_a_look_that_fails_or_hangs_is_a_note_and_holds_nobody() -> None:
    begin = time.monotonic()
    good = Finding("g", "good", "ok", "it is there")
    looks: Any = [("g", "hangs", lambda: time.sleep(30)), ("g", "fails", lambda: [][0]), ("g", "good", lambda: good)]
    lines = all_looked_at([*looks, ("g", "none", lambda: None)], 0.5)
    assert time.monotonic() - begin < 10
    assert [(line.name, line.word) for line in lines] == [("hangs", "note"), ("fails", "note"), ("good", "ok")]
    assert "no answer in 0.5 s" in lines[0].text and "IndexError" in lines[1].text


def test_nodes_that_agree_are_one_line_and_those_that_differ_are_named() -> None:
    same, new, broken = (
        Finding("s", "torch", word, text, alike=text) for word, text in (("ok", "2.14"), ("ok", "2.13"), ("FAIL", "no"))
    )
    assert [(f.text, f.nodes) for f in merged({"a": [same], "b": [same]})] == [("2.14", ("a", "b"))]
    lines = merged({"a": [same], "b": [new], "c": [same], "d": [broken], "e": []})
    found = [(f.word, f.text, f.nodes) for f in lines]
    assert found[:2] == [("note", "2.14", ("a", "c")), ("note", "2.13", ("b",))]
    assert found[2:] == [("FAIL", "no", ("d",)), ("note", "nothing of the kind", ("e",))]
    text = page(lines, "title", 5)
    assert "a, c: 2.14" in text and text.endswith("1 failure, 3 notes: " + text.rpartition(": ")[2])
    assert "will not work" in text and worst(lines) == "FAIL"


def test_the_page_is_no_wider_than_it_says_and_claims_no_trial_that_was_not_made() -> None:
    long = Finding("g", "name", "note", "word " * 60, "fix " * 60)
    text = page([long, Finding("g", "other", "ok", "fine")], "title")
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.split().count("word") == text.split().count("fix") == 60
    assert "none were started" in text
    assert "works here" in page([Finding("communication", "MPI", "ok", "fine")], "title")


def trial(seconds: float, launcher: str = "mpirun", **changes: Any) -> Ran:
    facts = {"world_size": 2, "hosts": ["a", "b"], "bytes": 8_000_000, "right": True, "seconds": seconds}
    return Ran(launcher, facts | changes)


@pytest.mark.parametrize(
    ("mpi", "gloo", "tuned", "word", "fix"),
    [
        (0.10, 0.09, None, "ok", ""),
        (0.10, 0.30, None, "ok", ""),
        (0.30, 0.10, None, "note", "--launcher horovodrun-gloo"),
        (0.30, 0.10, 0.11, "note", f"{next(iter(RING))}=1"),
        (0.30, 0.10, 0.29, "note", "--launcher horovodrun-gloo"),
    ],
)
def test_mpi_beside_gloo_and_what_to_set(mpi: float, gloo: float, tuned: float | None, word: str, fix: str) -> None:
    third = None if tuned is None else trial(tuned)
    line = communication.compared(trial(mpi), trial(gloo, "horovodrun-gloo"), third)
    assert line.word == word and fix in line.fix and bool(line.fix) == (word == "note")
    assert f"MPI {1000 * mpi:.0f} ms" in line.text


def test_an_allreduce_is_ok_only_if_its_sum_and_its_ranks_are_right() -> None:
    good = communication.finding("MPI", trial(0.1), 2, "FAIL")
    assert good.word == "ok" and "80 MB/s" in good.text  # 2 (n - 1) / n times 8 MB in 0.1 s
    assert communication.finding("MPI", trial(0.1, right=False), 2, "note").word == "FAIL"
    assert communication.finding("MPI", trial(0.1, world_size=1), 2, "note").word == "FAIL"
    for word in ("note", "FAIL"):  # as another launcher works or none does
        assert communication.finding("MPI", Ran("mpirun", None, "no answer"), 2, word).word == word  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "torch", "word", "said"),
    [
        ({}, "2.14.1", "ok", "MPI and Gloo"),
        ({"mpi": False}, "2.14.1", "note", "built with Gloo"),
        ({"mpi": False, "gloo": False}, "2.14.1", "FAIL", "ranks cannot meet"),
        ({}, "2.15.0", "FAIL", "and torch 2.15.0 is installed"),
        ({"error": "OSError: undefined symbol"}, "2.15.0", "FAIL", "undefined symbol"),
    ],
)
def test_horovod_fits_the_torch_that_is_there(change: dict[str, Any], torch: str, word: str, said: str) -> None:
    line = software.horovod({"horovod": HOROVOD | change, "torch": TORCH | {"version": torch}})
    assert line.word == word and said in line.text and bool(line.fix) == (word != "ok")


def test_a_driver_runs_cuda_of_its_own_major_version_and_of_those_before() -> None:
    # CUDA Compatibility, "minor version compatibility": within a major version the driver may be the older one.
    assert software.fits("570", (12, 8), "13.0").word == "FAIL"
    assert [software.fits("580", (13, 0), cuda).word for cuda in ("13.1", "12.8", None)] == ["ok"] * 3


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("mpirun (Open MPI) 5.0.11\n", "Open MPI 5.0.11"),
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", "Open MPI 4.1.4"),
        ("MPICH Version:      4.2.1\nMPICH Release date: ...", "MPICH 4.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 2023", "Intel MPI 2021.11"),
        ("something else", "something else"),
    ],
)
def test_whose_mpi_it_is(said: str, name: str) -> None:
    assert software.named(said)[0] == name


def test_clocks_apart_by_more_than_a_second_are_named_and_by_five_minutes_fail() -> None:
    def answers(*ahead: float | None) -> list[nodes.Answer]:
        return [nodes.Answer(f"n{at}", ahead=seconds) for at, seconds in enumerate(ahead)]

    assert nodes.clocks(answers(0.1, None)) is None
    words = {apart: nodes.clocks(answers(0.2, 0.2 + apart, 0.3)) for apart in (0.4, 7.0, 400.0)}
    assert [line.word for line in words.values() if line] == ["ok", "note", "FAIL"]
    assert "n1 is 7.0 s ahead of n0" in asdict(words[7.0])["text"]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (f"print({nodes.told([Finding('g', 'x', 'ok', 'y')])!r})", None),
        ("import sys; sys.exit('no such environment')", "no such environment"),
        ("import time; time.sleep(60)", "no answer in 2 s"),
    ],
)
def test_a_node_is_heard_or_its_silence_explained(program: str, problem: str | None) -> None:
    now = f"from hvdbs.doctor import nodes; print(nodes.clock(), flush=True); {program}"
    answer = nodes.ask("localhost", False, [sys.executable, "-c", program if problem else now], 2 if problem else 30)
    assert answer.problem == (problem or "")
    if problem is None:
        assert answer.findings == [Finding("g", "x", "ok", "y")] and answer.ahead is not None and abs(answer.ahead) < 1
    assert nodes.reached([answer], False)[-1].word == ("FAIL" if problem else "ok")


def test_folders_of_runs_and_data(tmp_path: Path) -> None:
    assert storage.mounted(Path("/proc/self")) == ("proc", "/proc")
    (tmp_path / "file").touch()
    assert storage.run_directory(tmp_path / "file").word == "FAIL"
    assert storage.run_directory(tmp_path / "new" / "run").word == "ok"
    assert storage.data(tmp_path / "none", 1).word == "FAIL"
    images = tmp_path / "images" / "train" / "a"
    images.mkdir(parents=True)
    assert "holds no file" in storage.data(tmp_path / "images", 1).text
    for at in range(20):
        (images / f"{at}.jpg").write_bytes(os.urandom(1000))
    (images / "round").symlink_to(tmp_path / "images")  # a circle
    found = storage.sample(tmp_path / "images", 20)
    assert len(found) == 20
    done = storage.read(sorted(images.glob("*.jpg")))
    assert (done.files, done.bytes) == (20, 20_000)
