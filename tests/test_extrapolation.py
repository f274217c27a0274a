"""Extrapolation against closed forms, on bowls: trajectories worked out by hand, fixed points, stability, bounds.

Equations of Lin et al., arXiv 2006.05720 (y = x - length * direction; the update moves x); numbers derived from them by
hand. Against an independent implementation on a real classifier: tests/parallel/test_extrapolation_between_ranks.py.
"""

from __future__ import annotations

import copy
import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bowls
import numpy as np
import pytest
import rig
import torch
from bowls import in_turn, path
from reference import Stage
from torch import nn

import hvdbs.plan
import hvdbs.train
from hvdbs.batching import Window
from hvdbs.comm import Communicator
from hvdbs.comm.local import Solo, ThreadWorld
from hvdbs.data.streams import noise_seed
from hvdbs.extrapolation import noise
from hvdbs.loop import train
from hvdbs.progress import Progress
from hvdbs.reach import ExtrapolationConfig, UntilConfig, parts, virtual_workers
from hvdbs.replicas import state_digest
from hvdbs.schedule import Decision
from hvdbs.step import Replica, Requests

BOWL = in_turn((1.0, 0.0))
TWO = in_turn((1.0, 0.0), (3.0, 0.0))
GRADIENT = ("local_past", "global_past", "same_sample")
NOISE = ("noise_uniform", "noise_gaussian", "noise_weight", "noise_filter")
RULES: list[dict[str, Any]] = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(deterministic)


def away(direction: str, workers: int | str | None = 1, **fields: Any) -> ExtrapolationConfig:
    """The config of ``direction``, ratio 0.5 unless a length is given, ``workers`` where it reads them."""
    if "length" not in fields:
        fields.setdefault("ratio", 0.5)
    config = ExtrapolationConfig(direction, **fields)  # type: ignore[arg-type]
    return ExtrapolationConfig(direction, virtual_workers=workers if config.reads_workers else None, **fields)  # type: ignore[arg-type]


def close(got: Any, expected: Any) -> None:
    assert list(got) == pytest.approx(list(expected), rel=1e-13, abs=1e-15)


# --- trajectories worked out by hand


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (RULES[0], [1, 0.9, 0.815, 0.73775, 0.6678375, 0.604549375]),
        (RULES[1], [1, 0.9, 0.725, 0.49925]),
        (RULES[2], [1, 0.81, 0.5846, 0.346286]),
    ],
    ids=["sgd", "heavy ball", "nesterov"],
)
@pytest.mark.parametrize("direction", ["local_past", "global_past"])
def test_a_bowl_of_curvature_1_is_descended_as_by_hand(
    tmp_path: Path, rules: dict[str, Any], expected: list[float], direction: str
) -> None:
    """lr 0.1, length 0.05, from 1. One virtual worker: its past gradient is the whole window's."""
    weights, losses = path(tmp_path, BOWL, away(direction), updates=len(expected) - 1, **rules)
    close(weights, expected)
    if rules["momentum"] == 0:
        places = [1, 0.85, 0.7725, 0.699125, 0.63288125]  # y, where the gradient and the loss are taken
        close(losses, [y**2 / 2 + 1 for y in places])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (away("local_past", 2), [1, 0.8, 0.665, 0.5485]),
        (away("global_past"), [1, 0.8, 0.66, 0.542]),
        (away("local_past", 1), [1, 0.8, 0.66, 0.542]),
        (away("local_past", 1, granularity="micro"), [1, 0.8075, 0.6581125, 0.5363616875]),
        (away("local_past", 2, granularity="micro"), [1, 0.8, 0.665, 0.5485]),
        # same sample: y = 0.95 and 0.85 of x; the mean over both of them moves y by 0.1 x
        (away("same_sample", 2), [1, 0.825, 0.825**2, 0.825**3]),
        (away("same_sample", 1, granularity="micro"), [1, 0.825, 0.825**2, 0.825**3]),
        (away("same_sample", 1), [1, 0.82, 0.82**2, 0.82**3]),
    ],
    ids=lambda value: f"{value.direction}-{value.unit}-{value.virtual_workers}" if hasattr(value, "unit") else "",
)
def test_two_micro_batches_of_curvatures_1_and_3_descend_as_by_hand(
    tmp_path: Path, config: ExtrapolationConfig, expected: list[float]
) -> None:
    """lr 0.1, length 0.05, SGD: with two virtual workers each keeps its own gradient, with one they share theirs, and
    micro granularity takes the one before, also across windows."""
    weights, _ = path(tmp_path, TWO, config, updates=3, global_batch=2)
    close(weights, expected)
    if config.virtual_workers == 2:
        both = ThreadWorld(2).run(
            lambda comm: path(tmp_path / "both", TWO, config, updates=3, global_batch=2, comm=comm)
        )
        assert both[0] == both[1]
        close(both[0][0], expected)


