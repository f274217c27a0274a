"""How much work a network is, and how far backward has come when each gradient is final: counted, not measured."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def work(model: nn.Module, sample: Sequence[int], dtype: torch.dtype) -> tuple[float, dict[str, float]]:
    """FLOPs of forward and backward for one sample [*sample] of ``model``, which is on the meta device; and, by name of
    each trained parameter, the share of the backward pass's FLOPs that are done when its gradient is final.

    Matrix products and convolutions are counted (torch's own counter), two FLOPs for each multiplication. A model that
    the meta device cannot run, or that has none of these, is 0 FLOPs of work, and its shares are those of its
    parameters' number.
    """
    model = copy.deepcopy(model).train()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    even = {name: (place + 1) / len(names) for place, name in enumerate(reversed(names))}
    counter = FlopCounterMode(display=False)
    reached: dict[str, float] = {}

    def arrived(name: str, _: torch.Tensor) -> None:
        reached[name] = counter.get_total_flops()

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(arrived, name))
    batch = 2  # one sample alone has no variance for batch norm
    try:
        with counter:
            outputs = model(torch.empty(batch, *sample, device="meta", dtype=dtype))
            forward = counter.get_total_flops()
            outputs.sum().backward()
            whole = counter.get_total_flops()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, AttributeError):
        return 0.0, even
    if whole == forward:
        return whole / batch, even
    return whole / batch, {name: (reached.get(name, whole) - forward) / (whole - forward) for name in names}
