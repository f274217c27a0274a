"""The arguments of hvdbs.train that a launch completes: where the run writes, and from what it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdbs.errors import HvdbsError, refusal
from hvdbs.launch.sweep import run_of_task


def with_run_directory(
    rest: Sequence[str], configs: str | None, seeds: str, variables: Mapping[str, str]
) -> tuple[list[str], Path]:
    """``rest`` with the config and seed of a sweep's task and with --out, and that directory.

    Without --out a job has runs/NAME-JOB, which a requeued job finds again; a sweep's runs are folders in it. Raises
    HvdbsError where there is neither.
    """
    words, name = list(rest), None
    if configs is not None:
        if value_of(words, "--config") is not None:
            raise refusal("--config", value_of(words, "--config"), "does not go with --configs, which names them all")
        chosen, name = run_of_task(configs.split(","), seeds.split(","), variables)
        words = [*chosen, *words]
    folder = value_of(words, "--out")
    job = variables.get("SLURM_ARRAY_JOB_ID", variables.get("SLURM_JOB_ID"))
    if folder is None and job is None:
        raise HvdbsError("--out: none given, and a launched run needs one to be stopped in and resumed from")
    if folder is None:
        folder = f"runs/{variables.get('SLURM_JOB_NAME', 'job')}-{job}"
        if name is None and "SLURM_ARRAY_TASK_ID" in variables:
            folder = f"{folder}-{variables['SLURM_ARRAY_TASK_ID']}"
    if name is not None:
        folder = f"{folder}/{name}"
    return [*_without(words, "--out"), "--out", folder], Path(folder)


def going_on(words: Sequence[str], begun: bool) -> list[str]:
    """``words`` with --resume auto, unless another is given; once a run has ``begun`` it has left its --branch-from."""
    if value_of(words, "--resume") is not None:
        return list(words)
    if begun:
        return [*_without(words, "--branch-from"), "--resume", "auto"]
    return [*words, *([] if value_of(words, "--branch-from") else ["--resume", "auto"])]


def resuming(words: Sequence[str], saved: bool) -> list[str]:
    """``words`` of a run that is started again; once it has ``saved`` a checkpoint it goes on from its newest."""
    if not saved:
        return going_on(words, begun=False)
    return [*_without(_without(words, "--branch-from"), "--resume"), "--resume", "auto"]


def value_of(words: Sequence[str], option: str) -> str | None:
    """What ``option`` is given, as ``--option value`` or ``--option=value``; the last one counts."""
    found = None
    for at, word in enumerate(words):
        if word == option and at + 1 < len(words):
            found = words[at + 1]
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def _without(words: Sequence[str], option: str) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word != option and not word.startswith(f"{option}="):
            kept.append(word)
        skip = not skip and word == option
    return kept
