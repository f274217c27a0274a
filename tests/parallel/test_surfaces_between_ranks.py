"""Known loss surfaces through the real entry, on every rank of the launch: law 1 against NumPy alone, law 4.

Each recipe is shortened to three stages of 30 + 12 + 5 updates whose global batches no micro-batch and no epoch
divides. The reference takes the samples from the source, in whole windows, and everything else from closed forms.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import rig
from entries import EVERY_STEP, STAGES, entry, table
from numpy.typing import NDArray

from hvdbs import surfaces
from hvdbs.batching import MicroBatch
from hvdbs.comm import Communicator
from hvdbs.config import Config
from hvdbs.data.analytic import open_analytic
from hvdbs.schedule import StageConfig

pytestmark = pytest.mark.parallel

RECIPES = ("bowl", "least-squares", "least-squares-normalised", "logistic")
UNTIMED = ("weights.csv", "evals.csv", "decisions.csv", "layers.csv")


class Descent(NamedTuple):
    """Before each update: ``weights`` and ``loss``; afterwards ``last``."""

    weights: list[NDArray[np.float64]]
    losses: list[float]
    last: NDArray[np.float64]


def descent(config: Config) -> Descent:
    """SGD with heavy-ball momentum u <- m u + g + d w, w <- w - lr u, one whole window at a time."""
    source, surface = open_analytic(config), config.data.analytic
    normalised = config.model.name == "normalised_linear"
    w = surfaces.start(surface, normalised)
    velocity, begin, weights, losses = np.zeros_like(w), 0, [], []
    for stage in STAGES:
        assert stage.samples
        for _ in range(stage.samples // stage.global_batch):
            (batch,) = source.train([MicroBatch(0, begin, stage.global_batch)])
            x, y = batch.inputs.numpy(), batch.labels.numpy()
            norm = np.linalg.norm(w) if normalised else 1.0
            outputs = x @ (w / norm)
            if surface.surface == "logistic":
                loss = np.log1p(np.exp(-y * outputs)).mean()
                gradient = -(x.T @ (y / (1 + np.exp(y * outputs)))) / len(y)
            else:
                loss = ((outputs - y) ** 2).mean() / 2
                gradient = x.T @ (outputs - y) / len(y)
            if normalised:
                gradient = (gradient - (gradient @ w) * w / norm**2) / norm
            weights.append(w)
            losses.append(float(loss))
            velocity = config.optimizer.momentum * velocity + gradient + stage.weight_decay * w
            w = w - stage.lr * velocity
            begin += stage.global_batch
    return Descent(weights, losses, w)


@pytest.mark.parametrize("micro_batch", [200, 7])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_on_a_surface_is_that_of_numpy(
    comm: Communicator, shared: Path, recipe: str, micro_batch: int
) -> None:
    """Law 1, float64: every logged weight and loss, 1e-12 relative to the largest of its update, at any world_size,
    without accumulation and with up to 19 micro-batches in a window; and the gap and distance of every evaluation
    are those of the reference's weights."""
    config = entry(comm, shared / "run", recipe, "--micro_batch", str(micro_batch))
    rows, evaluations = table(shared / "run" / "weights.csv"), table(shared / "run" / "evals.csv")
    plain = descent(config)
    assert len(rows) == len(plain.losses) == 47
    for row, weights, loss in zip(rows, plain.weights, plain.losses, strict=True):
        found = np.array([float(row[f"w{k}"]) for k in range(1, len(weights) + 1)])
        assert np.abs(found - weights).max() < 1e-12 * np.abs(weights).max() + 1e-15
        assert abs(float(row["loss"]) - loss) < 1e-12 * loss
    surface = open_analytic(config).surface
    after = [*plain.weights[1:], plain.last]
    assert len(evaluations) == 9
    for row in evaluations:
        point = after[int(row["step"]) - 1]
        if config.model.name == "normalised_linear":
            point = point / np.linalg.norm(point)
        assert float(row["gap"]) == pytest.approx(surface.gap(point), rel=1e-10, abs=1e-15)
        assert float(row["distance"]) == pytest.approx(surfaces.distance(surface, point), rel=1e-10)
        assert row["top1"] == row["top5"] == ""
    assert float(evaluations[-1]["gap"]) < float(evaluations[0]["gap"])


@pytest.mark.parametrize("recipe", ["bowl", "logistic"])
def test_a_run_on_a_surface_that_is_resumed_ends_in_the_same_bits(
    comm: Communicator, shared: Path, recipe: str
) -> None:
    """Law 4: from a checkpoint inside each stage and at a boundary, with the later rows still in the files: weights,
    losses, gaps and layers of the run that was never stopped, byte for byte; so is the best checkpoint's name."""
    whole = shared / "whole"
    entry(comm, whole, recipe, *EVERY_STEP)
    for step in (7, 30, 36, 44):
        out = shared / f"cut-{step}"
        if comm.rank == 0:
            shutil.copytree(whole, out)
            for later in range(step + 1, 48):
                shutil.rmtree(out / "checkpoints" / f"step-{later}")
            (out / "checkpoints" / "latest").write_text(f"step-{step}\n")
        comm.barrier()
        entry(comm, out, recipe, *EVERY_STEP, "--resume", "auto")
        for name in UNTIMED:
            assert (out / name).read_bytes() == (whole / name).read_bytes(), f"{name} from step {step}"
        assert (out / "checkpoints" / "best").read_text() == (whole / "checkpoints" / "best").read_text()


def test_the_best_checkpoint_is_the_one_with_the_least_gap(comm: Communicator, shared: Path) -> None:
    """With an lr that blows up in the last stage, so that the best is not the last."""
    entry(comm, shared / "run", "bowl", *EVERY_STEP, stages=(*STAGES[:2], StageConfig(131, 2.0, samples=655)))
    evaluations = table(shared / "run" / "evals.csv")
    best = min(evaluations, key=lambda row: float(row["gap"]))
    assert (shared / "run" / "checkpoints" / "best").read_text() == f"step-{best['step']}\n"
    assert best is not evaluations[-1]
    assert rig.everywhere(comm, best["step"]) == [best["step"]] * comm.world_size
