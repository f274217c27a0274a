"""Law 4: two runs of one config are bitwise equal, and so are a run and its resumption from any step.

Same world_size: bits. Another world_size: law 1's tolerance.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import reference
import rig
import torch
from reference import Stage
from torch import nn

from hvdbs import checkpoint
from hvdbs.assembly import Assembled, assemble
from hvdbs.checkpoint import Saver, State
from hvdbs.comm import Communicator
from hvdbs.comm.local import Solo
from hvdbs.config import CheckpointConfig, Config, DataConfig, EvaluationConfig, LoggingConfig, ModelConfig
from hvdbs.loop import train
from hvdbs.reach import ExtrapolationConfig, UntilConfig
from hvdbs.recorder import Account, Recorder, Totals
from hvdbs.replicas import state_digest
from hvdbs.schedule import ScheduleConfig, StageConfig
from hvdbs.stage_tables import resolve
from hvdbs.step import Requests

pytestmark = pytest.mark.parallel


def wide() -> nn.Module:
    """16,000 parameters: with 60 KB of float32 the back-ends split a sum over ranks by its length, so that a buffer put
    together from other tensors, as Horovod's fusion does, adds in another order."""
    return nn.Sequential(
        nn.Linear(20, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 96),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(96, 5),
    )


@pytest.mark.parametrize("bucket_bytes", [1, 15_000])
def test_two_runs_are_bitwise_equal_whatever_the_timing(comm: Communicator, shared: Path, bucket_bytes: int) -> None:
    """Law 4, float32: a run without delays and two with sleeps of up to 2 ms whenever a gradient arrives, drawn by
    every rank from a seed of its own: parameters, buffers, momentum and loss after each of 10 updates, bit for bit."""
    runs: list[list[Any]] = []
    for run in range(3):
        model = rig.built(wide, "float32")
        if run:
            rig.delay_gradients(model, seed=100 * run + comm.rank, most_seconds=0.002)
        watch = rig.Watch()
        config = rig.settings(rig.SHORT_STAGES, dtype="float32", bucket_bytes=bucket_bytes, clip_norm=0.4)
        source = rig.memory(rig.FLAT, dtype="float32")
        rig.trained(comm, config, model, source, shared / str(run), watch, evaluation_period=331)
        runs.append([watch.digests, watch.losses, watch.gradient_norms, watch.scores])
    assert len(runs[0][0]) == 10
    assert runs[1] == runs[0]
    assert runs[2] == runs[0]


# --- resume

STAGES = (Stage(140, 50, 0.05, 1e-3), Stage(200, 77, 0.02, 5e-4), Stage(390, 131, 0.01, 2e-3))  # 3 + 3 + 3 updates
KEPT = CheckpointConfig(every_samples=1, every_minutes=0, keep_last=100)