def test_one_worker_follows_the_recurrence(tmp_path: Path) -> None:
    """x_{t+1} = (1 - (lr + length) h) x_t + length h x_{t-1}, x_1 = (1 - lr h) x_0; 30 updates."""
    lr, length, h = 0.13, 0.21, 1.7
    config = away("local_past", length=length)
    weights, _ = path(tmp_path, in_turn((h, 0.0)), config, updates=30, lr=lr, start=2.0)
    expected = [2.0, (1 - lr * h) * 2.0]
    while len(expected) < 31:
        expected.append((1 - (lr + length) * h) * expected[-1] + length * h * expected[-2])
    close(weights, expected)


@pytest.mark.parametrize(("lr", "length"), [(0.5, 0.7), (0.5, 0.8), (1.5, 0.2), (1.5, 0.3), (0.1, 0.9), (0.1, 1.0)])
def test_past_extrapolation_is_stable_if_and_only_if_lr_plus_twice_the_length_times_the_curvature_is_below_2(
    tmp_path: Path, lr: float, length: float
) -> None:
    weights, _ = path(tmp_path, BOWL, away("local_past", length=length), updates=80, lr=lr, start=1e-3)
    late, later = (max(map(abs, part)) for part in (weights[40:60], weights[60:]))
    assert (later < late) == (lr + 2 * length < 2)


def test_the_fixed_point_is_that_of_the_moreau_envelopes(tmp_path: Path) -> None:
    """Three virtual workers of curvatures 1, 3, 0.5 around 1, -1, 2 and length 0.2: at the fixed point the gradient of
    each is h (x - a) / (1 + 0.2 h), and these sum to 0 at -0.041916..., not at the minimiser -0.2222."""
    bowl = in_turn((1.0, 1.0), (3.0, -1.0), (0.5, 2.0))
    weights, _ = path(tmp_path, bowl, away("local_past", 3, length=0.2), updates=400, global_batch=3)
    damped = [(h / (1 + 0.2 * h), a) for h, a in ((1, 1), (3, -1), (0.5, 2))]
    envelope = sum(h * a for h, a in damped) / sum(h for h, _ in damped)
    assert envelope == pytest.approx(-0.0419161677)
    assert weights[-1] == pytest.approx(envelope, abs=1e-12)
    plain, _ = path(tmp_path, bowl, away("local_past", 3, length=0.0), updates=400, global_batch=3)
    assert plain[-1] == pytest.approx(-2 / 9, abs=1e-12)


def test_the_mean_squared_gradient_keeps_within_its_bound(tmp_path: Path) -> None:
    """L-smooth, lr <= 1 / L, length <= 1 / (2 sqrt 2 L), local_past, K virtual workers of b samples:
    mean |F'(x_t)|^2 <= 3 (F_0 - F*) / (lr T) + 1.5 L lr s^2 / (K b) + 2 L^2 length^2 s^2 / b."""
    h, sigma, k, lr, length, updates = 2.0, 1.0, 4, 0.3, 0.15, 60
    squares = []
    for seed in range(12):
        centres = np.random.default_rng(seed).normal(0.0, sigma / h, size=updates * k)
        source = bowls.Positions(lambda p, centres=centres: (h, float(centres[p])))
        weights, _ = path(
            tmp_path, source, away("local_past", k, length=length), updates=updates, global_batch=k, lr=lr, start=1.5
        )
        squares.append(np.mean([(h * w) ** 2 for w in weights[:-1]]))
    bound = 3 * (h * 1.5**2 / 2) / (lr * updates) + 1.5 * h * lr * sigma**2 / k + 2 * (h * length * sigma) ** 2
    assert np.mean(squares) <= bound


