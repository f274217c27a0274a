"""Sufficient factors: the gradient of a fully connected layer as a product of what all ranks have exchanged.

For y = x W^T + b, W [N, M], the gradient of W over a window is D^T A, with a row of A [R, M] for each input and of D
[R, N] for the gradient of its output. Each rank keeps the rows of its own micro-batches and sends them to all others;
each then forms the one product (hybrid communication of Zhang et al., "Poseidon", USENIX ATC 2017; sufficient factor
broadcasting of Xie et al., UAI 2016). It is the dense gradient, exactly: losses are divided by the window's samples
before backward, so D holds shares of a mean, and rows are those of the whole window in stream order, whatever the
number of ranks.

While a layer goes by factors its weight takes no part in autograd, so that no rank forms a gradient of its own rows.
The module stays what it is; only how ``weight.grad`` comes about changes. Biases are summed as ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hvdbs.comm import Communicator, Gathering
from hvdbs.config import Config
from hvdbs.costs import Choice, Linear, Sizes, choose
from hvdbs.errors import refusal

Take = Callable[[torch.Tensor, torch.Tensor | None], None]


class _Awake(torch.autograd.Function):
    """``output`` [..., N] of a layer whose inputs need no gradient, as one that needs it; ``switch`` is a scalar."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, switch: torch.Tensor) -> torch.Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None]:
        return None, None


def tap(layer: nn.Linear, wanted: Callable[[], bool], called: Callable[[], None], take: Take) -> None:
    """Call ``called`` at each forward of ``layer`` while ``wanted``, and in its backward ``take`` with the input
    [..., M] and the gradient of the output [..., N], None if it has none; the weight then gets no gradient from it.

    Closures, which copy.deepcopy leaves alone, and a check of identity: a copy of the model is not tapped.
    """
    switch = torch.zeros((), requires_grad=True)

    def before(module: nn.Module, args: object) -> None:
        if module is layer and torch.is_grad_enabled() and layer.weight.requires_grad and wanted():
            layer.weight.requires_grad_(False)

    def after(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor | None) -> torch.Tensor | None:
        if module is not layer or layer.weight.requires_grad:
            return None
        layer.weight.requires_grad_(True)
        if output is None:  # forward has raised
            return None
        called()
        # What the product is taken of: under autocast the input in the type of the output.
        given = args[0] if args else kwargs["input"]
        taken = given.detach().to(output.dtype)
        version = taken._version
        if not output.requires_grad:
            output = _Awake.apply(output, switch)
        assert output is not None

        def arrived(gradient: torch.Tensor | None) -> None:
            if taken._version != version:
                raise RuntimeError("the input of a fully connected layer was modified in place after its forward")
            take(taken, None if gradient is None else gradient.detach())

        # An activation in place rewrites the history of a view; what it is a view of, all of it, keeps its own.
        whole = output._base if output._is_view() else output
        assert whole is not None and whole.numel() == output.numel()
        whole.register_hook(arrived)
        return output

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, prepend=True, with_kwargs=True, always_call=True)


