"""The lr that benchmarks.convergence gives small and large batches: swept on seeds that it does not use.

    python -m benchmarks.tuning --out benchmarks/results/tuning.csv

A runner-up badly tuned would make any claim true. Goes on where it was stopped, as benchmarks.convergence does.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import pandas as pd

from benchmarks import trained
from benchmarks.contenders import methods
from benchmarks.convergence import about, add_study_options, row, study_of
from benchmarks.measure import write
from benchmarks.trained import Study, prepare
from hvdbs.errors import HvdbsError

SEEDS = (101, 102)


def run(study: Study, names: list[str], factors: list[float], seeds: list[int]) -> pd.DataFrame:
    """A row for each method, factor of the lr that it has in benchmarks.contenders, and seed."""
    rows = []
    every = methods(study.samples, study.epochs)
    for seed in seeds:
        for name in names:
            for factor in factors:
                lr = every[name].schedule["lr"] * factor
                method = replace(every[name], schedule=every[name].schedule | {"lr": lr})
                config = study.config(seed, schedule=method.schedule, **method.sections)
                out = trained.train(study, f"{name}-x{factor:g}-{seed}", config)
                rows.append({"lr": lr, "factor": factor} | row(study, name, seed, out))
    return pd.DataFrame(rows)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean top-1 and the same after a third of the samples, in points, for each method and lr."""
    means = rows.groupby(["method", "lr"], sort=False)[["top1", "early_top1"]].mean() * 100
    return means.round(2).reset_index()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name, method in methods(1, 1).items() if not method.branches]
    parser.add_argument("--methods", nargs="+", default=["large", "reference"], choices=known)
    parser.add_argument("--factors", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    add_study_options(parser)
    parser.set_defaults(seeds=list(SEEDS))
    args = parser.parse_args()
    study = study_of(args)
    try:
        prepare(study)
        rows = run(study, args.methods, args.factors, args.seeds)
    except HvdbsError as error:
        print(f"benchmarks.tuning: {error}", file=sys.stderr)
        return 2
    print(table(rows).to_string(index=False))
    if args.out:
        write(rows, args.out, about(study))
    return 0


if __name__ == "__main__":
    sys.exit(main())
