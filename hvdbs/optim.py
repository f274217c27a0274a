"""The optimizer, and the one place that writes lr and weight decay into it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hvdbs.config import OptimizerConfig
from hvdbs.errors import refusal
from hvdbs.model import is_decayed
from hvdbs.schedule import Decision


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained, in the model's order."""
    return [p for p in model.parameters() if p.requires_grad]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over two groups in parameter order: decayed weights, and norms and biases.

    lr and weight decay are 0 until ``apply`` writes a decision. Raises HvdbsError for lars without timm.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if config.decay_norm_and_bias or is_decayed(name, parameter) else plain).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed, "decayed": True}, {"params": plain, "decayed": False}]
    groups = [group for group in groups if group["params"]]
    # One pass over memory instead of three. It takes memory as it lies: of a slice, what is beside it.
    fused = all(_is_dense(p) for group in groups for p in group["params"])
    if config.name == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.0, fused=fused)
    if config.name == "lars":
        if importlib.util.find_spec("timm") is None:
            raise refusal("optimizer.name", "lars", "needs timm, which is not installed", "pip install timm")
        from timm.optim.lars import Lars

        # Where a group is not decayed timm leaves the trust ratio out as well.
        built: torch.optim.Optimizer = Lars(groups, lr=0.0, momentum=config.momentum, nesterov=config.nesterov)
        return built
    return torch.optim.SGD(
        groups,
        lr=0.0,
        momentum=config.momentum,
        nesterov=config.nesterov,
        fused=fused,
        foreach=False,  # its form of Nesterov overwrites the gradients, which are still to be logged
    )


def _is_dense(parameter: nn.Parameter) -> bool:
    return parameter.stride() == torch.empty_like(parameter, device="meta").stride()


def apply(decision: Decision, optimizer: torch.optim.Optimizer) -> None:
    """Put the decision's lr and weight decay into the optimizer. Nothing else ever writes them."""
    for group in optimizer.param_groups:
        group["lr"] = decision.lr
        group["weight_decay"] = decision.weight_decay if group["decayed"] else 0.0


def resets_at_stage(config: OptimizerConfig) -> bool:
    """Whether entering a stage resets the optimizer's state.

    The theory of stagewise methods starts each stage afresh. Momentum forgets by itself and is kept; AdaGrad's sum of
    squares never forgets and would slow later stages down.
    """
    return config.at_stage == "reset" or (config.at_stage is None and config.name == "adagrad")


def reset(optimizer: torch.optim.Optimizer) -> None:
    """Forget momenta and sums: zeros, as before the first update."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


@torch.no_grad()
def draw_near(parameters: Sequence[torch.Tensor], anchor: Sequence[torch.Tensor], lr: float, gamma: float) -> None:
    """The proximal part of an update: w <- (gamma w + lr anchor) / (gamma + lr), after the optimizer's own step.

    After a plain SGD step w - lr g this is argmin_v g.v + |v - w|^2 / (2 lr) + |v - anchor|^2 / (2 gamma), the step of
    a stage that minimises F(v) + |v - anchor|^2 / (2 gamma); after any other it is the proximal map of that last term.
    """
    torch._foreach_lerp_(list(parameters), list(anchor), lr / (gamma + lr))


def effective_lr(lr: float, momentum: float) -> float:
    """lr / (1 - momentum): what a gradient moves a weight by in the end."""
    return lr / (1.0 - momentum)
