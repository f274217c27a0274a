"""What hvdbs's own loop costs beside the work it is there for: time between updates, Python per micro-batch, memory.

    python -m benchmarks.overhead

* between updates: from the end of the last backward pass to the next forward pass, in the real training loop, less what
  the optimizer takes; with data in memory, one rank, no evaluation. The gradient norm is part of it.
* per micro-batch: a model that computes next to nothing, at accumulation 64, against a plain loop of the same passes.
* memory: bytes of all tensors that are alive between two updates, beyond parameters, gradients and optimizer state.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd
import torch
from torch import nn

from benchmarks.measure import facts, write
from benchmarks.throughput import CLASSES, Bare, Hvdbs, samples, seconds_of
from hvdbs.assembly import initial_model, settle
from hvdbs.batching import MicroBatch
from hvdbs.checkpoint import Saver
from hvdbs.comm.cores import own_cores
from hvdbs.comm.local import Solo
from hvdbs.config import CheckpointConfig, Config, DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig
from hvdbs.data import Batch
from hvdbs.loop import Run, train
from hvdbs.progress import Progress
from hvdbs.recorder import Silent
from hvdbs.schedule import ScheduleConfig
from hvdbs.stage_tables import resolve
from hvdbs.step import Replica, Requests

ACCUMULATION = 64  # of the micro-batches that cost nothing


@dataclass(frozen=True)
class InMemory:
    """A Source of the same few batches again and again."""

    batches: list[Batch]
    train_samples: int
    val_samples: int = 32
    classes: tuple[str, ...] = tuple(map(str, range(CLASSES)))

    def train(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        for _, batch in zip(requests, itertools.cycle(self.batches), strict=False):
            yield batch

    def validation(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        for request in requests:
            yield Batch(self.batches[0].inputs[: request.size], self.batches[0].labels[: request.size])


class Gaps:
    """Seconds from the end of an update's last backward pass to the next forward pass, the optimizer's apart."""

    def __init__(self, replica: Replica, accumulation: int) -> None:
        self.seconds: list[float] = []
        self._optimizer = self._ended = 0.0
        self._left = self._accumulation = accumulation
        replica.model.register_forward_pre_hook(self._forward)
        first = next(p for p in replica.model.parameters() if p.requires_grad)
        first.register_post_accumulate_grad_hook(self._backward)  # the first parameter's gradient is the last to arrive
        replica.optimizer.register_step_pre_hook(lambda *_: self._clock(-1))
        replica.optimizer.register_step_post_hook(lambda *_: self._clock(+1))

    def _clock(self, sign: int) -> None:
        self._optimizer += sign * perf_counter()

    def _forward(self, *_: object) -> None:
        if self._left == self._accumulation and self._ended:
            self.seconds.append(perf_counter() - self._ended - self._optimizer)

    def _backward(self, _: torch.Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            self._left, self._optimizer, self._ended = self._accumulation, 0.0, perf_counter()


def between_updates(config: Config, accumulation: int, updates: int) -> dict[str, Any]:
    """Median gap of a run of ``updates`` updates through ``hvdbs.loop.train``, and its share of an update."""
    comm = Solo()
    batches = samples(config.micro_batch, config.data.image_size, 0)
    global_batch = accumulation * config.micro_batch
    length = updates * global_batch
    config = replace(config, schedule=ScheduleConfig(samples=length, global_batch=global_batch, lr=0.01))
    replica = Replica(initial_model(config, CLASSES, torch.device("cpu")), config, comm)
    gaps = Gaps(replica, accumulation)
    source = InMemory(batches, length)
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), config, comm, None)
        run = Run(config, comm, source, resolve(config.schedule, length), replica, Silent(), saver, Requests(), 0)
        begin = perf_counter()
        train(run, Progress(), None)
        seconds = (perf_counter() - begin) / updates
    gap = statistics.median(gaps.seconds)
    return {"what": "between updates", "seconds": gap, "share_of_update": gap / seconds}


class Tiny(nn.Module):
    """One linear layer: [B, 3, H, W] to [B, K], nearly all of whose time is Python's and the dispatcher's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits


def per_micro_batch(config: Config, rounds: int) -> dict[str, Any]:
    """Median over ``rounds`` pairs of ours less the plain loop's seconds, for each micro-batch."""
    comm = Solo()
    batches = samples(2, 2, 0)
    ours, bare = Hvdbs(Tiny(), replace(config, micro_batch=2), comm, batches), Bare(Tiny(), batches)
    pairs = []
    for _ in range(rounds + 1):
        taken = [seconds_of(contender, ACCUMULATION, 5, comm) / 5 / ACCUMULATION for contender in (ours, bare)]
        pairs.append(taken)
    more = statistics.median(a - b for a, b in pairs[1:])
    return {"what": "Python per micro-batch", "seconds": more}


def tensor_bytes() -> int:
    """Bytes of the storages of all tensors that are alive, each storage once."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.layout == torch.strided:  # isinstance would ask proxies
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def memory(config: Config) -> dict[str, Any]:
    """Bytes alive after an update beyond parameters, buffers, gradients and momentum, and their share of these."""
    batches = samples(config.micro_batch, config.data.image_size, 0)
    before = tensor_bytes()
    ours = Hvdbs(initial_model(config, CLASSES, torch.device("cpu")), config, Solo(), batches)
    for _ in range(3):
        ours.update(4)
    model = ours.replica.model
    parameters = sum(p.nbytes for p in model.parameters())
    needed = 3 * parameters + sum(b.nbytes for b in model.buffers())
    extra = tensor_bytes() - before - needed
    return {"what": "memory beyond", "bytes": extra, "share_of_needed": extra / needed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet8", "resnet18", "resnet50"])
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--out", type=Path, help="CSV to write; by default the table is only printed")
    args = parser.parse_args()
    rows = []
    for name in args.models:
        config = Config(
            micro_batch=args.micro_batch,
            data=DataConfig(image_size=args.image_size),
            model=ModelConfig(name=name),
            optimizer=OptimizerConfig(decay_norm_and_bias=True),
            evaluation=EvaluationConfig(every_epochs=0),
            checkpoint=CheckpointConfig(every_minutes=0),
        )
        settle(config, own_cores(Solo()), torch.device("cpu"))
        about = {"model": name, "micro_batch": args.micro_batch, "accumulation_steps": args.accumulation}
        rows.append({**about, **between_updates(config, args.accumulation, args.updates)})
        rows.append({**about, **memory(config)})
    rows.append({"model": "one linear layer", "micro_batch": 2, "accumulation_steps": ACCUMULATION})
    rows[-1] |= per_micro_batch(config, args.updates)
    table = pd.DataFrame(rows)
    print(table.to_string(index=False, float_format=lambda v: f"{v:.3g}", na_rep=""), flush=True)
    if args.out:
        write(table, args.out, facts(1, "solo"))


if __name__ == "__main__":
    main()
