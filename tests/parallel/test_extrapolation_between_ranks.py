"""Extrapolation between ranks: an independent NumPy implementation, equal replicas, no collective more, resumes.

Virtual workers are 12 throughout, so that 1, 2, 3 and 4 ranks can share them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import extrapolation_reference as by_hand
import pytest
import rig
import torch
from numpy_reference import Rule
from reference import Stage
from torch import nn

from hvdbs import checkpoint
from hvdbs.batching import Window
from hvdbs.checkpoint import Saver, take_back
from hvdbs.comm import AgreedError, Communicator
from hvdbs.comm.local import Solo
from hvdbs.config import CheckpointConfig, Config
from hvdbs.errors import HvdbsError
from hvdbs.progress import Progress
from hvdbs.reach import ExtrapolationConfig, UntilConfig
from hvdbs.schedule import Decision
from hvdbs.step import Replica, Requests

pytestmark = pytest.mark.parallel

WORKERS = 12
KEPT = CheckpointConfig(every_samples=1, every_minutes=0, keep_last=100)


def away(direction: str, granularity: str | None = None, ratio: float = 0.7, **fields: Any) -> ExtrapolationConfig:
    bare = ExtrapolationConfig(direction, granularity, ratio, **fields)  # type: ignore[arg-type]
    return dataclasses.replace(bare, virtual_workers=WORKERS) if bare.reads_workers else bare


DIRECTIONS = [
    away("local_past"),
    away("local_past", "micro"),
    away("global_past"),
    away("same_sample"),
    away("same_sample", "micro"),
    *(away(f"noise_{kind}", ratio=2.0) for kind in ("uniform", "gaussian", "weight", "filter")),
]


def name_of(value: Any) -> str:
    return f"{value.direction}-{value.unit}" if isinstance(value, ExtrapolationConfig) else ""


def tanh() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, rig.CLASSES))


# --- against NumPy


OPTIMIZERS = {  # and what gradients are clipped to
    "sgd": (Rule(), None),
    "heavy ball": (Rule(momentum=0.9), 0.3),
    "nesterov": (Rule(momentum=0.9, nesterov=True), None),
    "adagrad": (Rule("adagrad", reset=True), None),
    "lars": (Rule("lars", momentum=0.9), None),
}
# A trust coefficient of 0.001 stands beside lr in LARS.
LARS_STAGES = tuple(dataclasses.replace(stage, lr=100 * stage.lr) for stage in rig.SHORT_STAGES)


def ruled(config: Config, rule: Rule) -> Config:
    """``config`` with this optimizer."""
    fields = {"name": rule.name, "momentum": rule.momentum, "nesterov": rule.nesterov}
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **fields))  # type: ignore[arg-type]


def walk(source: rig.Memory, start: rig.Tensors, stages: Sequence[Stage], rules: by_hand.Rules) -> by_hand.Walk:
    inputs, labels = source.inputs.numpy(), source.labels.numpy()
    return by_hand.train(
        {name: value.numpy() for name, value in start.items()},
        lambda x, chosen: by_hand.network(x, inputs[chosen], labels[chosen]),
        source.stream(1500),
        stages,
        rules,
    )


@pytest.mark.parametrize("micro_batch", [4, 50], ids=["accumulated", "single"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("extrapolation", DIRECTIONS, ids=name_of)
def test_every_direction_with_every_optimizer_is_that_of_numpy_and_replicas_stay_equal(
    comm: Communicator, shared: Path, extrapolation: ExtrapolationConfig, optimizer: str, micro_batch: int
) -> None:
    """float64, 10 updates in three stages, weight decay: parameters and losses to 1e-12; replicas bit for bit. With
    micro-batches of 4 a window has 13 to 33, with those of 50 it has 1 to 3, and virtual workers and ranks without."""
    rule, clip_norm = OPTIMIZERS[optimizer]
    lars = rule.name == "lars"
    if lars:
        extrapolation = dataclasses.replace(extrapolation, ratio=None, length=0.1 if extrapolation.noise else 0.03)
    stages = LARS_STAGES if lars else rig.SHORT_STAGES
    source, model, watch = rig.memory(rig.FLAT), rig.built(tanh), rig.Watch()
    start = rig.snapshot(model)
    config = rig.settings(stages, micro_batch=micro_batch, clip_norm=clip_norm, extrapolation=extrapolation)
    rig.trained(comm, ruled(config, rule), model, source, shared, watch)
    assert len({tuple(digests) for digests in rig.everywhere(comm, watch.digests)}) == 1
    rules = by_hand.Rules(
        extrapolation.direction,
        extrapolation.unit,
        extrapolation.ratio or 0.0,
        extrapolation.length,
        workers=WORKERS,
        optimizer=rule,
        clip_norm=clip_norm or float("inf"),
        micro_batch=micro_batch,
    )
    found = walk(source, start, stages, rules)
    expected = {name: torch.from_numpy(value) for name, value in found.x.items()}
    assert rig.worst_error(rig.snapshot(model), expected) < 1e-12
    assert rig.worst_of(watch.losses, found.losses) < 1e-12
    assert rig.distance(expected, start) > 1e-3, "nothing was learned"


@pytest.mark.parametrize("until", [UntilConfig(samples=260), UntilConfig(stage=1)], ids=["samples", "stage"])
@pytest.mark.parametrize("direction", ["local_past", "noise_gaussian"])
def test_it_ends_where_numpy_ends_it(comm: Communicator, shared: Path, direction: str, until: UntilConfig) -> None:
    """An absolute length; float64, 1e-12 after 10 updates, of which the first 5 or 4 are displaced."""
    source, model = rig.memory(rig.FLAT), rig.built(tanh)
    start = rig.snapshot(model)
    extrapolation = dataclasses.replace(away(direction), ratio=None, length=0.03, until=until)
    config = rig.settings(rig.SHORT_STAGES, momentum=0.0, extrapolation=extrapolation)
    rig.trained(comm, config, model, source, shared)
    ends = (until.samples or float("inf"), until.stage or float("inf"))
    rules = by_hand.Rules(direction, extrapolation.unit, length=0.03, workers=WORKERS, until=ends)
    found = walk(source, start, rig.SHORT_STAGES, rules)
    expected = {name: torch.from_numpy(value) for name, value in found.x.items()}
    assert rig.worst_error(rig.snapshot(model), expected) < 1e-12


# --- laws


@pytest.mark.parametrize("optimizer", ["heavy ball", "lars"])
@pytest.mark.parametrize("extrapolation", DIRECTIONS, ids=name_of)
def test_training_with_batch_norm_and_dropout_does_not_depend_on_world_size(
    comm: Communicator, shared: Path, extrapolation: ExtrapolationConfig, optimizer: str
) -> None:
    """Law 1, float64, 1e-12, parameters and buffers after 10 updates: all ranks against rank 0 alone."""
    stages = rig.SHORT_STAGES
    if optimizer == "lars":
        stages = LARS_STAGES
        extrapolation = dataclasses.replace(extrapolation, ratio=None, length=0.1 if extrapolation.noise else 0.03)
    config = rig.settings(stages, micro_batch=6, clip_norm=0.4, extrapolation=extrapolation)
    config = ruled(config, OPTIMIZERS[optimizer][0])

    def alone() -> rig.Tensors:
        model = rig.built(rig.ConvNet)
        rig.trained(Solo(), config, model, rig.memory(rig.IMAGE), shared / "alone")
        return rig.snapshot(model)

    expected = rig.from_rank_0(comm, alone)
    model = rig.built(rig.ConvNet)
    rig.trained(comm, config, model, rig.memory(rig.IMAGE), shared / "all")
    assert rig.worst_error(rig.snapshot(model), expected) < 1e-12


@pytest.mark.parametrize("optimizer", ["heavy ball", "lars"])
def test_length_0_is_bitwise_the_plain_method_on_all_ranks(comm: Communicator, shared: Path, optimizer: str) -> None:
    """Law 7, float32, after each of 10 updates."""
    rule, runs = OPTIMIZERS[optimizer][0], []
    for extrapolation in (None, *(dataclasses.replace(one, ratio=0.0) for one in DIRECTIONS)):
        watch = rig.Watch()
        config = ruled(rig.settings(rig.SHORT_STAGES, dtype="float32", extrapolation=extrapolation), rule)
        model, source = rig.built(rig.ConvNet, "float32"), rig.memory(rig.IMAGE, dtype="float32")
        rig.trained(comm, config, model, source, shared, watch)
        runs.append(watch.digests)
    assert all(digests == runs[0] for digests in runs)


@pytest.mark.parametrize("extrapolation", DIRECTIONS, ids=name_of)
@pytest.mark.parametrize("global_batch", [8, 131])
def test_collectives_and_gradients_are_as_many_as_without_and_overlap_as_they_do(
    comm: Communicator, extrapolation: ExtrapolationConfig, global_batch: int
) -> None:
    """In an update that is displaced: the same sums in the same order; as many forwards, twice as many for the gradient
    at x; and the first bucket still leaves while other gradients of the last backward are to come."""

    def second_update(chosen: ExtrapolationConfig | None) -> list[rig.Event]:
        counted, model = rig.Counted(comm), rig.built(rig.ConvNet)
        counted.watch(model)
        stages = (Stage(1000, global_batch, 0.1),)
        replica = Replica(model, rig.settings(stages, bucket_bytes=128, extrapolation=chosen), counted)
        source = rig.memory(rig.IMAGE)
        for step in range(2):
            counted.events.clear()
            window = Window(step * global_batch, global_batch, 8)
            batches = source.train(window.dealt_to(comm.rank, comm.world_size))
            replica.run(window, Decision(0, global_batch, 0.1, 0.0), step, batches, Requests())
        assert len([e for e in counted.events if e.kind != "arrived" and e.kind != "forward"]) == replica.collectives
        return counted.events

    plain, displaced = second_update(None), second_update(extrapolation)
    forwards = [sum(event.kind == "forward" for event in events) for events in (plain, displaced)]
    assert forwards[1] == forwards[0] * (2 if extrapolation.direction == "same_sample" else 1)
    tails = []
    for events in (plain, displaced):
        last = max((k for k, event in enumerate(events) if event.kind == "forward"), default=-1)
        tails.append([(event.kind, event.name, event.nbytes) for event in events[last + 1 :]])
        assert not any(event.kind == "sum" for event in events[: last + 1])
    assert tails[0] == tails[1]


# --- resume

STAGES = (Stage(140, 50, 0.05, 1e-3), Stage(200, 77, 0.02, 5e-4), Stage(390, 131, 0.01, 2e-3))  # 3 + 3 + 3 updates
KEEPERS = [away("local_past"), away("local_past", "micro"), away("global_past")]


def settings(extrapolation: ExtrapolationConfig, dtype: str = "float64") -> Config:
    return rig.settings(STAGES, micro_batch=6, dtype=dtype, clip_norm=0.4, checkpoint=KEPT, extrapolation=extrapolation)


def load(folder: Path) -> checkpoint.State:
    assert checkpoint.fault(folder) is None
    return checkpoint.load((folder / "model.pt").read_bytes(), torch.device("cpu"))


@pytest.mark.parametrize("extrapolation", KEEPERS, ids=name_of)
def test_resuming_from_any_step_is_bitwise_as_never_having_stopped(
    comm: Communicator, shared: Path, extrapolation: ExtrapolationConfig
) -> None:
    """Law 4, float32, batch norm, dropout: from each checkpoint of 9 updates a fresh model of other weights goes on."""
    config, source = settings(extrapolation, "float32"), rig.memory(rig.IMAGE, dtype="float32")
    whole = rig.Watch()
    rig.trained(comm, config, rig.built(rig.ConvNet, "float32"), source, shared / "whole", whole)
    for step in range(1, 9):
        folder = shared / "whole" / f"step-{step}"
        own = {f"rank-{rank}.pt" for rank in range(comm.world_size)} if extrapolation.reads_workers else set()
        assert {path.name for path in folder.iterdir()} == {"model.pt", "manifest.json", *own}
        watch, model = rig.Watch(), rig.built(rig.ConvNet, "float32", seed=99)
        rig.trained(comm, config, model, source, shared / f"on-{step}", watch, load(folder), saved_in=folder)
        assert watch.digests == whole.digests[step:], f"from step {step}"
        comm.barrier()


@pytest.mark.parametrize("extrapolation", KEEPERS, ids=name_of)
def test_virtual_workers_are_regrouped_on_another_number_of_ranks(
    comm: Communicator, shared: Path, extrapolation: ExtrapolationConfig
) -> None:
    """Law 4, another world_size, float64, 1e-12 at the end: rank 0 alone to steps 1, 4 and 7, then all ranks; and all
    ranks to those steps, then rank 0 alone."""
    config, source = settings(extrapolation), rig.memory(rig.IMAGE)

    def alone() -> rig.Tensors:
        model = rig.built(rig.ConvNet)
        rig.trained(Solo(), config, model, rig.memory(rig.IMAGE), shared / "alone")
        return rig.snapshot(model)

    expected = rig.from_rank_0(comm, alone)
    rig.trained(comm, config, rig.built(rig.ConvNet), source, shared / "all")
    for step in (1, 4, 7):
        folder, model = shared / "alone" / f"step-{step}", rig.built(rig.ConvNet, seed=99)
        rig.trained(comm, config, model, source, shared / f"spread-{step}", None, load(folder), saved_in=folder)
        assert rig.worst_error(rig.snapshot(model), expected) < 1e-12, f"from step {step} of one rank"

        def gathered(step: int = step) -> rig.Tensors:
            folder, model = shared / "all" / f"step-{step}", rig.built(rig.ConvNet, seed=99)
            place = shared / f"gathered-{step}"
            rig.trained(Solo(), config, model, rig.memory(rig.IMAGE), place, None, load(folder), saved_in=folder)
            return rig.snapshot(model)

        assert rig.worst_error(rig.from_rank_0(comm, gathered), expected) < 1e-12, f"from step {step} of all ranks"


def test_one_virtual_worker_per_rank_is_dropped_aloud_on_another_number_of_ranks(
    comm: Communicator, shared: Path
) -> None:
    """virtual_workers: world_size. On as many ranks the resume has all gradients; on another number it has none, so
    that its next update is a plain one, and says so."""
    config = settings(ExtrapolationConfig("local_past", ratio=0.7, virtual_workers="world_size"))
    source = rig.memory(rig.IMAGE)
    rig.trained(comm, config, rig.built(rig.ConvNet), source, shared / "all")
    folder = shared / "all" / "step-4"
    same = Replica(rig.built(rig.ConvNet), config, comm)
    take_back(same, load(folder), folder, pytest.fail)
    assert list(same.extrapolation.own_state()) == [comm.rank]
    said: list[str] = []
    alone = Replica(rig.built(rig.ConvNet), config, Solo())
    take_back(alone, load(folder), folder, said.append)
    if comm.world_size > 1:
        assert alone.extrapolation.own_state() == {}
        assert len(said) == 1
        assert f"the gradients kept by {comm.world_size} ranks are dropped" in said[0]
        assert "there are 1 now; the next update is a plain one" in said[0]


def test_without_the_gradients_that_were_kept_the_next_update_is_the_plain_one(
    comm: Communicator, shared: Path
) -> None:
    """Bit for bit, from a checkpoint whose gradients are not taken back; the update after it is displaced again."""
    config, source = settings(away("local_past")), rig.memory(rig.IMAGE)
    rig.trained(comm, config, rig.built(rig.ConvNet), source, shared / "all")
    folder = shared / "all" / "step-4"
    assert len(list(folder.glob("rank-*"))) == comm.world_size
    watches = [rig.Watch(), rig.Watch()]
    for watch, chosen in zip(watches, (config.extrapolation, ExtrapolationConfig()), strict=True):
        model, made = rig.built(rig.ConvNet, seed=99), dataclasses.replace(config, extrapolation=chosen)
        rig.trained(comm, made, model, source, shared / chosen.direction, watch, load(folder))
    assert len(watches[0].digests) == 5
    assert watches[0].digests[0] == watches[1].digests[0]
    assert watches[0].digests[1] != watches[1].digests[1]


def test_beyond_its_end_ranks_have_no_files_of_their_own(comm: Communicator, shared: Path) -> None:
    extrapolation = dataclasses.replace(away("local_past"), until=UntilConfig(stage=1))
    rig.trained(comm, settings(extrapolation), rig.built(rig.ConvNet), rig.memory(rig.IMAGE), shared)
    comm.barrier()
    names = [{path.name for path in (shared / f"step-{step}").glob("rank-*")} for step in (3, 4)]
    assert len(names[0]) == comm.world_size
    assert names[1] == set()


def test_a_damaged_file_of_a_rank_is_refused_by_name(comm: Communicator, shared: Path) -> None:
    config = settings(away("local_past"))
    rig.trained(comm, config, rig.built(rig.ConvNet), rig.memory(rig.IMAGE), shared)
    folder = shared / "step-4"
    state = load(folder)
    comm.barrier()
    if comm.rank == 0:
        data = bytearray((folder / "rank-0.pt").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "rank-0.pt").write_bytes(data)
        with pytest.raises(HvdbsError, match=r"rank-0\.pt is not what manifest\.json says; remove step-4"):
            take_back(Replica(rig.built(rig.ConvNet), config, comm), state, folder, pytest.fail)
        (folder / "rank-0.pt").unlink()
        assert checkpoint.fault(folder) == "rank-0.pt is missing or unreadable"


def test_run_directories_that_nodes_do_not_share_are_refused(comm: Communicator, shared: Path) -> None:
    """Each rank with a folder of its own, as on a node's local disk: said by all before a manifest vouches for it."""
    config = settings(away("local_past"))
    if comm.world_size == 1:
        pytest.skip("one rank shares with itself")
    place = shared / f"node-{comm.rank}"
    replica, window = Replica(rig.built(rig.ConvNet), config, comm), Window(0, 50, 6)
    batches = rig.memory(rig.IMAGE).train(window.dealt_to(comm.rank, comm.world_size))
    replica.run(window, Decision(0, 50, 0.1, 0.0), 0, batches, Requests())
    with pytest.raises(AgreedError, match="must be on a file system that all nodes share"):
        Saver(place, config, comm, None).save(replica, Progress(1, 50), None, {}, False, {})
    assert not list(place.rglob("manifest.json"))
