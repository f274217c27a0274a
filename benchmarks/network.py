"""Samples per second over links slower than the machine: each rank in a node of its own, at 100 Mbit/s or 1 Gbit/s.

    python -m benchmarks.network                        root on Linux; elsewhere it says why not, and does nothing

What is timed is the update of a run of hvdbs, with Horovod over TCP (Gloo, MPI as installed, MPI with a ring), its
gradients summed (dense), in half precision (fp16), or exchanged as factors where that is less (hybrid); and PyTorch's
DDP over Gloo on the same links.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks import nodes
from benchmarks.measure import facts, ratio_interval, write

# What runs on which back-end, as contender@accumulation; the last of fc is beyond where its wide layers break even.
ENTRIES = {
    ("gloo", "vgg11"): "dense@1 fp16@1 hybrid@1 ddp@1 alone@1 dense@8 hybrid@8 ddp@8 alone@8",
    ("gloo", "fc"): "dense@1 fp16@1 hybrid@1 ddp@1 alone@1 dense@8 hybrid@8 ddp@8 alone@8 dense@36 hybrid@36",
    ("mpi", "vgg11"): "dense@1 alone@1",
    ("mpi", "fc"): "dense@1 alone@1",
    ("mpi-ring", "vgg11"): "dense@1 hybrid@1 alone@1",
    ("mpi-ring", "fc"): "dense@1 hybrid@1 alone@1",
}
FAR = 1.25  # of the ring bound: from here on an algorithm or a protocol is to blame, not headers
REQUIRED = {"vgg11": 2.3, "fc": 3.0}
LIMIT_SECONDS = 1800


@dataclass(frozen=True)
class Answer:
    """A ratio that something is asked of: median and 95 % interval over rounds, and the least that will do."""

    question: str
    ratio: float
    low: float
    high: float
    least: float

    def __str__(self) -> str:
        met = "met" if self.ratio >= self.least else "missed"
        return f"{self.question}: {self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}], required {self.least:g}: {met}"


def rates(rows: pd.DataFrame, value: str = "samples_per_second", **wanted: object) -> pd.Series:
    """``value`` by round of the rows that are as ``wanted``."""
    for column, is_ in wanted.items():
        rows = rows[rows[column] == is_]
    found: pd.Series = rows.set_index("round")[value].sort_index()
    return found


def compared(question: str, ours: pd.Series, theirs: pd.Series, least: float) -> list[Answer]:
    """One answer, from the rounds that both have; none if there are none."""
    both = ours.index.intersection(theirs.index)
    if both.empty:
        return []
    return [Answer(question, *ratio_interval(ours[both].tolist(), theirs[both].tolist()), least)]


def predicted(rows: pd.DataFrame, accumulation: int) -> float:
    """Speed-up of samples per second by ``accumulation``: k (c(1) + R) / (c(k) + R), with c the seconds of the same
    update without others (alone) and R the ring bound of all gradients; nothing is taken to overlap."""
    dense = rows[(rows.contender == "hvdbs") & (rows.scheme == "dense")]
    bound = float(dense.bound_seconds.iloc[0])

    def alone(k: int) -> float:
        of = rows[(rows.contender == "alone") & (rows.accumulation_steps == k)]
        return float((of.seconds / of.updates).median())

    return accumulation * (alone(1) + bound) / (alone(accumulation) + bound)


def answers(rows: pd.DataFrame, network: str = "100mbit") -> list[Answer]:
    """What is asked of this benchmark, as far as ``rows`` tell."""
    found: list[Answer] = []
    there = rows[rows.network == network]
    for model, of in there.groupby("model", sort=False):
        ours = {"contender": "hvdbs", "accumulation_steps": 1}
        hybrid = rates(of, backend="gloo", scheme="hybrid", **ours)
        dense = [rates(of, backend=name, scheme="dense", **ours) for name in ("gloo", "mpi-ring")]
        fastest = max(dense, key=lambda series: series.median() if len(series) else 0.0)
        batch = of[of.accumulation_steps == 1].global_batch.iloc[0]
        asked = f"{model}, {network}, global batch {batch}: "
        least = REQUIRED.get(str(model), 1.0)
        found += compared(asked + "hybrid over the faster of dense Gloo and ring-tuned MPI", hybrid, fastest, least)
        ddp = rates(of, backend="gloo", contender="ddp", accumulation_steps=1)
        found += compared(asked + "hybrid over DDP", hybrid, ddp, least)
        gloo = of[of.backend == "gloo"]
        for k in sorted(set(gloo.accumulation_steps) - {1}):
            many = rates(gloo, contender="hvdbs", scheme="dense", accumulation_steps=k)
            if k in set(gloo[gloo.contender == "alone"].accumulation_steps):
                model_says = predicted(gloo, k)
                once = rates(gloo, scheme="dense", **ours) * model_says
                asked = f"{model}, {network}, accumulation {k}, dense: of the predicted speed-up of {model_says:.2f}"
                found += compared(asked, many, once, 0.9)
            chosen = rates(gloo, "sent_bytes", scheme="hybrid", accumulation_steps=k, contender="hvdbs")
            if len(chosen) and set(chosen) == set(rates(gloo, "sent_bytes", scheme="dense", accumulation_steps=k,
                                                         contender="hvdbs")):  # fmt: skip
                other = rates(gloo, contender="hvdbs", scheme="hybrid", accumulation_steps=k)
                asked = f"{model}, {network}, accumulation {k}, where hybrid chooses dense: over dense"
                found += compared(asked, other, many, 0.98)
    return found


def far_from_bound(rows: pd.DataFrame) -> list[str]:
    """A line for each network and model where MPI as installed takes much longer than a ring, and what does not."""
    lines = []
    for (model, network), of in rows.groupby(["model", "network"], sort=False):
        times = {}
        for backend in ("mpi", "mpi-ring"):
            own = of[(of.backend == backend) & (of.accumulation_steps == 1)]
            dense, alone = own[own.scheme == "dense"], own[own.contender == "alone"]
            if len(dense) and len(alone):
                spent = (dense.seconds / dense.updates).median() - (alone.seconds / alone.updates).median()
                times[backend] = spent / dense.bound_seconds.iloc[0]
        if times.get("mpi", 0.0) > FAR:
            better = times.get("mpi-ring")
            cure = " ".join(f"{name}={value}" for name, value in nodes.BACKENDS["mpi-ring"].items())
            told = f"; {better:.2f} times with {cure}" if better is not None and better < times["mpi"] else ""
            lines.append(f"{model}, {network}: MPI as installed takes {times['mpi']:.2f} times the ring bound{told}")
    return lines


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians over rounds; ``over_alone``: seconds of an update beyond those of the same update without others."""
    keys = ["model", "network", "accumulation_steps", "backend", "contender", "scheme"]
    each = rows.assign(update_seconds=rows.seconds / rows.updates)
    columns = ["samples_per_second", "update_seconds", "exposed_communication_seconds", "bound_seconds"]
    medians = each.groupby(keys, sort=False)[[*columns, "sent_bytes", "link_bytes"]].median()
    return medians.assign(sent_MB=medians.pop("sent_bytes") / 1e6, link_MB=medians.pop("link_bytes") / 1e6)


