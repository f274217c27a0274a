"""Which run of a sweep, configs x seeds, a task of a job array is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdbs.errors import HvdbsError, refusal


def count(configs: Sequence[str], seeds: Sequence[str]) -> int:
    """How many runs there are. Raises HvdbsError for two configs of one name, and for what is no seed."""
    names = [Path(config).stem for config in configs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise refusal("--configs", twice, "stands there twice, and its runs would share a directory")
    other = next((seed for seed in seeds if not seed.isdigit()), None)
    if other is not None:
        raise refusal("--seeds", other, "is no seed", "whole numbers such as 1,2,3")
    return len(configs) * len(seeds)


def run_of_task(configs: Sequence[str], seeds: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], str]:
    """Arguments of hvdbs.train and a name for task SLURM_ARRAY_TASK_ID, which counts from 0, seeds fastest.

    Raises HvdbsError outside of an array, for a task beyond the last run, and for two configs of one name.
    """
    runs = count(configs, seeds)
    wanted = f"sbatch --array=0-{runs - 1}"
    task = variables.get("SLURM_ARRAY_TASK_ID", "")
    if not task.isdigit():
        raise HvdbsError(
            f"--configs: {','.join(configs)} with {len(seeds)} seeds is for the tasks of an array; {wanted}"
        )
    if int(task) >= runs:
        rule = f"is beyond the last of {runs} runs, {len(configs)} configs x {len(seeds)} seeds"
        raise refusal("SLURM_ARRAY_TASK_ID", task, rule, wanted)
    at, seed = divmod(int(task), len(seeds))
    return ["--config", configs[at], "--seed", seeds[seed]], f"{Path(configs[at]).stem}-seed{seeds[seed]}"
