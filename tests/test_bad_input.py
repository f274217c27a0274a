"""Each documented rule, broken through the real entries: one line with the value, the rule and what would do; exit 2.

Nothing is written, nothing is trained. What only several ranks can get wrong is in tests/jobs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy
import pytest
import torch
import yaml
from PIL import Image

from hvdbs import command_line, plan, planning, train
from hvdbs.checkpoint import State, _fingerprint, find, load
from hvdbs.config import Config
from hvdbs.errors import HvdbsError
from hvdbs.launch import __main__ as launch
from hvdbs.rules import check
from hvdbs.stage_tables import resolve

pytestmark = pytest.mark.usefixtures("parsers")

GOOD = """\
micro_batch: 8
threads: 1
data: {kind: synthetic, image_size: 8, resize: 8, train_samples: 64, val_samples: 20, threads: 1}
model: {name: resnet8, classes: 4, width: 4}
schedule: {method: constant, epochs: 2, global_batch: 16, lr: 0.1}
checkpoint: {every_samples: 32}
logging: {tensorboard: false, every_steps: 1}
"""
CONSTANT = "{method: constant, epochs: 2, global_batch: 16, lr: 0.1}"
TABLE = "schedule: {method: table, stages: [%s]}"


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to stand in, and torch as it was: a run chooses threads and kernels for its process."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def files(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Everything below ``folder``, with what any write to it would change."""
    found = {path: path.stat() for path in folder.rglob("*")}
    return {path: (status.st_ino, status.st_mtime_ns, status.st_size) for path, status in found.items()}


Refused = Callable[..., str]


def dotted(kind: type, prefix: str = "") -> Iterator[str]:
    """Every section and field of a config, those of the rows of a stage table as stages[]."""
    for name, hint in get_type_hints(kind).items():
        yield f"{prefix}{name}"
        for part in (hint, *get_args(hint)):
            if is_dataclass(part):
                yield f"{prefix}{name}{'' if part is hint else '[]'}"
                yield from dotted(part, f"{prefix}{name}{'' if part is hint else '[]'}.")


def options(make: Callable[[], argparse.ArgumentParser]) -> set[str]:
    return {word for action in make()._actions for word in action.option_strings}


FIELDS = {*dotted(Config), "schedule.stage_epochs[]", "schedule.stage_samples[]", "schedule.milestones[]"}
OPTIONS = options(train.parser) | options(plan.parser) | options(launch.parser)


def assert_names_exist(line: str) -> None:
    """What a refusal is about, and what it asks whether it was meant, is a field of the config, an option or a file."""
    about, _, rest = line.partition(": ")
    if "no such " not in rest:
        for name in about.split(" and "):
            known = re.sub(r"\[\d+\]", "[]", name) in FIELDS or name in OPTIONS
            assert known or "/" in name or name in ("checkpoint", "command line"), line
    for name in re.findall(r"did you mean ([\w.-]+)\?", rest) if "no such " in rest else ():
        assert name != about and (name in OPTIONS if about.startswith("-") else name in FIELDS), line


