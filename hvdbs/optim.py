"""The optimizer, and the one place that writes lr and weight decay into it."""

from __future__ import annotations

import torch
from torch import nn

from hvdbs.config import OptimizerConfig
from hvdbs.model import is_decayed
from hvdbs.schedule import Decision


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.SGD:
    """SGD with momentum over two groups in parameter order: decayed weights, and norms and biases.

    lr and weight decay are 0 until ``apply`` writes a decision.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if config.decay_norm_and_bias or is_decayed(name, parameter) else plain).append(parameter)
    groups = [{"params": decayed, "decayed": True}, {"params": plain, "decayed": False}]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=0.0,
        momentum=config.momentum,
        nesterov=config.nesterov,
        # torch's foreach form of Nesterov overwrites the gradients, which are still to be logged.
        foreach=not config.nesterov,
    )


def apply(decision: Decision, optimizer: torch.optim.Optimizer) -> None:
    """Put the decision's lr and weight decay into the optimizer. Nothing else ever writes them."""
    for group in optimizer.param_groups:
        group["lr"] = decision.lr
        group["weight_decay"] = decision.weight_decay if group["decayed"] else 0.0


def effective_lr(lr: float, momentum: float) -> float:
    """lr / (1 - momentum): what a gradient moves a weight by in the end."""
    return lr / (1.0 - momentum)
