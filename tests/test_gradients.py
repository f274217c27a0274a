"""Buckets: what lies in them, and what does not pass through them."""

from __future__ import annotations

from pathlib import Path

import pytest
import rig
import torch
from torch import nn

from hvdbs.comm import Handle
from hvdbs.comm.local import Solo
from hvdbs.costs import OWN_BUCKET_BYTES
from hvdbs.gradients import GradientReducer, gradient_norm, norms, sole
from hvdbs.reach import ExtrapolationConfig


class Doubling(Solo):
    """Two equal ranks that are in a hurry: a sum is there as soon as it has been asked for."""

    def start_sum(self, tensor: torch.Tensor, name: str) -> Handle:
        tensor.mul_(2)
        return super().start_sum(tensor, name)


class OneMemory(nn.Module):
    """Two weights whose gradients autograd hands over in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(2, 3))
        self.w = nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.v.view(-1) + self.w.view(-1)) * x).sum()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_gradients_that_share_memory_are_parted(bucket_bytes: int, micro_batches: int) -> None:
    """Each is twice the sum over micro-batches of their inputs, exactly, though the sum over ranks of one begins while
    the other has not arrived."""
    model = OneMemory()
    reducer = GradientReducer(model.parameters(), Doubling(), torch.zeros(1, dtype=torch.float64), bucket_bytes)
    inputs = [torch.arange(6.0) + number for number in range(micro_batches)]
    for _ in range(2):
        reducer.begin()
        for number, x in enumerate(inputs):
            if number == micro_batches - 1:
                reducer.arm()
            model(x).backward()
        reducer.finish()
        for parameter in (model.v, model.w):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.flatten(), 2 * torch.stack(inputs).sum(0))


def test_torch_does_hand_over_shared_memory() -> None:
    """So that the test above is not vacuous; and a tensor that is not shared is told from it."""
    model = OneMemory()
    shared: list[bool] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: shared.append(not sole(p.grad)))  # type: ignore[arg-type]
    model(torch.arange(6.0)).backward()
    assert model.v.grad is not None and model.w.grad is not None
    assert model.v.grad.data_ptr() == model.w.grad.data_ptr()
    assert shared == [True, True]
    assert sole(torch.zeros(5))
    assert not sole(torch.zeros(5)[:3])


def test_a_large_gradient_is_not_moved() -> None:
    """The tensor that autograd made is what is reduced and what the optimizer reads, through accumulation; a small
    one is copied to the place that it shares with others."""
    model = nn.Linear(2048, OWN_BUCKET_BYTES // (4 * 2048))
    reducer = GradientReducer(model.parameters(), Solo(), torch.zeros(1, dtype=torch.float64), 2**30)
    made: list[int] = []
    model.weight.register_hook(lambda gradient: made.append(gradient.data_ptr()))  # type: ignore[no-untyped-call]
    reducer.begin()
    for _ in range(2):
        reducer.arm()
        model(torch.ones(3, 2048)).sum().backward()
    reducer.finish()
    [large] = [bucket for bucket in reducer.buckets if bucket.parameters[0] is model.weight]
    assert model.weight.grad is not None and model.bias.grad is not None
    assert large.flat.data_ptr() == model.weight.grad.data_ptr() == made[0]
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 6))
    [small] = [bucket for bucket in reducer.buckets if bucket is not large]
    assert small.flat.data_ptr() == model.bias.grad.data_ptr()


@pytest.mark.parametrize("direction", ["noise_gaussian", "local_past"])
def test_how_buckets_lie_changes_no_training(tmp_path: Path, direction: str) -> None:
    """Bitwise on one rank, with directions that are kept as the buckets lie or drawn one parameter after the other."""
    digests = []
    for bucket_bytes in (1, 2000, 2**40):
        away = ExtrapolationConfig(
            direction=direction,  # type: ignore[arg-type]
            virtual_workers=2 if direction == "local_past" else None,
            ratio=1.0,
        )
        config = rig.settings(rig.SHORT_STAGES, bucket_bytes=bucket_bytes, extrapolation=away)
        watch = rig.Watch()
        rig.trained(Solo(), config, rig.built(rig.ConvNet), rig.memory(rig.IMAGE), tmp_path / str(bucket_bytes), watch)
        digests.append(watch.digests)
    assert digests[0] == digests[1] == digests[2]


def test_norms_of_large_float32_tensors_are_those_of_float64() -> None:
    """Seed 0, 9.4 million numbers in a convolution's shape, channels last too, a few, and a scalar; then a layer's
    gradients,    1e-6 relative, where torch's own norm is off by 1e-4 and more."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(1024, 1024, 3, 3, generator=generator) * 1e-3
    tensors = [
        large,
        large.to(memory_format=torch.channels_last),
        torch.randn(7, generator=generator),
        torch.tensor(-2.0),
    ]
    exact = torch.stack([tensor.double().norm() for tensor in tensors])
    assert ((norms(tensors) - exact).abs() / exact).max() < 1e-6
    assert abs(large.norm().item() / exact[0].item() - 1) > 1e-5
    model = nn.Linear(1024, 5000)
    reducer = GradientReducer(model.parameters(), Solo(), torch.zeros(1, dtype=torch.float64), 2**30)
    reducer.begin()
    model(torch.randn(2, 1024, generator=generator)).square().sum().backward()
    reducer.finish()
    gradients = [parameter.grad.double() for parameter in reducer.parameters if parameter.grad is not None]
    whole = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert abs(gradient_norm(reducer.buckets) / whole - 1) < 1e-6
    assert ((reducer.own_norms() - torch.stack([g.norm() for g in gradients])).abs() / whole).max() < 1e-6