@pytest.fixture
def refused(work: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run an entry that is to refuse its arguments, and return the line it says."""

    def run(*arguments: str, config: str | None = GOOD, entry: Callable[[list[str]], int] = train.main) -> str:
        if config is not None:
            Path("good.yaml").write_text(config)
            arguments = ("--config", "good.yaml", *arguments)
        before = files(work)
        assert entry(list(arguments)) == 2
        said = capsys.readouterr()
        assert said.err.startswith("hvdbs: error: "), said.err
        assert said.err.count("\n") == 1, said.err
        assert said.err.endswith("\n")
        assert files(work) == before
        line = said.err.removeprefix("hvdbs: error: ").rstrip("\n")
        assert_names_exist(line)
        return line

    return run


# --- config files


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            "a: [1,\nb: }",
            "--config: good.yaml cannot be read as YAML: line 2: expected the node content, but found '}'",
        ),
        ("- seed", "--config: good.yaml holds a list, not a mapping of fields; --print_config shows them all"),
        ("", "--config: good.yaml holds nothing, not a mapping of fields; --print_config shows them all"),
        (f"{GOOD}seed: 1\nseed: 2\n", "--config: good.yaml cannot be read as YAML: line 9: seed stands there twice"),
        (f"{GOOD}micro_bach: 8\n", "micro_bach: no such field; did you mean micro_batch?"),
        (f"{GOOD}optimiser: {{momentum: 0.9}}\n", "optimiser: no such field; did you mean optimizer?"),
        (f"{GOOD}lr: 0.1\n", "lr: no such field; did you mean schedule.lr?"),
        (
            GOOD.replace("global_batch", "globl_batch"),
            "schedule.globl_batch: no such field; did you mean schedule.global_batch?",
        ),
        (f"{GOOD}optimizer: 0.9\n", "optimizer: 0.9 is not a mapping of its fields (name, momentum, nesterov, "),
        (f"{GOOD}optimizer:\n", "optimizer: null is not a mapping of its fields (name, momentum, nesterov, "),
        (f"{GOOD}optimizer: [sgd]\n", "optimizer: ['sgd'] is not a mapping of its fields (name, momentum, nesterov, "),
        (
            GOOD.replace("micro_batch: 8", "micro_batch: null"),
            "micro_batch: null is no value for this field; leave it out",
        ),
        (GOOD.replace("micro_batch: 8", "micro_batch: 8.5"), "micro_batch: 8.5 is not a whole number"),
        (GOOD.replace("epochs: 2", "epochs: two"), "schedule.epochs: two is not a number or null"),
        (GOOD.replace("lr: 0.1", "lr: [0.1]"), "schedule.lr: [0.1] is not a number or null"),
        (f"{GOOD}optimizer: {{nesterov: maybe}}\n", "optimizer.nesterov: maybe is not true or false"),
        (f"{GOOD}dtype: float46\n", "dtype: float46 is none of float32, float64; did you mean float64?"),
        (
            GOOD.replace("constant", "tabel"),
            "schedule.method: tabel is none of constant, multistep, table, classical, smith, sebs, vbs; did you mean",
        ),
        (GOOD.replace("resize: 8", "mean: [0.5, 0.5]"), "data.mean: [0.5, 0.5] is not a list of 3 numbers"),
        (GOOD.replace("resize: 8", "mean: [0.5, 0.5, .nan]"), "data.mean: [0.5, 0.5, nan] must be finite"),
        (
            GOOD.replace(f"schedule: {CONSTANT}", TABLE % "{epochs: 1, globl_batch: 16, lr: 0.1}"),
            "schedule.stages: globl_batch is no field of a row; did you mean global_batch?",
        ),
        (
            GOOD.replace(f"schedule: {CONSTANT}", TABLE % "{epochs: 1, lr: 0.1}"),
            "schedule.stages: a row has no global_batch; it needs global_batch, lr, and epochs or samples",
        ),
        (
            GOOD.replace(f"schedule: {CONSTANT}", TABLE % "{epochs: 1, global_batch: many, lr: 0.1}"),
            "schedule.stages: global_batch: many is not a whole number",
        ),
        (
            GOOD.replace(f"schedule: {CONSTANT}", TABLE % "{epochs: 1, global_batch: 16, lr: null}"),
            "schedule.stages",
        ),
        (GOOD.replace(f"schedule: {CONSTANT}", TABLE % "16"), "schedule.stages: 16 is not a row such as {epochs: 1, "),
        (f"{GOOD}optimizer: {{class_path: os.system}}\n", "optimizer.class_path: no such field"),
        (f"{GOOD}x: !!python/object/apply:os.system [true]\n", "line 8: could not determine a constructor for the tag"),
        ("[" * 5000, "--config: good.yaml cannot be read as YAML: it is nested too deeply"),
        (f"{GOOD}seed: !!timestamp a\n", "--config: good.yaml cannot be read as YAML: "),
        (f"{GOOD}seed: !!int a\n", "--config: good.yaml cannot be read as YAML: invalid literal for int()"),
        ("a: 1\n\tb: 2\n", "--config: good.yaml cannot be read as YAML: line 2: found character '\\t'"),
        (f"{GOOD}---\nseed: 1\n", "--config: good.yaml cannot be read as YAML: line 8: but found another document"),
        (
            f"{GOOD}data: &a {{root: *a}}\n",
            "--config: good.yaml cannot be read as YAML: line 8: data stands there twice",
        ),
        (GOOD.replace("lr: 0.1", "lr: '0,1'"), "schedule.lr: 0,1 is not a number or null"),
        (GOOD.replace("lr: 0.1", "lr: true"), "schedule.lr: True is not a number or null"),
        (
            GOOD.replace("global_batch: 16", "global_batch: 8k"),
            "schedule.global_batch: 8k is not a whole number or null",
        ),
        (GOOD.replace("global_batch: 16", "global_batch: 1:30"), "line 5: 1:30 is no number, only a time"),
        (GOOD.replace("global_batch: 16", "global_batch: '1:30'"), "schedule.global_batch: 1:30 is not a whole number"),
        (GOOD.replace("epochs: 2", "epochs: '1:30'"), "schedule.epochs: 1:30 is not a number or null"),
        (GOOD.replace("epochs: 2", "epochs: 0b11"), "schedule.epochs: 0b11 is not a number or null"),
        (GOOD.replace("lr: 0.1", "lr: yes"), "schedule.lr: yes is not a number or null"),
        (GOOD.replace("global_batch: 16", "global_batch: 16.5"), "schedule.global_batch: 16.5 is not a whole number"),
        (GOOD.replace("global_batch: 16", "global_batch: 1e30"), "schedule.global_batch: 1e+30 must lie between -2^63"),
        (
            "data.kind: synthetic\n",
            "data.kind: is a name for the command line; in a file kind stands under data: {kind: ...}",
        ),
        ("data: {augment.flip: true}", "in a file flip stands under data.augment: {flip: ...}"),
        (
            GOOD.replace("global_batch: 16", "global_batch: 2020-01-01"),
            "schedule.global_batch: 2020-01-01 is not a whole",
        ),
        (f'{GOOD}device: "\\e[31mred"\n', "device: \\x1b[31mred is none of auto, cpu, cuda"),
        (f'{GOOD}device: "{"x" * 100000}"\n', "xxx [...] xxx"),
        (
            GOOD.replace("threads: 1}", 'threads: 1, root: "a\\0b"}'),
            "data.root: a\\x00b holds a character that no path",
        ),
        (GOOD.replace("threads: 1}", 'threads: 1, root: ""}'), "data.root: '' is empty; leave it out, or give a path"),
    ],
)
def test_a_config_file_that_cannot_be_understood(refused: Refused, config: str, line: str) -> None:
    assert line in refused(config=config)


def test_a_config_that_is_no_text(refused: Refused) -> None:
    Path("latin.yaml").write_bytes("seed: 1  # ä".encode("latin-1"))
    assert refused("--config", "latin.yaml", config=None).startswith("--config: latin.yaml is no text in UTF-8: ")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("digit", "--config: digit is neither a file nor a packaged recipe; did you mean digits?"),
        ("digits.yaml", "--config: digits.yaml is not a file; packaged recipes: "),
        ("./", "--config: ./ is a folder; name a YAML file"),
        ("a/b", "--config: a/b is not a file; packaged recipes: "),
        ("", "--config: '' is neither a file nor a packaged recipe; known: bowl, digits, "),
    ],
)
def test_a_config_that_is_not_there(refused: Refused, name: str, line: str) -> None:
    assert line in refused("--config", name, config=None)


def test_a_folder_in_place_of_its_config(refused: Refused, run: Path) -> None:
    for folder in ("run", "run/", "run/checkpoints/step-8"):
        said = refused("--config", folder, config=None)
        assert said == f"--config: {folder} is a folder; did you mean run/config.yaml?"
    (run / "config.yaml").rename("mine.yaml")
    assert refused("--config", "mine", config=None).endswith("; did you mean mine.yaml?")
    Path("mine.yaml").rename("mine")  # a file without a suffix is a file all the same
    assert plan.main(["--config", "mine"]) == 0


@pytest.mark.parametrize(
    ("number", "value"),
    [("1e-4", 1e-4), ("1E-4", 1e-4), ("010", 10.0), ("1_000", 1000.0), ("0x10", 16.0), ("5", 5.0), (".5", 0.5)],
)
def test_numbers_are_read_as_people_write_them(
    work: Path, capsys: pytest.CaptureFixture[str], number: str, value: float
) -> None:
    """YAML 1.1 takes 1e-4 for a word and 010 for eight; in a file, quoted, or as an option they are the same number."""
    for text in (number, f'"{number}"'):
        config = write(GOOD.replace("lr: 0.1", f"lr: {text}"))
        for arguments in ([], ["--schedule.lr", number]):
            with pytest.raises(SystemExit):
                train.main(["--config", config, *arguments, "--print_config"])
            assert yaml.safe_load(capsys.readouterr().out)["schedule"]["lr"] == value


@pytest.mark.parametrize("number", ["1e3", "1000.0", "1_000", "0x3e8", "1000"])
def test_whole_numbers_may_be_written_as_any_number(work: Path, number: str) -> None:
    for text in (number, f'"{number}"'):
        for config, *more in (
            [GOOD.replace("global_batch: 16", f"global_batch: {text}")],
            [GOOD, "--schedule.global_batch", number],
        ):
            made, _ = command_line.parse(train.parser(), ["--config", write(config), *more])
            assert made.schedule.global_batch == 1000 and type(made.schedule.global_batch) is int


# --- the command line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--config", "--config: expected one argument"),
        ("--lr 0.1", "--lr: no such option; did you mean --schedule.lr?"),
        (
            "--checkpoint.every_minute 3",
            "--checkpoint.every_minute: no such option; did you mean --checkpoint.every_minutes?",
        ),
        ("--resme auto", "--resme: no such option; did you mean --resume?"),
        ("somewhere", "somewhere: no such option; --help lists all"),
        ("--schedule.lr", "--schedule.lr: expected one argument"),
        ("--schedule.lr high", "schedule.lr: high is not a number or null"),
        ("--schedule.lr 1:30", "schedule.lr: 1:30 is not a number or null"),
        ("--micro_batch 1:30", "micro_batch: 1:30 is not a whole number"),
        (
            "--model resnet8",
            "model: resnet8 is not a mapping of its fields; set them one by one, as --model.NAME VALUE",
        ),
        ("--seed 1.5", "seed: 1.5 is not a whole number"),
        ("--seed -1", "seed: -1 must lie in [0, 2^63)"),
        ("--seed 9223372036854775808", "seed: 9223372036854775808 must lie in [0, 2^63)"),
        ("--micro_batch 0", "micro_batch: 0 must be at least 1"),
        ("--threads 0", "threads: 0 must be at least 1"),
        ("--data.image_size 0", "data.image_size: 0 must be at least 1"),
        ("--data.read_ahead 0", "data.read_ahead: 0 must be at least 1"),
        ("--data.threads 0", "data.threads: 0 must be at least 1"),
        ("--data.train_samples 0", "data.train_samples: 0 must be at least 1"),
        ("--data.val_samples 0", "data.val_samples: 0 must be at least 1"),
        ("--data.resize 7", "data.resize: 7 must be at least data.image_size 8"),
        ("--data.std [0,1,1]", "data.std: [0.0, 1.0, 1.0] must be positive"),
        (
            "--data.augment.scale [0,1]",
            "data.augment.scale: [0.0, 1.0] must increase from above 0 and end at 1 at most",
        ),
        ("--data.augment.scale [0.5,1.5]", "data.augment.scale: [0.5, 1.5] must increase from above 0 and end at 1"),
        ("--data.augment.ratio [2,1]", "data.augment.ratio: [2.0, 1.0] must increase from above 0"),
        ("--data.train_samples null", "data.train_samples: none given but synthetic data has no size of its own"),
        ("--model.classes null", "model.classes: none given but synthetic data has no size of its own"),
        ("--data.kind images", "data.root: none given but images need a folder; give one, or data.kind synthetic"),
        ("--model.classes 1", "model.classes: 1 must be at least 2, or there is nothing to tell apart"),
        ("--model.width 0", "model.width: 0 must be at least 1"),
        ("--model.dropout 1", "model.dropout: 1.0 must lie in [0, 1)"),
        ("--model.name resnet9", "model.name: resnet9 is not known; did you mean resnet8?"),
        ("--model.name resnet18 --model.dropout 0.5", "model.dropout: 0.5 is read by resnet8 and resnet20 alone"),
        (
            "--model.name vgg11 --model.zero_init_last_gamma true",
            "model.zero_init_last_gamma: True needs residual blocks, which vgg11 has not",
        ),
        ("--loss.label_smoothing 1", "loss.label_smoothing: 1.0 must lie in [0, 1)"),
        ("--optimizer.momentum 1", "optimizer.momentum: 1.0 must lie in [0, 1)"),
        (
            "--communication.wire fp16 --dtype float64",
            "communication.wire: fp16 needs dtype float32, not float64; communication.wire: none",
        ),
        (
            "--autocast bf16 --dtype float64",
            "autocast: bf16 needs dtype float32, not float64; autocast: none",
        ),
        (
            "--optimizer.most_skipped 0",
            "optimizer.most_skipped: 0 must be at least 1",
        ),
        (
            "--optimizer.momentum 0 --optimizer.nesterov true",
            "optimizer.nesterov: True needs momentum; optimizer.momentum: 0.9",
        ),
        ("--optimizer.name adagrad", "optimizer.momentum: 0.9 is not read by adagrad; momentum: 0"),
        ("--schedule.autotune.horizon 0", "schedule.autotune.horizon: 0.0 must lie in (0, 1]; 0.2"),
        (
            "--schedule.autotune.largest_change 0.5",
            "schedule.autotune.largest_change: 0.5 must be at least 1; 8",
        ),
        (
            "--schedule.autotune.mode band --optimizer.name adagrad --optimizer.momentum 0",
            "schedule.autotune.mode: band predicts norms under optimizer.name sgd, not adagrad; mode: rule",
        ),
        (
            "--optimizer.proximal_gamma 0",
            "optimizer.proximal_gamma: 0.0 must be positive; null switches it off",
        ),
        ("--optimizer.clip_norm 0", "optimizer.clip_norm: 0.0 must be positive; null switches clipping off"),
        ("--communication.bucket_bytes 0", "communication.bucket_bytes: 0 must be at least 1"),
        (
            "--communication.scheme factors --data.kind analytic --model.name linear --model.classes null",
            "communication.scheme: factors has no layer to act on: linear has no fully connected layer whose weight is "
            "its own; dense",
        ),
        (
            "--communication.link.bytes_per_second 0",
            "communication.link.bytes_per_second: 0.0 must be positive",
        ),
        (
            "--communication.link.flops_per_second -1",
            "communication.link.flops_per_second: -1.0 must be positive",
        ),
        (
            "--communication.link.latency_seconds -1",
            "communication.link.latency_seconds: -1.0 must be at least 0",
        ),
        ("--evaluation.micro_batch 0", "evaluation.micro_batch: 0 must be at least 1"),
        ("--evaluation.every_epochs -1", "evaluation.every_epochs: -1.0 must be at least 0"),
        ("--evaluation.every_epochs 0.001", "evaluation.every_epochs"),
        ("--checkpoint.every_samples -1", "checkpoint.every_samples: -1 must be at least 0"),
        ("--checkpoint.every_minutes -1", "checkpoint.every_minutes: -1.0 must be at least 0"),
        ("--fault.timeout_seconds -1", "fault.timeout_seconds: -1.0 must be at least 0"),
        ("--checkpoint.keep_last 0", "checkpoint.keep_last: 0 must be at least 1"),
        ("--logging.every_steps 0", "logging.every_steps: 0 must be at least 1"),
        ("--logging.line_seconds -1", "logging.line_seconds: -1.0 must be at least 0"),
        (
            "--micro_batch 1 --data.image_size 1",
            "micro_batch: 1 leaves single samples, which batch norm in resnet8 at 1",
        ),
        (
            "--schedule.global_batch 17 --data.image_size 1",
            "schedule: stage 0 global_batch: 17 leaves a last micro-batch of 1 sample (micro_batch 8), which batch "
            "norm in resnet8 at 1 pixels cannot take; 16 or 18",
        ),
        ("--threads 1025", "threads: 1025 must be at most 1024"),
        ("--data.threads 1025", "data.threads: 1025 must be at most 1024"),
        ("--data.image_size 65536 --data.resize 65536", "data.image_size: 65536 must be at most 65535"),
        ("--model.classes 1000001", "model.classes: 1000001 must be at most 1000000"),
        ("--model.width 65537", "model.width: 65537 must be at most 65536"),
        (f"--data.train_samples {2**63}", f"data.train_samples: {2**63} must lie between -2^63 and 2^63"),
        (
            "--schedule.epochs 1e300",
            "schedule.epochs: 1e+300 is 2^63 samples or more of an epoch of 64; below 1.44e",
        ),
        ("--schedule.warmup.epochs 1e308", "schedule.warmup.epochs: 1e+308 is 2^63 samples or more of an epoch of 64"),
        ("--schedule.warmup.epochs .inf", "schedule.warmup.epochs: inf must be finite"),
        ("--evaluation.every_epochs .inf", "evaluation.every_epochs: inf must be finite"),
        ("--evaluation.every_epochs 0.7", "of an epoch of 64, not a whole number; 0.6875 or 0.703125"),
        ("--checkpoint.every_minutes .nan", "checkpoint.every_minutes: nan must be finite"),
        ("--logging.line_seconds .inf", "logging.line_seconds: inf must be finite"),
        ("--optimizer.momentum .nan", "optimizer.momentum: nan must be finite"),
        ("--data.augment.ratio [1,.inf]", "data.augment.ratio: [1.0, inf] must be finite"),
        (
            "--schedule.lr 1e38 --schedule.lr_per_samples 1",
            "schedule: stage 0 lr: 1.6e+39 must be a number of float32, at most 3.4e+38",
        ),
        ("--model.name inception_v3", "data.image_size: 8 is no size that inception_v3 can take ("),
        ("--schedule.lr 1e39", "schedule.lr: 1e+39 must be a number of float32, at most 3.4e+38"),
        ("--schedule.weight_decay 1e39", "schedule.weight_decay: 1e+39 must be a number of float32"),
        ("--schedule.global_batch 8,192", "schedule.global_batch: 8,192 is not a whole number or null"),
        (
            "--model.name googlenet --data.image_size 32 --data.resize 32",
            "model.name: googlenet gives GoogLeNetOutputs in training, not logits alone",
        ),
        ("--model.name alexnet", "data.image_size: 8 is no size that alexnet can take ("),
        ("--model.name vit_b_16", "data.image_size: 8 is no size that vit_b_16 can take (Wrong image height! Expected"),
        ("--out=", "--out: '' is empty; leave it out, or give a path"),
        ("--resume=", "--resume: '' is empty; leave it out, or give a path"),
        ("--resume AUTO", "--resume: AUTO does not exist; --resume auto takes the newest whole one"),
        ("--out good.yaml", "--out: good.yaml cannot be made: File exists"),
        ("--out good.yaml/run", "--out: good.yaml/run cannot be made: Not a directory"),
        ("--out .", "--out: . is not empty; continue it with --resume auto, or name another --out"),
        ("--out x --branch-from auto", "--branch-from: auto is no checkpoint; name a run for its newest, or "),
        (
            "--out x --branch-from a --resume auto",
            "--branch-from and --resume: both are given, but one starts a new run and the other goes on with its own; "
            "--resume alone, once the branch has begun",
        ),
        ("--resume auto", "--resume: auto needs --out, the run directory to go on in"),
        (
            "--resume nowhere",
            "--resume: nowhere does not exist; --resume auto takes the newest whole one of --out",
        ),
    ],
)
def test_an_option_that_breaks_a_rule(refused: Refused, arguments: str, line: str) -> None:
    assert line in refused(*arguments.split())


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and type of each field that is no section."""
    for name, hint in get_type_hints(section).items():
        yield from leaves(hint, f"{prefix}{name}.") if is_dataclass(hint) else [(f"{prefix}{name}", hint)]


def sections(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[: at + 1]) for at in range(len(parts))]


