"""Where a run has been: the weights at which each logged loss was taken, of models that have few."""

from __future__ import annotations

import torch
from torch import nn

from hvdbs.config import Config
from hvdbs.metrics import RunDirectory
from hvdbs.progress import Progress
from hvdbs.records import weight_row

MOST_WEIGHTS = 64


def logged_weights(config: Config, model: nn.Module) -> int:
    """How many weights of ``model`` weights.csv takes: all, or none if they are too many or the surface is unknown."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    return weights if config.data.kind == "analytic" and weights <= MOST_WEIGHTS else 0


class Trail:
    """Writes weights.csv. A class because a loss belongs to the weights before its update, which must be kept."""

    def __init__(self, model: nn.Module, files: RunDirectory) -> None:
        self._model = model
        self._files = files
        self._before = self._weights()
        self._kind = weight_row(len(self._before))

    def applied(self, progress: Progress, stage: int, global_batch: int, loss: float, *, logged: bool) -> None:
        """An update was made; its row is written if it is ``logged``."""
        if logged:
            at = (progress.step, progress.samples_seen, stage, global_batch, loss)
            self._files.weights(self._kind(*at, *self._before))
        self._before = self._weights()

    def _weights(self) -> list[float]:
        flat: list[float] = torch.cat([p.detach().flatten() for p in self._model.parameters()]).tolist()
        return flat
