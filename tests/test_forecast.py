"""What a plan says of seconds: the real buckets, the labels of what was not measured, a table that fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from calibrations import calibration

from hvdbs import plan
from hvdbs.calibration import network, read, to_json
from hvdbs.comm.local import Solo
from hvdbs.config import CommunicationConfig, Config, DataConfig, ModelConfig
from hvdbs.costs import LinkConfig
from hvdbs.errors import HvdbsError
from hvdbs.factors import candidates, choices
from hvdbs.flops import work
from hvdbs.forecast import forecast, transfers
from hvdbs.measuring import calibrate
from hvdbs.planning import linear_layers, meta_model, update_bytes
from hvdbs.planning import plan as plan_rows
from hvdbs.schedule import ScheduleConfig, StageConfig
from hvdbs.stage_tables import resolve


def config(batches: tuple[int, ...] = (16, 64), **changes) -> Config:  # type: ignore[no-untyped-def]
    fields = {
        "micro_batch": 8,
        "data": DataConfig(kind="synthetic", image_size=16, train_samples=512, val_samples=10),
        "model": ModelConfig("resnet8", classes=10),
        "schedule": ScheduleConfig("table", stages=tuple(StageConfig(b, 0.1, samples=512) for b in batches)),
    }
    return Config(**{**fields, **changes})


def of(run: Config, world_size: int, calibrated=None, named=None):  # type: ignore[no-untyped-def]
    model, schedule = meta_model(run, 10), resolve(run.schedule, 512)
    rows = plan_rows(run, schedule, 512, model, world_size)
    return forecast(run, model, linear_layers(run, model), rows, calibrated or calibration(), named)


def test_one_rank_is_its_passes_and_growing_the_batch_saves_the_optimizer() -> None:
    """16 samples: 10 + 20 + 32 + 2 ms; 64: 7 further ones. On 1 rank the same work, so an efficiency of 1."""
    stages, machine = of(config(), 1)
    assert [one.update.seconds for one in stages] == pytest.approx([0.064, 0.03 + 7 * 0.032 + 0.002])
    assert [one.efficiency for one in stages] == [1.0, 1.0]
    assert [one.gain for one in stages] == pytest.approx([1.0, 64 / 0.256 / (16 / 0.064)])
    assert machine.beyond == () and machine.links is None
    assert [one.low / one.update.seconds for one in stages] == pytest.approx([0.9, 0.9])
    assert [one.high / one.update.seconds for one in stages] == pytest.approx([1.1, 1.1])


@pytest.mark.parametrize("scheme", ["dense", "factors"])
def test_the_transfers_of_an_update_hold_the_planned_bytes(scheme: str) -> None:
    run = config(communication=CommunicationConfig(scheme=scheme, wire="fp16"))  # type: ignore[arg-type]
    model = meta_model(run, 10)
    own = candidates(run, linear_layers(run, model), [16], 2)
    chosen = [choice for choice in choices(run, own, 16, 2) if choice.factors]
    assert bool(chosen) == (scheme == "factors")
    sent = transfers(run, model, own, chosen, {})
    assert sum(one.nbytes for one in sent) == update_bytes(model, run, chosen)
    assert sum(one.gathered for one in sent) == len(chosen)


def test_what_was_not_measured_is_said_and_widens_the_interval() -> None:
    within, machine = of(config(), 2)
    assert machine.beyond == ()
    for world_size, named, changes, said in (
        (4, None, {}, "4 ranks, measured on 2"),
        (2, network("1gbit"), {}, "network 1gbit by name"),
        (2, None, {"micro_batch": 16}, "micro_batch 16, measured at 8"),
        (2, None, {"communication": CommunicationConfig(wire="fp16")}, "wire fp16"),
    ):
        beyond, other = of(config(**changes), world_size, named=named)
        assert len(other.beyond) == 1 and said in other.beyond[0]
        for far, near in zip(beyond, within, strict=True):
            assert far.low <= far.update.seconds <= far.high
            assert far.high / far.low > near.high / near.low
    with pytest.raises(HvdbsError, match="knows no link; --network"):
        of(config(), 2, calibration(world_size=1))
    alone, other = of(config(), 2, calibration(world_size=1), network("10gbit"))
    assert alone[0].update.exposed > 0 and "network 10gbit" in " ".join(other.beyond)


def test_another_model_goes_by_its_flops() -> None:
    run = config(model=ModelConfig("resnet20", classes=10))
    flops, _ = work(meta_model(run, 10), (3, 16, 16), torch.float32)
    own, _ = work(meta_model(config(), 10), (3, 16, 16), torch.float32)
    known = calibration()
    counted = type(known)(
        **{**vars(known), "passes": type(known.passes)(**{**vars(known.passes), "flops_per_sample": own})}
    )
    stages, machine = of(run, 1, counted)
    assert stages[0].update.seconds - 0.002 == pytest.approx(0.062 * flops / own)
    assert "resnet20 at 16 pixels" in machine.beyond[0]
    with pytest.raises(HvdbsError, match="FLOPs cannot be counted"):
        of(run, 1)


def test_flops_of_a_net_by_hand_and_gradients_that_come_from_the_end() -> None:
    """Two linear layers, 2 M N forward each; backward: weight and input of the second, weight of the first."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 4))
    flops, ready = work(model, (6,), torch.float32)
    first, second = 2 * 60, 2 * 40
    assert flops == first * 2 + second * 3
    assert ready["0.weight"] == 1.0
    assert second / (2 * second + first) <= ready["2.weight"] < ready["0.weight"]


