"""``python -m hvdbs.plan``: the stage table of a run, without MPI, Horovod, a GPU or, where its size is given, data.

With ``--calibrate`` it measures, on the ranks that it was started on; with ``--calibration`` it predicts from that."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from jsonargparse import ArgumentParser, Namespace

from hvdbs import command_line, console, entry, forecast_table, planning
from hvdbs.assembly import agreed
from hvdbs.calibration import Calibration, Network, advice, network, read, to_json
from hvdbs.comm import AgreedError, PeerFailure, connect, launched_rank
from hvdbs.comm.local import Solo
from hvdbs.config import Config
from hvdbs.data.kept import share_index
from hvdbs.errors import HvdbsError, refusal
from hvdbs.files import write_atomically
from hvdbs.forecast import forecast
from hvdbs.stage_tables import resolve

EXAMPLES = """examples:
  python -m hvdbs.plan --config digits --np 2
  python -m hvdbs.plan --config imagenet-resnet50 --np 64
  python -m hvdbs.plan --config my.yaml --np 256 --micro_batch 64
  python -m hvdbs.plan --after runs/first --np 64               with the noise scale that the run measured
  horovodrun -np 4 python -m hvdbs.plan --config my.yaml --calibrate node.json        measure a node, a minute or so
  python -m hvdbs.plan --config my.yaml --np 256 --calibration node.json --network 25gbit     how long it would take"""


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
    result.add_argument(
        "--calibrate",
        type=str | None,
        metavar="FILE",
        help="measure the model and the links of these ranks",
    )
    result.add_argument(
        "--calibration", type=str | None, metavar="FILE", help="also predict seconds, from what --calibrate measured"
    )
    result.add_argument(
        "--network",
        type=str | None,
        metavar="RATE[,LATENCY]",
        help="with --calibration the network to assume, with --calibrate the one that is there: 25gbit or 100mbit,20us",
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan, or measure. Returns 0, or 2 if the run would be refused."""
    try:
        with contextlib.redirect_stdout(io.StringIO()) if launched_rank() else contextlib.nullcontext():
            config, arguments = command_line.parse(parser(), _with_config(sys.argv[1:] if argv is None else argv))
            if arguments.np < 1:
                raise refusal("--np", arguments.np, "must be at least 1")
            named = None if arguments.network is None else network(arguments.network)
            if arguments.calibrate is not None:
                _alone(arguments)
                return _measure(config, Path(arguments.calibrate), named)
            if named is not None and arguments.calibration is None:
                raise refusal("--network", arguments.network, "is read with --calibration or --calibrate alone")
            text = describe(config, arguments.np, _known(arguments.calibration), named)
            if arguments.after is not None:
                text += "\n\n" + measured_noise(Path(arguments.after))
    except HvdbsError as error:
        if launched_rank() == 0:
            sys.stderr.write(f"hvdbs: error: {error}\n")
        return 2
    if launched_rank() == 0:
        print(text)
    return 0


def _known(path: str | None) -> Calibration | None:
    return None if path is None else read(Path(path))


def _alone(arguments: Namespace) -> None:
    """Raises HvdbsError for what ``--calibrate`` would pass over, or write to in vain."""
    if arguments.np != 1:
        rule = "starts no ranks, and --calibrate measures on those that it was started on"
        raise refusal(
            "--np", arguments.np, rule, f"horovodrun -np {arguments.np} python -m hvdbs.plan ... without --np"
        )
    for name in ("calibration", "after"):
        if (value := getattr(arguments, name)) is not None:
            raise refusal(f"--{name}", value, "is not read with --calibrate", "first the one, then the other")
    folder = Path(arguments.calibrate).parent
    if not os.access(folder, os.W_OK | os.X_OK) or not folder.is_dir():
        raise refusal(
            "--calibrate", arguments.calibrate, "lies in no folder that can be written to", "one that is there"
        )


def _measure(config: Config, path: Path, named: Network | None) -> int:
    """Collective. ``--calibrate``: rank 0 writes ``path`` and says what it holds."""
    from hvdbs.measuring import calibrate

    comm = connect()

    def say(text: str) -> None:
        if comm.rank == 0:
            print(text, flush=True)

    try:
        with agreed(comm):
            _, classes = sizes(config)
        made = calibrate(config, comm, classes, say)
        with agreed(comm):
            if comm.rank == 0:
                try:
                    write_atomically(path, to_json(made))
                except OSError as error:
                    raise refusal("--calibrate", path, f"cannot be written: {error.strerror}") from None
        say(forecast_table.summary(made))
        if (hint := advice(made, named)) is not None:
            say(hint)
        say(f"wrote {console.shown(path)}")
        comm.close()
    except AgreedError:
        comm.close()
        raise
    except PeerFailure:
        comm.abort(1)
    except Exception:
        if comm.world_size == 1:
            raise
        traceback.print_exc()
        comm.abort(1)
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


def describe(
    config: Config, world_size: int, calibration: Calibration | None = None, named: Network | None = None
) -> str:
    """The stage table for ``world_size`` ranks and its warnings, and with a ``calibration`` what each stage takes.

    Raises HvdbsError for what a run would refuse.
    """
    train_samples, classes = sizes(config)
    schedule = resolve(config.schedule, train_samples)
    planning.evaluation_period(config, train_samples)
    model = planning.meta_model(config, classes)
    rows = planning.plan(config, schedule, train_samples, model, world_size)
    layers = planning.linear_layers(config, model)
    beside = [*planning.extrapolation_lines(config, model, rows), *planning.communication_lines(config, layers, rows)]
    text = "\n".join([console.stage_table(rows), *beside, *planning.warnings(rows)])
    if calibration is None:
        return text
    stages, machine = forecast(config, model, layers, rows, calibration, named)
    return f"{text}\n\n{forecast_table.table(stages, machine, calibration)}"


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
