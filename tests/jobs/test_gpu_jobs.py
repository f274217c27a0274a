"""The real entry on all GPUs of this machine, and with one rank too many."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import Job, Run, assert_same_bits, end_of, write_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]  # each job has a shorter limit of its own


def test_a_run_on_all_gpus_repeats_its_bits_and_records_devices_and_peak_memory(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    count = torch.cuda.device_count()
    config = write_config(tmp_path / "gpu.yaml", device="cuda", dtype="float32")
    for name in ("one", "two"):
        end_of(start("mpi", count, config, tmp_path / name))
    one = Run(tmp_path / "one")
    assert_same_bits(Run(tmp_path / "two"), one)
    environment = json.loads((one.out / "environment.json").read_text())
    assert environment["backend"] == "horovod-nccl"
    assert environment["devices"] == [torch.cuda.get_device_name(index) for index in range(count)]
    assert 0 < one.summary["peak_memory_bytes"] < torch.cuda.get_device_properties(0).total_memory


def test_one_rank_more_than_gpus_is_refused_in_one_line(start: Callable[..., Job], tmp_path: Path) -> None:
    config = write_config(tmp_path / "gpu.yaml", device="auto", dtype="float32")
    count = torch.cuda.device_count()
    job = start("mpi", count + 1, config, tmp_path / "run")
    assert job.wait(120) == 2
    (line,) = job.errors
    assert f"is taken by ranks 0, {count}, and a GPU is for one of them" in line
    assert "CUDA_VISIBLE_DEVICES" in line
    assert not (tmp_path / "run").exists()
