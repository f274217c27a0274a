"""Ranks that share cores: Horovod's cycle time and whether Open MPI yields while it waits, measured.

    python -m benchmarks.sharing

Starts as many ranks as there are cores, once per round for each setting, in an order that changes by round, and
measures hvdbs alone (benchmarks.throughput --alone). ``hvdbs/comm/cores.py`` takes its choice from the table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

from benchmarks.measure import facts, write
from hvdbs.comm.cores import chosen

SETTINGS = [
    ("1", "0"),
    ("1", "1"),
    ("2.5", "1"),
    ("5", "1"),
    ("10", "1"),
]  # cycle in ms, yield; the first: as installed


def launch(backend: str, ranks: int, cycle: str, yields: str, options: list[str]) -> pd.DataFrame:
    """The rows of one job. Raises CalledProcessError, with the job's output printed, if it fails."""
    chosen = {"HOROVOD_CYCLE_TIME": cycle, "OMPI_MCA_mpi_yield_when_idle": yields}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.csv"
        command = ["horovodrun", f"--{backend}", "-np", str(ranks), sys.executable, "-m", "benchmarks.throughput"]
        command += ["--alone", "--out", str(out), *options]
        done = subprocess.run(command, env=os.environ | chosen, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout, done.stderr, file=sys.stderr)
            done.check_returncode()
        return pd.read_csv(out).assign(backend=backend, cycle_milliseconds=cycle, yields=yields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet8", "resnet18"])
    parser.add_argument("--accumulation", nargs="+", default=["1", "4"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--backends", nargs="+", default=["mpi", "gloo"], choices=["mpi", "gloo"])
    parser.add_argument("--out", type=Path, help="CSV to write; by default the table is only printed")
    args = parser.parse_args()
    ranks = len(os.sched_getaffinity(0))
    options = ["--models", *args.models, "--accumulation", *args.accumulation, "--rounds", "2", "--seconds", "0.5"]
    measured = []
    for number in range(args.rounds):
        turn = number % len(SETTINGS)
        for cycle, yields in [*SETTINGS[turn:], *SETTINGS[:turn]]:
            for backend in args.backends:
                if backend == "mpi" or yields == "1":  # Gloo knows no yielding
                    measured.append(launch(backend, ranks, cycle, yields, options).assign(round=number))
    keys = ["backend", "model", "accumulation_steps", "cycle_milliseconds", "yields"]
    table = pd.concat(measured)
    print(table.groupby(keys)["samples_per_second"].median().unstack(["cycle_milliseconds", "yields"]).to_string())
    if args.out:
        columns = [*keys, "world_size", "micro_batch", "round", "updates", "seconds", "samples_per_second"]
        about = {name: fact for name, fact in facts(ranks, "horovod").items() if name not in chosen(1)}
        write(table[columns], args.out, about)


if __name__ == "__main__":
    main()
