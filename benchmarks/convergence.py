"""The methods head to head on Fashion-MNIST: accuracy, updates, communication; paired over seeds.

    python -m benchmarks.convergence --out benchmarks/results/convergence.csv
    python -m benchmarks.convergence --seeds 1 2 --samples 2000 --epochs 1 --methods reference large

Every run is hvdbs.train in a folder of its own under --work; stop it when you like and call it again: finished runs are
skipped, and a run that was under way starts anew. With --append seeds come in portions, on several machines or days:
what --out has already is kept, not run again, and counts in the report.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import trained
from benchmarks.claims import CLAIMS, Comparison, answered, intervals
from benchmarks.contenders import Method, methods
from benchmarks.measure import facts, write
from benchmarks.trained import Study, first_stage, history, prepare, summary
from hvdbs.errors import HvdbsError, refusal

_COLOURS = (
    "#000000", "#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#999999", "#8B4513", "#7F3FBF",
)  # fmt: skip


def row(study: Study, name: str, seed: int, out: Path) -> dict[str, Any]:
    """What is kept of a finished run. ``early_top1``: at the first evaluation after a third of the samples."""
    total, evals, stages = summary(out), history(out, "evals.csv"), history(out, "stages.csv")
    third = study.samples * study.epochs
    early = float(evals[evals.samples_seen >= third].top1.iloc[0])
    return {
        "method": name,
        "seed": seed,
        "top1": total["top1"],
        "early_top1": early,
        "later_gain": total["top1"] - early,
        "updates": total["steps"],
        "collectives": total["collectives"],
        "reduced_bytes": total["reduced_bytes"],
        "samples": total["samples_seen"],
        "seconds": total["seconds"],
        "largest_batch": int(stages.global_batch.max()),
        "largest_weight_decay": float(stages.weight_decay.max()),
        "last_lr": float(stages.lr.iloc[-1]),
        "last_weight_decay": float(stages.weight_decay.iloc[-1]),
    }


Done = tuple[pd.DataFrame, pd.DataFrame]  # a row for each run; all their evaluations
NOTHING: Done = (pd.DataFrame({"method": [], "seed": []}), pd.DataFrame())


def earlier(study: Study, out: Path | None) -> Done:
    """What ``out`` and the evaluations beside it hold. Raises HvdbsError if they are of another study."""
    if out is None or not out.exists():
        return NOTHING
    rows = pd.read_csv(out)
    for column, value in setting(study).items():
        if not (rows[column] == value).all():
            rule = f"holds rows with {column} {rows[column].iloc[0]}, not {value}"
            raise refusal("--append", out, rule, "another --out")
    return rows, pd.read_csv(evaluations_of(out))


def evaluations_of(out: Path) -> Path:
    return out.with_name(f"{out.stem}-evals.csv")


def run(study: Study, chosen: dict[str, Method], seeds: list[int], done: Done = NOTHING) -> Done:
    """What is not ``done`` yet of each method and seed. Seeds come one after another: pairs early."""
    rows, evaluations = [], []
    known = set(zip(done[0].method, done[0].seed, strict=True))
    for seed in seeds:
        for name, method in chosen.items():
            if (name, seed) in known:
                continue
            parent = first_stage(study, seed, method.schedule) if method.branches else None
            config = study.config(seed, schedule=method.schedule, **method.sections)
            out = trained.train(study, f"{name}-{seed}", config, parent)
            rows.append(row(study, name, seed, out))
            evaluations.append(history(out, "evals.csv").assign(method=name, seed=seed))
    return pd.DataFrame(rows), pd.concat(evaluations, ignore_index=True) if evaluations else pd.DataFrame()


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """For each method: mean and deviation of top-1 in points, and the means of what it took."""
    lines = []
    for name, group in rows.groupby("method", sort=False):
        deviation = 100 * group.top1.std(ddof=1)
        lines.append(
            {
                "method": name,
                "runs": len(group),
                "top-1": f"{100 * group.top1.mean():.2f}" + (f" +- {deviation:.2f}" if len(group) > 1 else ""),
                "after 1/3": f"{100 * group.early_top1.mean():.2f}",
                "updates": round(group.updates.mean()),
                "collectives": round(group.collectives.mean()),
                "MB reduced": round(group.reduced_bytes.mean() / 1e6, 1),
                "samples": round(group.samples.mean()),
                "seconds": f"{group.seconds.mean():.0f} +- {group.seconds.std(ddof=0):.0f}",
            }
        )
    return pd.DataFrame(lines)


def weight_decay_moved(rows: pd.DataFrame) -> float | None:
    """The largest factor between the weight decays of vbs-band and vbs-rule of one seed, >= 1; None without both."""
    column = "largest_weight_decay"
    band, rule = (rows[rows.method == f"vbs-{mode}"].set_index("seed")[column] for mode in ("band", "rule"))
    ratios = (band / rule).dropna()
    return None if ratios.empty else float(pd.concat([ratios, 1 / ratios]).max())


def report(rows: pd.DataFrame) -> str:
    """The table, every method against the reference, and the claims, as text."""
    parts = [table(rows).to_string(index=False)]
    others = [name for name in rows.method.unique() if name != "reference"]
    against = intervals(rows, tuple(Comparison(name, "within", "reference") for name in others))
    if not against.empty:
        shown = against.drop(columns=["is", "in"]).rename(columns={"answer": "within 0.3 points"})
        parts.append(shown.to_string(index=False, float_format=lambda value: f"{100 * value:+.2f}"))
    for claim in CLAIMS:
        answer, lines = answered(claim, rows)
        parts.append("\n  ".join([f"{claim.text}: {answer}", *lines]))
    if (moved := weight_decay_moved(rows)) is not None:
        enough = "more" if moved > 1.2 else "not more"
        parts.append(f"vbs-band's weight decay differs from vbs-rule's by up to {moved:.2f}x: {enough} than 1.2x")
    return "\n\n".join(parts)


def plot(evaluations: pd.DataFrame, path: Path) -> None:
    """Accuracy against samples and against updates: means over seeds, and from the worst to the best."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    labels = {"samples_seen": "training samples seen", "step": "updates, each one round of reductions"}
    for axis, (clock, label) in zip(axes, labels.items(), strict=True):
        for colour, (name, group) in zip(_COLOURS, evaluations.groupby("method", sort=False), strict=False):
            scores = 100 * group.groupby(clock).top1.agg(["mean", "min", "max"])
            axis.plot(scores.index, scores["mean"], color=colour, label=name, marker=".", markersize=4, linewidth=1.2)
            axis.fill_between(scores.index, scores["min"], scores["max"], color=colour, alpha=0.12, linewidth=0)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[1].set_xscale("log")
    ends = 100 * evaluations.groupby(["method", "seed"]).top1.last()  # the first epochs would leave them no room
    axes[0].set_ylim(bottom=max(0.0, ends.min() - 5), top=100 * evaluations.top1.max() + 1)
    axes[0].set_ylabel("top-1 accuracy (%)")
    axes[1].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def add_study_options(parser: argparse.ArgumentParser) -> None:
    """The options that make a Study."""
    parser.add_argument("--samples", type=int, default=20_000, help="training images (20,000); all for 60,000")
    parser.add_argument("--epochs", type=int, default=4, help="epochs in each stage (4)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--np", type=int, default=1, help="ranks of a run; 1: one process, without a launcher")
    parser.add_argument("--threads", type=int, help="CPU threads of a rank's tensor operations")
    parser.add_argument("--data", type=Path, help="the images, made there if missing (data/fashion-mnist-<samples>)")
    parser.add_argument("--work", type=Path, help="where the runs go (runs/convergence-<samples>-<epochs>)")
    parser.add_argument("--out", type=Path, help="CSV to write, and plots beside it; by default nothing but the table")


