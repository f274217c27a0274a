"""What travels where gradients come of factors, when it is sent, and how a hybrid run decides, between ranks.

Bytes and collectives by hand; communication costs its bytes alone (``rig.EVERY_BYTE``).
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import rig

from hvdbs.assembly import Assembled, assemble
from hvdbs.batching import Window
from hvdbs.comm import Communicator
from hvdbs.config import CheckpointConfig, CommunicationConfig, Config, DataConfig, LoggingConfig, ModelConfig
from hvdbs.costs import CARRY_ITEM_BYTES
from hvdbs.factors import choices, sizes
from hvdbs.loop import train
from hvdbs.planning import update_bytes
from hvdbs.replicas import state_digest
from hvdbs.schedule import ScheduleConfig, StageConfig
from hvdbs.step import Requests

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("global_batch", [3, 8, 64, 131])
@pytest.mark.parametrize("scheme", ["hybrid", "factors"])
def test_counted_bytes_and_collectives_are_those_of_the_formulas(
    comm: Communicator, global_batch: int, clip_norm: float | None, scheme: str
) -> None:
    """Law 5: one exchange for each layer by factors, whatever the accumulation, of all ranks' rows; sums for the rest;
    ``reduced_bytes`` of the reducer is ``planning.update_bytes``, and that by hand. Idle ranks send nothing."""
    counted, source, model = rig.Counted(comm), rig.memory(rig.FLAT), rig.built(rig.mlp)
    config = rig.settings(rig.MIXED, scheme=scheme, clip_norm=clip_norm)
    window = Window(0, global_batch, 8)
    replica, _ = rig.one_update(counted, config, model, source, window)
    chosen = choices(config, rig.layers_of(model, source), global_batch, comm.world_size)
    factors = [choice for choice in chosen if choice.factors]
    assert [round(choice.layer.breakeven_rows, 1) for choice in chosen] == [24.6, 27.4, 8.3]
    if scheme == "hybrid":
        below = sum(global_batch <= rows for rows in (24.6, 27.4, 8.3))
        assert len(factors) == (below if comm.world_size > 1 else 0)
    gathers = [event for event in counted.events if event.kind == "gather"]
    sums = [event for event in counted.events if event.kind == "sum"]
    others = [event for event in counted.events if event.kind in ("broadcast", "bytes")]
    assert sorted(event.name for event in gathers) == [f"factors.{choice.layer.name}" for choice in factors]
    assert len(gathers) + len(sums) + len(others) == replica.collectives
    everyone = rig.everywhere(comm, [event.nbytes for event in gathers])
    own = sum(micro.size for micro in window.dealt_to(comm.rank, comm.world_size))
    assert sum(event.nbytes for event in gathers) == sum(
        own * (choice.layer.inputs + choice.layer.outputs) * 8 for choice in factors
    )
    gathered = sum(sum(sent) for sent in everyone)
    assert gathered == sum(choice.gathered_bytes(sizes(config)) for choice in factors)
    left = sum(p.numel() for p in model.parameters()) - sum(choice.layer.weights for choice in factors)
    assert sum(event.nbytes for event in sums) == 8 * left + CARRY_ITEM_BYTES * 3
    total = gathered + sum(event.nbytes for event in sums)
    assert total == replica.reducer.reduced_bytes == update_bytes(model, config, chosen)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_each_exchange_starts_when_its_last_rows_are_there_and_none_earlier(
    comm: Communicator, accumulation: int
) -> None:
    """Wait-free back-propagation: nothing before the last forward; the carry ahead; then the layers from the last to
    the first while their gradients arrive, each before the gradients of the layer before it."""
    counted, source, model = rig.Counted(comm), rig.memory(rig.FLAT), rig.built(rig.mlp)
    counted.watch(model)
    config = rig.settings(rig.MIXED, scheme="factors", bucket_bytes=1)
    rig.one_update(counted, config, model, source, Window(0, 8 * accumulation * comm.world_size, 8))
    kinds = [event.kind for event in counted.events]
    last = len(kinds) - 1 - kinds[::-1].index("forward")
    assert not {"sum", "gather"} & set(kinds[:last])
    names = [event.name for event in counted.events[last + 1 :] if event.kind in ("gather", "arrived")]
    assert names == ["factors.4", "4.bias", "factors.2", "2.bias", "factors.0", "0.bias"]


def test_choices_are_the_same_on_all_ranks(comm: Communicator, shared: Path) -> None:
    """Stage by stage three layers, two, none; with nobody to send to, none at all, and no bucket of its own."""
    config = rig.settings(rig.MIXED, scheme="hybrid")
    run = rig.assembled(comm, config, rig.built(rig.mlp), rig.memory(rig.FLAT), shared)
    taken = [run.replica.choose(stage.global_batch) for stage in rig.MIXED]
    assert rig.everywhere(comm, taken) == [taken] * comm.world_size
    assert [sum(chosen.values()) for chosen in taken] == ([3, 2, 0] if comm.world_size > 1 else [0, 0, 0])
    assert len(taken[0]) == (3 if comm.world_size > 1 else 0)


COMPLETE = Config(
    seed=5,
    micro_batch=6,
    device="cpu",
    threads=1,
    data=DataConfig(kind="synthetic", image_size=8, resize=8, train_samples=71, val_samples=13, threads=1),
    model=ModelConfig("resnet8", classes=30, width=8, dropout=0.2),
    schedule=ScheduleConfig(
        method="table",
        stages=(
            StageConfig(20, 0.1, 1e-3, samples=50),
            StageConfig(33, 0.05, 1e-3, samples=60),
            StageConfig(25, 0.01, 5e-4, samples=80),
        ),
    ),
    communication=CommunicationConfig(scheme="hybrid", link=rig.EVERY_BYTE),
    checkpoint=CheckpointConfig(every_samples=1, every_minutes=0, keep_last=100),
    logging=LoggingConfig(every_steps=1, tensorboard=False),
)


def through_assembly(comm: Communicator, config: Config, out: Path, resume: str | None) -> tuple[str, Assembled]:
    made = assemble(config, comm, out, resume, Requests(), lambda text: None)
    try:
        train(made.run, made.progress, made.best_merit)
    finally:
        if made.files is not None:
            made.files.close()
    return state_digest(made.run.replica.model, made.run.replica.optimizer), made


def test_a_whole_run_decides_stage_by_stage_and_reduces_what_was_planned(comm: Communicator, shared: Path) -> None:
    """The classifier of ResNet-8, 32 x 30, breaks even at 31 rows; stages of 20, 33 and 25 samples. decisions.csv has
    both costs, of all stages the bytes are those of the plan, and resumed in the middle, in the second stage and at a
    boundary, the run ends in the same bits and the same rows of decisions.csv."""
    digest, made = through_assembly(comm, COMPLETE, shared / "whole", None)
    if made.account is not None:
        assert made.account.counted.run.reduced_bytes == sum(row.reduced_bytes for row in made.plan)
    several = comm.world_size > 1
    with (shared / "whole" / "decisions.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["quantity"] == "factors.fc"]
    assert [row["new"] for row in rows] == (["1.0", "0.0", "1.0"] if several else ["0.0"] * 3)
    assert [row["old"] for row in rows] == (["", "1.0", "0.0"] if several else ["", "0.0", "0.0"])
    costs = [json.loads(row["inputs"]) for row in rows]
    share = (comm.world_size - 1) / comm.world_size
    sent = [share * 62 * 4 * samples for samples in (20, 33, 25)]
    assert [cost["factor_bytes"] for cost in costs] == pytest.approx(sent)
    assert [cost["gradient_bytes"] for cost in costs] == pytest.approx([2 * share * 32 * 30 * 4] * 3)
    assert [row.steps for row in made.plan] == [3, 2, 3]
    each = [row.reduced_bytes / row.steps for row in made.plan]
    assert not several or (each[1] - each[0], each[1] - each[2]) == (4 * (960 - 20 * 62), 4 * (960 - 25 * 62))
    for step in (2, 3, 4):
        out = shared / f"cut-{step}"
        if comm.rank == 0:
            shutil.copytree(shared / "whole", out)
            for later in range(step + 1, made.run.schedule.end):
                shutil.rmtree(out / "checkpoints" / f"step-{later}", ignore_errors=True)
            (out / "checkpoints" / "latest").write_text(f"step-{step}\n")
        comm.barrier()
        again, resumed = through_assembly(comm, COMPLETE, out, "auto")
        assert resumed.progress.step == step
        assert again == digest
        assert (out / "decisions.csv").read_bytes() == (shared / "whole" / "decisions.csv").read_bytes()
        comm.barrier()
