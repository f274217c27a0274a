"""Extrapolation as NumPy, nothing of hvdbs: a network of two layers and two loss surfaces with gradients by hand.

Written from the words of the method (y = x - length * direction, the update moves x) and of the design: windows, micro-
batches of consecutive samples, virtual worker floor(j V / n) for micro-batch j of n, the summed loss divided by the
window's true count. What is drawn from a generator is given as data. The optimizers are those of ``numpy_reference``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from numpy_reference import Array, Momentum, Rule, step
from reference import Stage

Point = dict[str, Array]  # by the names that torch gives them, in the model's order
# Summed loss at a point over the samples of these indices, and its gradient.
Summed = Callable[[Point, list[int]], tuple[float, Point]]


@dataclass
class Rules:
    """``until``: (samples, stage), the first that is plain; ``unit``: window or micro."""

    direction: str
    unit: str = "window"
    ratio: float = 0.0
    length: float | None = None
    workers: int = 1
    until: tuple[float, float] = (np.inf, np.inf)
    optimizer: Rule = field(default_factory=Rule)
    clip_norm: float = np.inf
    micro_batch: int = 8
    seed: int = 0


@dataclass
class Walk:
    """``losses``: of each update, where its gradients were taken; ``before``: where x stood before it."""

    x: Point
    losses: list[float] = field(default_factory=list)
    before: list[Point] = field(default_factory=list)


def least_squares(x: Point, inputs: Array, targets: Array) -> tuple[float, Point]:
    """Of inputs [B, D] against targets [B]: half the squared errors."""
    error = inputs @ x["weight"][0] - targets
    return float(error @ error) / 2, {"weight": (error @ inputs)[None]}


def logistic(x: Point, inputs: Array, signs: Array) -> tuple[float, Point]:
    """Of inputs [B, D] against signs [B], 1 or -1: log(1 + exp(-sign input.w))."""
    margin = signs * (inputs @ x["weight"][0])
    return float(np.log1p(np.exp(-margin)).sum()), {"weight": -((signs / (1 + np.exp(margin))) @ inputs)[None]}


def network(x: Point, inputs: Array, labels: NDArray[np.int64]) -> tuple[float, Point]:
    """Cross entropy of inputs [B, D] against labels [B]: linear, tanh, linear."""
    hidden = np.tanh(inputs @ x["0.weight"].T + x["0.bias"])
    logits = hidden @ x["2.weight"].T + x["2.bias"]
    logits = logits - logits.max(1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(1, keepdims=True)
    every = np.arange(len(labels))
    loss = -np.log(p[every, labels]).sum()
    p[every, labels] -= 1
    back = (p @ x["2.weight"]) * (1 - hidden**2)
    gradient = {"0.weight": back.T @ inputs, "0.bias": back.sum(0), "2.weight": p.T @ hidden, "2.bias": p.sum(0)}
    return float(loss), gradient


def noise(direction: str, x: Point, seed: int, step: int, index: int) -> Point:
    """Of scale 1, on the matrices alone, the last one drawn first."""
    words = struct.pack("<QQQ", seed, step, index)
    key = int.from_bytes(hashlib.blake2b(words, digest_size=8, person=b"noise").digest(), "little") >> 1
    generator = torch.Generator().manual_seed(key)
    found = {name: np.zeros_like(value) for name, value in x.items()}
    for name in reversed([name for name, value in x.items() if value.ndim > 1]):
        drawn = torch.empty(x[name].shape, dtype=torch.float64)
        if direction in ("noise_uniform", "noise_weight"):
            n = drawn.uniform_(-1, 1, generator=generator).numpy()
        else:
            n = drawn.normal_(generator=generator).numpy()
        if direction == "noise_weight":
            n = n * np.abs(x[name])
        elif direction == "noise_filter":
            n = np.stack([np.linalg.norm(w) * row / np.linalg.norm(row) for row, w in zip(n, x[name], strict=True)])
        found[name] = n
    return found


def moved(x: Point, by: float, along: Point | None) -> Point:
    return x if along is None else {name: value - by * along[name] for name, value in x.items()}


def plus(a: Point | None, b: Point, factor: float = 1.0) -> Point:
    return {name: (0.0 if a is None else a[name]) + factor * value for name, value in b.items()}


def train(start: Point, summed: Summed, order: Sequence[int], stages: Sequence[Stage], rules: Rules) -> Walk:
    walk = Walk({name: value.copy() for name, value in start.items()})
    state = {name: Momentum() for name in start}
    kept: dict[int, Point] = {}
    seen = update = boundary = 0
    for number, stage in enumerate(stages):
        boundary += stage.samples
        if rules.optimizer.reset:
            state = {name: Momentum() for name in start}
        while seen < boundary:
            x, m = walk.x, rules.micro_batch
            window = list(order[seen : seen + stage.global_batch])
            micros = [window[at : at + m] for at in range(0, len(window), m)]
            workers = [j * rules.workers // len(micros) for j in range(len(micros))]
            length = rules.ratio * stage.lr if rules.length is None else rules.length
            on = seen < rules.until[0] and number < rules.until[1] and length > 0
            kind = rules.direction if on else "none"
            units: list[list[int]] = []
            for j, worker in enumerate(workers):
                if rules.unit == "window" and j and worker == workers[j - 1]:
                    units[-1].append(j)
                else:
                    units.append([j])

            total: Point | None = None
            loss = 0.0
            for unit in units:
                own = [micros[j] for j in unit]
                count = sum(map(len, own))
                along: Point | None = None
                if kind == "local_past":
                    along = kept.get(workers[unit[0]])
                elif kind == "global_past":
                    along = kept.get(0)
                elif kind == "same_sample":
                    for micro in own:
                        along = plus(along, summed(x, micro)[1], 1 / count)
                elif kind.startswith("noise"):
                    along = noise(kind, x, rules.seed, update, unit[0])
                mean: Point | None = None
                for micro in own:
                    value, gradient = summed(moved(x, length, along), micro)
                    loss += value / len(window)
                    mean = plus(mean, gradient, 1 / count)
                assert mean is not None
                if kind == "local_past":
                    kept[workers[unit[0]]] = mean
                total = plus(total, mean, count / len(window))

            assert total is not None
            if kind == "global_past":
                kept[0] = total
            shrink = min(1.0, rules.clip_norm / np.sqrt(sum((value**2).sum() for value in total.values())))
            walk.before.append(x)
            walk.losses.append(loss)
            walk.x = {
                name: step(
                    x[name],
                    total[name] * shrink,
                    state[name],
                    rules.optimizer,
                    stage.lr,
                    stage.weight_decay if x[name].ndim > 1 else 0.0,
                )
                for name in x
            }
            seen += len(window)
            update += 1
    return walk
