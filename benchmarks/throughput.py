"""Samples per second of whole updates, against the loops that a person would write instead.

    python -m benchmarks.throughput                        one rank: hvdbs against a bare PyTorch loop
    horovodrun -np 2 python -m benchmarks.throughput       two: against hvd.DistributedOptimizer and PyTorch DDP (Gloo)

All contenders train the same model on the same samples in the same processes, in turn, so that they share threads,
Horovod's cycle time and MPI's yielding; each is the fast form of its kind. Every round measures every contender at
every accumulation, in an order that changes by round, and the verdict is on the ratio pair by pair.
"""

from __future__ import annotations

import argparse
import itertools
import socket
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Protocol

import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.measure import facts, ratio_interval, write
from hvdbs.assembly import initial_model, settle
from hvdbs.batching import Window
from hvdbs.comm import Communicator, connect
from hvdbs.comm.cores import own_cores
from hvdbs.config import Config, DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig
from hvdbs.costs import Linear
from hvdbs.data import Batch
from hvdbs.schedule import Decision
from hvdbs.step import Applied, Replica, Requests

LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-4
CLASSES = 10
REQUIRED = 0.97  # lower end of the 95 % interval of ours / theirs
SEED = 0


class Contender(Protocol):
    """One way to train. ``name`` stands in the CSV."""

    name: str

    def update(self, accumulation: int) -> None:
        """Collective. One optimizer update from ``accumulation`` micro-batches of this rank."""
        ...


def samples(micro_batch: int, image_size: int, rank: int) -> list[Batch]:
    """Eight micro-batches of noise in memory, this rank's own: reading data is measured elsewhere."""
    generator = torch.Generator().manual_seed(SEED + rank)
    shape = (micro_batch, 3, image_size, image_size)
    return [
        Batch(torch.randn(shape, generator=generator), torch.randint(CLASSES, (micro_batch,), generator=generator))
        for _ in range(8)
    ]


def sgd(model: nn.Module) -> torch.optim.SGD:
    """torch's fastest on a CPU: fused, 5 ms less than its foreach form for a ResNet-18."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True)


class Hvdbs:
    """The step of this package, as its loop calls it: loss, gradient norm, batch-norm statistics and stop flags."""

    name = "hvdbs"

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        comm: Communicator,
        batches: Sequence[Batch],
        layers: Sequence[Linear] = (),
    ) -> None:
        self.replica = Replica(model, config, comm, layers)
        self.chosen_for = 0
        self.micro_batch = config.micro_batch
        self.batches: Iterator[Batch] = itertools.cycle(batches)
        self.requests = Requests()
        self.step = 0

    def update(self, accumulation: int) -> None:
        self.run(accumulation, measured=False)

    def run(self, accumulation: int, *, measured: bool) -> Applied:
        """Collective. One update; ``measured``: with the norms that the noise scale and the engine go by."""
        global_batch = accumulation * self.micro_batch * self.replica.comm.world_size
        if global_batch != self.chosen_for:  # as at a stage boundary
            self.replica.choose(global_batch)
            self.chosen_for = global_batch
        window = Window(0, global_batch, self.micro_batch)
        decision = Decision(0, global_batch, LR, WEIGHT_DECAY)
        self.step += 1
        return self.replica.run(
            window, decision, self.step - 1, self.batches, self.requests, measure=measured, layer_norms=measured
        )


class Bare:
    """The plainest PyTorch loop, for one rank."""

    name = "bare"

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        self.model = model
        self.optimizer = sgd(model)
        self.batches = itertools.cycle(batches)

    def update(self, accumulation: int) -> None:
        self.optimizer.zero_grad()
        for batch in itertools.islice(self.batches, accumulation):
            (F.cross_entropy(self.model(batch.inputs), batch.labels) / accumulation).backward()
        self.optimizer.step()


class HorovodOptimizer:
    """The same loop with ``hvd.DistributedOptimizer``."""

    name = "horovod"

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        import horovod.torch as hvd

        self.model = model
        named = model.named_parameters(prefix=f"{type(model).__name__}{sum(p.numel() for p in model.parameters())}")
        self.optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=named)
        self.batches = itertools.cycle(batches)

    def update(self, accumulation: int) -> None:
        self.optimizer.set_backward_passes_per_step(accumulation)
        self.optimizer.zero_grad()
        for batch in itertools.islice(self.batches, accumulation):
            (F.cross_entropy(self.model(batch.inputs), batch.labels) / accumulation).backward()
        self.optimizer.step()


class Ddp:
    """The same loop with PyTorch's DistributedDataParallel over Gloo and ``no_sync``; buffers are not broadcast."""

    name = "ddp"

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        self.model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
        self.optimizer = sgd(model)
        self.batches = itertools.cycle(batches)

    def update(self, accumulation: int) -> None:
        self.optimizer.zero_grad()
        for index, batch in enumerate(itertools.islice(self.batches, accumulation)):
            with nullcontext() if index == accumulation - 1 else self.model.no_sync():
                (F.cross_entropy(self.model(batch.inputs), batch.labels) / accumulation).backward()
        self.optimizer.step()


