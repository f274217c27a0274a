"""What DESIGN.md promises, as the plainest loop there is: one process, nothing of hvdbs, nothing shared with it.

The order of samples is given as data. Everything else is written from the words of the design: windows of exactly
``global_batch`` samples, micro-batches of consecutive samples of which the last may be short, the summed loss divided
by the window's true count, batch norm left to PyTorch, dropout seeded by what it is for, momentum and coupled weight
decay by hand, and the rule of stage boundaries.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True)
class Stage:
    """``samples`` long; the window that crosses its end still belongs to it."""

    samples: int
    global_batch: int
    lr: float
    weight_decay: float = 0.0


@dataclass
class Trained:
    """One entry per update: the mean loss before it, the gradient's 2-norm before clipping, and the stage."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    samples_seen: int = 0


def dropout_seed(seed: int, update: int, micro_batch_index: int) -> int:
    """The seed of the model's generator before one micro-batch; updates are counted from 0."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, update, micro_batch_index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float, count: int) -> torch.Tensor:
    """Of logits [B, K] and labels [B], divided by ``count``, with the share ``smoothing`` spread over all classes."""
    log_p = torch.log_softmax(logits, dim=1)
    target = torch.full_like(log_p, smoothing / log_p.shape[1])
    target[torch.arange(len(labels)), labels] += 1 - smoothing
    return -(target * log_p).sum() / count


def train(
    model: nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    order: Sequence[int],
    stages: Sequence[Stage],
    *,
    micro_batch: int | None,
    seed: int = 0,
    momentum: float = 0.9,
    nesterov: bool = False,
    smoothing: float = 0.0,
    clip_norm: float | None = None,
    warmup: tuple[int, float] = (0, 0.0),
) -> Trained:
    """Train ``model`` in place. ``micro_batch`` None: the window is one batch. ``warmup``: its samples and first lr."""
    model.train()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    velocity = {name: torch.zeros_like(p) for name, p in trained}
    done = Trained()
    boundary = 0
    for number, stage in enumerate(stages):
        boundary += stage.samples
        while done.samples_seen < boundary:
            window = list(order[done.samples_seen : done.samples_seen + stage.global_batch])
            assert len(window) == stage.global_batch, "the order given is too short"
            update = len(done.losses)
            for _, p in trained:
                p.grad = torch.zeros_like(p)
            loss_of_window = 0.0
            size = micro_batch or stage.global_batch
            for index, begin in enumerate(range(0, stage.global_batch, size)):
                chosen = window[begin : begin + size]
                torch.manual_seed(dropout_seed(seed, update, index))
                logits = model(inputs[chosen])
                loss = mean_cross_entropy(logits, labels[chosen], smoothing, stage.global_batch)
                loss.backward()
                loss_of_window += loss.item()
            gradients = {name: p.grad for name, p in trained if p.grad is not None}
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
            shrink = 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm
            done.samples_seen += stage.global_batch
            lr = stage.lr
            if done.samples_seen < warmup[0]:
                lr = warmup[1] + (stage.lr - warmup[1]) * done.samples_seen / warmup[0]
            with torch.no_grad():
                for name, p in trained:
                    gradient = gradients[name] * shrink
                    if p.ndim > 1 and not name.endswith(".bias"):
                        gradient = gradient + stage.weight_decay * p
                    velocity[name] = momentum * velocity[name] + gradient
                    p.sub_(lr * (gradient + momentum * velocity[name] if nesterov else velocity[name]))
            done.losses.append(loss_of_window)
            done.norms.append(norm)
            done.stages.append(number)
    return done
