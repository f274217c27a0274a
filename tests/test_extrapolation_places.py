"""Extrapolation as a place: where gradients are taken, what is kept, where it ends, what it must work with."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bowls
import pytest
import rig
import torch
from bowls import BOWL, NOISE, away, close
from reference import Stage
from torch import nn

import hvdbs.plan
import hvdbs.train
from hvdbs.batching import Window
from hvdbs.comm import Communicator
from hvdbs.comm.local import Solo, ThreadWorld
from hvdbs.config import Config
from hvdbs.data.streams import noise_seed
from hvdbs.extrapolation import noise
from hvdbs.loop import train
from hvdbs.progress import Progress
from hvdbs.reach import ExtrapolationConfig, UntilConfig, parts, virtual_workers
from hvdbs.replicas import state_digest
from hvdbs.schedule import Decision
from hvdbs.step import Replica, Requests


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(deterministic)


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


def test_beyond_its_end_no_sample_is_gone_through_twice(tmp_path: Path) -> None:
    """The gradient at x on the same samples, 5 micro-batches in a window: 3 updates of it, then 3 plain ones."""
    model = bowls.Bowl(1.0)
    seen = places(model)
    extrapolation = away("same_sample", 1, until=UntilConfig(stage=1))
    stages = (Stage(150, 50, 0.1), Stage(150, 50, 0.1))
    config = rig.settings(stages, micro_batch=10, momentum=0.0, extrapolation=extrapolation)
    rig.trained(Solo(), config, model, BOWL, tmp_path)  # type: ignore[arg-type]
    assert len(seen) == 5 * (2 * 3 + 3)
    close([model.w.item()], [0.905**3 * 0.9**3])


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
    close(weights[:6], [1, 0.9, 0.815, 0.815, fourth, fourth - 0.1 * (fourth - 0.05 * 0.815)])


# --- what a person sees

SYNTHETIC = """
micro_batch: 8
threads: 1
data: {kind: synthetic, image_size: 8, resize: 8, train_samples: 64, val_samples: 20, threads: 1}
model: {name: resnet8, classes: 4, width: 4}
logging: {tensorboard: false}
schedule: {method: table, stages: [{epochs: 1, global_batch: 16, lr: 0.1}, {epochs: 1, global_batch: 32, lr: 0.05}]}
"""


def entries(tmp_path: Path, section: str, *arguments: str, changed: tuple[str, str] = ("", "")) -> str:
    """Write the config with this ``section`` and train it; returns its file."""
    config = tmp_path / "run.yaml"
    config.write_text(f"{SYNTHETIC.replace(*changed)}extrapolation: {{{section}}}\n")
    assert hvdbs.train.main(["--config", str(config), "--out", str(tmp_path / "out"), *arguments]) == 0
    return str(config)


def lengths(tmp_path: Path) -> list[dict[str, str]]:
    """The rows of decisions.csv that are of extrapolation."""
    with open(tmp_path / "out" / "decisions.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if row["quantity"] == "extrapolation"]


@pytest.mark.parametrize(("until", "first_plain"), [("samples: 40", 4), ("stage: 1", 5)])
def test_decisions_csv_says_where_it_begins_and_ends(tmp_path: Path, until: str, first_plain: int) -> None:
    """4 + 2 updates of 16 and 32 samples; lr 0.1, ratio 0.5. Until sample 40: windows that begin there or later."""
    entries(tmp_path, f"direction: local_past, ratio: 0.5, virtual_workers: 2, until: {{{until}}}")
    rows = lengths(tmp_path)
    assert [(row["step"], row["old"], row["new"]) for row in rows] == [
        ("1", "", "0.05"),
        (str(first_plain), "0.05", "0.0"),
    ]
    assert rows[0]["reason"].startswith(
        "extrapolation begins: local_past over 2 virtual workers, length 0.5 * lr, until "
    )
    assert json.loads(rows[0]["inputs"])["ratio"] == 0.5


@pytest.mark.parametrize(
    ("how", "warmup", "expected"),
    [
        ("ratio: 0.5", "", [("1", "0", "", "0.05"), ("5", "1", "0.05", "0.025")]),
        # lr rises over 64 samples to 0.1: it is 0.01 + 16 / 64 * 0.09 in the first window
        (
            "ratio: 0.5",
            ", warmup: {samples: 64, start_lr: 0.01}",
            [("1", "0", "", "0.01625"), ("5", "1", "0.05", "0.025")],
        ),
        ("length: 0.3", "", [("1", "0", "", "0.3")]),
        ("length: 0.0", "", []),
    ],
    ids=["ratio", "warm-up", "length", "none"],
)
@pytest.mark.parametrize("cut", [None, 4, 5], ids=["whole", "resumed at the boundary", "resumed after it"])
def test_decisions_csv_says_how_far_each_stage_displaces_if_that_changes(
    tmp_path: Path, how: str, warmup: str, expected: list[tuple[str, str, str, str]], cut: int | None
) -> None:
    """4 + 2 updates, lr 0.1, then 0.05. Once for a boundary, also in a run that is stopped there and goes on."""
    section = f"direction: local_past, {how}, virtual_workers: 2"
    every = ["--checkpoint.every_samples", "1", "--checkpoint.keep_last", "100"]
    config = entries(
        tmp_path, section, *every, changed=("schedule: {method: table", f"schedule: {{method: table{warmup}")
    )
    whole = (tmp_path / "out" / "decisions.csv").read_bytes()
    if cut is not None:
        for step in range(cut + 1, 7):
            shutil.rmtree(tmp_path / "out" / "checkpoints" / f"step-{step}")
        (tmp_path / "out" / "checkpoints" / "latest").write_text(f"step-{cut}\n")
        words = ["--config", config, "--out", str(tmp_path / "out"), *every]
        assert hvdbs.train.main([*words, "--resume", "auto"]) == 0
        assert (tmp_path / "out" / "decisions.csv").read_bytes() == whole
    rows = lengths(tmp_path)
    assert [(row["step"], row["stage"], row["old"], row["new"]) for row in rows] == expected
    if len(rows) > 1:
        assert rows[1]["reason"].startswith(
            "extrapolation goes on in stage 1: local_past over 2 virtual workers, length 0.5"
        )
        assert json.loads(rows[1]["inputs"])["lr"] == 0.05


def test_plan_and_run_say_where_gradients_are_taken_and_what_that_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Buffers of the size of the parameters: x and, with 4 virtual workers on 2 ranks, 2 gradients and their total."""
    file = entries(tmp_path, "direction: local_past, ratio: 0.5, virtual_workers: 4")
    memory = "memory for it on each rank: {} x the trained parameters, "
    said = "extrapolation: local_past over 4 virtual workers, length 0.5 * lr.\n"
    assert said + memory.format(6) in capsys.readouterr().out
    assert hvdbs.plan.main(["--config", file, "--np", "2"]) == 0
    assert said + memory.format(4) in capsys.readouterr().out
    assert hvdbs.plan.main(["--config", file, "--np", "2", "--extrapolation.virtual_workers", "world_size"]) == 0
    lines = capsys.readouterr().out
    assert "local_past over 2 virtual workers, one for each rank, length 0.5 * lr.\n" + memory.format(2) in lines
    assert (
        "warning: extrapolation.virtual_workers: world_size makes the training depend on the number of ranks" in lines
    )


