"""Runs of hvdbs.train that a study is made of: each in its folder, once; a study that was stopped goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from hvdbs.command_line import recipe_path
from hvdbs.data import fashion_mnist
from hvdbs.errors import HvdbsError

VAL = fashion_mnist.VAL


@dataclass(frozen=True)
class Study:
    """What all runs share: ``work``, the folder they are in; the data; and on how many ranks (``ranks``) each runs.

    ``samples`` of the training set, the images being in ``data``; ``epochs`` in each of three stages.
    """

    work: Path
    data: Path
    samples: int
    epochs: int
    ranks: int = 1
    threads: int | None = None

    def config(self, seed: int, **changed: Any) -> dict[str, Any]:
        """The recipe fashion-mnist on this data, with whole sections or fields ``changed``."""
        made: dict[str, Any] = yaml.safe_load(recipe_path("fashion-mnist").read_text())
        made["data"] |= {"root": str(self.data), "train_samples": self.samples, "val_samples": VAL}
        made |= {"seed": seed, "evaluation": {"every_epochs": 1, "micro_batch": 250}}
        made |= {"checkpoint": {"every_minutes": 0, "keep_best": False}, "logging": {"tensorboard": False}}
        if self.threads is not None:
            made["threads"] = self.threads
        return made | changed


def prepare(study: Study) -> None:
    """The images, unless they are there; Debian's package is fetched. Raises HvdbsError."""
    if fashion_mnist.write(str(study.data), samples=study.samples):
        print(f"made {study.data}", flush=True)


def command(study: Study, config: Path, out: Path, parent: Path | None) -> list[str]:
    """The command line of a run; ``parent`` is the checkpoint that it branches from."""
    launcher = [] if study.ranks == 1 else ["horovodrun", "-np", str(study.ranks)]
    branch = [] if parent is None else ["--branch-from", str(parent)]
    return [*launcher, sys.executable, "-m", "hvdbs.train", "--config", str(config), "--out", str(out), *branch]


def train(study: Study, name: str, config: dict[str, Any], parent: Path | None = None) -> Path:
    """The folder of the finished run ``name``: done already, or now, anew if it was not finished.

    Raises HvdbsError if it fails, or if one of that name was made from another config.
    """
    out, file, log = (study.work / f"{name}{suffix}" for suffix in ("", ".yaml", ".log"))
    text = yaml.safe_dump(config, sort_keys=False)
    if finished(out):
        if not file.is_file() or file.read_text() != text:
            raise HvdbsError(f"{out}: was made with other options; give another --work, or remove it")
        return out
    study.work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    file.write_text(text)
    begin = time.monotonic()
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with log.open("wb") as output:
        done = subprocess.run(
            command(study, file, out, parent), stdout=output, stderr=subprocess.STDOUT, env=variables, check=False
        )
    if done.returncode or not finished(out):
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise HvdbsError(f"{name}: ended with exit code {done.returncode}: {last} (all of it: {log})")
    print(f"{name:<24}{time.monotonic() - begin:7.0f} s  top-1 {summary(out)['top1']:.4f}", flush=True)
    return out


def finished(out: Path) -> bool:
    """Whether the run came to its end."""
    try:
        return bool(summary(out)["exit_reason"] == "finished")
    except (OSError, ValueError):
        return False


def summary(out: Path) -> dict[str, Any]:
    """summary.json; a branch counts what its parent had done."""
    read: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return read


def history(out: Path, table: str) -> pd.DataFrame:
    """A table of a run by its file's name; of a branch, the parent's rows up to where it left come first."""
    own = pd.read_csv(out / table)
    try:
        parent = json.loads((out / "parent.json").read_text())
    except FileNotFoundError:
        return own
    earlier = history(Path(parent["checkpoint"]).parent.parent, table)
    clock = "samples_end" if table == "stages.csv" else "samples_seen"
    return pd.concat([earlier[earlier[clock] <= parent["samples_seen"]], own], ignore_index=True)


def first_stage(study: Study, seed: int, schedule: dict[str, Any]) -> Path:
    """The checkpoint at the end of stage 1 of the vbs ``schedule`` in mode band, which all others branch from.

    The second stage is one window: the engine measures only where a stage follows.
    """
    end = study.samples * study.epochs
    step = -(-end // schedule["global_batch"])
    short = schedule | {"stage_samples": [end, 1], "autotune": {"mode": "band"}}
    saved = {"every_samples": end, "every_minutes": 0, "keep_last": 3, "keep_best": False}
    out = train(study, f"stage-1-{seed}", study.config(seed, schedule=short, checkpoint=saved))
    return out / "checkpoints" / f"step-{step}"
