"""Rules between the fields of a Config that can be checked without data, model or ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args, get_type_hints

from hvdbs.config import Config
from hvdbs.errors import refusal
from hvdbs.reach import ExtrapolationConfig
from hvdbs.surfaces import READ_BY, AnalyticConfig

# Beyond these nothing runs: torch's thread pool crashes, a JPEG has no such sides, memory ends before the first update.
MOST_THREADS = 1024
_MOST_PIXELS = 65535
_MOST_CLASSES = 1_000_000
_MOST_CHANNELS = 65536

LINEAR = ("linear", "normalised_linear")  # the models of loss surfaces


def _values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, value and type of every field, those in rows of lists included."""
    hints = get_type_hints(type(section))
    for name in section.__dataclass_fields__:
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            yield from _values(value, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}", value, hints[name]
        for index, row in enumerate(value if isinstance(value, tuple) else ()):
            if dataclasses.is_dataclass(row):
                yield from _values(row, f"{prefix}{name}[{index}].")


def _floats(value: Any) -> list[float]:
    return [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, float)]


def check(config: Config) -> None:
    """Rules between fields that need no data. Raises HvdbsError at the first one broken."""
    for name, value, hint in _values(config):
        if value is None and NoneType not in get_args(hint):
            raise refusal(name, "null", "is no value for this field", "leave it out for its default")
        if name != "seed":
            check_range(name, value)
        if not all(math.isfinite(number) for number in _floats(value)):
            raise refusal(name, list(value) if isinstance(value, tuple) else value, "must be finite")
    at_least_one = {
        "micro_batch": config.micro_batch,
        "threads": config.threads,
        "data.image_size": config.data.image_size,
        "data.resize": config.data.resize,
        "data.threads": config.data.threads,
        "data.read_ahead": config.data.read_ahead,
        "data.train_samples": config.data.train_samples,
        "data.val_samples": config.data.val_samples,
        "model.width": config.model.width,
        "communication.bucket_bytes": config.communication.bucket_bytes,
        "evaluation.micro_batch": config.evaluation.micro_batch,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "optimizer.most_skipped": config.optimizer.most_skipped,
        "logging.every_steps": config.logging.every_steps,
        "logging.trace_after": config.logging.trace_after,
        "logging.trace_windows": config.logging.trace_windows,
    }
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise refusal(name, value, "must be at least 1")
    if config.model.classes is not None and config.model.classes < 2:
        raise refusal("model.classes", config.model.classes, "must be at least 2, or there is nothing to tell apart")
    at_most = {
        "threads": (config.threads, MOST_THREADS),
        "data.threads": (config.data.threads, MOST_THREADS),
        "data.image_size": (config.data.image_size, _MOST_PIXELS),
        "data.resize": (config.data.resize, _MOST_PIXELS),
        "model.classes": (config.model.classes, _MOST_CLASSES),
        "model.width": (config.model.width, _MOST_CHANNELS),
    }
    for name, (value, most) in at_most.items():
        if value is not None and value > most:
            raise refusal(name, value, f"must be at most {most}")
    at_least_zero: dict[str, float] = {
        "evaluation.every_epochs": config.evaluation.every_epochs,
        "checkpoint.every_samples": config.checkpoint.every_samples,
        "checkpoint.every_minutes": config.checkpoint.every_minutes,
        "fault.timeout_seconds": config.fault.timeout_seconds,
        "logging.line_seconds": config.logging.line_seconds,
    }
    for name, number in at_least_zero.items():
        if number < 0:
            raise refusal(name, number, "must be at least 0")
    below_one = {
        "optimizer.momentum": config.optimizer.momentum,
        "loss.label_smoothing": config.loss.label_smoothing,
        "model.dropout": config.model.dropout,
    }
    for name, share in below_one.items():
        if not 0 <= share < 1:
            raise refusal(name, share, "must lie in [0, 1)")
    if not 0 <= config.seed < 2**63:
        raise refusal("seed", config.seed, "must lie in [0, 2^63)")
    if config.optimizer.name == "adagrad" and config.optimizer.momentum:
        raise refusal("optimizer.momentum", config.optimizer.momentum, "is not read by adagrad", "momentum: 0")
    tuning = config.schedule.autotune
    if not 0 < tuning.horizon <= 1:
        raise refusal("schedule.autotune.horizon", tuning.horizon, "must lie in (0, 1]", "0.2")
    if tuning.largest_change < 1:
        raise refusal("schedule.autotune.largest_change", tuning.largest_change, "must be at least 1", "8")
    if tuning.mode == "band" and config.optimizer.name != "sgd":
        rule = f"predicts norms under optimizer.name sgd, not {config.optimizer.name}"
        raise refusal("schedule.autotune.mode", "band", rule, "mode: rule")
    gamma = config.optimizer.proximal_gamma
    if gamma is not None and gamma <= 0:
        raise refusal("optimizer.proximal_gamma", gamma, "must be positive", "null switches it off")
    if config.optimizer.nesterov and config.optimizer.momentum == 0:
        raise refusal("optimizer.nesterov", True, "needs momentum", "optimizer.momentum: 0.9")
    if config.communication.wire != "none" and config.dtype != "float32":
        wire = config.communication.wire
        raise refusal(
            "communication.wire", wire, f"needs dtype float32, not {config.dtype}", "communication.wire: none"
        )
    if config.communication.autotune and config.deterministic:
        rule = "regroups sums by their timing, which deterministic rules out"
        raise refusal("communication.autotune", True, rule, "deterministic: false, or autotune: false")
    link = config.communication.link
    for name, speed in {"bytes_per_second": link.bytes_per_second, "flops_per_second": link.flops_per_second}.items():
        if speed is not None and speed <= 0:
            raise refusal(f"communication.link.{name}", speed, "must be positive")
    if link.latency_seconds < 0:
        raise refusal("communication.link.latency_seconds", link.latency_seconds, "must be at least 0")
    if config.autocast != "none" and config.dtype != "float32":
        raise refusal("autocast", config.autocast, f"needs dtype float32, not {config.dtype}", "autocast: none")
    clip = config.optimizer.clip_norm
    if clip is not None and clip <= 0:
        raise refusal("optimizer.clip_norm", clip, "must be positive", "null switches clipping off")
    _check_extrapolation(config.extrapolation)
    if config.data.resize < config.data.image_size:
        raise refusal("data.resize", config.data.resize, f"must be at least data.image_size {config.data.image_size}")
    for name, (low, high) in {"scale": config.data.augment.scale, "ratio": config.data.augment.ratio}.items():
        if not 0 < low <= high or (name == "scale" and high > 1):
            top = " and end at 1 at most" if name == "scale" else ""
            raise refusal(f"data.augment.{name}", [low, high], f"must increase from above 0{top}")
    if min(config.data.std) <= 0:
        raise refusal("data.std", list(config.data.std), "must be positive")
    _check_surface(config)


