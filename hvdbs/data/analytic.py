"""Samples of a loss surface that is known: functions of (seed, index), made where they are needed, without files.

Samples of a bowl and of least squares are endless: the one at stream position p is sample p, so none is ever seen
twice, F is the expectation over them, and an epoch is only a length. Logistic regression has a finite training set,
reshuffled every epoch as any other; there F is the mean over that set, so that its minimiser can be found exactly.
Validation samples are the first of a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hvdbs import surfaces
from hvdbs.batching import MicroBatch
from hvdbs.config import Config
from hvdbs.data import Batch, order, streams
from hvdbs.surfaces import AnalyticConfig, Point, Surface

_TRAIN, _VAL = 0, 1

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


def normals(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Standard normal numbers [B, W] from random bits [B, W], W even, after Box and Muller (1958)."""
    half = bits.shape[1] // 2
    uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2 * np.log(uniform[:, :half] + 2.0**-53))  # from (0, 1]
    angle = 2 * np.pi * uniform[:, half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def _words(numbers: int) -> int:
    """Words of 64 bits that ``numbers`` normal numbers take."""
    return numbers + numbers % 2


def _along(inputs: NDArray[np.float64], weights: Point) -> NDArray[np.float64]:
    # Not a matrix product: how that sums depends on the number of rows, and a sample must not depend on its batch.
    along: NDArray[np.float64] = (inputs * weights).sum(axis=1)
    return along
