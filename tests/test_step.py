"""The step by itself, in one process: quick forms of laws 1 to 3 and 5, with one rank or with ranks as threads.

The laws in full, between real ranks, are in tests/parallel. Models and samples are those of ``rig``, seeds as there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import rig
import torch
from reference import Stage
from torch import nn

from hvdbs.batching import Window
from hvdbs.comm import Communicator
from hvdbs.comm.local import Solo, ThreadWorld
from hvdbs.costs import reduced_bytes
from hvdbs.data import Batch
from hvdbs.data.streams import generator_seed
from hvdbs.errors import HvdbsError
from hvdbs.gradients import gradient_norm
from hvdbs.loop import train
from hvdbs.progress import Progress
from hvdbs.schedule import Decision
from hvdbs.step import Applied, Replica, Requests


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So that ranks as threads do not wait for each other's kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def still() -> nn.Module:
    """The conv net without dropout: threads share torch's generator."""
    return rig.ConvNet(dropout=0.0)


def plainly(
    make: Callable[[], nn.Module], shape: tuple[int, ...], micro_batch: int | None = 8, **rules: Any
) -> rig.Tensors:
    source, model = rig.memory(shape), rig.built(make)
    order = source.stream(1500)
    reference.train(model, source.inputs, source.labels, order, rig.SHORT_STAGES, micro_batch=micro_batch, **rules)
    return rig.snapshot(model)


@pytest.mark.parametrize(
    "rules", [{}, {"smoothing": 0.2, "clip_norm": 0.3, "nesterov": True, "warmup": (150, 0.001)}], ids=["plain", "all"]
)
def test_one_process_trains_as_the_plain_loop_does(tmp_path: Path, rules: dict[str, Any]) -> None:
    """Law 1, float64, np 1: 1e-12 after 10 updates in three stages, batch norm and dropout."""
    model = rig.built(rig.ConvNet)
    rig.trained(Solo(), rig.settings(rig.SHORT_STAGES, **rules), model, rig.memory(rig.IMAGE), tmp_path)
    assert rig.worst_error(rig.snapshot(model), plainly(rig.ConvNet, rig.IMAGE, **rules)) < 1e-12


@pytest.mark.parametrize("world_size", [2, 3, 5, 20])
def test_threads_train_as_the_plain_loop_does_and_stay_equal(tmp_path: Path, world_size: int) -> None:
    """Laws 1 and 2, float64: 1e-12 after 10 updates with batch norm, and bitwise equal replicas after each; with 20
    ranks some have no micro-batch in any window, whatever its stage."""
    first = rig.built(still)
    models = [copy.deepcopy(first) for _ in range(world_size)]
    watches = [rig.Watch() for _ in range(world_size)]

    def main(comm: Communicator) -> None:
        model, watch = models[comm.rank], watches[comm.rank]
        rig.trained(comm, rig.settings(rig.SHORT_STAGES), model, rig.memory(rig.IMAGE), tmp_path, watch)

    ThreadWorld(world_size).run(main)
    assert len(watches[0].digests) == 10
    assert all(watch.digests == watches[0].digests for watch in watches)
    assert all(watch.losses == watches[0].losses for watch in watches)
    assert rig.worst_error(rig.snapshot(models[-1]), plainly(still, rig.IMAGE)) < 1e-12


@pytest.mark.parametrize("micro_batch", [1, 7, 50, 500])
def test_micro_batches_of_any_size_equal_one_batch(tmp_path: Path, micro_batch: int) -> None:
    """Law 3, float64, no batch norm: 1e-12 after 10 updates against whole windows as one batch."""
    model = rig.built(rig.mlp)
    config = rig.settings(rig.SHORT_STAGES, micro_batch=micro_batch)
    rig.trained(Solo(), config, model, rig.memory(rig.FLAT), tmp_path)
    assert rig.worst_error(rig.snapshot(model), plainly(rig.mlp, rig.FLAT, micro_batch=None)) < 1e-12


@pytest.mark.parametrize("global_batch", [8, 77, 131])
def test_one_set_of_reductions_whatever_the_accumulation(global_batch: int) -> None:
    """Law 5, exactly, for 1 to 17 micro-batches: nothing before the last forward, then the carry and each bucket
    once."""
    counted, model = rig.Counted(Solo()), rig.built(still)
    counted.watch(model)
    replica = Replica(model, rig.settings(rig.SHORT_STAGES, bucket_bytes=128), counted)
    window = Window(0, global_batch, 8)
    batches = rig.memory(rig.IMAGE).train(window.dealt_to(0, 1))
    replica.run(window, Decision(0, global_batch, 0.1, 0.0), 0, batches, Requests())
    sums = [event for event in counted.events if event.kind == "sum"]
    assert [event.name for event in sums] == ["carry", *(bucket.name for bucket in replica.reducer.buckets)]
    assert len(sums) == replica.collectives == 6
    parameters = sum(p.numel() * 8 for p in model.parameters())
    assert sum(event.nbytes for event in sums) == replica.reducer.reduced_bytes == reduced_bytes(parameters, 28)
    kinds = [event.kind for event in counted.events]
    assert kinds.count("forward") == window.micro_batches
    assert kinds.index("sum") > len(kinds) - 1 - kinds[::-1].index("forward")