def study_of(args: argparse.Namespace) -> Study:
    data = args.data or Path(f"data/fashion-mnist-{args.samples}")
    work = args.work or Path(f"runs/convergence-{args.samples}-{args.epochs}")
    return Study(work, data, args.samples, args.epochs, args.np, args.threads)


def setting(study: Study) -> dict[str, int]:
    return {"train_samples": study.samples, "stage_epochs": study.epochs}


def about(study: Study) -> dict[str, Any]:
    return setting(study) | facts(study.ranks, "solo" if study.ranks == 1 else "horovod")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(methods(1, 1))
    parser.add_argument("--methods", nargs="+", default=known, choices=known, metavar="METHOD", help=", ".join(known))
    parser.add_argument("--append", action="store_true", help="keep the rows of --out and run what they lack")
    add_study_options(parser)
    args = parser.parse_args()
    study = study_of(args)
    try:
        prepare(study)
        every = methods(study.samples, study.epochs)
        done = earlier(study, args.out if args.append else None)
        new = run(study, {name: every[name] for name in args.methods}, args.seeds, done)
    except HvdbsError as error:
        print(f"benchmarks.convergence: {error}", file=sys.stderr)
        return 2
    rows, evaluations = (
        pd.concat([part for part in parts if not part.empty], ignore_index=True)
        for parts in zip(done, new, strict=True)
    )
    print(report(rows))
    if args.out:
        write(new[0], args.out, about(study), append=args.append)
        evaluations.to_csv(evaluations_of(args.out), index=False)
        plot(evaluations, args.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
