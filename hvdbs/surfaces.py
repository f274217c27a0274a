"""Loss surfaces that are known in closed form: what they are made of, where they are least, and how far above it.

The sampled losses whose expectations these are stand in ``hvdbs.loss``, the samples in ``hvdbs.data.analytic``.
Shapes: D the number of weights; a point is float64 [D].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Point = NDArray[np.float64]

# The surfaces that read a field of AnalyticConfig; a value given to one that nobody reads is a mistake.
READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("a", "b", "c", "start"), ("bowl",)),
    **dict.fromkeys(("dimension", "eigenvalues", "largest", "power"), ("least_squares", "logistic")),
    **dict.fromkeys(("label_noise", "distance", "inputs"), ("least_squares",)),
    "teacher_norm": ("logistic",),
}


@dataclass(frozen=True)
class AnalyticConfig:
    """A loss surface that is known (data.kind analytic).

    Args:
        surface: bowl (a w1^2 + b w2^2 + c), least_squares (any dimension and spectrum) or logistic (regression).
        a: curvature along w1 (bowl).
        b: curvature along w2 (bowl).
        c: the least loss (bowl).
        start: the weights before the first update (bowl).
        dimension: number of weights (least_squares, logistic).
        eigenvalues: of the inputs' second moments, one for each weight; by default largest * k^-power for weight k.
        largest: the largest eigenvalue.
        power: how fast eigenvalues fall; 0 makes all equal.
        label_noise: standard deviation of what is added to the targets (least_squares).
        distance: 2-norm from the first weights to the minimiser, which has norm 1 (least_squares).
        inputs: normal, or in_turn (one weight at a time; with whole rounds in a window only labels are noise).
        teacher_norm: 2-norm of the weights that the labels are drawn with (logistic).
    """

    surface: Literal["bowl", "least_squares", "logistic"] = "bowl"
    a: float = 1.0
    b: float = 1.0
    c: float = 1.0
    start: tuple[float, float] = (1.0, 1.0)
    dimension: int = 10
    eigenvalues: tuple[float, ...] = ()
    largest: float = 1.0
    power: float = 0.0
    label_noise: float = 1.0
    distance: float = 1.0
    inputs: Literal["normal", "in_turn"] = "normal"
    teacher_norm: float = 2.0


class Surface(Protocol):
    """A loss F over points, its ``minimiser`` [D] and ``minimum`` F* = F(minimiser)."""

    @property
    def minimiser(self) -> Point: ...

    @property
    def minimum(self) -> float: ...

    def gap(self, point: Point) -> float:
        """F(``point``) - F*."""
        ...


@dataclass(frozen=True)
class Quadratic:
    """F(w) = minimum + 1/2 sum_k h_k (w_k - w*_k)^2 with ``eigenvalues`` h [D] and ``minimiser`` w* [D].

    The population loss of least squares, E (x.w - y)^2 / 2, where E x x^T = diag(h) and y = x.w* + noise of variance
    2 * minimum. ``gap`` is a sum of squares: it loses no digits, however close to the minimiser.
    """

    eigenvalues: Point
    minimiser: Point
    minimum: float

    def gap(self, point: Point) -> float:
        return float(0.5 * (self.eigenvalues * (point - self.minimiser) ** 2).sum())


def distance(surface: Surface, point: Point) -> float:
    """2-norm from ``point`` to the minimiser."""
    return float(np.linalg.norm(point - surface.minimiser))


def dimension(config: AnalyticConfig) -> int:
    """D: the number of weights."""
    return 2 if config.surface == "bowl" else config.dimension


def spectrum(config: AnalyticConfig) -> Point:
    """Eigenvalues [D] of E x x^T, which for squared errors is the Hessian. Those of the bowl are 2a and 2b."""
    if config.surface == "bowl":
        return np.array([2 * config.a, 2 * config.b])
    if config.eigenvalues:
        return np.array(config.eigenvalues)
    return config.largest * np.arange(1.0, config.dimension + 1) ** -config.power


def quadratic(config: AnalyticConfig) -> Quadratic:
    """The surface of bowl or least_squares."""
    if config.surface == "bowl":
        return Quadratic(spectrum(config), np.zeros(2), config.c)
    return Quadratic(spectrum(config), even(config.dimension), config.label_noise**2 / 2)


def even(size: int) -> Point:
    """The point of norm 1 whose coordinates are all equal."""
    return np.full(size, 1 / math.sqrt(size))


def start(config: AnalyticConfig, normalised: bool) -> Point:
    """The weights [D] before the first update.

    least_squares: the minimiser plus ``distance`` times +-1/sqrt(D) in turn, so that all eigenvectors have the same
    share of it. ``normalised``, the point stays on the unit sphere: the minimiser turned towards that direction until
    the chord between both has length ``distance``, below 2.
    """
    if config.surface == "bowl":
        return np.array(config.start)
    if config.surface == "logistic":
        return np.zeros(config.dimension)
    minimiser = even(config.dimension)
    direction = minimiser * (-1.0) ** np.arange(config.dimension)
    if not normalised:
        return minimiser + config.distance * direction
    across = direction - (direction @ minimiser) * minimiser
    angle = 2 * math.asin(config.distance / 2)
    turned: Point = math.cos(angle) * minimiser + math.sin(angle) * across / np.linalg.norm(across)
    return turned
