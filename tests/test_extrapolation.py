"""Extrapolation against closed forms, on bowls: trajectories worked out by hand, fixed points, stability, bounds.

Equations of Lin et al., arXiv 2006.05720 (y = x - length * direction; the update moves x); numbers derived from them by
hand. Against an independent implementation on a real classifier: tests/parallel/test_extrapolation_between_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bowls
import numpy as np
import pytest
import rig
import torch
from bowls import BOWL, GRADIENT, NOISE, away, close, in_turn, path
from reference import Stage

from hvdbs.comm.local import Solo, ThreadWorld
from hvdbs.reach import ExtrapolationConfig

TWO = in_turn((1.0, 0.0), (3.0, 0.0))
RULES: list[dict[str, Any]] = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- trajectories worked out by hand


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (RULES[0], [1, 0.9, 0.815, 0.73775, 0.6678375, 0.604549375]),
        (RULES[1], [1, 0.9, 0.725, 0.49925]),
        (RULES[2], [1, 0.81, 0.5846, 0.346286]),
    ],
    ids=["sgd", "heavy ball", "nesterov"],
)
@pytest.mark.parametrize("direction", ["local_past", "global_past"])
def test_a_bowl_of_curvature_1_is_descended_as_by_hand(
    tmp_path: Path, rules: dict[str, Any], expected: list[float], direction: str
) -> None:
    """lr 0.1, length 0.05, from 1. One virtual worker: its past gradient is the whole window's."""
    weights, losses = path(tmp_path, BOWL, away(direction), updates=len(expected) - 1, **rules)
    close(weights, expected)
    if rules["momentum"] == 0:
        places = [1, 0.85, 0.7725, 0.699125, 0.63288125]  # y, where the gradient and the loss are taken
        close(losses, [y**2 / 2 + 1 for y in places])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (away("local_past", 2), [1, 0.8, 0.665, 0.5485]),
        (away("global_past"), [1, 0.8, 0.66, 0.542]),
        (away("local_past", 1), [1, 0.8, 0.66, 0.542]),
        (away("local_past", 1, granularity="micro"), [1, 0.8075, 0.6581125, 0.5363616875]),
        (away("local_past", 2, granularity="micro"), [1, 0.8, 0.665, 0.5485]),
        # same sample: y = 0.95 and 0.85 of x; the mean over both of them moves y by 0.1 x
        (away("same_sample", 2), [1, 0.825, 0.825**2, 0.825**3]),
        (away("same_sample", 1, granularity="micro"), [1, 0.825, 0.825**2, 0.825**3]),
        (away("same_sample", 1), [1, 0.82, 0.82**2, 0.82**3]),
    ],
    ids=lambda value: f"{value.direction}-{value.unit}-{value.virtual_workers}" if hasattr(value, "unit") else "",
)
def test_two_micro_batches_of_curvatures_1_and_3_descend_as_by_hand(
    tmp_path: Path, config: ExtrapolationConfig, expected: list[float]
) -> None:
    """lr 0.1, length 0.05, SGD: with two virtual workers each keeps its own gradient, with one they share theirs, and
    micro granularity takes the one before, also across windows."""
    weights, _ = path(tmp_path, TWO, config, updates=3, global_batch=2)
    close(weights, expected)
    if config.virtual_workers == 2:
        both = ThreadWorld(2).run(
            lambda comm: path(tmp_path / "both", TWO, config, updates=3, global_batch=2, comm=comm)
        )
        assert both[0] == both[1]
        close(both[0][0], expected)


def test_one_worker_follows_the_recurrence(tmp_path: Path) -> None:
    """x_{t+1} = (1 - (lr + length) h) x_t + length h x_{t-1}, x_1 = (1 - lr h) x_0; 30 updates."""
    lr, length, h = 0.13, 0.21, 1.7
    config = away("local_past", length=length)
    weights, _ = path(tmp_path, in_turn((h, 0.0)), config, updates=30, lr=lr, start=2.0)
    expected = [2.0, (1 - lr * h) * 2.0]
    while len(expected) < 31:
        expected.append((1 - (lr + length) * h) * expected[-1] + length * h * expected[-2])
    close(weights, expected)


@pytest.mark.parametrize(("lr", "length"), [(0.5, 0.7), (0.5, 0.8), (1.5, 0.2), (1.5, 0.3), (0.1, 0.9), (0.1, 1.0)])
def test_past_extrapolation_is_stable_if_and_only_if_lr_plus_twice_the_length_times_the_curvature_is_below_2(
    tmp_path: Path, lr: float, length: float
) -> None:
    weights, _ = path(tmp_path, BOWL, away("local_past", length=length), updates=80, lr=lr, start=1e-3)
    late, later = (max(map(abs, part)) for part in (weights[40:60], weights[60:]))
    assert (later < late) == (lr + 2 * length < 2)