class Rows:
    """Stands for the run directory and the display of rank 0's Account: keeps the rows."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def add(self, row: Any) -> None:
        timed = ("second", "seconds")
        cells = {k: v for k, v in dataclasses.asdict(row).items() if not k.endswith(timed)}
        self.kept.append({"kind": type(row).__name__, **cells})

    step = stage = evaluation = decision = add

    def layers(self, rows: list[Any]) -> None:
        for row in rows:
            self.add(row)

    def sync(self) -> None:
        return None


class Ignored:
    """A display that shows nothing."""

    def step(self, row: Any) -> None:
        return None

    def evaluation(self, row: Any) -> None:
        return None


def logged_run(
    comm: Communicator, config: Config, folder: Path, state: State | None, seed: int
) -> tuple[str, dict[str, Any], list[dict[str, Any]], list[Any]]:
    """Collective. A run from ``state`` with hvdbs's own Account on every rank; weights first drawn from ``seed``.

    Returns the digest of the state at the end, the totals without times, the rows without times, the scores.
    """
    source, rows = rig.memory(rig.IMAGE, dtype=config.dtype), Rows()
    totals = Totals() if state is None else Totals.of(state.totals)
    account: Recorder = Account(
        config,
        comm,
        resolve(config.schedule, source.train_samples),
        source.train_samples,
        rows,  # type: ignore[arg-type]  # all that is used of a RunDirectory
        Ignored(),  # type: ignore[arg-type]
        totals,
    )
    saver = Saver(folder, config, comm, None)
    model = rig.built(rig.ConvNet, config.dtype, seed=seed)
    trip = rig.trained(comm, config, model, source, folder, account, state, saver=saver, evaluation_period=331)
    counted = dataclasses.asdict(totals)
    for sums in ("run", "in_stage", "since_row"):
        counted[sums] = {k: v for k, v in counted[sums].items() if not k.endswith("seconds")}
    if comm.rank > 0:  # rank 0 runs the micro-batches that the noise scale is measured with, and keeps its account
        counted.pop("noise")
        rows.kept = [{name: value for name, value in row.items() if name != "noise_scale"} for row in rows.kept]
    return trip.digest, counted, rows.kept, [trip.outcome]


def test_resuming_from_any_step_is_bitwise_as_never_having_stopped(comm: Communicator, shared: Path) -> None:
    """Law 4, float32: a run of 9 updates in three stages (batch norm, dropout, momentum, clipping) saves after each;
    from every one of its checkpoints a fresh model of other weights goes on: parameters, buffers and momentum at the
    end, the totals and every row of the log (times apart, which differ between any two runs), bit for bit."""
    config = rig.settings(STAGES, dtype="float32", clip_norm=0.4, checkpoint=KEPT)
    config = dataclasses.replace(config, logging=LoggingConfig(every_steps=2))
    digest, totals, rows, outcome = logged_run(comm, config, shared / "whole", None, seed=3)
    assert outcome[0].progress.step == totals["run"]["steps"] == 9
    assert sum(row["kind"] == "StepRow" for row in rows) == 4
    for step in range(1, 9):
        folder = shared / "whole" / f"step-{step}"
        assert checkpoint.fault(folder) is None
        state = checkpoint.load((folder / "model.pt").read_bytes(), torch.device("cpu"))
        assert state.progress.step == step
        assert state.world_size == comm.world_size
        comm.barrier()
        again = logged_run(comm, config, shared / f"from-{step}", state, seed=99)
        assert again[0] == digest, f"state at the end, resumed from step {step}"
        assert again[1] == totals, f"totals, resumed from step {step}"
        # A decision's row has the step of the window that follows it, so one made after the checkpoint is made again.
        later = [
            row
            for row in rows
            if (row["samples_end"] > state.progress.samples_seen if row["kind"] == "StageRow" else row["step"] > step)
        ]
        assert again[2] == later, f"rows from step {step}"
        assert again[3] == outcome


def test_a_checkpoint_of_one_world_size_goes_on_at_another(comm: Communicator, shared: Path) -> None:
    """Law 4, another world_size, float64: rank 0 trains alone up to each of 3 steps (in each stage one) and saves; all
    ranks go on from there: 1e-12 to the plain loop at the end, after 9 updates."""
    config = rig.settings(STAGES, clip_norm=0.4, checkpoint=KEPT)
    source = rig.memory(rig.IMAGE)

    def alone() -> dict[str, Any]:
        rig.trained(Solo(), config, rig.built(rig.ConvNet), rig.memory(rig.IMAGE), shared / "alone")
        model = rig.built(rig.ConvNet)
        order = source.stream(2000)
        reference.train(model, source.inputs, source.labels, order, STAGES, micro_batch=8, clip_norm=0.4)
        return rig.snapshot(model)

    expected = rig.from_rank_0(comm, alone)
    for step in (2, 3, 7):
        data = (shared / "alone" / f"step-{step}" / "model.pt").read_bytes()
        state = checkpoint.load(data, torch.device("cpu"))
        model = rig.built(rig.ConvNet, seed=99)
        trip = rig.trained(comm, config, model, source, shared / f"on-{step}", None, state)
        assert trip.outcome.progress.step == 9
        assert rig.worst_error(rig.snapshot(model), expected) < 1e-12, f"from step {step}"


# --- the same through hvdbs.assembly: config, data, run directory and all

COMPLETE = Config(
    seed=5,
    micro_batch=6,
    device="cpu",
    threads=1,
    data=DataConfig(kind="synthetic", image_size=8, resize=8, train_samples=71, val_samples=13, threads=1),
    model=ModelConfig("resnet8", classes=5, width=4, dropout=0.2),
    schedule=ScheduleConfig(
        method="table",
        stages=(
            StageConfig(20, 0.1, 1e-3, samples=50),
            StageConfig(33, 0.05, 1e-3, samples=60),
            StageConfig(47, 0.01, 5e-4, samples=80),
        ),
    ),
    checkpoint=CheckpointConfig(every_samples=1, every_minutes=0, keep_last=100),
    evaluation=EvaluationConfig(every_epochs=1.0),
    logging=LoggingConfig(every_steps=1, tensorboard=False),
)
EXTRAPOLATED = ExtrapolationConfig("local_past", ratio=0.7, virtual_workers=12, until=UntilConfig(samples=90))
TABLES = ("steps.csv", "stages.csv", "evals.csv", "decisions.csv", "layers.csv")


def made_and_trained(comm: Communicator, config: Config, out: Path, resume: str | None) -> tuple[str, Assembled]:
    made = assemble(config, comm, out, resume, Requests(), lambda text: None)
    try:
        train(made.run, made.progress, made.best_merit)
    finally:
        if made.files is not None:
            made.files.close()
    return state_digest(made.run.replica.model, made.run.replica.optimizer), made


def without_times(table: Path) -> list[list[str]]:
    lines = [line.split(",") for line in table.read_text().splitlines()]
    keep = [k for k, name in enumerate(lines[0]) if not name.endswith(("seconds", "second"))]
    return [[line[k] for k in keep] for line in lines]


@pytest.mark.parametrize(
    ("channels_last", "extrapolation"),
    [(False, ExtrapolationConfig()), (True, ExtrapolationConfig()), (False, EXTRAPOLATED)],
    ids=["plain", "channels_last", "extrapolated"],
)
def test_a_run_directory_cut_at_a_checkpoint_goes_on_to_the_same_end(
    comm: Communicator, shared: Path, channels_last: bool, extrapolation: ExtrapolationConfig
) -> None:
    """Law 4 through ``assemble``: 3 + 2 + 2 updates of ResNet-8 on 8 x 8 synthetic images. For a checkpoint in each
    stage, the run directory as a killed job leaves it (later checkpoints gone, later rows still in the CSV files) is
    resumed: the state at the end bit for bit, and every table but for its times. Extrapolated: up to update 4."""
    model = dataclasses.replace(COMPLETE.model, channels_last=channels_last)
    config = dataclasses.replace(COMPLETE, model=model, extrapolation=extrapolation)
    whole = shared / "whole"
    digest, _ = made_and_trained(comm, config, whole, None)
    for step in (2,) if channels_last else (1, 3, 6):
        out = shared / f"cut-{step}"
        if comm.rank == 0:
            shutil.copytree(whole, out)
            for later in range(step + 1, 8):
                shutil.rmtree(out / "checkpoints" / f"step-{later}")
            (out / "checkpoints" / "latest").write_text(f"step-{step}\n")
        comm.barrier()
        again, made = made_and_trained(comm, config, out, "auto")
        assert made.progress.step == step
        assert again == digest, f"state at the end, resumed from step {step}"
        for name in TABLES:
            assert without_times(out / name) == without_times(whole / name), f"{name} from step {step}"
        comm.barrier()
