"""The plan: what a run would do, and what it refuses, without running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdbs import plan, train
from hvdbs.config import Config, DataConfig, ModelConfig
from hvdbs.errors import HvdbsError
from hvdbs.planning import meta_model, warnings
from hvdbs.planning import plan as plan_rows
from hvdbs.schedule import ScheduleConfig, StageConfig
from hvdbs.stage_tables import resolve


def config(batches: list[int], micro_batch: int = 8, image_size: int = 16) -> Config:
    return Config(
        micro_batch=micro_batch,
        data=DataConfig(kind="synthetic", image_size=image_size, train_samples=1000, val_samples=10),
        model=ModelConfig("resnet8", classes=10),
        schedule=ScheduleConfig("table", stages=tuple(StageConfig(b, 0.1, samples=500) for b in batches)),
    )


def rows_of(run: Config, world_size: int):  # type: ignore[no-untyped-def]
    return plan_rows(run, resolve(run.schedule, 1000), 1000, meta_model(run, 10), world_size)


def test_the_rows_add_up() -> None:
    rows = rows_of(config([50, 77]), 3)
    assert [(r.steps, r.samples_begin, r.samples_end) for r in rows] == [(10, 0, 500), (7, 500, 1039)]
    assert [(r.micro_batches_busiest, r.micro_batches_idlest) for r in rows] == [(3, 2), (4, 3)]
    assert rows[0].idle_share == pytest.approx(1 - 7 / 9)
    assert rows[0].effective_lr == pytest.approx(1.0)


def test_many_idle_turns_are_warned_of_with_a_better_micro_batch() -> None:
    lines = warnings(rows_of(config([36]), 4))  # 5 micro-batches of 8 on 4 ranks: 3 of 8 turns idle
    assert (
        len(lines) == 1
        and "38% of the ranks' turns are idle" in lines[0]
        and "micro_batch 9 would do better" in lines[0]
    )
    assert warnings(rows_of(config([32]), 4)) == []


def test_a_single_sample_is_refused_only_where_batch_norm_cannot_take_it() -> None:
    with pytest.raises(HvdbsError, match=r"global_batch: 49 .*4 pixels.*48 or 50"):
        rows_of(config([49], image_size=4), 2)  # 4 pixels: the last stage has one, so a sample has no variance
    rows_of(config([49], image_size=16), 2)
    with pytest.raises(HvdbsError, match=r"micro_batch: 1 .*at least 2"):
        rows_of(config([8], micro_batch=1, image_size=4), 2)


def test_plan_loads_neither_mpi_nor_horovod_nor_dali() -> None:
    code = (
        "import sys; from hvdbs import plan; assert plan.main(['--config', 'imagenet-resnet50', '--np', '2048']) == 0; "
        "assert not {m.split('.')[0] for m in sys.modules} & {'horovod', 'mpi4py', 'nvidia'}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "115,310,592 samples on 2,048 ranks" in done.stdout


def test_a_plan_that_would_be_refused_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--config", "imagenet-resnet50", "--np", "0"]) == 2
    assert capsys.readouterr().err == "hvdbs: error: --np: 0 must be at least 1\n"


def test_after_a_run_its_noise_scale_stands_beside_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["--data.kind", "synthetic", "--data.train_samples", "400", "--data.val_samples", "20", "--model.classes"]
    changes += ["4", "--dtype", "float32", "--model.width", "4", "--logging.tensorboard", "false", "--threads", "1"]
    stages = "[{epochs: 2, global_batch: 32, lr: 0.1}, {epochs: 2, global_batch: 64, lr: 0.1}]"
    out = tmp_path / "run"
    assert train.main(["--config", "digits", *changes, "--schedule.stages", stages, "--out", str(out)]) == 0
    capsys.readouterr()
    assert plan.main(["--after", str(out), "--np", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines[lines.index("stage  global_batch  noise scale") + 2 :]]
    assert [row[:2] for row in table[:2]] == [["0", "32"], ["1", "64"]]
    assert float(table[1][2].replace(",", "")) > 0
    assert plan.main(["--after", str(tmp_path)]) == 2
    assert "is no run directory: it has no config.yaml" in capsys.readouterr().err
