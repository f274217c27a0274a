"""The coefficients of a bowl a w1^2 + b w2^2 + c, from the losses of windows at known weights.

A window's loss at weights with F(w) = a w1^2 + b w2^2 + c is the mean of B squares of normal numbers (see
``hvdbs.data.analytic.least_squares``): a gamma variable of mean F and variance 2 F^2 / B, independent of the windows
before it once its weights are given. So losses far up say little about c, and least squares without weights would be
led by them. The weights B / (2 F^2) depend on what is sought; iterated to their fixed point, the weighted normal
equations are those of maximum likelihood (McCullagh and Nelder, "Generalized Linear Models", 2nd ed., section 8.3,
identity link), and the inverse of their matrix is the asymptotic covariance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdbs.errors import HvdbsError

NAMES = ("a", "b", "c")
_NORMAL_95 = 1.959963984540054  # two-sided 95 % quantile of the standard normal distribution
_MOST_STEPS = 100


@dataclass(frozen=True)
class Estimate:
    """``values`` and ``errors`` (standard) of a, b and c, from ``windows`` losses.

    ``dispersion``: the squared deviations of the losses over what their error model says, per degree of freedom. It is
    1 but for sqrt(2 / windows) or so if the model holds.
    """

    values: tuple[float, float, float]
    errors: tuple[float, float, float]
    windows: int
    dispersion: float

    def interval(self, k: int) -> tuple[float, float]:
        """The 95 % confidence interval of coefficient ``k``, symmetric: its coverage is asymptotic in the windows."""
        half = _NORMAL_95 * self.errors[k]
        return self.values[k] - half, self.values[k] + half


def fit_bowl(weights: NDArray[np.float64], losses: NDArray[np.float64], batches: NDArray[np.float64]) -> Estimate:
    """Fit to ``losses`` [T] of ``batches`` [T] samples each, at ``weights`` [T, 2].

    Fisher scoring, each step halved until no loss is expected to be negative and the likelihood does not fall. Raises
    HvdbsError if the weights leave a coefficient open.
    """
    windows = len(losses)
    design = np.column_stack([weights**2, np.ones(windows)])
    scale = np.maximum(np.abs(design).max(axis=0, initial=0.0), np.finfo(float).tiny)
    if windows < 4 or np.linalg.matrix_rank(design / scale, tol=1e-6 * windows**0.5) < 3:
        raise HvdbsError(f"weights.csv: {windows} logged windows at too few different weights to tell a, b and c apart")
    scaled = design / scale
    values = np.array([0.0, 0.0, np.average(losses, weights=batches)])
    for _ in range(_MOST_STEPS):
        expected = scaled @ values
        precision = batches / (2 * expected**2)
        information = scaled.T @ (precision[:, None] * scaled)
        step = np.linalg.solve(information, scaled.T @ (precision * (losses - expected)))
        before, length = _deviance(losses, expected, batches), 1.0
        while length > 1e-12 and not _deviance(losses, scaled @ (values + length * step), batches) <= before:
            length /= 2
        if length <= 1e-12:
            break  # at the top, to rounding
        values = values + length * step
        if np.abs(step).max() <= 1e-12 * np.abs(values).max():
            break
    expected = scaled @ values
    precision = batches / (2 * expected**2)
    covariance = np.linalg.inv(scaled.T @ (precision[:, None] * scaled))
    found, errors = (values / scale).tolist(), (np.sqrt(np.diag(covariance)) / scale).tolist()
    dispersion = float((precision * (losses - expected) ** 2).sum() / (windows - 3))
    return Estimate((found[0], found[1], found[2]), (errors[0], errors[1], errors[2]), windows, dispersion)


def _deviance(losses: NDArray[np.float64], expected: NDArray[np.float64], batches: NDArray[np.float64]) -> float:
    """Minus twice the log-likelihood, up to what does not depend on ``expected``; infinite where that is impossible."""
    if expected.min() <= 0:
        return float("inf")
    return float((batches * (losses / expected + np.log(expected))).sum())
