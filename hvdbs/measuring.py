"""Measures what a ``Calibration`` holds: on each rank the passes of a model, between ranks the reductions.

Computing is measured on all ranks at once, as they train: cores of one node share caches and memory. Everything is
looked at from outside the step, through hooks on the model and its parameters that are taken away again.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hvdbs.assembly import agreed, device_name, initial_model, settle
from hvdbs.batching import MicroBatch, Window
from hvdbs.calibration import Calibration, Passes, Spread
from hvdbs.comm import Communicator
from hvdbs.comm.cores import chosen, own_cores
from hvdbs.comm.local import Solo
from hvdbs.config import Config
from hvdbs.data import Batch
from hvdbs.data.sources import open_source
from hvdbs.devices import choose_device
from hvdbs.environment import environment
from hvdbs.factors import eligible
from hvdbs.flops import work
from hvdbs.links import measure_links, timed
from hvdbs.planning import meta_model, sample_shape
from hvdbs.reach import ExtrapolationConfig
from hvdbs.schedule import Decision
from hvdbs.step import Replica, Requests

LONG = 4  # micro-batches of the window that tells what each further one takes


class Watch:
    """Time stamps of a window: hooks on ``model``, gone after ``close``. On a GPU they are its own, not the host's."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.forwards: list[Any] = []  # when each forward pass has ended
        self.backwards: list[Any] = []  # when each backward pass has: its last gradient
        self.ready: dict[str, Any] = {}  # of the last backward pass, by parameter
        self._last: Any = None
        self._hooks = [
            model.register_forward_pre_hook(self._begins),
            model.register_forward_hook(self._ends),
            *(
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            ),
        ]

    def now(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> Any:
        self.forwards, self.backwards, self.ready, self._last = [], [], {}, None
        return self.now()

    def end(self) -> Any:
        stamp = self.now()
        self.backwards.append(self._last)
        if self._cuda:
            torch.cuda.synchronize()
        return stamp

    def between(self, one: Any, other: Any) -> float:
        seconds: float = one.elapsed_time(other) / 1e3 if self._cuda else other - one
        return seconds

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begins(self, module: nn.Module, args: object) -> None:
        if self.forwards:
            self.backwards.append(self._last)

    def _ends(self, module: nn.Module, args: object, output: object) -> None:
        self.forwards.append(self.now())

    def _arrived(self, name: str, _: torch.Tensor) -> None:
        self._last = self.ready[name] = self.now()


def measure_passes(
    config: Config, comm: Communicator, model: nn.Module, batches: list[Batch], device: torch.device, seconds: float
) -> dict[str, list[float]]:
    """Collective. This rank's windows of 1 and of LONG micro-batches in turn, for about ``seconds``, all ranks at once:
    seconds by the names of ``Passes``, and ``ready.<parameter>`` as shares."""
    replica = Replica(model, replace(config, extrapolation=ExtrapolationConfig()), Solo())
    supply: Iterator[Batch] = itertools.cycle(batches)
    watch = Watch(model, device)
    found: dict[str, list[float]] = {}

    def window(turns: int) -> None:
        count = turns * config.micro_batch
        comm.barrier()
        begin = watch.begin()
        replica.run(Window(0, count, config.micro_batch), Decision(0, count, 0.0, 1e-4), 0, supply, Requests())
        end = watch.end()
        last = watch.between(watch.forwards[-1], watch.backwards[-1])
        if turns == 1:
            values = {
                "forward": watch.between(begin, watch.forwards[0]),
                "backward": last,
                "optimizer": watch.between(watch.backwards[-1], end),
            }
        else:
            first, final = watch.backwards[0], watch.backwards[-1]
            values = {"again": watch.between(first, final) / (turns - 1), "backward_again": last}
            for name, stamp in watch.ready.items():
                values[f"ready.{name}"] = watch.between(watch.forwards[-1], stamp) / last
        for name, value in values.items():
            found.setdefault(name, []).append(value)

    for turns in (1, LONG):
        window(turns)
    begin = perf_counter()
    for turns in (1, LONG):
        window(turns)
    rounds = max(5, min(60, int(seconds / (perf_counter() - begin))))
    rounds = int(comm.broadcast_bytes(str(rounds).encode()))
    found.clear()
    for _ in range(rounds):
        for turns in (1, LONG):
            window(turns)
    watch.close()
    return found


def noise(config: Config, classes: int | None) -> list[Batch]:
    """A few micro-batches in memory, of images as a source gives them."""
    generator = torch.Generator().manual_seed(config.seed)
    size = config.data.image_size
    shape = (config.micro_batch, size, size, 3)
    return [
        Batch(
            torch.randint(256, shape, generator=generator, dtype=torch.uint8),
            torch.randint(classes or 2, (config.micro_batch,), generator=generator),
        )
        for _ in range(4)
    ]


def measure_data(config: Config, comm: Communicator, device: torch.device, seconds: float) -> float | None:
    """Collective. Seconds in which the source gives this rank a micro-batch; None where there is no data."""
    there = config.data.kind != "images" or bool(
        config.data.root and os.path.isdir(os.path.expanduser(config.data.root))
    )
    if comm.broadcast_bytes(b"1" if there else b"0") != b"1":
        return None
    with agreed(comm):
        source = open_source(config, comm, device)
    places = (MicroBatch(j, j * config.micro_batch, config.micro_batch) for j in itertools.count(comm.rank))
    batches = source.train(places)
    for _ in range(config.data.read_ahead + 1):
        next(batches)
    begin, taken = perf_counter(), 0
    while taken < 3 or perf_counter() - begin < seconds:
        next(batches)
        taken += 1
    took = (perf_counter() - begin) / taken
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    return took


def measure_product(config: Config, model: nn.Module, device: torch.device) -> tuple[float, float] | None:
    """Seconds for each weight, and for each weight and row, of the product of factors: of the largest layer for it on
    ``model`` (meta device) at one and at eight micro-batches; None without such a layer."""
    layers = eligible(model, sample_shape(config), getattr(torch, config.dtype))
    if not layers:
        return None
    layer = max(layers, key=lambda one: one.weights)
    few = config.micro_batch * layer.positions
    took = {}
    for rows in (few, 8 * few):
        both = torch.randn(rows, layer.inputs + layer.outputs, device=device)

        def product(both: torch.Tensor = both) -> torch.Tensor:
            return both[:, layer.inputs :].t() @ both[:, : layer.inputs]

        took[rows] = timed(product, device)
    slope = max(0.0, (took[8 * few] - took[few]) / (7 * few))
    return max(0.0, took[few] - slope * few) / layer.weights, slope / layer.weights


def calibrate(
    config: Config, comm: Communicator, classes: int | None, say: Callable[[str], None], seconds: float = 15.0
) -> Calibration:
    """Collective. Measure ``config``'s model, data and links for about three times ``seconds``; the same on all ranks.

    Raises AgreedError for what a run would refuse of device and data.
    """
    with agreed(comm):
        device = choose_device(config, comm)
    cores = own_cores(comm)
    settle(config, cores, device)
    sketch = meta_model(config, classes)
    flops, _ = work(sketch, sample_shape(config), getattr(torch, config.dtype))
    say(f"data: at most {seconds / 3:.0f} s")
    data = measure_data(config, comm, device, seconds / 5)
    if config.data.kind == "analytic":
        source = open_source(config, comm, device)
        places = (MicroBatch(j, j * config.micro_batch, config.micro_batch) for j in range(4))
        batches = list(source.train(places))
    else:
        batches = noise(config, classes)
    say(f"passes of {config.model.name}, micro_batch {config.micro_batch}: {seconds:.0f} s or a little more")
    own = measure_passes(config, comm, initial_model(config, classes, device), batches, device, seconds)
    product = measure_product(config, sketch, device)
    everyone = [json.loads(text) for text in comm.gather_bytes(json.dumps([own, data, socket.gethostname()]).encode())]
    pooled = {name: [value for one, _, _ in everyone for value in one[name]] for name in own}
    spreads = {name: Spread.of(values) for name, values in pooled.items() if not name.startswith("ready.")}
    both = Spread.of([f + b for f, b in zip(pooled["forward"], pooled["backward"], strict=True)])
    passes = Passes(
        **spreads,
        jitter=(both.high - both.low) / 1.349,  # of a normal distribution, whose quartiles are so far apart
        ready={
            name.removeprefix("ready."): min(1.0, statistics.median(values))
            for name, values in pooled.items()
            if name.startswith("ready.")
        },
        data=None if data is None else max(one for _, one, _ in everyone),
        flops_per_sample=flops,
        product=product,
    )
    if comm.world_size > 1:
        say(f"reductions over {comm.world_size} ranks: half a minute, more on a slow network")
    wire = torch.float16 if config.communication.wire == "fp16" else getattr(torch, config.dtype)
    links = measure_links(comm, wire, device)
    hosts = [host for _, _, host in everyone]
    facts = environment(comm.world_size, comm.backend, hosts, [device_name(device)])
    facts |= {"chosen": chosen(torch.get_num_threads()), "date": datetime.now(UTC).strftime("%Y-%m-%d")}
    made = Calibration(
        model=config.model.name,
        micro_batch=config.micro_batch,
        image_size=config.data.image_size,
        dtype=config.dtype,
        autocast=config.autocast,
        wire=config.communication.wire,
        device=device_name(device),
        world_size=comm.world_size,
        local_size=comm.local_size,
        hosts=len(set(hosts)),
        cores=cores,
        threads=torch.get_num_threads(),
        backend=comm.backend,
        passes=passes,
        links=links,
        facts=facts,
    )
    return made
