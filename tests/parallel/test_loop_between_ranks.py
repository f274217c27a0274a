"""The loop where ranks differ in what they want or what goes wrong: all do the same thing at the same place."""

from __future__ import annotations

from pathlib import Path

import pytest
import rig
import torch

from hvdbs import checkpoint
from hvdbs.checkpoint import Saver
from hvdbs.comm import AgreedError, Communicator
from hvdbs.config import CheckpointConfig
from hvdbs.progress import Progress
from hvdbs.step import Requests

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_ends_all_ranks_with_step_stage_and_samples(
    comm: Communicator, shared: Path, value: float
) -> None:
    """One sample of the sixth window (stage 1, samples 277 to 353) is not a number for the one rank that is dealt
    it."""
    source = rig.memory(rig.FLAT)
    source.inputs[source.stream(300)[299]] = value
    watch = rig.Watch()
    with pytest.raises(AgreedError) as caught:
        rig.trained(comm, rig.settings(rig.SHORT_STAGES), rig.built(rig.mlp), source, shared, watch)
    message = str(caught.value)
    for words in ("loss: nan", "step 6", "stage 1", "277 on", "last whole checkpoint: none"):
        assert words in message
    assert len(set(rig.everywhere(comm, message))) == 1
    assert len(watch.digests) == 5
    assert not list(shared.glob("step-*"))


@pytest.mark.parametrize("who", ["first", "last"])
def test_a_stop_that_one_rank_asks_for_stops_all_at_the_same_window(comm: Communicator, shared: Path, who: str) -> None:
    """Asked for after update 3, answered after update 4, whoever asks; with a checkpoint, from which the run goes on to
    the end of one that was not stopped, bit for bit."""
    config = rig.settings(rig.SHORT_STAGES)
    source = rig.memory(rig.IMAGE)
    whole = rig.trained(comm, config, rig.built(rig.ConvNet), source, shared / "whole")
    requests, watch = Requests(), rig.Watch()

    def ask(progress: Progress) -> None:
        if progress.step == 3 and comm.rank == {"first": 0, "last": comm.world_size - 1}[who]:
            requests.stop = True

    watch.after = ask
    stopped = rig.trained(comm, config, rig.built(rig.ConvNet), source, shared / "stopped", watch, requests=requests)
    assert not stopped.outcome.finished
    assert stopped.outcome.progress == Progress(4, 200, stage=0)
    assert stopped.outcome.scores is None
    folder = shared / "stopped" / "step-4"
    assert stopped.run.saver.latest == folder
    assert checkpoint.fault(folder) is None
    state = checkpoint.load((folder / "model.pt").read_bytes(), torch.device("cpu"))
    on = rig.trained(comm, config, rig.built(rig.ConvNet, seed=99), source, shared / "on", None, state)
    assert on.outcome.finished
    assert on.digest == whole.digest


def test_a_stop_in_the_last_window_is_a_finished_run(comm: Communicator, shared: Path) -> None:
    requests, watch = Requests(), rig.Watch()

    def ask(progress: Progress) -> None:
        requests.stop = requests.stop or progress.step == 9

    watch.after = ask
    trip = rig.trained(
        comm,
        rig.settings(rig.SHORT_STAGES),
        rig.built(rig.mlp),
        rig.memory(rig.FLAT),
        shared,
        watch,
        requests=requests,
    )
    assert trip.outcome.finished
    assert trip.outcome.scores is not None


def test_rank_0s_clock_makes_all_ranks_save(comm: Communicator, shared: Path) -> None:
    """every_minutes of a microsecond: due at each window, and only rank 0 reads its clock."""
    config = rig.settings(
        rig.SHORT_STAGES, checkpoint=CheckpointConfig(every_minutes=1e-6 / 60, keep_last=3, keep_best=False)
    )
    rig.trained(comm, config, rig.built(rig.mlp), rig.memory(rig.FLAT), shared)
    comm.barrier()
    kept = sorted(path.name for path in shared.iterdir())
    assert kept == ["latest", "step-10", "step-8", "step-9"]
    assert (shared / "latest").read_text() == "step-10\n"


def test_the_best_checkpoint_outlives_later_ones(comm: Communicator, shared: Path) -> None:
    """keep_last 1 with an evaluation after every update: the pointer ``best`` names a whole checkpoint whose score
    is the highest of all."""
    config = rig.settings(rig.SHORT_STAGES, checkpoint=CheckpointConfig(every_samples=1, every_minutes=0, keep_last=1))
    watch = rig.Watch()
    rig.trained(comm, config, rig.built(rig.mlp), rig.memory(rig.FLAT), shared, watch, evaluation_period=1)
    comm.barrier()
    scores = [s.top1 for s in watch.scores]
    assert len(scores) == 10
    best = 1 + scores.index(max(scores))
    assert (shared / "best").read_text() == f"step-{best}\n"
    assert checkpoint.fault(shared / f"step-{best}") is None
    assert {path.name for path in shared.glob("step-*")} == {f"step-{best}", "step-10"}


def test_a_checkpoint_that_cannot_be_written_ends_all_ranks_with_its_path(comm: Communicator, shared: Path) -> None:
    """The folder for checkpoints is a file."""
    place = shared / "checkpoints"
    if comm.rank == 0:
        place.write_text("in the way")
    comm.barrier()
    config = rig.settings(rig.SHORT_STAGES)
    with pytest.raises(AgreedError, match=r"cannot be written.*last whole one: none") as caught:
        rig.trained(
            comm,
            config,
            rig.built(rig.mlp),
            rig.memory(rig.FLAT),
            shared,
            saver=Saver(place, config, comm, None),
        )
    assert str(place) in str(caught.value)
    assert len(set(rig.everywhere(comm, str(caught.value)))) == 1