def contenders(config: Config, comm: Communicator, batches: Sequence[Batch], alone: bool) -> list[Contender]:
    """Each with a model of its own, of the same initial weights; ``alone``: hvdbs, and nobody to compare it with."""

    def model() -> nn.Module:
        return initial_model(config, CLASSES, torch.device("cpu"))

    ours = Hvdbs(model(), config, comm, batches)
    if alone:
        return [ours]
    if comm.world_size == 1:
        return [ours, Bare(model(), batches)]
    return [ours, HorovodOptimizer(model(), batches), Ddp(model(), batches)]


def join_gloo(comm: Communicator) -> None:
    """Collective. The process group of DDP, over a port that rank 0 finds free on its host."""
    hosts = comm.gather_bytes(socket.gethostname().encode())
    host = "127.0.0.1" if len(set(hosts)) == 1 else socket.gethostbyname(hosts[0].decode())
    store = None
    if comm.rank == 0:
        store = torch.distributed.TCPStore(host, 0, comm.world_size, is_master=True, wait_for_workers=False)
    port = int(comm.broadcast_bytes(str(store.port if store else 0).encode()))
    if store is None:
        store = torch.distributed.TCPStore(host, port, comm.world_size, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)


def seconds_of(contender: Contender, accumulation: int, updates: int, comm: Communicator) -> float:
    """Collective. Seconds for ``updates`` updates of all ranks, none of them ahead of the others at either end."""
    comm.barrier()
    begin = perf_counter()
    for _ in range(updates):
        contender.update(accumulation)
    comm.barrier()
    return perf_counter() - begin


def updates_for(contender: Contender, accumulation: int, seconds: float, comm: Communicator) -> int:
    """Collective. How many updates take about ``seconds``; the same on every rank. Also the warm-up."""
    seconds_of(contender, accumulation, 2, comm)
    took = seconds_of(contender, accumulation, 3, comm) / 3
    return int(comm.broadcast_bytes(str(max(1, round(seconds / took))).encode()))


def measure(
    config: Config, comm: Communicator, accumulations: Sequence[int], rounds: int, seconds: float, alone: bool
) -> list[dict[str, object]]:
    """Collective. One row per round, contender and accumulation."""
    all_batches = samples(config.micro_batch, config.data.image_size, comm.rank)
    competing = contenders(config, comm, all_batches, alone)
    updates = {k: min(updates_for(c, k, seconds, comm) for c in competing) for k in accumulations}
    rows: list[dict[str, object]] = []
    for number in range(rounds):
        for k in accumulations:
            turn = number % len(competing)
            for contender in [*competing[turn:], *competing[:turn]]:
                took = seconds_of(contender, k, updates[k], comm)
                count = updates[k] * k * config.micro_batch * comm.world_size
                rows.append(
                    {
                        "model": config.model.name,
                        "world_size": comm.world_size,
                        "accumulation_steps": k,
                        "micro_batch": config.micro_batch,
                        "contender": contender.name,
                        "round": number,
                        "updates": updates[k],
                        "seconds": took,
                        "samples_per_second": count / took,
                    }
                )
    return rows


def verdicts(rows: pd.DataFrame) -> pd.DataFrame:
    """ours / theirs for each model, world_size, accumulation and contender: median and 95 % interval over rounds."""
    found = []
    keys = ["model", "world_size", "accumulation_steps"]
    for key, group in rows.groupby(keys, sort=False):
        rates = group.pivot(index="round", columns="contender", values="samples_per_second")
        for other in [name for name in rates.columns if name != Hvdbs.name]:
            median, low, high = ratio_interval(rates[Hvdbs.name], rates[other], seed=SEED)
            row = dict(zip(keys, key, strict=True))
            ours, theirs = rates[Hvdbs.name].median(), rates[other].median()
            found.append(
                {**row, "against": other, "ours": ours, "theirs": theirs, "ratio": median, "low": low, "high": high}
            )
    return pd.DataFrame(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet8", "resnet18"])
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.3, help="about how long one measurement takes")
    parser.add_argument("--alone", action="store_true", help="measure hvdbs alone")
    parser.add_argument("--out", type=Path, help="CSV to write; by default the table is only printed")
    parser.add_argument("--append", action="store_true", help="add to the CSV instead")
    args = parser.parse_args()
    comm = connect()
    if comm.world_size > 1 and not args.alone:
        join_gloo(comm)
    rows: list[dict[str, object]] = []
    for name in args.models:
        config = Config(
            seed=SEED,
            micro_batch=args.micro_batch,
            data=DataConfig(image_size=args.image_size),
            model=ModelConfig(name=name),
            optimizer=OptimizerConfig(momentum=MOMENTUM, decay_norm_and_bias=True),
            evaluation=EvaluationConfig(every_epochs=0),
        )
        settle(config, own_cores(comm), torch.device("cpu"))
        rows += measure(config, comm, args.accumulation, args.rounds, args.seconds, args.alone)
    if comm.rank == 0:
        table = pd.DataFrame(rows)
        if not args.alone:
            print(verdicts(table).to_string(index=False, float_format=lambda v: f"{v:.4g}"), flush=True)
        if args.out:
            write(table, args.out, facts(comm.world_size, comm.backend), append=args.append)
    comm.close()


if __name__ == "__main__":
    main()
