"""What each stage of a run cost, and how that compares with what was predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from hvdbs.console import above_minimum, count, duration, number, plural, share, size, table
from hvdbs.report.runs import SECONDS, Run, clocks, on_clock, rows_of

# Quantities of a stage that a plan may predict, under these names or with predicted_ before them: name, words, unit.
PREDICTABLE = {
    "steps": ("updates", "updates"),
    "reduced_bytes": ("reduced bytes", "bytes"),
    "collectives": ("collectives", "collectives"),
    "seconds": ("seconds", "s"),
    "samples_per_second": ("samples per second", "samples/s"),
    "data_seconds": ("waiting for data", "s"),
    "compute_seconds": ("compute", "s"),
    "exposed_communication_seconds": ("exposed communication", "s"),
    "optimizer_seconds": ("optimizer", "s"),
}


@dataclass(frozen=True)
class StageCost:
    """One stage, ended or under way, as measured on rank 0.

    ``seconds`` are the sum of the four that follow, evaluations and checkpoints left out; NaN where steps.csv does not
    tell. ``collectives`` is in proportion where a boundary lies between two logged updates.
    """

    stage: int
    ended: bool
    samples_begin: int
    samples_end: int
    global_batch: int
    accumulation_steps: int | None
    world_size: int | None
    lr: float
    weight_decay: float
    steps: int
    collectives: float
    reduced_bytes: int
    seconds: float
    data_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    optimizer_seconds: float

    @property
    def samples(self) -> int:
        return self.samples_end - self.samples_begin

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else math.nan


@dataclass(frozen=True)
class Prediction:
    """One quantity of one stage: ``predicted`` before, ``measured`` now, both in ``unit``."""

    stage: int
    quantity: str
    unit: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else math.nan


def costs(run: Run) -> list[StageCost]:
    """Of all stages of ``run`` in order; the last one may be under way, and then ends where the log does."""
    found = []
    begin = int(run.parent.get("step", 0))
    for row in rows_of(run.stages):
        end = begin + int(row.steps)
        busy = row.seconds - row.data_seconds - row.exposed_communication_seconds
        own = run.steps[run.steps.stage == row.stage]
        compute, optimizer = own.compute_seconds.sum(), own.optimizer_seconds.sum()
        part = compute / (compute + optimizer) if compute + optimizer else math.nan
        rounds = on_clock(run, "collectives", pd.Series([begin, end]))
        found.append(
            StageCost(
                stage=int(row.stage),
                ended=True,
                samples_begin=int(row.samples_begin),
                samples_end=int(row.samples_end),
                global_batch=int(row.global_batch),
                accumulation_steps=int(row.accumulation_steps),
                world_size=int(row.world_size),
                lr=row.lr,
                weight_decay=row.weight_decay,
                steps=int(row.steps),
                collectives=float(rounds[1] - rounds[0]),
                reduced_bytes=int(row.reduced_bytes),
                seconds=row.seconds,
                data_seconds=row.data_seconds,
                compute_seconds=busy * part,
                exposed_communication_seconds=row.exposed_communication_seconds,
                optimizer_seconds=busy * (1 - part),
            )
        )
        begin = end
    rest = run.steps[run.steps.step > begin]
    if len(rest) and not run.summary:
        found.append(_under_way(run, rest, begin, found[-1].samples_end if found else 0))
    return found


def _under_way(run: Run, rows: pd.DataFrame, begin: int, samples_begin: int) -> StageCost:
    last = rows.iloc[-1]
    spent = rows[list(SECONDS)].sum()
    world_size = run.environment.get("world_size")
    return StageCost(
        stage=int(last.stage),
        ended=False,
        samples_begin=samples_begin or int(run.parent.get("samples_seen", 0)),
        samples_end=int(last.samples_seen),
        global_batch=int(last.global_batch),
        accumulation_steps=None,
        world_size=world_size if isinstance(world_size, int) else None,
        lr=float(last.lr),
        weight_decay=float(last.weight_decay),
        steps=int(last.step) - begin,
        collectives=float(rows.collectives.sum()),
        reduced_bytes=int(rows.reduced_bytes.sum()),
        seconds=float(spent.sum()),
        **{name: float(spent[name]) for name in SECONDS},
    )


def predictions(run: Run) -> tuple[list[Prediction], list[str]]:
    """What plan.json, or a column predicted_X of stages.csv, says of the stages that ended, beside what was measured;
    and a line for each stage that cannot be compared."""
    planned = {row.get("stage"): row for row in run.plan}
    found, notes = [], []
    for cost, row in zip((c for c in costs(run) if c.ended), run.stages.to_dict("records"), strict=True):
        plan = planned.get(cost.stage)
        if plan is None:
            notes.append(f"stage {cost.stage}: plan.json has none.")
            plan = {}
        elif (plan.get("samples_begin"), plan.get("samples_end")) != (cost.samples_begin, cost.samples_end):
            notes.append(
                f"stage {cost.stage}: planned for samples {plan.get('samples_begin')} to {plan.get('samples_end')}, "
                f"it was {cost.samples_begin} to {cost.samples_end}: not compared."
            )
            plan = {}
        beside = {name: value for name, value in row.items() if str(name).startswith("predicted_")}
        for name, value in _predicted({**plan, **beside}).items():
            words, unit = PREDICTABLE[name]
            found.append(Prediction(cost.stage, words, unit, value, float(getattr(cost, name))))
    return found, notes


def _predicted(row: Mapping[Any, Any]) -> dict[str, float]:
    found = {}
    for key, value in row.items():
        name = str(key).removeprefix("predicted_")
        if name in PREDICTABLE and isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
    return found


def stage_table(run: Run) -> str:
    """What each stage that ended cost, measured, as text."""
    header = ["stage", "samples", "global_batch", "lr", "weight_decay", "updates", "seconds", "samples/s"]
    header += ["exposed\ncommunication", "data\nwait", "reduced"]
    rows = [
        [
            str(row.stage),
            f"{count(row.samples_begin)}-{count(row.samples_end)}",
            count(row.global_batch),
            number(row.lr),
            number(row.weight_decay),
            count(row.steps),
            f"{row.seconds:.1f}",
            "" if pd.isna(row.samples_per_second) else number(row.samples_per_second),
            share(row.exposed_communication_seconds / row.seconds) if row.seconds else "",
            share(row.data_seconds / row.seconds) if row.seconds else "",
            size(row.reduced_bytes),
        ]
        for row in rows_of(run.stages)
    ]
    return table(header, rows)


def last_score(run: Run) -> str:
    """One line: where the run stands."""
    if run.evals.empty:
        return f"{run.label}: no evaluation yet, {plural(len(run.steps), 'logged update')}"
    last = run.evals.iloc[-1]
    if pd.isna(last.top1):
        score = above_minimum(last.gap, last.distance)
    else:
        right = round(last.top1 * last.samples)
        score = f"top-1 {share(last.top1, 2)} ({count(right)} of {count(int(last.samples))})"
    took = "" if run.stages.empty else f", {duration(run.stages.seconds.sum())}"
    return (
        f"{run.label}: {score}, loss {last.loss:.4f} after {plural(int(last.samples_seen), 'sample')}"
        f" in {plural(int(last.step), 'update')}{took}"
    )


def totals(run: Run) -> Mapping[str, float]:
    """The whole run on each of the clocks: of summary.json where it has ended, else as far as steps.csv goes."""
    return {str(name): float(value) for name, value in clocks(run).iloc[-1].items()}


def worst(found: Sequence[Prediction]) -> Prediction | None:
    """That whose measured value lies furthest from the predicted one, in proportion."""
    known = [one for one in found if one.ratio > 0]
    return max(known, key=lambda one: abs(math.log(one.ratio)), default=None)
