"""A run is defined by its Config alone: typed frozen dataclasses. ``command_line`` reads them from YAML and options.

Where a run writes (``--out``) and what it resumes (``--resume``) are not part of the config.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from hvdbs.costs import LinkConfig
from hvdbs.reach import ExtrapolationConfig
from hvdbs.schedule import ScheduleConfig
from hvdbs.surfaces import AnalyticConfig


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a training image; drawn from (seed, epoch, sample index).

    Args:
        crop: random_resized (area and aspect ratio drawn, Inception style) or none (whole image, resized).
        scale: range of the crop's area as a share of the image.
        ratio: range of the crop's width over height.
        flip: mirror half of the images left to right.
    """

    crop: Literal["random_resized", "none"] = "random_resized"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 4 / 3)
    flip: bool = True


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from.

    Args:
        kind: images (a folder train/<class>/*, val/<class>/*), synthetic (made from the seed, no files) or analytic
            (samples of a loss surface that is known, likewise).
        root: the image folder.
        backend: who decodes. auto takes DALI where it is installed, else Pillow.
        decode: where DALI decodes JPEGs: cpu, or mixed (CPU and GPU).
        exif: ignore or apply the orientation tag of photographs.
        image_size: height and width of what the model sees, in pixels.
        resize: length of a validation image's shorter side before its centre crop, in pixels.
        augment: what happens to a training image.
        mean: per-channel mean that is subtracted, in units of pixel value / 255.
        std: per-channel deviation that is divided by, in units of pixel value / 255.
        index_dir: where the file list is kept; by default beside the data, or in a cache folder if that is read-only.
        threads: decoding threads of one rank; by default its share of the node's cores.
        read_ahead: micro-batches that are read and decoded before the model asks for them.
        train_samples: expected size of the training set, checked against the data; lets plan work without the data.
        val_samples: expected size of the validation set, likewise.
        analytic: the loss surface (analytic).
    """

    kind: Literal["images", "synthetic", "analytic"] = "images"
    root: str | None = None
    backend: Literal["auto", "dali", "pillow"] = "auto"
    decode: Literal["cpu", "mixed"] = "cpu"
    exif: Literal["ignore", "apply"] = "ignore"
    image_size: int = 224
    resize: int = 256
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    index_dir: str | None = None
    threads: int | None = None
    read_ahead: int = 3
    train_samples: int | None = None
    val_samples: int | None = None
    analytic: AnalyticConfig = field(default_factory=AnalyticConfig)


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    Args:
        name: resnet8 or resnet20 (for small images), any torchvision classification model, or a timm name; for analytic
            data linear, or normalised_linear (its weights divided by their norm).
        classes: outputs K; by default as many as the data has classes.
        width: channels of the first stage (resnet8, resnet20).
        dropout: drop probability before the classifier (resnet8, resnet20).
        zero_init_last_gamma: start the last batch norm of each residual block at 0.
        channels_last: memory layout of the convolutions.
    """

    name: str = "resnet50"
    classes: int | None = None
    width: int = 16
    dropout: float = 0.0
    zero_init_last_gamma: bool = False
    channels_last: bool = False


@dataclass(frozen=True)
class OptimizerConfig:
    """How the weights move; lr and weight decay come from the schedule alone.

    Args:
        name: sgd, adagrad, or lars (layer-wise trust ratio on decayed weights, arXiv 1708.03888; needs timm).
        momentum: heavy-ball coefficient (sgd, lars; adagrad has none).
        nesterov: Nesterov's form of momentum (sgd, lars).
        at_stage: what entering a stage does to the optimizer's state; by default adagrad's is reset, momentum is kept.
        proximal_gamma: each stage also minimises the squared distance to its first weights, over twice this; none for
            off.
        decay_norm_and_bias: also decay biases and the scales and shifts of norm layers.
        clip_norm: largest 2-norm of the whole gradient; none for no clipping.
        on_nonfinite: what an infinite or undefined loss or gradient does: stop the run, or skip the window.
        most_skipped: windows in a row that may be skipped before the run stops all the same.
    """

    name: Literal["sgd", "adagrad", "lars"] = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    at_stage: Literal["keep", "reset"] | None = None
    proximal_gamma: float | None = None
    decay_norm_and_bias: bool = False
    clip_norm: float | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"
    most_skipped: int = 10


@dataclass(frozen=True)
class LossConfig:
    """Cross entropy over classes. Analytic data has a loss of its own, with nothing to choose.

    Args:
        label_smoothing: share of the target spread evenly over all classes.
    """

    label_smoothing: float = 0.0


@dataclass(frozen=True)
class CommunicationConfig:
    """How gradients are summed over ranks.

    Args:
        bucket_bytes: size of one flat gradient bucket, in bytes; its allreduce starts when its last gradient is final.
        wire: the type in which gradients travel: none for their own, or fp16, at half the bytes of float32.
        scheme: dense sums gradients; factors exchanges, for fully connected layers, the inputs and output gradients
            that the gradient is a product of; hybrid takes for each such layer what costs less, stage by stage.
        link: what hybrid goes by.
        autotune: let Horovod search for its own settings first, in updates that are thrown away; sums may then be added
            up in another order each time, so deterministic must be false.
    """

    bucket_bytes: int = 25 * 2**20
    wire: Literal["none", "fp16"] = "none"
    scheme: Literal["dense", "hybrid", "factors"] = "dense"
    link: LinkConfig = field(default_factory=LinkConfig)
    autotune: bool = False


@dataclass(frozen=True)
class EvaluationConfig:
    """When and how the validation set is scored; it always is at the end.

    Args:
        every_epochs: epochs between evaluations; 0 for the end alone.
        micro_batch: samples in one forward on one rank; by default that of training.
    """

    every_epochs: float = 1.0
    micro_batch: int | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved; always when the run stops early, and at its end.

    Args:
        every_samples: samples between checkpoints; 0 for never.
        every_minutes: minutes between checkpoints; 0 for never.
        keep_last: how many of the newest are kept.
        keep_best: also keep the one with the best top-1 score, on analytic data with the least gap.
    """

    every_samples: int = 0
    every_minutes: float = 30.0
    keep_last: int = 2
    keep_best: bool = True


@dataclass(frozen=True)
class FaultConfig:
    """What ends a run that is stuck.

    Args:
        timeout_seconds: without progress for so long, and ten times what the same has taken before, a rank ends itself
            and says what it waits for; three times as long at the start, in evaluations and checkpoints; 0 for never.
    """

    timeout_seconds: float = 600.0


@dataclass(frozen=True)
class LoggingConfig:
    """What is written while a run goes on.

    Args:
        every_steps: updates between rows of steps.csv.
        line_seconds: seconds between progress lines where there is no terminal.
        tensorboard: also write tensorboard event files.
        trace_after: with --trace, windows of each stage that go before the first traced one.
        trace_windows: with --trace, traced windows of each stage.
    """

    every_steps: int = 10
    line_seconds: float = 10.0
    tensorboard: bool = True
    trace_after: int = 10
    trace_windows: int = 5


@dataclass(frozen=True)
class Config:
    """One run.

    Args:
        seed: of everything random: order, augmentation, initial weights, dropout.
        micro_batch: samples in one forward and backward on one rank; what batch norm sees.
        dtype: of parameters, gradients and inputs.
        autocast: none, or the type that matrix products and convolutions run in; fp16 scales the loss as it needs.
        device: auto takes a GPU where there is one.
        deterministic: only kernels that give the same bits every time.
        threads: CPU threads of one rank's tensor operations; by default its share of the node's cores.
        data: where samples come from.
        model: the network.
        loss: what is minimised.
        optimizer: how the weights move.
        schedule: how global batch, lr and weight decay change.
        extrapolation: where gradients are taken.
        communication: how gradients are summed over ranks.
        evaluation: when the validation set is scored.
        checkpoint: when the state is saved.
        fault: what ends a run that is stuck.
        logging: what is written meanwhile.
    """

    seed: int = 0
    micro_batch: int = 32
    dtype: Literal["float32", "float64"] = "float32"
    autocast: Literal["none", "bf16", "fp16"] = "none"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = True
    threads: int | None = None
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    extrapolation: ExtrapolationConfig = field(default_factory=ExtrapolationConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


# What may change between a run and its resumption without changing what is trained.
_FREE = (
    "device",
    "threads",
    "data.root",
    "data.index_dir",
    "data.threads",
    "data.read_ahead",
    "communication.bucket_bytes",
    "communication.autotune",
    "evaluation",
    "checkpoint",
    "fault",
    "logging",
)


def flatten(config: Config) -> dict[str, Any]:
    """Every field by its dotted name, as plain data."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else key, item)
        else:
            yield prefix, value

    return dict(walk("", to_dict(config)))


def training_fields(config: Config) -> dict[str, Any]:
    """The fields that define what is trained: all but paths, threads, and what is only watched or saved."""
    free = tuple(f"{name}." for name in _FREE)
    return {name: value for name, value in flatten(config).items() if not f"{name}.".startswith(free)}


def digest(config: Config) -> str:
    """sha256 over the training fields: equal digests promise the same training."""
    text = json.dumps(training_fields(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain lists and mappings, as YAML holds it."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False)
