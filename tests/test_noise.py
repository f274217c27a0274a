"""The gradient noise scale against a closed form, and the same at every number of ranks."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import rig
import torch

from hvdbs.batching import Window
from hvdbs.comm import AgreedError, Communicator
from hvdbs.comm.local import Solo, ThreadWorld
from hvdbs.noise import NoiseScale, Pair, period
from hvdbs.schedule import Decision
from hvdbs.step import Replica, Requests


def test_the_estimates_are_unbiased_and_their_quotient_finds_the_true_scale() -> None:
    """Gradients G + noise in 50 dimensions, |G|^2 = 4, tr S = 600, so a scale of 150 samples; 4,000 windows of 64
    samples with micro-batches of 8, seed 0. The averages forget over 20 windows, so their mean is looked at: 10%."""
    draw = np.random.default_rng(0)
    true = draw.normal(size=50)
    true *= 2 / np.linalg.norm(true)
    scale, found = NoiseScale(), []
    for _ in range(4000):
        samples = true + draw.normal(size=(64, 50)) * math.sqrt(600 / 50)
        small, big = samples[:8].mean(0), samples.mean(0)
        scale = scale.after(Pair(float(small @ small), 8, float(big @ big), 64))
        if scale.windows > 100:
            found.append((scale.signal, scale.noise))
    signal, noise = np.mean(found, axis=0)
    assert signal == pytest.approx(4, rel=0.1)
    assert noise == pytest.approx(600, rel=0.03)
    assert noise / signal == pytest.approx(150, rel=0.1)


def test_without_noise_the_scale_is_0_and_without_signal_there_is_none() -> None:
    assert NoiseScale().samples is None
    assert NoiseScale().after(Pair(9.0, 8, 9.0, 64)).samples == 0
    assert NoiseScale().after(Pair(80.0, 8, 1.0, 64)).samples is None  # all noise: |G|^2 comes out negative


def test_an_epoch_has_about_20_measured_windows() -> None:
    assert [period(n) for n in (1, 19, 1437, 1_281_167)] == [1, 1, 71, 64_058]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 13])
def test_the_pair_is_that_of_single_gradients_at_every_world_size(world_size: int) -> None:
    """float64, 1e-12, a window of 50 samples with micro_batch 8 on an mlp: micro-batch 0 and the whole, by autograd.
    From 7 ranks on, rank 0 runs micro-batch 0 alone, and its reduction starts during that very backward pass."""
    source = rig.memory(rig.FLAT)
    inputs, labels = source.inputs[:50], source.labels[:50]

    def norm(size: int) -> float:
        model = rig.built(rig.mlp)
        loss = torch.nn.functional.cross_entropy(model(inputs[:size]), labels[:size])
        return math.sqrt(sum(float(g.pow(2).sum()) for g in torch.autograd.grad(loss, list(model.parameters()))))

    expected = (norm(8) ** 2, norm(50) ** 2)
    built = rig.built(rig.mlp)  # not in the threads, which share torch's generator
    config = rig.settings((rig.Stage(50, 50, lr=0.1, weight_decay=0.0),), micro_batch=8)

    def run(comm: Communicator) -> Pair | None:
        replica = Replica(deepcopy(built), config, comm)
        window = Window(0, 50, 8)
        mine = window.dealt_to(comm.rank, comm.world_size)
        batches = (rig.Batch(inputs[m.begin : m.begin + m.size], labels[m.begin : m.begin + m.size]) for m in mine)
        return replica.run(window, Decision(0, 50, 0.1, 0.0), 0, batches, Requests(), measure=True).noise

    pairs = [run(Solo())] if world_size == 1 else ThreadWorld(world_size).run(run)
    assert pairs[1:] == [None] * (world_size - 1)  # micro-batch 0 is rank 0's
    assert pairs[0] is not None
    assert (pairs[0].small, pairs[0].big) == (8, 50)
    assert (pairs[0].small_squares, pairs[0].big_squares) == pytest.approx(expected, rel=1e-12)


def poisoned(steps: set[int], micro_batch: int = 8) -> rig.Memory:
    """Samples of which one, in the windows ``steps`` of 16 samples, is infinite."""
    source = rig.memory(rig.FLAT)
    inputs = source.inputs.clone()
    for step in steps:
        inputs[source.stream(16 * (step + 1))[16 * step + 5]] = math.inf
    return replace(source, inputs=inputs)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_skipped_window_changes_nothing_but_the_clock(world_size: int, tmp_path: Path) -> None:
    """Windows 2 and 5 of 8 hold an infinite sample: skipped alike on every rank, with equal weights before and after,
    and the run goes on to its end."""
    stages = (rig.Stage(128, 16, lr=0.1, weight_decay=1e-3),)
    config = rig.settings(stages, micro_batch=8)
    config = replace(config, optimizer=replace(config.optimizer, on_nonfinite="skip"))
    built = rig.built(rig.mlp)

    def run(comm: Communicator) -> tuple[rig.Watch, rig.Trip]:
        watch = rig.Watch()
        trip = rig.trained(comm, config, deepcopy(built), poisoned({2, 5}), tmp_path / str(comm.rank), watch)
        return watch, trip

    for watch, trip in [run(Solo())] if world_size == 1 else ThreadWorld(world_size).run(run):
        same = [before == after for before, after in pairwise(watch.digests)]
        assert same == [step in (2, 5) for step in range(1, 8)]
        progress = trip.outcome.progress
        assert (progress.step, progress.samples_seen, progress.skipped, progress.skipped_in_a_row) == (8, 128, 2, 0)
        assert all(bool(p.isfinite().all()) for p in trip.model.parameters())


@pytest.mark.parametrize(("most_skipped", "steps"), [(1, 3), (2, 4)])
def test_too_many_in_a_row_stop_the_run_with_their_number(most_skipped: int, steps: int, tmp_path: Path) -> None:
    config = rig.settings((rig.Stage(128, 16, lr=0.1, weight_decay=0.0),), micro_batch=8)
    optimizer = replace(config.optimizer, on_nonfinite="skip", most_skipped=most_skipped)
    bad = poisoned({1, 2, 3, 4})
    with pytest.raises(AgreedError, match=rf"at step {steps} \(stage 0.*{most_skipped + 1} windows in a row"):
        rig.trained(Solo(), replace(config, optimizer=optimizer), rig.built(rig.mlp), bad, tmp_path)
