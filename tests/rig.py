"""What the tests of training share: small models, samples in memory, runs put together by hand, and watchers."""

from __future__ import annotations

import copy
import io
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from reference import Stage
from torch import nn
from torch.nn import functional as F

from hvdbs.batching import MicroBatch, Window
from hvdbs.checkpoint import Saver, State, take_back
from hvdbs.comm import Communicator, Gathering, Handle
from hvdbs.config import (
    CheckpointConfig,
    CommunicationConfig,
    Config,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)
from hvdbs.costs import Linear, LinkConfig
from hvdbs.data import Batch, order
from hvdbs.engine import Engine
from hvdbs.evaluation import Scores
from hvdbs.factors import candidates, eligible
from hvdbs.loop import Outcome, Run, train
from hvdbs.progress import Progress
from hvdbs.reach import ExtrapolationConfig
from hvdbs.recorder import Recorder, Silent
from hvdbs.replicas import state_digest
from hvdbs.schedule import Decision, Schedule, ScheduleConfig, StageConfig, WarmupConfig
from hvdbs.stage_tables import resolve
from hvdbs.step import Applied, Replica, Requests

# --- samples

CLASSES = 5


@dataclass
class Memory:
    """A Source over tensors. ``asked``: the positions this rank was asked for, training and validation apart."""

    inputs: torch.Tensor
    labels: torch.Tensor
    val_inputs: torch.Tensor
    val_labels: torch.Tensor
    seed: int = 0
    asked: list[MicroBatch] = field(default_factory=list)
    asked_validation: list[MicroBatch] = field(default_factory=list)
    classes: tuple[str, ...] = tuple("abcde"[:CLASSES])

    @property
    def train_samples(self) -> int:
        return len(self.labels)

    @property
    def val_samples(self) -> int:
        return len(self.val_labels)

    def train(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        for request in requests:
            self.asked.append(request)
            index = order.positions(self.seed, self.train_samples, request.begin, request.size).index
            yield Batch(self.inputs[index], self.labels[index])

    def validation(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        for request in requests:
            self.asked_validation.append(request)
            part = slice(request.begin, request.begin + request.size)
            yield Batch(self.val_inputs[part], self.val_labels[part])

    def stream(self, samples: int) -> list[int]:
        """The sample indices at the first ``samples`` positions, for the reference."""
        indices: list[int] = order.positions(self.seed, self.train_samples, 0, samples).index.tolist()
        return indices


def memory(
    shape: Sequence[int], samples: int = 331, val_samples: int = 37, seed: int = 0, dtype: str = "float64"
) -> Memory:
    """Normal inputs [B, *shape] with labels from a linear teacher of one sample in ten wrong, so that a loss goes
    down."""
    generator = torch.Generator().manual_seed(seed + 1)
    n = samples + val_samples
    inputs = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    teacher = torch.randn(inputs[0].numel(), CLASSES, generator=generator, dtype=torch.float64)
    labels = (inputs.flatten(1) @ teacher).argmax(1)
    wrong = torch.rand(n, generator=generator) < 0.1
    labels = torch.where(wrong, torch.randint(CLASSES, (n,), generator=generator), labels)
    inputs = inputs.to(getattr(torch, dtype))
    return Memory(inputs[:samples], labels[:samples], inputs[samples:], labels[samples:], seed)


# --- models

IMAGE = (3, 8, 8)
FLAT = (20,)


class ConvNet(nn.Module):
    """Two convolutions with batch norm, dropout, a linear classifier: [B, 3, 8, 8] to [B, K]."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(8, momentum=0.3)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        logits: torch.Tensor = self.fc(self.dropout(x.mean((2, 3))))
        return logits


def mlp(dropout: float = 0.0) -> nn.Module:
    """Two hidden layers, no batch norm: [B, 20] to [B, K]."""
    layers: list[nn.Module] = [nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, CLASSES)]
    if dropout:
        layers.insert(4, nn.Dropout(dropout))
        layers.insert(2, nn.Dropout(dropout))
    return nn.Sequential(*layers)


def built(make: Callable[[], nn.Module], dtype: str = "float64", seed: int = 3) -> nn.Module:
    """A model with weights drawn from ``seed``, the same on every rank, in training mode."""
    torch.manual_seed(seed)
    return make().to(getattr(torch, dtype)).train()


# --- runs

THREE_STAGES = (  # 80 + 60 + 60 updates; no boundary but the last lies at the end of a window
    Stage(3990, 50, lr=0.1, weight_decay=1e-3),
    Stage(4610, 77, lr=0.05, weight_decay=5e-4),
    Stage(7880, 131, lr=0.02, weight_decay=2e-3),
)
SHORT_STAGES = (  # 4 + 3 + 3 updates
    Stage(190, 50, lr=0.05, weight_decay=1e-3),
    Stage(230, 77, lr=0.02, weight_decay=5e-4),
    Stage(390, 131, lr=0.01, weight_decay=2e-3),
)


EVERY_BYTE = LinkConfig(latency_seconds=0.0)  # so that bytes alone decide between gradients and factors

MIXED = (  # by bytes the mlp's layers break even at 24.6, 27.4 and 8.3 rows: three, two, none go by factors
    Stage(16, 8, lr=0.05, weight_decay=1e-3),
    Stage(66, 22, lr=0.02, weight_decay=5e-4),
    Stage(240, 80, lr=0.01, weight_decay=2e-3),
)


def settings(
    stages: Sequence[Stage],
    *,
    micro_batch: int = 8,
    dtype: str = "float64",
    seed: int = 0,
    momentum: float = 0.9,
    nesterov: bool = False,
    smoothing: float = 0.0,
    clip_norm: float | None = None,
    warmup: tuple[int, float] = (0, 0.0),
    bucket_bytes: int = 2000,
    channels_last: bool = False,
    checkpoint: CheckpointConfig | None = None,
    extrapolation: ExtrapolationConfig | None = None,
    scheme: str = "dense",
) -> Config:
    """A Config of the stages of the reference. The model is made by the test, so ``model.name`` names nothing."""
    rows = tuple(StageConfig(s.global_batch, s.lr, s.weight_decay, samples=s.samples) for s in stages)
    ramp = WarmupConfig(samples=warmup[0], start_lr=warmup[1]) if warmup[0] else WarmupConfig()
    return Config(
        seed=seed,
        micro_batch=micro_batch,
        dtype=dtype,  # type: ignore[arg-type]  # one of two words
        model=ModelConfig(channels_last=channels_last),
        loss=LossConfig(smoothing),
        optimizer=OptimizerConfig(momentum=momentum, nesterov=nesterov, clip_norm=clip_norm),
        schedule=ScheduleConfig(method="table", stages=rows, warmup=ramp),
        extrapolation=extrapolation or ExtrapolationConfig(),
        communication=CommunicationConfig(bucket_bytes, scheme=scheme, link=EVERY_BYTE),  # type: ignore[arg-type]
        checkpoint=checkpoint or CheckpointConfig(every_minutes=0),
    )


def skipping(config: Config) -> Config:
    """The same, but windows without a finite gradient are skipped."""
    return replace(config, optimizer=replace(config.optimizer, on_nonfinite="skip"))


class Watch:
    """A Recorder for every rank: what each update did and the state it left, bit for bit."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.losses: list[float] = []
        self.gradient_norms: list[float | None] = []
        self.stages: list[int] = []
        self.lrs: list[float] = []
        self.scores: list[Scores] = []
        self.after: Callable[[Progress], None] = lambda progress: None

    def enter(self, schedule: Schedule, stage: int, progress: Progress) -> None:
        return None

    def applied(
        self,
        stage: int,
        lr: float,
        before: Progress,
        progress: Progress,
        applied: Applied,
        replica: Replica,
        ends: bool,
    ) -> None:
        self.digests.append(state_digest(replica.model, replica.optimizer))
        self.losses.append(applied.loss)
        self.gradient_norms.append(applied.gradient_norm)
        self.stages.append(stage)
        self.lrs.append(lr)
        self.after(progress)

    def evaluated(self, stage: int, progress: Progress, scores: Scores) -> None:
        self.scores.append(scores)

    def totals(self) -> dict[str, Any]:
        return {}


class Trip(NamedTuple):
    """A run that was made: what it ended with, and all its parts."""

    outcome: Outcome
    run: Run

    @property
    def model(self) -> nn.Module:
        return self.run.replica.model

    @property
    def digest(self) -> str:
        return state_digest(self.model, self.run.replica.optimizer)


def sketch(model: nn.Module) -> nn.Module:
    """``model`` on the meta device, what is tied still tied, which Module.to does not promise."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def layers_of(model: nn.Module, source: Memory) -> list[Linear]:
    """The layers of ``model`` that could go by factors."""
    dtype = next(model.parameters()).dtype
    return eligible(sketch(model), source.inputs.shape[1:], dtype)


def assembled(
    comm: Communicator,
    config: Config,
    model: nn.Module,
    source: Memory,
    folder: Path,
    recorder: Recorder | None = None,
    requests: Requests | None = None,
    saver: Saver | None = None,
    evaluation_period: int = 0,
    engine: Engine | None = None,
    layers: Sequence[Linear] | None = None,
) -> Run:
    """``layers``: that may go by factors; by default what ``hvdbs.factors`` finds."""
    schedule = resolve(config.schedule, source.train_samples)
    if layers is None:
        layers = [] if config.communication.scheme == "dense" else layers_of(model, source)
    batches = [stage.global_batch for stage in schedule.stages]
    return Run(
        config,
        comm,
        source,
        schedule,
        Replica(model, config, comm, candidates(config, layers, batches, comm.world_size)),
        recorder or Silent(),
        saver or Saver(folder, config, comm, None),
        requests or Requests(),
        evaluation_period,
        engine,
    )


def trained(
    comm: Communicator,
    config: Config,
    model: nn.Module,
    source: Memory,
    folder: Path,
    recorder: Recorder | None = None,
    state: State | None = None,
    saved_in: Path | None = None,
    **parts: Any,
) -> Trip:
    """Collective. Train ``model`` to the end of the schedule through hvdbs's own loop, from ``state`` if it is given;
    ``saved_in``: the folder that holds it, where ranks have files of their own."""
    run = assembled(comm, config, model, source, folder, recorder, **parts)
    progress, best = Progress(), None
    if state is not None and saved_in is not None:
        take_back(run.replica, state, saved_in, lambda text: None)
    elif state is not None:
        model.load_state_dict(state.model)
        run.replica.optimizer.load_state_dict(state.optimizer)
        run.replica.scaler.load_state_dict(state.scaler)
        run.replica.anchor = state.anchor
    if state is not None:
        progress, best = state.progress, state.best_merit
    return Trip(train(run, progress, best), run)


def one_update(
    comm: Communicator, config: Config, model: nn.Module, source: Memory, window: Window, **options: Any
) -> tuple[Replica, Applied]:
    """Collective. One update with lr 0, all layers that can going by factors unless the scheme is dense."""
    layers = [] if config.communication.scheme == "dense" else layers_of(model, source)
    replica = Replica(model, config, comm, layers)
    replica.choose(window.global_batch)
    batches = source.train(window.dealt_to(comm.rank, comm.world_size))
    return replica, replica.run(window, Decision(0, window.global_batch, 0.0, 0.0), 0, batches, Requests(), **options)


# --- comparing

Tensors = dict[str, torch.Tensor]


def snapshot(model: nn.Module) -> Tensors:
    """Copies of all parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def worst_error(got: Tensors, expected: Tensors) -> float:
    """Over all tensors: the largest deviation, relative to the largest magnitude of its tensor. Integers must be
    equal."""
    assert got.keys() == expected.keys()
    worst = 0.0
    for name, value in expected.items():
        if not value.is_floating_point():
            assert torch.equal(got[name], value), f"{name}: {got[name]} instead of {value}"
            continue
        scale = max(value.abs().max().item(), torch.finfo(value.dtype).tiny)
        error = (got[name] - value).abs().max().item() / scale
        assert error == error, f"{name} is not a number"
        worst = max(worst, error)
    return worst


def distance(got: Tensors, expected: Tensors) -> float:
    """The 2-norm of the deviation over all floating-point tensors, relative to the 2-norm of what was expected."""
    names = [name for name, value in expected.items() if value.is_floating_point()]
    a = torch.cat([got[name].double().flatten() for name in names])
    b = torch.cat([expected[name].double().flatten() for name in names])
    return float((a - b).norm() / b.norm())


def worst_of(got: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative deviation of two equally long lists of numbers."""
    assert len(got) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))


def from_rank_0(comm: Communicator, make: Callable[[], Any]) -> Any:
    """Collective. What rank 0 alone computes (numbers, strings, tensors in lists and dicts), on every rank."""
    data = None
    if comm.rank == 0:
        file = io.BytesIO()
        torch.save(make(), file)
        data = file.getvalue()
    return torch.load(io.BytesIO(comm.broadcast_bytes(data)), weights_only=True)


def everywhere(comm: Communicator, value: Any) -> list[Any]:
    """Collective. Every rank's ``value``, of what JSON can say, by rank."""
    return [json.loads(text) for text in comm.gather_bytes(json.dumps(value).encode())]


# --- watching and disturbing


class Event(NamedTuple):
    """``kind``: forward, arrived, sum, gather, broadcast, bytes; ``name`` of what; ``nbytes`` of it; ``at`` in
    seconds."""

    kind: str
    name: str
    nbytes: int
    at: float


class Counted:
    """A Communicator that writes down what it is asked for, into ``events`` that others may write into as well."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.local_rank = comm.local_rank
        self.local_size = comm.local_size
        self.backend = comm.backend
        self.events: list[Event] = []

    def note(self, kind: str, name: str, nbytes: int = 0) -> None:
        self.events.append(Event(kind, name, nbytes, time.perf_counter()))

    def start_sum(self, tensor: torch.Tensor, name: str) -> Handle:
        self.note("sum", name, tensor.nbytes)
        return self._comm.start_sum(tensor, name)

    def start_gather(self, rows: torch.Tensor, name: str) -> Gathering:
        self.note("gather", name, rows.nbytes)
        return self._comm.start_gather(rows, name)

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        self.note("broadcast", name, tensor.nbytes)
        self._comm.broadcast(tensor, name)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        self.note("bytes", "broadcast_bytes")
        return self._comm.broadcast_bytes(data)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.note("bytes", "gather_bytes")
        return self._comm.gather_bytes(data)

    def barrier(self) -> None:
        self.note("sum", "barrier")
        self._comm.barrier()

    def close(self) -> None:
        self._comm.close()

    def abort(self, code: int) -> NoReturn:
        self._comm.abort(code)

    def watch(self, model: nn.Module) -> None:
        """Also write down each forward of ``model`` and each gradient that is final. Call it before making a Replica,
        whose own hooks then run after these."""
        model.register_forward_pre_hook(lambda *_: self.note("forward", "model"))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.note("arrived", name))


def delay_gradients(model: nn.Module, seed: int, most_seconds: float) -> None:
    """Sleep a random time, of this rank's own, whenever a gradient of ``model`` arrives. Call it before making a
    Replica."""
    draw = random.Random(seed)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: time.sleep(draw.uniform(0, most_seconds)))
