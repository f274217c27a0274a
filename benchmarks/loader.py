"""Images per second, CPU time and memory of our two sources, DALI's own file reader and torch's DataLoader.

    python -m benchmarks.loader
    python -m benchmarks.loader --rounds 5 --append       five rounds more in the same CSV

Each source lives in a process of its own, on the same cores. A round measures each in turn, for a few seconds after a
warm-up, in an order that changes by round; meanwhile the others stand still, their queues full. The verdict is on the
ratio of rates of the same round. benchmarks/README.md explains the columns.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from benchmarks import photographs
from benchmarks.measure import facts, ratio_interval, write
from benchmarks.sources import OURS, REFERENCE, SOURCES, Batches, Setting

REQUIRED = 0.9  # of the reference's rate; lower end of the 95 % interval
SEED = 0


@dataclass(frozen=True)
class Spell:
    """One measurement: ``cpu_seconds`` of all processes of the source meanwhile."""

    images: int
    seconds: float
    cpu_seconds: float


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time that ``process`` and all below it have used so far."""
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def memory(rollup: str) -> int:
    """Bytes of a process's own from the text of its smaps_rollup: anonymous and shared memory, PSS.

    PSS counts a page that n processes share 1/n. Pages of files are left out: they are the code of torch and DALI,
    which all sources that run at the same time share, and the system's to give back.
    """
    lines = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
    return 1024 * sum(int(lines[key].split()[0]) for key in ("Pss_Anon", "Pss_Shmem"))


def memory_of_all(process: psutil.Process) -> int:
    """The sum over ``process`` and all below it; what ends meanwhile counts nothing."""
    total = 0
    for p in (process, *process.children(recursive=True)):
        try:
            total += memory(Path(f"/proc/{p.pid}/smaps_rollup").read_text())
        except OSError:
            continue
    return total


def spell(batches: Batches, seconds: float, least: int) -> Spell:
    """At least ``least`` batches and about ``seconds``, from the end of one batch to the end of another."""
    process = psutil.Process()
    images, cpu, begin = 0, cpu_seconds(process), time.perf_counter()
    for count in itertools.count(1):
        images += len(next(batches)[1])
        took = time.perf_counter() - begin
        if took >= seconds and count >= least:
            return Spell(images, took, cpu_seconds(process) - cpu)
    raise AssertionError("unreachable")


def serve(name: str, setting: Setting, connection: Connection) -> None:
    """In a process of its own: a warm-up and a measurement for each (seconds, seconds) that comes; None ends it."""
    batches = SOURCES[name](setting)
    # What was decoded before the spell must not count: more batches than stand in any source's queues.
    least = 2 * setting.read_ahead + 2 * setting.cores + 2
    while (wanted := connection.recv()) is not None:
        spell(batches, wanted[0], least)
        connection.send(None)
        connection.send(spell(batches, wanted[1], least))
    del batches


class Contender:
    """A source in its process. ``spawn``: nothing is inherited, so memory is its own."""

    def __init__(self, name: str, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(name, setting, theirs), name=name)
        self._process.start()
        theirs.close()
        self._watched = psutil.Process(self._process.pid)

    def measure(self, warm_up: float, seconds: float) -> tuple[Spell, int]:
        """One spell, and the most memory that was seen during its warm-up, when looking costs nothing that counts."""
        self._connection.send((warm_up, seconds))
        most = 0
        while not self._connection.poll(0.1):
            most = max(most, memory_of_all(self._watched))
        self._connection.recv()
        result: Spell = self._connection.recv()
        self._stand_still()
        return result, max(most, memory_of_all(self._watched))

    def _stand_still(self) -> None:
        """Until its queues are full and nothing moves any more, so that the next one has the machine alone."""
        last = -1.0
        while (now := cpu_seconds(self._watched)) - last > 0.01:
            last = now
            time.sleep(0.2)

    def close(self) -> None:
        if self._process.is_alive():
            self._connection.send(None)
        self._process.join(20)
        if self._process.exitcode is None:
            self._process.kill()


