"""One window: forward and backward over this rank's micro-batches, one set of reductions, one optimizer update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn

from hvdbs.batch_norm import RunningStatistics
from hvdbs.batching import MicroBatch, Window
from hvdbs.comm import Communicator
from hvdbs.config import Config
from hvdbs.costs import CARRY_SLOTS, Linear
from hvdbs.data import Batch
from hvdbs.data.streams import generator_seed
from hvdbs.extrapolation import Extrapolation
from hvdbs.factors import attach, choices
from hvdbs.gradients import GradientReducer, clip, gradient_norm, norms
from hvdbs.laps import no_lap
from hvdbs.loss import summed_loss
from hvdbs.noise import LayerNorms, Pair
from hvdbs.optim import apply, build_optimizer, draw_near, reset, resets_at_stage, trained
from hvdbs.reach import Part
from hvdbs.schedule import Decision

_LOSS, _STOP, _CHECKPOINT = range(CARRY_SLOTS)


@dataclass
class Requests:
    """What this rank wants at the next window boundary; what any rank wants, all do."""

    stop: bool = False
    checkpoint: bool = False


@dataclass(frozen=True)
class Applied:
    """What one window did. Times in seconds.

    ``loss``: mean over its samples, where their gradients were taken. ``gradient_norm``: 2-norm of the mean gradient
    before clipping. Unless both are ``finite`` nothing was changed. ``noise``: on rank 0, in a measured window of more
    than one micro-batch; ``layers``: there too, where it was asked for. ``imbalance_seconds`` and
    ``communication_seconds``: on rank 0, in a traced window, as ``hvdbs.overlap`` has them.
    """

    loss: float
    gradient_norm: float
    finite: bool
    noise: Pair | None
    layers: LayerNorms | None
    stop: bool
    checkpoint: bool
    data_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    optimizer_seconds: float
    imbalance_seconds: float | None = None
    communication_seconds: float | None = None


Inputs = Iterator[tuple[torch.Tensor, torch.Tensor]]


class _Timed:
    """An iterator over ``batches`` with the ``seconds`` spent waiting for them."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.seconds = 0.0
        self._batches = batches

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Batch:
        asked = perf_counter()
        batch = next(self._batches)
        self.seconds += perf_counter() - asked
        return batch


