"""What each rank of benchmarks.network runs in its node: whole updates of hvdbs and of others, over shaped links.

An entry such as ``hybrid@8`` is a contender and its accumulation: dense, fp16 and hybrid are the step of hvdbs under
that scheme or wire, ddp is PyTorch's over Gloo, alone the same loop on this rank's samples, without the others.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from benchmarks import nets, nodes
from benchmarks.throughput import CLASSES, MOMENTUM, SEED, Bare, Contender, Ddp, Hvdbs, join_gloo, samples, seconds_of
from hvdbs.assembly import settle
from hvdbs.comm import Communicator, connect
from hvdbs.config import CommunicationConfig, Config, DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig
from hvdbs.costs import LinkConfig, ring_bytes

SCHEMES = ("dense", "fp16", "hybrid")


class Ours(Hvdbs):
    """Adds up what its updates say of themselves; ``exposed_seconds`` and ``compute_seconds`` of this rank."""

    exposed_seconds = compute_seconds = 0.0

    def update(self, accumulation: int) -> None:
        applied = self.run(accumulation, measured=False)
        self.exposed_seconds += applied.exposed_communication_seconds
        self.compute_seconds += applied.compute_seconds


def config(model: str, scheme: str, micro_batch: int, rate: float, threads: int | None = 1) -> Config:
    """``rate``: what one rank can send, in bytes per second, which hybrid goes by."""
    link = LinkConfig() if rate == float("inf") else LinkConfig(bytes_per_second=rate)
    return Config(
        seed=SEED,
        micro_batch=micro_batch,
        threads=threads,
        data=DataConfig(image_size=32),
        model=ModelConfig(name=model),
        optimizer=OptimizerConfig(momentum=MOMENTUM, decay_norm_and_bias=True),
        communication=CommunicationConfig(
            scheme="hybrid" if scheme == "hybrid" else "dense", wire="fp16" if scheme == "fp16" else "none", link=link
        ),
        evaluation=EvaluationConfig(every_epochs=0),
    )


class Entrant:
    """A contender at some accumulations, and the bytes that one rank sends in an update by the formulas."""

    def __init__(
        self,
        name: str,
        model_name: str,
        accumulations: Sequence[int],
        micro_batch: int,
        rate: float,
        comm: Communicator,
    ) -> None:
        chosen = config(model_name, name, micro_batch, rate)
        settle(chosen, 1, torch.device("cpu"))
        batches = samples(micro_batch, 32, comm.rank)
        model = nets.build(chosen, CLASSES)
        ranks = comm.world_size
        windows = {k: k * micro_batch * ranks for k in accumulations}
        layers = nets.factor_layers(chosen, CLASSES, list(windows.values()), ranks)
        self.name = name
        self.accumulations = accumulations
        self.sent = {k: nets.sent_bytes(model, chosen, layers, b, ranks) for k, b in windows.items()}
        self.contender: Contender
        if name in SCHEMES:
            self.contender = Ours(model, chosen, comm, batches, layers)
        elif name == "ddp":
            self.sent = dict.fromkeys(accumulations, ring_bytes(sum(p.nbytes for p in model.parameters()), ranks))
            self.contender = Ddp(model, batches)
        else:
            self.sent = dict.fromkeys(accumulations, 0.0)
            self.contender = Bare(model, batches)


def measure(
    model: str, network: str, entries: Sequence[str], rounds: int, seconds: float, micro_batch: int, comm: Communicator
) -> list[dict[str, object]]:
    """Collective. One row per round and entry; all of an entry's updates in a row, about ``seconds`` of them."""
    rate = nodes.bytes_per_second(network)
    accumulations: dict[str, list[int]] = {}
    for entry in entries:
        name, _, steps = entry.partition("@")
        accumulations.setdefault(name, []).append(int(steps or 1))
    entrants = [Entrant(name, model, steps, micro_batch, rate, comm) for name, steps in accumulations.items()]
    reshape("none", comm)  # connections and memory are made before the clock runs
    once = {it.name: seconds_of(it.contender, 1, 2, comm) / 2 for it in entrants}
    reshape(network, comm)
    rows = []
    for number in range(rounds):
        turn = number % len(entrants)
        order = [*entrants[turn:], *entrants[:turn]]
        for it, k in [(entrant, k) for entrant in order for k in entrant.accumulations]:
            bound = it.sent[k] / rate
            updates = int(comm.broadcast_bytes(str(max(1, int(seconds / (once[it.name] * k + bound)))).encode()))
            ours = it.contender if isinstance(it.contender, Ours) else None
            if ours:
                ours.exposed_seconds = ours.compute_seconds = 0.0
            before = nodes.sent_bytes()
            took = seconds_of(it.contender, k, updates, comm)
            rows.append(
                {
                    "model": model,
                    "network": network,
                    "contender": "hvdbs" if ours else it.name,
                    "scheme": it.name if ours else "none" if it.name == "alone" else "dense",
                    "accumulation_steps": k,
                    "micro_batch": micro_batch,
                    "global_batch": k * micro_batch * comm.world_size,
                    "round": number,
                    "updates": updates,
                    "seconds": took,
                    "samples_per_second": updates * k * micro_batch * comm.world_size / took,
                    "compute_seconds": ours.compute_seconds / updates if ours else None,
                    "exposed_communication_seconds": ours.exposed_seconds / updates if ours else None,
                    "sent_bytes": it.sent[k],
                    "link_bytes": (nodes.sent_bytes() - before) / updates,
                    "bound_seconds": bound,
                }
            )
    return rows


def reshape(network: str, comm: Communicator) -> None:
    """Collective. Rank 0 shapes everybody's links, while nothing is on its way."""
    comm.barrier()
    if comm.rank == 0:
        nodes.shape(comm.world_size, network)
    comm.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--networks", nargs="+", required=True)
    parser.add_argument("--entries", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    comm = connect()
    if any(entry.startswith("ddp") for entry in args.entries):
        join_gloo(comm)
    rows = []
    for model, network in itertools.product(args.models, args.networks):
        rows += measure(model, network, args.entries, args.rounds, args.seconds, args.micro_batch, comm)
        if comm.rank == 0:
            pd.DataFrame(rows).to_csv(args.out, index=False)
    comm.close()


if __name__ == "__main__":
    main()
