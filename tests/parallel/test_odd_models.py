"""Models that are not a plain chain of used, trained, contiguous parameters: the same as in one plain process.

float64, 1e-12 relative to the largest value of each tensor after 10 updates in three stages (50, 77, 131 samples,
micro_batch 8), unless said otherwise; seeds as in test_same_training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import rig
import torch
from torch import nn
from torch.nn import functional as F

from hvdbs.comm import Communicator

pytestmark = pytest.mark.parallel


def compared(
    comm: Communicator,
    folder: Path,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...] = rig.FLAT,
    *,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **rules: object,
) -> rig.Trip:
    """Collective. Train as hvdbs and as the reference do and compare; ``prepare`` changes the model of hvdbs alone."""
    source = rig.memory(shape)

    def plain() -> rig.Tensors:
        model = rig.built(make)
        order = source.stream(1500)
        reference.train(model, source.inputs, source.labels, order, rig.SHORT_STAGES, micro_batch=8)
        return rig.snapshot(model)

    expected = rig.from_rank_0(comm, plain)
    model = rig.built(make)
    prepare(model)
    trip = rig.trained(comm, rig.settings(rig.SHORT_STAGES, **rules), model, source, folder)  # type: ignore[arg-type]
    assert trip.outcome.progress.step == 10
    assert rig.worst_error(rig.snapshot(model), expected) < 1e-12
    return trip


class Sometimes(nn.Module):
    """A branch that only some micro-batches take, so in most windows only some ranks do; and one that none takes."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        self.first = nn.Linear(20, 16)
        self.branch = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.last = nn.Linear(16, rig.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.first(x))
        if x.mean() > self.threshold:
            h = h + F.relu(self.branch(h))
        logits: torch.Tensor = self.last(h)
        return logits


@pytest.mark.parametrize(
    ("threshold", "bucket_bytes"), [(0.0, 2000), (9.0, 2000), (0.05, 1), (0.05, 2000), (0.05, 2**30)]
)
def test_parameters_that_get_no_gradient_on_some_ranks_or_all(
    comm: Communicator, shared: Path, threshold: float, bucket_bytes: int
) -> None:
    """Half of the micro-batches, few of them, or none take the branch. What gets no gradient has gradient zero: weight
    decay still applies, as it does to the rest."""
    compared(comm, shared, lambda: Sometimes(threshold), bucket_bytes=bucket_bytes)


def test_the_branch_is_taken_by_some_micro_batches_and_not_by_others() -> None:
    """So that the test above is not vacuous."""
    source = rig.memory(rig.FLAT)
    order = source.stream(824)
    taken = [bool(source.inputs[order[at : at + 8]].mean() > 0.05) for at in range(0, 824, 8)]
    assert 5 < sum(taken) < 50


class Tied(nn.Module):
    """One square weight used twice, and once more transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 20)
        self.second = nn.Linear(20, 20)
        self.second.weight = self.first.weight
        self.last = nn.Linear(20, rig.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        logits: torch.Tensor = self.last(F.linear(h, self.first.weight.t()))
        return logits


def test_tied_weights(comm: Communicator, shared: Path) -> None:
    """A parameter under two names is one parameter: one gradient, one update."""
    trip = compared(comm, shared, Tied)
    assert trip.model.get_parameter("first.weight") is trip.model.get_parameter("second.weight")
    assert sum(len(bucket.parameters) for bucket in trip.run.replica.reducer.buckets) == 5


def frozen() -> nn.Module:
    model = rig.ConvNet()
    for name in ("conv1.weight", "bn2.weight", "fc.bias"):
        model.get_parameter(name).requires_grad_(False)
    return model


def test_parameters_that_are_not_trained(comm: Communicator, shared: Path) -> None:
    """They are not reduced, not decayed, not moved."""
    trip = compared(comm, shared, frozen, rig.IMAGE)
    before = rig.built(frozen)
    for name, parameter in trip.model.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(parameter, before.get_parameter(name))
            assert parameter.grad is None
    assert sum(len(bucket.parameters) for bucket in trip.run.replica.reducer.buckets) == 6


def test_channels_last_gradients_keep_their_layout(comm: Communicator, shared: Path) -> None:
    """The gradient is a view into its bucket with the strides of its parameter, through all updates, and the
    training is that of the contiguous model."""
    trip = compared(
        comm,
        shared,
        rig.ConvNet,
        rig.IMAGE,
        prepare=lambda model: model.to(memory_format=torch.channels_last),
        channels_last=True,
    )
    for name in ("conv1.weight", "conv2.weight"):
        parameter = trip.model.get_parameter(name)
        assert parameter.is_contiguous(memory_format=torch.channels_last)
        assert not parameter.is_contiguous()
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
    for bucket in trip.run.replica.reducer.buckets:
        for parameter in bucket.parameters:
            assert parameter.grad is not None
            assert parameter.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()


class Scalars(nn.Module):
    """Parameters of no, one and many dimensions, one of them transposed, one a slice of something larger."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.randn(24, 20).t() * 0.2)
        self.slice = nn.Parameter((torch.randn(24, 40, dtype=torch.float64) * 0.2)[:, 8:32])
        self.last = nn.Linear(24, rig.CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.scale * (x @ self.weight) + self.shift)
        logits: torch.Tensor = self.last(torch.tanh(h @ self.slice))
        return logits


@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_parameters_of_any_shape_and_stride(comm: Communicator, shared: Path, bucket_bytes: int) -> None:
    compared(comm, shared, Scalars, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("bucket_bytes", [1, 300, 2**40])
def test_bucket_size_changes_no_result(comm: Communicator, shared: Path, bucket_bytes: int) -> None:
    """From a bucket per parameter to one for all."""
    trip = compared(comm, shared, rig.ConvNet, rig.IMAGE, bucket_bytes=bucket_bytes)
    parameters = sum(1 for _ in trip.model.parameters())
    count = len(trip.run.replica.reducer.buckets)
    assert count == {1: parameters, 2**40: 1}.get(bucket_bytes, count)
    assert bucket_bytes != 300 or 1 < count < parameters
