"""Laws 1 and 3: the training that a config defines, whoever runs it, against the plain loop of ``reference.py``.

Samples: 331 in an epoch (a prime: epochs end inside windows and inside micro-batches), inputs and labels of
``rig.memory`` seed 0. Weights are drawn from seed 3, the run's seed is 0 unless said otherwise. rank 0 alone
computes the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import rig
from reference import Stage
from torch import nn

from hvdbs.comm import Communicator
from hvdbs.comm.local import Solo

pytestmark = pytest.mark.parallel

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv net with batch norm and dropout": (rig.ConvNet, rig.IMAGE),
    "mlp with dropout": (lambda: rig.mlp(dropout=0.2), rig.FLAT),
    "mlp": (rig.mlp, rig.FLAT),
}

# What differs from plain SGD with momentum 0.9, by the names of both rig.settings and reference.train.
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "label smoothing": {"smoothing": 0.1},
    "clipping": {"clip_norm": 0.3},
    "nesterov": {"nesterov": True},
    "no momentum": {"momentum": 0.0},
    "warm-up": {"warmup": (180, 0.01)},
    "seed": {"seed": 2**62 + 12345},
    "all": {"smoothing": 0.2, "clip_norm": 0.25, "nesterov": True, "warmup": (150, 0.001), "seed": 7},
}


def both(
    comm: Communicator,
    folder: Path,
    kind: str,
    stages: tuple[Stage, ...],
    *,
    dtype: str = "float64",
    micro_batch: int = 8,
    reference_micro_batch: int | None = 8,
    **rules: Any,
) -> tuple[rig.Trip, rig.Watch, rig.Tensors, reference.Trained]:
    """Collective. The same training by hvdbs over all ranks and by the reference."""
    make, shape = MODELS[kind]
    source = rig.memory(shape, dtype=dtype)
    source.seed = rules.get("seed", 0)

    def plain() -> dict[str, object]:
        model = rig.built(make, dtype)
        order = source.stream(sum(s.samples + s.global_batch for s in stages))
        done = reference.train(
            model,
            source.inputs,
            source.labels,
            order,
            stages,
            micro_batch=reference_micro_batch,
            **rules,
        )
        return {"tensors": rig.snapshot(model), **vars(done)}

    expected = rig.from_rank_0(comm, plain)
    tensors = expected.pop("tensors")
    watch = rig.Watch()
    config = rig.settings(stages, micro_batch=micro_batch, dtype=dtype, **rules)
    trip = rig.trained(comm, config, rig.built(make, dtype), source, folder, watch)
    return trip, watch, tensors, reference.Trained(**expected)


@pytest.mark.parametrize(
    ("kind", "micro_batch", "reference_micro_batch"),
    [("conv net with batch norm and dropout", 8, 8), ("mlp with dropout", 8, 8), ("mlp", 12, None)],
)
def test_200_updates_in_float64_are_those_of_one_plain_process(
    comm: Communicator, shared: Path, kind: str, micro_batch: int, reference_micro_batch: int | None
) -> None:
    """Law 1, float64: 1e-12 for every parameter and buffer, each relative to the largest value of its tensor (and
    num_batches_tracked exactly), after 80 updates of 50 samples, 60 of 77 and 60 of 131, micro_batch 8, so that the
    last micro-batch of every window is short; the model without batch norm and dropout with micro_batch 12 against
    whole windows as one batch. Also each loss and gradient norm that is logged: 1e-12 relative.

    The problem is well-conditioned on purpose: a change of 1e-15 in the first weights grows to 7e-15 by the end.
    """
    trip, watch, expected, plain = both(
        comm,
        shared,
        kind,
        rig.THREE_STAGES,
        micro_batch=micro_batch,
        reference_micro_batch=reference_micro_batch,
    )
    assert len(plain.losses) == trip.outcome.progress.step == 200
    assert trip.outcome.progress.samples_seen == plain.samples_seen == 80 * 50 + 60 * 77 + 60 * 131
    assert watch.stages == plain.stages
    assert rig.worst_error(rig.snapshot(trip.model), expected) < 1e-12
    assert rig.worst_of(watch.losses, plain.losses) < 1e-12
    assert rig.worst_of([n or 0.0 for n in watch.gradient_norms], plain.norms) < 1e-12
    assert plain.losses[-1] < plain.losses[0]  # it is a training that moves


@pytest.mark.parametrize("kind", MODELS)
def test_10_updates_in_float32_are_those_of_one_plain_process(comm: Communicator, shared: Path, kind: str) -> None:
    """Law 1, float32: 1e-5, the relative 2-norm over all parameters and buffers, after 4 updates of 50 samples, 3 of 77
    and 3 of 131, micro_batch 8."""
    trip, watch, expected, plain = both(comm, shared, kind, rig.SHORT_STAGES, dtype="float32")
    assert len(plain.losses) == trip.outcome.progress.step == 10
    assert rig.distance(rig.snapshot(trip.model), expected) < 1e-5
    assert rig.worst_of(watch.losses, plain.losses) < 1e-5


@pytest.mark.parametrize("micro_batch", [1, 5, 16, 1000])
def test_micro_batch_changes_nothing_without_batch_norm_and_dropout(
    comm: Communicator, shared: Path, micro_batch: int
) -> None:
    """Laws 1 and 3, float64: 1e-12 after 10 updates in three stages against a reference that takes each whole window as
    one batch; micro_batch below, at and above the global batch (with 1000 all ranks but one are idle)."""
    trip, _, expected, _ = both(
        comm, shared, "mlp", rig.SHORT_STAGES, micro_batch=micro_batch, reference_micro_batch=None
    )
    assert rig.worst_error(rig.snapshot(trip.model), expected) < 1e-12


@pytest.mark.parametrize(("micro_batch", "k"), [(4, 8), (8, 4), (16, 2)])
def test_k_micro_batches_of_b_equal_one_batch_of_k_times_b(
    comm: Communicator, shared: Path, micro_batch: int, k: int
) -> None:
    """Law 3, float64: 1e-12 after 5 updates of 32 samples: hvdbs over all ranks with micro_batch b against hvdbs in one
    process with micro_batch 32."""
    stages = (Stage(160, 32, lr=0.1, weight_decay=1e-3),)
    source = rig.memory(rig.FLAT)
    assert micro_batch * k == 32
    small, whole = (
        rig.trained(who, rig.settings(stages, micro_batch=size), rig.built(rig.mlp), source, folder)
        for who, size, folder in ((comm, micro_batch, shared), (Solo(), 32, shared / f"rank-{comm.rank}"))
    )
    assert small.outcome.progress.step == 5
    assert rig.worst_error(rig.snapshot(small.model), rig.snapshot(whole.model)) < 1e-12


@pytest.mark.parametrize(
    ("rule", "kind"),
    [*((rule, "mlp with dropout") for rule in RULES), ("all", "conv net with batch norm and dropout")],
)
def test_every_rule_of_the_step_is_that_of_the_plain_loop(
    comm: Communicator, shared: Path, rule: str, kind: str
) -> None:
    """Law 1, float64, with each rule by itself and all at once: 1e-12 after 10 updates in three stages, micro_batch
    8."""
    rules = RULES[rule]
    trip, watch, expected, plain = both(comm, shared, kind, rig.SHORT_STAGES, **rules)
    assert rig.worst_error(rig.snapshot(trip.model), expected) < 1e-12
    assert rig.worst_of(watch.losses, plain.losses) < 1e-12
    assert rig.worst_of([n or 0.0 for n in watch.gradient_norms], plain.norms) < 1e-12
    if rule == "clipping":  # it must bite in some updates and not in others
        assert min(plain.norms) < 0.3 < max(plain.norms)


def test_the_rules_and_models_do_differ(comm: Communicator, shared: Path) -> None:
    """The tests above could pass for nothing if a rule did nothing: each changes the reference by more than 1e-6."""
    make, shape = MODELS["mlp with dropout"]
    source = rig.memory(shape)
    order = source.stream(1500)
    ends = []
    for rules in RULES.values():
        model = rig.built(make)
        reference.train(model, source.inputs, source.labels, order, rig.SHORT_STAGES, micro_batch=8, **rules)
        ends.append(rig.snapshot(model))
    assert all(rig.worst_error(end, ends[0]) > 1e-6 for end in ends[1:])


@pytest.mark.parametrize("global_batch", [1, 2, 3, 9])
def test_ranks_without_a_micro_batch_contribute_zeros(comm: Communicator, shared: Path, global_batch: int) -> None:
    """Law 1, float64, windows of 1 and 2 micro-batches (of 8, batch norm and dropout), so that from np 2 or 3 on some
    ranks are idle in every window: 1e-12 after 6 updates."""
    stages = (Stage(6 * global_batch, global_batch, lr=0.05, weight_decay=1e-3),)
    trip, watch, expected, plain = both(comm, shared, "conv net with batch norm and dropout", stages, clip_norm=0.3)
    assert trip.outcome.progress.step == len(plain.losses) == 6
    assert rig.worst_error(rig.snapshot(trip.model), expected) < 1e-12
    assert rig.worst_of(watch.losses, plain.losses) < 1e-12
