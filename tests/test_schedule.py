"""Schedules are pure functions of samples_seen, with one rule for boundaries."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdbs.batching import Window
from hvdbs.errors import HvdbsError
from hvdbs.progress import Progress, crossed
from hvdbs.schedule import (
    Decision,
    Schedule,
    ScheduleConfig,
    Stage,
    StageConfig,
    WarmupConfig,
    decide,
    requests_of,
    spans,
    windows,
)
from hvdbs.stage_tables import resolve


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages, at = [], 0
    for index in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 500))
        stages.append(Stage(index, at, at + length, draw(st.integers(1, 200)), draw(st.floats(0.001, 1.0)), 0.0))
        at += length
    return Schedule(tuple(stages), draw(st.integers(0, stages[0].end)), 0.0)


def run_by_hand(schedule: Schedule) -> list[tuple[int, int, int]]:
    """(stage, begin, global_batch) of every window, by the words of the rule."""
    at, result = 0, []
    while at < schedule.end:
        stage = next(s for s in schedule.stages if s.begin <= at < s.end)
        result.append((stage.index, at, stage.global_batch))
        at += stage.global_batch
    return result


@given(schedules())
def test_windows_follow_the_boundary_rule(schedule: Schedule) -> None:
    expected = run_by_hand(schedule)
    assert [(w.begin, w.global_batch) for w in windows(schedule, Progress(), 8)] == [(b, g) for _, b, g in expected]
    progress = Progress()
    for stage, begin, global_batch in expected:
        decision = decide(schedule, progress)
        assert decision is not None
        assert (decision.stage, decision.global_batch, progress.samples_seen) == (stage, global_batch, begin)
        progress = progress.after(global_batch)
    assert decide(schedule, progress) is None


@given(schedules())
def test_spans_in_closed_form_are_the_windows(schedule: Schedule) -> None:
    expected = run_by_hand(schedule)
    for span in spans(schedule):
        mine = [(b, g) for stage, b, g in expected if stage == span.stage.index]
        assert span.steps == len(mine)
        if mine:
            assert (span.begin, span.end) == (mine[0][0], mine[-1][0] + mine[-1][1])


@given(schedules(), st.integers(0, 10_000))
def test_a_decision_is_the_same_whenever_it_is_asked(schedule: Schedule, samples: int) -> None:
    progress = Progress(3, samples)
    assert decide(schedule, progress) == decide(schedule, Progress(9, samples))


@given(schedules(), st.data())
def test_going_on_from_the_middle_equals_not_having_stopped(schedule: Schedule, data: st.DataObject) -> None:
    whole = list(windows(schedule, Progress(), 8))
    cut = data.draw(st.integers(0, len(whole)))
    at = Progress(cut, sum(w.global_batch for w in whole[:cut]))
    assert whole[:cut] + list(windows(schedule, at, 8)) == whole


@given(schedules(), st.integers(1, 5))
def test_requests_of_all_ranks_are_the_stream(schedule: Schedule, world_size: int) -> None:
    everyone = [list(requests_of(schedule, Progress(), 8, rank, world_size)) for rank in range(world_size)]
    positions = sorted(p for mine in everyone for m in mine for p in range(m.begin, m.begin + m.size))
    assert positions == list(range(run_by_hand(schedule)[-1][1] + run_by_hand(schedule)[-1][2]))


def test_a_stage_that_a_window_runs_over_is_skipped() -> None:
    schedule = Schedule(
        (Stage(0, 0, 10, 100, 0.1, 0.0), Stage(1, 10, 50, 5, 0.1, 0.0), Stage(2, 50, 120, 30, 0.1, 0.0))
    )
    assert [(w.begin, w.global_batch) for w in windows(schedule, Progress(), 8)] == [(0, 100), (100, 30)]
    assert [span.steps for span in spans(schedule)] == [1, 0, 1]


def test_multistep_multiplies_lr_at_each_milestone() -> None:
    config = ScheduleConfig(
        "multistep", epochs=4, global_batch=10, lr=1.0, weight_decay=0.5, milestones=(1, 3), factor=0.1
    )
    schedule = resolve(config, 100)
    assert [(s.begin, s.end, s.global_batch, s.weight_decay) for s in schedule.stages] == [
        (0, 100, 10, 0.5),
        (100, 300, 10, 0.5),
        (300, 400, 10, 0.5),
    ]
    assert [s.lr for s in schedule.stages] == pytest.approx([1.0, 0.1, 0.01], rel=1e-15)


def test_constant_is_one_stage() -> None:
    assert resolve(ScheduleConfig(samples=77, global_batch=10, lr=1.0), 100).stages == (Stage(0, 0, 77, 10, 1.0, 0.0),)


@pytest.mark.parametrize("global_batch", [1, 10, 16, 64])
def test_warm_up_is_linear_in_samples_whatever_the_batch(global_batch: int) -> None:
    """lr of the window that ends at sample e is start + (lr - start) * e / warm-up, then lr (COMPLAINTS 9, 10)."""
    config = ScheduleConfig(
        samples=400, global_batch=global_batch, lr=1.0, warmup=WarmupConfig(samples=160, start_lr=0.2)
    )
    schedule, progress = resolve(config, 400), Progress()
    while (decision := decide(schedule, progress)) is not None:
        end = progress.samples_seen + global_batch
        assert decision.lr == pytest.approx(min(1.0, 0.2 + 0.8 * end / 160), rel=1e-12)
        progress = progress.after(global_batch)


def test_no_update_has_lr_0_during_warm_up() -> None:
    schedule = resolve(ScheduleConfig(samples=100, global_batch=10, lr=1.0, warmup=WarmupConfig(samples=100)), 100)
    assert decide(schedule, Progress()) == Decision(0, 10, pytest.approx(0.1), 0.0)


@given(st.integers(0, 1000), st.integers(0, 5000), st.integers(1, 500))
def test_crossed_is_due_once_for_each_multiple(period: int, start: int, batch: int) -> None:
    ends = [start + batch * k for k in range(10)]
    due = sum(crossed(period, a, b) for a, b in pairwise(ends))
    reached = 0 if period == 0 else ends[-1] // period - ends[0] // period
    assert due == reached if batch <= period or period == 0 else due == len(ends) - 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"method": "table"}, "at least one stage"),
    ({"method": "table", "stages": (StageConfig(8, 0.1),)}, "exactly one of epochs and samples"),
    ({"method": "table", "stages": (StageConfig(8, 0.1, epochs=1, samples=3),)}, "exactly one of"),
    ({"method": "table", "lr": 0.1, "stages": (StageConfig(8, 0.1, epochs=1),)}, "belongs into each stage"),
    ({"method": "table", "stages": (StageConfig(0, 0.1, epochs=1),)}, "must be at least 1"),
    ({"method": "table", "stages": (StageConfig(8, float("nan"), epochs=1),)}, "finite"),
    ({"method": "table", "stages": (StageConfig(8, 0.1, -1.0, epochs=1),)}, "at least 0"),
    ({"method": "table", "stages": (StageConfig(8, 0.1, epochs=0.333),)}, "use samples: 33 or 34"),
    ({"method": "table", "stages": (StageConfig(8, 0.1, epochs=0.0),)}, "at least one sample"),
    ({"method": "table", "stages": (StageConfig(8, 0.1, samples=0),)}, "at least 1"),
    ({"epochs": 1, "lr": 0.1}, "global_batch"),
    ({"epochs": 1, "global_batch": 8}, "schedule.lr"),
    ({"global_batch": 8, "lr": 0.1}, "exactly one of epochs and samples"),
    ({"epochs": 1, "global_batch": 8, "lr": 0.1, "milestones": (0.5,)}, "method: multistep"),
    (
        {"method": "multistep", "epochs": 1, "global_batch": 8, "lr": 0.1, "milestones": (0.5, 0.2)},
        "must increase",
    ),
    (
        {"method": "multistep", "epochs": 1, "global_batch": 8, "lr": 0.1, "milestones": (2,)},
        "before the end",
    ),
    (
        {"method": "multistep", "epochs": 2, "global_batch": 8, "lr": 0.1, "milestones": (1,), "factor": 0.0},
        "positive",
    ),
    (
        {"epochs": 1, "global_batch": 8, "lr": 0.1, "stages": (StageConfig(8, 0.1, epochs=1),)},
        "method: table",
    ),
    ({"epochs": 1, "global_batch": 8, "lr": 0.1, "warmup": WarmupConfig(epochs=2)}, "within the first stage"),
    (
        {"epochs": 1, "global_batch": 8, "lr": 0.1, "warmup": WarmupConfig(epochs=1, start_lr=1.0)},
        "between 0 and",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_each_broken_rule_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HvdbsError, match=message) as refused:
        resolve(ScheduleConfig(**fields), 100)
    assert "\n" not in str(refused.value)


def test_a_window_may_end_past_the_end_of_training() -> None:
    schedule = resolve(ScheduleConfig(samples=95, global_batch=10, lr=1.0), 100)
    assert list(windows(schedule, Progress(), 4))[-1] == Window(90, 10, 4)