class Factors:
    """The rows of one layer's window on this rank, and their exchange. A class because they are kept until sent.

    ``active``: whether the layer goes by factors now. ``dtype``: of rows as they come, the same on all ranks;
    ``wire``: in which they travel, if not their own. Order of a window as in ``GradientReducer``: ``begin``, rows from
    backward passes, with ``begin_part`` and ``end_part`` where parts are taken apart; ``send``; ``wait``, after which
    ``weight.grad`` is the mean gradient over all ranks.
    """

    def __init__(
        self, layer: Linear, module: nn.Linear, comm: Communicator, dtype: torch.dtype, wire: torch.dtype | None
    ) -> None:
        self.layer = layer
        self.weight = module.weight
        self.active = False
        self.collecting = False
        self.ready: Callable[[], None] = lambda: None
        self.gathered_bytes = 0
        self._comm = comm
        self._dtype = dtype
        self._wire = wire
        self._lift = 1.0
        self._pieces: list[torch.Tensor] = []
        self._before = 0  # pieces of parts that have ended
        self._pending = 0
        self._gathering: Gathering | None = None
        tap(module, lambda: self.active and self.collecting, self._called, self._take)

    def use(self, active: bool, global_batch: int) -> None:
        """From the next window on, which has ``global_batch`` samples."""
        self.active = active
        # In half precision the gradient of one sample's loss, not of its share of a mean, which could vanish; by a
        # power of two, so that nothing is rounded.
        self._lift = 2.0 ** (global_batch.bit_length() - 1) if self._wire is not None else 1.0

    def begin(self) -> None:
        self._pieces, self._before, self.collecting = [], 0, self.active

    def begin_part(self) -> None:
        """Give up the rows since the last part that was ended."""
        del self._pieces[self._before :]
        self._pending = 0

    def end_part(self) -> None:
        self._before = len(self._pieces)

    def _called(self) -> None:
        self._pending += 1

    def _take(self, inputs: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            if gradient.dtype != self._dtype:
                given = str(gradient.dtype).removeprefix("torch.")
                rule = f"gives {given}, not {str(self._dtype).removeprefix('torch.')} as ranks agreed on"
                raise refusal("model layer", self.layer.name, rule, "communication.scheme: dense")
            pair = inputs.reshape(-1, self.layer.inputs), gradient.reshape(-1, self.layer.outputs)
            self._pieces.append(torch.cat(pair, 1))
        self._pending -= 1
        if self._pending == 0:
            self.ready()

    def _rows(self, since: int = 0) -> torch.Tensor:
        """[R, M + N] of this rank, inputs beside gradients, micro-batches in stream order."""
        pieces = self._pieces[since:]
        if not pieces:
            return self.weight.new_empty((0, self.layer.inputs + self.layer.outputs), dtype=self._dtype)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _apart(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return rows[:, : self.layer.inputs].to(dtype), rows[:, self.layer.inputs :].to(dtype)

    def local(self, out: torch.Tensor, factor: float) -> None:
        """The gradient over this rank's rows of the part so far, times ``factor``, into ``out`` [N * M].

        For what a rank must know of its own part alone (``hvdbs.extrapolation``).
        """
        inputs, gradients = self._apart(self._rows(self._before), self.weight.dtype)
        torch.mm(gradients.t(), inputs, out=out.view(self.layer.outputs, self.layer.inputs)).mul_(factor)

    def own_norm(self) -> torch.Tensor:
        """2-norm of that gradient, [1].

        |D^T A|^2 = sum over all pairs of rows of (A A^T) * (D D^T): without the gradient where that is less work.
        """
        rows = self._rows(self._before)
        inputs, gradients = self._apart(rows, torch.float64)
        if len(rows) * (self.layer.inputs + self.layer.outputs) > self.layer.weights:
            squares = (gradients.t() @ inputs).square().sum()
        else:
            squares = ((inputs @ inputs.t()) * (gradients @ gradients.t())).sum().clamp(min=0.0)
        return squares.sqrt().reshape(1)

    def send(self) -> Factors:
        """Collective. Begin the exchange of the window's rows; a handle, to be waited for."""
        rows = self._rows()
        self._pieces, self._before = [], 0
        if self._wire is not None:
            rows = rows.clone()
            rows[:, self.layer.inputs :] *= self._lift
            rows = rows.to(self._wire)
        self._gathering = self._comm.start_gather(rows, f"factors.{self.layer.name}")
        return self

    def wait(self) -> None:
        assert self._gathering is not None
        rows = self._gathering.wait()
        self._gathering, self.collecting = None, False
        self.gathered_bytes = rows.nbytes
        inputs, gradients = self._apart(rows, self.weight.dtype)
        product = gradients.t() @ inputs
        self.weight.grad = product if self._wire is None else product.div_(self._lift)


def sizes(config: Config) -> Sizes:
    """What travels in how many bytes. Under autocast factors are of its type already, and no wire rounds them again."""
    own = {"float32": 4, "float64": 8}[config.dtype]
    wire = 2 if config.communication.wire == "fp16" else own
    return Sizes(wire, wire if config.autocast == "none" else 2, config.communication.bucket_bytes)


def choices(config: Config, layers: Iterable[Linear], global_batch: int, world_size: int) -> list[Choice]:
    """How the gradient of each of ``layers`` travels in a stage of ``global_batch``; the same on all ranks."""
    chosen = config.communication
    return [choose(chosen.scheme, it, global_batch, world_size, sizes(config), chosen.link) for it in layers]


def candidates(
    config: Config, layers: Iterable[Linear], global_batches: Iterable[int], world_size: int
) -> list[Linear]:
    """Those of ``layers`` that go by factors in some stage of a run whose stages have ``global_batches``."""
    batches = set(global_batches)
    return [it for it in layers if any(choices(config, [it], batch, world_size)[0].factors for batch in batches)]


def attach(model: nn.Module, layers: Sequence[Linear], config: Config, comm: Communicator) -> list[Factors]:
    """Make ``layers`` of ``model`` ready to go by factors; none does yet."""
    dtype = {"none": getattr(torch, config.dtype), "bf16": torch.bfloat16, "fp16": torch.float16}[config.autocast]
    wire = torch.float16 if config.communication.wire == "fp16" and config.autocast == "none" else None
    attached = []
    for layer in layers:
        module = model.get_submodule(layer.name)
        assert isinstance(module, nn.Linear)
        attached.append(Factors(layer, module, comm, dtype, wire))
    return attached


def eligible(model: nn.Module, sample: Sequence[int], dtype: torch.dtype) -> list[Linear]:
    """The fully connected layers of ``model``, which is on the meta device, whose gradient is that of factors alone.

    They are found by forward and backward passes over two batches of inputs [B, *sample] without data. Left out, and
    dense for ever: layers that are frozen, tied, reparametrised, never called, or whose weight is also used by others
    than their own forward; all layers of a model that cannot be tried without data.
    """
    model = copy.deepcopy(model)
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    modules = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and _plain(module._parameters.get("weight")) and owners[id(module.weight)] == 1
    }
    rows: dict[str, list[int]] = {name: [] for name in modules}

    def counter(name: str) -> Take:
        def take(inputs: torch.Tensor, gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                rows[name][-1] += inputs.numel() // max(1, inputs.shape[-1])

        return take

    for name, module in modules.items():
        tap(module, lambda: True, lambda: None, counter(name))
    try:
        for batch in (2, 3):
            for counts in rows.values():
                counts.append(0)
            model.train()(torch.empty(batch, *sample, device="meta", dtype=dtype)).sum().backward()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, AttributeError):
        return []
    found = []
    for name, module in modules.items():
        two, three = rows[name]
        if two and two * 3 == three * 2 and module.weight.grad is None:
            found.append(Linear(name, module.in_features, module.out_features, two // 2))
    return found


def _plain(weight: torch.Tensor | None) -> bool:
    return (
        isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and weight.layout is torch.strided
        and weight.is_contiguous()
    )
