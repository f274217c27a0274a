"""The real entry of training, on every rank of a launch that already runs, and the rows that it writes."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from hvdbs import command_line
from hvdbs.comm import Communicator
from hvdbs.comm.watched import Watched
from hvdbs.config import Config
from hvdbs.pulse import Pulse
from hvdbs.schedule import StageConfig
from hvdbs.step import Requests
from hvdbs.train import _run, parser
from hvdbs.watchdog import Watchdog

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
    pulse, timeout = Pulse(), config.fault.timeout_seconds
    watchdog = Watchdog(pulse, comm.rank, timeout, lambda reason: None)
    try:
        assert _run(Watched(comm, pulse), config, arguments, [], Requests(), pulse, watchdog) == 0
    finally:
        watchdog.close()
    comm.barrier()
    return config


def table(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))
