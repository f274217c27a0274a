"""Back into the queue: the same job by ``scontrol requeue``, or a job that depends on it where that is off."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from hvdbs.errors import HvdbsError

_LIMIT_SECONDS = 60  # for one command of Slurm's

# What was asked for on sbatch's command line is not in the script: as the job's variables tell it.
_OPTIONS = {
    "SLURM_JOB_NAME": "--job-name",
    "SLURM_JOB_PARTITION": "--partition",
    "SLURM_JOB_ACCOUNT": "--account",
    "SLURM_JOB_QOS": "--qos",
    "SLURM_JOB_NUM_NODES": "--nodes",
    "SLURM_NTASKS": "--ntasks",
    "SLURM_NTASKS_PER_NODE": "--ntasks-per-node",
    "SLURM_CPUS_PER_TASK": "--cpus-per-task",
    "SLURM_GPUS_PER_NODE": "--gpus-per-node",
    "SLURM_GPUS_PER_TASK": "--gpus-per-task",
    "SLURM_MEM_PER_NODE": "--mem",
    "SLURM_MEM_PER_CPU": "--mem-per-cpu",
}
_DROPPED = re.compile(r"#SBATCH\s+(--array|-a|--dependency|-d|--parsable|--wait|-W)\b")


def back_into_the_queue(variables: Mapping[str, str], command: Sequence[str]) -> str:
    """Queue this job again, to start anew on the nodes it gets; says how. ``command``: what a dependent job runs.

    Raises HvdbsError if Slurm takes neither.
    """
    job = variables["SLURM_JOB_ID"]
    done, said = _slurm("scontrol", "requeue", job)
    if done:
        return f"job {job} is back in the queue"
    _, script = _slurm("scontrol", "write", "batch_script", job, "-")
    _, limit = _slurm("squeue", "--noheader", f"--jobs={job}", "--format=%l")
    _, shown = _slurm("scontrol", "show", "job", job)
    options = resubmission(variables, limit.strip(), shown)
    done, answer = _slurm("sbatch", *options, text=dependent_script(script, command))
    if not done:
        raise HvdbsError(
            f"scontrol requeue: {job} was refused ({said.strip()}), sbatch too ({answer.strip()}); "
            f"submit it again: {shlex.join(command)}"
        )
    return f"requeueing is off here ({said.strip()}): job {answer.partition(';')[0].strip()} goes on after this one"


def resubmission(variables: Mapping[str, str], time_limit: str, shown: str) -> list[str]:
    """Options of sbatch for a job like this one, to start when this one has ended, which writes on to its files.

    ``time_limit`` as squeue says it, ``shown`` what scontrol shows of the job.
    """
    options = ["--parsable", f"--dependency=afterany:{variables['SLURM_JOB_ID']}", "--export=ALL"]
    options += [f"{option}={variables[name]}" for name, option in _OPTIONS.items() if variables.get(name)]
    if re.fullmatch(r"[\d:-]+", time_limit):
        options.append(f"--time={time_limit}")
    for field, option in (("StdOut", "--output"), ("StdErr", "--error")):
        if file := re.search(rf"^\s*{field}=(.+)$", shown, re.MULTILINE):
            options.append(f"{option}={file.group(1).replace('%', '%%')}")
    return [*options, "--open-mode=append"]


def dependent_script(script: str, command: Sequence[str]) -> str:
    """A batch script with the #SBATCH lines of ``script`` that runs ``command`` in the environment it is given."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH") and not _DROPPED.match(line)]
    return "\n".join(["#!/bin/bash", *lines, f"exec {shlex.join(command)}", ""])


def _slurm(*command: str, text: str | None = None) -> tuple[bool, str]:
    """Whether it succeeded, and what it said."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, done.stdout if done.returncode == 0 else done.stderr or done.stdout
