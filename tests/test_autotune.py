"""The engine's equations against closed forms and simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdbs.autotune import AutotuneConfig, Boundary, Layer, band, effective_lr, norm_after, ratio

CONFIG = AutotuneConfig("band")
# After 30 epochs at 8,192 samples: lr 3.2, weight decay 1e-4, momentum 0.9, then a jump to 131,072 and lr / 10.
JUMP = Boundary(3.2, 1.6e-4, 0.9, 131_072, 8192, 10.0, 293, 1e-4, 1.6)
# Norms at rest in stage 0 by z* = lr G / (2 wd (1 - m)), for G of 1e-3 at 8,192 samples; half of it noise.
G = 1e-3
SQUARES = math.sqrt(3.2 * G / (2 * 1e-4 * 0.1))
LAYER = Layer(SQUARES, G / 2 / SQUARES, 8192 * G / 2 / SQUARES, effective_lr(3.2, 0.9, SQUARES))

positive = st.floats(1e-3, 1e3)


@given(squares=positive, unit=positive, lr=st.floats(1e-3, 1), weight_decay=st.floats(1e-6, 1e-3))
def test_a_norm_goes_from_where_it_is_to_its_rest_and_never_past_it(
    squares: float, unit: float, lr: float, weight_decay: float
) -> None:
    def after(steps: float) -> float:
        return norm_after(squares, unit, lr, weight_decay, 0.9, steps)

    rest = math.sqrt(lr * unit / (2 * weight_decay * 0.1))
    assert after(0) == pytest.approx(squares, rel=1e-12)
    assert after(1e12) == pytest.approx(rest, rel=1e-9)
    way = [after(steps) for steps in (0, 1, 10, 100, 1000, 1e5)]
    slack = 1e-9 * max(way)
    steps = np.diff(way)
    assert (steps >= -slack).all() if rest > squares else (steps <= slack).all()


def test_without_weight_decay_a_norm_only_grows_by_what_gradients_add() -> None:
    assert norm_after(2.0, 3.0, 0.1, 0.0, 0.5, 7) == pytest.approx(math.sqrt(4 + 2 * 0.01 * 3 / 0.25 * 7))


def test_the_norm_at_rest_and_the_turn_of_each_update_are_those_of_a_simulation() -> None:
    """A scale-invariant weight of 2,000 dimensions under gradients that are orthogonal to it, of random direction and
    of squared length G / |w|^2: lr 0.1, weight decay 5e-3, momentum 0.9, 6,000 updates, the last 3,000 averaged. Within
    1 % of sqrt(lr G / (2 wd (1 - m))) and of the angle sqrt(2 lr wd / (1 + m))."""
    generator = np.random.default_rng(0)
    d, lr, decay, m, unit = 2000, 0.1, 5e-3, 0.9, 1.0
    w = generator.normal(size=d)
    w *= (lr * unit / (2 * decay * (1 - m))) ** 0.25 / np.linalg.norm(w)
    v, squares, turns = np.zeros(d), [], []
    for update in range(6000):
        g = generator.normal(size=d)
        g -= (g @ w) / (w @ w) * w
        g *= math.sqrt(unit / (w @ w)) / np.linalg.norm(g)
        v = m * v + g + decay * w
        new = w - lr * v
        if update >= 3000:
            squares.append(new @ new)
            turns.append(math.acos(min(1.0, new @ w / np.linalg.norm(new) / np.linalg.norm(w))))
        w = new
    assert np.mean(squares) == pytest.approx(math.sqrt(lr * unit / (2 * decay * (1 - m))), rel=0.01)
    assert np.mean(turns) == pytest.approx(math.sqrt(2 * lr * decay / (1 + m)), rel=0.01)


@pytest.mark.parametrize(
    ("growth", "low", "high"),
    [(4, 0.4, 1.2649110640673518), (8, 0.8, 2.5298221281347035), (16, 1.6, 5.059644256269407)],
)
def test_the_band_by_numbers(growth: int, low: float, high: float) -> None:
    tuned = band([LAYER], replace(JUMP, batch=8192 * growth), CONFIG)
    assert (tuned.low, tuned.high) == (pytest.approx(low, rel=1e-12), pytest.approx(high, rel=1e-12))


def test_later_stages_count_all_decays_and_the_whole_growth() -> None:
    """8K, then 128K from stage 1 on, lr / 10 at each boundary: in stage 2 growth is still 16 and decay is 100."""
    tuned = band([LAYER], replace(JUMP, lr=0.32, decayed=100.0, excess=0.1), CONFIG)
    assert (tuned.low, tuned.high) == (pytest.approx(0.16), pytest.approx(1.6))


def test_a_ratio_in_the_band_changes_nothing() -> None:
    four = replace(JUMP, batch=32_768, lr=1.28, weight_decay=1e-4, steps=1173, excess=0.4)
    tuned = band([LAYER], four, CONFIG)
    assert tuned.low <= tuned.before <= tuned.high
    assert tuned.weight_decay == 1e-4 and not tuned.clamped


def test_a_jump_beyond_the_decay_raises_weight_decay_to_the_lower_end() -> None:
    tuned = band([LAYER], JUMP, CONFIG)
    assert tuned.before < tuned.low == pytest.approx(1.6)
    assert tuned.after == pytest.approx(tuned.low, abs=1e-6) and not tuned.clamped
    assert 1 < tuned.weight_decay / JUMP.weight_decay < 2


def test_what_no_weight_decay_can_reach_is_clamped() -> None:
    few = replace(JUMP, steps=5)
    tuned = band([LAYER], few, CONFIG)
    assert tuned.clamped and tuned.after < tuned.low
    assert (
        tuned.weight_decay == tuned.limit == pytest.approx(0.01 / (8 * 3.2)) and "lr and momentum" in tuned.limited_by
    )
    narrow = band([LAYER], few, replace(CONFIG, largest_change=2.0))
    assert narrow.weight_decay == narrow.limit == pytest.approx(2 * 1e-4 * 1.6)
    assert narrow.limited_by == "schedule.autotune.largest_change 2"
    beyond = band([LAYER], replace(few, weight_decay=1e-3), CONFIG)  # the rule's is past the limit, and stays
    assert beyond.clamped and beyond.weight_decay == 1e-3 and beyond.limit == tuned.limit


def test_a_ratio_above_the_band_lowers_weight_decay() -> None:
    """Noise all gone: norms shrink faster than the band allows."""
    quiet = replace(LAYER, signal=0.0, noise=0.0)
    tuned = band([quiet], replace(JUMP, batch=32_768, steps=11_730, weight_decay=1.6e-4), CONFIG)
    assert tuned.before > tuned.high
    assert tuned.weight_decay < 1.6e-4
    assert tuned.clamped or tuned.after == pytest.approx(tuned.high, abs=1e-6)


@given(a=st.floats(1e-6, 1e-3), b=st.floats(1e-6, 1e-3))
def test_the_predicted_ratio_increases_with_weight_decay(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert ratio([LAYER], JUMP, low, 0.2) <= ratio([LAYER], JUMP, high, 0.2) * (1 + 1e-12)


def test_the_median_layer_decides() -> None:
    others = [replace(LAYER, reference=LAYER.reference * factor) for factor in (0.01, 1, 100)]
    assert ratio(others, JUMP, 1e-4, 0.2) == ratio([LAYER], JUMP, 1e-4, 0.2)
