"""One training under every launcher, and what happens where ranks cannot see each other or the config is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job, Run, assert_same_bits, assert_same_training, end_of, write_config

pytestmark = pytest.mark.timeout(600)  # each job has a shorter limit of its own


def test_mpirun_and_horovodrun_train_the_same_bits(
    start: Callable[..., Job], config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    end_of(start("mpirun", 2, config, tmp_path / "run"))
    assert_same_bits(Run(tmp_path / "run"), undisturbed)


def test_gloo_and_a_plain_process_without_horovod_and_mpi_train_the_same(
    start: Callable[..., Job], config: Path, undisturbed: Run, undisturbed_alone: Run, tmp_path: Path
) -> None:
    end_of(start("gloo", 2, config, tmp_path / "run"))
    assert_same_training(Run(tmp_path / "run"), undisturbed)
    assert_same_training(undisturbed_alone, undisturbed)
    assert undisturbed_alone.summary["world_size"] == 1


@pytest.mark.parametrize(
    ("kind", "np", "variables"),
    [
        # mpirun's two ranks with Horovod told to expect its Gloo launcher: what a build without MPI does.
        ("mpirun", 2, {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}),
        # A task of srun without PMI, or of another MPI's mpirun: Horovod starts on its own.
        ("plain", 1, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}),
    ],
    ids=["mpirun", "srun"],
)
def test_ranks_that_do_not_see_each_other_are_told_how_to_relaunch(
    start: Callable[..., Job], config: Path, tmp_path: Path, kind: str, np: int, variables: dict[str, str]
) -> None:
    out = tmp_path / "run"
    job = start(kind, np, config, out, env=variables)
    assert job.wait(60) == 2
    assert len(job.errors) == 1, job.text()
    assert job.errors[0].startswith("processes: 2 were started, but Horovod sees 1")
    assert "relaunch with horovodrun -np 2 python -m hvdbs.train" in job.errors[0]
    assert not out.exists()


def test_a_wrong_config_is_refused_by_one_line_from_one_rank(start: Callable[..., Job], tmp_path: Path) -> None:
    # A rule that is checked late, with the model; test_bad_input.py has them all.
    config = write_config(tmp_path / "wrong.yaml", model={"name": "resnet9", "dropout": 0.0})
    out = tmp_path / "run"
    job = start("mpi", 2, config, out)
    assert job.wait(60) == 2  # 6 s on two cores that are not shared
    assert job.errors == ["model.name: resnet9 is not known; did you mean resnet8?"], job.text()
    assert "Traceback" not in job.stderr
    assert not out.exists()
