"""Rows of a made-up run, for the tests of what writes, shows and reads a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdbs.metrics import RunDirectory
from hvdbs.progress import Progress
from hvdbs.records import DecisionRow, EvalRow, LayerRow, PlanRow, StageRow, StepRow, Summary

EPOCH = 100
STAGES = ((0, 6, 10), (1, 4, 25), (2, 5, 40))  # stage, updates, global_batch


def step_row(step: int = 1, samples_seen: int = 10, stage: int = 0, batch: int = 10, **other: float) -> StepRow:
    values = {"lr": 0.1, "loss": 1 / (1 + step), "samples_per_second": 1234.5, "data_seconds": 0.02} | other
    return StepRow(
        step=step,
        samples_seen=samples_seen,
        epoch=samples_seen / EPOCH,
        stage=stage,
        global_batch=batch,
        weight_decay=1e-4,
        gradient_norm=1 / 3,
        noise_scale=None,
        compute_seconds=0.9,
        exposed_communication_seconds=0.05,
        imbalance_seconds=None,
        communication_seconds=None,
        optimizer_seconds=0.03,
        reduced_bytes=4096,
        collectives=3,
        **values,
    )


def eval_row(step: int = 1, samples_seen: int = 10, stage: int = 0, top1: float = 0.9) -> EvalRow:
    return EvalRow(step, samples_seen, samples_seen / EPOCH, stage, 0.25, top1, 0.99, 360)


def plan_rows() -> list[PlanRow]:
    rows, at = [], 0
    for stage, steps, batch in STAGES:
        end = at + steps * batch
        rows.append(
            PlanRow(
                stage=stage,
                epochs_begin=at / EPOCH,
                epochs_end=end / EPOCH,
                samples_begin=at,
                samples_end=end,
                global_batch=batch,
                micro_batch=5,
                world_size=2,
                micro_batches_busiest=-(-batch // 10),
                micro_batches_idlest=batch // 10,
                idle_share=0.0 if batch % 10 == 0 else 1 / 6,
                lr=0.1,
                weight_decay=1e-4,
                effective_lr=1.0,
                steps=steps,
                reduced_bytes=steps * 4096,
            )
        )
        at = end
    return rows


TOTAL_SAMPLES = plan_rows()[-1].samples_end
TOTAL_STEPS = sum(steps for _, steps, _ in STAGES)


def summary() -> Summary:
    return Summary(
        hvdbs_version="0",
        config_digest="c",
        world_size=2,
        steps=TOTAL_STEPS,
        samples_seen=TOTAL_SAMPLES,
        loss=0.25,
        top1=0.9,
        top5=None,
        parameter_digest="p",
        collectives=45,
        reduced_bytes=61440,
        seconds=12.0,
        peak_memory_bytes=None,
        exit_reason="finished",
    )


@dataclass(frozen=True)
class Update:
    """One update of the made-up run, and all it writes, in the order that RunDirectory asks for."""

    progress: Progress
    write: Callable[[RunDirectory], None]


def updates() -> Iterator[Update]:
    """A pure function of nothing, so that whoever goes on from an update writes what was written before."""
    progress = Progress()
    for plan in plan_rows():
        for index in range(plan.steps):
            before, progress = progress, progress.after(plan.global_batch)
            yield Update(progress, _writer(before, progress, plan, index))


def _writer(before: Progress, after: Progress, plan: PlanRow, index: int) -> Callable[[RunDirectory], None]:
    def write(run: RunDirectory) -> None:
        at = (after.step, after.samples_seen)
        if index == 0:
            run.decision(
                DecisionRow(
                    *(before.step + 1, before.samples_seen, plan.stage, "schedule", "global_batch"),
                    *(None, plan.global_batch, '{"a": 1, "b": "x, y"}', 'the table says "so",\nin two lines'),
                )
            )
        run.step(step_row(*at, plan.stage, plan.global_batch))
        if before.samples_seen // EPOCH < after.samples_seen // EPOCH:
            run.layers([LayerRow(*at, 1.0, name, "weights", 0.1 + 0.2, 1e-7, None) for name in ("a.weight", "b")])
        if index == plan.steps - 1:
            run.stage(
                StageRow(
                    *(
                        plan.stage,
                        "table",
                        plan.samples_begin,
                        plan.samples_end,
                        plan.global_batch,
                        5,
                        1,
                        2,
                        0.1,
                    ),
                    *(1e-4, 1.0, plan.steps, plan.reduced_bytes, 2.0, 100 / 3, 0.1, 0.2),
                )
            )
        if after.step % 4 == 0 or after.step == TOTAL_STEPS:
            run.evaluation(eval_row(*at, plan.stage, top1=after.step / 20))

    return write


def create(path: Path) -> RunDirectory:
    return RunDirectory.create(path, "seed: 1\n", {}, plan_rows())


def resume(path: Path, progress: Progress) -> RunDirectory:
    return RunDirectory.resume(path, progress, "seed: 1\n", {}, plan_rows())


def whole_run(path: Path) -> Path:
    with create(path) as run:
        for update in updates():
            update.write(run)
        run.finish(summary())
        run.exit("finished", "end of the schedule")
    return path