def replaced(section: Any, name: str, value: object) -> Any:
    first, _, rest = name.partition(".")
    return replace(section, **{first: replaced(getattr(section, first), rest, value) if rest else value})


def test_a_refusal_names_a_field_and_its_own_rule_whatever_field_has_an_odd_value() -> None:
    command = plan.parser()
    good, _ = command_line.parse(command, ["--config", write(GOOD)])
    numbers = {float: [-1.0, 0.0, 0.7, 1e308, math.inf, -math.inf, math.nan], int: [-1, 0, 2**63 - 1, 2**63]}
    refusals = 0
    for name, hint in leaves(Config):
        kinds = {float, int} & {hint, *get_args(hint)}
        several = get_origin(hint) is tuple
        for value in (value for kind in kinds for value in numbers[kind]):
            config = replaced(good, name, (value,) * (len(get_args(hint)) if several else 1) if several else value)
            try:
                check(config)
                resolve(config.schedule, 64)
                planning.evaluation_period(config, 64)
            except HvdbsError as error:
                refusals += 1
                line = str(error)
                assert_names_exist(line)
                assert line.startswith(tuple(f"{one}: " for one in (*sections(name), name, f"{name}[0]"))), line
                assert ("must be finite" in line) == (not math.isfinite(value)), line
            else:
                assert math.isfinite(value), name
    assert refusals > 200


