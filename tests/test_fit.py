"""The estimate of a bowl from window losses: exact where there is no noise, and intervals that cover as stated."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from hvdbs.errors import HvdbsError
from hvdbs.fit import fit_bowl

TRUTH = (0.5, 2.0, 0.3)


def loss_at(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    values: NDArray[np.float64] = weights**2 @ np.array(TRUTH[:2]) + TRUTH[2]
    return values


def descents(runs: int, batches: list[int], lr: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weights [R, T, 2] and window losses [R, T] of runs of SGD on the bowl from (3, -2), by NumPy alone; seed 0."""
    generator = np.random.default_rng(0)
    w, weights, losses = np.tile([3.0, -2.0], (runs, 1)), [], []
    for batch in batches:
        x = generator.standard_normal((runs, batch, 2)) * np.sqrt([2 * TRUTH[0], 2 * TRUTH[1]])
        noise = np.sqrt(2 * TRUTH[2]) * generator.standard_normal((runs, batch))
        residual = np.einsum("rbk,rk->rb", x, w) - noise
        weights.append(w)
        losses.append(0.5 * (residual**2).mean(axis=1))
        w = w - lr * np.einsum("rbk,rb->rk", x, residual) / batch
    return np.stack(weights, axis=1), np.stack(losses, axis=1)


def test_losses_without_noise_give_the_coefficients() -> None:
    """1e-9 relative, at 50 weights of seed 0."""
    weights = np.random.default_rng(0).standard_normal((50, 2))
    found = fit_bowl(weights, loss_at(weights), np.full(50, 8.0))
    assert found.values == pytest.approx(TRUTH, rel=1e-9)
    assert found.dispersion == pytest.approx(0.0, abs=1e-12)


def test_it_is_the_maximum_of_the_likelihood() -> None:
    """Moving any coefficient by a thousandth of its standard error either way makes the gamma likelihood smaller."""
    (weights,), (losses,) = descents(1, [16] * 200, 0.02)
    found = fit_bowl(weights, losses, np.full(200, 16.0))
    design = np.column_stack([weights**2, np.ones(200)])

    def minus_log_likelihood(values: NDArray[np.float64]) -> float:
        expected = design @ values
        return float((8 * (losses / expected + np.log(expected))).sum())

    best = np.array(found.values)
    for k in range(3):
        for sign in (-1, 1):
            moved = best.copy()
            moved[k] += sign * 1e-3 * found.errors[k]
            assert minus_log_likelihood(moved) > minus_log_likelihood(best)


BATCHES = {"single samples": [1] * 512, "one batch": [16] * 128, "growing": [16] * 200 + [64] * 50 + [256] * 20}


def coverage(runs: int, batches: list[int]) -> tuple[NDArray[np.float64], float]:
    """Of ``runs`` runs of SGD whose weights depend on their earlier losses: the share of 95 % intervals of a, b and c
    that hold the truth [3], and the mean dispersion."""
    held, dispersions = np.zeros(3), []
    for weights, losses in zip(*descents(runs, batches, 0.02), strict=True):
        found = fit_bowl(weights, losses, np.array(batches, dtype=float))
        held += [found.interval(k)[0] <= TRUTH[k] <= found.interval(k)[1] for k in range(3)]
        dispersions.append(found.dispersion)
    return held / runs, float(np.mean(dispersions))


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_95_percent_intervals_cover_the_truth_in_95_percent_of_runs(batches: list[int]) -> None:
    """500 runs: each coefficient's share lies in 0.95 +- 0.03 (3 standard errors), the mean dispersion in 1 +- 0.03."""
    held, dispersion = coverage(500, batches)
    assert (np.abs(held - 0.95) <= 0.03).all(), held
    assert abs(dispersion - 1) < 0.03


@pytest.mark.parametrize(
    "weights", [[(1.0, 2.0)] * 10, [(float(k), 0.0) for k in range(10)], [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)], []]
)
def test_weights_that_leave_a_coefficient_open_are_refused(weights: list[tuple[float, float]]) -> None:
    at = np.array(weights, dtype=float).reshape(-1, 2)
    with pytest.raises(HvdbsError, match=f"{len(weights)} logged windows at too few different weights"):
        fit_bowl(at, loss_at(at), np.ones(len(at)))
