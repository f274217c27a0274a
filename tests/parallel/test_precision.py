"""Autocast: the same training on any number of ranks and after a resume, to what the precision allows.

Sums in another order differ by 1e-7; where a rounding to 8 (bf16) or 11 (fp16) bits falls the other way, that becomes
4e-3 or 5e-4 of one value. So the tolerance is that of single roundings, not of float32.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import rig
import torch

from hvdbs import checkpoint
from hvdbs.comm import AgreedError, Communicator
from hvdbs.comm.local import Solo
from hvdbs.config import CheckpointConfig, Config
from hvdbs.planning import update_bytes

pytestmark = pytest.mark.parallel


def cast(autocast: str, **rules: object) -> Config:
    config = rig.settings(rig.SHORT_STAGES, dtype="float32", **rules)  # type: ignore[arg-type]
    return dataclasses.replace(config, autocast=autocast)  # type: ignore[arg-type]


@pytest.mark.parametrize(("autocast", "tolerance"), [("bf16", 1e-2), ("fp16", 2e-3)])
def test_autocast_trains_the_same_on_any_number_of_ranks(
    comm: Communicator, shared: Path, autocast: str, tolerance: float
) -> None:
    """Law 1: relative 2-norm over all parameters and buffers below 1e-2 (bf16) and 2e-3 (fp16) after 10 updates in
    three stages, batch norm and dropout, against one process; bitwise equal over the ranks; and not that of float32."""
    source = rig.memory(rig.IMAGE, dtype="float32")
    ends = []
    for who, kind, folder in (
        (comm, autocast, shared),
        (Solo(), autocast, shared / f"alone-{comm.rank}"),
        (Solo(), "none", shared / f"plain-{comm.rank}"),
    ):
        trip = rig.trained(who, cast(kind, clip_norm=0.4), rig.built(rig.ConvNet, "float32"), source, folder)
        ends.append((trip.digest, rig.snapshot(trip.model), trip.outcome.progress))
    assert ends[0][2] == ends[1][2]
    assert rig.distance(ends[0][1], ends[1][1]) < tolerance
    assert rig.distance(ends[1][1], ends[2][1]) > 1e-6
    assert len(set(rig.everywhere(comm, ends[0][0]))) == 1


def test_an_overflow_in_fp16_is_skipped_by_all_ranks_until_the_scale_fits(comm: Communicator, shared: Path) -> None:
    """From the checkpoint of update 1, with a loss scale of 2^24 put into it: windows overflow and are skipped on every
    rank alike, the scale halves each time, then the run goes on to its end with finite weights."""
    source = rig.memory(rig.IMAGE, dtype="float32")
    config = cast("fp16", checkpoint=CheckpointConfig(every_samples=1, every_minutes=0, keep_last=100))
    rig.trained(comm, config, rig.built(rig.ConvNet, "float32"), source, shared / "whole")
    folder = next(shared.rglob("step-1"))
    state = checkpoint.load((folder / "model.pt").read_bytes(), torch.device("cpu"))
    comm.barrier()
    state = dataclasses.replace(state, scaler={**state.scaler, "scale": 2.0**24})
    watch = rig.Watch()
    trip = rig.trained(comm, config, rig.built(rig.ConvNet, "float32"), source, shared / "again", watch, state)
    progress = trip.outcome.progress
    assert 0 < progress.skipped < 9
    assert progress.step == 10
    assert trip.run.replica.scaler.get_scale() == 2.0 ** (24 - progress.skipped)
    skipped = [not math.isfinite(norm) for norm in watch.gradient_norms if norm is not None]
    assert skipped == [True] * progress.skipped + [False] * (9 - progress.skipped)
    assert all(bool(p.isfinite().all()) for p in trip.model.parameters())
    assert rig.everywhere(comm, trip.digest) == [trip.digest] * comm.world_size


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_a_resume_under_autocast_is_bitwise(comm: Communicator, shared: Path, autocast: str) -> None:
    """Law 4 with the scaler's state: from the checkpoint of update 4 the same bits at the end as without stopping."""
    source = rig.memory(rig.IMAGE, dtype="float32")
    config = cast(autocast, checkpoint=CheckpointConfig(every_samples=1, every_minutes=0, keep_last=100))
    whole = rig.trained(comm, config, rig.built(rig.ConvNet, "float32"), source, shared / "whole")
    folder = next(path for path in sorted(shared.rglob("step-4")) if "whole" in str(path))
    state = checkpoint.load((folder / "model.pt").read_bytes(), torch.device("cpu"))
    comm.barrier()
    again = rig.trained(comm, config, rig.built(rig.ConvNet, "float32", seed=9), source, shared / "again", state=state)
    assert again.digest == whole.digest
    assert (again.outcome.progress, autocast == "fp16") == (whole.outcome.progress, bool(state.scaler))