# --- what it must work with


def second_place(model: nn.Module, config: Any) -> tuple[Replica, rig.Tensors]:
    """After one window of 7 micro-batches on one rank: the replica, and the gradient of virtual worker 0."""
    replica, window = Replica(model, config, Solo()), Window(0, 50, 8)
    source = rig.memory(rig.FLAT, dtype=config.dtype)
    replica.run(window, Decision(0, 50, 0.1, 0.0), 0, source.train(window.dealt_to(0, 1)), Requests())
    return replica, replica.extrapolation.own_state()[0]


@pytest.mark.parametrize(("autocast", "wire"), [("fp16", "none"), ("none", "fp16")])
@pytest.mark.parametrize("granularity", ["window", "micro"])
def test_what_is_kept_has_neither_the_loss_scale_nor_clipping_nor_the_wire_in_it(
    autocast: str, wire: str, granularity: str
) -> None:
    """float32 weights, two virtual workers. The wire takes nothing: bit for bit. fp16 scales the loss by 2^16 and
    rounds products to 11 bits."""
    kept = []
    for precision, sent, clip_norm in ((autocast, wire, 1e-3), ("none", "none", None)):
        extrapolation = away("local_past", 2, granularity=granularity)
        config = rig.settings(rig.SHORT_STAGES, dtype="float32", clip_norm=clip_norm, extrapolation=extrapolation)
        communication = dataclasses.replace(config.communication, wire=sent)  # type: ignore[arg-type]
        config = dataclasses.replace(config, autocast=precision, communication=communication)  # type: ignore[arg-type]
        kept.append(second_place(rig.built(rig.mlp, "float32"), config)[1])
    if autocast == "none":
        assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[1])
    else:
        assert 0 < rig.distance(*kept) < 2e-3


