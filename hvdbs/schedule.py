"""Stage tables and the decision for the next window: pure functions of the config and of Progress.

Boundaries are absolute in samples_seen. The window that crosses one is finished and belongs to the old stage, a stage
already over is skipped, and training ends with the first window at or past the end. Every method uses this one rule.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

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
            if self.samples < 1:
                raise refusal(f"{what}.samples", self.samples, "must be at least 1")
            return self.samples
        assert self.epochs is not None
        exact = self.epochs * train_samples
        if not math.isfinite(exact) or exact < 1:
            raise refusal(f"{what}.epochs", self.epochs, f"must be at least one sample of {train_samples}")
        if abs(exact - round(exact)) > 1e-6:
            low = math.floor(exact)
            raise refusal(
                f"{what}.epochs",
                self.epochs,
                f"is {exact:g} samples of an epoch of {train_samples}, not a whole number",
                f"use samples: {low} or {low + 1}",
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


@dataclass(frozen=True)
class ScheduleConfig:
    """How the global batch, lr and weight decay change over the run.

    Args:
        method: constant (one stage), multistep (lr times factor at each milestone, batch kept) or table (stages given).
        epochs: length of the run in epochs; give this or samples (constant, multistep).
        samples: length of the run in samples (constant, multistep).
        global_batch: samples in one update, over all ranks (constant, multistep).
        lr: learning rate of the first stage (constant, multistep).
        weight_decay: coupled L2 coefficient (constant, multistep).
        milestones: epochs at which lr is multiplied by factor (multistep).
        factor: what lr is multiplied with at each milestone (multistep).
        stages: the rows (table).
        warmup: linear warm-up of lr.
    """

    method: Literal["constant", "multistep", "table"] = "constant"
    epochs: float | None = None
    samples: int | None = None
    global_batch: int | None = None
    lr: float | None = None
    weight_decay: float = 0.0
    milestones: tuple[float, ...] = ()
    factor: float = 0.1
    stages: tuple[StageConfig, ...] = ()
    warmup: WarmupConfig = field(default_factory=WarmupConfig)


@dataclass(frozen=True)
class Stage:
    """Samples [``begin``, ``end``) of the run, with one global_batch and one rule for lr and weight decay."""

    index: int
    begin: int
    end: int
    global_batch: int
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Schedule:
    """A resolved stage table: stages that follow each other without a gap, and the warm-up in samples."""

    stages: tuple[Stage, ...]
    warmup_samples: int = 0
    warmup_start_lr: float = 0.0

    @property
    def end(self) -> int:
        return self.stages[-1].end


@dataclass(frozen=True)
class Decision:
    """What the next window is to be: its stage, global_batch, and what stands in the optimizer for it."""

    stage: int
    global_batch: int
    lr: float
    weight_decay: float


def resolve(config: ScheduleConfig, train_samples: int) -> Schedule:
    """The stage table of ``config`` for an epoch of ``train_samples``. Raises HvdbsError where it breaks a rule."""
    rows = _table(config, train_samples) if config.method == "table" else _one_run(config, train_samples)
    stages: list[Stage] = []
    begin = 0
    for index, (length, row) in enumerate(rows):
        _check(f"schedule stage {index}", row)
        stages.append(Stage(index, begin, begin + length, row.global_batch, row.lr, row.weight_decay))
        begin += length
    warmup = config.warmup
    if warmup.epochs is None and warmup.samples is None:
        return Schedule(tuple(stages))
    samples = Length(warmup.epochs, warmup.samples).in_samples("schedule.warmup", train_samples)
    if samples > stages[0].end:
        raise refusal(
            "schedule.warmup",
            f"{samples} samples",
            "must end within the first stage",
            f"at most {stages[0].end}",
        )
    if not 0.0 <= warmup.start_lr <= stages[0].lr:
        raise refusal("schedule.warmup.start_lr", warmup.start_lr, f"must lie between 0 and the lr {stages[0].lr:g}")
    return Schedule(tuple(stages), samples, warmup.start_lr)


def _table(config: ScheduleConfig, train_samples: int) -> Iterator[tuple[int, StageConfig]]:
    if not config.stages:
        raise refusal("schedule.stages", "[]", "must hold at least one stage when schedule.method is table")
    for name in ("epochs", "samples", "global_batch", "lr"):
        if getattr(config, name) is not None:
            raise refusal(
                f"schedule.{name}",
                getattr(config, name),
                "belongs into each stage when schedule.method is table",
            )
    for index, row in enumerate(config.stages):
        yield Length(row.epochs, row.samples).in_samples(f"schedule.stages[{index}]", train_samples), row


def _one_run(config: ScheduleConfig, train_samples: int) -> Iterator[tuple[int, StageConfig]]:
    if config.stages:
        raise refusal(
            "schedule.stages",
            f"{len(config.stages)} rows",
            f"are not read by method {config.method}",
            "method: table",
        )
    if config.global_batch is None or config.lr is None:
        missing = "global_batch" if config.global_batch is None else "lr"
        raise refusal(f"schedule.{missing}", "none", f"must be given for method {config.method}")
    total = Length(config.epochs, config.samples).in_samples("schedule", train_samples)
    if config.milestones and config.method != "multistep":
        raise refusal("schedule.milestones", list(config.milestones), "are read by method multistep alone")
    cuts = [Length(epochs=e).in_samples("schedule.milestones", train_samples) for e in config.milestones]
    if cuts != sorted(set(cuts)) or (cuts and cuts[-1] >= total):
        raise refusal(
            "schedule.milestones",
            list(config.milestones),
            f"must increase and lie before the end at {total} samples",
        )
    if cuts and not (math.isfinite(config.factor) and config.factor > 0):
        raise refusal("schedule.factor", config.factor, "must be positive")
    for index, (begin, end) in enumerate(zip([0, *cuts], [*cuts, total], strict=True)):
        yield (
            end - begin,
            StageConfig(config.global_batch, config.lr * config.factor**index, config.weight_decay),
        )


def _check(what: str, row: StageConfig) -> None:
    if row.global_batch < 1:
        raise refusal(f"{what}: global_batch", row.global_batch, "must be at least 1")
    if not (math.isfinite(row.lr) and row.lr >= 0):
        raise refusal(f"{what}: lr", row.lr, "must be a finite number, at least 0")
    if not (math.isfinite(row.weight_decay) and row.weight_decay >= 0):
        raise refusal(f"{what}: weight_decay", row.weight_decay, "must be a finite number, at least 0")


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
        progress = progress.after(decision.global_batch)


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
