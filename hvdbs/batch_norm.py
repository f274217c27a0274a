"""Batch norm's running statistics as if one process had run all micro-batches of the window in stream order.

PyTorch's rule for each micro-batch's statistic s, r <- (1 - m) r + m s, is linear: the n micro-batches of a window give
r' = (1 - m)^n r + sum_j m (1 - m)^(n - 1 - j) s_j. Each rank's micro-batches are consecutive, so it lets its layers run
the rule from zero over its own and decays the result by those after them; the sum of these over the ranks, carried with
the loss, is the second term. So the buffers are replicated after every update, like the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvdbs.errors import refusal


class RunningStatistics:
    """The running means and variances of a model's batch norms; ``size`` values in all."""

    def __init__(self, model: nn.Module) -> None:
        named = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        for name, module in named:
            if module.momentum is None:
                raise refusal(f"model layer {name}: momentum", None, "(a cumulative average) is not supported", "0.1")
        self._names = [name for name, _ in named]
        self._calls = [0] * len(named)  # forwards in training mode since `begin`, by layer
        for index, (_, module) in enumerate(named):
            module.register_forward_pre_hook(partial(self._called, index))
        modules = self._modules = [module for _, module in named]
        self._tracked = [m.num_batches_tracked for m in modules if m.num_batches_tracked is not None]
        self._keep = [1.0 - m.momentum for m in modules for _ in range(2) if m.momentum is not None]
        self._sizes = [b.numel() for m in modules for b in (m.running_mean, m.running_var) if b is not None]
        self.size = sum(self._sizes)
        self._running = _made_one(modules, next(model.parameters()).device)
        self._before = self._running.to(torch.float64, copy=True)
        self._powers: dict[int, torch.Tensor] = {}

    def _called(self, index: int, module: nn.Module, inputs: object) -> None:
        self._calls[index] += module.training and bool(module.track_running_stats)

    @contextmanager
    def unheeded(self) -> Iterator[None]:
        """Forwards inside normalise by their own batch as ever, and leave no trace in the statistics."""
        for module in self._modules:
            module.track_running_stats = False
        try:
            yield
        finally:
            for module in self._modules:
                module.track_running_stats = True

    def begin(self) -> None:
        """Before this rank's first forward of a window: set the replicated values aside and start from zero."""
        self._calls = [0] * len(self._calls)
        self._before.copy_(self._running)
        self._running.zero_()

    def _decay(self, micro_batches: int) -> torch.Tensor:
        """What is left of each value after so many micro-batches, [size]; a stage asks for one or two numbers."""
        if micro_batches not in self._powers:
            # Powers of the host: replicas on unequal devices must not differ by a last bit.
            left = [k**micro_batches for k in self._keep]
            spread = [torch.full((n,), k, dtype=torch.float64) for k, n in zip(left, self._sizes, strict=True)]
            self._powers[micro_batches] = torch.cat(spread).to(self._before.device) if spread else self._before
        return self._powers[micro_batches]

    def contribute(self, out: torch.Tensor, after: int) -> None:
        """Write this rank's share into ``out`` [size]; ``after`` micro-batches of the window follow its last one."""
        torch.mul(self._running, self._decay(after), out=out)

    def restore(self, own: int) -> None:
        """In place of ``finish``: the values from before the window stand again; ``own`` micro-batches ran here."""
        self._running.copy_(self._before)
        if self._tracked:
            torch._foreach_add_(self._tracked, -own)

    def finish(self, total: torch.Tensor, micro_batches: int, own: int) -> None:
        """Set the new values from the sum over ranks, ``total`` [size]; ``own`` of the ``micro_batches`` were run here.

        Also completes ``num_batches_tracked``, which this rank's layers have advanced by ``own`` alone. Raises
        HvdbsError for a layer that did not run exactly once in each micro-batch: the equation above would not hold
        for it.
        """
        for name, calls in zip(self._names, self._calls, strict=True):
            if calls != own:
                raise refusal(
                    f"model layer {name}",
                    f"{calls} forwards in training mode",
                    f"in {own} micro-batches: batch norm must run exactly once in each",
                    "give each use of it a layer of its own, and leave it in training mode",
                )
        self._running.copy_(self._before * self._decay(micro_batches) + total)
        if self._tracked and micro_batches > own:
            torch._foreach_add_(self._tracked, micro_batches - own)


def _made_one(modules: list[_BatchNorm], device: torch.device) -> torch.Tensor:
    """All running means and variances as one flat tensor, of which the modules' buffers become views."""
    buffers = [b for m in modules for b in (m.running_mean, m.running_var) if b is not None]
    flat = torch.cat([b.flatten() for b in buffers]) if buffers else torch.empty(0, device=device)
    at = 0
    for module in modules:
        for name in ("running_mean", "running_var"):
            view = flat[at : at + module.num_features]
            setattr(module, name, view)
            at += view.numel()
    return flat
