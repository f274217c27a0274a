"""Gradients from exchanged factors between ranks: the training of summed gradients, on any number of ranks.

Seeds, samples and models as in ``rig``; micro_batch 8, so that a rank runs none to many micro-batches in a window, the
last one short. Communication costs its bytes alone (``rig.EVERY_BYTE``) wherever it is chosen by cost.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import rig
import torch
from test_odd_models import Sometimes
from torch import nn
from torch.nn import functional as F

from hvdbs import checkpoint
from hvdbs.batching import Window
from hvdbs.comm import Communicator
from hvdbs.comm.local import Solo
from hvdbs.config import (
    CheckpointConfig,
    OptimizerConfig,
)
from hvdbs.costs import Linear
from hvdbs.engine import Engine, EngineState
from hvdbs.loop import train
from hvdbs.progress import Progress
from hvdbs.reach import ExtrapolationConfig
from hvdbs.replicas import state_digest
from hvdbs.stage_tables import resolve

pytestmark = pytest.mark.parallel

TOKENS = (6, 12)
KEPT = CheckpointConfig(every_samples=1, every_minutes=0, keep_last=100)


class Tokens(nn.Module):
    """[B, 6, 12] to [B, K]: layers on rows of tokens, without a bias at the front, one of them used twice, activations
    in place, a layer after the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(12, 16, bias=False)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, rig.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.front(x), inplace=True)
        h = torch.tanh(self.middle(F.relu(self.middle(h), inplace=True)))
        logits: torch.Tensor = self.last(h.mean(1))
        return logits


def bare() -> nn.Module:
    """Nothing but weights of fully connected layers."""
    return nn.Sequential(nn.Linear(20, 32, bias=False), nn.Tanh(), nn.Linear(32, rig.CLASSES, bias=False))


def normalised() -> nn.Module:
    """With batch norm and dropout between the layers."""
    first = (nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Dropout(0.3))
    return nn.Sequential(*first, nn.Linear(32, rig.CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (rig.mlp, rig.FLAT),
    "bare": (bare, rig.FLAT),
    "tokens": (Tokens, TOKENS),
    "normalised": (normalised, rig.FLAT),
    "convolutions": (rig.ConvNet, rig.IMAGE),
}


# --- the training


@pytest.mark.parametrize("scheme", ["hybrid", "factors"])
@pytest.mark.parametrize("name", MODELS)
def test_training_by_factors_is_that_of_the_plain_loop(
    comm: Communicator, shared: Path, name: str, scheme: str
) -> None:
    """Laws 1 and 2, float64: 1e-12 after 8 updates in three stages, with clipping, momentum and weight decay; bitwise
    equal replicas after each."""
    make, shape = MODELS[name]
    source, watch = rig.memory(shape), rig.Watch()

    def plain() -> rig.Tensors:
        model = rig.built(make)
        order = source.stream(1500)
        reference.train(model, source.inputs, source.labels, order, rig.MIXED, micro_batch=8, clip_norm=0.4)
        return rig.snapshot(model)

    expected = rig.from_rank_0(comm, plain)
    model = rig.built(make)
    trip = rig.trained(comm, rig.settings(rig.MIXED, scheme=scheme, clip_norm=0.4), model, source, shared, watch)
    assert trip.outcome.progress.step == 8
    assert scheme == "hybrid" or trip.run.replica.factors
    assert rig.worst_error(rig.snapshot(model), expected) < 1e-12
    assert len({tuple(digests) for digests in rig.everywhere(comm, watch.digests)}) == 1


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["mlp", "tokens"])
def test_gradients_from_factors_are_the_summed_ones(
    comm: Communicator, name: str, accumulation: int, missing: int, dtype: str, tolerance: float
) -> None:
    """One window of 1 to 4 micro-batches of 8 on each rank, the last one whole or 3 short: every gradient, relative to
    its largest value, and the loss."""
    make, shape = MODELS[name]
    source = rig.memory(shape, dtype=dtype)
    window = Window(0, 8 * accumulation * comm.world_size - missing, 8)
    gradients, losses = [], []
    for scheme in ("dense", "factors"):
        model = rig.built(make, dtype)
        _, applied = rig.one_update(comm, rig.settings(rig.MIXED, dtype=dtype, scheme=scheme), model, source, window)
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        losses.append(applied.loss)
    assert len(gradients[0]) == len(list(model.parameters()))
    assert rig.worst_error(gradients[1], gradients[0]) < tolerance
    assert abs(losses[1] - losses[0]) < tolerance * losses[0]


