"""Trajectories of extrapolation on known loss surfaces, through the real entry, against NumPy.

Every logged weight and loss of 47 updates in three stages; 12 virtual workers, so that 1, 2, 3 and 4 ranks share them.
The reference takes the samples from the source and all else from closed forms; noise has the same keyed draws, whose
scaling is the reference's own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import extrapolation_reference as by_hand
import numpy as np
import pytest
from entries import STAGES, entry, table
from numpy_reference import Rule
from reference import Stage

from hvdbs import surfaces
from hvdbs.batching import MicroBatch
from hvdbs.comm import Communicator
from hvdbs.data.analytic import open_analytic

pytestmark = pytest.mark.parallel

WORKERS = 12
DIRECTIONS = {  # direction, granularity, virtual workers
    "local_past": ("local_past", "window", WORKERS),
    "local_past, one worker": ("local_past", "window", "world_size"),
    "local_past, micro": ("local_past", "micro", WORKERS),
    "global_past": ("global_past", "window", None),
    "same_sample": ("same_sample", "window", WORKERS),
    "same_sample, micro": ("same_sample", "micro", None),
    "noise_uniform": ("noise_uniform", "micro", None),
    "noise_gaussian": ("noise_gaussian", "micro", None),
    "noise_weight": ("noise_weight", "micro", None),
    "noise_filter": ("noise_filter", "micro", None),
}
OPTIMIZERS = {
    "sgd": Rule(),
    "nesterov": Rule(momentum=0.8, nesterov=True),
    "adagrad": Rule("adagrad", reset=True),
    "lars": Rule("lars", momentum=0.9),
}
LOSSES = {"least-squares": by_hand.least_squares, "logistic": by_hand.logistic}
CASES = [("least-squares", "nesterov"), *(("logistic", optimizer) for optimizer in OPTIMIZERS)]


@pytest.mark.parametrize(("recipe", "optimizer"), CASES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_direction_with_every_optimizer_descends_a_surface_as_numpy_does(
    comm: Communicator, shared: Path, direction: str, recipe: str, optimizer: str
) -> None:
    """float64, 1e-12 relative to the largest weight of each update, and of each loss. micro_batch is such that the
    busiest rank accumulates 1, 2 and 3 of them in the three stages, whatever world_size; the last one is short. LARS
    has a trust coefficient of 0.001 beside lr and is given a length."""
    rule, (kind, unit, workers) = OPTIMIZERS[optimizer], DIRECTIONS[direction]
    micro_batch = -(-STAGES[0].global_batch // comm.world_size)
    lars = rule.name == "lars"
    stages = tuple(dataclasses.replace(stage, lr=100 * stage.lr) for stage in STAGES) if lars else STAGES
    ratio, length = (0.0, 0.05) if lars else (0.7, None)
    words = [f"--extrapolation.direction={kind}", f"--extrapolation.granularity={unit}"]
    words.append(f"--extrapolation.ratio={ratio}" if length is None else f"--extrapolation.length={length}")
    words += [] if workers is None else [f"--extrapolation.virtual_workers={workers}"]
    words += [f"--optimizer.name={rule.name}", f"--optimizer.momentum={rule.momentum}"]
    words += [f"--optimizer.nesterov={str(rule.nesterov).lower()}", f"--micro_batch={micro_batch}"]
    config = entry(comm, shared / "run", recipe, *words, stages=stages)

    if comm.rank:
        return
    assert [row["accumulation_steps"] for row in table(shared / "run" / "stages.csv")] == ["1", "2", "3"]
    source = open_analytic(config)
    count = sum(stage.samples or 0 for stage in stages)
    (stream,) = source.train([MicroBatch(0, 0, count)])
    inputs, labels = stream.inputs.numpy(), stream.labels.numpy()
    rules = by_hand.Rules(
        kind,
        unit,
        ratio,
        length,
        workers=comm.world_size if workers == "world_size" else workers or 1,
        optimizer=rule,
        micro_batch=micro_batch,
        seed=config.seed,
    )

    def walk(rules: by_hand.Rules) -> by_hand.Walk:
        plain = tuple(Stage(s.samples or 0, s.global_batch, s.lr or 0.0, s.weight_decay or 0.0) for s in stages)
        start = {"weight": surfaces.start(config.data.analytic, False)[None]}
        loss = LOSSES[recipe]
        return by_hand.train(
            start, lambda x, chosen: loss(x, inputs[chosen], labels[chosen]), range(count), plain, rules
        )

    expected = walk(rules)
    rows = table(shared / "run" / "weights.csv")
    assert len(rows) == len(expected.losses) == 47
    for row, point, loss in zip(rows, expected.before, expected.losses, strict=True):
        weights = point["weight"][0]
        found = np.array([float(row[f"w{k}"]) for k in range(1, len(weights) + 1)])
        assert np.abs(found - weights).max() < 1e-12 * np.abs(weights).max() + 1e-15
        assert abs(float(row["loss"]) - loss) < 1e-12 * loss
    plain = walk(dataclasses.replace(rules, direction="none"))
    away = np.abs(plain.x["weight"] - expected.x["weight"]).max()
    assert away > 1e-7 * np.abs(expected.x["weight"]).max(), "it is the plain method"
