"""Each method's schedule and each optimizer against an independent NumPy implementation, at any world_size.

Float64, 1e-12 relative to the largest weight; a linear classifier [B, 20] to [B, 5] on the samples of ``rig.memory``,
seed 0, micro_batch 8, so that windows are of one to many micro-batches, the last one short.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy_reference
import pytest
import rig
import torch
from numpy_reference import Rule
from torch import nn

from hvdbs import checkpoint
from hvdbs.autotune import AutotuneConfig
from hvdbs.comm import Communicator
from hvdbs.config import CheckpointConfig, Config, OptimizerConfig
from hvdbs.schedule import ScheduleConfig

pytestmark = pytest.mark.parallel

SCHEDULES = {  # with the stages worked out by hand: samples, global_batch, lr, weight decay
    "sebs": (
        ScheduleConfig(
            method="sebs", stage_samples=(30, 95, 200), global_batch=6, growth=2.5, largest_batch=30, lr=0.2,
            weight_decay=1e-3,
        ),
        [(30, 6, 0.2, 1e-3), (95, 15, 0.2, 1e-3), (200, 30, 0.2 * 30 / 38, 1e-3)],
    ),
    "classical": (
        ScheduleConfig(
            method="classical", stage_samples=(40,), stage_count=3, global_batch=9, growth=2, lr=0.2, weight_decay=1e-3
        ),
        [(40, 9, 0.2, 1e-3), (80, 9, 0.1, 1e-3), (160, 9, 0.05, 1e-3)],
    ),
    "vbs": (
        ScheduleConfig(
            method="vbs", stage_samples=(60, 150, 90), global_batch=8, largest_batch=40, factor=0.25, lr=0.2,
            weight_decay=1e-3, autotune=AutotuneConfig(mode="rule"),
        ),
        [(60, 8, 0.2, 1e-3), (150, 40, 0.2, 1.25e-3), (90, 40, 0.05, 1.25e-3)],
    ),
}  # fmt: skip
RULES = {
    "sgd": Rule(),
    "heavy ball": Rule(momentum=0.9),
    "heavy ball, reset": Rule(momentum=0.9, reset=True),
    "nesterov": Rule(momentum=0.8, nesterov=True),
    "adagrad": Rule("adagrad", reset=True),
    "adagrad, kept": Rule("adagrad"),
    "lars": Rule("lars", momentum=0.9),
    "proximal sgd": Rule(gamma=0.7),
    "proximal nesterov": Rule(momentum=0.8, nesterov=True, gamma=3.0),
    "proximal adagrad": Rule("adagrad", reset=True, gamma=0.5),
}


def config_of(schedule: ScheduleConfig, rule: Rule) -> Config:
    optimizer = OptimizerConfig(
        name=rule.name,  # type: ignore[arg-type]  # one of its words
        momentum=rule.momentum,
        nesterov=rule.nesterov,
        at_stage="reset" if rule.reset else "keep",
        proximal_gamma=rule.gamma,
    )
    return Config(
        micro_batch=8,
        dtype="float64",
        optimizer=optimizer,
        schedule=schedule,
        checkpoint=CheckpointConfig(every_samples=1, every_minutes=0, keep_last=100),
    )


def linear() -> nn.Module:
    return nn.Linear(20, rig.CLASSES, bias=False)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", SCHEDULES)
def test_a_method_and_an_optimizer_are_their_equations(
    comm: Communicator, shared: Path, method: str, rule: str
) -> None:
    schedule, stages = SCHEDULES[method]
    source = rig.memory(rig.FLAT)
    model = rig.built(linear)
    before = model.weight.detach().numpy().copy()  # type: ignore[union-attr]
    trip = rig.trained(comm, config_of(schedule, RULES[rule]), model, source, shared)
    order = source.stream(1000)
    X, labels = source.inputs.numpy(), source.labels.numpy()
    expected = numpy_reference.train(before, X, labels, order, stages, RULES[rule])
    got = rig.snapshot(trip.model)["weight"].numpy()
    assert np.abs(expected - before).max() > 1e-4, "nothing was learned"
    assert np.abs(got - expected).max() < 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize("rule", ["heavy ball, reset", "adagrad", "proximal nesterov"])
def test_a_stage_is_entered_once_however_often_the_run_is_resumed(comm: Communicator, shared: Path, rule: str) -> None:
    """Law 4 for what begins with a stage: state reset, anchor set. From the checkpoint of every step, those at a
    boundary and in the middle of a stage, the run ends in the undisturbed one's bits."""
    schedule, _ = SCHEDULES["sebs"]
    config = config_of(schedule, RULES[rule])
    whole = rig.trained(comm, config, rig.built(linear), rig.memory(rig.FLAT), shared / "whole")
    steps = whole.outcome.progress.step
    assert steps > 10
    for step in range(1, steps):
        data = (shared / "whole" / f"step-{step}" / "model.pt").read_bytes()
        state = checkpoint.load(data, torch.device("cpu"))
        again = rig.trained(
            comm, config, rig.built(linear, seed=9), rig.memory(rig.FLAT), shared / "again", None, state
        )
        assert again.digest == whole.digest, f"resumed from step {step}"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_growth_one_and_a_single_stage_are_the_constant_batch_bit_for_bit(
    comm: Communicator, shared: Path, momentum: float
) -> None:
    """Law 7 for the schedules."""
    rule = Rule(momentum=momentum)
    plain = config_of(ScheduleConfig(samples=330, global_batch=30, lr=0.1, weight_decay=1e-3), rule)
    expected = rig.trained(comm, plain, rig.built(linear), rig.memory(rig.FLAT), shared / "plain").digest
    start = ScheduleConfig(global_batch=30, lr=0.1, weight_decay=1e-3)
    three, one = (110, 110, 110), (330,)
    for other in (
        dataclasses.replace(start, method="sebs", growth=1.0, stage_samples=three),
        dataclasses.replace(start, method="smith", growth=1.0, stage_samples=three),
        dataclasses.replace(start, method="classical", growth=1.0, stage_samples=three),
        dataclasses.replace(start, method="sebs", growth=4.0, stage_samples=one),
        dataclasses.replace(start, method="vbs", largest_batch=300, stage_samples=one),
    ):
        config = config_of(other, rule)
        got = rig.trained(comm, config, rig.built(linear), rig.memory(rig.FLAT), shared / "other").digest
        assert got == expected, other.method
