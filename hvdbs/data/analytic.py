"""Samples of a loss surface that is known: functions of (seed, index), made where they are needed, without files.

Samples of a bowl and of least squares are endless: the one at stream position p is sample p, so none is ever seen
twice, F is the expectation over them, and an epoch is only a length. Logistic regression has a finite training set,
reshuffled every epoch as any other; there F is the mean over that set, so that its minimiser can be found exactly.
Validation samples are the first of a stream of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hvdbs import surfaces
from hvdbs.batching import MicroBatch
from hvdbs.config import Config
from hvdbs.data import Batch, order, streams
from hvdbs.errors import refusal
from hvdbs.surfaces import AnalyticConfig, Point, Surface

_TRAIN, _VAL = 0, 1

_MOST_NEWTON_STEPS = 60
_STATIONARY = 1e-14  # largest entry of the mean gradient at a minimiser
_FLAT = 1e-12  # smallest over mean eigenvalue of a Hessian that is not taken for singular

# Inputs float64 [B, D] and targets float64 [B] of the samples begin, begin + 1, ... of a stream (train or validation).
Sampler = Callable[[int, int, int], tuple[NDArray[np.float64], NDArray[np.float64]]]


@dataclass(frozen=True)
class AnalyticSource:
    """A Source (see ``hvdbs.data``) without classes: inputs float64 [B, D], labels float64 [B].

    ``surface``: the loss that its training samples have on average. ``training``: the finite training set, or None
    where samples are endless.
    """

    seed: int
    train_samples: int
    val_samples: int
    surface: Surface
    sampler: Sampler
    training: tuple[torch.Tensor, torch.Tensor] | None

    backend = "analytic"
    classes: tuple[str, ...] = ()

    def train(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        for request in requests:
            if self.training is None:
                yield self._batch(_TRAIN, request)
            else:
                index = order.positions(self.seed, self.train_samples, request.begin, request.size).index
                inputs, labels = self.training
                yield Batch(inputs[index], labels[index])

    def validation(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        for request in requests:
            yield self._batch(_VAL, request)

    def _batch(self, stream: int, request: MicroBatch) -> Batch:
        inputs, labels = self.sampler(stream, request.begin, request.size)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels))


def open_analytic(config: Config) -> AnalyticSource:
    """The samples that ``config.data.analytic`` describes. Raises HvdbsError for labels without a minimiser."""
    data = config.data
    assert data.train_samples
    assert data.val_samples
    sizes = (config.seed, data.train_samples, data.val_samples)
    if data.analytic.surface == "logistic":
        sampler = logistic(config.seed, data.analytic)
        inputs, signs = sampler(_TRAIN, 0, data.train_samples)
        surface = Logistic(inputs, signs, logistic_minimiser(inputs, signs))
        return AnalyticSource(*sizes, surface, sampler, (torch.from_numpy(inputs), torch.from_numpy(signs)))
    sampler = least_squares(config.seed, data.analytic)
    return AnalyticSource(*sizes, surfaces.quadratic(data.analytic), sampler, None)


def least_squares(seed: int, config: AnalyticConfig) -> Sampler:
    """Targets x.w* + noise over inputs with E x x^T = diag(h).

    inputs ``normal``: x ~ N(0, diag(h)). So x.w - y ~ N(0, 2 F(w)), and the mean loss of B samples is F(w) times a
    chi-squared number of B degrees of freedom over B: its variance is 2 F(w)^2 / B exactly.
    inputs ``in_turn``: x = sqrt(D h_k) e_k at every position k mod D, so that D positions in a row have exactly
    diag(h) as their mean x x^T, and windows of whole rounds have no noise but that of the labels.
    """
    surface = surfaces.quadratic(config)
    size = surface.minimiser.size
    scale, noise = np.sqrt(surface.eigenvalues), np.sqrt(2 * surface.minimum)

    def normal(stream: int, begin: int, many: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        drawn = normals(streams.analytic_bits(seed, stream, begin, many, _words(size + 1)))
        inputs = scale * drawn[:, :size]
        return inputs, _along(inputs, surface.minimiser) + noise * drawn[:, size]

    def in_turn(stream: int, begin: int, many: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        drawn = normals(streams.analytic_bits(seed, stream, begin, many, _words(1)))
        inputs = np.zeros((many, size))
        turn = np.arange(begin, begin + many) % size
        inputs[np.arange(many), turn] = np.sqrt(size) * scale[turn]
        return inputs, _along(inputs, surface.minimiser) + noise * drawn[:, 0]

    return in_turn if config.inputs == "in_turn" else normal


def logistic(seed: int, config: AnalyticConfig) -> Sampler:
    """Inputs x ~ N(0, diag(h)), signs 1 with probability 1 / (1 + exp(-x.t)) and else -1; t the teacher's weights."""
    scale, teacher = np.sqrt(surfaces.spectrum(config)), config.teacher_norm * surfaces.even(config.dimension)
    size, words = config.dimension, _words(config.dimension)

    def sample(stream: int, begin: int, many: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        bits = streams.analytic_bits(seed, stream, begin, many, words + 1)
        inputs = scale * normals(bits[:, :words])[:, :size]
        chance = 1 / (1 + np.exp(-_along(inputs, teacher)))
        return inputs, np.where(_uniforms(bits[:, words]) < chance, 1.0, -1.0)

    return sample


@dataclass(frozen=True)
class Logistic:
    """F(w) = mean of log(1 + exp(-sign x.w)) over the training set ``inputs`` [N, D] and ``signs`` [N].

    ``gap`` is a difference of two sums, so it is exact to about 1e-16, not relative to itself.
    """

    inputs: NDArray[np.float64]
    signs: NDArray[np.float64]
    minimiser: Point

    @property
    def minimum(self) -> float:
        return self.loss(self.minimiser)

    def loss(self, point: Point) -> float:
        return math.fsum(np.logaddexp(0.0, -self.signs * (self.inputs @ point))) / len(self.signs)

    def gap(self, point: Point) -> float:
        return max(0.0, self.loss(point) - self.minimum)


def logistic_minimiser(inputs: NDArray[np.float64], signs: NDArray[np.float64]) -> Point:
    """Where the logistic loss of ``inputs`` [N, D] and ``signs`` [N] is least, by Newton's method with halved steps.

    The largest entry of the mean gradient ends below 1e-14. Raises HvdbsError where there is no such point, because the
    training set can be separated and ever larger weights are ever better, or where it cannot be found.
    """
    many, size = inputs.shape
    point = np.zeros(size)
    for _ in range(_MOST_NEWTON_STEPS):
        gradient, hessian = _logistic_derivatives(inputs, signs, point)
        if np.linalg.eigvalsh(hessian)[0] < _FLAT * np.trace(hessian) / size:
            break
        step = np.linalg.solve(hessian, gradient)
        if np.abs(gradient).max() < _STATIONARY and np.abs(step).max() < 1e-10 * (1 + np.abs(point).max()):
            return point - step
        length = 1.0
        now = np.logaddexp(0.0, -signs * (inputs @ point)).mean()
        while np.logaddexp(0.0, -signs * (inputs @ (point - length * step))).mean() > now + 1e-15 and length > 1e-6:
            length /= 2
        point = point - length * step
    if (signs * (inputs @ point)).min() > 0:
        rule = f"samples of {size} inputs can be told apart without error, so their loss has no minimum"
        raise refusal(
            "data.train_samples", many, rule, "more samples, a smaller data.analytic.teacher_norm or dimension"
        )
    raise refusal(
        "data.analytic",
        f"{many} samples of {size} inputs",
        "are so ill-conditioned that the minimum cannot be found",
        "more samples, or a smaller data.analytic.power",
    )


def _logistic_derivatives(
    inputs: NDArray[np.float64], signs: NDArray[np.float64], point: Point
) -> tuple[Point, NDArray[np.float64]]:
    """Gradient [D] and Hessian [D, D] of the mean loss."""
    margin = signs * (inputs @ point)
    wrong = 1 / (1 + np.exp(np.minimum(margin, 700.0)))
    gradient = -(inputs * (signs * wrong)[:, None]).mean(axis=0)
    return gradient, (inputs * (wrong * (1 - wrong))[:, None]).T @ inputs / len(signs)


def normals(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Standard normal numbers [B, W] from random bits [B, W], W even, after Box and Muller (1958)."""
    half = bits.shape[1] // 2
    uniform = _uniforms(bits)
    radius = np.sqrt(-2 * np.log(uniform[:, :half] + 2.0**-53))  # from (0, 1]
    angle = 2 * np.pi * uniform[:, half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def _uniforms(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """In [0, 1), with 53 bits each."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _words(numbers: int) -> int:
    """Words of 64 bits that ``numbers`` normal numbers take."""
    return numbers + numbers % 2


def _along(inputs: NDArray[np.float64], weights: Point) -> NDArray[np.float64]:
    # Not a matrix product: how that sums depends on the number of rows, and a sample must not depend on its batch.
    along: NDArray[np.float64] = (inputs * weights).sum(axis=1)
    return along
