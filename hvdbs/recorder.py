"""Turns what the loop does into rows and lines, on rank 0."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvdbs import reach
from hvdbs.batching import Window
from hvdbs.comm import Communicator
from hvdbs.config import Config
from hvdbs.console import Display
from hvdbs.costs import Linear
from hvdbs.engine import clamp_warning
from hvdbs.evaluation import Scores
from hvdbs.factors import choices
from hvdbs.gradients import norms
from hvdbs.metrics import RunDirectory
from hvdbs.model import group_of
from hvdbs.noise import NoiseScale
from hvdbs.optim import effective_lr
from hvdbs.progress import Progress, crossed
from hvdbs.records import DecisionRow, EvalRow, LayerRow, StageRow, StepRow
from hvdbs.schedule import Schedule
from hvdbs.step import Applied, Replica
from hvdbs.trail import Trail

_SECONDS = ("data_seconds", "compute_seconds", "exposed_communication_seconds", "optimizer_seconds")


@dataclass
class Sums:
    """Counts and seconds of some windows, on rank 0. ``seconds``: evaluations and checkpoints left out."""

    steps: int = 0
    samples: int = 0
    collectives: int = 0
    reduced_bytes: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    compute_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    def add(self, samples: int, applied: Applied, replica: Replica) -> None:
        self.steps += 1
        self.samples += samples
        self.collectives += replica.collectives
        self.reduced_bytes += replica.reducer.reduced_bytes
        for name in _SECONDS:
            spent = getattr(applied, name)
            setattr(self, name, getattr(self, name) + spent)
            self.seconds += spent

    @property
    def samples_per_second(self) -> float | None:
        return self.samples / self.seconds if self.seconds else None


@dataclass
class Totals:
    """Sums over the run, over the stage under way and since the last row of steps.csv; kept in checkpoints.

    ``stage``: the index of the stage under way, None before the first; ``stage_begin``: samples_seen where it began.
    ``noise``: the running averages of the gradient noise scale. ``extrapolation``: the length of the last update, None
    before the first that was displaced.
    """

    run: Sums = field(default_factory=Sums)
    in_stage: Sums = field(default_factory=Sums)
    since_row: Sums = field(default_factory=Sums)
    stage: int | None = None
    stage_begin: int = 0
    noise: NoiseScale = field(default_factory=NoiseScale)
    extrapolation: float | None = None

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Totals:
        """The inverse of dataclasses.asdict; an empty mapping is a run that has not begun."""
        if not saved:
            return cls()
        sums = {name: Sums(**saved[name]) for name in ("run", "in_stage", "since_row")}
        return cls(**{**saved, **sums, "noise": NoiseScale(**saved["noise"])})


class Recorder(Protocol):
    """What the loop reports to."""

    def enter(self, schedule: Schedule, stage: int, progress: Progress) -> None:
        """``stage`` of ``schedule``, as it stands now, begins at ``progress``, or goes on after a resume."""
        ...

    def applied(
        self,
        stage: int,
        lr: float,
        before: Progress,
        progress: Progress,
        applied: Applied,
        replica: Replica,
        ends: bool,
    ) -> None:
        """An update was made with ``lr``; ``ends``: it was the last one of ``stage``."""
        ...

    def evaluated(self, stage: int, progress: Progress, scores: Scores) -> None: ...

    def totals(self) -> dict[str, Any]:
        """What a checkpoint keeps of the account, as plain data; the rows so far are made durable first."""
        ...


class Silent:
    """The recorder of every rank but 0."""

    def enter(self, schedule: Schedule, stage: int, progress: Progress) -> None:
        return None

    def applied(
        self,
        stage: int,
        lr: float,
        before: Progress,
        progress: Progress,
        applied: Applied,
        replica: Replica,
        ends: bool,
    ) -> None:
        return None

    def evaluated(self, stage: int, progress: Progress, scores: Scores) -> None:
        return None

    def totals(self) -> dict[str, Any]:
        return {}


class Account:
    """The recorder of rank 0: the run directory's rows, the display, and the totals behind them."""

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        schedule: Schedule,
        train_samples: int,
        files: RunDirectory,
        display: Display,
        totals: Totals,
        trail: Trail | None = None,
        invariant: Collection[str] = (),
        layers: Sequence[Linear] = (),
    ) -> None:
        self._layers = layers
        self._invariant = frozenset(invariant)
        self.counted = totals
        self._trail = trail
        self._config = config
        self._comm = comm
        self._schedule = schedule
        self._train_samples = train_samples
        self._files = files
        self._display = display
        self._unwritten: StepRow | None = None  # the last window's, written if the next one is to have a row of its own

    def enter(self, schedule: Schedule, stage: int, progress: Progress) -> None:
        self._schedule = schedule
        counted = self.counted
        if counted.stage == stage:
            return
        new = self._schedule.stages[stage]
        old = None if counted.stage is None else self._schedule.stages[counted.stage]
        counted.stage, counted.stage_begin, counted.in_stage = stage, progress.samples_seen, Sums()
        reason = f"stage {stage} of method {self._config.schedule.method} begins at sample {new.begin}"
        if new.reason:
            reason += f": {new.reason}"
        if new.inputs and (warning := clamp_warning(stage, new.inputs)) is not None:
            self._display.say(warning)
        for name in ("global_batch", "lr", "weight_decay"):
            value = getattr(new, name)
            before = None if old is None else getattr(old, name)
            if value != before:
                engine = name != "global_batch" and bool(new.inputs)
                inputs = new.inputs if engine else json.dumps(dataclasses.asdict(progress))
                self._files.decision(
                    DecisionRow(
                        progress.step + 1,
                        progress.samples_seen,
                        stage,
                        "engine" if engine else "schedule",
                        name,
                        before,
                        value,
                        inputs,
                        reason,
                    )
                )
        self._note_factors(stage, None if old is None else old.global_batch, new.global_batch, progress)

    def _note_factors(self, stage: int, old_batch: int | None, new_batch: int, progress: Progress) -> None:
        """How the gradient of each layer that could go by factors will travel."""
        batches = (new_batch,) if old_batch is None else (new_batch, old_batch)
        ways = [choices(self._config, self._layers, batch, self._comm.world_size) for batch in batches]
        chosen, at = self._config.communication, (progress.step + 1, progress.samples_seen, stage)
        for new, *before in zip(*ways, strict=True):
            old = float(before[0].factors) if before else None
            said = (new.inputs(chosen.link), new.reason(chosen.scheme))
            row = DecisionRow(*at, "costs", f"factors.{new.layer.name}", old, float(new.factors), *said)
            self._files.decision(row)

    def applied(
        self,
        stage: int,
        lr: float,
        before: Progress,
        progress: Progress,
        applied: Applied,
        replica: Replica,
        ends: bool,
    ) -> None:
        counted = self.counted
        traced = applied.communication_seconds is not None
        if traced and counted.since_row.steps and self._unwritten is not None:
            self._files.step(self._unwritten)
            counted.since_row = Sums()
        for sums in (counted.run, counted.in_stage, counted.since_row):
            sums.add(progress.samples_seen - before.samples_seen, applied, replica)
        if applied.noise is not None:
            counted.noise = counted.noise.after(applied.noise)
        self._note_extrapolation(stage, lr, before)
        row = self._step_row(stage, lr, progress, applied)
        self._display.step(row)
        logged = progress.step % self._config.logging.every_steps == 0
        if logged or traced or not applied.finite:
            self._files.step(row)
            counted.since_row = Sums()
        self._unwritten = row
        if self._trail is not None:
            self._trail.applied(progress, stage, row.global_batch, row.loss, logged=logged and applied.finite)
        if ends or crossed(self._train_samples, before.samples_seen, progress.samples_seen):
            self._files.layers(self._layer_rows(lr, progress, replica))
        if ends:
            self._files.stage(self._stage_row(stage, lr, progress))

    def _note_extrapolation(self, stage: int, lr: float, before: Progress) -> None:
        """A row where it begins, where it ends and where a stage has another length; within one it may follow lr."""
        counted, chosen = self.counted, self._config.extrapolation
        length = reach.length(chosen, stage, before.samples_seen, lr)
        turned = bool(length) != bool(counted.extrapolation)
        enters = counted.in_stage.steps == 1 and length != counted.extrapolation
        if turned or (enters and length):
            inputs = json.dumps({**dataclasses.asdict(before), "lr": lr, **dataclasses.asdict(chosen)})
            word = f"goes on in stage {stage}" if not turned else "begins" if length else "ends"
            reason = f"extrapolation {word}: {reach.described(chosen, self._comm.world_size)}"
            at = (before.step + 1, before.samples_seen, stage)
            row = DecisionRow(*at, "schedule", "extrapolation", counted.extrapolation, length, inputs, reason)
            self._files.decision(row)
        if length or counted.extrapolation is not None:
            counted.extrapolation = length

    def evaluated(self, stage: int, progress: Progress, scores: Scores) -> None:
        row = EvalRow(
            progress.step,
            progress.samples_seen,
            self._epoch(progress),
            stage,
            scores.loss,
            scores.top1,
            scores.top5,
            scores.samples,
            scores.gap,
            scores.distance,
        )
        self._files.evaluation(row)
        self._display.evaluation(row)

    def totals(self) -> dict[str, Any]:
        self._files.sync()
        return dataclasses.asdict(self.counted)

    def _epoch(self, progress: Progress) -> float:
        return progress.samples_seen / self._train_samples

    def _step_row(self, stage: int, lr: float, progress: Progress, applied: Applied) -> StepRow:
        since, planned = self.counted.since_row, self._schedule.stages[stage]
        return StepRow(
            step=progress.step,
            samples_seen=progress.samples_seen,
            epoch=self._epoch(progress),
            stage=stage,
            global_batch=planned.global_batch,
            lr=lr,
            weight_decay=planned.weight_decay,
            loss=applied.loss,
            gradient_norm=applied.gradient_norm,
            noise_scale=self.counted.noise.samples,
            samples_per_second=since.samples_per_second,
            data_seconds=since.data_seconds,
            compute_seconds=since.compute_seconds,
            exposed_communication_seconds=since.exposed_communication_seconds,
            imbalance_seconds=applied.imbalance_seconds,
            communication_seconds=applied.communication_seconds,
            optimizer_seconds=since.optimizer_seconds,
            reduced_bytes=since.reduced_bytes,
            collectives=since.collectives,
            skipped=progress.skipped,
        )

    def _stage_row(self, stage: int, lr: float, progress: Progress) -> StageRow:
        sums, planned = self.counted.in_stage, self._schedule.stages[stage]
        window = Window(0, planned.global_batch, self._config.micro_batch)
        return StageRow(
            stage=stage,
            method=self._config.schedule.method,
            samples_begin=self.counted.stage_begin,
            samples_end=progress.samples_seen,
            global_batch=planned.global_batch,
            micro_batch=self._config.micro_batch,
            accumulation_steps=-(-window.micro_batches // self._comm.world_size),
            world_size=self._comm.world_size,
            lr=lr,
            weight_decay=planned.weight_decay,
            effective_lr=effective_lr(lr, self._config.optimizer.momentum),
            steps=sums.steps,
            reduced_bytes=sums.reduced_bytes,
            seconds=sums.seconds,
            samples_per_second=sums.samples_per_second,
            exposed_communication_seconds=sums.exposed_communication_seconds,
            data_seconds=sums.data_seconds,
        )

    def _layer_rows(self, lr: float, progress: Progress, replica: Replica) -> list[LayerRow]:
        """One row per parameter tensor, with the last window's mean gradient."""
        rows = []
        moved = effective_lr(lr, self._config.optimizer.momentum)
        trained = [(name, p, p.grad) for name, p in replica.model.named_parameters() if p.grad is not None]
        weights = norms(parameter.detach() for _, parameter, _ in trained).tolist()
        gradients = norms(gradient for _, _, gradient in trained).tolist()
        for (name, parameter, _), weight, gradient in zip(trained, weights, gradients, strict=True):
            group = group_of(name, parameter, self._invariant)
            rows.append(
                LayerRow(
                    progress.step,
                    progress.samples_seen,
                    self._epoch(progress),
                    name,
                    group,
                    weight,
                    gradient,
                    moved / weight**2 if group != "none" and weight > 0 else None,
                )
            )
        return rows