def test_what_goes_by_factors_alone_has_the_same_bits_on_any_number_of_ranks(comm: Communicator, shared: Path) -> None:
    """float32, a model of weights alone, 8 updates: each rank multiplies the rows of the whole window in stream order,
    so parameters, momentum and the loss of every update are those of one process, bit for bit. Summed gradients are
    not: from 3 ranks on their order of summation is another."""
    source = rig.memory(rig.FLAT, dtype="float32")
    ends = {}
    for scheme in ("factors", "dense"):
        config = rig.settings(rig.MIXED, dtype="float32", scheme=scheme)
        for who, folder in ((comm, shared), (Solo(), shared / f"alone-{comm.rank}")):
            watch = rig.Watch()
            rig.trained(who, config, rig.built(bare, "float32"), source, folder, watch)
            ends[scheme, who is comm] = watch.digests
    assert ends["factors", True] == ends["factors", False]
    assert comm.world_size < 3 or ends["dense", True] != ends["dense", False]


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(momentum=0.8, nesterov=True),
        OptimizerConfig("adagrad", momentum=0.0),
        OptimizerConfig(momentum=0.9, at_stage="reset", proximal_gamma=0.7),
        OptimizerConfig("lars"),
    ],
    ids=["nesterov", "adagrad", "proximal, reset", "lars"],
)
def test_a_layer_that_changes_its_way_keeps_its_optimizer_state(
    comm: Communicator, shared: Path, optimizer: OptimizerConfig
) -> None:
    """Three layers, two and none by factors in turn, against summed gradients throughout, float64: parameters, and what
    the optimizer holds for each, to 1e-12."""
    if optimizer.name == "lars" and importlib.util.find_spec("timm") is None:
        pytest.skip("lars needs timm")
    ends = []
    for scheme in ("dense", "hybrid"):
        config = dataclasses.replace(rig.settings(rig.MIXED, scheme=scheme), optimizer=optimizer)
        trip = rig.trained(comm, config, rig.built(rig.mlp), rig.memory(rig.FLAT), shared / scheme)
        held = trip.run.replica.optimizer.state_dict()["state"]
        state = {f"{k}.{name}": v for k, item in held.items() for name, v in item.items() if torch.is_tensor(v)}
        ends.append((rig.snapshot(trip.model), state))
    assert len(ends[1][1]) >= 6
    assert rig.worst_error(ends[1][0], ends[0][0]) < 1e-12
    assert rig.worst_error(ends[1][1], ends[0][1]) < 1e-12


@pytest.mark.parametrize("threshold", [0.0, 0.05, 9.0])
def test_layers_that_some_ranks_or_all_do_not_reach(comm: Communicator, shared: Path, threshold: float) -> None:
    """float64, 1e-12 to the plain loop: rows of fewer micro-batches, or none at all and a gradient of zero, to which
    weight decay still applies."""
    source = rig.memory(rig.FLAT)
    layers = [Linear("first", 20, 16, 1), Linear("branch", 16, 16, 1)]

    def plain() -> rig.Tensors:
        model = rig.built(lambda: Sometimes(threshold))
        reference.train(model, source.inputs, source.labels, source.stream(1500), rig.SHORT_STAGES, micro_batch=8)
        return rig.snapshot(model)

    expected = rig.from_rank_0(comm, plain)
    model = rig.built(lambda: Sometimes(threshold))
    rig.trained(comm, rig.settings(rig.SHORT_STAGES, scheme="factors"), model, source, shared, layers=layers)
    assert rig.worst_error(rig.snapshot(model), expected) < 1e-12


# --- with everything else

