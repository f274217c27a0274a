"""Where the gradients of a window are taken: settings of extrapolation, and pure functions of them.

y = x - length * direction, with x the parameters that the update moves (Lin, Kong, Stich and Jaggi, "Extrapolation for
Large-batch Training in Deep Learning", ICML 2020, arXiv 2006.05720; ``hvdbs.extrapolation`` moves the tensors).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from hvdbs.batching import MicroBatch
from hvdbs.errors import refusal

_NOISE = ("noise_uniform", "noise_gaussian", "noise_weight", "noise_filter")


@dataclass(frozen=True)
class UntilConfig:
    """Where extrapolation ends, one of the two; by default with the run.

    Args:
        samples: windows that begin at this many samples_seen, or later, are plain.
        stage: the windows of this stage, and of later ones, are plain.
    """

    samples: int | None = None
    stage: int | None = None


@dataclass(frozen=True)
class ExtrapolationConfig:
    """Gradients are taken at a displaced place, y = x - length * direction, and applied to x. Give ratio or length.

    Args:
        direction: none (the other fields are not read), local_past (the mean gradient of the same virtual worker one
            window, or one micro-batch, ago), global_past (the mean gradient of the whole window before), same_sample
            (the gradient at x on the same samples, at twice the work), or fresh noise for each micro-batch on all
            parameters with two dimensions or more, of which length is the scale s - noise_uniform (from U(-1, 1)),
            noise_gaussian (from N(0, 1)), noise_weight (U(-1, 1) times the size of each weight), noise_filter
            (N(0, 1), scaled so that each output filter moves by s times its norm).
        granularity: whether a place is one for the window or for each micro-batch (local_past, same_sample); by
            default window, micro for noise.
        ratio: length divided by lr, which it then follows through warm-up and decay.
        length: length itself, whatever lr is.
        until: where it ends.
        virtual_workers: into how many equal runs of micro-batches each window is cut, whose gradients are taken apart
            (local_past, and same_sample with granularity window). Any multiple of the number of ranks gives the same
            training on each; world_size takes one for each rank, as in the paper, and then the training depends on
            the number of ranks.
    """

    direction: Literal[
        "none",
        "local_past",
        "global_past",
        "same_sample",
        "noise_uniform",
        "noise_gaussian",
        "noise_weight",
        "noise_filter",
    ] = "none"
    granularity: Literal["window", "micro"] | None = None
    ratio: float | None = None
    length: float | None = None
    until: UntilConfig = field(default_factory=UntilConfig)
    virtual_workers: int | Literal["world_size"] | None = None

    @property
    def enabled(self) -> bool:
        """Whether any window of the run can be displaced: length 0 is the plain method, and nothing is done for it."""
        return self.direction != "none" and bool(self.ratio or self.length)

    @property
    def noise(self) -> bool:
        return self.direction in _NOISE

    @property
    def unit(self) -> Literal["window", "micro"]:
        """What shares a place: a virtual worker's part of the window, or each micro-batch."""
        return self.granularity or ("micro" if self.noise else "window")

    @property
    def reads_workers(self) -> bool:
        return self.direction == "local_past" or (self.direction == "same_sample" and self.unit == "window")

    @property
    def depends_on_ranks(self) -> bool:
        return self.enabled and self.reads_workers and self.virtual_workers == "world_size"


def virtual_workers(config: ExtrapolationConfig, world_size: int) -> int:
    """How many there are; one where the direction knows none.

    Raises HvdbsError unless they are a multiple of ``world_size``: then floor(j V / n) nests in floor(j P / n), and
    each worker's micro-batches are all of one rank.
    """
    if not config.reads_workers:
        return 1
    if config.virtual_workers == "world_size":
        return world_size
    workers = config.virtual_workers or 1
    if workers % world_size:
        below = workers // world_size * world_size
        nearest = " or ".join(str(value) for value in (below, below + world_size) if value)
        raise refusal("extrapolation.virtual_workers", workers, f"is not a multiple of the {world_size} ranks", nearest)
    return workers


def active(config: ExtrapolationConfig, stage: int, samples_seen: int) -> bool:
    """Whether the window of ``stage`` that begins at ``samples_seen`` lies before the end of extrapolation."""
    if not config.enabled:
        return False
    until = config.until
    return (until.samples is None or samples_seen < until.samples) and (until.stage is None or stage < until.stage)


def length(config: ExtrapolationConfig, stage: int, samples_seen: int, lr: float) -> float:
    """How far the window of ``stage`` that begins at ``samples_seen`` is displaced, in units of its direction."""
    if not active(config, stage, samples_seen):
        return 0.0
    return config.length if config.length is not None else (config.ratio or 0.0) * lr


@dataclass(frozen=True)
class Part:
    """Consecutive micro-batches of one rank and of one virtual ``worker`` whose gradients are taken at one place."""

    worker: int
    micro_batches: Sequence[MicroBatch]

    @property
    def size(self) -> int:
        """Samples."""
        return sum(micro.size for micro in self.micro_batches)


def parts(
    mine: Sequence[MicroBatch], micro_batches: int, workers: int, unit: Literal["window", "micro"]
) -> Iterator[Part]:
    """One rank's micro-batches of a window that has ``micro_batches``; number j is of worker floor(j V / n)."""
    for worker, group in groupby(mine, key=lambda micro: micro.index * workers // micro_batches):
        if unit == "window":
            yield Part(worker, tuple(group))
        else:
            yield from (Part(worker, (micro,)) for micro in group)


def described(config: ExtrapolationConfig, world_size: int) -> str:
    """``local_past over 6 virtual workers, length 1 * lr, until stage 1``; ``config`` is enabled."""
    words: str = config.direction
    if config.reads_workers:
        many = virtual_workers(config, world_size)
        words += f" over {many:,} virtual worker{'' if many == 1 else 's'}"
        if config.depends_on_ranks:
            words += ", one for each rank"
    if config.unit == "micro" and not config.noise:
        words += ", micro-batch by micro-batch"
    words += f", length {config.ratio:g} * lr" if config.length is None else f", length {config.length:g}"
    if config.until.samples is not None:
        words += f", until sample {config.until.samples:,}"
    if config.until.stage is not None:
        words += f", until stage {config.until.stage}"
    return words


def buffers(config: ExtrapolationConfig, world_size: int, micro_batches: Sequence[int]) -> int:
    """How many times a rank holds as much as the trained parameters take, at most, on top of plain training.

    Room for y; what the gradient directions keep for each of the rank's own virtual workers that ever has a
    micro-batch, or once; and, where a rank takes the gradients of several places apart, their total.
    ``micro_batches``: of the busiest rank in a window, by stage.
    """
    if not config.enabled or not any(micro_batches):
        return 0
    if config.noise:
        return 1
    if config.direction == "global_past":
        return 2
    own, busiest = virtual_workers(config, world_size) // world_size, max(micro_batches)
    kept = min(own, sum(micro_batches)) if config.direction == "local_past" else 1
    several = busiest > 1 and (config.unit == "micro" or own > 1)
    return 1 + kept + several
