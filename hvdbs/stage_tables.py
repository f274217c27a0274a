"""The stage table of each method, from its config and the length of an epoch.

* ``classical``: stagewise SGD, the baseline of SEBS: the batch stays and lr is divided by ``growth`` at each boundary.
* ``sebs``: stagewise enlargement of the batch size (Zhao, Xie and Li, arXiv 2002.11601): lr stays and the batch grows
  ``growth``-fold. lr / global_batch, and with it the noise of the updates, is that of ``classical`` in every stage.
* ``smith``: Smith et al., "Don't Decay the Learning Rate, Increase the Batch Size", arXiv 1711.00489: the batch grows
  by the factor that lr would fall by, up to a limit. On plain stages it is SEBS's table under another name.
* ``vbs``: variable batch size (Hu, Xiao et al., ISPA 2019): one enlargement, at the second stage, to the largest batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hvdbs import autotune
from hvdbs.errors import refusal
from hvdbs.schedule import (
    Length,
    Schedule,
    ScheduleConfig,
    Stage,
    StageConfig,
    epochs_in_samples,
    whole_samples,
)

# The fields that a method reads beside method and warmup; any other that is given would be silently ignored.
_LENGTHS = ("stage_epochs", "stage_samples")
_START = ("global_batch", "lr", "lr_per_samples", "weight_decay")
_READS: dict[str, tuple[str, ...]] = {
    "constant": ("epochs", "samples", *_START),
    "multistep": ("epochs", "samples", *_START, "milestones", "factor"),
    "table": ("stages",),
    "classical": (*_LENGTHS, "stage_count", *_START, "growth"),
    "smith": (*_LENGTHS, "stage_count", *_START, "growth", "largest_batch"),
    "sebs": (*_LENGTHS, "stage_count", *_START, "growth", "largest_batch"),
    "vbs": (*_LENGTHS, *_START, "largest_batch", "factor", "autotune"),
}


_LARGEST_FLOAT32 = 3.4e38
_MOST_STAGES = 1000


@dataclass(frozen=True)
class _Row:
    samples: int
    global_batch: int
    lr: float
    weight_decay: float
    reason: str = ""


def resolve(config: ScheduleConfig, train_samples: int) -> Schedule:
    """The stage table of ``config`` for an epoch of ``train_samples``. Raises HvdbsError where it breaks a rule."""
    _refuse_unread(config)
    stages: list[Stage] = []
    begin = 0
    for index, row in enumerate(_ROWS[config.method](config, train_samples)):
        _check(row, f"schedule.stages[{index}]" if config.method == "table" else f"schedule: stage {index}")
        end = begin + row.samples
        if end >= 2**63:
            raise refusal("schedule", f"stage {index} ends at sample {end}", "which must lie below 2^63")
        stages.append(Stage(index, begin, end, row.global_batch, row.lr, row.weight_decay, row.reason))
        begin = end
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


def _refuse_unread(config: ScheduleConfig) -> None:
    default = ScheduleConfig()
    for name in ScheduleConfig.__dataclass_fields__:
        value = getattr(config, name)
        if name in ("method", "warmup") or name in _READS[config.method] or value == getattr(default, name):
            continue
        if config.method == "table":
            raise refusal(f"schedule.{name}", value, "belongs into each stage when schedule.method is table")
        readers = [method for method, names in _READS.items() if name in names]
        shown = f"{len(value)} rows" if name == "stages" else list(value) if isinstance(value, tuple) else value
        rule = f"{'are' if isinstance(value, tuple) else 'is'} not read by method {config.method}"
        raise refusal(f"schedule.{name}", shown, rule, f"method: {' or '.join(readers)}")


def _table(config: ScheduleConfig, train_samples: int) -> Iterator[_Row]:
    if not config.stages:
        raise refusal("schedule.stages", "[]", "must hold at least one stage when schedule.method is table")
    for index, row in enumerate(config.stages):
        length = Length(row.epochs, row.samples).in_samples(f"schedule.stages[{index}]", train_samples)
        yield _Row(length, row.global_batch, row.lr, row.weight_decay)


def _start(config: ScheduleConfig) -> StageConfig:
    """Batch, lr and weight decay of the first stage."""
    if config.global_batch is None or config.lr is None:
        missing = "global_batch" if config.global_batch is None else "lr"
        raise refusal(f"schedule.{missing}", "none", f"must be given for method {config.method}")
    first = StageConfig(config.global_batch, config.lr, config.weight_decay)
    _check(first, "schedule")
    per = config.lr_per_samples
    if per is not None:
        if per < 1:
            raise refusal("schedule.lr_per_samples", per, "must be at least 1", "256, as in arXiv 1706.02677")
        first = replace(first, lr=config.lr * config.global_batch / per)
    return first


def _one_batch(config: ScheduleConfig, train_samples: int) -> Iterator[_Row]:
    start = _start(config)
    total = Length(config.epochs, config.samples).in_samples("schedule", train_samples)
    cuts = [
        epochs_in_samples(f"schedule.milestones[{index}]", epochs, train_samples)
        for index, epochs in enumerate(config.milestones)
    ]
    if cuts != sorted(set(cuts)) or (cuts and cuts[-1] >= total):
        raise refusal(
            "schedule.milestones",
            list(config.milestones),
            f"must increase and lie before the end at {total} samples",
        )
    if cuts:
        _positive("schedule.factor", config.factor)
    for index, (begin, end) in enumerate(zip([0, *cuts], [*cuts, total], strict=True)):
        lr = start.lr * _power("schedule.factor", config.factor, index)
        yield _Row(end - begin, start.global_batch, lr, start.weight_decay)


def _lengths(config: ScheduleConfig, train_samples: int) -> list[int]:
    """Samples of each stage: as they are listed, or growing geometrically from the one that is."""
    epochs, samples, count = config.stage_epochs, config.stage_samples, config.stage_count
    if bool(epochs) == bool(samples):
        given = f"stage_epochs={list(epochs)}, stage_samples={list(samples)}"
        raise refusal("schedule", given, "needs exactly one of stage_epochs and stage_samples")
    lengths = [
        epochs_in_samples(f"schedule.stage_epochs[{index}]", length, train_samples, "stage_samples")
        for index, length in enumerate(epochs)
    ] or [whole_samples(f"schedule.stage_samples[{index}]", length) for index, length in enumerate(samples)]
    if count is None:
        return lengths
    if not 1 <= count <= _MOST_STAGES:
        raise refusal("schedule.stage_count", count, f"must lie between 1 and {_MOST_STAGES}")
    if len(lengths) != 1:
        raise refusal(
            "schedule.stage_count", count, f"needs the length of the first stage alone, not {len(lengths)} lengths"
        )
    growth = _growth(config)
    return [_nearest(lengths[0] * _power("schedule.growth", growth, index)) for index in range(count)]


def _growth(config: ScheduleConfig) -> float:
    growth = config.growth
    if growth is None:
        raise refusal("schedule.growth", "none", f"must be given for method {config.method}", "10 replaces lr / 10")
    if not (math.isfinite(growth) and growth >= 1):
        raise refusal("schedule.growth", growth, "must be a finite number, at least 1")
    return growth


def _power(field: str, base: float, stage: int) -> float:
    """base^stage. Raises HvdbsError where no schedule can hold what has grown by that."""
    if stage and stage * math.log2(base) >= 63:
        raise refusal(field, base, f"grows by 2^63 or more until stage {stage}")
    return base**stage


def _nearest(value: float) -> int:
    """The nearest whole number, halves upwards."""
    return math.floor(value + 0.5)


def _classical(config: ScheduleConfig, train_samples: int) -> Iterator[_Row]:
    start, growth = _start(config), _growth(config)
    for index, length in enumerate(_lengths(config, train_samples)):
        reason = f"lr is divided by {growth:g}, the batch stays" if index else "the first stage"
        yield _Row(
            length, start.global_batch, start.lr / _power("schedule.growth", growth, index), start.weight_decay, reason
        )


def _enlarging(config: ScheduleConfig, train_samples: int) -> Iterator[_Row]:
    """SEBS and Smith et al.: the batch grows, lr stays; at the largest batch lr falls by what the batch lacks."""
    start, growth = _start(config), _growth(config)
    limit = config.largest_batch
    if limit is not None and limit < start.global_batch:
        raise refusal("schedule.largest_batch", limit, f"must be at least the first batch {start.global_batch}")
    for index, length in enumerate(_lengths(config, train_samples)):
        wanted = _nearest(start.global_batch * _power("schedule.growth", growth, index))
        batch = wanted if limit is None else min(wanted, limit)
        lr, reason = start.lr, f"the batch grows {growth:g}-fold, lr stays" if index else "the first stage"
        if batch < wanted:
            lr *= batch / wanted
            reason = f"the batch stops at {batch} of {wanted} samples, lr is times {batch / wanted:.4g}"
        yield _Row(length, batch, lr, start.weight_decay, reason)


def _vbs(config: ScheduleConfig, train_samples: int) -> Iterator[_Row]:
    start, later = _start(config), config.largest_batch
    _positive("schedule.factor", config.factor)
    if later is None or later < start.global_batch:
        shown = "none" if later is None else later
        rule = "must be given for method vbs" if later is None else "must be at least the first batch"
        raise refusal("schedule.largest_batch", shown, rule, f"{start.global_batch} or more, from the second stage on")
    lr, weight_decay, batch, decay = start.lr, start.weight_decay, start.global_batch, 1 / config.factor
    for index, length in enumerate(_lengths(config, train_samples)):
        reason = "the first stage"
        if index:
            growth, batch = later / batch, later
            if config.autotune.mode == "off":
                lr, reason = lr * config.factor, f"lr is divided by {decay:g}, as the baseline has it"
            else:
                lr, weight_decay = autotune.rule(lr, weight_decay, growth, decay)
                jump = f"the batch grows {growth:g}-fold" if growth > 1 else "the batch stays"
                reason = f"{jump} where the baseline divides lr by {decay:g}: {_taken(growth, decay)}"
        yield _Row(length, batch, lr, weight_decay, reason)


def _taken(growth: float, decay: float) -> str:
    if growth > decay:
        return f"lr stays, weight decay is times {growth / decay:.4g}"
    return "nothing else changes" if growth == decay else f"lr is times {growth / decay:.4g}, weight decay stays"


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise refusal(name, value, "must be positive")


def _check(row: _Row | StageConfig, section: str) -> None:
    """``section``: of the config, whose fields ``row`` has, or with a colon, what has come of it."""
    for name in ("global_batch", "lr", "weight_decay"):
        value, rule = getattr(row, name), ""
        if name == "global_batch":
            if not 1 <= value < 2**63:
                rule = "must be at least 1" if value < 1 else "must lie below 2^63"
        elif not (math.isfinite(value) and value >= 0):
            rule = "must be a finite number, at least 0"
        elif value > _LARGEST_FLOAT32:
            rule = f"must be a number of float32, at most {_LARGEST_FLOAT32:g}"
        if rule:
            raise refusal(f"{section}{' ' if ':' in section else '.'}{name}", value, rule)


_ROWS: dict[str, Callable[[ScheduleConfig, int], Iterator[_Row]]] = {
    "constant": _one_batch,
    "multistep": _one_batch,
    "table": _table,
    "classical": _classical,
    "smith": _enlarging,
    "sebs": _enlarging,
    "vbs": _vbs,
}
