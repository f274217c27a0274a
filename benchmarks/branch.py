"""Second stages of several batches from one first stage: VBS's argument that later epochs bear a larger batch.

    python -m benchmarks.branch --out benchmarks/results/branch.csv
    python -m benchmarks.branch --seeds 1 --samples 2000 --epochs 1 --batches 64 512

After the second figure of Hu, Xiao et al., ISPA 2019, on Fashion-MNIST: each run branches at the end of stage 1 and
trains one more stage. Goes on where it was stopped, as benchmarks.convergence does, and shares its first stages.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import trained
from benchmarks.contenders import DECAY, FIRST, vbs
from benchmarks.convergence import about, add_study_options, study_of
from benchmarks.measure import difference_interval, write
from benchmarks.trained import Study, first_stage, history, prepare, summary
from hvdbs.errors import HvdbsError
from hvdbs.norms import decayed

MODES = ("plain", "off", "rule", "band")


def schedule(study: Study, batch: int, mode: str) -> dict[str, Any]:
    """Two stages, the second of ``batch``. ``plain``: lr and weight decay stay, the batch alone stands for a decay."""
    if mode != "plain":
        return vbs(study.samples, study.epochs, 2, batch, mode)
    return vbs(study.samples, study.epochs, 2, batch, "rule", decay=batch / FIRST)


def run(study: Study, batches: list[int], seeds: list[int], mode: str) -> tuple[pd.DataFrame, ...]:
    """A row for each batch and seed; and all evaluations and layers, those of the first stage included."""
    rows, evaluations, layers = [], [], []
    for seed in seeds:
        parent = first_stage(study, seed, vbs(study.samples, study.epochs, 3, FIRST * 8, "band"))
        for batch in batches:
            config = study.config(seed, schedule=schedule(study, batch, mode))
            out = trained.train(study, f"branch-{mode}-{batch}-{seed}", config, parent)
            total, stage = summary(out), pd.read_csv(out / "stages.csv").iloc[-1]
            rows.append(
                {
                    "mode": mode,
                    "batch": batch,
                    "seed": seed,
                    "top1": total["top1"],
                    "loss": total["loss"],
                    "updates": total["steps"],
                    "stage_updates": int(stage.steps),
                    "lr": stage.lr,
                    "weight_decay": stage.weight_decay,
                    "reduced_bytes": total["reduced_bytes"],
                    "samples": total["samples_seen"],
                }
            )
            evaluations.append(history(out, "evals.csv").assign(batch=batch, seed=seed))
            layers.append(history(out, "layers.csv").assign(batch=batch, seed=seed))
    return pd.DataFrame(rows), pd.concat(evaluations, ignore_index=True), pd.concat(layers, ignore_index=True)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """For each batch: mean top-1, and with two seeds or more its difference from the smallest batch's, in points."""
    first = rows[rows.batch == rows.batch.min()].set_index("seed").top1
    lines = []
    for batch, group in rows.groupby("batch"):
        line = {"batch": batch, "runs": len(group), "top-1": f"{100 * group.top1.mean():.2f}"}
        line |= {
            "updates": round(group.updates.mean()),
            "lr": group.lr.mean(),
            "weight decay": group.weight_decay.mean(),
        }
        ours = group.set_index("seed").top1
        if len(ours) > 1 and batch != rows.batch.min():
            mean, low, high = (100 * value for value in difference_interval(ours.tolist(), first[ours.index].tolist()))
            line["difference"] = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
        lines.append(line)
    return pd.DataFrame(lines).fillna("")


def plot(evaluations: pd.DataFrame, layers: pd.DataFrame, path: Path, boundary: float) -> None:
    """Accuracy over epochs for each batch, and the norm of each weight; ``boundary`` in epochs."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    batches = sorted(evaluations.batch.unique())
    colours = {batch: colormaps["viridis"](at / max(1, len(batches) - 0.7)) for at, batch in enumerate(batches)}
    first = decayed(layers[layers.seed == layers.seed.min()])
    names = list(first.layer.unique())
    columns = 4
    lines = 1 + -(-len(names) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.2 + 2.2 * (lines - 1)), dpi=110, layout="constrained")
    grid = figure.add_gridspec(lines, columns, height_ratios=[1.4, *[1.0] * (lines - 1)])
    score = figure.add_subplot(grid[0, :])
    for batch, colour in colours.items():
        scores = evaluations[evaluations.batch == batch].groupby("epoch").top1.mean()
        score.plot(scores.index, 100 * scores, color=colour, marker=".", label=f"batch {batch}")
    score.axvline(boundary, color="0.6", linewidth=0.8)
    # The first stage climbs far more than batches differ: it may begin below the picture.
    later = 100 * evaluations[evaluations.epoch >= boundary].top1
    score.set_ylim(later.min() - 1, later.max() + 1)
    score.set_ylabel("top-1 accuracy (%)")
    score.legend(fontsize=8)
    for at, name in enumerate(names):
        axis = figure.add_subplot(grid[1 + at // columns, at % columns])
        for batch, colour in colours.items():
            norms = first[(first.batch == batch) & (first.layer == name)].sort_values("epoch")
            axis.plot(norms.epoch, norms.weight_norm, color=colour, linewidth=1)
        axis.axvline(boundary, color="0.6", linewidth=0.8)
        axis.set_title(f"norm of {name}", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.supxlabel("epochs", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[FIRST * 2**k for k in range(7)])
    how = f"what goes with the batch: nothing (plain), a decay of lr by {DECAY} (off), or VBS's rule or band (rule)"
    parser.add_argument("--mode", choices=MODES, default="rule", help=how)
    add_study_options(parser)
    args = parser.parse_args()
    study = study_of(args)
    try:
        prepare(study)
        rows, evaluations, layers = run(study, args.batches, args.seeds, args.mode)
    except HvdbsError as error:
        print(f"benchmarks.branch: {error}", file=sys.stderr)
        return 2
    print(table(rows).to_string(index=False))
    if args.out:
        write(rows, args.out, about(study))
        plot(evaluations, layers, args.out.with_suffix(".png"), float(study.epochs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
