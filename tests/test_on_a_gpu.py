"""Training on one GPU, against the plain loop on the CPU and against itself. Several: tests/parallel, tests/jobs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
import rig
import torch
from torch import nn

from hvdbs.assembly import device_name, settle
from hvdbs.comm.local import Solo
from hvdbs.config import Config, ModelConfig
from hvdbs.devices import choose_device
from hvdbs.laps import Laps
from hvdbs.model import build_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    """What a run takes and sets by default; undone at the end."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    device = choose_device(Config(), Solo())
    settle(Config(), 1.0, device)
    yield device
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def still() -> nn.Module:
    """The conv net without dropout: a GPU's generator draws other numbers than the CPU's."""
    return rig.ConvNet(dropout=0.0)


def resnet() -> nn.Module:
    """With max pooling, strides and channels_last."""
    return build_model(ModelConfig("resnet18"), rig.CLASSES).to(memory_format=torch.channels_last)


def on_cpu(model: nn.Module) -> rig.Tensors:
    return {name: tensor.cpu() for name, tensor in rig.snapshot(model).items()}


def test_a_run_takes_a_gpu_where_there_is_one(gpu: torch.device) -> None:
    assert (gpu.type, gpu.index) == ("cuda", 0)
    assert device_name(gpu) == torch.cuda.get_device_name(0)
    assert choose_device(Config(device="cpu"), Solo()).type == "cpu"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-4)])
def test_a_gpu_trains_as_the_plain_loop_does_on_the_cpu(
    gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, tolerance: float
) -> None:
    """Relative 2-norm over parameters and buffers after 10 updates in three stages, clipping and smoothing on. float32
    has ten times the tolerance of law 1: convolutions of another kind (Winograd's), not only sums in another order."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch's default rounds float32 to 11 bits there
    source = rig.memory(rig.IMAGE, dtype=dtype)
    rules = {"clip_norm": 0.4, "smoothing": 0.1}
    expected = rig.built(still, dtype)
    order = source.stream(1500)
    reference.train(expected, source.inputs, source.labels, order, rig.SHORT_STAGES, micro_batch=8, **rules)
    model = rig.built(still, dtype).to(gpu)
    trip = rig.trained(Solo(), rig.settings(rig.SHORT_STAGES, dtype=dtype, **rules), model, source, tmp_path)
    assert trip.outcome.progress.step == 10
    assert {parameter.device for parameter in model.parameters()} == {gpu}
    assert rig.distance(on_cpu(model), rig.snapshot(expected)) < tolerance


@pytest.mark.parametrize(("autocast", "tolerance"), [("bf16", 1e-2), ("fp16", 2e-3)])
def test_autocast_on_a_gpu_is_near_float32_and_repeats_its_bits(
    gpu: torch.device, tmp_path: Path, autocast: str, tolerance: float
) -> None:
    """Relative 2-norm after 10 updates, with the tolerances of tests/parallel/test_precision.py; the same comparison on
    a CPU gives 1.2e-3 and 2.8e-4."""
    source = rig.memory(rig.IMAGE, dtype="float32")
    ends = []
    for kind in ("none", autocast, autocast):
        config = dataclasses.replace(rig.settings(rig.SHORT_STAGES, dtype="float32", clip_norm=0.4), autocast=kind)
        trip = rig.trained(Solo(), config, rig.built(rig.ConvNet, "float32").to(gpu), source, tmp_path / f"{len(ends)}")
        assert trip.outcome.progress.step == 10
        ends.append((on_cpu(trip.model), trip.digest))
    assert 1e-6 < rig.distance(ends[1][0], ends[0][0]) < tolerance
    assert ends[1][1] == ends[2][1]


@pytest.mark.parametrize("make", [rig.ConvNet, resnet])
def test_two_runs_on_one_gpu_end_in_the_same_bits(gpu: torch.device, tmp_path: Path, make: type[nn.Module]) -> None:
    """Law 4 with deterministic kernels: parameters, buffers and momentum after 10 updates, with dropout or with a
    ResNet's max pooling, in float32 as torch runs it by default."""
    source = rig.memory(rig.IMAGE, dtype="float32")
    digests = []
    for k in range(2):
        config = rig.settings(rig.SHORT_STAGES, dtype="float32", channels_last=make is resnet)
        digests.append(
            rig.trained(Solo(), config, rig.built(make, "float32").to(gpu), source, tmp_path / str(k)).digest
        )
    assert digests[0] == digests[1]


def test_laps_are_those_of_the_gpu_not_of_the_host(gpu: torch.device) -> None:
    """Products that take long and are queued in no time: their lap is most of what the host then waits for. Nothing is
    queued in the second."""
    a = torch.randn(4096, 4096, device=gpu)
    for _ in range(2):  # the first time kernels are loaded
        laps = Laps(gpu)
        laps.begin()
        begun = time.perf_counter()
        for _ in range(50):
            a = (a @ a) / a.norm()
        queued = time.perf_counter() - begun
        laps("products", 3)
        laps("nothing")
        products, nothing = laps.take()
        waited = time.perf_counter() - begun
    assert (products.name, products.micro_batch) == ("products", 3)
    assert products.end == nothing.begin
    assert queued < 0.5 * (products.end - products.begin)
    assert products.end - products.begin == pytest.approx(waited, rel=0.2)
    assert nothing.end - nothing.begin < 1e-3