def test_the_fixed_point_is_that_of_the_moreau_envelopes(tmp_path: Path) -> None:
    """Three virtual workers of curvatures 1, 3, 0.5 around 1, -1, 2 and length 0.2: at the fixed point the gradient of
    each is h (x - a) / (1 + 0.2 h), and these sum to 0 at -0.041916..., not at the minimiser -0.2222."""
    bowl = in_turn((1.0, 1.0), (3.0, -1.0), (0.5, 2.0))
    weights, _ = path(tmp_path, bowl, away("local_past", 3, length=0.2), updates=400, global_batch=3)
    damped = [(h / (1 + 0.2 * h), a) for h, a in ((1, 1), (3, -1), (0.5, 2))]
    envelope = sum(h * a for h, a in damped) / sum(h for h, _ in damped)
    assert envelope == pytest.approx(-0.0419161677)
    assert weights[-1] == pytest.approx(envelope, abs=1e-12)
    plain, _ = path(tmp_path, bowl, away("local_past", 3, length=0.0), updates=400, global_batch=3)
    assert plain[-1] == pytest.approx(-2 / 9, abs=1e-12)


def test_the_mean_squared_gradient_keeps_within_its_bound(tmp_path: Path) -> None:
    """L-smooth, lr <= 1 / L, length <= 1 / (2 sqrt 2 L), local_past, K virtual workers of b samples:
    mean |F'(x_t)|^2 <= 3 (F_0 - F*) / (lr T) + 1.5 L lr s^2 / (K b) + 2 L^2 length^2 s^2 / b."""
    h, sigma, k, lr, length, updates = 2.0, 1.0, 4, 0.3, 0.15, 60
    squares = []
    for seed in range(12):
        centres = np.random.default_rng(seed).normal(0.0, sigma / h, size=updates * k)
        source = bowls.Positions(lambda p, centres=centres: (h, float(centres[p])))
        weights, _ = path(
            tmp_path, source, away("local_past", k, length=length), updates=updates, global_batch=k, lr=lr, start=1.5
        )
        squares.append(np.mean([(h * w) ** 2 for w in weights[:-1]]))
    bound = 3 * (h * 1.5**2 / 2) / (lr * updates) + 1.5 * h * lr * sigma**2 / k + 2 * (h * length * sigma) ** 2
    assert np.mean(squares) <= bound


# --- what it must not change


@pytest.mark.parametrize("rules", RULES, ids=["sgd", "heavy ball", "nesterov"])
def test_length_0_is_bitwise_the_plain_method_whatever_the_direction(tmp_path: Path, rules: dict[str, Any]) -> None:
    """Law 7, with batch norm and dropout, after each of 10 updates; and no tensor is held for it."""

    def digests(extrapolation: ExtrapolationConfig | None) -> list[str]:
        watch = rig.Watch()
        config = rig.settings(rig.SHORT_STAGES, clip_norm=0.3, extrapolation=extrapolation, **rules)
        trip = rig.trained(Solo(), config, rig.built(rig.ConvNet), rig.memory(rig.IMAGE), tmp_path, watch)
        assert trip.run.replica.extrapolation.held_bytes == 0
        return watch.digests

    plain = digests(None)
    for direction in (*GRADIENT, *NOISE):
        assert digests(away(direction, 2, ratio=0.0)) == plain
        assert digests(away(direction, 2, length=0.0)) == plain
    assert digests(ExtrapolationConfig("none", ratio=1.0)) == plain


@pytest.mark.parametrize("direction", ["local_past", "global_past"])
def test_the_first_update_is_bitwise_the_plain_one_and_the_second_is_not(tmp_path: Path, direction: str) -> None:
    watches = [rig.Watch(), rig.Watch()]
    for watch, extrapolation in zip(watches, (None, away(direction)), strict=True):
        config = rig.settings(rig.SHORT_STAGES, extrapolation=extrapolation)
        rig.trained(Solo(), config, rig.built(rig.ConvNet), rig.memory(rig.IMAGE), tmp_path, watch)
    assert watches[0].digests[0] == watches[1].digests[0]
    assert watches[0].digests[1] != watches[1].digests[1]


@pytest.mark.parametrize("direction", [*GRADIENT, *NOISE])
def test_the_deviation_from_plain_training_is_proportional_to_a_small_length(tmp_path: Path, direction: str) -> None:
    """Halving it halves the deviation, within 2 %, after 10 updates of a network with two hidden layers."""

    def after(ratio: float) -> rig.Tensors:
        model = rig.built(rig.mlp)
        config = rig.settings(rig.SHORT_STAGES, extrapolation=away(direction, 2, ratio=ratio))
        rig.trained(Solo(), config, model, rig.memory(rig.FLAT), tmp_path)
        return rig.snapshot(model)

    plain = after(0.0)
    whole, half = (rig.distance(after(ratio), plain) for ratio in (2e-4, 1e-4))
    assert whole > 0
    assert whole / half == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("direction", GRADIENT)
@pytest.mark.parametrize("micro_batch", [5, 30])
def test_window_granularity_does_not_depend_on_how_a_virtual_workers_part_is_cut(
    tmp_path: Path, direction: str, micro_batch: int
) -> None:
    """Two virtual workers of 30 samples each, as micro-batches of 5, and of 30; 1e-12 against batches of 15."""

    def after(size: int) -> rig.Tensors:
        model = rig.built(rig.mlp)
        stages = (Stage(300, 60, 0.1, 1e-3),)
        config = rig.settings(stages, micro_batch=size, extrapolation=away(direction, 2, ratio=1.0))
        rig.trained(Solo(), config, model, rig.memory(rig.FLAT), tmp_path)
        return rig.snapshot(model)

    assert rig.worst_error(after(micro_batch), after(15)) < 1e-12
