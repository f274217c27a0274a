"""``python -m hvdbs.plan``: the stage table of a run, without MPI, Horovod, a GPU or, where its size is given, data."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from jsonargparse import ArgumentParser

from hvdbs import command_line, console, entry, planning
from hvdbs.comm.local import Solo
from hvdbs.config import Config
from hvdbs.data.kept import share_index
from hvdbs.errors import HvdbsError, refusal
from hvdbs.stage_tables import resolve

EXAMPLES = """examples:
  python -m hvdbs.plan --config digits --np 2
  python -m hvdbs.plan --config imagenet-resnet50 --np 64
  python -m hvdbs.plan --config my.yaml --np 256 --micro_batch 64
  python -m hvdbs.plan --after runs/first --np 64               with the noise scale that the run measured"""


def parser() -> ArgumentParser:
    result = command_line.parser(
        "python -m hvdbs.plan",
        "Print what a run would do on --np ranks, and what would be refused.",
        EXAMPLES,
    )
    result.add_argument("--np", type=int, default=1, help="ranks")
    result.add_argument(
        "--after", type=str | None, metavar="RUN", help="also show the gradient noise scale that this run has measured"
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. Returns 0, or 2 if the run would be refused."""
    try:
        config, arguments = command_line.parse(parser(), _with_config(sys.argv[1:] if argv is None else argv))
        if arguments.np < 1:
            raise refusal("--np", arguments.np, "must be at least 1")
        text = describe(config, arguments.np)
        if arguments.after is not None:
            text += "\n\n" + measured_noise(Path(arguments.after))
    except HvdbsError as error:
        sys.stderr.write(f"hvdbs: error: {error}\n")
        return 2
    print(text)
    return 0


def _with_config(arguments: Sequence[str]) -> list[str]:
    """``--after RUN`` alone plans the run's own config."""
    words = [part for word in arguments for part in word.split("=", 1)]
    if "--after" in words[:-1] and "--config" not in words:
        run = Path(words[words.index("--after") + 1])
        if not (run / "config.yaml").is_file():
            raise refusal("--after", run, "is no run directory: it has no config.yaml", "the --out of hvdbs.train")
        return [*arguments, "--config", str(run / "config.yaml")]
    return list(arguments)


def measured_noise(run: Path) -> str:
    """The noise scale at the end of each stage of ``run`` beside the batch in use. Raises HvdbsError if it has none."""
    try:
        steps = pd.read_csv(run / "steps.csv", usecols=["stage", "global_batch", "noise_scale"])
    except (OSError, ValueError) as error:
        raise refusal("--after", run, f"has no steps.csv that can be read ({error})") from None
    last = steps.dropna().groupby("stage").last()
    if last.empty:
        raise refusal("--after", run, "has measured no noise scale", "its windows need two micro-batches or more")
    rows = [
        (str(stage), console.count(int(row.global_batch)), console.number(row.noise_scale))
        for stage, row in last.iterrows()
    ]
    return console.table(("stage", "global_batch", "noise scale"), rows) + (
        "\nnoise scale: tr(S)/|G|^2 in samples (McCandlish et al., arXiv 1812.06162), at the end of each stage. It is\n"
        "a weak proxy of the critical batch (arXiv 2505.23971): an order of magnitude, not a setting."
    )


def describe(config: Config, world_size: int) -> str:
    """The stage table for ``world_size`` ranks and its warnings. Raises HvdbsError for what a run would refuse."""
    train_samples, classes = sizes(config)
    schedule = resolve(config.schedule, train_samples)
    planning.evaluation_period(config, train_samples)
    model = planning.meta_model(config, classes)
    rows = planning.plan(config, schedule, train_samples, model, world_size)
    layers = planning.linear_layers(config, model)
    beside = [*planning.extrapolation_lines(config, model, rows), *planning.communication_lines(config, layers, rows)]
    return "\n".join([console.stage_table(rows), *beside, *planning.warnings(rows)])


def sizes(config: Config) -> tuple[int, int | None]:
    """Training samples and classes, if any: from the config where it has them, else from the data's file list."""
    if config.data.kind == "analytic":
        assert config.data.train_samples is not None
        return config.data.train_samples, None
    if config.data.train_samples is not None and config.model.classes is not None:
        return config.data.train_samples, config.model.classes
    if config.data.root is None:
        raise refusal(
            "data.root",
            "none given",
            "but the plan needs the data's size",
            "give it, or data.train_samples and model.classes",
        )
    index = share_index(os.path.expanduser(config.data.root), config.data.index_dir, Solo())
    for line in index.warnings():
        print(line)
    return len(index.train), planning.outputs(config, index.classes)


if __name__ == "__main__":
    sys.exit(entry.run(main))