class Preprocess:
    """uint8 images [B, H, W, C] to normalised [B, C, H, W], in the model's dtype on its device; others unchanged."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.device = device
        self.dtype = getattr(torch, config.dtype)
        self.channels_last = config.model.channels_last
        self.mean = torch.tensor(config.data.mean, dtype=self.dtype, device=device).view(1, -1, 1, 1) * 255
        self.std = torch.tensor(config.data.std, dtype=self.dtype, device=device).view(1, -1, 1, 1) * 255

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        labels = batch.labels.to(self.device, non_blocking=True)
        inputs = batch.inputs.to(self.device, non_blocking=True)
        if inputs.dtype != torch.uint8:
            return inputs.to(self.dtype), labels
        images = inputs.permute(0, 3, 1, 2).to(self.dtype).sub_(self.mean).div_(self.std)
        return images if self.channels_last else images.contiguous(), labels


class Replica:
    """This rank's copy of the model with all that turns a window into an update.

    ``layers``: those whose gradients may go by factors in some stage; until ``choose`` all are summed. ``lap``: told of
    each thing that is done in a window, when it is done.
    """

    def __init__(self, model: nn.Module, config: Config, comm: Communicator, layers: Sequence[Linear] = ()) -> None:
        first = next(model.parameters())
        self.model = model
        self.config = config
        self.comm = comm
        self.lap: Callable[[str, int | None], None] = no_lap
        self.preprocess = Preprocess(config, first.device)
        self.summed_loss = summed_loss(config, config.loss.label_smoothing)
        self.optimizer = build_optimizer(model, config.optimizer)
        # Gradients of fp16 are scaled. What overflows does so in the sum over ranks, hence on all of them alike.
        self.scaler = torch.amp.GradScaler(first.device.type, enabled=config.autocast == "fp16")
        self.scaler.scale(torch.zeros(1, device=first.device))  # makes its state, also where no micro-batch is dealt
        self.anchor: list[torch.Tensor] = []  # the trained parameters where the stage began, for a proximal term
        self.running = RunningStatistics(model)
        self.carry = torch.zeros(CARRY_SLOTS + self.running.size, dtype=torch.float64, device=first.device)
        wire = torch.float16 if config.communication.wire == "fp16" else None
        self.factors = attach(model, layers, config, comm)
        self.reducer = GradientReducer(
            trained(model), comm, self.carry, config.communication.bucket_bytes, wire, self.factors
        )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [names[id(parameter)] for parameter in self.reducer.parameters]
        self.extrapolation = Extrapolation(
            config.extrapolation, model, self.reducer, comm.rank, comm.world_size, config.seed
        )

    def autocast(self) -> torch.autocast:
        """The context of a forward pass, in training and evaluation."""
        dtype = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.config.autocast]
        return torch.autocast(self.preprocess.device.type, dtype, enabled=dtype is not None)

    def enter_stage(self) -> None:
        """What begins anew with a stage: the anchor of the proximal term and, if so configured, the optimizer."""
        if resets_at_stage(self.config.optimizer):
            reset(self.optimizer)
        if self.config.optimizer.proximal_gamma is not None:
            self.anchor = [p.detach().clone() for p in trained(self.model)]

    def choose(self, global_batch: int) -> dict[str, bool]:
        """How gradients travel in windows of ``global_batch``: by name of each layer that may, whether by factors."""
        layers = [factors.layer for factors in self.factors]
        chosen = choices(self.config, layers, global_batch, self.comm.world_size)
        for factors, choice in zip(self.factors, chosen, strict=True):
            factors.use(choice.factors, global_batch)
        self.reducer.release()
        return {choice.layer.name: choice.factors for choice in chosen}

    @property
    def collectives(self) -> int:
        """Operations over ranks that one update takes."""
        return self.reducer.collectives + (self.config.optimizer.clip_norm is not None)

    def run(
        self,
        window: Window,
        decision: Decision,
        step: int,
        batches: Iterator[Batch],
        requests: Requests,
        *,
        measure: bool = False,
        layer_norms: bool = False,
    ) -> Applied:
        """Collective. Run this rank's part of ``window`` with samples from ``batches`` and make the update ``step``.

        ``measure``: compare the gradient of the window's first micro-batch with that of the whole; ``layer_norms``:
        then also of each parameter.
        """
        started = perf_counter()
        mine = list(window.dealt_to(self.comm.rank, self.comm.world_size))
        supply = _Timed(batches)
        first = self._accumulate(window, mine, decision, step, supply, requests, measure)
        accumulated = perf_counter()
        self.lap("other", None)
        self.reducer.finish()
        reduced = perf_counter()
        self.lap("wait", None)
        scale = self.scaler.get_scale()
        self.scaler.unscale_(self.optimizer)
        norm = gradient_norm(self.reducer.buckets)
        loss, stop, checkpoint, length = [*self.carry[:CARRY_SLOTS].tolist(), norm.item()]
        finite = math.isfinite(loss) and math.isfinite(length)
        self.extrapolation.finish(finite)
        layers = None
        if finite and first is not None and layer_norms:
            layers = self._layer_norms(window, mine, first, scale)
        if finite:
            self._update(window, decision, len(mine), norm)
        else:
            self.running.restore(len(mine))
        self.scaler.update()
        pair = self._pair(window, mine, first, scale, length) if finite else None
        self.lap("update", None)
        return Applied(
            loss,
            length,
            finite,
            pair,
            layers,
            stop > 0,
            checkpoint > 0,
            supply.seconds,
            accumulated - started - supply.seconds,
            reduced - accumulated,
            perf_counter() - reduced,
        )

    def _update(self, window: Window, decision: Decision, own: int, norm: torch.Tensor) -> None:
        self.running.finish(self.carry[CARRY_SLOTS:], window.micro_batches, own)
        limit = self.config.optimizer.clip_norm
        if limit is not None:
            clip(self.reducer.buckets, norm, limit, self.comm)
        apply(decision, self.optimizer)
        self.scaler.step(self.optimizer)
        gamma = self.config.optimizer.proximal_gamma
        if gamma is not None:
            draw_near(trained(self.model), self.anchor, decision.lr, gamma)

    def _pair(
        self, window: Window, mine: list[MicroBatch], first: torch.Tensor | None, scale: float, length: float
    ) -> Pair | None:
        """The norms for the noise scale, on the rank of micro-batch 0; ``first``: of its share, times ``scale``."""
        if first is None or window.micro_batches == 1:
            return None
        whole = window.global_batch
        single = first.double().norm().item() / scale * whole / mine[0].size
        return Pair(single**2, mine[0].size, length**2, whole)

    def _layer_norms(self, window: Window, mine: list[MicroBatch], first: torch.Tensor, scale: float) -> LayerNorms:
        """For the engine, before clipping and update; ``first``: each parameter's norm after micro-batch 0."""
        small, whole = mine[0].size, window.global_batch
        parameters, gradients = self.reducer.parameters, [v for b in self.reducer.buckets for v in b.views]
        alone = (first.double() / scale * whole / small).square().tolist() if window.micro_batches > 1 else ()

        def named(squares: Sequence[float]) -> dict[str, float]:
            return dict(zip(self._names, squares, strict=bool(squares)))

        def squared(tensors: Sequence[torch.Tensor]) -> dict[str, float]:
            return named(norms(tensors).square().tolist())

        return LayerNorms(squared(parameters), named(alone), small, squared(gradients), whole)

    def _accumulate(
        self,
        window: Window,
        mine: list[MicroBatch],
        decision: Decision,
        step: int,
        batches: Iterator[Batch],
        requests: Requests,
        measure: bool,
    ) -> torch.Tensor | None:
        """This rank's gradients and share of the carry. The parameters are left as they were.

        Returns, if asked to ``measure``, each parameter's norm after micro-batch 0, on the rank that ran it.
        """
        self.reducer.begin()
        self.carry.zero_()
        self.running.begin()
        first = None
        away = self.extrapolation
        try:
            for part in away.begin(window, mine, decision, self.scaler.get_scale):
                inputs: Inputs = (self.preprocess(next(batches)) for _ in part.micro_batches)
                if away.looks:
                    inputs = self._look(window, part, step, inputs)
                away.move(part, step)
                for micro in part.micro_batches:
                    given = next(inputs)
                    self.lap("data", micro.index)
                    loss = self._loss(window, micro, step, *given)
                    self.carry[_LOSS] += loss.detach()
                    if micro is mine[-1]:
                        self.running.contribute(self.carry[CARRY_SLOTS:], window.micro_batches - 1 - micro.index)
                        self._ask(requests)
                        keep, factor = away.keeper(part)
                        self.reducer.arm(measure=measure and micro.index == 0, keep=keep, factor=factor)
                    self.lap("forward", micro.index)
                    self.scaler.scale(loss).backward()
                    self.lap("backward", micro.index)
                    if measure and micro.index == 0:
                        first = self.reducer.own_norms()
                away.leave(part)
        finally:
            away.restore()
        if not mine:
            self._ask(requests)
        return first

    def _loss(
        self, window: Window, micro: MicroBatch, step: int, inputs: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """The part of the window's mean loss that ``micro`` makes up."""
        self._seed(generator_seed(self.config.seed, step, micro.index))
        with self.autocast():
            loss = self.summed_loss(self.model(inputs), labels)
        return loss / window.global_batch

    def _look(self, window: Window, part: Part, step: int, inputs: Inputs) -> Inputs:
        """Take the gradients of ``part`` at x, as its direction; returns its micro-batches to go through again."""
        self.extrapolation.restore()
        seen = list(inputs)
        self.lap("data", None)
        with self.running.unheeded():
            for micro, pair in zip(part.micro_batches, seen, strict=True):
                self.scaler.scale(self._loss(window, micro, step, *pair)).backward()
        self.extrapolation.look(part)
        self.lap("look", None)
        return iter(seen)

    def _seed(self, seed: int) -> None:
        # torch.manual_seed seeds every kind of device there might be, at 0.4 ms a call.
        torch.default_generator.manual_seed(seed)
        if self.preprocess.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _ask(self, requests: Requests) -> None:
        self.carry[_STOP] = float(requests.stop)
        self.carry[_CHECKPOINT] = float(requests.checkpoint)