SURFACE = """\
micro_batch: 8
data: {kind: analytic, train_samples: 64, val_samples: 20, analytic: {surface: least_squares}}
model: {name: linear}
schedule: {method: constant, epochs: 2, global_batch: 16, lr: 0.1}
"""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--data.train_samples null", "data.train_samples: none given but analytic data has no size of its own; for"),
        ("--data.val_samples null", "data.val_samples: none given but analytic data has no size of its own"),
        ("--model.name resnet8", "model.name: resnet8 is no model of a loss surface; linear or normalised_linear"),
        ("--data.kind synthetic", "model.name: linear needs data.kind analytic, not synthetic"),
        ("--model.classes 2", "model.classes: 2 has no meaning on analytic data; leave it out"),
        ("--model.dropout 0.1", "model.dropout: 0.1 has no meaning on analytic data"),
        ("--model.zero_init_last_gamma true", "model.zero_init_last_gamma: True has no meaning on analytic data"),
        ("--loss.label_smoothing 0.1", "loss.label_smoothing: 0.1 has no meaning on analytic data"),
        ("--autocast bf16", "autocast: bf16 has no meaning on analytic data"),
        ("--data.analytic.surface bowls", "data.analytic.surface: bowls is none of bowl, least_squares, logistic; did"),
        ("--data.analytic.a 2", "data.analytic.a: 2.0 is read by bowl alone; leave it out"),
        ("--data.analytic.teacher_norm 3", "data.analytic.teacher_norm: 3.0 is read by logistic alone"),
        (
            "--data.analytic.surface bowl --data.analytic.power 1",
            "data.analytic.power: 1.0 is read by least_squares and logistic alone",
        ),
        (
            "--data.analytic.surface logistic --data.analytic.inputs in_turn",
            "data.analytic.inputs: in_turn is read by least_squares alone",
        ),
        ("--data.analytic.surface bowl --data.analytic.c 0", "data.analytic.c: 0.0 must be positive"),
        ("--data.analytic.surface bowl --data.analytic.b -1", "data.analytic.b: -1.0 must be positive"),
        (
            "--data.analytic.surface bowl --data.analytic.start [1,.inf]",
            "data.analytic.start: [1.0, inf] must be finite",
        ),
        ("--data.analytic.dimension 0", "data.analytic.dimension: 0 must be at least 1"),
        ("--data.analytic.largest 0", "data.analytic.largest: 0.0 must be positive"),
        ("--data.analytic.power -1", "data.analytic.power: -1.0 must be at least 0"),
        ("--data.analytic.label_noise .nan", "data.analytic.label_noise: nan must be finite"),
        ("--data.analytic.distance -2", "data.analytic.distance: -2.0 must be at least 0"),
        (
            "--data.analytic.eigenvalues [1,2,3]",
            "data.analytic.eigenvalues: 3 values must be one for each of data.analytic.dimension 10; dimension: 3",
        ),
        (
            "--data.analytic.dimension 2 --data.analytic.eigenvalues [1,0]",
            "data.analytic.eigenvalues: [1.0, 0.0] must be positive",
        ),
        (
            "--data.analytic.dimension 2 --data.analytic.eigenvalues [1,2] --data.analytic.power 1",
            "data.analytic.power: 1.0 is not read where eigenvalues are given",
        ),
        (
            "--model.name normalised_linear --data.analytic.surface bowl",
            "model.name: normalised_linear needs surface least_squares, not bowl; linear",
        ),
        (
            "--model.name normalised_linear --data.analytic.dimension 1",
            "data.analytic.dimension: 1 must be at least 2 for normalised_linear",
        ),
        (
            "--model.name normalised_linear --data.analytic.distance 2",
            "data.analytic.distance: 2.0 must be below 2, the unit sphere's diameter",
        ),
    ],
)
def test_a_loss_surface_that_breaks_a_rule(refused: Refused, arguments: str, line: str) -> None:
    assert line in refused(*arguments.split(), config=SURFACE)
    assert line in refused(*arguments.split(), config=SURFACE, entry=plan.main)


def test_labels_that_can_be_told_apart_without_error(refused: Refused) -> None:
    said = refused("--data.train_samples", "15", config=SURFACE.replace("least_squares", "logistic"))
    assert said.startswith("data.train_samples: 15 samples of 10 inputs can be told apart without error, so their")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(refused: Refused) -> None:
    assert refused("--device", "cuda") == "device: cuda is asked for, but torch sees no GPU; device: cpu"


