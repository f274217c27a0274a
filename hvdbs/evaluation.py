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
from hvdbs.data.analytic import AnalyticSource
from hvdbs.loss import SummedLoss, correct
from hvdbs.model import LinearModel
from hvdbs.pulse import Pulse
from hvdbs.surfaces import distance

_SLOTS = 4  # in the reduction, ahead of one for each micro-batch
_TOP1, _TOP5, _GAP, _DISTANCE = range(_SLOTS)


@dataclass(frozen=True)
class Scores:
    """Over ``samples`` validation samples: mean ``loss``, ``top1`` and ``top5`` as shares in [0, 1].

    Without classes ``top1`` and ``top5`` are None. On a surface that is known, ``gap`` is its loss above its least and
    ``distance`` the 2-norm to where that is, both exact; else None.
    """

    loss: float
    top1: float | None
    top5: float | None
    samples: int
    gap: float | None = None
    distance: float | None = None

    @property
    def merit(self) -> float:
        """What the best checkpoint has most of: top-1, on a surface that is known the negative gap."""
        if self.gap is not None:
            return -self.gap
        return -self.loss if self.top1 is None else self.top1


@torch.no_grad()
def evaluate(
    model: nn.Module,
    preprocess: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]],
    source: Source,
    comm: Communicator,
    micro_batch: int,
    summed_loss: SummedLoss,
    pulse: Pulse | None = None,
) -> Scores:
    """Collective. Score ``model`` on the validation set; it is left in training mode.

    The set is cut into micro-batches and dealt like a window of training. Each micro-batch's loss has a slot of its own
    in the one reduction, and the slots are added exactly, so the mean has the same bits at every world_size.
    """
    model.eval()
    pulse = pulse or Pulse()
    window = Window(0, source.val_samples, micro_batch)
    mine = list(window.dealt_to(comm.rank, comm.world_size))
    device = next(model.parameters()).device
    totals = torch.zeros(_SLOTS + window.micro_batches, dtype=torch.float64, device=device)
    if comm.rank == 0 and isinstance(source, AnalyticSource):
        # By rank 0 for all: where each rank's own would be equal but for roundings, ranks could disagree which is best.
        totals[_GAP], totals[_DISTANCE] = _above_minimum(model, source)
    for micro, batch in zip(mine, pulse.batches(source.validation(mine)), strict=True):
        inputs, labels = preprocess(batch)
        outputs = model(inputs)
        if source.classes:
            totals[_TOP1] += correct(outputs, labels, 1)
            totals[_TOP5] += correct(outputs, labels, 5)
        totals[_SLOTS + micro.index] = summed_loss(outputs, labels)
    comm.start_sum(totals, f"evaluation.{totals.numel()}").wait()
    top1, top5, gap, off, *losses = totals.tolist()
    model.train()
    n = source.val_samples
    loss = math.fsum(losses) / n
    if isinstance(source, AnalyticSource):
        return Scores(loss, None, None, n, gap, off)
    return Scores(loss, top1 / n, top5 / n, n)


def _above_minimum(model: nn.Module, source: AnalyticSource) -> tuple[float, float]:
    """Gap and distance of ``model`` on the surface of ``source``."""
    assert isinstance(model, LinearModel)
    point = model.point().double().cpu().numpy()
    return source.surface.gap(point), distance(source.surface, point)