class Sometimes(nn.Module):
    """A frozen layer, one that some micro-batches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.sometimes = nn.Linear(20, 20)
        self.fc = nn.Linear(20, rig.CLASSES)
        self.never = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.frozen(x))
        if x.mean() > 0:
            x = self.sometimes(x)
        logits: torch.Tensor = self.fc(x)
        return logits


@pytest.mark.parametrize("direction", ["local_past", "same_sample"])
@pytest.mark.parametrize("granularity", ["window", "micro"])
def test_frozen_and_unused_parameters_have_no_direction(tmp_path: Path, direction: str, granularity: str) -> None:
    """One rank, and two as threads, which use layers in different micro-batches: float64, 1e-12 after 7 updates."""
    stages = (Stage(190, 50, 0.05), Stage(230, 77, 0.02))
    workers = None if (direction, granularity) == ("same_sample", "micro") else 4
    extrapolation = away(direction, workers, granularity=granularity, ratio=1.0)
    first = rig.built(Sometimes)
    ends = []
    for world_size in (1, 2):
        models = [copy.deepcopy(first) for _ in range(world_size)]
        seen = places(models[0])
        config = rig.settings(stages, bucket_bytes=500, extrapolation=extrapolation)

        def main(comm: Communicator, models: list[nn.Module] = models, config: Config = config) -> list[rig.Tensors]:
            model = models[comm.rank]
            trip = rig.trained(comm, config, model, rig.memory(rig.FLAT), tmp_path / str(comm.world_size))
            return list(trip.run.replica.extrapolation.own_state().values())

        kept = [state for states in ThreadWorld(world_size).run(main) for state in states]
        for name in ("frozen.weight", "never.weight"):
            assert len({place[name].numpy().tobytes() for place in seen}) == 1
        for state in kept:
            assert not any(name.startswith("frozen") for name in state)
            assert state["never.weight"].abs().max() == 0
        ends.append(rig.snapshot(models[0]))
    assert rig.worst_error(ends[1], ends[0]) < 1e-12


def test_ranks_forget_alike_after_a_window_that_was_skipped(tmp_path: Path) -> None:
    """Two virtual workers on one rank and on two, the fifth sample infinitely curved: the same weights, bit for bit."""
    source = bowls.Positions(lambda p: (math.inf if p == 4 else (1.0, 3.0)[p % 2], 0.0))
    runs = []
    for world_size in (1, 2):
        models = [bowls.Bowl(1.0) for _ in range(world_size)]
        config = rig.skipping(rig.settings((Stage(12, 2, 0.1),), micro_batch=1, extrapolation=away("local_past", 2)))

        def main(comm: Communicator, models: list[bowls.Bowl] = models, config: Config = config) -> list[str]:
            watch = rig.Watch()
            rig.trained(comm, config, models[comm.rank], source, tmp_path / str(comm.world_size), watch)  # type: ignore[arg-type]
            return watch.digests

        runs += ThreadWorld(world_size).run(main)
    assert len(runs[0]) == 6
    assert runs[0] == runs[1] == runs[2]
