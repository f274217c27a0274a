"""The auto-tuning engine in a run: what it measures, that ranks agree, and that it decides once.

A convolutional network with batch norm and dropout, float64, on ``rig.memory`` seed 0: 331 samples an epoch,
micro_batch 8; VBS from 24 to 120 samples where the baseline divides lr by 2, then at 120 samples by 2 again.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import rig
import torch
from entries import entry, table
from torch.nn import functional as F

from hvdbs import checkpoint
from hvdbs.autotune import AutotuneConfig
from hvdbs.batching import Window
from hvdbs.comm import AgreedError, Communicator
from hvdbs.comm.local import Solo
from hvdbs.config import CheckpointConfig, Config, OptimizerConfig
from hvdbs.engine import Engine, EngineState, load_state
from hvdbs.invariance import scale_invariant
from hvdbs.noise import LayerNorms
from hvdbs.schedule import Decision, ScheduleConfig
from hvdbs.stage_tables import resolve
from hvdbs.step import Replica, Requests

pytestmark = pytest.mark.parallel

EPOCH = 331
LAYERS = ["conv1.weight", "conv2.weight"]


def config(mode: str = "band", **fields: Any) -> Config:
    schedule = ScheduleConfig(
        method="vbs",
        stage_samples=(600, 700, 500),
        global_batch=24,
        largest_batch=120,
        factor=0.5,
        lr=0.1,
        weight_decay=1e-3,
        autotune=AutotuneConfig(mode, 0.5),  # type: ignore[arg-type]  # one of its words
    )
    return Config(
        micro_batch=8,
        dtype="float64",
        optimizer=OptimizerConfig(momentum=0.9, **fields),
        schedule=schedule,
        checkpoint=CheckpointConfig(every_samples=1, every_minutes=0, keep_last=100),
    )


def engine(made: Config, state: EngineState | None = None) -> Engine:
    return Engine(made, resolve(made.schedule, EPOCH), EPOCH, state or EngineState(list(LAYERS)))


def run(comm: Communicator, made: Config, folder: Path, state: checkpoint.State | None = None) -> rig.Trip:
    known = None if state is None else load_state(state.engine)
    model = rig.built(rig.ConvNet, seed=3 if state is None else 9)
    return rig.trained(comm, made, model, rig.memory(rig.IMAGE), folder, None, state, engine=engine(made, known))


def decisions(trip: rig.Trip) -> dict[int, tuple[float, float, str, str]]:
    assert trip.run.engine is not None
    return trip.run.engine.state.tuned


def test_the_weights_that_are_watched_are_those_found_by_trying(comm: Communicator) -> None:
    inputs = torch.randn(4, *rig.IMAGE, generator=torch.Generator().manual_seed(0))
    assert scale_invariant(rig.built(rig.ConvNet), inputs) == LAYERS


def test_the_engine_decides_the_same_at_every_world_size(comm: Communicator, shared: Path) -> None:
    """Against one process: weight decay of both later stages to 1e-9 (law 1's 1e-12 grows with the bisection's slope),
    parameters to 1e-11; and it does change weight decay here, by more than 1.2 times."""
    alone = rig.from_rank_0(comm, lambda: _summary(run(Solo(), config(), shared / "alone")))
    here = _summary(run(comm, config(), shared / "all"))
    assert here["decays"] == pytest.approx(alone["decays"], rel=1e-9)
    assert max(abs(math.log(b / a)) for a, b in zip(here["rule"], here["decays"], strict=True)) > math.log(1.2)
    assert rig.worst_error(here["state"], alone["state"]) < 1e-11


def _summary(trip: rig.Trip) -> dict[str, Any]:
    plain = resolve(trip.run.config.schedule, EPOCH).stages
    return {
        "decays": [row[1] for row in decisions(trip).values()],
        "rule": [stage.weight_decay for stage in plain[1:]],
        "state": rig.snapshot(trip.model),
    }


def test_a_resumed_run_decides_nothing_twice_and_ends_in_the_same_bits(comm: Communicator, shared: Path) -> None:
    """Law 4, from the checkpoint of every step: within the measured epoch, at the boundaries and after them."""
    whole = run(comm, config(), shared / "whole")
    for step in range(1, whole.outcome.progress.step):
        data = (shared / "whole" / f"step-{step}" / "model.pt").read_bytes()
        state = checkpoint.load(data, torch.device("cpu"))
        again = run(comm, config(), shared / "again", state)
        assert again.digest == whole.digest, f"resumed from step {step}"
        assert decisions(again) == decisions(whole)


SURFACE = """
{dtype: float64, threads: 1, micro_batch: 16, logging: {tensorboard: false}, optimizer: {momentum: 0.9},
data: {kind: analytic, analytic: {surface: least_squares}}, model: {name: normalised_linear},
schedule: {method: vbs, stage_samples: [1500, 1500], global_batch: 48, largest_batch: 480, factor: 0.5, lr: 0.01,
weight_decay: 0.01, autotune: {mode: band}}}
"""


def test_what_the_band_cannot_reach_is_said_once_by_rank_0_with_value_limit_and_stage(
    comm: Communicator, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the real entry; a jump of 10 where the baseline would divide lr by 2, so the rule's weight decay is 0.05
    and its limits are 2 * 0.05 and, of lr 0.01 and momentum 0.9, 0.125."""
    file = shared / "vbs.yaml"
    file.write_text(SURFACE)
    cases = {2.0: (0.1, "schedule.autotune.largest_change 2"), 8.0: (0.125, "lr and momentum, beyond which")}
    for change, (limit, whose) in cases.items():
        out, words = shared / f"{change:g}", ["--schedule.autotune.largest_change", str(change)]
        entry(comm, out, str(file), *words, stages=())
        said = [line for line in capsys.readouterr().err.splitlines() if "clamped" in line]
        assert len(said) == (comm.rank == 0)
        (row,) = [r for r in table(out / "decisions.csv") if (r["quantity"], r["source"]) == ("weight_decay", "engine")]
        inputs = json.loads(row["inputs"])
        assert row["stage"] == "1" and inputs["clamped"]
        assert float(row["new"]) == inputs["limit"] == pytest.approx(limit, rel=1e-12)
        if comm.rank == 0:
            assert said[0].startswith(
                f"warning: stage 1: weight decay is {limit}, the rule's times {limit / 0.05:.4g}, clamped by its limit "
                f"{limit} of {whose}"
            )
            after, low, high = (f"{inputs[name]:.3g}" for name in ("after", "low", "high"))
            assert said[0].endswith(f"{after} times that of stage 0, outside its band of {low} to {high}")
    entry(comm, shared / "wide", str(file), "--schedule.largest_batch", "48", stages=())
    assert "clamped" not in capsys.readouterr().err


