"""A run that starts from the state of another one, under a config of its own: ``--branch-from``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hvdbs.checkpoint import State
from hvdbs.config import Config, training_fields
from hvdbs.engine import tunes
from hvdbs.errors import HvdbsError

# What the state is of: a branch with another model or optimizer has nothing to start from.
_BOUND = ("model", "dtype", "optimizer.name")


def branch(state: State, config: Config, checkpoint: Path) -> tuple[State, dict[str, Any]]:
    """The ``state`` to start ``config`` from at that sample, and parent.json: where from, and which fields differ.

    Stages up to that of the checkpoint keep what the parent's engine made of them, later ones are decided anew. Raises
    HvdbsError if the state does not fit.
    """
    mine = training_fields(config)
    differ = {
        name: {"parent": state.training.get(name), "branch": mine.get(name)}
        for name in sorted({*state.training, *mine})
        if state.training.get(name) != mine.get(name)
    }
    bound = [name for name in differ if any(f"{name}.".startswith(f"{prefix}.") for prefix in _BOUND)]
    if bound:
        name, values = bound[0], differ[bound[0]]
        raise HvdbsError(
            f"--branch-from: {checkpoint} has {name} {values['parent']}, not {values['branch']}; a branch keeps the "
            "model, its dtype and the optimizer"
        )
    if tunes(config) and not state.engine:
        raise HvdbsError(
            f"--branch-from: {checkpoint} holds no measurements for schedule.autotune.mode band; "
            "branch from a run of mode band, or use mode rule"
        )
    engine = dict(state.engine)
    if engine:
        entered = -1 if state.progress.stage is None else state.progress.stage
        engine["tuned"] = {index: row for index, row in engine["tuned"].items() if int(index) <= entered}
    parent = {
        "checkpoint": str(checkpoint.resolve()),
        "step": state.progress.step,
        "samples_seen": state.progress.samples_seen,
        "differs": differ,
    }
    return dataclasses.replace(state, engine=engine), parent
