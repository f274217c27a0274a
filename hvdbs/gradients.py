"""Gradients of one window: accumulated in fixed flat buckets, summed over ranks while backward still runs.

Wait-free back-propagation (Zhang et al., "Poseidon", USENIX ATC 2017, section 3): a bucket's allreduce starts once its
last gradient of the window is final. The buckets are laid out once, in reverse parameter order (the order in which
backward finishes), and ``p.grad`` are views into them, so nothing is regrouped by timing.

A window's first gradient is what autograd hands over, copied into its place: emptying the buckets and adding to them
would move twice as many bytes. A large gradient has a bucket of its own and is not moved at all: the tensor that
autograd made is the bucket.

Where the gradients of several parts of a window are wanted apart (``hvdbs.extrapolation``), the buckets collect one
part at a time and a second set of buffers their total; the last part joins it in the hook that sends the bucket.

A weight that may go by factors (``hvdbs.factors``) has a bucket of its own, which is filled by their exchange then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from hvdbs.comm import Communicator, Handle
from hvdbs.costs import buckets as shared_out
from hvdbs.errors import refusal
from hvdbs.factors import Factors

ROW = 4096


@dataclass
class Bucket:
    """One flat buffer and how many of its gradients are still to come in this window's last backward pass.

    ``flat`` is 1-dimensional, ``views`` the place of each parameter's gradient in it; in the bucket of one parameter
    both are empty from ``begin_part`` until its gradient arrives. ``wire``: what is reduced in its place, a copy of
    lower precision; None if it is reduced itself. ``total``: earlier parts of the window, if any is to be added;
    ``keep``: where a copy of the last part goes when it is whole, or None; ``norms`` of the views, once measured.
    """

    name: str
    flat: torch.Tensor
    wire: torch.Tensor | None
    parameters: Sequence[nn.Parameter]
    views: list[torch.Tensor]
    missing: int = 0
    handle: Handle | None = None
    total: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    norms: torch.Tensor | None = None
    factors: Factors | None = None

    @property
    def collector(self) -> Factors | None:
        """Where the rows of this window lie until they are exchanged; None where gradients are summed."""
        return self.factors if self.factors is not None and self.factors.collecting else None

    @property
    def sent_bytes(self) -> int:
        """Of the last window, counted as in ``GradientReducer.reduced_bytes``."""
        if self.factors is not None and self.factors.active:
            return self.factors.gathered_bytes
        item = self.flat.element_size() if self.wire is None else self.wire.element_size()
        return sum(p.numel() for p in self.parameters) * item

    def blank(self) -> torch.Tensor:
        """Another such flat buffer, zeros."""
        return self.flat.new_zeros(sum(p.numel() for p in self.parameters))

    def empty(self) -> None:
        """Begin a sum. A bucket of one parameter gives up its memory, which autograd is about to take."""
        for parameter in self.parameters:
            parameter.grad = None
        if len(self.parameters) == 1:
            self.flat, self.views = self.flat.new_empty(0), []
        if self.factors is not None:
            self.factors.begin_part()

    def fill(self) -> None:
        """Zeros for the parameters that no backward pass has reached."""
        if self.collector is not None:
            return
        if not self.views:
            self._take(self.blank())
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    def take_in(self, place: int) -> None:
        """The parameter at ``place`` has its gradient: it stays or comes to lie in the bucket."""
        parameter = self.parameters[place]
        gradient = parameter.grad
        assert gradient is not None
        if not self.views:
            if lies_as(gradient, parameter) and sole(gradient):
                self.flat, self.views = gradient.as_strided((gradient.numel(),), (1,)), [gradient]
                return
            self._take(self.blank())
        if gradient is not self.views[place]:
            parameter.grad = self.views[place].copy_(gradient)

    def own_norms(self) -> torch.Tensor:
        """2-norms of what is collected, one for each parameter."""
        if (own := self.collector) is not None:
            return own.own_norm()
        return norms(self.views)

    def _take(self, flat: torch.Tensor) -> None:
        self.flat, self.views = flat, views_of(self.parameters, flat)


@dataclass(frozen=True)
class Gradients:
    """A copy of all gradients: ``flats`` as the buckets lie, and ``views``, one for each parameter in their order."""

    flats: Sequence[torch.Tensor]
    views: Sequence[torch.Tensor]


def strides(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of its gradient: dense, in the parameter's memory format."""
    return torch.empty_like(parameter, device="meta").stride()


