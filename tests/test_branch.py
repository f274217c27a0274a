"""--branch-from: a new run, under another config, from the state of another at that sample."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml

from hvdbs import train

CONFIG = """
seed: 5
micro_batch: 6
device: cpu
threads: 1
data: {kind: synthetic, image_size: 8, resize: 8, train_samples: 72, val_samples: 12, threads: 1}
model: {name: resnet8, classes: 5, width: 4, dropout: 0.2}
optimizer: {momentum: 0.8}
schedule:
  method: vbs
  stage_samples: [144, 180, 90]
  global_batch: 12
  largest_batch: LARGEST
  lr: 0.1
  weight_decay: 1.0e-3
  factor: 0.5
  autotune: {mode: MODE, horizon: 0.5}
checkpoint: {every_samples: 1, every_minutes: 0, keep_last: 100}
evaluation: {every_epochs: 0}
logging: {every_steps: 1, tensorboard: false}
"""


def config(folder: Path, mode: str, largest: int, **changed: str) -> Path:
    text = CONFIG.replace("MODE", mode).replace("LARGEST", str(largest))
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / f"{mode}-{largest}-{len(changed)}.yaml"
    path.write_text(text)
    return path


def run(path: Path, out: Path, *options: str) -> dict[str, object]:
    assert train.main(["--config", str(path), "--out", str(out), *options]) == 0
    summary: dict[str, object] = json.loads((out / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parent")
    run(config(folder, "band", 36), folder / "run")
    return folder / "run"


@pytest.mark.parametrize(("mode", "largest"), [("off", 60), ("rule", 60), ("band", 60), ("band", 36)])
def test_a_branch_at_the_boundary_is_the_run_that_had_its_config_from_the_start(
    parent: Path, tmp_path: Path, mode: str, largest: int
) -> None:
    """Stage 0 is the same for all of them: 12 updates of 12 samples."""
    path = config(tmp_path, mode, largest)
    whole = run(path, tmp_path / "whole")
    branched = run(path, tmp_path / "branch", "--branch-from", str(parent / "checkpoints" / "step-12"))
    for name in ("parameter_digest", "steps", "samples_seen", "loss", "top1"):
        assert branched[name] == whole[name], name
    assert pd.read_csv(tmp_path / "branch" / "steps.csv").step.min() == 13
    later = pd.read_csv(tmp_path / "whole" / "decisions.csv").query("step > 12")
    assert pd.read_csv(tmp_path / "branch" / "decisions.csv").equals(later.reset_index(drop=True))


def test_a_branch_in_the_middle_of_a_stage_under_the_same_config_ends_in_the_same_bits(
    parent: Path, tmp_path: Path
) -> None:
    whole = json.loads((parent / "summary.json").read_text())
    again = run(
        config(tmp_path, "band", 36), tmp_path / "out", "--branch-from", str(parent / "checkpoints" / "step-14")
    )
    assert again["parameter_digest"] == whole["parameter_digest"]


def test_a_branch_says_where_it_is_from_and_in_what_it_differs(parent: Path, tmp_path: Path) -> None:
    path = config(tmp_path, "rule", 60)
    run(path, tmp_path / "out", "--branch-from", str(parent / "checkpoints" / "step-12"))
    said = json.loads((tmp_path / "out" / "parent.json").read_text())
    assert (said["step"], said["samples_seen"]) == (12, 144)
    assert said["checkpoint"] == str(parent / "checkpoints" / "step-12")
    assert said["differs"] == {
        "schedule.autotune.mode": {"parent": "band", "branch": "rule"},
        "schedule.largest_batch": {"parent": 36, "branch": 60},
    }
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["schedule"]["largest_batch"] == 60


@pytest.mark.parametrize(
    ("changed", "options", "line"),
    [
        (
            {"width: 4": "width: 8"},
            [],
            "has model.width 4, not 8; a branch keeps the model, its dtype and the optimizer",
        ),
        (
            {"{momentum: 0.8}": "{momentum: 0, name: adagrad}"},
            [],
            "has optimizer.name sgd, not adagrad; a branch keeps",
        ),
        ({}, ["--resume", "auto"], "--branch-from and --resume: both are given, but one starts"),
        ({}, ["--branch-from", "runs/none"], "--branch-from: runs/none does not exist"),
        ({}, ["--branch-from", "auto"], "--branch-from: auto is no checkpoint"),
    ],
)
def test_what_cannot_be_a_branch_is_refused(
    parent: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, str],
    options: list[str],
    line: str,
) -> None:
    path = config(tmp_path, "rule", 60, **changed)
    words = ["--config", str(path), "--out", str(tmp_path / "out")]
    assert train.main([*words, "--branch-from", str(parent / "checkpoints" / "step-12"), *options]) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_band_needs_a_parent_that_measured(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config(tmp_path, "rule", 36), tmp_path / "rule")
    words = ["--config", str(config(tmp_path, "band", 36)), "--out", str(tmp_path / "out")]
    assert train.main([*words, "--branch-from", str(tmp_path / "rule" / "checkpoints" / "step-12")]) == 2
    assert "holds no measurements for schedule.autotune.mode band" in capsys.readouterr().err