def check_range(name: str, value: Any) -> None:
    """What no field can hold: a whole number that is none of 64 bits, and text that cannot be part of a path."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise refusal(name, value, "must lie between -2^63 and 2^63")
    if isinstance(value, str) and (not value or any(c == "\0" or "\ud800" <= c <= "\udc7f" for c in value)):
        rule = "holds a character that no path can have" if value else "is empty"
        raise refusal(name, value, rule, "leave it out, or give a path" if not value else "")


def _check_extrapolation(config: ExtrapolationConfig) -> None:
    """What can be said of the section by itself; its direction none reads nothing else."""
    direction, until, workers = config.direction, config.until, config.virtual_workers
    if direction == "none":
        return
    if (config.ratio is None) == (config.length is None):
        value = f"ratio={config.ratio}, length={config.length}"
        raise refusal("extrapolation", value, "needs exactly one of ratio and length", "ratio: 1.0 is the length of lr")
    for name, number in {"ratio": config.ratio, "length": config.length}.items():
        if number is not None and number < 0:
            raise refusal(f"extrapolation.{name}", number, "must be at least 0")
    if direction == "global_past" and config.granularity == "micro":
        rule = "cannot be global_past's, whose gradient is that of a whole window"
        raise refusal("extrapolation.granularity", "micro", rule, "window, or direction: local_past")
    if config.noise and config.granularity == "window":
        raise refusal("extrapolation.granularity", "window", "cannot be noise's, fresh in each micro-batch", "micro")
    if config.reads_workers and workers is None:
        rule = f"must be given for {direction}: any multiple of the numbers of ranks that it is to run on"
        raise refusal("extrapolation.virtual_workers", "none", rule, "such as 8; or world_size")
    if not config.reads_workers and workers is not None:
        unit = f" with granularity {config.unit}" if direction == "same_sample" else ""
        raise refusal("extrapolation.virtual_workers", workers, f"is not read by {direction}{unit}", "leave it out")
    if isinstance(workers, int) and workers < 1:
        raise refusal("extrapolation.virtual_workers", workers, "must be at least 1")
    if until.samples is not None and until.stage is not None:
        value = f"samples={until.samples}, stage={until.stage}"
        raise refusal("extrapolation.until", value, "needs at most one of samples and stage")
    for name, count in {"samples": until.samples, "stage": until.stage}.items():
        if count is not None and count < 1:
            raise refusal(f"extrapolation.until.{name}", count, "must be at least 1", "direction: none switches it off")


def _check_surface(config: Config) -> None:
    """The rules of analytic data. Raises HvdbsError at the first one broken."""
    data, model, surface = config.data, config.model, config.data.analytic
    if data.kind != "analytic":
        if model.name in LINEAR:
            raise refusal("model.name", model.name, f"needs data.kind analytic, not {data.kind}", "resnet8")
        return
    for name, size in (("train_samples", data.train_samples), ("val_samples", data.val_samples)):
        if size is None:
            raise refusal(f"data.{name}", "none given", "but analytic data has no size of its own", "for example 1000")
    if model.name not in LINEAR:
        raise refusal("model.name", model.name, "is no model of a loss surface", " or ".join(LINEAR))
    for name, value, off in (
        ("model.classes", model.classes, None),
        ("model.dropout", model.dropout, 0.0),
        ("model.zero_init_last_gamma", model.zero_init_last_gamma, False),
        ("loss.label_smoothing", config.loss.label_smoothing, 0.0),
        ("autocast", config.autocast, "none"),
    ):
        if value != off:
            raise refusal(name, value, "has no meaning on analytic data", "leave it out")
    for name, readers in READ_BY.items():
        value = getattr(surface, name)
        if surface.surface not in readers and value != getattr(AnalyticConfig(), name):
            raise refusal(f"data.analytic.{name}", value, f"is read by {' and '.join(readers)} alone", "leave it out")
    positive = ("a", "b", "c", "largest", "teacher_norm")
    for name in (*positive, "power", "label_noise", "distance"):
        number = getattr(surface, name)
        if not (number > 0 if name in positive else number >= 0):
            raise refusal(
                f"data.analytic.{name}", number, f"must be {'positive' if name in positive else 'at least 0'}"
            )
    if surface.dimension < 1:
        raise refusal("data.analytic.dimension", surface.dimension, "must be at least 1")
    _check_spectrum(surface)
    if model.name == "normalised_linear":
        if surface.surface != "least_squares":
            raise refusal("model.name", model.name, f"needs surface least_squares, not {surface.surface}", "linear")
        if surface.dimension < 2:
            raise refusal("data.analytic.dimension", surface.dimension, f"must be at least 2 for {model.name}")
        if surface.distance >= 2:
            raise refusal("data.analytic.distance", surface.distance, "must be below 2, the unit sphere's diameter")


def _check_spectrum(surface: AnalyticConfig) -> None:
    values = surface.eigenvalues
    if not values:
        return
    if min(values) <= 0:
        raise refusal("data.analytic.eigenvalues", list(values), "must be positive")
    if len(values) != surface.dimension:
        raise refusal(
            "data.analytic.eigenvalues",
            f"{len(values)} values",
            f"must be one for each of data.analytic.dimension {surface.dimension}",
            f"dimension: {len(values)}",
        )
    for name in ("largest", "power"):
        if getattr(surface, name) != getattr(AnalyticConfig(), name):
            raise refusal(
                f"data.analytic.{name}",
                getattr(surface, name),
                "is not read where eigenvalues are given",
                "leave it out",
            )