WORKERS = 12
DIRECTIONS = [
    ExtrapolationConfig("local_past", ratio=0.7, virtual_workers=WORKERS),
    ExtrapolationConfig("local_past", "micro", ratio=0.7, virtual_workers=WORKERS),
    ExtrapolationConfig("global_past", ratio=0.7),
    ExtrapolationConfig("same_sample", ratio=0.7, virtual_workers=WORKERS),
    ExtrapolationConfig("same_sample", "micro", ratio=0.7),
    ExtrapolationConfig("noise_filter", ratio=2.0),
]


@pytest.mark.parametrize("extrapolation", DIRECTIONS, ids=lambda it: f"{it.direction}-{it.unit}")
@pytest.mark.parametrize("scheme", ["hybrid", "factors"])
def test_extrapolated_gradients_from_factors_are_the_summed_ones(
    comm: Communicator, shared: Path, extrapolation: ExtrapolationConfig, scheme: str
) -> None:
    """float64, 1e-12 after 8 updates in three stages: the parts of a window, their places and what is kept of them."""
    ends = []
    for way in ("dense", scheme):
        config = rig.settings(rig.MIXED, micro_batch=4, extrapolation=extrapolation, scheme=way)
        trip = rig.trained(comm, config, rig.built(rig.mlp), rig.memory(rig.FLAT), shared / way)
        ends.append(rig.snapshot(trip.model))
    assert rig.worst_error(ends[1], ends[0]) < 1e-12


@pytest.mark.parametrize("global_batch", [24, 131])
@pytest.mark.parametrize("name", ["mlp", "tokens"])
def test_statistics_of_single_micro_batches_are_the_same(comm: Communicator, name: str, global_batch: int) -> None:
    """float64, 1e-12: the norms of micro-batch 0 beside the window's, over all and by layer, though rank 0 forms no
    gradient of its own rows; where micro-batch 0 is all it has, too."""
    make, shape = MODELS[name]
    source, window, found = rig.memory(shape), Window(0, global_batch, 8), []
    for scheme in ("dense", "factors"):
        config = rig.settings(rig.MIXED, scheme=scheme)
        _, applied = rig.one_update(comm, config, rig.built(make), source, window, measure=True, layer_norms=True)
        found.append(applied)
    dense, factors = found
    assert (dense.noise is None) == (factors.noise is None) == (comm.rank > 0)
    if dense.noise is None or factors.noise is None or dense.layers is None or factors.layers is None:
        return
    pairs = [(dense.noise.small_squares, factors.noise.small_squares)]
    pairs += [(dense.noise.big_squares, factors.noise.big_squares)]
    pairs += [(dense.layers.single[key], factors.layers.single[key]) for key in dense.layers.single]
    pairs += [(dense.layers.whole[key], factors.layers.whole[key]) for key in dense.layers.whole]
    assert len(pairs) > 8
    assert all(abs(a - b) < 1e-12 * a for a, b in pairs)


@pytest.mark.parametrize(("autocast", "tolerance"), [("bf16", 1e-2), ("fp16", 2e-3)])
def test_autocast_by_factors_trains_the_same(comm: Communicator, shared: Path, autocast: str, tolerance: float) -> None:
    """Relative 2-norm over all after 8 updates, against summed gradients in one process; replicas bitwise equal."""
    source = rig.memory(rig.FLAT, dtype="float32")
    ends = []
    for who, scheme, folder in ((comm, "factors", shared), (Solo(), "dense", shared / f"alone-{comm.rank}")):
        config = dataclasses.replace(rig.settings(rig.MIXED, dtype="float32", scheme=scheme), autocast=autocast)  # type: ignore[arg-type]
        trip = rig.trained(who, config, rig.built(rig.mlp, "float32"), source, folder)
        ends.append((rig.snapshot(trip.model), trip.digest))
        assert scheme == "dense" or trip.run.replica.factors[0].gathered_bytes == 80 * (20 + 32) * 2
    assert 0 < rig.distance(ends[0][0], ends[1][0]) < tolerance
    assert len(set(rig.everywhere(comm, ends[0][1]))) == 1


