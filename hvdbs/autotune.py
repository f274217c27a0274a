"""The auto-tuning engine of VBS: lr and weight decay of a stage, from the stage before and from what was measured.

Hu, Xiao et al., "A Variable Batch Size Strategy for Large Scale Distributed DNN Training", ISPA 2019, say what it is
for: after the batch has jumped, lr stays and weight decay is tuned so that the effective learning rate stays bounded.
Their equations were not available; those here are this project's own, from the theory of scale-invariant layers (van
Laarhoven, arXiv 1706.05350; Wan et al., arXiv 2006.08419).

A weight w whose layer is followed by normalisation may be scaled without changing the loss, so what an update does to
it goes by the effective learning rate rho = lr / ((1 - m) |w|^2), and weight decay acts through |w| alone. With the
gradient at unit length, G = |g|^2 |w|^2, z = |w|^4 follows dz/dt = 2 lr^2 G / (1 - m)^2 - kappa z with kappa = 4 lr wd
/ (1 - m) per update. Dividing lr by D at fixed batch lowers rho / batch by D at once and by sqrt(D) once norms have
settled: what lies between is the band that a stage with a larger batch and less decay should meet.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

_BISECTIONS = 60  # halvings of log weight decay: to the last bits of a float64


@dataclass(frozen=True)
class AutotuneConfig:
    """How a VBS run tunes lr and weight decay at stage boundaries.

    Args:
        mode: off (the schedule's lr decay alone), rule (lr * weight_decay / global_batch falls by the decay exactly) or
            band (after the rule, weight decay such that the effective lr predicted from measured norms stays in
            bounds).
        horizon: where in the stage the effective lr is predicted, as a share of its updates (band).
        largest_change: weight decay stays within this factor of the first stage's, beyond what the rule asks (band).
    """

    mode: Literal["off", "rule", "band"] = "rule"
    horizon: float = 0.2
    largest_change: float = 8.0


def rule(lr: float, weight_decay: float, growth: float, decay: float) -> tuple[float, float]:
    """lr and weight decay after a boundary: the batch grows ``growth``-fold, the baseline would divide lr by ``decay``.

    lr * weight_decay / global_batch, how far weights turn per sample, falls by exactly ``decay``. A batch that grows as
    much or more stands for the decay: lr stays and weight decay takes the excess. One that grows less stands for a part
    of it, and lr takes the rest.
    """
    if growth >= decay:
        return lr, weight_decay * (growth / decay)
    return lr * (growth / decay), weight_decay


@dataclass(frozen=True)
class Layer:
    """What was measured of one scale-invariant weight over the last epoch of a stage.

    ``squares``: |w|^2. ``signal``: |gradient|^2 without noise; ``noise``: the trace of one sample's gradient
    covariance, so that a mean over B samples has signal + noise / B (see ``noise``). ``reference``: its effective lr in
    stage 0.
    """

    squares: float
    signal: float
    noise: float
    reference: float


@dataclass(frozen=True)
class Boundary:
    """A stage boundary: what the rule made of it and how far the run is from stage 0.

    ``batch`` and ``first_batch``: samples in an update, now and in stage 0. ``decayed``: product of the baseline's
    decays up to here. ``steps``: updates of the stage. ``first_weight_decay``: stage 0's. ``excess``: growth / decay
    here.
    """

    lr: float
    weight_decay: float
    momentum: float
    batch: int
    first_batch: int
    decayed: float
    steps: int
    first_weight_decay: float
    excess: float


@dataclass(frozen=True)
class Tuned:
    """A weight decay with what led to it: the band [``low``, ``high``] of rho over its reference, the ratio ``before``
    at the rule's weight decay and ``after`` at this one, and whether a ``limit`` ``clamped`` it, and whose it is."""

    weight_decay: float
    low: float
    high: float
    before: float
    after: float
    clamped: bool
    limit: float | None = None
    limited_by: str = ""


def effective_lr(lr: float, momentum: float, squares: float) -> float:
    """rho = lr / ((1 - momentum) |w|^2)."""
    return lr / ((1 - momentum) * squares)


def norm_after(squares: float, unit: float, lr: float, weight_decay: float, momentum: float, steps: float) -> float:
    """|w|^2 after ``steps`` updates; ``unit``: G, the squared gradient at unit length. Good for kappa << 1 -
    momentum."""
    start = squares**2
    kappa = 4 * lr * weight_decay / (1 - momentum)
    pushed = 2 * lr**2 * unit / (1 - momentum) ** 2  # what gradients alone add to z in one update
    if kappa * steps < 1e-12:
        return math.sqrt(start + pushed * steps)
    rest = pushed / kappa
    return math.sqrt(rest + (start - rest) * math.exp(-kappa * steps))


def ratio(layers: Sequence[Layer], at: Boundary, weight_decay: float, horizon: float) -> float:
    """Median over layers of rho, predicted at the horizon, over its reference. Increases with ``weight_decay``."""
    steps = max(1, round(horizon * at.steps))

    def one(layer: Layer) -> float:
        unit = (max(0.0, layer.signal) + max(0.0, layer.noise) / at.batch) * layer.squares
        squares = norm_after(layer.squares, unit, at.lr, weight_decay, at.momentum, steps)
        return effective_lr(at.lr, at.momentum, squares) / layer.reference

    return statistics.median(one(layer) for layer in layers)


def band(layers: Sequence[Layer], at: Boundary, config: AutotuneConfig) -> Tuned:
    """The weight decay for a stage: the rule's if rho stays in the band with it, else what brings it to the nearer end.

    At least one layer. Weight decay is searched by bisection between limits: ``largest_change`` and, above, where kappa
    is (1 - momentum) / 2 and the prediction ends to hold.
    """
    grown = at.batch / at.first_batch
    low, high = grown / at.decayed, grown / math.sqrt(at.decayed)

    def predicted(weight_decay: float) -> float:
        return ratio(layers, at, weight_decay, config.horizon)

    before, rules = predicted(at.weight_decay), at.weight_decay
    change = f"schedule.autotune.largest_change {config.largest_change:g}"
    if before < low:
        limit, limited_by = min(
            (config.largest_change * at.first_weight_decay * max(1.0, at.excess), change),
            ((1 - at.momentum) ** 2 / (8 * at.lr), "lr and momentum, beyond which the prediction ends to hold"),
        )
        target, ends = low, (rules, max(rules, limit))
        clamp_to = ends[1]
    elif before > high:
        limit, limited_by = at.first_weight_decay / config.largest_change, change
        target, ends = high, (min(rules, limit), rules)
        clamp_to = ends[0]
    else:
        return Tuned(rules, low, high, before, before, clamped=False)
    chosen, clamped = _solve(predicted, target, *ends, clamp_to=clamp_to)
    after = predicted(chosen)
    return Tuned(chosen, low, high, before, after, clamped, *((limit, limited_by) if clamped else ()))


def _solve(f: Callable[[float], float], target: float, low: float, high: float, clamp_to: float) -> tuple[float, bool]:
    """Where the increasing ``f`` meets ``target`` in [low, high], by bisection of the logarithm; else ``clamp_to``."""
    if not f(low) <= target <= f(high):
        return clamp_to, True
    a, b = math.log(low), math.log(high)
    for _ in range(_BISECTIONS):
        middle = (a + b) / 2
        a, b = (middle, b) if f(math.exp(middle)) < target else (a, middle)
    return math.exp(b), False