# --- what it must not change


@pytest.mark.parametrize("rules", RULES, ids=["sgd", "heavy ball", "nesterov"])
def test_length_0_is_bitwise_the_plain_method_whatever_the_direction(tmp_path: Path, rules: dict[str, Any]) -> None:
    """Law 7, with batch norm and dropout, after each of 10 updates; and no tensor is held for it."""

    def digests(extrapolation: ExtrapolationConfig | None) -> list[str]:
        watch = rig.Watch()
        config = rig.settings(rig.SHORT_STAGES, clip_norm=0.3, extrapolation=extrapolation, **rules)
        trip = rig.trained(Solo(), config, rig.built(rig.ConvNet), rig.memory(rig.IMAGE), tmp_path, watch)
        assert trip.run.replica.extrapolation.held_bytes == 0
        return watch.digests

    plain = digests(None)
    for direction in (*GRADIENT, *NOISE):
        assert digests(away(direction, 2, ratio=0.0)) == plain
        assert digests(away(direction, 2, length=0.0)) == plain
    assert digests(ExtrapolationConfig("none", ratio=1.0)) == plain


@pytest.mark.parametrize("direction", ["local_past", "global_past"])
def test_the_first_update_is_bitwise_the_plain_one_and_the_second_is_not(tmp_path: Path, direction: str) -> None:
    watches = [rig.Watch(), rig.Watch()]
    for watch, extrapolation in zip(watches, (None, away(direction)), strict=True):
        config = rig.settings(rig.SHORT_STAGES, extrapolation=extrapolation)
        rig.trained(Solo(), config, rig.built(rig.ConvNet), rig.memory(rig.IMAGE), tmp_path, watch)
    assert watches[0].digests[0] == watches[1].digests[0]
    assert watches[0].digests[1] != watches[1].digests[1]


@pytest.mark.parametrize("direction", [*GRADIENT, *NOISE])
def test_the_deviation_from_plain_training_is_proportional_to_a_small_length(tmp_path: Path, direction: str) -> None:
    """Halving it halves the deviation, within 2 %, after 10 updates of a network with two hidden layers."""

    def after(ratio: float) -> rig.Tensors:
        model = rig.built(rig.mlp)
        config = rig.settings(rig.SHORT_STAGES, extrapolation=away(direction, 2, ratio=ratio))
        rig.trained(Solo(), config, model, rig.memory(rig.FLAT), tmp_path)
        return rig.snapshot(model)

    plain = after(0.0)
    whole, half = (rig.distance(after(ratio), plain) for ratio in (2e-4, 1e-4))
    assert whole > 0
    assert whole / half == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("direction", GRADIENT)
@pytest.mark.parametrize("micro_batch", [5, 30])
def test_window_granularity_does_not_depend_on_how_a_virtual_workers_part_is_cut(
    tmp_path: Path, direction: str, micro_batch: int
) -> None:
    """Two virtual workers of 30 samples each, as micro-batches of 5, and of 30; 1e-12 against batches of 15."""

    def after(size: int) -> rig.Tensors:
        model = rig.built(rig.mlp)
        stages = (Stage(300, 60, 0.1, 1e-3),)
        config = rig.settings(stages, micro_batch=size, extrapolation=away(direction, 2, ratio=1.0))
        rig.trained(Solo(), config, model, rig.memory(rig.FLAT), tmp_path)
        return rig.snapshot(model)

    assert rig.worst_error(after(micro_batch), after(15)) < 1e-12


# --- places


def places(model: nn.Module) -> list[rig.Tensors]:
    """Filled with the parameters at each forward in training mode."""
    found: list[rig.Tensors] = []

    def note(module: nn.Module, inputs: object) -> None:
        if module.training:
            found.append({name: p.detach().clone() for name, p in module.named_parameters()})

    model.register_forward_pre_hook(note)
    return found


