"""Config: what is read is what was written, and only what changes the training changes its digest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from hvdbs import command_line
from hvdbs.command_line import parse, recipes
from hvdbs.config import Config, DataConfig, LoggingConfig, ModelConfig, digest, to_yaml
from hvdbs.errors import HvdbsError
from hvdbs.plan import describe
from hvdbs.schedule import ScheduleConfig, StageConfig


def parser() -> ArgumentParser:
    return command_line.parser("test", "", "")


def test_a_config_written_as_yaml_is_read_back_the_same(tmp_path: Path) -> None:
    stages = (StageConfig(50, 0.1, 1e-4, epochs=1.5), StageConfig(77, 0.05, samples=300))
    config = Config(seed=7, schedule=ScheduleConfig("table", stages=stages), model=ModelConfig("resnet8", dropout=0.5))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert parse(parser(), ["--config", str(path)])[0] == config


def test_the_command_line_overrides_the_file_field_by_field(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("seed: 3\nschedule: {method: constant, epochs: 2, global_batch: 8, lr: 0.1}\n")
    read, _ = parse(parser(), ["--schedule.lr", "0.5", "--config", str(path), "--data.augment.flip", "false"])
    assert (read.seed, read.schedule.lr, read.schedule.global_batch, read.data.augment.flip) == (
        3,
        0.5,
        8,
        False,
    )


@pytest.mark.parametrize("name", recipes())
def test_every_packaged_recipe_can_be_planned(name: str) -> None:
    config, _ = parse(parser(), ["--config", name])
    sized = replace(
        config,
        data=replace(config.data, train_samples=config.data.train_samples or 1437),
        model=replace(config.model, classes=config.model.classes or 10),
    )
    assert "total" in describe(sized, 16)


@pytest.mark.parametrize("name", recipes())
def test_printed_config_of_a_recipe_is_the_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        parse(parser(), ["--config", name, "--print_config"])
    assert done.value.code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert parse(parser(), ["--config", str(path)])[0] == parse(parser(), ["--config", name])[0]


def test_the_digest_sees_what_is_trained_and_nothing_else() -> None:
    base = Config()
    same = [
        replace(base, threads=3),
        replace(base, device="cpu"),
        replace(base, logging=LoggingConfig(every_steps=1)),
        replace(base, data=replace(base.data, root="/elsewhere", threads=9)),
    ]
    other = [
        replace(base, seed=1),
        replace(base, micro_batch=8),
        replace(base, data=DataConfig(image_size=8)),
        replace(base, model=ModelConfig("resnet8")),
    ]
    assert {digest(config) for config in same} == {digest(base)}
    assert len({digest(config) for config in [base, *other]}) == 1 + len(other)


@pytest.mark.parametrize(
    "text",
    [
        "schedule: {method: table, stages: [{class_path: trap.X}]}",
        "schedule: {method: table, stages: [trap.X]}",
        "data: {class_path: trap.X}",
        "data: trap.X",
    ],
)
def test_a_config_cannot_name_code_to_import(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w')\nclass X: pass\n")
    (tmp_path / "config.yaml").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HvdbsError, match=r"is the name of a class|no such field|is not a mapping"):
        parse(parser(), ["--config", str(tmp_path / "config.yaml")])
    assert not (tmp_path / "made").exists()


def test_yaml_tags_are_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"seed: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n")
    with pytest.raises(HvdbsError, match="cannot be read as YAML"):
        parse(parser(), ["--config", str(path)])
    assert not (tmp_path / "made").exists()
