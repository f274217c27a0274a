"""Stages and the decision for the next window: pure functions of the schedule and of Progress.

Boundaries are absolute in samples_seen. The window that crosses one is finished and belongs to the old stage, a stage
already over is skipped, and training ends with the first window at or past the end. Every method uses this one rule.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from hvdbs.autotune import AutotuneConfig
from hvdbs.batching import MicroBatch, Window
from hvdbs.errors import refusal
from hvdbs.progress import Progress


@dataclass(frozen=True)
class Length:
    """How long something lasts: ``epochs`` (may be a fraction) or ``samples``, exactly one of them."""

    epochs: float | None = None
    samples: int | None = None

    def in_samples(self, what: str, train_samples: int) -> int:
        """The length in samples. Raises HvdbsError unless it is a whole number of samples, at least 1."""
        if (self.epochs is None) == (self.samples is None):
            raise refusal(
                what,
                f"epochs={self.epochs}, samples={self.samples}",
                "needs exactly one of epochs and samples",
            )
        if self.samples is not None:
            return whole_samples(f"{what}.samples", self.samples)
        assert self.epochs is not None
        return epochs_in_samples(f"{what}.epochs", self.epochs, train_samples, "samples")


def whole_samples(field: str, samples: int) -> int:
    """``samples``, the value of ``field``. Raises HvdbsError unless there is at least one."""
    if samples < 1:
        raise refusal(field, samples, "must be at least 1")
    return samples


def epochs_in_samples(field: str, epochs: float, train_samples: int, instead: str = "") -> int:
    """``epochs``, the value of ``field``, in samples. ``instead``: the field that takes samples, if there is one.

    Raises HvdbsError unless it is a whole number of samples, from 1 to 2^63.
    """
    if not math.isfinite(epochs):
        raise refusal(field, epochs, "must be finite")
    exact = epochs * train_samples
    if exact < 1:
        raise refusal(field, epochs, f"must be at least one sample of {train_samples}", f"{1 / train_samples:.6g}")
    if exact >= 2**63:
        most = f"below {2**63 / train_samples:.3g}"
        raise refusal(field, epochs, f"is 2^63 samples or more of an epoch of {train_samples}", most)
    if abs(exact - round(exact)) > 1e-6:
        low = math.floor(exact)
        near = [low, low + 1] if instead else [count / train_samples for count in (low, low + 1)]
        raise refusal(
            field,
            epochs,
            f"is {exact:.10g} samples of an epoch of {train_samples}, not a whole number",
            f"use {instead}: {near[0]} or {near[1]}" if instead else f"{near[0]} or {near[1]}",
        )
    return round(exact)


@dataclass(frozen=True)
class StageConfig:
    """One row of a stage table.

    Args:
        epochs: length in epochs; give this or samples.
        samples: length in samples.
        global_batch: samples in one update, over all ranks.
        lr: learning rate.
        weight_decay: coupled L2 coefficient of the decayed parameter group.
    """

    global_batch: int
    lr: float
    weight_decay: float = 0.0
    epochs: float | None = None
    samples: int | None = None


@dataclass(frozen=True)
class WarmupConfig:
    """Linear warm-up of lr, counted in samples.

    Args:
        epochs: length in epochs; give this or samples, or neither for no warm-up.
        samples: length in samples.
        start_lr: lr at sample 0, from which the ramp climbs to the lr of the stage.
    """

    epochs: float | None = None
    samples: int | None = None
    start_lr: float = 0.0


Method = Literal["constant", "multistep", "table", "classical", "smith", "sebs", "vbs"]


@dataclass(frozen=True)
class ScheduleConfig:
    """How the global batch, lr and weight decay change over the run; ``stage_tables`` has the methods.

    Args:
        method: constant (one stage), multistep (lr times factor at each milestone, batch kept), table (stages given),
            classical (lr divided by growth from stage to stage, batch kept), sebs or smith (batch times growth from
            stage to stage, lr kept until largest_batch is reached), vbs (largest_batch from the second stage on).
        epochs: length of the run in epochs; give this or samples (constant, multistep).
        samples: length of the run in samples (constant, multistep).
        stage_epochs: length of each stage in epochs; give this or stage_samples (classical, smith, sebs, vbs).
        stage_samples: length of each stage in samples.
        stage_count: number of stages where only the first length is given; each is growth times as long as the one
            before (classical, smith, sebs).
        global_batch: samples in one update, over all ranks, in the first stage (all but table).
        largest_batch: the batch stops growing there, and lr takes over (smith, sebs); the later batch (vbs).
        growth: by how much the batch grows, or lr falls, from stage to stage (classical, smith, sebs).
        lr: learning rate of the first stage (all but table).
        lr_per_samples: lr is for a batch of so many samples and is scaled to global_batch; by default it is as given.
        weight_decay: coupled L2 coefficient of the first stage (all but table).
        milestones: epochs at which lr is multiplied by factor (multistep).
        factor: what lr is multiplied with at each milestone (multistep) or would be at each boundary (vbs).
        stages: the rows (table).
        warmup: linear warm-up of lr.
        autotune: what else changes at a boundary (vbs).
    """

    method: Method = "constant"
    epochs: float | None = None
    samples: int | None = None
    stage_epochs: tuple[float, ...] = ()
    stage_samples: tuple[int, ...] = ()
    stage_count: int | None = None
    global_batch: int | None = None
    largest_batch: int | None = None
    growth: float | None = None
    lr: float | None = None
    lr_per_samples: int | None = None
    weight_decay: float = 0.0
    milestones: tuple[float, ...] = ()
    factor: float = 0.1
    stages: tuple[StageConfig, ...] = ()
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    autotune: AutotuneConfig = field(default_factory=AutotuneConfig)


@dataclass(frozen=True)
class Stage:
    """Samples [``begin``, ``end``) of the run, with one global_batch and one rule for lr and weight decay.

    ``reason``: why they are what they are, in words; ``inputs``: what an engine went by, as JSON.
    """

    index: int
    begin: int
    end: int
    global_batch: int
    lr: float
    weight_decay: float
    reason: str = ""
    inputs: str = ""


@dataclass(frozen=True)
class Schedule:
    """A resolved stage table: stages that follow each other without a gap, and the warm-up in samples."""

    stages: tuple[Stage, ...]
    warmup_samples: int = 0
    warmup_start_lr: float = 0.0

    @property
    def end(self) -> int:
        return self.stages[-1].end

    def retuned(self, index: int, lr: float, weight_decay: float, reason: str, inputs: str) -> Schedule:
        """With other lr and weight decay in stage ``index``. Batches and boundaries stay, as data is read ahead."""
        new = replace(self.stages[index], lr=lr, weight_decay=weight_decay, reason=reason, inputs=inputs)
        return replace(self, stages=(*self.stages[:index], new, *self.stages[index + 1 :]))


@dataclass(frozen=True)
class Decision:
    """What the next window is to be: its stage, global_batch, and what stands in the optimizer for it."""

    stage: int
    global_batch: int
    lr: float
    weight_decay: float


def decide(schedule: Schedule, progress: Progress) -> Decision | None:
    """The decision for the window that starts at ``progress``; None when training is over."""
    index = bisect_right(schedule.stages, progress.samples_seen, key=lambda stage: stage.end)
    if index == len(schedule.stages):
        return None
    stage = schedule.stages[index]
    return Decision(index, stage.global_batch, _lr(schedule, stage, progress.samples_seen), stage.weight_decay)


def _lr(schedule: Schedule, stage: Stage, samples_seen: int) -> float:
    # The ramp is read at the window's end: at its beginning the first update would have lr 0 and be lost.
    end = samples_seen + stage.global_batch
    if samples_seen >= schedule.warmup_samples or end >= schedule.warmup_samples:
        return stage.lr
    return schedule.warmup_start_lr + (stage.lr - schedule.warmup_start_lr) * end / schedule.warmup_samples


def windows(schedule: Schedule, progress: Progress, micro_batch: int) -> Iterator[Window]:
    """Every window from ``progress`` to the end, so that data can be read ahead across stage boundaries."""
    while (decision := decide(schedule, progress)) is not None:
        yield Window(progress.samples_seen, decision.global_batch, micro_batch)
        progress = progress.after(decision.global_batch, decision.stage)


def requests_of(
    schedule: Schedule, progress: Progress, micro_batch: int, rank: int, world_size: int
) -> Iterator[MicroBatch]:
    """The micro-batches that ``rank`` will run from ``progress`` to the end, in order."""
    for window in windows(schedule, progress, micro_batch):
        yield from window.dealt_to(rank, world_size)


@dataclass(frozen=True)
class Span:
    """What really happens in a stage: updates ``steps`` over samples [``begin``, ``end``), whole windows only."""

    stage: Stage
    begin: int
    end: int
    steps: int


def spans(schedule: Schedule) -> list[Span]:
    """The windows of each stage in closed form; a stage that an earlier window ran over has 0 steps."""
    result, at = [], 0
    for stage in schedule.stages:
        steps = max(0, -(-(stage.end - at) // stage.global_batch))
        result.append(Span(stage, at, at + steps * stage.global_batch, steps))
        at += steps * stage.global_batch
    return result
