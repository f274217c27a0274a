"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from hvdbs import noise
from hvdbs.batching import Window
from hvdbs.checkpoint import Saver
from hvdbs.comm import AgreedError, Communicator
from hvdbs.config import Config
from hvdbs.data import Source
from hvdbs.engine import Engine
from hvdbs.evaluation import Scores, evaluate
from hvdbs.loss import summed_loss
from hvdbs.progress import Progress, crossed
from hvdbs.pulse import Pulse
from hvdbs.recorder import Recorder
from hvdbs.replicas import compare, state_digest
from hvdbs.schedule import Schedule, decide, requests_of
from hvdbs.step import Applied, Replica, Requests
from hvdbs.tracing import Tracer, Untraced


@dataclass(frozen=True)
class Run:
    """All that a run is made of.

    ``evaluation_period`` in samples, 0 for the end alone. ``engine``: tunes the stages of ``schedule`` as they are
    entered. ``pulse``: told what this rank is about to do. ``stop_asked``: whether this rank is asked to stop by other
    means than ``requests``; called before each window.
    """

    config: Config
    comm: Communicator
    source: Source
    schedule: Schedule
    replica: Replica
    recorder: Recorder
    saver: Saver
    requests: Requests
    evaluation_period: int
    engine: Engine | None = None
    pulse: Pulse = field(default_factory=Pulse)
    stop_asked: Callable[[], bool] = lambda: False
    tracer: Tracer = field(default_factory=Untraced)


@dataclass(frozen=True)
class Outcome:
    """Where a run ended, with the last scores if there are any; ``finished``: at the end of its schedule."""

    progress: Progress
    scores: Scores | None
    finished: bool


def train(run: Run, progress: Progress, best_merit: float | None) -> Outcome:
    """Collective. Train from ``progress`` to the end of the schedule, or until a rank asks to stop.

    Raises AgreedError, on every rank, if the loss is not finite, replicas differ or a checkpoint cannot be written.
    """
    config, comm, replica, recorder, pulse = run.config, run.comm, run.replica, run.recorder, run.pulse

    def scored() -> Scores:
        pulse.enter("evaluation", progress.step)
        size = config.evaluation.micro_batch or config.micro_batch
        with replica.autocast():
            return evaluate(replica.model, replica.preprocess, run.source, comm, size, summed_loss(config, 0.0), pulse)

    requests = requests_of(run.schedule, progress, config.micro_batch, comm.rank, comm.world_size)
    batches = pulse.batches(run.source.train(requests))
    noise_period = noise.period(run.source.train_samples)
    schedule, engine = run.schedule, run.engine
    stage, scores = None, None
    decision = decide(schedule, progress)
    if decision is None:  # it was ended after its last checkpoint, before its summary: the scores are wanted again
        scores = scored()
    while decision is not None:
        if decision.stage != stage:
            stage = decision.stage
            if progress.stage != stage:
                replica.enter_stage()
                if engine is not None:
                    engine.enter(stage, comm)
            if engine is not None:
                schedule = engine.schedule
                decision = decide(schedule, progress) or decision
            factors = replica.choose(decision.global_batch)
            compare(comm, decision, state_digest(replica.model, replica.optimizer), factors)
            recorder.enter(schedule, stage, progress)
        run.requests.checkpoint = run.saver.minutes_are_up()
        if run.stop_asked():
            run.requests.stop = True
        window = Window(progress.samples_seen, decision.global_batch, config.micro_batch)
        measure = crossed(noise_period, progress.samples_seen, progress.samples_seen + decision.global_batch)
        wanted = measure and engine is not None and engine.wants(stage, progress.samples_seen)
        run.tracer.begin(replica, schedule, stage, progress)
        pulse.enter("window", progress.step, decision.global_batch)
        applied = replica.run(
            window, decision, progress.step, batches, run.requests, measure=measure, layer_norms=wanted
        )
        applied = run.tracer.end(replica, applied)
        if engine is not None:
            engine.observe(applied.layers)
        before, progress = progress, progress.after(decision.global_batch, stage, skipped=not applied.finite)
        if not applied.finite:
            _refuse_nonfinite(run, applied, before, progress, stage)
        upcoming = decide(schedule, progress)
        ends = upcoming is None or upcoming.stage != stage
        recorder.applied(stage, decision.lr, before, progress, applied, replica, ends)

        better = False
        if upcoming is None or crossed(run.evaluation_period, before.samples_seen, progress.samples_seen):
            scores = scored()
            better = best_merit is None or scores.merit > best_merit
            best_merit = scores.merit if better else best_merit
            recorder.evaluated(stage, progress, scores)

        due = crossed(config.checkpoint.every_samples, before.samples_seen, progress.samples_seen)
        best = better and config.checkpoint.keep_best
        if due or best or applied.checkpoint or applied.stop or upcoming is None:
            known = {} if engine is None else asdict(engine.state)
            pulse.enter("checkpoint", progress.step)
            run.saver.save(replica, progress, best_merit, recorder.totals(), best, known)
        if applied.stop and upcoming is not None:
            return Outcome(progress, scores, finished=False)
        decision = upcoming
    return Outcome(progress, scores, finished=True)


def _refuse_nonfinite(run: Run, applied: Applied, before: Progress, progress: Progress, stage: int) -> None:
    """Raises AgreedError unless one more window may be skipped. Nothing was updated by it."""
    optimizer = run.config.optimizer
    overflow = run.config.autocast == "fp16" and math.isfinite(applied.loss)  # the scaler's way to find its scale
    if (overflow or optimizer.on_nonfinite == "skip") and progress.skipped_in_a_row <= optimizer.most_skipped:
        return
    again = f", {progress.skipped_in_a_row} windows in a row" if progress.skipped_in_a_row > 1 else ""
    raise AgreedError(
        f"loss: {applied.loss}, gradient norm {applied.gradient_norm} at step {progress.step} (stage {stage}, sample "
        f"{before.samples_seen} on) is not finite{again}; last whole checkpoint: {run.saver.latest or 'none'}; a lower "
        "lr or longer warm-up may do, or optimizer.on_nonfinite: skip"
    )