def lies_as(gradient: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether ``gradient`` is laid out as ``strides`` has it; those of dimensions of size 1 do not count."""
    if gradient.layout is not torch.strided:
        return False
    pairs = zip(parameter.shape, gradient.stride(), strides(parameter), strict=True)
    return all(size == 1 or ours == theirs for size, ours, theirs in pairs)


def views_of(members: Sequence[nn.Parameter], flat: torch.Tensor) -> list[torch.Tensor]:
    """The places in ``flat`` of ``members``, one after the other, each in its parameter's memory format."""
    offset, views = 0, []
    for p in members:
        views.append(flat[offset : offset + p.numel()].as_strided(p.size(), strides(p)))
        offset += p.numel()
    return views


def _uses(tensor: torch.Tensor) -> int:
    """How many tensors and storages in Python or C++ hold the memory of ``tensor``."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # torch has no public way to ask
    return count


_SOLE = _uses(torch.empty(1))


def sole(gradient: torch.Tensor) -> bool:
    """Whether nothing else lies in the memory of ``gradient``.

    Autograd may hand the same memory to several parameters: the gradients of v and w where v.view(-1) + w.view(-1) is
    all that is made of them.
    """
    return _uses(gradient) == _SOLE and gradient.untyped_storage().nbytes() == gradient.nbytes


def lay_out(
    parameters: Sequence[nn.Parameter],
    bucket_bytes: int,
    wire: torch.dtype | None = None,
    factors: Mapping[int, Factors] | None = None,
) -> list[Bucket]:
    """Buckets of about ``bucket_bytes`` bytes over ``parameters``, last parameter first; sets every ``p.grad``.

    Those of ``factors``, by id of the parameter, have buckets of their own.

    All parameters have one dtype and device. A gradient has its parameter's memory format, so channels_last stays
    so; that of a parameter which is a slice of something larger is dense.
    """
    backwards = list(reversed(parameters))
    buckets: list[Bucket] = []
    by_id = factors or {}
    nbytes = [max(p.nbytes, bucket_bytes * (id(p) in by_id)) for p in backwards]
    for places in shared_out(nbytes, bucket_bytes):
        members = [backwards[place] for place in places]
        flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
        views = views_of(members, flat)
        for p, view in zip(members, views, strict=True):
            p.grad = view
        copy = None if wire is None else torch.empty_like(flat, dtype=wire)
        own = by_id.get(id(members[0]))
        buckets.append(Bucket(f"gradients.{len(buckets)}", flat, copy, members, views, factors=own))
    return buckets


class GradientReducer:
    """Sums the buckets and the window's carry over ranks, once per window whatever the accumulation.

    ``carry``: a flat float64 tensor of what else the window has to say (loss, flags, batch-norm statistics); it is sent
    ahead of the last backward pass. Both are summed in place. Order of a window:
    ``backward`` for all but the last micro-batch, ``arm``, ``backward``, ``finish``; a rank without micro-batches only
    calls ``finish`` and contributes zeros.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        comm: Communicator,
        carry: torch.Tensor,
        bucket_bytes: int,
        wire: torch.dtype | None = None,
        factors: Sequence[Factors] = (),
    ) -> None:
        self.buckets = lay_out(list(parameters), bucket_bytes, wire, {id(own.weight): own for own in factors})
        self._comm = comm
        self._carry = carry
        self._carry_handle: Handle | None = None
        self._armed = False
        self._measuring = False
        self._totals: list[torch.Tensor] = []
        self._factor = 1.0
        self.collectives = len(self.buckets) + 1
        for bucket in self.buckets:
            if bucket.factors is not None:
                bucket.factors.ready = partial(self._ready, bucket)
            for place, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket, place))

    @property
    def reduced_bytes(self) -> int:
        """Of one window: what this rank hands to allreduce, and the factors that all ranks hand to allgather."""
        return sum(bucket.sent_bytes for bucket in self.buckets) + self._carry.nbytes

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the order of the buckets."""
        return [parameter for bucket in self.buckets for parameter in bucket.parameters]

    def begin(self) -> None:
        """The next gradients are the first of a window."""
        for bucket in self.buckets:
            bucket.total = bucket.keep = None
            if bucket.factors is not None:
                bucket.factors.begin()
        self.begin_part()

    def begin_part(self) -> None:
        """The next gradients are the first of a part; those collected so far are given up."""
        for bucket in self.buckets:
            bucket.empty()

    def blank(self) -> Gradients:
        """Room for a copy of all gradients, zeros."""
        flats = [bucket.blank() for bucket in self.buckets]
        views = [view for b, flat in zip(self.buckets, flats, strict=True) for view in views_of(b.parameters, flat)]
        return Gradients(flats, views)

    def copy_to(self, target: Gradients, factor: float) -> None:
        """The gradients collected so far, times ``factor``, into ``target``."""
        self._fill()
        for bucket, flat in zip(self.buckets, target.flats, strict=True):
            if (own := bucket.collector) is not None:
                own.local(flat, factor)
            else:
                torch.mul(bucket.flat, factor, out=flat)

    def end_part(self) -> None:
        """Put what is collected to the window's total and begin the next part; the last part ends by itself."""
        self._fill()
        if not self._totals:
            self._totals = [torch.empty_like(bucket.flat) for bucket in self.buckets]
        for bucket, total in zip(self.buckets, self._totals, strict=True):
            if (own := bucket.collector) is not None:
                own.end_part()
            elif bucket.total is None:
                bucket.total = total.copy_(bucket.flat)
            else:
                bucket.total.add_(bucket.flat)
        self.begin_part()

    def release(self) -> None:
        """Parts are over: give back what their total took."""
        self._totals = []

    def _fill(self) -> None:
        for bucket in self.buckets:
            bucket.fill()

    def arm(self, *, measure: bool = False, keep: Gradients | None = None, factor: float = 1.0) -> None:
        """The next backward pass is this rank's last of the window: reduce each bucket as it fills. Sends the carry.

        ``measure``: keep the norms of what this rank sends, for ``own_norms``. ``keep``: where the gradients of the
        last part go, times ``factor``, each bucket before it is sent.
        """
        self._measuring = measure
        self._factor = factor
        for index, bucket in enumerate(self.buckets):
            bucket.missing = len(bucket.parameters)
            bucket.keep = None if keep is None else keep.flats[index]
        self._armed = True
        self._carry_handle = self._comm.start_sum(self._carry, "carry")

    def finish(self) -> None:
        """Collective. Start what backward did not reach, wait for all; buckets and carry then hold sums over ranks."""
        if self._carry_handle is None:
            self._carry_handle = self._comm.start_sum(self._carry, "carry")
        self._fill()
        for bucket in self.buckets:
            if bucket.handle is None:
                self._send(bucket)
        for bucket in self.buckets:
            assert bucket.handle is not None
            bucket.handle.wait()
            bucket.handle = None
            if bucket.factors is not None and bucket.factors.active:
                bucket.take_in(0)
            elif bucket.wire is not None:
                bucket.flat.copy_(bucket.wire)
        self._carry_handle.wait()
        self._carry_handle = None
        self._armed = self._measuring = False

    def _arrived(self, bucket: Bucket, place: int, _: torch.Tensor) -> None:
        if (own := bucket.collector) is not None:
            rule = "has a weight that is used outside of its own forward, which factors do not see"
            raise refusal("model layer", own.layer.name, rule, "communication.scheme: dense")
        bucket.take_in(place)
        if not self._armed:
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            self._send(bucket)
        elif bucket.missing < 0:
            raise RuntimeError(f"{bucket.name}: a gradient arrived after its bucket was sent")

    def _ready(self, bucket: Bucket) -> None:
        if not self._armed:
            return
        if bucket.handle is not None:
            raise RuntimeError(f"{bucket.name}: factors arrived after theirs were sent")
        self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        if self._measuring:
            bucket.norms = bucket.own_norms()
        if (own := bucket.collector) is not None:
            if bucket.keep is not None:
                own.local(bucket.keep, self._factor)
            bucket.handle = own.send()
            return
        if bucket.keep is not None:
            torch.mul(bucket.flat, self._factor, out=bucket.keep)
        if bucket.total is not None:
            bucket.flat.add_(bucket.total)
        sent = bucket.flat
        if bucket.wire is not None:
            sent = bucket.wire.copy_(bucket.flat)
        bucket.handle = self._comm.start_sum(sent, bucket.name)

    def own_norms(self) -> torch.Tensor:
        """2-norm of each of this rank's gradients so far, before ``finish``, in the order of ``parameters``.

        After the last backward pass, in a measured window alone: buckets on their way count as they were sent.
        """
        self._fill()
        for bucket in self.buckets:
            if bucket.handle is None:
                bucket.norms = bucket.own_norms()
        return torch.cat([bucket.norms for bucket in self.buckets if bucket.norms is not None])