SEBS = "{method: sebs, stage_epochs: [1, 1], global_batch: 16, lr: 0.1, growth: 2}"


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ("{epochs: 2, lr: 0.1}", "schedule.global_batch: none must be given for method constant"),
        ("{epochs: 2, global_batch: 16}", "schedule.lr: none must be given for method constant"),
        ("{global_batch: 16, lr: 0.1}", "schedule: epochs=None, samples=None needs exactly one of epochs and samples"),
        ("{epochs: 1, samples: 64, global_batch: 16, lr: 0.1}", "needs exactly one of epochs and samples"),
        ("{samples: 0, global_batch: 16, lr: 0.1}", "schedule.samples: 0 must be at least 1"),
        ("{epochs: 0, global_batch: 16, lr: 0.1}", "schedule.epochs: 0.0 must be at least one sample of 64"),
        ("{epochs: .inf, global_batch: 16, lr: 0.1}", "schedule.epochs: inf must be finite"),
        (
            "{epochs: 1.01, global_batch: 16, lr: 0.1}",
            "schedule.epochs: 1.01 is 64.64 samples of an epoch of 64, not a whole number; use samples: 64 or 65",
        ),
        ("{epochs: 1, global_batch: 0, lr: 0.1}", "schedule.global_batch: 0 must be at least 1"),
        ("{epochs: 1, global_batch: 16, lr: -1}", "schedule.lr: -1.0 must be a finite number, at least 0"),
        ("{epochs: 1, global_batch: 16, lr: .nan}", "schedule.lr: nan must be finite"),
        (
            "{epochs: 1, global_batch: 16, lr: 0.1, weight_decay: .inf}",
            "schedule.weight_decay: inf must be finite",
        ),
        (
            "{epochs: 1, global_batch: 16, lr: 0.1, milestones: [0.5]}",
            "schedule.milestones: [0.5] are not read by method constant; method: multistep",
        ),
        (
            "{method: multistep, epochs: 2, global_batch: 16, lr: 0.1, milestones: [1.5, 1]}",
            "schedule.milestones: [1.5, 1.0] must increase and lie before the end at 128 samples",
        ),
        (
            "{method: multistep, epochs: 2, global_batch: 16, lr: 0.1, milestones: [2]}",
            "schedule.milestones: [2.0] must increase and lie before the end at 128 samples",
        ),
        (
            "{method: multistep, epochs: 2, global_batch: 16, lr: 0.1, milestones: [1], factor: 0}",
            "schedule.factor: 0.0 must be positive",
        ),
        ("{method: table}", "schedule.stages: [] must hold at least one stage when schedule.method is table"),
        (
            "{method: table, lr: 0.1, stages: [{epochs: 1, global_batch: 16, lr: 0.1}]}",
            "schedule.lr: 0.1 belongs into each stage when schedule.method is table",
        ),
        (
            "{epochs: 1, global_batch: 16, lr: 0.1, stages: [{epochs: 1, global_batch: 16, lr: 0.1}]}",
            "schedule.stages: 1 rows are not read by method constant; method: table",
        ),
        (
            "{method: table, stages: [{epochs: 1, global_batch: 16, lr: 0.1}, {epochs: 1, global_batch: 0, lr: 0.1}]}",
            "schedule.stages[1].global_batch: 0 must be at least 1",
        ),
        (
            "{method: table, stages: [{epochs: 1, global_batch: 16, lr: 0.1}, {global_batch: 16, lr: 0.1}]}",
            "schedule.stages[1]: epochs=None, samples=None needs exactly one of epochs and samples",
        ),
        ("{epochs: 1, global_batch: 16, lr: 0.1, growth: 2}", "schedule.growth: 2.0 is not read by method constant"),
        (
            "{epochs: 1, global_batch: 16, lr: 0.1, lr_per_samples: 0}",
            "schedule.lr_per_samples: 0 must be at least 1; 256",
        ),
        (SEBS.replace("growth: 2", "growth: 0.5"), "schedule.growth: 0.5 must be a finite number, at least 1"),
        (SEBS.replace("growth: 2", "growth: 1.0e+30"), "schedule.growth: 1e+30 grows by 2^63 or more until stage 1"),
        (
            SEBS.replace("[1, 1]", "[1], stage_count: 100"),
            "schedule.growth: 2.0 grows by 2^63 or more until stage 63",
        ),
        (
            SEBS.replace("[1, 1]", "[1], stage_count: 100000000"),
            "schedule.stage_count: 100000000 must lie between 1 and 1000",
        ),
        (
            SEBS.replace("global_batch: 16", f"global_batch: {2**62}"),
            f"schedule: stage 1 global_batch: {2**63} must lie below 2^63",
        ),
        (
            "{method: multistep, epochs: 3, global_batch: 16, lr: 0.1, milestones: [1, 2], factor: 1.0e+200}",
            "schedule.factor: 1e+200 grows by 2^63 or more until stage 1",
        ),
        (SEBS.replace(", growth: 2", ""), "schedule.growth: none must be given for method sebs; 10 replaces lr / 10"),
        (SEBS.replace("[1, 1]", "[]"), "schedule: stage_epochs=[], stage_samples=[] needs exactly one of stage_epochs"),
        (SEBS.replace("[1, 1]", "[1, 0]"), "schedule.stage_epochs[1]: 0.0 must be at least one sample of 64; 0.015625"),
        (
            SEBS.replace("growth: 2", "growth: 2, stage_count: 3"),
            "schedule.stage_count: 3 needs the length of the first stage alone, not 2 lengths",
        ),
        (
            SEBS.replace("growth: 2", "growth: 2, largest_batch: 8"),
            "schedule.largest_batch: 8 must be at least the first",
        ),
        (
            "{method: vbs, stage_epochs: [1, 1], global_batch: 16, lr: 0.1}",
            "schedule.largest_batch: none must be given for method vbs; 16 or more, from the second stage on",
        ),
        (
            "{method: vbs, stage_epochs: [1, 1], global_batch: 16, largest_batch: 4, lr: 0.1}",
            "schedule.largest_batch: 4 must be at least the first batch; 16 or more, from the second stage on",
        ),
        (
            "{method: vbs, stage_epochs: [1, 1], global_batch: 16, largest_batch: 64, lr: 0.1, factor: -1}",
            "schedule.factor: -1.0 must be positive",
        ),
        (
            "{epochs: 1, global_batch: 16, lr: 0.1, warmup: {samples: 65}}",
            "schedule.warmup: 65 samples must end within the first stage; at most 64",
        ),
        (
            "{epochs: 1, global_batch: 16, lr: 0.1, warmup: {samples: 32, start_lr: 0.2}}",
            "schedule.warmup.start_lr: 0.2 must lie between 0 and the lr 0.1",
        ),
    ],
)
def test_a_schedule_that_breaks_a_rule(refused: Refused, schedule: str, line: str) -> None:
    config = GOOD.replace(CONSTANT, schedule)
    assert line in refused(config=config)
    assert line in refused(config=config, entry=plan.main)  # found without MPI or a GPU


PAST = "direction: local_past, ratio: 1.0"


@pytest.mark.parametrize(
    ("section", "line"),
    [
        (
            "direction: local",
            "extrapolation.direction: local is none of none, local_past, global_past, same_sample, noise_uniform, "
            "noise_gaussian, noise_weight, noise_filter; did you mean local_past?",
        ),
        ("direction: local_past", "extrapolation: ratio=None, length=None needs exactly one of ratio and length"),
        (
            "direction: global_past, ratio: 1.0, length: 0.1",
            "extrapolation: ratio=1.0, length=0.1 needs exactly one of ratio and length",
        ),
        ("direction: global_past, ratio: -1", "extrapolation.ratio: -1.0 must be at least 0"),
        ("direction: noise_filter, length: .inf", "extrapolation.length: inf must be finite"),
        (
            "direction: global_past, ratio: 1.0, granularity: micro",
            "extrapolation.granularity: micro cannot be global_past's, whose gradient is that of a whole window; "
            "window, or direction: local_past",
        ),
        (
            "direction: noise_weight, ratio: 1.0, granularity: window",
            "extrapolation.granularity: window cannot be noise's, fresh in each micro-batch; micro",
        ),
        (
            f"{PAST}, granularity: epoch",
            "extrapolation.granularity: epoch is not window or micro or null",
        ),
        (
            PAST,
            "extrapolation.virtual_workers: none must be given for local_past: any multiple of the numbers of ranks "
            "that it is to run on; such as 8; or world_size",
        ),
        (f"{PAST}, virtual_workers: 0", "extrapolation.virtual_workers: 0 must be at least 1"),
        (
            f"{PAST}, virtual_workers: ranks",
            "extrapolation.virtual_workers: ranks is not world_size or a whole number or null",
        ),
        (
            "direction: noise_filter, ratio: 1.0, virtual_workers: 2",
            "extrapolation.virtual_workers: 2 is not read by noise_filter; leave it out",
        ),
        (
            "direction: same_sample, granularity: micro, ratio: 1.0, virtual_workers: 2",
            "extrapolation.virtual_workers: 2 is not read by same_sample with granularity micro; leave it out",
        ),
        (
            f"{PAST}, virtual_workers: 2, until: {{samples: 10, stage: 1}}",
            "extrapolation.until: samples=10, stage=1 needs at most one of samples and stage",
        ),
        (
            f"{PAST}, virtual_workers: 2, until: {{samples: 0}}",
            "extrapolation.until.samples: 0 must be at least 1; direction: none switches it off",
        ),
        (
            f"{PAST}, virtual_workers: 2, until: {{stage: 0}}",
            "extrapolation.until.stage: 0 must be at least 1; direction: none switches it off",
        ),
        (
            f"{PAST}, virtual_workers: 2, until: {{stage: 1}}",
            "extrapolation.until.stage: 1 is beyond the last stage, 0; leave it out",
        ),
    ],
)
def test_extrapolation_that_breaks_a_rule(refused: Refused, section: str, line: str) -> None:
    config = f"{GOOD}extrapolation: {{{section}}}\n"
    assert line in refused(config=config)
    assert line in refused(config=config, entry=plan.main)