def test_a_rank_that_decides_otherwise_is_named_with_both_values(
    comm: Communicator, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.world_size == 1:
        pytest.skip("needs two ranks")
    enter = Engine.enter

    def corrupted(self: Engine, stage: int, ranks: Communicator) -> None:
        enter(self, stage, ranks)
        if stage == 1 and ranks.rank == ranks.world_size - 1:
            lr, _, reason, inputs = self.state.tuned[1]
            self._retune(1, lr, 0.123, reason, inputs)

    monkeypatch.setattr(Engine, "enter", corrupted)
    with pytest.raises(AgreedError, match=rf"stage 1: ranks {comm.world_size - 1} have .*0\.123.*rank 0 has"):
        run(comm, config(), shared)


def test_what_a_rank_has_of_its_own_changes_no_decision(comm: Communicator, shared: Path) -> None:
    """Ranks with other random states, thread counts and delays: the same decisions, bit for bit."""
    calm = decisions(run(comm, config(), shared / "calm"))
    torch.manual_seed(1000 + comm.rank)
    made, model = config(), rig.built(rig.ConvNet)
    rig.delay_gradients(model, seed=comm.rank, most_seconds=0.001)
    torch.manual_seed(2000 + comm.rank)
    trip = rig.trained(comm, made, model, rig.memory(rig.IMAGE), shared / "wild", engine=engine(made))
    assert decisions(trip) == calm
    assert (
        rig.everywhere(comm, {str(k): list(v) for k, v in calm.items()})
        == [{str(k): list(v) for k, v in calm.items()}] * comm.world_size
    )


@pytest.mark.parametrize("global_batch", [8, 24, 27])
def test_norms_are_those_of_plain_gradients(comm: Communicator, global_batch: int) -> None:
    """Of a window of 1, 3 and 4 micro-batches (the last short), before clipping, against torch.autograd.grad."""
    made = config(clip_norm=0.01)
    model, twin = rig.built(lambda: rig.ConvNet(dropout=0.0)), rig.built(lambda: rig.ConvNet(dropout=0.0))
    source = rig.memory(rig.IMAGE)
    window, replica = Window(0, global_batch, 8), Replica(model, made, comm)
    batches = source.train(window.dealt_to(comm.rank, comm.world_size))
    decision = Decision(0, global_batch, 0.1, 1e-3)
    norms = replica.run(window, decision, 0, batches, Requests(), measure=True, layer_norms=True).layers
    if comm.rank:
        assert norms is None
        return
    assert norms is not None
    order = source.stream(global_batch)
    parts = [order[i : i + 8] for i in range(0, global_batch, 8)]
    weights = dict(twin.named_parameters())

    def gradients(chosen: list[list[int]], count: int) -> dict[str, float]:
        losses = [F.cross_entropy(twin(source.inputs[p]), source.labels[p], reduction="sum") for p in chosen]
        found = torch.autograd.grad(sum(losses) / count, list(weights.values()))  # type: ignore[arg-type]
        return {name: float(g.square().sum()) for name, g in zip(weights, found, strict=True)}

    expected = LayerNorms(
        {name: float(w.detach().square().sum()) for name, w in weights.items()},
        gradients(parts[:1], 8) if len(parts) > 1 else {},
        8,
        gradients(parts, global_batch),
        global_batch,
    )
    for name, values in asdict(expected).items():
        assert asdict(norms)[name] == pytest.approx(values, rel=1e-10), name
