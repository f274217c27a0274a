"""Horovod's own autotune, run to its end in updates that are thrown away.

It searches (``docs/autotune.rst``, ``horovod/common/parameter_manager.cc`` of 0.28.1) for the most bytes per second:
over fusion threshold and cycle time together, by Bayesian optimisation, then over hierarchical allreduce, hierarchical
allgather, torus allreduce and the response cache, each off and on. What it finds holds for the rest of the process.
Fused tensors are put together as they happen to arrive, so a sum may be added up in another order each time: no two
runs need agree to the last bit. Replicas do, and what is trained is the same up to that order.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from hvdbs.batching import MicroBatch, Window
from hvdbs.comm import AUTOTUNE_LOG, AgreedError, Communicator
from hvdbs.config import Config
from hvdbs.costs import Linear
from hvdbs.data import Batch, Source
from hvdbs.schedule import Decision
from hvdbs.step import Replica, Requests

_SAMPLES = 5  # of which a score is the median; Horovod has no variable for it
_SWITCHES = 4


def most_updates(variables: Mapping[str, str]) -> int:
    """How many a search takes at most, under Horovod's own ``variables``."""
    steps = int(variables.get("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "10"))
    unscored = int(variables.get("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "3"))
    points = int(variables.get("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "20")) + 1
    return _SAMPLES * (steps + 1) * (unscored + points + 2 * _SWITCHES)


def tune(
    model: nn.Module, config: Config, comm: Communicator, source: Source, layers: Sequence[Linear], decision: Decision
) -> tuple[int, dict[str, str]]:
    """Collective. Let Horovod finish its search; how many updates that took, and on rank 0 what it has found.

    ``model``: thrown away, as is all that these updates do; lr is 0 in them. Their window is that of ``decision``, its
    samples those of this rank's first micro-batch, read once. Raises AgreedError if the search does not end.
    """
    replica = Replica(model, config, comm, layers)
    replica.enter_stage()
    replica.choose(decision.global_batch)
    window = Window(0, decision.global_batch, config.micro_batch)
    still = Decision(decision.stage, decision.global_batch, 0.0, 0.0)
    mine = list(window.dealt_to(comm.rank, comm.world_size))
    batches = _again(source, mine)
    log = Path(os.environ[AUTOTUNE_LOG])
    requests, search = Requests(), Search()
    most = most_updates(os.environ)
    for count in range(1, most + 1):
        applied = replica.run(window, still, 0, iter(batches), requests)
        if applied.stop:
            return count, search.found
        requests.stop = comm.rank == 0 and search.over(count, log.read_text())
    raise AgreedError(f"communication.autotune: Horovod's search is not over after {most} updates; autotune: false")


def _again(source: Source, mine: Sequence[MicroBatch]) -> list[Batch]:
    """A batch for each of ``mine``, all cut from the first."""
    if not mine:
        return []
    batches = iter(source.train(iter(mine[:1])))
    first = next(batches)
    if (close := getattr(batches, "close", None)) is not None:
        close()
    return [Batch(first.inputs[: micro.size], first.labels[: micro.size]) for micro in mine]


class Search:
    """Reads off Horovod's log when its search is over: with the last score it writes the best ones a second time."""

    def __init__(self) -> None:
        self._lines = 1  # the header
        self._written_at = 0
        self.found: dict[str, str] = {}

    def over(self, update: int, log: str) -> bool:
        """After ``update``, whether ``log`` has its last line; scores are at least 5 updates apart."""
        lines = log[: log.rfind("\n") + 1].splitlines()
        new = len(lines) - self._lines
        if new < 1:
            return False
        soon = self._written_at > 0 and update - self._written_at < _SAMPLES
        self._lines, self._written_at = len(lines), update
        if new < 2 and not soon:
            return False
        values = next(csv.reader([lines[-1]], skipinitialspace=True))
        self.found = dict(zip(lines[0].split(","), values, strict=True))
        return True