def test_slow_links_choose_factors_and_expose_less() -> None:
    """AlexNet over 100 Mbit/s: its wide layers by factors, in a small part of the time."""
    changes = {"model": ModelConfig("alexnet", classes=10), "micro_batch": 2}
    changes["data"] = DataConfig(kind="synthetic", image_size=64, train_samples=512, val_samples=10)
    link = LinkConfig(11.5e6, 5e-5)
    known = calibration("alexnet", 2, 64)
    dense, hybrid = (
        of(
            config((4,), **changes, communication=CommunicationConfig(scheme=s, link=link)),
            2,
            known,
            network("100mbit"),
        )
        for s in ("dense", "hybrid")
    )
    assert dense[0][0].update.sent_bytes > 20 * hybrid[0][0].update.sent_bytes
    assert dense[0][0].update.seconds > 5 * hybrid[0][0].update.seconds


def test_the_plan_prints_a_table_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "node.json"
    path.write_bytes(to_json(calibration("resnet50", 32, 224, rate=3e9)))
    words = [
        "--config",
        "imagenet-resnet50-sebs",
        "--np",
        "256",
        "--calibration",
        str(path),
        "--network",
        "25gbit,20us",
    ]
    assert plan.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(next(line for line in lines if line.startswith("stage  global_batch  updates")))
    assert max(map(len, lines[start:])) <= 120
    assert any(line.startswith("extrapolation: 256 ranks, measured on 2; network 25gbit,20us") for line in lines)
    assert "bytes_per_second: 2.88e+09" in lines[-1] and "flops_per_second: 1e+11" in lines[-1]
    assert plan.main([*words[:4], "--network", "25gbit"]) == 2
    assert "--network: 25gbit is read with --calibration" in capsys.readouterr().err


def test_a_short_calibration_predicts_what_it_measured(tmp_path: Path) -> None:
    """On one rank, real passes: every parameter is ready within backward, the last at its end."""
    run = config(threads=1)
    made = calibrate(run, Solo(), 10, lambda text: None, seconds=0.5)
    path = tmp_path / "own.json"
    path.write_bytes(to_json(made))
    assert read(path) == made
    model = meta_model(run, 10)
    assert set(made.passes.ready) == {name for name, _ in model.named_parameters()}
    assert 0.9 <= max(made.passes.ready.values()) <= 1.0
    assert made.passes.ready["fc.weight"] < made.passes.ready["conv.weight"]
    assert made.links == () and made.passes.data is not None and made.passes.data > 0
    assert made.passes.again.median > made.passes.backward_again.median > 0
    assert made.passes.product is not None
