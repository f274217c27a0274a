"""python -m hvdbs.launch against the variables that Slurm sets: which hosts, how many ranks, which command.

The environments are those that Slurm 22.05.8 gave batch scripts asked for with the options named beside them.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hvdbs.errors import HvdbsError
from hvdbs.launch import __main__ as entry
from hvdbs.launch import allocation, commands, sbatch, task
from hvdbs.launch.arguments import going_on, with_run_directory
from hvdbs.launch.job import exit_code, wants_requeue
from hvdbs.launch.requeue import dependent_script, resubmission
from hvdbs.launch.sweep import run_of_task


def slurm(text: str) -> dict[str, str]:
    """Variables of a batch script, written without their SLURM_."""
    pairs = (word.split("=", 1) for word in text.split())
    return {"SLURM_JOB_ID": "7", **{f"SLURM_{name}": value for name, value in pairs}}


TWO = "JOB_NODELIST=node[1-2] JOB_NUM_NODES=2"


@dataclass(frozen=True)
class Case:
    asked: str
    variables: str
    hosts: str
    cpus_per_rank: int | None
    options: dict[str, int] = field(default_factory=dict)


CASES = [
    Case("-N2", f"{TWO} JOB_CPUS_PER_NODE=1(x2) TASKS_PER_NODE=1(x2)", "node1:1,node2:1", 1),
    Case(
        "-N2 --ntasks-per-node=2",
        f"{TWO} JOB_CPUS_PER_NODE=2(x2) NTASKS=4 NTASKS_PER_NODE=2 TASKS_PER_NODE=2(x2)",
        "node1:2,node2:2",
        1,
    ),
    Case("-n 5", "JOB_NODELIST=node2 JOB_CPUS_PER_NODE=5 NTASKS=5 TASKS_PER_NODE=5", "node2:5", 1),
    Case("-N2 -n 3", f"{TWO} JOB_CPUS_PER_NODE=2,1 NTASKS=3 TASKS_PER_NODE=2,1", "node1:2,node2:1", 1),
    Case(
        "-N2 -n3 -c 2",
        f"{TWO} JOB_CPUS_PER_NODE=4,2 CPUS_PER_TASK=2 NTASKS=3 TASKS_PER_NODE=2,1",
        "node1:2,node2:1",
        2,
    ),
    Case("-N2 -c 2", f"{TWO} JOB_CPUS_PER_NODE=2(x2) CPUS_PER_TASK=2 TASKS_PER_NODE=1(x2)", "node1:1,node2:1", 2),
    # TASKS_PER_NODE counts CPUs there; srun starts one task on each node, and so do we.
    Case(
        "-N2 --exclusive, on nodes of 8 and 6 CPUs",
        f"{TWO} JOB_CPUS_PER_NODE=8,6 TASKS_PER_NODE=8,6",
        "node1:1,node2:1",
        6,
    ),
    Case(
        "-N2 --exclusive, and --ranks-per-node 2",
        f"{TWO} JOB_CPUS_PER_NODE=8,6 TASKS_PER_NODE=8,6",
        "node1:2,node2:2",
        3,
        {"ranks_per_node": 2},
    ),
    Case(
        "-N2 --exclusive -c 2",
        f"{TWO} JOB_CPUS_PER_NODE=8,6 TASKS_PER_NODE=4,3 CPUS_PER_TASK=2",
        "node1:4,node2:3",
        2,
    ),
    Case(
        "-N2 --exclusive --gpus-per-node=2",
        f"{TWO} JOB_CPUS_PER_NODE=8,6 TASKS_PER_NODE=8,6 GPUS_PER_NODE=2 GPUS_ON_NODE=2",
        "node1:2,node2:2",
        3,
    ),
    Case(
        "-N2 --exclusive --gres=gpu:a100:2",
        f"{TWO} JOB_CPUS_PER_NODE=8,6 TASKS_PER_NODE=8,6 GPUS_ON_NODE=2",
        "node1:2,node2:2",
        3,
    ),
    Case(
        "-N2 --exclusive --gpus-per-node=a100:2,v100:1",
        f"{TWO} JOB_CPUS_PER_NODE=8,6 GPUS_PER_NODE=a100:2,v100:1 GPUS_ON_NODE=3",
        "node1:3,node2:3",
        2,
    ),
    Case(
        "-n4 --gpus-per-task=1",
        f"{TWO} JOB_CPUS_PER_NODE=2(x2) GPUS_ON_NODE=2 GPUS_PER_TASK=1 NTASKS=4 TASKS_PER_NODE=2(x2)",
        "node1:2,node2:2",
        1,
    ),
    Case(
        "-N2 --gpus=4 --ntasks-per-gpu=1",
        f"{TWO} JOB_CPUS_PER_NODE=2(x2) GPUS=4 GPUS_ON_NODE=2 NTASKS=4 NTASKS_PER_GPU=1 TASKS_PER_NODE=2(x2)",
        "node1:2,node2:2",
        1,
    ),
    Case(
        "-N2 --ntasks-per-node=2, of which --np 3",
        f"{TWO} JOB_CPUS_PER_NODE=4(x2) NTASKS=4 NTASKS_PER_NODE=2 TASKS_PER_NODE=2(x2)",
        "node1:2,node2:1",
        2,
        {"ranks": 3},
    ),
    Case(
        "a list of several parts, and an older Slurm's name for it",
        "NODELIST=n[1-3,7],gpu08 JOB_CPUS_PER_NODE=2(x3),1(x2) NTASKS=8 TASKS_PER_NODE=2(x3),1(x2)",
        "n1:2,n2:2,n3:2,n7:1,gpu08:1",
        1,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.asked)
def test_hosts_slots_and_cores_follow_what_slurm_was_asked_for(case: Case) -> None:
    found = allocation.find(slurm(case.variables), **case.options)
    assert (found.host_slots, found.cpus_per_rank, found.slurm) == (case.hosts, case.cpus_per_rank, True)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3,7]", "n1 n2 n3 n7"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("a[1-2]-b,c,d[3]", "a1-b a2-b c d3"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("gpu-a.cluster.edu,gpu-b.cluster.edu", "gpu-a.cluster.edu gpu-b.cluster.edu"),
    ],
)
def test_compressed_lists_of_hosts_are_written_out_in_order(text: str, names: str) -> None:
    assert allocation.expand_hosts(text) == names.split()


REFUSED = [
    ("JOB_NODELIST=", "SLURM_JOB_NODELIST: '' is no list of hosts; a list such as n[1-3,7],gpu01"),
    ("JOB_NODELIST=n[1-3", "SLURM_JOB_NODELIST: n[1-3 is no list of hosts; a list such as n[1-3,7],gpu01"),
    ("JOB_NODELIST=n[3-1]", "SLURM_JOB_NODELIST: n[3-1] has [3-1], no numbers and ranges from low to high; a list"),
    ("JOB_NODELIST=n[1-999999]", "SLURM_JOB_NODELIST: n[1-999999] has [1-999999], no numbers and ranges"),
    ("JOB_NODELIST=n1,,n2", "SLURM_JOB_NODELIST: n1,,n2 is no list of hosts; a list such as n[1-3,7],gpu01"),
    (
        f"{TWO} JOB_CPUS_PER_NODE=2(3)",
        "SLURM_JOB_CPUS_PER_NODE: 2(3) is no number for each host; counts such as 2(x3),1",
    ),
    (
        f"{TWO} NTASKS=4 TASKS_PER_NODE=3(x2)",
        "SLURM_NTASKS: 4 is not what SLURM_TASKS_PER_NODE 3(x2) comes to, 6; unset it, or --ranks-per-node 2",
    ),
    (f"{TWO} JOB_CPUS_PER_NODE=2", "SLURM_JOB_CPUS_PER_NODE: 2 is for 1 hosts, and the job has 2"),
    (f"{TWO} GPUS_PER_NODE=a100", "SLURM_GPUS_PER_NODE: a100 is no number of GPUs; 4, or a100:4"),
    (
        f"{TWO} JOB_CPUS_PER_NODE=1(x2) GPUS_PER_NODE=2",
        "SLURM_JOB_CPUS_PER_NODE: 1 is too few on node1 for 2 ranks (one for each of SLURM_GPUS_PER_NODE) with 1 each; "
        "sbatch --ntasks-per-node=2 --cpus-per-task=1, or --ranks-per-node 1",
    ),
    (
        f"{TWO} STEP_NUM_TASKS=4",
        "SLURM_STEP_NUM_TASKS: 4 tasks of srun would each start a whole launch; call python -m hvdbs.launch once, in "
        "the batch script, without srun",
    ),
    (
        f"{TWO} HET_SIZE=2",
        "SLURM_HET_SIZE: 2 components of a heterogeneous job are not joined; one, without sbatch's :",
    ),
]


@pytest.mark.parametrize(("variables", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_variables_that_are_no_allocation_are_refused_in_a_line(variables: str, line: str) -> None:
    with pytest.raises(HvdbsError) as refused:
        allocation.find(slurm(variables))
    assert str(refused.value).startswith(line)


def test_hosts_come_from_a_list_or_a_file_where_there_is_no_slurm() -> None:
    file = "# our machines\nnode1 slots=2\nnode2:2   # the same\n\nnode3\n"
    assert allocation.find({}, hosts="node[1-2]:2,node3").host_slots == "node1:2,node2:2,node3:1"
    assert allocation.find({}, host_file=("hosts", file)).host_slots == "node1:2,node2:2,node3:1"
    assert allocation.find({}, ranks=3).host_slots == "localhost:3"
    inside = allocation.find(slurm(TWO), hosts="node9:2")
    assert (inside.host_slots, inside.slurm) == ("node9:2", False)


# --- commands

RANKS_2_2 = f"{TWO} JOB_CPUS_PER_NODE=4(x2) NTASKS=4 NTASKS_PER_NODE=2 TASKS_PER_NODE=2(x2)"
SRUN = (
    "--nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=2 --distribution=block --kill-on-bad-exit=1 --export=ALL"
)
THREADS = "env OMP_NUM_THREADS=2 HVDBS_CORES_PER_RANK=2"
PROGRAM = ["py", "-m", "hvdbs.train"]


def shown(launcher: str, variables: dict[str, str], nic: str | None = None, as_root: bool = False) -> str:
    choice = commands.Choice(launcher, "py", nic, as_root)
    return str(commands.launch(allocation.find(variables), choice, PROGRAM, variables))


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("srun", f"{THREADS} srun --mpi=pmix {SRUN} py -m hvdbs.train"),
        (
            "srun-gloo",
            f"{THREADS} py -m hvdbs.launch.rendezvous node1:2,node2:2 srun --mpi=none {SRUN} "
            "py -m hvdbs.launch.task py -m hvdbs.train",
        ),
        (
            "mpirun",
            f"{THREADS} mpirun -np 4 -H node1:2,node2:2 --bind-to none --map-by slot "
            "-x HVDBS_CORES_PER_RANK -x OMP_NUM_THREADS -x PATH py -m hvdbs.train",
        ),
        (
            "horovodrun-mpi",
            f"{THREADS} horovodrun --mpi -np 4 -H node1:2,node2:2 --disable-cache "
            "'--binding-args=--bind-to none --map-by slot' py -m hvdbs.train",
        ),
        (
            "horovodrun-gloo",
            f"{THREADS} horovodrun --gloo -np 4 -H node1:2,node2:2 --disable-cache py -m hvdbs.train",
        ),
    ],
)
def test_each_launcher_has_its_command(launcher: str, command: str) -> None:
    assert shown(launcher, slurm(RANKS_2_2) | {"PATH": "/bin"}) == command


def test_uneven_nodes_keep_the_counts_that_srun_has_from_the_job() -> None:
    uneven = slurm(f"{TWO} JOB_CPUS_PER_NODE=2,1 NTASKS=3 TASKS_PER_NODE=2,1")
    command = shown("srun", uneven)
    assert "--nodes=2 --ntasks=3 --cpus-per-task=1" in command
    assert "--ntasks-per-node" not in command
    assert "-np 3 -H node1:2,node2:1" in shown("mpirun", uneven)


@pytest.mark.parametrize("name", ["GPUS_PER_TASK=1", "NTASKS_PER_GPU=1", "GPU_BIND=single:1", "GPUS=4"])
def test_a_gpu_for_each_task_reaches_the_tasks_of_srun_and_not_the_daemons_of_mpirun(name: str) -> None:
    variables = slurm(f"{RANKS_2_2} {name} GPUS_ON_NODE=2")
    variable = f"SLURM_{name.partition('=')[0]}"
    for launcher in ("mpirun", "horovodrun-mpi"):
        words = shlex.split(shown(launcher, variables))
        assert words[:3] == ["env", "-u", variable]
        assert "SLURM_GPUS_PER_NODE=2" in words
    for launcher in ("srun", "srun-gloo"):
        assert variable not in shown(launcher, variables)
    assert ("--ntasks-per-node" in shown("srun", variables)) == (variable != "SLURM_NTASKS_PER_GPU")


def test_mpirun_does_not_pass_the_first_node_s_gpus_on() -> None:
    variables = slurm(f"{RANKS_2_2} GPUS_PER_NODE=2") | {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert "CUDA_VISIBLE_DEVICES" not in shown("mpirun", variables)


def test_the_environment_reaches_steps_even_where_sbatch_was_told_to_export_none() -> None:
    variables = slurm(f"{RANKS_2_2} EXPORT_ENV=NONE")
    assert "--export=ALL" in shown("srun", variables)
    assert "-u SLURM_EXPORT_ENV" in shown("mpirun", variables)


def test_a_network_interface_is_told_in_each_launcher_s_own_way() -> None:
    mpi = "OMPI_MCA_btl_tcp_if_include=ib0 NCCL_SOCKET_IFNAME=ib0"
    assert mpi in shown("srun", slurm(RANKS_2_2), "ib0")
    assert f"{mpi} mpirun" in shown("mpirun", slurm(RANKS_2_2), "ib0")
    assert "-x NCCL_SOCKET_IFNAME" in shown("mpirun", slurm(RANKS_2_2), "ib0")
    assert "HOROVOD_GLOO_IFACE=ib0 NCCL_SOCKET_IFNAME=ib0" in shown("srun-gloo", slurm(RANKS_2_2), "ib0")
    for launcher in ("horovodrun-mpi", "horovodrun-gloo"):
        assert "--network-interface ib0" in shown(launcher, slurm(RANKS_2_2), "ib0")


def test_root_has_to_tell_mpirun_and_threads_that_are_set_stay() -> None:
    variables = slurm(RANKS_2_2) | {"OMP_NUM_THREADS": "1"}
    assert "--allow-run-as-root" in shown("mpirun", variables, as_root=True)
    assert "--allow-run-as-root" not in shown("mpirun", variables)
    assert "OMP_NUM_THREADS=1 HVDBS_CORES_PER_RANK=2" in shown("srun", variables)


def test_what_is_shown_is_what_a_shell_would_start() -> None:
    launch = commands.Launch(("printenv", "A", "B"), {"A": "a b", "B": "$HOME"}, unset=("C",))
    inherited = {"PATH": "/usr/bin:/bin", "C": "c"}
    said = subprocess.run(["sh", "-c", str(launch)], env=inherited, capture_output=True, text=True, check=True)
    assert said.stdout == "a b\n$HOME\n"
    assert launch.environment(inherited) == {"PATH": "/usr/bin:/bin", "A": "a b", "B": "$HOME"}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ("PROCID=0 LOCALID=0 NODEID=0", "0 0 2 0 2"),
        ("PROCID=1 LOCALID=1 NODEID=0", "1 1 2 0 1"),
        ("PROCID=2 LOCALID=0 NODEID=1", "2 0 1 1 2"),
    ],
)
def test_a_task_of_srun_is_a_rank_of_horovod_s_plan(variables: str, told: str) -> None:
    of_step = slurm(f"STEP_NUM_TASKS=3 STEP_TASKS_PER_NODE=2,1 {variables}")
    found = task.rank_variables(of_step)
    names = ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert " ".join(found[f"HOROVOD_{name}"] for name in names) == told
    assert found["HOROVOD_SIZE"] == "3"


def test_horovod_s_own_assignment_of_ranks_agrees_with_the_tasks_of_srun() -> None:
    hosts = pytest.importorskip("horovod.runner.common.util.hosts")
    counts = [3, 1, 2]
    plan = hosts.get_host_assignments(hosts.parse_hosts(",".join(f"n{i}:{c}" for i, c in enumerate(counts))), 6)
    for slot in plan:
        node = int(slot.hostname[1:])
        step = f"STEP_NUM_TASKS=6 STEP_TASKS_PER_NODE=3,1,2 PROCID={slot.rank} LOCALID={slot.local_rank} NODEID={node}"
        found = task.rank_variables(slurm(step))
        told = tuple(int(found[f"HOROVOD_{name}"]) for name in ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "SIZE"))
        assert told == (slot.local_size, slot.cross_rank, slot.cross_size, slot.size)


# --- where a run writes, and how it goes on


def test_a_job_writes_where_a_requeued_one_finds_it() -> None:
    variables = slurm("JOB_NAME=train")
    assert with_run_directory(["--config", "digits"], None, "0", variables)[1] == Path("runs/train-7")
    words, out = with_run_directory(["--out=runs/a", "--seed", "1"], None, "0", variables)
    assert (words, out) == (["--seed", "1", "--out", "runs/a"], Path("runs/a"))
    array = variables | {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    assert with_run_directory([], None, "0", array)[1] == Path("runs/train-5-3")
    with pytest.raises(HvdbsError, match="--out: none given"):
        with_run_directory(["--config", "digits"], None, "0", {})


def test_a_task_of_an_array_is_one_config_and_one_seed() -> None:
    tasks = [run_of_task(["digits", "my/vbs.yaml"], ["1", "2"], {"SLURM_ARRAY_TASK_ID": str(i)}) for i in range(4)]
    assert [name for _, name in tasks] == ["digits-seed1", "digits-seed2", "vbs-seed1", "vbs-seed2"]
    assert tasks[2][0] == ["--config", "my/vbs.yaml", "--seed", "1"]
    array = slurm("ARRAY_JOB_ID=5 ARRAY_TASK_ID=2 JOB_NAME=sweep")
    words, out = with_run_directory(["--threads", "1"], "digits,vbs", "1,2", array)
    assert words == ["--config", "vbs", "--seed", "1", "--threads", "1", "--out", "runs/sweep-5/vbs-seed1"]
    assert out == Path("runs/sweep-5/vbs-seed1")


@pytest.mark.parametrize(
    ("configs", "seeds", "variables", "line"),
    [
        (
            "digits",
            "1,2",
            {"SLURM_ARRAY_TASK_ID": "2"},
            "SLURM_ARRAY_TASK_ID: 2 is beyond the last of 2 runs, 1 configs",
        ),
        ("digits", "1,2", {}, "--configs: digits with 2 seeds is for the tasks of an array; sbatch --array=0-1"),
        ("a/x.yaml,b/x.yaml", "1", {}, "--configs: x stands there twice, and its runs would share a directory"),
        ("digits", "1,b", {}, "--seeds: b is no seed; whole numbers such as 1,2,3"),
    ],
)
def test_a_sweep_that_names_no_run_is_refused(configs: str, seeds: str, variables: dict[str, str], line: str) -> None:
    with pytest.raises(HvdbsError) as refused:
        run_of_task(configs.split(","), seeds.split(","), variables)
    assert str(refused.value).startswith(line)


def test_a_run_goes_on_from_itself_and_follows_a_branch_only_once() -> None:
    assert going_on(["--seed", "1"], begun=False) == ["--seed", "1", "--resume", "auto"]
    assert going_on(["--branch-from", "c"], begun=False) == ["--branch-from", "c"]
    assert going_on(["--branch-from", "c", "--seed", "1"], begun=True) == ["--seed", "1", "--resume", "auto"]
    assert going_on(["--resume", "c"], begun=True) == ["--resume", "c"]


def test_only_a_stop_before_the_time_limit_puts_a_job_back_into_the_queue() -> None:
    job, usr1, term = slurm(""), [10], [15]
    assert wants_requeue(job, usr1, "stopped", "step-1", "step-9")
    assert not wants_requeue(job, term, "stopped", "step-1", "step-9")  # scancel; Slurm requeues by itself
    assert not wants_requeue(job, [], "stopped", "step-1", "step-9")  # the file, by hand
    assert not wants_requeue(job, usr1, "finished", "step-1", "step-9")
    assert not wants_requeue(job, usr1, "failed", "step-1", "step-9")
    assert not wants_requeue(job, usr1, None, None, None)
    assert not wants_requeue({}, usr1, "stopped", "step-1", "step-9")
    with pytest.raises(HvdbsError, match="not one update fits into its time"):
        wants_requeue(job, usr1, "stopped", "step-9", "step-9")


def test_the_exit_code_is_what_the_run_says_of_itself() -> None:
    assert exit_code("finished", 1) == 0  # horovodrun
    assert exit_code("stopped", 0) == exit_code("stopped", 1) == 75
    assert exit_code("failed", 0) == 1
    assert exit_code("failed", 2) == 2
    assert exit_code(None, 3) == 3
    assert exit_code(None, -15) == 143


def test_a_dependent_job_asks_for_what_this_one_had_and_keeps_the_lines_of_its_script() -> None:
    job = slurm(f"{RANKS_2_2} JOB_NAME=train JOB_PARTITION=gpu CPUS_PER_TASK=2 GPUS_PER_NODE=a100:2")
    shown = "JobId=7 JobName=train\n   StdErr=/a b/7.err\n   StdIn=/dev/null\n   StdOut=/a b/5%/7.out\n   Power=\n"
    options = resubmission(job, "1-00:00:00", shown)
    assert options[:3] == ["--parsable", "--dependency=afterany:7", "--export=ALL"]
    for wanted in (
        "--nodes=2",
        "--ntasks-per-node=2",
        "--partition=gpu",
        "--gpus-per-node=a100:2",
        "--time=1-00:00:00",
        "--output=/a b/5%%/7.out",
        "--error=/a b/7.err",
        "--open-mode=append",
    ):
        assert wanted in options
    assert not any(option.startswith("--time") for option in resubmission(job, "UNLIMITED", ""))
    script = "#!/bin/bash\n#SBATCH --signal=B:USR1@300\n#SBATCH --array=0-5\n##SBATCH --qos=x\nexec python\n"
    assert (
        dependent_script(script, ["py", "--out", "a b"])
        == "#!/bin/bash\n#SBATCH --signal=B:USR1@300\nexec py --out 'a b'\n"
    )


# --- batch scripts


def test_a_batch_script_asks_for_what_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--sbatch --config digits --nodes 4 --gpus-per-node 8 --cpus-per-rank 12 --time 1-12 --partition gpu"
    assert (
        entry.main([*words.split(), "--modules", "gcc,openmpi", "--venv", "/v", "--launcher", "mpirun", "--seed", "3"])
        == 0
    )
    text = Path("digits.sbatch").read_text()
    for line in ("nodes=4", "ntasks-per-node=8", "cpus-per-task=12", "gpus-per-node=8", "time=1-12", "partition=gpu"):
        assert f"#SBATCH --{line}\n" in text
    assert "#SBATCH --signal=B:USR1@300\n" in text
    assert 'module load gcc openmpi\nexport PATH=/v/bin:"$PATH"\n' in text
    assert text.endswith("\nexec python -m hvdbs.launch --launcher mpirun --config digits --seed 3\n")
    assert subprocess.run(["bash", "-n", "digits.sbatch"], check=False).returncode == 0
    assert entry.main([*words.split(), "--venv", "/other"]) == 2  # would overwrite it


def test_a_sweep_s_batch_script_is_an_array_of_all_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--sbatch", "-", "--configs", "digits,digits-vbs", "--seeds", "1,2,3", "--nodes", "1"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --array=0-5\n#SBATCH --output=%x-%A_%a.out\n" in text
    assert text.endswith("exec python -m hvdbs.launch --configs digits,digits-vbs --seeds 1,2,3\n")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("10", 600), ("10:30", 630), ("1:00:00", 3600), ("1-0", 86400), ("1-12:30", 131400), ("2-0:0:1", 172801)],
)
def test_times_are_read_as_sbatch_reads_them(time: str, seconds: int) -> None:
    assert sbatch.seconds(time) == seconds


@pytest.mark.parametrize("name", ["train", "benchmark", "sweep"])
def test_the_scripts_are_short_and_hand_everything_to_the_launcher(name: str) -> None:
    path = Path(__file__).parents[1] / "slurm" / f"{name}.sbatch"
    lines = path.read_text().splitlines()
    assert len(lines) <= 30
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    assert sum(line.startswith("exec python -m hvdbs.launch ") for line in lines) == 1
    assert lines[-1].endswith('"$@"')


def test_the_launcher_needs_no_torch() -> None:
    program = (
        "import sys, hvdbs.launch.__main__, hvdbs.launch.rendezvous, hvdbs.launch.task; print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


def test_a_launch_is_printed_and_not_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert entry.main(["--hosts", "n[1-2]:2", "--print-command", "--config", "digits", "--out", "runs/a"]) == 0
    said = capsys.readouterr().out
    assert "horovodrun --gloo -np 4 -H n1:2,n2:2" in said
    assert said.endswith("-m hvdbs.train --config digits --out runs/a\n")
    assert entry.main(["--np", "2", "--print-command", "--", "python", "-m", "benchmarks.throughput"]) == 0
    assert capsys.readouterr().out.endswith("-H localhost:2 --disable-cache python -m benchmarks.throughput\n")