def measure(setting: Setting, rounds: range, warm_up: float, seconds: float) -> pd.DataFrame:
    """One row for each round and source."""
    contenders: list[Contender] = []
    rows = []
    try:
        contenders += [Contender(name, setting) for name in SOURCES]
        for contender in contenders:
            contender.measure(0, 0)  # imports, first allocations, queues
        for number in rounds:
            turn = number % len(contenders)
            for contender in [*contenders[turn:], *contenders[:turn]]:
                taken, most = contender.measure(warm_up, seconds)
                rate = taken.images / taken.seconds
                rows.append(
                    {
                        "source": contender.name,
                        "round": number,
                        **asdict(taken),
                        "images_per_second": rate,
                        "images_per_second_per_core": rate / setting.cores,
                        "images_per_cpu_second": taken.images / taken.cpu_seconds,
                        "peak_memory_bytes": most,
                    }
                )
                print(f"round {number}  {contender.name:<28}{rate:8.0f} images/s", file=sys.stderr, flush=True)
    finally:
        for contender in contenders:
            contender.close()
    return pd.DataFrame(rows)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each source: medians, quartiles of the rate, and ours / theirs with its 95 % interval."""
    rates = rows.pivot(index="round", columns="source", values="images_per_second")
    lines = []
    for name, group in rows.groupby("source", sort=False):
        first, third = group.images_per_second.quantile([0.25, 0.75])
        ratio, low, high = ratio_interval(rates[OURS].tolist(), rates[name].tolist(), seed=SEED)
        lines.append(
            {
                "source": name,
                "images/s": group.images_per_second.median(),
                "quartiles": f"{first:.0f}-{third:.0f}",
                "/core": group.images_per_second_per_core.median(),
                "/CPU s": group.images_per_cpu_second.median(),
                "MB": group.peak_memory_bytes.max() / 1e6,
                "ours/theirs": ratio,
                "low": low,
                "high": high,
            }
        )
    order = {name: place for place, name in enumerate(SOURCES)}
    return pd.DataFrame(lines).sort_values("source", key=lambda names: names.map(order), ignore_index=True)


def verdict(ratio: float, low: float, high: float) -> str:
    """What the ratio to the reference says, in one line."""
    answer = "met" if low >= REQUIRED else "missed" if high < REQUIRED else "not decided, more rounds are needed"
    return f"{OURS} / {REFERENCE}: {ratio:.3f} [{low:.3f}, {high:.3f}], required {REQUIRED}: {answer}"


def plot(rows: pd.DataFrame, path: Path) -> None:
    """Every measurement as a point, medians as bars; memory beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(SOURCES)[::-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, width_ratios=(3, 1))
    for place, name in enumerate(names):
        group = rows[rows.source == name]
        colour = "#0072B2" if name.startswith("hvdbs") else "#999999"
        left.barh(place, group.images_per_second.median(), color=colour, alpha=0.6)
        left.plot(group.images_per_second, [place] * len(group), "k.", markersize=3)
        right.barh(place, group.peak_memory_bytes.max() / 1e6, color=colour, alpha=0.6)
    left.set_yticks(range(len(names)), names)
    left.set_xlabel(f"images/s on {rows.cores.iloc[-1]} cores: median (bar), rounds (points)")
    right.set_xlabel("peak memory, MB")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path, default=photographs.DEFAULT, help="made there if they are missing")
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--read-ahead", type=int, default=3, help="batches decoded before they are asked for")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="cores used (default: all)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before each measurement, at least")
    parser.add_argument("--seconds", type=float, default=3.0, help="about how long one measurement takes")
    parser.add_argument("--out", type=Path, help="CSV to write, and a plot beside it; by default only a table is shown")
    parser.add_argument("--append", action="store_true", help="add rounds to the CSV instead")
    args = parser.parse_args()
    corpus = photographs.make(args.photographs)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    setting = Setting(args.photographs, args.micro_batch, args.image_size, args.cores, args.read_ahead, SEED)
    earlier = pd.read_csv(args.out) if args.out and args.append and args.out.exists() else None
    begin = 0 if earlier is None else int(earlier["round"].max()) + 1
    # Another order of samples for each call, so that no file's turn is always the same.
    setting = replace(setting, seed=SEED + begin)
    rows = measure(setting, range(begin, begin + args.rounds), args.warm_up, args.seconds)
    about: dict[str, Any] = {name: value for name, value in asdict(setting).items() if name not in ("root", "cores")}
    about |= {"photographs": len(corpus.sizes), "median_bytes": int(pd.Series(corpus.sizes).median())}
    if args.out:
        write(rows, args.out, about | facts(1, "solo"), append=args.append)
        rows = pd.read_csv(args.out)
        plot(rows, args.out.with_suffix(".png"))
    table = summary(rows)
    print(f"{corpus.described()}; {args.cores} cores, {rows['round'].nunique()} rounds")
    print(table.to_string(index=False, float_format=lambda v: f"{v:.3f}" if v < 10 else f"{v:.0f}"))
    reference = table[table.source == REFERENCE].iloc[0]
    print(verdict(reference["ours/theirs"], reference["low"], reference["high"]))


if __name__ == "__main__":
    main()
