"""Which weights are scale-invariant, found by trying: doubling such a weight leaves what the model says as it is."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hvdbs.model import is_decayed

TOLERANCE = 1e-3  # of the outputs' 2-norm; invariant weights are at 1e-6 and less, others at 1e-1
_EPS = 1e-12  # of normalisations meanwhile: theirs, 1e-5, is no small part of the variance of small activations
_SEED = 0


@torch.no_grad()
def scale_invariant(model: nn.Module, inputs: torch.Tensor) -> list[str]:
    """Names of the decayed weights w with |f(2 w) - f(w)| < 1e-3 |f(w)| for the outputs f, in the model's order.

    Tried in training mode on one batch ``inputs`` [B, ...] in float64, on a copy whose normalisations scale by 1,
    because behind a scale of 0, as residual blocks may start with, anything is invariant. Dropout draws the same each
    time. The model itself is left as it is.
    """
    trial = copy.deepcopy(model).double().train()
    for module in trial.modules():
        if isinstance(module, _NormBase | nn.LayerNorm | nn.GroupNorm) and module.weight is not None:
            module.weight.fill_(1.0)
        if hasattr(module, "eps"):
            module.eps = _EPS  # type: ignore[assignment]
    inputs = inputs.double()

    def outputs() -> torch.Tensor:
        torch.manual_seed(_SEED)
        said: torch.Tensor = trial(inputs)
        return said

    before, found = outputs(), []
    for name, weight in trial.named_parameters():
        if weight.requires_grad and is_decayed(name, weight):
            kept = weight.clone()
            weight.mul_(2)
            if (outputs() - before).norm() < TOLERANCE * before.norm():
                found.append(name)
            weight.copy_(kept)
    return found