def test_virtual_workers_that_ranks_cannot_share(refused: Refused) -> None:
    config = f"{GOOD}extrapolation: {{{PAST}, virtual_workers: 6}}\n"
    line = "extrapolation.virtual_workers: 6 is not a multiple of the {} ranks; {}"
    assert refused("--np", "4", config=config, entry=plan.main) == line.format(4, "4 or 8")
    assert refused("--np", "8", config=config, entry=plan.main) == line.format(8, "8")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--np 0", "--np: 0 must be at least 1"),
        (
            "--data.train_samples null",
            "data.root: none given but the plan needs the data's size; give it, or data.train_",
        ),
        ("--model.name resnet9", "model.name: resnet9 is not known; did you mean resnet8?"),
        ("--resume auto", "--resume: no such option"),
        ("--after nowhere", "--after: nowhere has no steps.csv that can be read ("),
        ("--after=", "--after: '' is empty; leave it out, or give a path"),
        ("--np 1.5", "--np: 1.5 is not a whole number"),
    ],
)
def test_a_plan_of_what_would_be_refused(refused: Refused, arguments: str, line: str) -> None:
    assert line in refused(*arguments.split(), entry=plan.main)


# --- the launcher


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--launcher mpirn --out x", "--launcher: mpirn is none that is known; did you mean mpirun?"),
        ("--launcher srun --out x", "--launcher: srun needs a job of Slurm's; sbatch, salloc, or horovodrun-gloo"),
        ("--np 0 --out x", "--np: 0 must be at least 1"),
        ("--np two --out x", "--np: invalid int value: 'two'; --help lists all options"),
        ("--ranks-per-node 0 --out x", "--ranks-per-node: 0 must be at least 1"),
        ("--hosts n1:0 --out x", "--hosts: n1:0 has no number of ranks in n1:0; n1:2,n2:2"),
        ("--hosts n1,n1 --out x", "--hosts: n1 stands there twice; once, as n1:2"),
        ("--hosts n[1-2 --out x", "--hosts: n[1-2 is no list of hosts; a list such as n[1-3,7],gpu01"),
        ("--hosts n1:2 --np 3 --out x", "--np: 3 does not lie in 1 to 2, the slots of n1:2"),
        ("--hostfile nope --out x", "--hostfile: nope cannot be read (No such file or directory)"),
        ("--hostfile good.yaml --out x", "--hostfile: good.yaml has no host in line 1: micro_batch: 8; n1, n1:2 or n1"),
        ("--hosts n1 --hostfile good.yaml --out x", "--hosts and --hostfile: both are given; one of them says where"),
        ("--np 2", "--out: none given, and a launched run needs one to be stopped in and resumed from"),
        ("--config digit --out x", "--config: digit is neither a file nor a packaged recipe; did you mean digits?"),
        ("--nic eth77 --out x", "--nic: eth77 is no interface with an address on "),
        ("--nodes 2 --out x", "--nodes: 2 is for the script that --sbatch writes; sbatch has it too"),
        ("--seed 1 -- python", "command line: --seed stands before --, after which a whole command is given"),
        ("--configs digits --config digits", "--config: digits does not go with --configs, which names them all"),
        ("--sbatch - --config digits", "--nodes: none given; how many nodes the job asks for"),
        ("--sbatch - --nodes 2", "--config: none given; a file or a packaged recipe, or -- and a whole command"),
        ("--sbatch - --config digits --nodes 0", "--nodes: 0 must be at least 1"),
        ("--sbatch - --config digits --nodes 2 --hosts n1", "--sbatch: --hosts, --hostfile and --np do not go with it"),
        (
            "--sbatch - --config digits --nodes 2 --time 1:2:3:4",
            "--time: 1:2:3:4 is no time that sbatch takes; 24:00:00",
        ),
        (
            "--sbatch - --config digits --nodes 2 --time 5",
            "--signal-seconds: 300 and the 60 s that Slurm may be early leave nothing of --time 5; less than 240",
        ),
        (
            "--sbatch - --config digits --nodes 2 --gpus-per-node 2 --ranks-per-node 4",
            "--ranks-per-node: 4 is more than the 2 GPUs of a node, one for each rank; 2",
        ),
        (
            "--sbatch - --config digits --nodes 2 --partition a;b",
            "--partition: a;b is no name that sbatch takes; letters",
        ),
    ],
)
def test_launches_that_cannot_be(refused: Refused, monkeypatch: pytest.MonkeyPatch, arguments: str, line: str) -> None:
    Path("good.yaml").write_text(GOOD)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert refused(*arguments.split(), config=None, entry=launch.main).startswith(line)


# --- image folders

IMAGES = (
    GOOD.replace("kind: synthetic", "root: data, backend: pillow")
    .replace("train_samples: 64, val_samples: 20, ", "")
    .replace("classes: 4, ", "")
    .replace("epochs: 2", "samples: 32")
)


LONG_AGO = (1e9, 1e9)  # seconds since 1970


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 9), (1, 2, 3)).save(path, "PNG")
    return path


@pytest.fixture
def images(work: Path) -> Path:
    """data/train/{cat,dog}/* and data/val/{cat,dog}/*, six and two of each."""
    for split, count in (("train", 6), ("val", 2)):
        for number in range(count):
            for name in ("cat", "dog"):
                picture(work / "data" / split / name / f"{number}.png")
    for folder in (work / "data").glob("*/*"):
        os.utime(folder, LONG_AGO)  # what is new may change again, so its list is not kept
    return work / "data"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_config_that_may_not_be_read(refused: Refused, work: Path) -> None:
    (work / "secret.yaml").write_text(GOOD)
    (work / "secret.yaml").chmod(0)
    said = refused("--config", "secret.yaml", config=None)
    assert said == "--config: secret.yaml cannot be read: Permission denied"


@pytest.mark.parametrize("out", ["data/train/runs", "data/val/cat/run", "data/train", "data/../data/val"])
def test_a_run_directory_among_the_images(refused: Refused, images: Path, out: str) -> None:
    split = "data/val" if "val" in out else "data/train"
    assert (
        refused("--out", out, config=IMAGES)
        == f"--out: {out} lies in {split}, among the images; for example runs/first"
    )


def test_an_image_folder_without_the_right_layout(refused: Refused, images: Path) -> None:
    said = refused("--data.root", "data/train", config=IMAGES)
    assert said == f"data.root: data/train has no train folder; did you mean {images}?"
    said = refused("--data.root", "data/train/cat", config=IMAGES)
    assert said == f"data.root: data/train/cat has no train folder; did you mean {images}?"
    picture(images / "train" / "9.png")
    assert refused(config=IMAGES).startswith("data: data/train holds 1 images beside its class folders, which would")
    (images / "train" / "9.png").unlink()
    shutil.rmtree(images / "val" / "cat")
    (images / "val" / "cat").mkdir()
    assert refused(config=IMAGES).startswith(
        "data: data/val/cat has no images; images stand directly in a class folder"
    )
    picture(images / "val" / "cats" / "0.png")
    assert refused(config=IMAGES) == "data: data/val/cats is a class that train does not have; did you mean cat?"
    shutil.rmtree(images / "val")
    (images / "val").symlink_to("train")
    assert refused(config=IMAGES).startswith("data: data/val is the same folder as train; ")
    (images / "val").unlink()
    assert refused(config=IMAGES).startswith(
        "data.root: data has no val folder; it has train; expected train/<class>/*"
    )
    (images / "validation").mkdir()
    assert "has no val folder; it has train, validation; expected" in refused(config=IMAGES)
    (images / "val").mkdir()
    assert refused(config=IMAGES).startswith("data: data/val holds no class folders; expected train/<class>/*")
    picture(images / "val" / "0.png")
    assert refused(config=IMAGES).startswith("data: data/val holds 1 images but no class folders; sort its images")
    shutil.rmtree(images)
    assert refused(config=IMAGES).startswith("data.root: data does not exist; expected train/<class>/*")
    images.touch()
    assert refused(config=IMAGES).startswith("data.root: data is not a folder; expected train/<class>/*")


