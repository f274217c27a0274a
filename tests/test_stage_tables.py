"""Each method's stage table against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdbs.autotune import AutotuneConfig, rule
from hvdbs.schedule import Schedule, ScheduleConfig, spans
from hvdbs.stage_tables import resolve

N = 50_000
THREE = (80.0, 40.0, 40.0)  # epochs


def stagewise(method: str, growth: float, batch: int = 128, **fields: object) -> Schedule:
    given: dict[str, object] = {"stage_epochs": THREE, "lr": 0.1} | fields
    return resolve(ScheduleConfig(method=method, growth=growth, global_batch=batch, **given), N)  # type: ignore[arg-type]


def updates(schedule: Schedule) -> list[int]:
    return [span.steps for span in spans(schedule)]


@pytest.mark.parametrize(
    ("growth", "batches", "expected", "end"),
    [
        (1, [128, 128, 128], [31250, 15625, 15625], 8_000_000),
        (4, [128, 512, 2048], [31250, 3907, 977], 8_001_280),
        (10, [128, 1280, 12800], [31250, 1563, 157], 8_010_240),
    ],
)
def test_sebs_makes_as_many_updates_as_the_clock_of_samples_says(
    growth: float, batches: list[int], expected: list[int], end: int
) -> None:
    schedule = stagewise("sebs", growth)
    assert [stage.global_batch for stage in schedule.stages] == batches
    assert updates(schedule) == expected
    assert spans(schedule)[-1].end == end


def test_a_window_that_overshoots_a_stage_takes_from_the_next() -> None:
    schedule = stagewise("sebs", 4, 96, stage_epochs=(), stage_samples=(1000, 1000, 1000))
    assert updates(schedule) == [11, 3, 1]
    assert spans(schedule)[-1].end == 3744


def test_stages_in_theory_grow_with_the_batch_and_save_all_but_a_constant_number_of_updates() -> None:
    fields = {"stage_epochs": (), "stage_samples": (6400,), "stage_count": 5}
    enlarged, classical = stagewise("sebs", 4, 64, **fields), stagewise("classical", 4, 64, **fields)
    assert enlarged.end == classical.end == 2_182_400
    assert updates(enlarged) == [100] * 5 and sum(updates(classical)) == 34_100


@given(growth=st.floats(1, 20), batch=st.integers(1, 500), lr=st.floats(0.001, 10))
def test_sebs_and_classical_have_the_same_ratio_of_lr_to_batch_in_every_stage(
    growth: float, batch: int, lr: float
) -> None:
    for limit in (None, 2 * batch):
        enlarged = stagewise("sebs", growth, batch, lr=lr, largest_batch=limit)
        classical = stagewise("classical", growth, batch, lr=lr)
        for index, (a, b) in enumerate(zip(enlarged.stages, classical.stages, strict=True)):
            # The batch is a whole number, at most half a sample from batch * growth^index.
            slack = 0.5 / (batch * growth**index) + 1e-12
            assert a.lr / a.global_batch == pytest.approx(b.lr / b.global_batch, rel=2 * slack)
            assert limit is not None or a.lr == lr


def test_the_weight_of_stability_is_equal_for_sebs_and_classical() -> None:
    """Sum over stages of lr * samples / batch, for lr 0.1, growth 4 and 80, 40, 40 epochs."""
    for method in ("sebs", "classical"):
        total = sum(s.lr * (s.end - s.begin) / s.global_batch for s in stagewise(method, 4).stages)
        assert total == pytest.approx(3613.28125, rel=1e-12)


def test_a_batch_that_is_no_whole_number_is_rounded_halves_up_and_the_limit_hands_over_to_lr() -> None:
    schedule = stagewise("sebs", 2.5, 5, stage_epochs=(1, 1, 1, 1), largest_batch=40)
    assert [s.global_batch for s in schedule.stages] == [5, 13, 31, 40]  # of 5, 12.5, 31.25, 78.125
    assert [s.lr for s in schedule.stages] == [0.1, 0.1, 0.1, pytest.approx(0.1 * 40 / 78)]
    limited = stagewise("sebs", 4, 256, stage_epochs=(1,) * 5, largest_batch=16384)
    assert [s.global_batch for s in limited.stages] == [256, 1024, 4096, 16384, 16384]


def test_smith_enlarges_where_lr_would_fall_until_the_limit_and_then_lr_falls() -> None:
    schedule = stagewise("smith", 5, 128, largest_batch=640)
    assert [s.global_batch for s in schedule.stages] == [128, 640, 640]
    assert [s.lr for s in schedule.stages] == pytest.approx([0.1, 0.1, 0.02])


def test_lr_is_scaled_to_the_batch_only_where_it_is_asked_for() -> None:
    large = ScheduleConfig(epochs=90, global_batch=8192, lr=0.1, lr_per_samples=256)
    assert resolve(large, N).stages[0].lr == pytest.approx(3.2)
    assert resolve(replace(large, lr_per_samples=None), N).stages[0].lr == 0.1


VBS = ScheduleConfig(
    method="vbs", stage_epochs=(30, 30, 20, 10), global_batch=8192, largest_batch=122_880, lr=3.2, weight_decay=1e-4
)
IMAGENET = 1_281_167


def test_vbs_enlarges_once_and_weight_decay_takes_the_excess() -> None:
    stages = resolve(VBS, IMAGENET).stages
    assert [s.global_batch for s in stages] == [8192, 122_880, 122_880, 122_880]
    assert [s.lr for s in stages] == [3.2, 3.2, pytest.approx(0.32), pytest.approx(0.032)]
    assert [s.weight_decay for s in stages] == pytest.approx([1e-4, 1.5e-4, 1.5e-4, 1.5e-4])
    assert stages[1].lr == 3.2, "unchanged to the bit"


def test_vbs_without_its_engine_is_the_baseline_with_a_larger_batch() -> None:
    stages = resolve(replace(VBS, autotune=AutotuneConfig(mode="off")), IMAGENET).stages
    assert [s.lr for s in stages] == pytest.approx([3.2, 0.32, 0.032, 0.0032])
    assert {s.weight_decay for s in stages} == {1e-4}


def test_vbs_on_imagenet_makes_about_a_third_of_the_updates() -> None:
    small = updates(resolve(replace(VBS, largest_batch=8192), IMAGENET))
    large = updates(resolve(VBS, IMAGENET))
    assert small == [4692, 4692, 3128, 1564] and large == [4692, 313, 209, 104]
    assert sum(small) / sum(large) == pytest.approx(2.65, abs=0.01)


@pytest.mark.parametrize(
    ("growth", "expected"), [(16, (3.2, 1.6e-4)), (15, (3.2, 1.5e-4)), (10, (3.2, 1e-4)), (4, (1.28, 1e-4))]
)
def test_the_rule_by_numbers(growth: float, expected: tuple[float, float]) -> None:
    assert rule(3.2, 1e-4, growth, 10) == pytest.approx(expected, rel=1e-12)


@given(lr=st.floats(1e-4, 10), weight_decay=st.floats(1e-6, 1e-2), growth=st.floats(1, 100), decay=st.floats(1, 100))
def test_the_rule_turns_weights_by_the_same_angle_for_each_sample(
    lr: float, weight_decay: float, growth: float, decay: float
) -> None:
    """lr * weight_decay / global_batch falls by exactly the decay; without a larger batch it is the plain decay, and
    where batch and decay agree nothing changes."""
    new_lr, new_decay = rule(lr, weight_decay, growth, decay)
    assert new_lr * new_decay / growth * decay == pytest.approx(lr * weight_decay, rel=1e-12)
    assert rule(lr, weight_decay, growth, growth) == (lr, weight_decay)
    assert rule(lr, weight_decay, 1, decay) == (pytest.approx(lr / decay, rel=1e-15), weight_decay)
    assert rule(lr, weight_decay, growth, 1) == (lr, pytest.approx(weight_decay * growth, rel=1e-15))
