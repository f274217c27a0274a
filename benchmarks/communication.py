"""What reductions cost: Horovod's, our reducer's, raw mpi4py's and torch's Gloo's, from 1 KB to 256 MB.

    python -m benchmarks.communication
    python -m benchmarks.communication --np 2 --backends mpi --bytes 4194304 --rounds 5
    horovodrun -np 2 python -m benchmarks.communication --inside --out communication.csv

Starts ``horovodrun`` once for each back-end and number of ranks; in a launch the contenders take turns in the same
processes, on the same bytes. ``message`` rows are one tensor at a time, nothing else going on. ``tensors`` rows are
backward passes of many equal parameters: each reduced by itself, or in buckets of several sizes, or not at all.

Algorithm bandwidth is bytes / seconds; bus bandwidth is that times 2 (N - 1) / N, what a ring of N ranks moves through
each link, so that it may be compared over N (the definitions of nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd
import torch
from torch import nn

from benchmarks.measure import facts, ratio_interval, write
from benchmarks.throughput import join_gloo
from hvdbs.comm import Communicator, Handle, connect
from hvdbs.comm.cores import own_cores
from hvdbs.comm.local import Solo
from hvdbs.config import CommunicationConfig
from hvdbs.gradients import GradientReducer

MESSAGES = [2**10 * 4**k for k in range(10)]
LARGE = 4 * 2**20  # bytes from which our reducer has to keep up with raw MPI
LEAST = 0.9
TENSORS = [(2**12, 2048), (2**16, 256), (2**20, 32)]  # bytes of each, and how many
BUCKETS = [2**20, 4 * 2**20, CommunicationConfig().bucket_bytes, 64 * 2**20]
RAW = "mpi4py"
Operation = Callable[[], object]


@dataclass(frozen=True)
class Entrant:
    """A ``name``, what is timed, and the bucket it uses (0: none); ``prepare`` goes before each, untimed. ``model``:
    whose gradients it reduces."""

    name: str
    operation: Operation
    bucket_bytes: int = 0
    prepare: Operation = lambda: None
    model: _Gradients | None = None


def bus_factor(ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, of an allreduce."""
    return 2 * (ranks - 1) / ranks


