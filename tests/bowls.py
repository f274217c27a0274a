"""Quadratic losses of one weight, through the loss that hvdbs trains with: for the closed forms of a method.

A model whose logits are 0 and log(exp(v) - 1) has the cross entropy v against label 0, for any v > 0, exactly but for
roundings. So v = h (w - a)^2 / 2 + 1, with h and a the inputs of a sample, trains as the bowl of curvature h around a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import rig
import torch
from reference import Stage
from torch import nn

from hvdbs.batching import MicroBatch
from hvdbs.comm import Communicator
from hvdbs.comm.local import Solo
from hvdbs.data import Batch
from hvdbs.reach import ExtrapolationConfig

GRADIENT = ("local_past", "global_past", "same_sample")
NOISE = ("noise_uniform", "noise_gaussian", "noise_weight", "noise_filter")


def away(direction: str, workers: int | str | None = 1, **fields: Any) -> ExtrapolationConfig:
    """The config of ``direction``, ratio 0.5 unless a length is given, ``workers`` where it reads them."""
    if "length" not in fields:
        fields.setdefault("ratio", 0.5)
    config = ExtrapolationConfig(direction, **fields)  # type: ignore[arg-type]
    return ExtrapolationConfig(direction, virtual_workers=workers if config.reads_workers else None, **fields)  # type: ignore[arg-type]


def close(got: Any, expected: Any) -> None:
    assert list(got) == pytest.approx(list(expected), rel=1e-13, abs=1e-15)


class Bowl(nn.Module):
    """Inputs [B, 2] of curvatures and centres to logits [B, 2]."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        curvature, centre = inputs.unbind(1)
        value = curvature * (self.w - centre) ** 2 / 2 + 1
        return torch.stack([torch.zeros_like(value), torch.log(torch.expm1(value))], 1)


class Positions:
    """A Source whose sample at position p is ``sample(p)``: a curvature and a centre."""

    train_samples = 10**6
    val_samples = 1
    classes = ("value", "other")

    def __init__(self, sample: Callable[[int], tuple[float, float]]) -> None:
        self._sample = sample

    def _batch(self, positions: Iterable[int]) -> Batch:
        inputs = torch.tensor([self._sample(p) for p in positions], dtype=torch.float64)
        return Batch(inputs, torch.zeros(len(inputs), dtype=torch.int64))

    def train(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        for request in requests:
            yield self._batch(range(request.begin, request.begin + request.size))

    def validation(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        for _ in requests:
            yield self._batch([0])


def in_turn(*samples: tuple[float, float]) -> Positions:
    """The ``samples`` (curvature, centre), over and over."""
    return Positions(lambda position: samples[position % len(samples)])


BOWL = in_turn((1.0, 0.0))


def path(
    folder: Path,
    source: Positions,
    extrapolation: ExtrapolationConfig,
    *,
    updates: int,
    global_batch: int = 1,
    micro_batch: int = 1,
    lr: float = 0.1,
    start: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    comm: Communicator | None = None,
) -> tuple[Sequence[float], Sequence[float]]:
    """Collective. The weight before the first and after each update, and the loss that each update saw."""
    model, watch = Bowl(start), rig.Watch()
    config = rig.settings(
        (Stage(updates * global_batch, global_batch, lr),),
        micro_batch=micro_batch,
        momentum=momentum,
        nesterov=nesterov,
        extrapolation=extrapolation,
    )
    weights = [start]
    watch.after = lambda progress: weights.append(model.w.item())
    rig.trained(comm or Solo(), config, model, source, folder, watch)  # type: ignore[arg-type]  # a Source as well
    return weights, watch.losses
