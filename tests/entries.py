"""The real entry of training, on every rank of a launch that already runs, and the rows that it writes."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from hvdbs import command_line
from hvdbs.comm import Communicator
from hvdbs.config import Config
from hvdbs.schedule import StageConfig
from hvdbs.train import _run, parser

STAGES = (  # 30 + 12 + 5 updates whose global batches no micro-batch and no epoch divides
    StageConfig(50, 0.05, 1e-2, samples=1500),
    StageConfig(77, 0.02, 1e-3, samples=924),
    StageConfig(131, 0.05, samples=655),
)
EVERY_STEP = ("--checkpoint.every_samples", "1", "--checkpoint.keep_last", "100")


def entry(comm: Communicator, out: Path, recipe: str, *more: str, stages: Sequence[StageConfig] = STAGES) -> Config:
    """Collective. ``python -m hvdbs.train`` without its launch: on all ranks here, to the end. Returns the config.

    ``stages``: in place of the recipe's, if there are any.
    """
    rows = json.dumps([dataclasses.asdict(stage) for stage in stages])
    words = ["--config", recipe, *(["--schedule.stages", rows] if stages else []), "--out", str(out)]
    words += [
        "--checkpoint.every_minutes",
        "0",
        "--data.train_samples",
        "331",
        "--data.val_samples",
        "64",
        "--evaluation.every_epochs",
        "1",
    ]
    config, arguments = command_line.parse(parser(), [*words, *more])
    assert _run(comm, config, arguments, []) == 0
    comm.barrier()
    return config


def table(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))
