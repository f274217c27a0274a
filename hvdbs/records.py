"""What a run writes about itself: one frozen dataclass per CSV row, its fields being the columns in order.

Columns are append-only. A new one goes to the end of its class, is ``| None`` with default None, and raises
SCHEMA_VERSION; then files of every older version stay readable. None is an empty cell.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, ClassVar, Literal, Protocol, TypeVar

SCHEMA_VERSION = 1

Outcome = Literal["finished", "stopped", "failed"]
# Exit status where the caller names no other; 75 is EX_TEMPFAIL: try again (with --resume auto).
EXIT_CODES: dict[Outcome, int] = {"finished": 0, "stopped": 75, "failed": 1}

STOP_FILE = "stop"  # in the run directory; whoever makes it stops the run at the next window boundary


class Record(Protocol):
    """Any of the dataclasses below."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Row = TypeVar("Row", bound=Record)


@dataclass(frozen=True)
class PlanRow:
    """One stage as it is planned: what ``plan`` prints and every run prints first (plan.json, not a CSV).

    Samples [samples_begin, samples_end) are whole windows; epochs are the same in epochs. ``steps`` are
    updates. micro_batches_* count those of one window on the busiest and on the idlest rank; ``idle_share``
    in [0, 1] is the part of all ranks' turns that nobody uses. ``effective_lr`` is lr / (1 - momentum).
    ``reduced_bytes`` are what one rank hands to allreduce in the whole stage, and the factors that all ranks together
    hand to allgather. ``reason``: why the stage is as it is.
    """

    stage: int
    epochs_begin: float
    epochs_end: float
    samples_begin: int
    samples_end: int
    global_batch: int
    micro_batch: int
    world_size: int
    micro_batches_busiest: int
    micro_batches_idlest: int
    idle_share: float
    lr: float
    weight_decay: float
    effective_lr: float
    steps: int
    reduced_bytes: int
    reason: str = ""


@dataclass(frozen=True)
class StageRow:
    """stages.csv: one stage that ended. Samples [samples_begin, samples_end) are those of its whole windows.

    ``accumulation_steps`` of the busiest rank; ``effective_lr`` is lr / (1 - momentum), with the stage's last
    lr; ``steps`` are its updates; ``reduced_bytes`` are what one rank handed to allreduce, and the factors that all
    ranks together handed to allgather; ``seconds`` are rank 0's, evaluations and checkpoints left out; of these,
    ``exposed_communication_seconds`` were spent blocked after the last backward of a window and ``data_seconds``
    waiting for data.
    """

    stage: int
    method: str
    samples_begin: int
    samples_end: int
    global_batch: int
    micro_batch: int
    accumulation_steps: int
    world_size: int
    lr: float
    weight_decay: float
    effective_lr: float
    steps: int
    reduced_bytes: int
    seconds: float
    samples_per_second: float | None
    exposed_communication_seconds: float
    data_seconds: float


@dataclass(frozen=True)
class StepRow:
    """steps.csv: one logged update. Times (rank 0's), bytes and collectives are sums since the row before.

    ``step`` and ``samples_seen`` count up to and with this update; ``epoch`` is samples_seen in epochs.
    ``loss`` is the mean over the window's samples at the weights before the update, ``gradient_norm`` the
    2-norm of the whole mean gradient before clipping. ``noise_scale`` in samples. ``samples_per_second``
    leaves evaluations and checkpoints out. ``exposed_communication_seconds``: blocked after the last
    backward. ``imbalance_seconds`` and ``communication_seconds``: traced windows only. ``reduced_bytes``:
    as in stages.csv. ``collectives``: operations started.
    ``skipped``: windows of the run so far that changed nothing, because their gradient was not finite; each has a row.
    """

    step: int
    samples_seen: int
    epoch: float
    stage: int
    global_batch: int
    lr: float
    weight_decay: float
    loss: float
    gradient_norm: float
    noise_scale: float | None
    samples_per_second: float | None
    data_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    imbalance_seconds: float | None
    communication_seconds: float | None
    optimizer_seconds: float
    reduced_bytes: int
    collectives: int
    skipped: int | None = None


@dataclass(frozen=True)
class WeightRow:
    """weights.csv, of models with few weights alone: where a loss of steps.csv was taken. After these columns follow
    ``w1``, ``w2``, ...: all weights before update ``step``, in parameter order.

    ``loss`` is the mean over the window's ``global_batch`` samples, at these weights unless gradients are extrapolated.
    """

    step: int
    samples_seen: int
    stage: int
    global_batch: int
    loss: float


@dataclass(frozen=True)
class LayerRow:
    """layers.csv: one layer at one time. ``group`` is its parameter group, norms are 2-norms over the whole
    layer.

    ``effective_lr`` is lr / ((1 - momentum) * weight_norm^2) (van Laarhoven, arXiv 1706.05350), of weights
    alone; it means something where a normalisation follows them, so that their scale does not matter.
    """

    step: int
    samples_seen: int
    epoch: float
    layer: str
    group: str
    weight_norm: float
    gradient_norm: float
    effective_lr: float | None


