"""SEBS's theory on a surface that is known: least squares, where F(w) - F* is exact at every step.

    python -m benchmarks.theory

* The best batch of one stage: batches are swept at equal samples C from several distances D to the minimiser. The mean
  gap over a stage is bounded by D^2 b / (2 lr C) + lr s^2 / (2 b) up to constants that both terms share, with s^2 the
  variance of one sample's gradient: least at b* = lr s sqrt(C) / D. So log b_best falls by 1 for each 1 of log D.
* Stages: SEBS and classical stagewise SGD over the same samples, from the batch and the number of updates that the
  theory gives; the gap at the end of each stage, the updates so far, and what the exact second moments predict.

Every run is one of ``hvdbs.train`` on its own data; D is 16, all eigenvalues are 1, labels alone are noise.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from benchmarks.measure import facts, write
from hvdbs import train
from hvdbs.config import DataConfig
from hvdbs.surfaces import AnalyticConfig, quadratic

DIMENSION = 16  # every batch is a multiple of it
NOISE = 1.0  # standard deviation of a label; that of a sample's gradient is its 2-norm over all weights:
GRADIENT_NOISE = NOISE * DIMENSION**0.5
LR = 0.25
BATCHES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
DISTANCES = (1.0, 2.83, 8.0)
SWEEP_SAMPLES = 65_536
GROWTH, STAGES = 4, 5
STAGE_UPDATES = round(4 * GROWTH / LR)  # M = 4 rho / (mu alpha lr), with mu = alpha = 1
STAGE_DISTANCE = 2.0  # of the start: a gap of D^2 / 2
FIRST_BATCH = round(2 * GROWTH * LR * GRADIENT_NOISE**2 / (STAGE_DISTANCE**2 / 2))  # 2 rho lr s^2 / gap


def surface(distance: float) -> dict[str, Any]:
    return {
        "surface": "least_squares",
        "dimension": DIMENSION,
        "label_noise": NOISE,
        "distance": distance,
        "inputs": "in_turn",
    }


def gaps(schedule: dict[str, Any], distance: float, seed: int, samples: int) -> pd.DataFrame:
    """F(w) - F* before each update of a run, with stage and samples_seen."""
    config = {
        "seed": seed,
        "micro_batch": 1024,
        "dtype": "float64",
        "device": "cpu",
        "threads": 1,
        "data": {"kind": "analytic", "analytic": surface(distance), "train_samples": samples, "val_samples": 16},
        "model": {"name": "linear"},
        "optimizer": {"momentum": 0.0},
        "schedule": schedule,
        "evaluation": {"every_epochs": 0},
        "checkpoint": {"every_minutes": 0},
        "logging": {"every_steps": 1, "tensorboard": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "config.yaml", Path(folder) / "run"
        path.write_text(yaml.safe_dump(config))
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = train.main(["--config", str(path), "--out", str(out)])
        if code:
            raise RuntimeError(said.getvalue())
        rows = pd.read_csv(out / "weights.csv")
        summary = yaml.safe_load((out / "summary.json").read_text())
    exact = quadratic(DataConfig(analytic=AnalyticConfig(**surface(distance))).analytic)
    weights = rows[[f"w{k}" for k in range(1, DIMENSION + 1)]].to_numpy()
    rows = rows[["step", "samples_seen", "stage"]].assign(gap=[exact.gap(w) for w in weights])
    last = {
        "step": summary["steps"] + 1,
        "samples_seen": samples,
        "stage": rows.stage.iloc[-1] + 1,
        "gap": summary["gap"],
    }
    return pd.concat([rows, pd.DataFrame([last])], ignore_index=True)


def sweep(seeds: int) -> pd.DataFrame:
    """The mean gap over a stage for every distance, batch and seed."""
    rows = []
    for seed in range(seeds):
        for distance in DISTANCES:
            for batch in BATCHES:
                schedule = {"method": "constant", "samples": SWEEP_SAMPLES, "global_batch": batch, "lr": LR}
                mean = gaps(schedule, distance, seed, SWEEP_SAMPLES).gap[:-1].mean()
                rows.append({"part": "sweep", "seed": seed, "distance": distance, "global_batch": batch, "gap": mean})
    return pd.DataFrame(rows)


def best_batch(batches: Sequence[float], means: Sequence[float]) -> float:
    """Where a parabola through the least of ``means`` and its neighbours, all logarithms, has its minimum."""
    x, y = np.log(np.asarray(batches)), np.log(np.asarray(means))
    at = min(max(int(np.argmin(y)), 2), len(x) - 3)
    a, b, _ = np.polyfit(x[at - 2 : at + 3], y[at - 2 : at + 3], 2)
    return float(np.exp(-b / (2 * a)))


def predicted_batch(distance: float) -> float:
    """b* = lr s sqrt(C) / D."""
    return LR * GRADIENT_NOISE * SWEEP_SAMPLES**0.5 / distance


def slope(rows: pd.DataFrame) -> tuple[float, pd.DataFrame]:
    """Of log b_best over log D, and b_best of each distance beside b*, from the means over seeds."""
    found = []
    for distance, group in rows.groupby("distance"):
        means = group.groupby("global_batch").gap.mean()
        best = best_batch(list(means.index), list(means))
        found.append({"distance": distance, "b_best": best, "b_star": predicted_batch(float(distance))})
    table = pd.DataFrame(found)
    return float(np.polyfit(np.log(table.distance), np.log(table.b_best), 1)[0]), table


def staged(seeds: int) -> pd.DataFrame:
    """The gap at the end of each stage of SEBS and of classical stagewise SGD, over the same samples."""
    first = STAGE_UPDATES * FIRST_BATCH
    samples = sum(first * GROWTH**index for index in range(STAGES))
    rows = []
    for method in ("sebs", "classical"):
        schedule = {
            "method": method,
            "stage_samples": [first],
            "stage_count": STAGES,
            "growth": GROWTH,
            "global_batch": FIRST_BATCH,
            "lr": LR,
        }
        expected = second_moments(method)
        for seed in range(seeds):
            log = gaps(schedule, STAGE_DISTANCE, seed, samples)
            for stage in range(STAGES):
                end = log[log.stage > stage].iloc[0]  # the weights before the first update of the next stage
                row = {"part": "stages", "seed": seed, "method": method, "stage": stage, "updates": end.step - 1}
                rows.append(row | {"gap": end.gap, "expected_gap": expected[stage]})
    return pd.DataFrame(rows)


def second_moments(method: str) -> list[float]:
    """E[F(w) - F*] at the end of each stage: m <- (1 - lr)^2 m + lr^2 s^2 / b in each update, for m = E |w - w*|^2."""
    moment, found = STAGE_DISTANCE**2, []
    for stage in range(STAGES):
        grown = GROWTH**stage
        batch, lr = (FIRST_BATCH * grown, LR) if method == "sebs" else (FIRST_BATCH, LR / grown)
        for _ in range(STAGE_UPDATES * FIRST_BATCH * grown // batch):
            moment = (1 - lr) ** 2 * moment + lr**2 * GRADIENT_NOISE**2 / batch
        found.append(moment / 2)
    return found


def plot(rows: pd.DataFrame, out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    swept = rows[rows.part == "sweep"]
    for distance, group in swept.groupby("distance"):
        means = group.groupby("global_batch").gap.mean()
        (line,) = left.plot(means.index, means, "o-", markersize=3, label=f"D = {distance:g}")
        left.axvline(predicted_batch(float(distance)), color=line.get_color(), linestyle=":", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="global batch (samples)", ylabel="mean gap over the stage")
    left.legend(frameon=False, title="dotted: b* of the theory")
    stages = rows[rows.part == "stages"].groupby(["method", "stage"])[["gap", "updates"]].mean().reset_index()
    for method, group in stages.groupby("method"):
        right.plot(group.updates, group.gap, "o-", markersize=4, label=str(method))
    right.set(xscale="log", yscale="log", xlabel="updates", ylabel="gap at the end of each stage")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--sweep-seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="CSV to write; by default tables are only printed")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    args = parser.parse_args()
    rows = pd.concat([sweep(args.sweep_seeds), staged(args.seeds)], ignore_index=True)
    found, table = slope(rows[rows.part == "sweep"])
    print(table.to_string(index=False, float_format=lambda v: f"{v:.4g}"))
    print(f"slope of log b_best over log D: {found:.3f} (theory: -1)\n")
    stages = rows[rows.part == "stages"].groupby(["method", "stage"])
    means = stages[["updates", "gap", "expected_gap"]].mean()
    print(means.assign(standard_error=stages.gap.sem()).to_string(float_format=lambda v: f"{v:.4g}"))
    if args.out:
        write(rows, args.out, facts(1, "solo"))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