def plot(rows: pd.DataFrame, out: Path) -> None:
    """Samples per second for each model and network, one group of bars for each accumulation."""
    from matplotlib.figure import Figure

    shown = rows[rows.contender != "alone"].copy()
    shown["who"] = [
        f"DDP ({b})" if c == "ddp" else f"{s} ({b})"
        for c, s, b in zip(shown.contender, shown.scheme, shown.backend, strict=True)
    ]
    names = list(dict.fromkeys(shown.who))
    panels = list(shown.groupby(["model", "network"], sort=False))
    figure = Figure(figsize=(4.2 * len(panels), 4.4), layout="constrained")
    for index, (key, of) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        steps = [k for k in sorted(set(of.accumulation_steps)) if k in (1, 8)]
        for place, who in enumerate(names):
            own = of[of.who == who].groupby("accumulation_steps").samples_per_second.median()
            at = [
                group + (place - len(names) / 2) * 0.8 / len(names) for group, k in enumerate(steps) if k in own.index
            ]
            axes.bar(at, [own[k] for k in steps if k in own.index], 0.8 / len(names), label=who, color=f"C{place}")
        axes.set_xticks(range(len(steps)), [f"accumulation {k}" for k in steps])
        axes.set_title(" at ".join(key))
        axes.set_ylabel("samples per second")
        if index == 0:
            axes.legend(fontsize="small")
    figure.savefig(out, dpi=110)
    print(f"picture in {out}", flush=True)


def measure(args: argparse.Namespace) -> pd.DataFrame:
    """The rows of all launches, one for each back-end and model."""
    nodes.build(args.np)
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            for backend in args.backends:
                part = Path(folder) / f"{backend}-{model}.csv"
                entries = args.entries or ENTRIES[backend, model].split()
                program = [sys.executable, "-m", "benchmarks.shaped", "--models", model, "--out", str(part)]
                program += ["--networks", *args.networks, "--entries", *entries, "--rounds", str(args.rounds)]
                program += ["--seconds", str(args.seconds), "--micro-batch", str(args.micro_batch)]
                nodes.launch(backend, args.np, program, LIMIT_SECONDS)
                found = pd.read_csv(part).assign(backend=backend)
                found["round"] += args.first_round
                measured.append(found)
                print(table(found).to_string(float_format=lambda v: f"{v:.4g}"), flush=True)
    return pd.concat(measured, ignore_index=True)


def report(rows: pd.DataFrame) -> None:
    for line in [*answers(rows), *far_from_bound(rows)]:
        print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vgg11", "fc"])
    parser.add_argument(
        "--networks", nargs="+", default=["1gbit", "100mbit"], help="rates of the links, as tc has them"
    )
    parser.add_argument("--backends", nargs="+", default=list(nodes.BACKENDS), choices=list(nodes.BACKENDS))
    parser.add_argument("--entries", nargs="+", help="contender@accumulation; by default those of ENTRIES")
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-round", type=int, default=0, help="number of the first round, of a call that adds")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long one measurement takes at least")
    parser.add_argument("--out", type=Path, help="CSV to write, and a PNG beside; by default the table is only printed")
    parser.add_argument("--append", action="store_true", help="add to the CSV instead")
    args = parser.parse_args(argv)
    if not nodes.inside():
        reason = nodes.not_permitted()
        if reason:
            print(f"benchmarks.network: skipped: {reason}", flush=True)
            return 0
        return nodes.enter(sys.orig_argv)
    rows = measure(args)
    if args.out:
        about = {
            name: fact for name, fact in facts(args.np, "").items() if name not in ("threads", "mpi_yields_when_idle")
        }
        write(rows, args.out, about, append=args.append)
        rows = pd.read_csv(args.out)
        plot(rows, args.out.with_suffix(".png"))
    report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