@dataclass(frozen=True)
class EvalRow:
    """evals.csv: one pass over the validation set after update ``step``.

    ``loss`` is the mean over the ``samples`` (each counted once), ``top1`` and ``top5`` are shares in [0, 1], None
    without classes. ``gap`` and ``distance``, None unless the loss surface is known: the loss F above its least F*, and
    the 2-norm from the weights to where that is; exact, not estimated from samples.
    """

    step: int
    samples_seen: int
    epoch: float
    stage: int
    loss: float
    top1: float | None
    top5: float | None
    samples: int
    gap: float | None = None
    distance: float | None = None


@dataclass(frozen=True)
class DecisionRow:
    """decisions.csv: ``quantity`` went from ``old`` (None at the start) to ``new``, for the ``reason`` in
    words.

    ``step`` is the first update made under the decision and ``samples_seen`` where that window begins. So a
    checkpoint taken between a decision and its first update cuts the row, and the resumed run, which decides
    again, writes it again. ``inputs`` is JSON text: everything the policy read.

    ``quantity`` ``factors.<layer>``, of the source ``costs``: 1 where factors of the layer are exchanged from here on,
    0 where its gradient is summed; a row for each layer that could and each stage, both costs among the ``inputs``.
    """

    step: int
    samples_seen: int
    stage: int
    source: Literal["schedule", "engine", "costs"]
    quantity: str
    old: float | None
    new: float
    inputs: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """summary.json: the run as a whole. ``loss``, ``top1``, ``top5``, ``gap`` and ``distance`` are the last
    evaluation's.

    ``parameter_digest`` is sha256 over the parameters' float32 bytes in name order. ``collectives`` and
    ``reduced_bytes`` are one rank's, over the whole run; ``seconds`` of training over all its resumptions;
    ``peak_memory_bytes`` the largest of any rank.
    """

    hvdbs_version: str
    config_digest: str
    world_size: int
    steps: int
    samples_seen: int
    loss: float | None
    top1: float | None
    top5: float | None
    parameter_digest: str
    collectives: int
    reduced_bytes: int
    seconds: float
    peak_memory_bytes: int | None
    exit_reason: str
    schema_version: int = SCHEMA_VERSION
    gap: float | None = None
    distance: float | None = None


@dataclass(frozen=True)
class Exit:
    """exit.json: how the run ended, for launchers whose own exit status cannot be trusted.

    ``rank`` and ``host``: who wrote the ``reason`` of a failure, where that is a rank.
    """

    outcome: Outcome
    reason: str
    exit_code: int
    schema_version: int = SCHEMA_VERSION
    rank: int | None = None
    host: str | None = None


@dataclass(frozen=True)
class AttemptRow:
    """attempts.csv, of launches with --max-restarts: one start of the ranks that has ended.

    ``hosts`` as n1:2,n2:2; ``checkpoint``: the newest one at its end, from which the next goes on; ``cause`` in words.
    """

    attempt: int
    world_size: int
    hosts: str
    seconds: float
    outcome: str
    checkpoint: str | None
    cause: str | None


@cache
def weight_row(weights: int) -> type[WeightRow]:
    """WeightRow with the columns of so many ``weights``."""
    names = [(f"w{k}", float) for k in range(1, weights + 1)]
    return dataclasses.make_dataclass("WeightRow", names, bases=(WeightRow,), frozen=True)


def columns(kind: type[Record]) -> list[str]:
    """The header of a row class."""
    return [field.name for field in dataclasses.fields(kind)]


def cells(row: Record) -> list[str]:
    """A row as CSV text: floats in the shortest form that reads back to the same bits, None empty, text in
    one line.

    Raises TypeError for anything else: the text of a tensor or an array in a cell would only be found by its
    reader.
    """
    return [_cell(name, getattr(row, name)) for name in columns(type(row))]


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, float):  # float.__repr__, because numpy's subclass would write np.float64(...)
        return float.__repr__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise TypeError(f"{name}: {type(value).__name__} is neither int, float, str nor None")


def parse(kind: type[Row], header: Sequence[str], line: Sequence[str]) -> Row:
    """The inverse of ``cells`` for a file with ``header``; columns it has not are None, those unknown are
    left.

    Raises ValueError for a line that is not a whole row.
    """
    if len(line) != len(header):
        raise ValueError(f"{len(line)} cells under {len(header)} columns")
    by_name = dict(zip(header, line, strict=True))
    return kind(**{name: read(by_name.get(name, "")) for name, read in _readers(kind).items()})


@cache
def _readers(kind: type[Record]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {name: _reader(hints[name]) for name in columns(kind)}


def _reader(hint: Any) -> Any:
    parts = typing.get_args(hint)
    if NoneType in parts:
        inner = _reader(next(part for part in parts if part is not NoneType))
        return lambda text: None if text == "" else inner(text)
    return str if typing.get_origin(hint) is Literal else hint
