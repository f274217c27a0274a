"""The validation score: every sample counted once, the same numbers at every world_size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hvdbs.batching import Window
from hvdbs.comm import Communicator
from hvdbs.data import Batch, Source
from hvdbs.loss import correct, summed_cross_entropy


@dataclass(frozen=True)
class Scores:
    """Over ``samples`` validation samples: mean ``loss``, ``top1`` and ``top5`` as shares in [0, 1]."""

    loss: float
    top1: float
    top5: float
    samples: int


@torch.no_grad()
def evaluate(
    model: nn.Module,
    preprocess: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]],
    source: Source,
    comm: Communicator,
    micro_batch: int,
) -> Scores:
    """Collective. Score ``model`` on the validation set; it is left in training mode.

    The set is cut into micro-batches and dealt like a window of training. Each micro-batch's loss has a slot of its own
    in the one reduction, and the slots are added exactly, so the mean has the same bits at every world_size.
    """
    model.eval()
    window = Window(0, source.val_samples, micro_batch)
    mine = list(window.dealt_to(comm.rank, comm.world_size))
    device = next(model.parameters()).device
    totals = torch.zeros(2 + window.micro_batches, dtype=torch.float64, device=device)
    for micro, batch in zip(mine, source.validation(mine), strict=True):
        inputs, labels = preprocess(batch)
        logits = model(inputs)
        totals[0] += correct(logits, labels, 1)
        totals[1] += correct(logits, labels, 5)
        totals[2 + micro.index] = summed_cross_entropy(logits, labels, 0.0)
    comm.start_sum(totals, f"evaluation.{totals.numel()}").wait()
    top1, top5, *losses = totals.tolist()
    model.train()
    n = source.val_samples
    return Scores(math.fsum(losses) / n, top1 / n, top5 / n, n)