def test_a_loss_that_is_not_finite_is_no_overflow(comm: Communicator, shared: Path) -> None:
    source = rig.memory(rig.IMAGE, dtype="float32")
    source = dataclasses.replace(source, inputs=torch.full_like(source.inputs, math.nan))
    with pytest.raises(AgreedError, match="is not finite"):
        rig.trained(comm, cast("fp16"), rig.built(rig.ConvNet, "float32"), source, shared)


def test_gradients_on_an_fp16_wire_take_half_the_bytes_and_train_alike(comm: Communicator, shared: Path) -> None:
    """Relative 2-norm below 2e-3 after 10 updates against full gradients in one process: each rank rounds its share to
    11 bits (5e-4) once per update. Replicas stay bitwise equal and a resume from update 4 ends in the same bits."""
    source = rig.memory(rig.IMAGE, dtype="float32")
    every = CheckpointConfig(every_samples=1, every_minutes=0, keep_last=100)
    plain = cast("none", clip_norm=0.4, checkpoint=every)
    wired = dataclasses.replace(plain, communication=dataclasses.replace(plain.communication, wire="fp16"))
    alone = rig.trained(Solo(), plain, rig.built(rig.ConvNet, "float32"), source, shared / f"alone-{comm.rank}")
    counted = rig.Counted(comm)
    trip = rig.trained(counted, wired, rig.built(rig.ConvNet, "float32"), source, shared / "wired")
    assert 0 < rig.distance(rig.snapshot(trip.model), rig.snapshot(alone.model)) < 2e-3
    assert rig.everywhere(comm, trip.digest) == [trip.digest] * comm.world_size
    reducers = [run.replica.reducer for run in (alone.run, trip.run)]
    carry = trip.run.replica.carry.nbytes
    assert (reducers[0].reduced_bytes - carry) == 2 * (reducers[1].reduced_bytes - carry)
    assert update_bytes(trip.model, wired) == reducers[1].reduced_bytes
    folder = next(path for path in sorted(shared.rglob("step-4")) if "wired" in str(path))
    state = checkpoint.load((folder / "model.pt").read_bytes(), torch.device("cpu"))
    comm.barrier()
    again = rig.trained(comm, wired, rig.built(rig.ConvNet, "float32", seed=9), source, shared / "again", state=state)
    assert again.digest == trip.digest


def test_one_process_sends_nothing_but_rounds_all_the_same(shared: Path, comm: Communicator) -> None:
    """The wire is part of the training: with it, one process trains as several do, to the rounding of the shares."""
    source = rig.memory(rig.FLAT, dtype="float32")
    config = cast("none")
    wired = dataclasses.replace(config, communication=dataclasses.replace(config.communication, wire="fp16"))
    folder = shared / f"alone-{comm.rank}"
    ends = [rig.trained(Solo(), c, rig.built(rig.mlp, "float32"), source, folder).digest for c in (config, wired)]
    assert ends[0] != ends[1]