def test_the_place_is_the_length_times_the_kept_gradient_away(tmp_path: Path) -> None:
    """|y - x| = length |h| for each virtual worker, and the place is one for all of its micro-batches."""
    model = rig.built(rig.mlp)
    seen = places(model)
    config = rig.settings(rig.SHORT_STAGES, extrapolation=away("local_past", 3, length=0.7))
    replica = Replica(model, config, Solo())
    source, window = rig.memory(rig.FLAT), Window(0, 50, 8)
    x, kept = rig.snapshot(model), {}
    for step in range(2):
        kept, x = replica.extrapolation.own_state(), rig.snapshot(model)
        kept = copy.deepcopy(kept)
        seen.clear()
        batches = source.train(window.dealt_to(0, 1))
        replica.run(window, Decision(0, 50, 0.1, 0.0), step, batches, Requests())
    workers = [j * 3 // 7 for j in range(7)]
    for worker, place in zip(workers, seen, strict=True):
        moved = math.sqrt(sum(float(((place[name] - x[name]) ** 2).sum()) for name in place))
        size = math.sqrt(sum(float((kept[worker][name] ** 2).sum()) for name in place))
        assert moved == pytest.approx(0.7 * size, rel=1e-12)
        assert place.keys() == kept[worker].keys()


def test_micro_batches_fall_to_virtual_workers_as_to_ranks() -> None:
    """floor(j V / n) nests in floor(j P / n): the parts of P ranks, one after the other, are those of one."""
    for n in (1, 5, 6, 7, 24, 25):
        window = Window(0, 8 * n - 3, 8)
        for unit in ("window", "micro"):
            whole = list(parts(list(window.dealt_to(0, 1)), n, 6, unit))
            assert all(micro.index * 6 // n == part.worker for part in whole for micro in part.micro_batches)
            for world_size in (2, 3, 6):
                ranks = [list(window.dealt_to(rank, world_size)) for rank in range(world_size)]
                dealt = [part for mine in ranks for part in parts(mine, n, 6, unit)]
                assert dealt == whole
    assert virtual_workers(ExtrapolationConfig("local_past", virtual_workers=6), 3) == 6
    assert virtual_workers(ExtrapolationConfig("local_past", virtual_workers="world_size"), 5) == 5


def test_evaluation_and_digests_see_x_and_batch_norm_one_pass_per_micro_batch(tmp_path: Path) -> None:
    """With the gradient at x on the same samples, each micro-batch runs twice; its statistic counts once, at y."""
    model = rig.built(rig.ConvNet)
    seen, scored = places(model), []
    watch = rig.Watch()
    stages = (Stage(100, 50, 0.1),)
    config = rig.settings(stages, extrapolation=away("same_sample", 1, length=0.3))
    run = rig.assembled(Solo(), config, model, rig.memory(rig.IMAGE), tmp_path, watch, evaluation_period=50)

    def note(module: nn.Module, inputs: object) -> None:
        if not module.training:
            scored.append(state_digest(model, run.replica.optimizer))

    model.register_forward_pre_hook(note)
    train(run, Progress(), None)
    assert len(seen) == 2 * 2 * 7
    assert set(scored) == set(watch.digests)
    tracked = model.get_submodule("bn1").num_batches_tracked
    assert isinstance(tracked, torch.Tensor)
    assert tracked.item() == 14


class Fails(nn.Module):
    """Ends in an exception once no forwards are ``left``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(20, rig.CLASSES)
        self.left = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("on purpose")
        logits: torch.Tensor = self.fc(x)
        return logits


@pytest.mark.parametrize("config", [away("local_past", 2), away("same_sample", 2), away("noise_filter")])
def test_an_exception_within_a_window_leaves_x(tmp_path: Path, config: ExtrapolationConfig) -> None:
    window, source = Window(0, 50, 8), rig.memory(rig.FLAT)
    model = rig.built(Fails)
    assert isinstance(model, Fails)
    seen = places(model)
    replica = Replica(model, rig.settings(rig.SHORT_STAGES, extrapolation=config), Solo())

    def update(step: int) -> None:
        batches = source.train(window.dealt_to(0, 1))
        replica.run(window, Decision(0, 50, 0.1, 0.0), step, batches, Requests())

    model.left = -1
    update(0)
    model.left = 5
    digest = state_digest(model, replica.optimizer)
    with pytest.raises(RuntimeError, match="on purpose"):
        update(1)
    assert state_digest(model, replica.optimizer) == digest
    assert not torch.equal(seen[-1]["fc.weight"], model.get_parameter("fc.weight"))


# --- noise


@pytest.mark.parametrize("shape", [(7, 4), (6, 3, 3, 3)])
def test_filter_noise_moves_each_filter_by_the_scale_times_its_norm(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moved = 0.3 * noise("noise_filter", x, torch.Generator().manual_seed(2))
    ratio = moved.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert ratio.tolist() == pytest.approx([0.3] * shape[0], rel=1e-14)


@pytest.mark.parametrize("direction", NOISE)
def test_noise_is_fresh_for_each_micro_batch_leaves_norms_and_biases_and_counts_what_it_is_for(direction: str) -> None:
    """The places of two steps of 3 micro-batches: all differ, in the weights alone, and are the same again with ranks
    as threads, whoever runs the micro-batch."""

    def visited(world_size: int) -> dict[tuple[int, int], rig.Tensors]:
        first = rig.built(rig.mlp)
        models = [copy.deepcopy(first) for _ in range(world_size)]
        found: dict[tuple[int, int], rig.Tensors] = {}

        def main(comm: Communicator) -> None:
            model = models[comm.rank]
            seen = places(model)
            config = rig.settings(rig.SHORT_STAGES, extrapolation=away(direction, length=0.1))
            replica = Replica(model, config, comm)
            window = Window(0, 24, 8)
            for step in range(2):
                seen.clear()
                mine = list(window.dealt_to(comm.rank, comm.world_size))
                replica.run(window, Decision(0, 24, 0.0, 0.0), step, rig.memory(rig.FLAT).train(mine), Requests())
                found.update({(step, m.index): place for m, place in zip(mine, seen, strict=True)})

        ThreadWorld(world_size).run(main)
        return found

    alone, x = visited(1), dict(rig.built(rig.mlp).named_parameters())
    assert len(alone) == 6
    for name, value in x.items():
        here = [place[name] for place in alone.values()]
        if value.ndim == 1:
            assert all(torch.equal(place, value) for place in here)
        else:
            assert len({place.numpy().tobytes() for place in here} | {value.detach().numpy().tobytes()}) == 7
    shared = visited(3)
    assert all(torch.equal(alone[key][name], shared[key][name]) for key in alone for name in x)
    assert len({noise_seed(1, 2, 3), noise_seed(2, 2, 3), noise_seed(1, 3, 3), noise_seed(1, 2, 4)}) == 4


# --- where it ends, and windows that are skipped


@pytest.mark.parametrize("until", [UntilConfig(samples=150), UntilConfig(stage=1)], ids=["samples", "stage"])
def test_beyond_its_end_training_is_plain_and_nothing_is_held(tmp_path: Path, until: UntilConfig) -> None:
    """Bowl, lr 0.1: stage 0 has updates 1 to 3; the factor of every later one is 0.9."""
    model, watch = bowls.Bowl(1.0), rig.Watch()
    stages = (Stage(150, 50, 0.1), Stage(150, 50, 0.1))
    extrapolation = away("local_past", 2, until=until)
    config = rig.settings(stages, micro_batch=10, momentum=0.0, extrapolation=extrapolation)
    run = rig.assembled(Solo(), config, model, BOWL, tmp_path, watch)  # type: ignore[arg-type]
    weights, held = [1.0], []

    def after(progress: Progress) -> None:
        weights.append(model.w.item())
        held.append(run.replica.extrapolation.held_bytes)

    watch.after = after
    train(run, Progress(), None)
    close(weights[:4], [1, 0.9, 0.815, 0.73775])
    close(weights[4:], [0.73775 * 0.9**k for k in (1, 2, 3)])
    assert held[:3] == [3 * 8] * 3  # x and two virtual workers; their total is not the extrapolation's own
    assert held[3:] == [0] * 3


@pytest.mark.parametrize("direction", ["local_past", "global_past"])
def test_after_a_window_that_was_skipped_the_next_update_is_plain(tmp_path: Path, direction: str) -> None:
    """Update 3's sample is infinitely curved: nothing moves, and update 4 starts again without a direction."""
    source = bowls.Positions(lambda p: (math.inf if p == 2 else 1.0, 0.0))
    model, watch = bowls.Bowl(1.0), rig.Watch()
    config = rig.settings((Stage(6, 1, 0.1),), micro_batch=1, momentum=0.0, extrapolation=away(direction))
    config = rig.skipping(config)
    weights = [1.0]
    watch.after = lambda progress: weights.append(model.w.item())
    rig.trained(Solo(), config, model, source, tmp_path, watch)  # type: ignore[arg-type]
    fourth = 0.815 * 0.9
    close(weights, [1, 0.9, 0.815, 0.815, fourth, fourth - 0.1 * (fourth - 0.05 * 0.815), weights[6]])


# --- what a person sees

SYNTHETIC = """
micro_batch: 8
threads: 1
data: {kind: synthetic, image_size: 8, resize: 8, train_samples: 64, val_samples: 20, threads: 1}
model: {name: resnet8, classes: 4, width: 4}
logging: {tensorboard: false}
schedule: {method: table, stages: [{epochs: 1, global_batch: 16, lr: 0.1}, {epochs: 1, global_batch: 32, lr: 0.05}]}
"""


def entries(tmp_path: Path, section: str, *arguments: str) -> str:
    """Write the config with this ``section`` and train it; returns its file."""
    config = tmp_path / "run.yaml"
    config.write_text(f"{SYNTHETIC}extrapolation: {{{section}}}\n")
    assert hvdbs.train.main(["--config", str(config), "--out", str(tmp_path / "out"), *arguments]) == 0
    return str(config)


@pytest.mark.parametrize(("until", "first_plain"), [("samples: 40", 4), ("stage: 1", 5)])
def test_decisions_csv_says_where_it_begins_and_ends(tmp_path: Path, until: str, first_plain: int) -> None:
    """4 + 2 updates of 16 and 32 samples; lr 0.1, ratio 0.5. Until sample 40: windows that begin there or later."""
    entries(tmp_path, f"direction: local_past, ratio: 0.5, virtual_workers: 2, until: {{{until}}}")
    with open(tmp_path / "out" / "decisions.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["quantity"] == "extrapolation"]
    assert [(row["step"], row["old"], row["new"]) for row in rows] == [
        ("1", "", "0.05"),
        (str(first_plain), "0.05", "0.0"),
    ]
    assert rows[0]["reason"].startswith(
        "extrapolation begins: local_past over 2 virtual workers, length 0.5 * lr, until "
    )
    assert json.loads(rows[0]["inputs"])["ratio"] == 0.5


def test_plan_and_run_say_where_gradients_are_taken_and_what_that_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Buffers of the size of the parameters: x and, with 4 virtual workers on 2 ranks, 2 gradients and their total."""
    file = entries(tmp_path, "direction: local_past, ratio: 0.5, virtual_workers: 4")
    assert "extrapolation: local_past over 4 virtual workers, length 0.5 * lr; 6 x 20" in capsys.readouterr().out
    assert hvdbs.plan.main(["--config", file, "--np", "2"]) == 0
    assert "extrapolation: local_past over 4 virtual workers, length 0.5 * lr; 4 x 20" in capsys.readouterr().out
    assert hvdbs.plan.main(["--config", file, "--np", "2", "--extrapolation.virtual_workers", "world_size"]) == 0
    lines = capsys.readouterr().out
    assert "local_past over 2 virtual workers, one for each rank, length 0.5 * lr; 2 x 20" in lines
    assert (
        "warning: extrapolation.virtual_workers: world_size makes the training depend on the number of ranks" in lines
    )
