"""Horovod built with NCCL, on any machine: it imports, says what it is, and trains on the CPU as the CPU build does.

The wheel is the one that `make setup CUDA=13` installs and the cache keeps. It is unpacked beside the environment's own
Horovod and comes before it on the path, so nothing is installed; without one in the cache these tests are skipped.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import build_horovod
import pytest
import ranks
import torch
from launching import Job, Run, assert_same_bits, assert_same_training, end_of
from steps import Refusal

pytestmark = pytest.mark.timeout(600)  # each job has a shorter limit of its own


@dataclass(frozen=True)
class Unpacked:
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """PyPI's MPI is found relative to site-packages, where this is not."""
        env = ranks.environment()
        first = {"PYTHONPATH": self.folder, "LD_LIBRARY_PATH": Path(sys.prefix) / "lib"}
        return {name: f"{path}:{env.get(name, '')}".rstrip(":") for name, path in first.items()}

    @property
    def proof(self) -> str:
        """What each rank runs first."""
        return f"import horovod; assert horovod.__file__.startswith({str(self.folder)!r}), horovod.__file__"


@pytest.fixture(scope="session")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Unpacked:
    try:
        target = build_horovod.target_of(Path(sys.prefix), "torch")
    except Refusal as refusal:
        pytest.skip(str(refusal))
    wheel = build_horovod.cached_wheel(target.key)
    if wheel is None:
        pytest.skip(f"no {target.key} in {build_horovod.cache_folder()}: `make test-nccl` builds it, where nvcc is")
    folder = tmp_path_factory.mktemp("nccl")
    zipfile.ZipFile(wheel).extractall(folder)
    return Unpacked(folder)


def test_it_imports_without_a_gpu_and_was_built_for_the_nccl_of_torch(nccl: Unpacked) -> None:
    code = f"{nccl.proof}; import horovod.torch as h; print(h.nccl_built(), h.mpi_built(), h.gloo_built())"
    env = ranks.environment() | nccl.variables
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    major, minor, patch = torch.cuda.nccl.version()[:3]
    assert done.stdout.split() == [str(10000 * major + 100 * minor + patch), "True", "True"]
    (library,) = (nccl.folder / "horovod" / "torch").glob("mpi_lib_v2*.so")
    content = library.read_bytes()
    assert b"\0libnccl.so.2\0" in content, "the shared library is not linked"
    assert b"ncclAllReduce" in content


def test_under_mpi_it_trains_the_bits_of_the_cpu_build(
    nccl: Unpacked, start: Callable[..., Job], config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    end_of(start("mpi", 2, config, tmp_path / "run", before=nccl.proof, env=nccl.variables))
    assert_same_bits(Run(tmp_path / "run"), undisturbed)


def test_under_gloo_it_trains_the_same(
    nccl: Unpacked, start: Callable[..., Job], config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    end_of(start("gloo", 2, config, tmp_path / "run", before=nccl.proof, env=nccl.variables))
    assert_same_training(Run(tmp_path / "run"), undisturbed)
