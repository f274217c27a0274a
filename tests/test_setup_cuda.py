"""The set-up's choice of a CUDA toolkit, and what it says where there is none that would do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import build_horovod
import machine
import pytest
from build_horovod import Target, cuda_for
from machine import Mpi, cuda_home
from steps import Refusal

TOOLS = Path(machine.__file__).parent


def toolkit(folder: Path, release: str) -> Path:
    """A folder with what a toolkit is known by."""
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime.h").touch()
    script(folder / "bin" / "nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.88'")
    return folder


def script(path: Path, line: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a toolkit; its PATH has a folder that is empty."""
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "TOOLKITS", tmp_path / "usual")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def test_the_toolkit_of_the_right_version_is_taken_wherever_it_stands(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = toolkit(bare / "usual" / "cuda", "12.4"), toolkit(bare / "opt", "13.0")
    assert cuda_home("12") == old
    (bare / "bin" / "nvcc").symlink_to(new / "bin" / "nvcc")
    assert (cuda_home("12"), cuda_home("13")) == (old, new)
    (bare / "bin" / "nvcc").unlink()
    monkeypatch.setenv("CUDA_HOME", str(new))
    assert cuda_home("13") == new


def test_no_toolkit_or_one_of_another_version_is_one_line_with_the_ways_out(bare: Path) -> None:
    ways = "`module load cuda/13`, or CUDA_HOME=DIR, or CUDA=cpu for a build without NCCL"
    with pytest.raises(Refusal) as refused:
        cuda_home("13")
    assert str(refused.value) == f"CUDA=13 needs nvcc of CUDA 13, found none: {ways}"
    old = toolkit(bare / "usual" / "cuda", "12.4")
    with pytest.raises(Refusal) as refused:
        cuda_home("13")
    assert str(refused.value) == f"CUDA=13 needs nvcc of CUDA 13, found {old} has 12.4: {ways}"


def test_the_build_uses_one_toolkit_though_the_path_has_a_script_that_calls_another(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch looks for libcudart beside the nvcc of the PATH, Horovod asks that nvcc for its flags."""
    home = toolkit(bare / "usual" / "cuda", "13.0")
    script(bare / "bin" / "nvcc", f'exec {home}/bin/nvcc "$@"')
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(bare / "nccl"))
    target = Target(bare / "venv", "2.14.1", Mpi("openmpi", "5", "system", bare / "mpi"), "13")
    env = build_horovod.build_environment(target, bare)
    assert env["CUDA_HOME"] == env["HOROVOD_CUDA_HOME"] == str(home)
    assert env["PATH"].split(os.pathsep)[0] == str(home / "bin")
    for_cpu = build_horovod.build_environment(Target(target.venv, target.torch, target.mpi, "cpu"), bare)
    assert not {"CUDA_HOME", "HOROVOD_GPU_OPERATIONS"} & for_cpu.keys()


def test_horovod_is_built_for_the_cuda_of_torch_or_for_the_cpu() -> None:
    assert [cuda_for(asked, "2.14.1+cu130", "13.0") for asked in ("cpu", "13", "torch")] == ["cpu", "13", "13"]
    assert cuda_for("cpu", "2.14.1", None) == "cpu"
    for asked, torch_cuda, line in (
        ("12", "13.0", "CUDA=12, and torch 2.14.1 is built for CUDA 13.0: CUDA=cpu or CUDA=13"),
        ("13", None, "CUDA=13, and torch 2.14.1 is built for CUDA none: CUDA=cpu"),
        ("torch", None, "NCCL needs a torch for CUDA, and torch 2.14.1 is for the CPU: VENV=DIR for another"),
    ):
        with pytest.raises(Refusal) as refused:
            cuda_for(asked, "2.14.1", torch_cuda)
        assert str(refused.value).startswith(line)


def test_setup_for_cuda_12_says_at_once_that_the_pinned_torch_is_for_13(bare: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    # The compiler is looked for where the cache has no wheel at all; this is not about it.
    (bare / "cache" / "wheels" / f"horovod-{build_horovod.HOROVOD}-x-cpu").mkdir(parents=True)
    (bare / "cache" / "wheels" / f"horovod-{build_horovod.HOROVOD}-x-cpu" / "horovod-x.whl").touch()
    command = [sys.executable, TOOLS / "environment.py", "--venv", bare / "venv", "--cuda", "12"]
    done = subprocess.run(command, env=env | {"HVDBS_CACHE": str(bare / "cache")}, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert re.match(r"setup: CUDA=12, and PyPI's torch [\d.]+ is for CUDA 13: TORCH=existing", done.stderr)
    assert not (bare / "venv" / "bin").exists()
