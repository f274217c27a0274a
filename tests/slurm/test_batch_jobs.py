"""Batch jobs of slurm/ on two nodes of a real Slurm: every launcher, stop and requeue, arrays, GPUs, no orphans."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import ranks
from batch import Batch, Submit
from cluster import Cluster, wait_until
from launching import ROOT, Run, assert_same_bits, ended, whole_steps

from hvdbs.launch import __main__ as entry
from hvdbs.launch.commands import LAUNCHERS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]  # each job has a shorter limit of its own

# A few seconds of training: VBS with one enlargement, 165 updates.
SHORT = ["--config", "digits-vbs", "--schedule.stage_epochs", "[2,1,1]", "--threads", "1", "--model.width", "4"]
SHORT += ["--micro_batch", "8", "--evaluation.every_epochs", "2", "--logging.tensorboard", "false"]
SHORT += ["--logging.every_steps", "1", "--checkpoint.every_samples", "400"]
LONG_EPOCHS = "[30,15,15]"  # a minute and more


@pytest.fixture(scope="session")
def arguments(images: Path) -> list[str]:
    return [*SHORT, "--data.root", str(images)]


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run on two ranks of this machine, outside of Slurm."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    launch = [sys.executable, "-m", "hvdbs.launch", "--np", "2", *arguments, "--out", str(out)]
    code, _ = ranks.run_one(launch, 240)
    assert code == 0
    return Run(out)


def restarts(batch: Batch) -> int:
    return int(batch.cluster.record(batch.job)["Restarts"])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_vbs_run_ends_in_the_same_bits_under_each_launcher_on_two_nodes(
    submit: Submit, arguments: list[str], undisturbed: Run, tmp_path: Path, launcher: str
) -> None:
    batch = submit("train.sbatch", launch=["--launcher", launcher, *arguments, "--out", str(tmp_path / "run")])
    run = batch.until_finished()
    assert_same_bits(run, undisturbed)
    hosts = json.loads((batch.out / "environment.json").read_text())["hosts"]
    assert hosts == ["node1", "node2"]


def test_a_batch_script_that_the_launcher_writes_is_ready(
    submit: Submit, arguments: list[str], undisturbed: Run, tmp_path: Path
) -> None:
    script = tmp_path / "written.sbatch"
    asked = ["--sbatch", str(script), "--nodes", "2", "--cpus-per-rank", "1", "--time", "30", "--partition", "main"]
    assert entry.main([*asked, *arguments, "--out", str(tmp_path / "run")]) == 0
    assert_same_bits(submit(script, launch=[]).until_finished(), undisturbed)


@pytest.mark.parametrize("launcher", ["srun", "srun-gloo", "mpirun"])
def test_the_signal_before_the_time_limit_stops_a_job_which_goes_on_by_itself_to_the_same_bits(
    submit: Submit, arguments: list[str], undisturbed: Run, tmp_path: Path, launcher: str
) -> None:
    batch = submit("train.sbatch", launch=["--launcher", launcher, *arguments, "--out", str(tmp_path / "run")])
    batch.until_update(20)
    batch.cluster.slurm("scancel", "--batch", "--signal=USR1", batch.job)
    batch.until(lambda: restarts(batch) == 1, "it is back in the queue")
    assert ended(batch.out) == ("stopped", 75)
    stopped_at = whole_steps(batch.out)[-1]
    assert 20 <= stopped_at < undisturbed.summary["steps"]
    batch.assert_nothing_left()
    assert_same_bits(batch.until_finished(), undisturbed)
    assert f"job {batch.job} is back in the queue" in batch.log.read_text()


def test_a_job_that_slurm_requeues_goes_on_to_the_same_bits(
    submit: Submit, arguments: list[str], undisturbed: Run, tmp_path: Path
) -> None:
    batch = submit("train.sbatch", launch=[*arguments, "--out", str(tmp_path / "run")])
    batch.until_update(20)
    batch.cluster.slurm("scontrol", "requeue", batch.job)
    assert_same_bits(batch.until_finished(), undisturbed)
    assert restarts(batch) == 1


def test_a_job_whose_node_is_set_down_goes_on_to_the_same_bits(
    submit: Submit, arguments: list[str], undisturbed: Run, tmp_path: Path
) -> None:
    batch = submit("train.sbatch", launch=[*arguments, "--out", str(tmp_path / "run")])
    batch.until_update(20)
    batch.cluster.slurm("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    try:
        batch.until(lambda: restarts(batch) == 1, "it is back in the queue")
    finally:
        batch.cluster.slurm("scontrol", "update", "nodename=node2", "state=resume")
    assert_same_bits(batch.until_finished(), undisturbed)


@pytest.mark.slow  # Slurm counts time limits in minutes
def test_a_job_that_is_longer_than_its_time_limit_goes_on_to_the_same_bits(
    submit: Submit, arguments: list[str], tmp_path: Path
) -> None:
    longer = [*arguments, "--schedule.stage_epochs", LONG_EPOCHS, "--checkpoint.every_samples", "0"]
    limit = ["--time=2", "--signal=B:USR1@55"]  # after 5 to 65 seconds
    batch = submit("train.sbatch", *limit, launch=[*longer, "--out", str(tmp_path / "run")])
    whole = submit("train.sbatch", launch=[*longer, "--out", str(tmp_path / "whole")], out=tmp_path / "whole")
    assert_same_bits(batch.until_finished(600), whole.until_finished(600))
    assert restarts(batch) >= 1
    assert restarts(whole) == 0


def test_where_requeueing_is_off_a_dependent_job_goes_on_to_the_same_bits(
    submit: Submit, arguments: list[str], undisturbed: Run, tmp_path: Path
) -> None:
    batch = submit("train.sbatch", "--no-requeue", "--time=9", launch=[*arguments, "--out", str(tmp_path / "run")])
    batch.until_update(20)
    batch.cluster.slurm("scancel", "--batch", "--signal=USR1", batch.job)
    batch.until(lambda: "goes on after this one" in batch.log.read_text(), "another job is queued")
    following = batch.log.read_text().partition("): job ")[2].split()[0]
    record = batch.cluster.record(following)
    assert (record["NumNodes"].split("-")[0], record["TimeLimit"]) == ("2", "00:09:00")
    wait_until(lambda: batch.cluster.state(following) == "COMPLETED", "it has completed", 240, batch.text)
    assert batch.log.read_text().count("hvdbs.launch: ranks ") == 2  # both write to the file that was asked for
    assert batch.cluster.state(batch.job) == "FAILED"  # not finished: whatever waits for its success waits on
    assert_same_bits(Run(batch.out), undisturbed)


def test_the_stop_file_ends_a_job_for_good(submit: Submit, arguments: list[str], tmp_path: Path) -> None:
    batch = submit("train.sbatch", launch=[*arguments, "--out", str(tmp_path / "run")])
    batch.until_update(20)
    (batch.out / "stop").touch()
    assert batch.until_state("FAILED", "COMPLETED", "PENDING") == "FAILED"
    assert batch.cluster.record(batch.job)["ExitCode"] == "75:0"
    assert ended(batch.out) == ("stopped", 75)
    batch.assert_nothing_left()


@pytest.mark.parametrize("launcher", ["srun", "mpirun", "horovodrun-gloo"])
def test_of_a_cancelled_job_nothing_is_left(
    submit: Submit, arguments: list[str], tmp_path: Path, launcher: str
) -> None:
    batch = submit("train.sbatch", launch=["--launcher", launcher, *arguments, "--out", str(tmp_path / "run")])
    batch.until_update(20)
    batch.cluster.slurm("scancel", batch.job)
    assert batch.until_state("CANCELLED") == "CANCELLED"
    batch.assert_nothing_left(30)
    assert whole_steps(batch.out)
    if launcher == "srun":  # the others may end their ranks before a window ends
        assert ended(batch.out) == ("stopped", 75)


def test_nothing_is_left_of_a_job_whose_launcher_is_killed(
    submit: Submit, arguments: list[str], tmp_path: Path
) -> None:
    batch = submit("train.sbatch", launch=["--launcher", "srun-gloo", *arguments, "--out", str(tmp_path / "run")])
    batch.until_update(20)
    launchers = [pid for pid in ranks.processes_with(batch.mark) if b"hvdbs.launch\0" in command_line(pid)]
    os.kill(launchers[0], signal.SIGKILL)
    batch.until_state("FAILED")
    batch.assert_nothing_left(30)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_an_array_trains_each_config_and_seed_of_a_sweep(submit: Submit, arguments: list[str], tmp_path: Path) -> None:
    sweep = ["--configs", "digits-vbs,digits-sebs", "--seeds", "1,2", *arguments[2:], "--out", str(tmp_path / "sweep")]
    length = sweep.index("--schedule.stage_epochs")
    sweep[length : length + 2] = []  # in whole recipes
    sweep += ["--schedule.global_batch", "128"]
    batch = submit("sweep.sbatch", "--array=0-3", launch=sweep)
    names = [f"{config}-seed{seed}" for config in ("digits-vbs", "digits-sebs") for seed in (1, 2)]
    batch.until(lambda: all(ended(tmp_path / "sweep" / name) for name in names), "all have ended")
    assert {ended(tmp_path / "sweep" / name) for name in names} == {("finished", 0)}, batch.text()
    digests = {Run(tmp_path / "sweep" / name).summary["parameter_digest"] for name in names}
    assert len(digests) == len(names)


def test_the_benchmark_measures_two_nodes(submit: Submit, tmp_path: Path) -> None:
    table = tmp_path / "throughput.csv"
    small = ["--models", "resnet8", "--accumulation", "1", "--rounds", "2", "--seconds", "0.1", "--micro-batch", "4"]
    batch = submit("benchmark.sbatch", launch=[*small, "--out", str(table)])
    assert batch.until_state("COMPLETED", "FAILED") == "COMPLETED", batch.text()
    rows = list(csv.DictReader(line for line in table.read_text().splitlines() if not line.startswith("#")))
    assert "2" in {row["world_size"] for row in rows}
    batch.assert_nothing_left()


SEATS = """
import json, os, socket
names = ("OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "SLURM_LOCALID")
local_rank = next(int(os.environ[name]) for name in names if name in os.environ)
print("seat " + json.dumps([socket.gethostname(), local_rank, os.environ.get("CUDA_VISIBLE_DEVICES", "")]))
"""


@pytest.mark.parametrize("asked", ["--gpus-per-node=2", "--gpus-per-task=1", "--ntasks-per-gpu=1 --gpus=4"])
@pytest.mark.parametrize("launcher", ["srun", "srun-gloo", "mpirun", "horovodrun-mpi"])
def test_every_rank_takes_a_gpu_of_its_own_however_slurm_was_asked_for_them(
    submit: Submit, tmp_path: Path, launcher: str, asked: str
) -> None:
    program = tmp_path / "seats.py"
    program.write_text(SEATS)
    script, tasks = ROOT / "slurm" / "train.sbatch", ["--ntasks-per-node=2"]
    if "per-gpu" in asked:  # which excludes the other
        lines = script.read_text().splitlines(keepends=True)
        script, tasks = tmp_path / "train.sbatch", []
        script.write_text("".join(line for line in lines if "--ntasks-per-node" not in line))
    batch = submit(script, *tasks, *asked.split(), launch=["--launcher", launcher, "--", sys.executable, str(program)])
    assert batch.until_state("COMPLETED", "FAILED") == "COMPLETED", batch.text()
    seats = [json.loads(line.partition("seat ")[2]) for line in batch.log.read_text().splitlines() if "seat " in line]
    taken = defaultdict(set)
    for host, local_rank, visible in seats:
        gpus = visible.split(",")
        taken[host].add(gpus[local_rank % len(gpus)])
    assert len(seats) == 4, batch.text()
    assert taken == {"node1": {"0", "1"}, "node2": {"0", "1"}}, batch.text()
