"""What is assumed of ranks and links from what was measured of others, and between which ends that may lie.

What lies within the calibration has the spread of its measurements. Beyond it (more ranks, a network by name, another
micro_batch or model) a prediction is an extrapolation between two ends:

* the least: the lower quartile of computing, a link without loss, latencies of the fewest messages any algorithm has;
* the most: the upper quartile, a link FAR from its bound, nothing overlapped, and all that one operation costs counted
  for each message of a ring.

A micro_batch r times as large takes between 1 and r times as long, another model half to twice what its FLOPs say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from hvdbs.calibration import ETHERNET_SHARE, FAR, Calibration, Network, Passes
from hvdbs.config import Config
from hvdbs.errors import refusal
from hvdbs.flops import work
from hvdbs.planning import sample_shape
from hvdbs.prediction import Compute, Link, Links

_OTHER_MODEL = 2.0  # times or one over: how far another model's seconds may be from what its FLOPs say


_SPREADS = ("forward", "backward", "again", "backward_again", "optimizer")


@dataclass(frozen=True)
class Machine:
    """What is assumed of ranks and links: the middle, and both ends."""

    compute: Compute
    least: Compute
    most: Compute
    links: Links | None
    best: Links | None
    worst: Links | None
    ready: dict[str, float]
    product: tuple[float, float]
    beyond: tuple[str, ...]  # what of it was not measured, in words


def computing(passes: Passes, which: str, shares: bool) -> Compute:
    """``which``: median, low or high."""
    of = {name: getattr(getattr(passes, name), which) for name in _SPREADS}
    return Compute(**of, jitter=passes.jitter, data=passes.data or 0.0, shares=shares)


def assumed(
    config: Config, model: nn.Module, calibration: Calibration, named: Network | None, world_size: int
) -> Machine:
    """From the calibration, scaled where this run is another. Raises HvdbsError where it cannot tell."""
    passes = calibration.passes
    beyond: list[str] = []
    scale = least = most = 1.0
    ready = passes.ready
    if _unlike(config, calibration):
        flops, ready = work(model, sample_shape(config), getattr(torch, config.dtype))
        if not flops or not passes.flops_per_sample:
            rule = f"is of {calibration.model}, and their FLOPs cannot be counted, so that they cannot be compared"
            raise refusal("--calibration", calibration.model, rule, f"one of {config.model.name}")
        scale = flops / passes.flops_per_sample
        least, most = 1 / _OTHER_MODEL, _OTHER_MODEL
        beyond.append(
            f"{_described(config.model.name, config.data.image_size, config.dtype, config.autocast)} by its FLOPs, "
            f"{scale:.3g} times those of what was measured, "
            f"{_described(calibration.model, calibration.image_size, calibration.dtype, calibration.autocast)}"
        )
    ratio = config.micro_batch / calibration.micro_batch
    if ratio != 1:
        beyond.append(f"micro_batch {config.micro_batch}, measured at {calibration.micro_batch}")
        scale, least, most = scale * ratio, least * min(1.0, 1 / ratio), most * max(1.0, 1 / ratio)
    shares = calibration.device == "cpu"
    middle, low, high = (computing(passes, which, shares).scaled(scale) for which in ("median", "low", "high"))
    links = best = worst = None
    if world_size > 1:
        if world_size > calibration.world_size:
            beyond.append(f"{world_size} ranks, measured on {calibration.world_size}")
        if named is not None:
            beyond.append(
                f"network {named.text} by name: {ETHERNET_SHARE:.0%} of its line rate, "
                f"{named.latency_seconds * 1e6:.3g} us a message"
            )
        if config.communication.wire != calibration.wire:
            beyond.append(f"wire {config.communication.wire}, measured with {calibration.wire}")
        links, best, worst = assumed_links(calibration, named, world_size)
    machine_product = passes.product or (0.0, 0.0)
    return Machine(
        middle, low.scaled(least), high.scaled(most), links, best, worst, ready, machine_product, tuple(beyond)
    )


def assumed_links(calibration: Calibration, named: Network | None, world_size: int) -> tuple[Links, Links, Links]:
    """The middle, the best and the worst that ranks may find."""
    reduced, gathered = calibration.fitted("allreduce"), calibration.fitted("allgather")
    if reduced is None or gathered is None:
        if named is None:
            rule = "was measured on 1 rank and knows no link"
            raise refusal("--calibration", calibration.model, rule, "--network 25gbit, or calibrate on several ranks")
        link = Link(named.bytes_per_second, named.latency_seconds)
        known = [link, link]
        per_message = [named.latency_seconds] * 2
    else:
        known = [reduced.link, gathered.link]
        hops = [2 * (reduced.world_size - 1), gathered.world_size - 1]
        per_message = [one.latency_seconds + one.operation_seconds / h for one, h in zip(known, hops, strict=True)]
        if named is not None:
            # The slower of the line and of what the same software moved here limits a rank.
            known = [
                replace(
                    one,
                    bytes_per_second=min(one.bytes_per_second, named.bytes_per_second),
                    latency_seconds=max(one.latency_seconds, named.latency_seconds),
                )
                for one in known
            ]
    farther = named is not None or world_size > calibration.world_size
    errors = [one.error if one is not None else 0.0 for one in (reduced, gathered)]
    best = [_faster(one, 1 + error) for one, error in zip(known, errors, strict=True)]
    if named is not None:
        line = named.bytes_per_second / ETHERNET_SHARE
        best = [replace(one, bytes_per_second=min(line, one.bytes_per_second * FAR)) for one in best]
    worst = [_faster(one, 1 / (1 + error)) for one, error in zip(known, errors, strict=True)]
    if farther:
        worst = [
            replace(_faster(one, 1 / FAR), latency_seconds=max(one.latency_seconds, message))
            for one, message in zip(worst, per_message, strict=True)
        ]
    return Links(known[0], known[1]), Links(best[0], best[1], tree=farther), Links(worst[0], worst[1])


def _faster(link: Link, times: float) -> Link:
    return replace(
        link,
        bytes_per_second=link.bytes_per_second * times,
        latency_seconds=link.latency_seconds / times,
        operation_seconds=link.operation_seconds / times,
    )


def _described(model: str, size: int, dtype: str, autocast: str) -> str:
    return f"{model} at {size} pixels in {dtype if autocast == 'none' else autocast}"


def _unlike(config: Config, calibration: Calibration) -> bool:
    ours = config.model.name, config.data.image_size, config.dtype, config.autocast
    return ours != (calibration.model, calibration.image_size, calibration.dtype, calibration.autocast)
