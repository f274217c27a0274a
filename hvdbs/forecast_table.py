"""A forecast as a person reads it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from hvdbs import console
from hvdbs.assumptions import Machine
from hvdbs.calibration import Calibration
from hvdbs.forecast import StageForecast, link_lines


def seconds(value: float) -> str:
    """With three digits that count: 0.0123, 1.23, 123."""
    return f"{value:.3g}" if value < 999.5 else console.count(round(value))


def table(stages: Sequence[StageForecast], machine: Machine, calibration: Calibration) -> str:
    """Stages and their sum, what the columns mean, and what is extrapolated. At least one row."""
    header = [
        *("stage", "global_batch", "updates", "seconds an\nupdate", "from - to", "samples/s", "efficiency", "exposed"),
        *("sent", "time", "speed-up"),
    ]
    body = [
        (
            str(one.row.stage),
            console.count(one.row.global_batch),
            console.count(one.row.steps),
            seconds(one.update.seconds),
            f"{seconds(one.low)} - {seconds(one.high)}",
            console.number(one.samples_per_second),
            console.share(one.efficiency),
            console.share(one.update.exposed / one.update.seconds),
            console.size(one.row.steps * one.update.sent_bytes),
            console.duration(one.seconds),
            f"{one.gain:.2f}",
        )
        for one in stages
    ]
    whole = sum(one.seconds for one in stages)
    held = sum(one.gain * one.seconds for one in stages)  # the same samples in windows of the first stage's size
    samples = sum(one.row.steps * one.row.global_batch for one in stages)
    alone = sum(one.efficiency * one.seconds for one in stages)
    total = [
        *("total", "", console.count(sum(one.row.steps for one in stages)), ""),
        "",
        console.number(samples / whole) if whole else "",
        console.share(alone / whole) if whole else "",
        console.share(sum(one.row.steps * one.update.exposed for one in stages) / whole) if whole else "",
        console.size(sum(one.row.steps * one.update.sent_bytes for one in stages)),
        console.duration(whole),
        f"{held / whole:.2f}" if whole else "",
    ]
    lines = [
        console.table(header, [*body, total], rule_before_last=True),
        "efficiency: against one rank that makes the same updates alone. exposed: part of an update in which ranks",
        "wait for sums after their last backward pass. sent: by one rank, in a ring. speed-up: samples/s against",
        f"that of updates of {console.count(stages[0].row.global_batch)}, the first stage's batch; of the total: "
        "against all samples in such updates.",
        f"the whole run: {console.duration(sum(one.row.steps * one.low for one in stages))} to "
        f"{console.duration(sum(one.row.steps * one.high for one in stages))}.",
        measured(calibration),
    ]
    if machine.beyond:
        lines += textwrap.wrap(f"extrapolation: {'; '.join(machine.beyond)}.", 110, break_on_hyphens=False)
    if any(one.row.steps and one.update.data > 0.01 * one.update.seconds for one in stages):
        lines.append("data: the source is slower than the model in some stage; that wait is in the seconds.")
    if machine.links is not None:
        lines += [
            "for communication.scheme hybrid, what this forecast goes by, for the config:",
            *(f"    {line}" for line in link_lines(machine, stages[0].row.world_size)),
        ]
    return "\n".join(lines)


def measured(calibration: Calibration) -> str:
    """On what the forecast rests, in a line."""
    c = calibration
    threads = console.plural(c.threads, "thread")
    on = f"{c.device}, {threads}" if c.device == "cpu" else c.device
    links = f", reductions by {c.backend} on {console.plural(c.hosts, 'host')}" if c.links else ", no link"
    data = "" if c.passes.data is not None else ";\nits data was not there and costs nothing here"
    return (
        f"measured {c.facts.get('date', '')}: {c.model}, micro_batch {c.micro_batch}, on "
        f"{console.plural(c.world_size, 'rank')} ({on}){links}{data}."
    )


def summary(calibration: Calibration) -> str:
    """What was measured: passes with their quartiles, reductions with the largest error of their fit."""
    passes, size = calibration.passes, calibration.micro_batch
    rows = [
        ("forward", passes.forward, "of a window's first micro-batch"),
        ("backward", passes.backward, ""),
        ("each further one", passes.again, "forward and backward, its gradients added to those before"),
        ("optimizer", passes.optimizer, "from the last sum to the next window"),
    ]
    lines = [f"{calibration.model}, micro_batch {size}, seconds (quartiles):"]
    for name, spread, note in rows:
        span = f"{seconds(spread.median)} ({seconds(spread.low)} - {seconds(spread.high)})"
        lines.append(f"  {name:<17} {span:<28} {note}".rstrip())
    if passes.data is not None:
        lines.append(f"  {'data':<17} {seconds(passes.data):<28} in which the source gives a micro-batch")
    for one in calibration.links:
        once, rate = one.link.operation_seconds + one.link.start_seconds, one.link.bytes_per_second
        cost = f"{once * 1e3:.3g} ms and {rate / 1e6:.4g} MB/s of sent bytes"
        lines.append(f"{one.operation} over {one.world_size} ranks: {cost}, fitted within {one.error:.0%}")
    if calibration.links:
        busy = calibration.links[0].link.busy
        lines.append(f"beside computing, an allreduce holds it back by {console.share(busy)} of its seconds")
    return "\n".join(lines)
