"""environment.json: complete, and nothing that must not be published."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from hvdbs.environment import allowed, environment, git_commit, launchers
from hvdbs.metrics import as_json


def test_only_variables_of_the_allow_list_are_written_down_and_never_a_secret() -> None:
    harmless = {
        "HOROVOD_CYCLE_TIME": "10",
        "OMPI_MCA_btl": "tcp",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "SLURM_JOB_ID": "7",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    private = {
        "AWS_SECRET_ACCESS_KEY": "x",
        "HOME": "/home/me",
        "_HOROVOD_SECRET_KEY": "x",
        "HOROVOD_SECRET_KEY": "x",
        "OMPI_MCA_orte_precondition_transports": "x",
        "SLURM_JOB_USER": "me",
        "WANDB_API_KEY": "x",
    }
    assert allowed(harmless | private) == harmless


def test_the_environment_is_plain_json_with_null_for_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdbs.environment._DALI", ("no-such-package",))
    found = environment(2, "horovod-mpi", ["a", "b"], ["cpu", "cpu"])
    assert json.loads(as_json(found)) == found
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["versions"]["dali"] is None
    assert (found["hosts"], found["backend"]) == (["a", "b"], "horovod-mpi")
    assert git_commit(tmp_path) is None
    assert launchers({"OMPI_COMM_WORLD_SIZE": "2"}) == ["Open MPI"]
    assert launchers({"SLURM_JOB_ID": "1"}) == [], "a shell inside an allocation is not a launcher"
