"""What the methods cost beside a plain update: extrapolation by past gradients, and the engine's statistics.

    python -m benchmarks.methods
    python -m benchmarks.methods --cases resnet18:224:8 --accumulation 1
    horovodrun -np 2 python -m benchmarks.methods

The same model in the same process, in turn: a plain update, one with ``extrapolation.direction: local_past`` (one
virtual worker for each rank), and one whose norms are measured, as on about 20 windows of an epoch. Required is at most
1.05 of a plain update, with the upper end of the 95 % interval at 1.08, for extrapolation, and at most 1.05 for the
statistics over an epoch of 200 updates.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import torch

from benchmarks.measure import facts, ratio_interval, write
from benchmarks.throughput import CLASSES, MOMENTUM, SEED, Contender, Hvdbs, samples, seconds_of, updates_for
from hvdbs.assembly import initial_model, settle
from hvdbs.comm import Communicator, connect
from hvdbs.comm.cores import own_cores
from hvdbs.config import Config, DataConfig, ModelConfig, OptimizerConfig
from hvdbs.noise import WINDOWS_PER_EPOCH
from hvdbs.reach import ExtrapolationConfig

EPOCH_UPDATES = 200  # of which WINDOWS_PER_EPOCH are measured


@dataclass(frozen=True)
class Case:
    """A model, the side of its square images in pixels, and samples of a micro-batch."""

    model: str
    image_size: int
    micro_batch: int


# What extrapolation adds is so many bytes of parameters moved for an update, whatever the images are.
CASES = (Case("resnet8", 32, 32), Case("resnet18", 32, 32), Case("resnet18", 224, 8))


def case(text: str) -> Case:
    """Of the command line. Raises argparse.ArgumentTypeError."""
    try:
        model, size, micro = text.split(":")
        return Case(model, int(size), int(micro))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL:PIXELS:SAMPLES, such as resnet18:224:8") from None


class Measured(Hvdbs):
    """Every update with the norms of single micro-batches and whole windows, layer by layer."""

    name = "measured"

    def update(self, accumulation: int) -> None:
        self.run(accumulation, measured=True)


class Extrapolated(Hvdbs):
    """Gradients taken where the past ones point."""

    name = "local_past"


def contenders(config: Config, comm: Communicator) -> list[Contender]:
    batches = samples(config.micro_batch, config.data.image_size, comm.rank)
    past = ExtrapolationConfig(direction="local_past", ratio=0.1, virtual_workers="world_size")
    away = replace(config, extrapolation=past)

    def model() -> torch.nn.Module:
        return initial_model(config, CLASSES, torch.device("cpu"))

    return [
        Hvdbs(model(), config, comm, batches),
        Extrapolated(model(), away, comm, batches),
        Measured(model(), config, comm, batches),
    ]


def verdicts(rows: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each over those of a plain update, with 95 % intervals; the statistics' also over an epoch."""
    found = []
    for key, group in rows.groupby([*Case.__annotations__, "accumulation_steps"], sort=False):
        seconds = group.pivot(index="round", columns="contender", values="seconds")
        for name in ("local_past", "measured"):
            ratio, low, high = ratio_interval(seconds[name], seconds["hvdbs"], seed=SEED)
            share = WINDOWS_PER_EPOCH / EPOCH_UPDATES if name == "measured" else 1.0
            over = [1 + (value - 1) * share for value in (ratio, low, high)]
            row = dict(zip([*Case.__annotations__, "accumulation_steps"], key, strict=True)) | {"contender": name}
            row |= {"ratio": ratio, "low": low, "high": high}
            found.append(row | dict(zip(("over_epoch", "over_low", "over_high"), over, strict=True)))
    return pd.DataFrame(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = f"model, pixels and micro-batch ({' '.join(':'.join(map(str, asdict(c).values())) for c in CASES)})"
    parser.add_argument("--cases", nargs="+", type=case, default=CASES, metavar="MODEL:PIXELS:SAMPLES", help=how)
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=0.3, help="about how long one measurement takes")
    parser.add_argument("--out", type=Path, help="CSV to write; by default the table is only printed")
    args = parser.parse_args()
    comm, rows = connect(), []
    for of in args.cases:
        config = Config(
            seed=SEED,
            micro_batch=of.micro_batch,
            data=DataConfig(image_size=of.image_size),
            model=ModelConfig(name=of.model),
            optimizer=OptimizerConfig(momentum=MOMENTUM, decay_norm_and_bias=True),
        )
        settle(config, own_cores(comm), torch.device("cpu"))
        competing = contenders(config, comm)
        for k in args.accumulation:
            updates = min(updates_for(contender, k, args.seconds, comm) for contender in competing)
            for number in range(args.rounds):
                turn = number % len(competing)
                for contender in [*competing[turn:], *competing[:turn]]:
                    seconds = seconds_of(contender, k, updates, comm) / updates
                    row = asdict(of) | {"accumulation_steps": k, "round": number}
                    rows.append(row | {"contender": contender.name, "updates": updates, "seconds": seconds})
    if comm.rank == 0:
        table = pd.DataFrame(rows)
        print(verdicts(table).to_string(index=False, float_format=lambda v: f"{v:.4g}"), flush=True)
        if args.out:
            write(table, args.out, facts(comm.world_size, comm.backend))
    comm.close()


if __name__ == "__main__":
    main()