def test_time_that_the_data_take_is_told_apart_from_the_model_s() -> None:
    """Four batches that take 50 ms each: data_seconds is those 0.2 s, and no other column holds them."""
    replica = Replica(rig.built(still), rig.settings(rig.SHORT_STAGES), Solo())
    window = Window(0, 32, 8)

    def slowly(pause: float) -> Iterator[Batch]:
        for batch in rig.memory(rig.IMAGE).train(window.dealt_to(0, 1)):
            time.sleep(pause)
            yield batch

    def run(step: int, pause: float) -> tuple[Applied, float]:
        begin = time.perf_counter()
        applied = replica.run(window, Decision(0, 32, 0.1, 0.0), step, slowly(pause), Requests())
        return applied, time.perf_counter() - begin

    (fast, _), (slow, seconds) = run(0, 0.0), run(1, 0.05)
    assert slow.data_seconds >= 0.2 > 0.1 > fast.data_seconds
    others = slow.compute_seconds + slow.exposed_communication_seconds + slow.optimizer_seconds
    assert slow.data_seconds + others <= seconds


def test_dropout_is_seeded_by_what_the_design_says() -> None:
    """(seed, step, micro-batch index) as three little-endian 64-bit words, hashed: the reference has its own."""
    for seed, step, index in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**63 - 1, 10**9, 10**6)]:
        assert generator_seed(seed, step, index) == reference.dropout_seed(seed, step, index)


@pytest.mark.parametrize("nesterov", [False, True])
def test_gradients_outlive_the_update_for_whoever_logs_them(tmp_path: Path, nesterov: bool) -> None:
    """layers.csv reads them after the update; without weight decay, where nothing is copied on the way."""
    watch, norms = rig.Watch(), []
    config = rig.settings((Stage(150, 50, 0.1),), nesterov=nesterov)
    run = rig.assembled(Solo(), config, rig.built(rig.mlp), rig.memory(rig.FLAT), tmp_path, watch)
    watch.after = lambda progress: norms.append(gradient_norm(run.replica.reducer.buckets).item())
    train(run, Progress(), None)
    assert norms == watch.gradient_norms
    assert len(norms) == 3


class Branch(nn.Module):
    """A layer that no micro-batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(20, rig.CLASSES)
        self.never = nn.Linear(20, rig.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(x)
        return logits


@pytest.mark.parametrize("bucket_bytes", [1, 900, 2**30])
def test_a_measured_micro_batch_counts_buckets_that_backward_does_not_fill(bucket_bytes: int) -> None:
    """The norm of micro-batch 0 beside its window's, float64, 1e-12, at world_size 1 and where it is all its rank has:
    buckets with an unused parameter are sent after backward, when the norm has been taken."""
    first = rig.built(Branch)
    window = Window(0, 32, 8)
    measured = []
    for world_size in (1, 4):
        models = [copy.deepcopy(first) for _ in range(world_size)]

        def main(comm: Communicator, models: list[nn.Module] = models) -> Applied:
            replica = Replica(models[comm.rank], rig.settings(rig.SHORT_STAGES, bucket_bytes=bucket_bytes), comm)
            batches = rig.memory(rig.FLAT).train(window.dealt_to(comm.rank, comm.world_size))
            return replica.run(window, Decision(0, 32, 0.1, 0.0), 0, batches, Requests(), measure=True)

        pair = ThreadWorld(world_size).run(main)[0].noise
        assert pair is not None
        measured.append(pair.small_squares)
    assert abs(measured[1] - measured[0]) < 1e-12 * measured[0]


class Shared(nn.Module):
    """One batch norm used twice, or only sometimes."""

    def __init__(self, uses: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.uses = uses
        self.bn = nn.BatchNorm1d(20)
        self.fc = nn.Linear(20, rig.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.uses(x)):
            x = torch.relu(self.bn(x))
        logits: torch.Tensor = self.fc(x)
        return logits


@pytest.mark.parametrize(
    ("uses", "calls"),
    [(lambda x: 2, "14 forwards"), (lambda x: 0, "0 forwards"), (lambda x: int(x.mean() > 0), "6 forwards")],
)
def test_a_batch_norm_that_does_not_run_once_per_micro_batch_is_refused(
    tmp_path: Path, uses: Callable[[torch.Tensor], int], calls: str
) -> None:
    """Its running statistics could not be told from the window's count of micro-batches; silently wrong is not
    allowed."""
    config = rig.settings(rig.SHORT_STAGES)
    with pytest.raises(HvdbsError, match=rf"layer bn: {calls} .* in 7 micro-batches") as caught:
        rig.trained(Solo(), config, rig.built(lambda: Shared(uses)), rig.memory(rig.FLAT), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_frozen_batch_norm_is_refused(tmp_path: Path) -> None:
    """A layer in evaluation mode would read running values that are set aside during the window."""
    model = rig.built(rig.ConvNet)
    model.get_submodule("bn1").eval()
    with pytest.raises(HvdbsError, match=r"layer bn1: 0 forwards in training mode"):
        rig.trained(Solo(), rig.settings(rig.SHORT_STAGES), model, rig.memory(rig.IMAGE), tmp_path)


def test_a_cumulative_batch_norm_is_refused() -> None:
    model = rig.built(rig.ConvNet)
    model.get_submodule("bn2").momentum = None  # type: ignore[assignment]
    with pytest.raises(HvdbsError, match="model layer bn2: momentum"):
        Replica(model, rig.settings(rig.SHORT_STAGES), Solo())


def test_a_batch_norm_without_running_statistics_needs_none(tmp_path: Path) -> None:
    """track_running_stats False: nothing is carried, and the training is that of the plain loop, 1e-12."""

    def make() -> nn.Module:
        model = still()
        model.bn1 = nn.BatchNorm2d(6, track_running_stats=False)
        return model

    model = rig.built(make)
    trip = rig.trained(Solo(), rig.settings(rig.SHORT_STAGES), model, rig.memory(rig.IMAGE), tmp_path)
    assert rig.worst_error(rig.snapshot(model), plainly(make, rig.IMAGE)) < 1e-12
    assert trip.run.replica.running.size == 16