@pytest.mark.parametrize("shrunk", [1.0, 1e-3])
def test_factors_on_an_fp16_wire_take_half_the_bytes_and_train_alike(
    comm: Communicator, shared: Path, shrunk: float
) -> None:
    """Relative error of each gradient below 2e-3 against full ones: both factors are rounded to 11 bits (5e-4). With
    last weights a thousandth of theirs, shares of a mean over 80 samples would lie where fp16 has but a few bits."""
    source, window = rig.memory(rig.FLAT, dtype="float32"), Window(0, 80, 8)
    found = []
    for wire in ("none", "fp16"):
        model = rig.built(rig.mlp, "float32")
        with torch.no_grad():
            model.get_parameter("4.weight").mul_(shrunk)
        config = rig.settings(rig.MIXED, dtype="float32", scheme="factors")
        wired = dataclasses.replace(config.communication, wire=wire)
        replica, _ = rig.one_update(comm, dataclasses.replace(config, communication=wired), model, source, window)
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.ndim > 1})
        assert replica.factors[0].gathered_bytes == 80 * (20 + 32) * (4 if wire == "none" else 2)
    for name, gradient in found[0].items():
        assert 0 < (found[1][name] - gradient).norm() / gradient.norm() < 2e-3, name


def test_an_overflow_by_factors_is_skipped_by_all_ranks(comm: Communicator, shared: Path) -> None:
    """fp16 from a loss scale of 2^24: skipped on every rank alike until it fits, then on with finite weights."""
    source = rig.memory(rig.FLAT, dtype="float32")
    config = dataclasses.replace(rig.settings(rig.MIXED, dtype="float32", scheme="factors"), autocast="fp16")
    run = rig.assembled(comm, config, rig.built(rig.mlp, "float32"), source, shared)
    run.replica.scaler.load_state_dict({**run.replica.scaler.state_dict(), "scale": 2.0**24})
    progress = train(run, Progress(), None).progress
    assert progress.skipped > 0
    digest = state_digest(run.replica.model, run.replica.optimizer)
    assert all(bool(p.isfinite().all()) for p in run.replica.model.parameters())
    assert rig.everywhere(comm, [digest, progress.skipped]) == [[digest, progress.skipped]] * comm.world_size


@pytest.mark.parametrize("step", [1, 2, 4, 6])
def test_a_resume_of_a_hybrid_run_is_bitwise(comm: Communicator, shared: Path, step: int) -> None:
    """Law 4, float32: from checkpoints in each stage, of which one is at a boundary where layers change their way."""
    source = rig.memory(rig.FLAT, dtype="float32")
    config = rig.settings(rig.MIXED, dtype="float32", scheme="hybrid", clip_norm=0.4, checkpoint=KEPT)
    whole = rig.trained(comm, config, rig.built(rig.mlp, "float32"), source, shared / "whole")
    data = (shared / "whole" / f"step-{step}" / "model.pt").read_bytes()
    state = checkpoint.load(data, torch.device("cpu"))
    comm.barrier()
    again = rig.trained(comm, config, rig.built(rig.mlp, "float32", seed=9), source, shared / "again", state=state)
    assert again.digest == whole.digest
    assert again.outcome.progress.step == whole.outcome.progress.step == 8


def test_the_engine_gets_its_layer_norms_from_factors(comm: Communicator, shared: Path) -> None:
    """What it has measured on rank 0 by the end of a run, against summed gradients, float64: 1e-12."""
    found = []
    for scheme in ("dense", "factors"):
        config = rig.settings(rig.MIXED, scheme=scheme)
        schedule = resolve(config.schedule, 331)
        engine = Engine(config, schedule, 331, EngineState(["0.weight", "2.weight"]))
        engine.enter = lambda stage, comm: None  # type: ignore[method-assign]  # it only measures here
        engine.wants = lambda stage, samples_seen: True  # type: ignore[method-assign]
        rig.trained(comm, config, rig.built(rig.mlp), rig.memory(rig.FLAT), shared / scheme, engine=engine)
        found.append(engine.state.measured)
    assert (found[0] == {}) == (comm.rank > 0)
    for name, sums in found[0].items():
        assert rig.worst_of(list(found[1][name].values()), list(sums.values())) < 1e-10