def norms(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of each of ``tensors``, [n] float64 on their device.

    By rows, the first dimension: torch sums the squares of one float32 tensor one after the other, on one core, and of
    11 million has lost 4e-4 in the end.
    """
    rows = (torch.linalg.vector_norm(t, dim=tuple(range(1, t.ndim)) or None) for t in tensors)
    return torch.stack([row.double().norm() for row in rows])


def gradient_norm(buckets: Sequence[Bucket]) -> torch.Tensor:
    """The 2-norm over all gradients, a 0-dimensional float64 tensor on their device."""
    parts = []
    for bucket in buckets:
        whole = bucket.flat.numel() // ROW * ROW
        parts += [bucket.flat[:whole].view(-1, ROW), bucket.flat[whole:]]
    total: torch.Tensor = norms(parts).norm()
    return total


def clip(buckets: Sequence[Bucket], norm: torch.Tensor, limit: float, comm: Communicator) -> None:
    """Collective. Scale all gradients by min(1, ``limit`` / ``norm``), with rank 0's coefficient everywhere.

    Ranks on unequal devices need not agree on a norm to the last bit, replicas must.
    """
    coefficient = (limit / norm).clamp(max=1.0).reshape(1)
    comm.broadcast(coefficient, "clip")
    torch._foreach_mul_([bucket.flat for bucket in buckets], coefficient[0].to(buckets[0].flat.dtype))
