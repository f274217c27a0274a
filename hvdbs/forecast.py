"""What each stage of a plan takes on any number of ranks, from a calibration: the cost model on the run's real buckets.

What lies within the calibration is predicted with the spread of its measurements; what lies beyond it is labelled
(``assumptions``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from hvdbs import costs
from hvdbs.assumptions import Machine, assumed
from hvdbs.batch_norm import RunningStatistics
from hvdbs.calibration import Calibration, Network
from hvdbs.config import Config
from hvdbs.costs import CARRY_ITEM_BYTES, CARRY_SLOTS, Choice, Linear
from hvdbs.factors import candidates, choices, sizes
from hvdbs.prediction import Compute, Transfer, Update, efficiency, update, without_overlap
from hvdbs.records import PlanRow


@dataclass(frozen=True)
class StageForecast:
    """One stage: an ``update`` in seconds, between ``low`` and ``high``; ``efficiency`` against one rank that makes the
    same updates; ``gain``: samples per second over those of updates of the first stage's global batch."""

    row: PlanRow
    update: Update
    low: float
    high: float
    efficiency: float
    gain: float

    @property
    def samples_per_second(self) -> float:
        return self.row.global_batch / self.update.seconds

    @property
    def seconds(self) -> float:
        return self.row.steps * self.update.seconds


def forecast(
    config: Config,
    model: nn.Module,
    layers: Sequence[Linear],
    rows: Sequence[PlanRow],
    calibration: Calibration,
    named: Network | None,
) -> tuple[list[StageForecast], Machine]:
    """Of the stages in ``rows``; ``model`` is on the meta device, ``layers`` are those that could go by factors.

    Raises HvdbsError for several ranks if ``calibration`` knows no link and none is ``named``.
    """
    world_size = rows[0].world_size
    machine = assumed(config, model, calibration, named, world_size)
    batches = {row.global_batch for row in rows}
    own = candidates(config, layers, batches, world_size)
    beginning = rows[0].global_batch
    found: dict[int, tuple[Update, float, float, float]] = {}
    for batch in {beginning, *batches}:
        chosen = [choice for choice in choices(config, own, batch, world_size) if choice.factors]
        found[batch] = of_batch(config, model, own, chosen, batch, world_size, machine)
    first = beginning / found[beginning][0].seconds
    made = []
    for row in rows:
        one, low, high, alone = found[row.global_batch]
        gain = row.global_batch / one.seconds / first
        made.append(StageForecast(row, one, low, high, efficiency(one.seconds, alone, world_size), gain))
    return made, machine


def of_batch(
    config: Config,
    model: nn.Module,
    own: Sequence[Linear],
    chosen: Sequence[Choice],
    global_batch: int,
    world_size: int,
    machine: Machine,
) -> tuple[Update, float, float, float]:
    """An update of ``global_batch``; its least and most seconds; its seconds on one rank alone, without factors."""
    micro_batches = -(-global_batch // config.micro_batch)
    turns = -(-micro_batches // world_size)
    short = global_batch / config.micro_batch if micro_batches == 1 else 1.0

    def made(compute: Compute) -> tuple[Compute, list[Transfer]]:
        compute = compute.scaled(short)
        return by_factors(
            compute, transfers(config, model, own, chosen, machine.ready), chosen, turns, config, machine.product
        )

    middle, least, most = (made(compute) for compute in (machine.compute, machine.least, machine.most))
    one = update(*middle, turns, world_size, machine.links)
    low = update(*least, turns, world_size, machine.best).seconds
    bound = without_overlap if machine.beyond else (lambda *words: update(*words).seconds)
    high = bound(*most, turns, world_size, machine.worst)
    alone = update(machine.compute.scaled(short), [], micro_batches, 1).seconds
    return one, min(low, one.seconds), max(high, one.seconds), alone


def transfers(
    config: Config, model: nn.Module, own: Sequence[Linear], chosen: Sequence[Choice], ready: dict[str, float]
) -> list[Transfer]:
    """The reductions of one update, as ``gradients.lay_out`` makes them: the carry, each bucket, or its factors."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad][::-1]
    trained = dict(model.named_parameters())
    apart = {f"{layer.name}.weight" for layer in own}
    gathered = {f"{choice.layer.name}.weight": choice for choice in chosen}
    limit, size = config.communication.bucket_bytes, sizes(config)
    nbytes = [max(trained[name].nbytes, limit * (name in apart)) for name in names]
    made = [Transfer(0.0, CARRY_ITEM_BYTES * (CARRY_SLOTS + RunningStatistics(model).size))]
    for places in costs.buckets(nbytes, limit):
        members = [names[place] for place in places]
        at = max(ready.get(name, 1.0) for name in members)
        choice = gathered.get(members[0])
        if choice is not None:
            made.append(Transfer(at, choice.gathered_bytes(size), gathered=True))
        else:
            made.append(Transfer(at, sum(trained[name].numel() for name in members) * size.gradient))
    return made


def by_factors(
    compute: Compute,
    sent: list[Transfer],
    chosen: Sequence[Choice],
    turns: int,
    config: Config,
    product: tuple[float, float],
) -> tuple[Compute, list[Transfer]]:
    """What changes where the layers ``chosen`` go by factors: each backward pass leaves out their gradients, so that
    all that follows is ready earlier, and each gathering is followed by the product of all rows."""
    if not chosen:
        return compute, sent
    each, each_row = product
    backward = compute.last_backward(turns)
    order = sorted((one for one in sent if one.gathered), key=lambda one: one.ready)
    rows = {choice.gathered_bytes(sizes(config)): choice for choice in chosen}
    saved, savings = 0.0, []
    for one in order:
        layer = rows[round(one.nbytes)].layer
        saved += layer.weights * (each + each_row * config.micro_batch * layer.positions)
        savings.append((one.ready, saved))
    saved = min(saved, 0.9 * min(compute.backward, compute.backward_again))

    def earlier(share: float) -> float:
        before = max((s for at, s in savings if at <= share), default=0.0)
        return min(1.0, max(0.0, (share * backward - min(before, saved)) / (backward - saved)))

    made = []
    for one in sent:
        after = 0.0
        if one.gathered:
            choice = rows[round(one.nbytes)]
            after = choice.layer.weights * (each + each_row * choice.rows)
        made.append(replace(one, ready=earlier(one.ready), after_seconds=after))
    changed = replace(
        compute,
        backward=compute.backward - saved,
        again=compute.again - saved,
        backward_again=compute.backward_again - saved,
    )
    return changed, made


def link_lines(machine: Machine, world_size: int) -> list[str]:
    """``communication.link`` of a config, for scheme hybrid, as YAML. Empty for one rank."""
    if machine.links is None:
        return []
    link, (_, each_row) = machine.links.allreduce, machine.product
    latency = link.latency_seconds + link.operation_seconds / (2 * (world_size - 1))
    flops = f"{2 / each_row:.3g}" if each_row else "null"
    rate = link.bytes_per_second if math.isfinite(link.bytes_per_second) else 1e12
    return [
        "communication:",
        f"  link: {{bytes_per_second: {_yaml(rate)}, latency_seconds: {_yaml(latency)}, flops_per_second: {flops}}}",
    ]


def _yaml(value: float) -> str:
    return f"{value:.2e}"
