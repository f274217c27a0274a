"""Laws 7 and 9: schedules that say the same train the same, and every sample of an epoch is seen exactly once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import rig
from reference import Stage

from hvdbs.comm import Communicator
from hvdbs.data import order
from hvdbs.progress import Progress
from hvdbs.schedule import ScheduleConfig, decide, requests_of, windows
from hvdbs.stage_tables import resolve

pytestmark = pytest.mark.parallel

ONE = (Stage(450, 50, 0.05, 1e-3),)
SPLIT = {
    "where a window ends": (Stage(200, 50, 0.05, 1e-3), Stage(250, 50, 0.05, 1e-3)),
    "inside a window": (Stage(219, 50, 0.05, 1e-3), Stage(231, 50, 0.05, 1e-3)),
    "with a stage that is over before it begins": (
        Stage(201, 50, 0.05, 1e-3),
        Stage(48, 50, 0.05, 1e-3),
        Stage(201, 50, 0.05, 1e-3),
    ),
}


def digests(
    comm: Communicator, stages: tuple[Stage, ...], folder: Path, method: ScheduleConfig | None = None
) -> list[str]:
    config = rig.settings(stages, dtype="float32", clip_norm=0.4)
    if method is not None:
        config = dataclasses.replace(config, schedule=method)
    watch = rig.Watch()
    source = rig.memory(rig.IMAGE, dtype="float32")
    rig.trained(comm, config, rig.built(rig.ConvNet, "float32"), source, folder, watch)
    return watch.digests


@pytest.mark.parametrize("where", SPLIT)
def test_a_stage_split_into_equal_ones_is_one_stage(comm: Communicator, shared: Path, where: str) -> None:
    """Law 7, float32, 9 updates: bit for bit after each update."""
    whole = digests(comm, ONE, shared / "one")
    assert len(whole) == 9
    assert digests(comm, SPLIT[where], shared / "split") == whole


def test_one_stage_is_the_constant_method(comm: Communicator, shared: Path) -> None:
    """Law 7, float32, 9 updates: a table of one stage, the constant method, and multistep whose factor is 1."""
    whole = digests(comm, ONE, shared / "one")
    plain = {"samples": 450, "global_batch": 50, "lr": 0.05, "weight_decay": 1e-3}
    constant = ScheduleConfig("constant", **plain)  # type: ignore[arg-type]
    multistep = ScheduleConfig("multistep", milestones=(1.0,), factor=1.0, **plain)  # type: ignore[arg-type]
    assert digests(comm, ONE, shared / "constant", constant) == whole
    assert digests(comm, ONE, shared / "multistep", multistep) == whole
    other = dataclasses.replace(multistep, factor=0.5)
    assert digests(comm, ONE, shared / "other", other)[:7] == whole[:7]
    assert digests(comm, ONE, shared / "other again", other)[7] != whole[7]


@pytest.mark.parametrize("seed", [0, 1])
def test_every_sample_of_an_epoch_is_seen_exactly_once(comm: Communicator, shared: Path, seed: int) -> None:
    """Law 9: the positions that the loop asked every rank's source for, over a run of 10 updates in three stages (824
    samples, epochs of 101: 8 whole ones, each ending inside a window): every sample once in each of them."""
    source = rig.memory(rig.FLAT, samples=101)
    source.seed = seed
    config = rig.settings(rig.SHORT_STAGES, seed=seed)
    trip = rig.trained(comm, config, rig.built(rig.mlp), source, shared)
    total = trip.outcome.progress.samples_seen
    dealt = rig.everywhere(comm, [(request.begin, request.size) for request in source.asked])
    seen = sorted(place for rank in dealt for begin, size in rank for place in range(begin, begin + size))
    assert seen == list(range(total))
    planned = requests_of(trip.run.schedule, Progress(), 8, comm.rank, comm.world_size)
    assert [(request.begin, request.size) for request in planned] == [tuple(pair) for pair in dealt[comm.rank]]
    at = order.positions(seed, 101, 0, total)
    pairs = Counter(zip(at.epoch.tolist(), at.index.tolist(), strict=True))
    assert set(pairs.values()) == {1}
    for epoch in range(total // 101):
        assert {index for e, index in pairs if e == epoch} == set(range(101))
    assert total // 101 == 8
    ends = [w.begin + w.global_batch for w in windows(trip.run.schedule, Progress(), 8)]
    assert not [end for end in ends if end % 101 == 0]


def test_two_seeds_and_two_epochs_give_two_orders(comm: Communicator) -> None:
    """Law 9: seeds 0 and 1, epochs 0 and 1 of 101 samples."""
    orders = {tuple(order.epoch_order(seed, 101, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_every_rank_decides_the_same(comm: Communicator) -> None:
    """Law 6 over ranks: the decisions of a whole run, computed by each rank for itself, twice."""
    schedule = resolve(rig.settings(rig.THREE_STAGES, warmup=(500, 0.01)).schedule, 331)

    def decisions() -> list[list[float]]:
        progress, made = Progress(), []
        while (decision := decide(schedule, progress)) is not None:
            made.append([*dataclasses.astuple(decision), progress.samples_seen])
            progress = progress.after(decision.global_batch)
        return made

    everyone = rig.everywhere(comm, decisions())
    assert len(everyone[0]) == 200
    assert all(other == everyone[0] for other in everyone)
    assert decisions() == everyone[0]
