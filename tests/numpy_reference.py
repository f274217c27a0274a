"""Stages and update rules in NumPy alone: a linear classifier, its gradient in closed form, each rule's equations.

Nothing of hvdbs and nothing of torch. Symbols as in the papers: W weights [K, D], X inputs [B, D], eta lr, lam weight
decay, gamma of the proximal term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Rule:
    """``name``: sgd, adagrad or lars. ``reset``: each stage starts with the state of a first update."""

    name: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    gamma: float | None = None
    reset: bool = False


@dataclass
class Momentum:
    velocity: Array | None = None
    squares: Array | None = None
    seen: list[int] = field(default_factory=list)


def gradient(W: Array, X: Array, labels: NDArray[np.int64]) -> Array:
    """Of the mean cross entropy of softmax(X W^T): (p - onehot)^T X / B."""
    logits = X @ W.T
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(labels)), labels] -= 1
    return p.T @ X / len(labels)


def step(W: Array, g: Array, state: Momentum, rule: Rule, eta: float, lam: float) -> Array:
    """One update, without the proximal part."""
    if rule.name == "adagrad":
        g = g + lam * W
        state.squares = g * g if state.squares is None else state.squares + g * g
        return W - eta * g / (np.sqrt(state.squares) + 1e-10)
    if rule.name == "lars" and lam != 0:
        length, slope = float(np.linalg.norm(W)), float(np.linalg.norm(g))
        trust = 0.001 * length / (slope + lam * length + 1e-8) if length > 0 and slope > 0 else 1.0
        g = trust * (g + lam * W)
    else:
        g = g + lam * W
    if rule.momentum == 0:
        return W - eta * g
    state.velocity = g if state.velocity is None else rule.momentum * state.velocity + g
    return W - eta * (g + rule.momentum * state.velocity if rule.nesterov else state.velocity)


def train(
    W: Array,
    X: Array,
    labels: NDArray[np.int64],
    order: Sequence[int],
    stages: Sequence[tuple[int, int, float, float]],
    rule: Rule,
) -> Array:
    """W after all ``stages``: (samples, global_batch, lr, weight decay) each; windows cross boundaries and finish."""
    state, seen, boundary = Momentum(), 0, 0
    for samples, batch, eta, lam in stages:
        boundary += samples
        if seen >= boundary:
            continue
        anchor = W.copy()
        if rule.reset:
            state = Momentum()
        while seen < boundary:
            chosen = list(order[seen : seen + batch])
            seen += batch
            W = step(W, gradient(W, X[chosen], labels[chosen]), state, rule, eta, lam)
            if rule.gamma is not None:
                W = (rule.gamma * W + eta * anchor) / (rule.gamma + eta)
    return W
