"""Extrapolation and its optimizers as NumPy, nothing of hvdbs: a network of two layers with gradients by hand.

Written from the words of the method (y = x - length * direction, the update moves x) and of the design: windows, micro-
batches of consecutive samples, virtual worker floor(j V / n) for micro-batch j of n, the summed loss divided by the
window's true count. What is drawn from a generator is given as data.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from reference import Stage

Array = NDArray[np.float64]
Point = dict[str, Array]  # by the names that torch gives them


@dataclass
class Rules:
    """``until``: (samples, stage), the first that is plain; ``unit``: window or micro."""

    direction: str
    unit: str = "window"
    ratio: float = 0.0
    length: float | None = None
    workers: int = 1
    until: tuple[float, float] = (np.inf, np.inf)
    optimizer: str = "sgd"
    momentum: float = 0.0
    clip_norm: float = np.inf
    micro_batch: int = 8
    seed: int = 0


@dataclass
class Walk:
    """``losses``: of each update, where its gradients were taken."""

    x: Point
    losses: list[float] = field(default_factory=list)


def network(x: Point, inputs: Array, labels: NDArray[np.int64]) -> tuple[float, Point]:
    """Summed cross entropy of inputs [B, D] against labels [B], and its gradient: linear, tanh, linear."""
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
    for name in ("2.weight", "0.weight"):
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


def train(
    start: Point, inputs: Array, labels: NDArray[np.int64], order: Sequence[int], stages: Sequence[Stage], rules: Rules
) -> Walk:
    walk = Walk({name: value.copy() for name, value in start.items()})
    state = {name: np.zeros_like(value) for name, value in start.items()}
    kept: dict[int, Point] = {}
    seen = step = boundary = 0
    for number, stage in enumerate(stages):
        boundary += stage.samples
        if rules.optimizer == "adagrad":  # begins afresh
            state = {name: np.zeros_like(value) for name, value in start.items()}
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
                        along = plus(along, network(x, inputs[micro], labels[micro])[1], 1 / count)
                elif kind.startswith("noise"):
                    along = noise(kind, x, rules.seed, step, unit[0])
                mean: Point | None = None
                for micro in own:
                    value, gradient = network(moved(x, length, along), inputs[micro], labels[micro])
                    loss += value / len(window)
                    mean = plus(mean, gradient, 1 / count)
                assert mean is not None
                if kind == "local_past":
                    kept[workers[unit[0]]] = mean
                total = plus(total, mean, count / len(window))

            assert total is not None
            if kind == "global_past":
                kept[0] = total
            size = np.sqrt(sum((value**2).sum() for value in total.values()))
            shrink = min(1.0, rules.clip_norm / size)
            for name in x:
                g = total[name] * shrink + (stage.weight_decay * x[name] if x[name].ndim > 1 else 0.0)
                if rules.optimizer == "adagrad":
                    state[name] += g**2
                    step_of = g / (np.sqrt(state[name]) + 1e-10)
                else:
                    state[name] = rules.momentum * state[name] + g
                    step_of = g + rules.momentum * state[name] if rules.optimizer == "nesterov" else state[name]
                x[name] -= stage.lr * step_of
            walk.losses.append(loss)
            seen += len(window)
            step += 1
    return walk