def test_images_that_are_trained_on_and_scored(
    refused: Refused, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link of either kind is seen at once and refused; of copies a few are looked at, and said to be there."""
    same = "is the same file as data/train/cat/"
    for link in (os.link, os.symlink):
        link(images / "train" / "cat" / "3.png", images / "val" / "dog" / "9.png")
        assert refused(config=IMAGES).startswith(f"data: data/val/dog/9.png {same}3.png; its score says nothing if")
        (images / "val" / "dog" / "9.png").unlink()
    (images / "val" / "cat").rename(images.parent / "kept")
    (images / "val" / "cat").symlink_to(images / "train" / "cat")
    assert f"data: data/val/cat/0.png (and 5 more) {same}0.png" in refused(config=IMAGES)
    (images / "val" / "cat").unlink()

    # train and val swapped, and a class without images in what is val now
    (images / "train").rename(images / "small")
    (images / "val").rename(images / "train")
    (images / "small").rename(images / "val")
    assert refused(config=IMAGES) == "data: data/val/cat is a class that train does not have; known: dog"
    (images.parent / "kept").rename(images / "train" / "cat")
    shutil.rmtree(images / "val" / "cat")
    for folder in images.glob("*/*"):
        os.utime(folder, LONG_AGO)
    assert train.main(["--config", write(IMAGES), "--out", "run", "--schedule.samples", "4"]) == 0
    first, second, third = [line for line in capsys.readouterr().out.splitlines() if "warning: data: " in line]
    assert "4 of 4 images that were looked at are in train and in val, such as data/train/" in first
    assert second.endswith("1 of 2 classes have no images in val (cat)")
    assert third.endswith("val holds 6 images, train 4: are they swapped?")

    shutil.rmtree(images / "train" / "cat")
    assert plan.main(["--config", "good.yaml"]) == 2  # lists the folder and keeps the list
    assert "data has one class, dog" in capsys.readouterr().err
    assert refused(config=IMAGES).startswith("data.root: data has one class, dog, and nothing to tell it from; ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            "--data.train_samples 99",
            "data.train_samples: 99 is not what data/train holds: 12 images; set 12 or leave it out",
        ),
        ("--data.val_samples 3", "data.val_samples: 3 is not what data/val holds: 4 images; set 4 or leave it out"),
        ("--data.decode mixed", "data.decode: mixed needs DALI, not Pillow; use data.decode cpu"),
        (
            "--schedule.samples null --schedule.epochs 1.1",
            "schedule.epochs: 1.1 is 13.2 samples of an epoch of 12, not a whole",
        ),
    ],
)
def test_settings_that_do_not_fit_the_images(refused: Refused, images: Path, arguments: str, line: str) -> None:
    assert plan.main(["--config", write(IMAGES)]) == 0  # lists the folder and keeps the list
    assert line in refused(*arguments.split(), config=IMAGES)


def write(config: str) -> str:
    Path("good.yaml").write_text(config)
    return "good.yaml"


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda path: path.write_bytes(b"\x89PNG" * 10), "has 40 bytes, but had"),
        (lambda path: path.unlink(), "cannot be read: No such file or directory"),
    ],
    ids=["changed", "gone"],
)
def test_an_image_that_is_found_bad_in_training_ends_the_run_with_its_path(
    images: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], line: str
) -> None:
    path = images / "train" / "dog" / "3.png"
    assert plan.main(["--config", write(IMAGES)]) == 0
    damage(path)
    os.utime(path.parent, LONG_AGO)  # so that the list that was kept seems current
    with pytest.raises(SystemExit) as ended:
        train.main(["--config", "good.yaml", "--out", "run"])
    assert ended.value.code == 1
    said = errors(capsys)
    assert len(said) == 1
    assert "train/dog/3.png" in said[0]
    assert line in said[0]
    record = json.loads(Path("run/exit.json").read_text())
    assert (record["outcome"], record["exit_code"]) == ("failed", 1)
    assert "train/dog/3.png" in record["reason"]


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines in which an error is said, among those of progress."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return [line for line in text.splitlines() if "error" in line]


def test_a_loss_that_is_not_finite_ends_the_run_naming_the_last_checkpoint(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(GOOD.replace("lr: 0.1", "lr: 1.0e+20"))
    assert train.main(["--config", config, "--out", "run", "--checkpoint.every_samples", "16"]) == 2
    (said,) = errors(capsys)
    assert said.startswith("hvdbs: error: loss: ")
    assert "is not finite; last whole checkpoint: run/checkpoints/step-" in said
    assert json.loads(Path("run/exit.json").read_text())["outcome"] == "failed"


# --- checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight updates with checkpoints at 6 and 8."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "good.yaml").write_text(GOOD)
    arguments = ["--config", str(folder / "good.yaml"), "--out", str(folder / "run")]
    assert train.main(arguments) == 0
    return folder / "run"


@pytest.fixture
def run(finished: Path, work: Path) -> Path:
    return Path(shutil.copytree(finished, work / "run"))


def truncate(model: Path) -> None:
    os.truncate(model, model.stat().st_size - 1)


def flip_a_bit(model: Path) -> None:
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (truncate, "model.pt is not what manifest.json says"),
    (flip_a_bit, "model.pt is not what manifest.json says"),
    (lambda model: model.write_bytes(b""), "model.pt is not what manifest.json says"),
    (lambda model: model.unlink(), "model.pt is missing or unreadable"),
    (lambda model: model.with_name("manifest.json").unlink(), "manifest.json is missing or unreadable"),
    (lambda model: model.with_name("manifest.json").write_text("{"), "manifest.json is damaged"),
    (
        lambda model: model.with_name("manifest.json").write_text('{"files": {}}'),
        "model.pt is not what manifest.json says",
    ),
]
KINDS = ["truncated", "a bit", "empty", "no model", "no manifest", "half a manifest", "empty manifest"]


@pytest.mark.parametrize(("damage", "line"), DAMAGE, ids=KINDS)
def test_a_checkpoint_that_is_not_whole(
    refused: Refused, run: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], line: str
) -> None:
    damage(run / "checkpoints" / "step-8" / "model.pt")
    said = refused("--resume", "run/checkpoints/step-8")
    assert said == (
        f"--resume: run/checkpoints/step-8 is no whole checkpoint ({line}); "
        "--resume auto takes the newest whole one of --out"
    )
    # Every entry into the run passes it over, aloud, for the one before, and ends where the whole one did.
    assert train.main(["--config", "good.yaml", "--out", "run", "--resume", "auto"]) == 0
    assert f"passed over step-8 ({line})" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["steps"] == 8

    for folder in (run / "checkpoints").glob("step-*"):
        damage(folder / "model.pt")
    said = refused("--out", "run", "--resume", "auto")
    assert said.startswith(f"--resume: no whole checkpoint in run/checkpoints: step-8 ({line}), step-6 ({line})")


class Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


def replace_model(run: Path, data: bytes) -> None:
    """Put ``data`` in place of the newest model.pt, with a manifest that knows it."""
    folder = run / "checkpoints" / "step-8"
    (folder / "model.pt").write_bytes(data)
    manifest = {"format": 1, "files": {"model.pt": _fingerprint(folder / "model.pt")}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_with_code_in_it_is_refused_and_the_code_not_executed(refused: Refused, run: Path) -> None:
    torch.save({"format": 1, "model": Code()}, "evil.pt")
    replace_model(run, Path("evil.pt").read_bytes())
    said = refused("--out", "run", "--resume", "auto")
    assert said == "checkpoint: model.pt is not one of hvdbs (UnpicklingError: Weights only load failed)"
    replace_model(run, pickle.dumps(Code()))
    assert refused("--out", "run", "--resume", "auto").startswith("checkpoint: model.pt is not one of hvdbs (")
    assert not Path("executed").exists()


def test_a_checkpoint_of_something_else(refused: Refused, run: Path) -> None:
    replace_model(run, b"PK\3\4 of another kind")
    assert refused("--out", "run", "--resume", "auto").startswith("checkpoint: model.pt is not one of hvdbs (")
    torch.save({"state_dict": {}}, "other.pt")
    replace_model(run, Path("other.pt").read_bytes())
    assert refused("--out", "run", "--resume", "auto").startswith(
        "checkpoint: model.pt is not one of hvdbs (KeyError: "
    )
    torch.save({"format": 2}, "newer.pt")
    replace_model(run, Path("newer.pt").read_bytes())
    assert refused("--out", "run", "--resume", "auto") == "checkpoint: format: 2 is not known; 1"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("--schedule.lr 0.2", "schedule.lr: 0.1 there, 0.2 here"),
        ("--micro_batch 4", "micro_batch: 8 there, 4 here"),
        ("--model.width 8", "model.width: 4 there, 8 here"),
        (
            "--data.train_samples 65 --schedule.epochs 1",
            "data.train_samples: 64 there, 65 here, schedule.epochs: 2.0 there",
        ),
        ("--seed 1", "seed: 0 there, 1 here"),
        ("--dtype float64", "dtype: float32 there, float64 here"),
    ],
)
def test_a_checkpoint_of_another_training(refused: Refused, run: Path, change: str, line: str) -> None:
    said = refused("--out", "run", "--resume", "auto", *change.split())
    assert said.startswith(f"--resume: run/checkpoints/step-8 is of another training ({line}")
    assert said.endswith("start anew with another --out, or go on from its weights with --branch-from")


def test_a_finished_run_without_its_checkpoints_is_not_trained_again(refused: Refused, run: Path) -> None:
    """Its tables would be cut to nothing. One that was stopped before its first checkpoint does begin anew."""
    shutil.rmtree(run / "checkpoints")
    said = refused("--out", "run", "--resume", "auto")
    assert said == "--out: run has finished and its checkpoints are gone; name another"
    assert len((run / "steps.csv").read_text().splitlines()) > 1


def test_a_checkpoint_of_other_images(refused: Refused, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--config", write(IMAGES), "--out", "run"]) == 0
    os.utime(picture(images / "train" / "emu" / "0.png").parent, LONG_AGO)
    assert plan.main(["--config", "good.yaml"]) == 0
    capsys.readouterr()
    said = refused("--model.classes", "2", config=IMAGES)
    assert said == "model.classes: 2 is less than the 3 classes of the data"
    said = refused("--out", "run", "--resume", "auto", config=IMAGES)
    assert "is of another training (data.train_samples: 12 there, 13 here, model.classes: 2 there, 3 here)" in said


def test_a_checkpoint_older_than_others_of_the_same_run(refused: Refused, run: Path) -> None:
    said = refused("--resume", "run/checkpoints/step-6")
    assert said.startswith("--resume: run/checkpoints/step-6 is older than step-8 of the same run; name another --out")


@pytest.mark.parametrize("option", ["--resume", "--branch-from"])
def test_a_pointer_is_followed_to_its_checkpoint(refused: Refused, run: Path, option: str) -> None:
    said = refused("--out", "other", option, "run/checkpoints/latest")
    assert said.startswith(f"{option}: run/checkpoints/step-8 is at sample 128, where this schedule has ended; ")
    pointed = Path("run/checkpoints")
    (pointed / "best").write_text("step-6\n")
    for given, found in {"run/checkpoints/best": "step-6", "run/checkpoints": "step-8", "run": "step-8"}.items():
        assert find(Path("other"), given, print, option) == pointed / found

    def line(given: str) -> str:
        with pytest.raises(HvdbsError, match=f"^{option}: ") as error:
            find(Path("other"), given, print, option)
        return str(error.value)

    (pointed / "latest").write_text("step-7\n")
    assert "step-7 is no whole checkpoint (manifest.json is missing" in line("run/checkpoints/latest")
    (pointed / "latest").write_text("../elsewhere\n")
    assert "latest is a file that points to no checkpoint; " in line("run/checkpoints/latest")
    assert line("run/checkpoints/step-6/model.pt").endswith("; did you mean run/checkpoints/step-6?")
    for folder in pointed.glob("step-*"):
        (folder / "manifest.json").unlink()
    assert "no whole checkpoint in run/checkpoints: step-8 (manifest.json is missing or" in line("run")


def test_files_of_a_run_that_are_not_of_hvdbs(refused: Refused, run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-8")
    steps = (run / "steps.csv").read_text()
    (run / "steps.csv").write_text("a,b\n1,2\n")
    assert "run/steps.csv: its first line is 'a,b', no header of hvdbs" in refused("--out", "run", "--resume", "auto")
    (run / "steps.csv").write_text(steps.replace("skipped\n", "skipped,more\n", 1))
    assert "run/steps.csv: has the column more of a newer hvdbs" in refused("--out", "run", "--resume", "auto")
    (run / "steps.csv").write_text(steps + "7,112\n")
    assert "run/steps.csv: line 10 is not a row of 20 columns" in refused("--out", "run", "--resume", "auto")


def test_a_finished_run_has_nothing_left_to_train(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--config", write(GOOD), "--out", "run", "--resume", "auto"]) == 0
    assert "run has finished its schedule: nothing is left to train" in capsys.readouterr().out


@pytest.mark.parametrize("out", ["run", "other"])
def test_a_finished_run_leaves_a_branch_nothing_to_train(refused: Refused, run: Path, out: str) -> None:
    said = refused("--out", out, "--branch-from", "run")
    assert said.startswith("--branch-from: run/checkpoints/step-8 is at sample 128, where this schedule has ended; ")


def test_a_finished_run_is_not_resumed_into_another_folder(refused: Refused, run: Path) -> None:
    said = refused("--out", "other", "--resume", "run")
    assert said.startswith("--resume: run/checkpoints/step-8 is at sample 128, where this schedule has ended; ")


def test_a_run_directory_may_have_any_bytes_in_its_name(work: Path) -> None:
    """So it is with ä in Latin-1, and with any ä where the locale is C and Python has been told to take it at its word:
    Python has surrogates for such bytes, and tensorboard takes UTF-8 alone."""
    name = os.fsdecode(b"runs/\xe4")
    arguments = ["--config", write(GOOD), "--logging.tensorboard", "true"]
    assert train.main([*arguments, "--out", name]) == 0
    (events,) = Path(name, "tensorboard").iterdir()
    assert events.stat().st_size > 500
    longer = ["--schedule.epochs", "3", "--branch-from", f"{name}/checkpoints/latest"]
    assert train.main([*arguments, *longer, "--out", name + name[-1]]) == 0
    assert json.loads(Path(name + name[-1], "parent.json").read_bytes())["checkpoint"].endswith("step-8")


def test_what_a_checkpoint_holds_is_only_data(run: Path) -> None:
    state = load((run / "checkpoints" / "step-8" / "model.pt").read_bytes(), torch.device("cpu"))
    assert set(asdict(state)) == set(State.__dataclass_fields__)


@pytest.mark.parametrize("take", [lambda: torch.empty(2**60), lambda: numpy.empty(2**55), lambda: bytearray(2**60)])
def test_memory_that_is_not_there_is_one_line_without_a_traceback(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], take: Callable[[], object]
) -> None:
    """The errors are those of torch, numpy and Python themselves, raised where a run first takes much."""
    monkeypatch.setattr(train, "assemble", lambda *_: take())
    with pytest.raises(SystemExit) as ended:
        train.main(["--config", write(GOOD), "--out", "run"])
    assert ended.value.code == 1
    (said,) = errors(capsys)
    assert said.startswith("hvdbs: error: rank 0: out of memory (")
    assert said.endswith("; a smaller micro_batch, data.image_size, data.read_ahead or model")