class _Gradients(nn.Module):
    """``count`` parameters of ``nbytes`` each, whose gradients are 1 and take one backward pass."""

    def __init__(self, nbytes: int, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(nbytes // 4) for _ in range(count))

    def backward(self) -> None:
        torch.autograd.backward([w.sum() for w in self.weights])


def _reducer(model: _Gradients, comm: Communicator, bucket_bytes: int) -> GradientReducer:
    return GradientReducer(model.parameters(), comm, torch.zeros(3, dtype=torch.float64), bucket_bytes)


def messages(comm: Communicator, nbytes: int) -> list[Entrant]:
    """Collective. Who reduces ``nbytes`` bytes of float32; zeros, so that sums of sums stay what they are."""
    data = torch.zeros(nbytes // 4)
    found = [
        Entrant("horovod", lambda: comm.start_sum(data, f"message.{nbytes}").wait()),
        Entrant("torch-gloo", lambda: torch.distributed.all_reduce(data)),
    ]
    if nbytes >= LARGE:
        model = _Gradients(nbytes, 1)
        reducer = _reducer(model, comm, nbytes)

        def collect() -> None:
            reducer.begin()
            model.backward()

        found.append(Entrant("reducer", reducer.finish, nbytes, collect, model))
    if comm.backend == "horovod-mpi":
        from mpi4py import MPI

        raw = data.numpy()
        found.append(Entrant(RAW, lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, raw)))
    other = torch.zeros_like(data)
    found.append(Entrant("copy", lambda: other.copy_(data)))
    return found


def passes(comm: Communicator, nbytes: int, count: int) -> list[Entrant]:
    """Collective. Backward passes of ``count`` tensors of ``nbytes``, with their reductions."""
    alone, each = _Gradients(nbytes, count), _Gradients(nbytes, count)
    handles: list[Handle] = []

    def send(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        handles.append(comm.start_sum(parameter.grad, name))

    for place, weight in enumerate(each.weights):
        weight.register_post_accumulate_grad_hook(partial(send, f"each.{nbytes}.{place}"))

    def one_by_one() -> None:
        each.zero_grad()
        each.backward()
        for handle in handles:
            handle.wait()
        handles.clear()

    def in_buckets(model: _Gradients, reducer: GradientReducer) -> None:
        reducer.begin()
        reducer.arm()
        model.backward()
        reducer.finish()

    found = [Entrant("each", one_by_one, model=each)]
    for name, by, sizes in (("buckets", comm, BUCKETS), ("none", Solo(), BUCKETS[2:3])):
        for size in sizes:
            model = alone if name == "none" else _Gradients(nbytes, count)
            run = partial(in_buckets, model, _reducer(model, by, size))
            found.append(Entrant(name, run, size, model=model))
    return found


def seconds_of(entrant: Entrant, times: int, comm: Communicator) -> float:
    """Collective. Seconds of one operation, the mean of ``times``."""
    total = 0.0
    for _ in range(times):
        entrant.prepare()
        comm.barrier()
        begin = perf_counter()
        entrant.operation()
        total += perf_counter() - begin
    return total / times


def in_turn(comm: Communicator, entrants: Sequence[Entrant], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Collective. A row for each round and entrant; each takes about ``seconds`` at a time."""
    times = {}
    for entrant in entrants:
        seconds_of(entrant, 2, comm)
        begin = perf_counter()  # with the barriers, which take longer than a small message
        seconds_of(entrant, 5, comm)
        wanted = seconds / ((perf_counter() - begin) / 5)
        times[entrant] = int(comm.broadcast_bytes(str(max(1, round(wanted))).encode()))
    rows = []
    for number in range(rounds):
        turn = number % len(entrants)
        for entrant in [*entrants[turn:], *entrants[:turn]]:
            took = seconds_of(entrant, times[entrant], comm)
            row = {"contender": entrant.name, "bucket_bytes": entrant.bucket_bytes, "round": number}
            rows.append(row | {"operations": times[entrant], "seconds": took})
    return rows


def inside(args: argparse.Namespace) -> None:
    """On every rank of a launch. Rank 0 writes."""
    with closing(connect()) as comm:
        if comm.world_size == 1:
            raise SystemExit(
                "benchmarks.communication: error: one rank has nobody to talk to: horovodrun -np 2 or more"
            )
        torch.set_num_threads(max(1, int(own_cores(comm))))  # as a run has; mpirun binds ranks to cores, Gloo does not
        join_gloo(comm)
        rows = []
        for nbytes in args.bytes:
            for row in in_turn(comm, messages(comm, nbytes), args.rounds, args.seconds):
                rows.append({"kind": "message", "message_bytes": nbytes, "tensors": 1} | row)
        for nbytes, count in [] if args.no_tensors else TENSORS:
            for row in in_turn(comm, passes(comm, nbytes, count), args.rounds, args.seconds):
                rows.append({"kind": "tensors", "message_bytes": nbytes, "tensors": count} | row)
        if comm.rank == 0:
            table = with_bandwidth(pd.DataFrame(rows), comm.world_size)
            about = facts(comm.world_size, comm.backend.removeprefix("horovod-"))
            write(table, args.out, about, append=True)
        torch.distributed.destroy_process_group()


def with_bandwidth(rows: pd.DataFrame, ranks: int) -> pd.DataFrame:
    """``rows`` with bandwidths in bytes per second, and their share of what a copy of the same bytes reaches."""
    total = rows.message_bytes * rows.tensors
    rows = rows.assign(algorithm_bandwidth=total / rows.seconds)
    rows["bus_bandwidth"] = rows.algorithm_bandwidth * bus_factor(ranks)
    copies = rows[rows.contender == "copy"].groupby("message_bytes").algorithm_bandwidth.median()
    share = rows.bus_bandwidth / rows.message_bytes.map(copies)
    return rows.assign(share_of_copy=share.where((rows.kind == "message") & (rows.contender != "copy")))


def verdicts(rows: pd.DataFrame) -> pd.DataFrame:
    """Our reducer's bandwidth over raw mpi4py's for each large message: median over rounds and its 95 % interval."""
    found = []
    large = rows[(rows.kind == "message") & (rows.message_bytes >= LARGE) & (rows.backend == "mpi")]
    for (ranks, nbytes), group in large.groupby(["world_size", "message_bytes"]):
        seconds = group.pivot(index="round", columns="contender", values="seconds")
        for name in ("reducer", "horovod"):
            ratio, low, high = ratio_interval(seconds[RAW], seconds[name])
            row = {"world_size": ranks, "message_bytes": nbytes, "contender": name, "of mpi4py": ratio}
            found.append(
                row | {"low": low, "high": high, "required": f"{LEAST}: {'met' if low >= LEAST else 'missed'}"}
            )
    return pd.DataFrame(found)


def summary(rows: pd.DataFrame) -> str:
    """Medians of bus bandwidth (messages, GB/s) and of seconds (tensors, ms)."""
    talk = rows[(rows.kind == "message") & (rows.contender != "copy")]
    keys = ["backend", "world_size", "message_bytes"]
    speed = talk.groupby([*keys, "contender"]).bus_bandwidth.median().unstack() / 1e9
    many = rows[rows.kind == "tensors"].assign(who=lambda r: r.contender + r.bucket_bytes.map(_in_mb))
    took = many.groupby([*keys, "tensors", "who"]).seconds.median().unstack() * 1e3
    parts = ["bus bandwidth, GB/s", speed.to_string(float_format="%.3g"), "backward with reductions, ms"]
    parts += [took.to_string(float_format="%.3g")] if len(took) else []
    found = verdicts(rows)
    return "\n".join([*parts, found.to_string(index=False, float_format="%.3f")] if len(found) else parts)


def _in_mb(nbytes: int) -> str:
    return f" {nbytes / 2**20:g} MB" if nbytes else ""


def plot(rows: pd.DataFrame, out: Path) -> None:
    """Bus bandwidth against bytes for each back-end and number of ranks, and below the passes of many tensors."""
    from matplotlib.figure import Figure

    panels = list(rows.groupby(["backend", "world_size"], sort=False))
    many = (rows.kind == "tensors").any()
    figure = Figure(figsize=(4.4 * len(panels), 7.2 if many else 3.8), dpi=110, layout="constrained")
    grid = figure.subplots(1 + many, len(panels), squeeze=False)
    for column, ((backend, ranks), of) in enumerate(panels):
        axes = grid[0][column]
        talk = of[of.kind == "message"].groupby(["contender", "message_bytes"]).bus_bandwidth.median() / 1e9
        for name in talk.index.get_level_values(0).unique():
            own = talk[name] / (bus_factor(ranks) if name == "copy" else 1)
            axes.plot(own.index, own, ".-" if name != "copy" else "k:", label=name)
        axes.set(xscale="log", yscale="log", title=f"{backend}, {ranks} ranks", xlabel="bytes", ylabel="bus GB/s")
        axes.legend(fontsize="x-small")
        if many:
            axes = grid[1][column]
            tensors = of[of.kind == "tensors"]
            for nbytes, group in tensors.groupby("message_bytes"):
                names = group.contender + group.bucket_bytes.map(_in_mb)
                took = group.seconds.groupby(names, sort=False).median() * 1e3
                label = f"{group.tensors.iloc[0]:,} of {nbytes // 1024:,} KB"
                axes.plot(range(len(took)), took, "o", label=label)
                axes.set_xticks(range(len(took)), took.index, rotation=30, ha="right", fontsize="x-small")
            axes.set(yscale="log", ylabel="backward with reductions, ms")
            axes.legend(fontsize="x-small")
    figure.savefig(out)
    print(f"picture in {out}", flush=True)


def launch(backend: str, ranks: int, args: argparse.Namespace, out: Path) -> None:
    """Raises CalledProcessError, with the job's output printed, if it fails."""
    command = ["horovodrun", f"--{backend}", "-np", str(ranks), sys.executable, "-m", "benchmarks.communication"]
    command += ["--inside", "--out", str(out), "--rounds", str(args.rounds), "--seconds", str(args.seconds)]
    command += ["--bytes", *map(str, args.bytes), *(["--no-tensors"] if args.no_tensors else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        done.check_returncode()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, nargs="+", default=[2, 4], help="ranks of each launch (2 4)")
    parser.add_argument("--backends", nargs="+", default=["mpi", "gloo"], choices=["mpi", "gloo"])
    parser.add_argument("--bytes", type=int, nargs="+", default=MESSAGES, help="of messages (1 KB to 256 MB)")
    parser.add_argument("--no-tensors", action="store_true", help="messages alone")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.1, help="about how long one measurement takes")
    parser.add_argument("--inside", action="store_true", help="this is a rank of a launch")
    parser.add_argument("--out", type=Path, help="CSV to write; by default the tables are only printed")
    args = parser.parse_args(argv)
    if bad := [size for size in args.bytes if size < 4 or size % 4]:
        parser.error(f"--bytes {bad[0]} is no whole number of float32: try {max(4, bad[0] // 4 * 4)}")
    if args.inside:
        inside(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.csv"
        for ranks in args.np:
            for backend in args.backends:
                launch(backend, ranks, args, out)
        rows = pd.read_csv(out)
    rows["cores_shared"] = rows.world_size > len(os.sched_getaffinity(0))
    rows["command"] = facts(1, "")["command"]
    print(summary(rows))
    if args.out:
        write(rows, args.out, {})
        plot(rows, args.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
