"""Law 5 and the overlap: one set of reductions per update, started while the last backward runs, and never before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rig
import torch
from reference import Stage

from hvdbs.batching import Window
from hvdbs.comm import Communicator
from hvdbs.costs import CARRY_ITEM_BYTES, reduced_bytes
from hvdbs.costs import buckets as shared_out
from hvdbs.data import Batch
from hvdbs.planning import update_bytes
from hvdbs.schedule import Decision
from hvdbs.step import Replica, Requests

pytestmark = pytest.mark.parallel

STAGES = (Stage(100, 100, 0.1, 1e-3),)
# Makes buckets of the conv net that end where layers do: [fc], [bn2], [conv2], [bn1, conv1]. Within a layer autograd
# finishes the weight before the bias.
LAYERS = 128


def batches(source: rig.Memory, window: Window, comm: Communicator) -> Iterator[Batch]:
    return source.train(window.dealt_to(comm.rank, comm.world_size))


def one_update(
    comm: Communicator, global_batch: int, *, clip_norm: float | None = None, bucket_bytes: int = LAYERS
) -> tuple[list[rig.Event], Replica]:
    """Collective. What happened on this rank in one update of the conv net, micro_batch 8."""
    counted = rig.Counted(comm)
    model = rig.built(rig.ConvNet)
    counted.watch(model)
    replica = Replica(model, rig.settings(STAGES, clip_norm=clip_norm, bucket_bytes=bucket_bytes), counted)
    window = Window(0, global_batch, 8)
    replica.run(
        window, Decision(0, global_batch, 0.1, 1e-3), 0, batches(rig.memory(rig.IMAGE), window, comm), Requests()
    )
    return counted.events, replica


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("global_batch", [3, 8, 64, 131, 400])
def test_one_set_of_reductions_per_update_whatever_the_accumulation(
    comm: Communicator, global_batch: int, clip_norm: float | None
) -> None:
    """Law 5, exactly: 1 to 50 micro-batches in the window, idle ranks included. Count and bytes are those of
    ``Replica.collectives``, ``GradientReducer.reduced_bytes``, ``costs.reduced_bytes`` and
    ``planning.update_bytes``."""
    events, replica = one_update(comm, global_batch, clip_norm=clip_norm)
    sums = [e for e in events if e.kind == "sum"]
    others = [e for e in events if e.kind in ("broadcast", "bytes")]
    parameters = [p for p in replica.model.parameters() if p.requires_grad]
    nbytes = [p.numel() * 8 for p in reversed(parameters)]
    buckets = len(shared_out(nbytes, LAYERS))
    assert buckets == len(replica.reducer.buckets) > 3
    names = ["carry", *(f"gradients.{k}" for k in range(buckets))]
    assert sorted(e.name for e in sums) == sorted(names)
    assert [e.name for e in others] == (["clip"] if clip_norm else [])
    assert len(sums) + len(others) == replica.collectives
    total = sum(e.nbytes for e in sums)
    assert total == replica.reducer.reduced_bytes == update_bytes(replica.model, replica.config)
    assert total == reduced_bytes(sum(nbytes), 2 * (6 + 8)) == sum(nbytes) + CARRY_ITEM_BYTES * (3 + 28)
    assert len({tuple(pair) for pair in rig.everywhere(comm, [len(events_of(events)), total])}) == 1


def events_of(events: list[rig.Event]) -> list[rig.Event]:
    return [e for e in events if e.kind in ("sum", "broadcast", "bytes")]


@pytest.mark.parametrize("global_batch", [8, 131, 400])
def test_each_bucket_starts_when_its_last_gradient_is_final_and_none_earlier(
    comm: Communicator, global_batch: int
) -> None:
    """Wait-free back-propagation, in the order of events on each rank: nothing is started in earlier micro-steps; the
    carry goes ahead of the last backward; each bucket starts right after the arrival of its last gradient, in reverse
    parameter order, the first one while other gradients are still to come."""
    events, replica = one_update(comm, global_batch)
    own = sum(1 for _ in Window(0, global_batch, 8).dealt_to(comm.rank, comm.world_size))
    steps = [k for k, e in enumerate(events) if e.kind == "forward"]
    assert len(steps) == own
    if not own:
        assert {e.kind for e in events} == {"sum"}
        return
    before, last = events[: steps[-1]], events[steps[-1] + 1 :]
    assert all(e.kind in ("forward", "arrived") for e in before)
    count = sum(1 for _ in replica.model.parameters())
    assert sum(e.kind == "arrived" for e in before) == (own - 1) * count
    assert last[0] == ("sum", "carry", replica.carry.nbytes, last[0].at)
    names = {id(p): name for name, p in replica.model.named_parameters()}
    members = {b.name: [names[id(p)] for p in b.parameters] for b in replica.reducer.buckets}
    order = list(reversed(list(names.values())))
    assert sorted(name for group in members.values() for name in group) == sorted(order)
    assert all(group == sorted(group, key=order.index) for group in members.values())
    waiting = {name: set(group) for name, group in members.items()}
    for event, following in zip(last[1:], [*last[2:], None], strict=True):
        if event.kind != "arrived":
            continue
        bucket = next(name for name, group in members.items() if event.name in group)
        waiting[bucket].remove(event.name)
        started = following is not None and following.kind == "sum"
        assert started == (not waiting[bucket]), f"{event.name} arrived in {bucket}"
        if started and following is not None:
            assert following.name == bucket
    assert [e.name for e in last[1:] if e.kind == "sum"] == list(members)
    arrivals = [k for k, e in enumerate(last) if e.kind == "arrived"]
    first = next(k for k, e in enumerate(last) if e.name == "gradients.0")
    assert sum(k > first for k in arrivals) >= count - len(members["gradients.0"]) - 1


def test_the_first_bucket_is_under_way_long_before_backward_ends(comm: Communicator) -> None:
    """The same in time: with 60 ms of sleep when the first layer's gradient arrives, the first bucket's reduction
    has been started, and is finished at np 1 to 4, at least 50 ms before backward ends; the last bucket's begins at
    its end."""
    counted = rig.Counted(comm)
    model = rig.built(rig.ConvNet)
    ended: list[float] = []

    def sleep(_: torch.Tensor) -> None:
        time.sleep(0.06)
        ended.append(time.perf_counter())

    model.get_parameter("conv1.weight").register_post_accumulate_grad_hook(sleep)
    replica = Replica(model, rig.settings(STAGES, bucket_bytes=LAYERS), counted)
    window = Window(0, 8 * comm.world_size, 8)
    source = rig.memory(rig.IMAGE)
    applied = replica.run(
        window, Decision(0, window.global_batch, 0.1, 1e-3), 0, batches(source, window, comm), Requests()
    )
    at = {e.name: e.at for e in counted.events}
    assert len(ended) == 1
    assert at["gradients.0"] < ended[0] - 0.05
    assert at[replica.reducer.buckets[-1].name] >= ended[0]
    assert applied.compute_seconds >= 0.06


def test_a_whole_run_reduces_what_was_planned(comm: Communicator, shared: Path) -> None:
    """Law 5 over a run of 10 updates in three stages, evaluation and checkpoint at its end included: the carry and each
    bucket exactly once per update, one agreement for the checkpoint, one sum for the evaluation, a comparison per
    stage."""
    counted = rig.Counted(comm)
    trip = rig.trained(
        counted,
        rig.settings(rig.SHORT_STAGES, bucket_bytes=LAYERS),
        rig.built(rig.ConvNet),
        rig.memory(rig.IMAGE),
        shared,
    )
    steps = trip.outcome.progress.step
    calls: dict[str, int] = {}
    for event in counted.events:
        calls[event.name] = calls.get(event.name, 0) + 1
    buckets = {bucket.name: steps for bucket in trip.run.replica.reducer.buckets}
    others = {"compare": 3, "broadcast_bytes": 3, "agree": 1, "evaluation.9": 1}
    assert calls == {"carry": steps, **buckets, **others}
