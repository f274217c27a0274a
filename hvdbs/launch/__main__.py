"""``python -m hvdbs.launch``: start a run on all ranks of an allocation, or write the batch script that does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hvdbs import entry
from hvdbs.command_line import recipe_path
from hvdbs.errors import HvdbsError, refusal
from hvdbs.launch import allocation, attempts, commands, job, network, sbatch
from hvdbs.launch.arguments import going_on, resuming, value_of, with_run_directory
from hvdbs.launch.sweep import count

_DESCRIPTION = """Start hvdbs.train on all ranks of a job of Slurm, of a list of hosts, or of this machine.
What is no option here is one of hvdbs.train; after --, a whole command stands instead."""

_EXAMPLES = f"""launchers:
{chr(10).join(f"  {name:<16} {what}" for name, what in commands.LAUNCHERS.items())}

examples:
  python -m hvdbs.launch --sbatch --config imagenet-resnet50 --nodes 4 --gpus-per-node 8     writes a batch script
  python -m hvdbs.launch --config my.yaml --out runs/a                       in a batch script, or a shell of salloc
  python -m hvdbs.launch --launcher mpirun --print-command --config my.yaml
  python -m hvdbs.launch --hosts node1:4,node2:4 --config my.yaml            without Slurm
  python -m hvdbs.launch --hosts node1:4,node2:4 --max-restarts 3 --min-np 4 --config my.yaml --out runs/a
  python -m hvdbs.launch -- python -m benchmarks.throughput                  another program"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise HvdbsError(f"{message.removeprefix('argument ')}; --help lists all options")


def parser() -> argparse.ArgumentParser:
    result = _Parser(
        prog="python -m hvdbs.launch",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    start = result.add_argument_group("start")
    start.add_argument("--launcher", metavar="NAME", help="by default srun in a job of Slurm, else horovodrun-gloo")
    start.add_argument("--np", type=int, metavar="N", help="ranks, fewer than there is room for")
    start.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="by default as Slurm was asked, or one for a GPU"
    )
    start.add_argument("--hosts", metavar="n1:2,...", help="hosts and their ranks, instead of Slurm's")
    start.add_argument("--hostfile", metavar="FILE", help="the same, a line for each")
    start.add_argument("--nic", metavar="NAME", help="network interface between ranks, such as ib0")
    start.add_argument(
        "--max-restarts", type=int, metavar="N", help="after a failure, start again so often on the hosts that are left"
    )
    start.add_argument("--min-np", type=int, metavar="N", help="but not on fewer ranks; by default 1")
    start.add_argument("--print-command", action="store_true", help="print the command, start nothing")
    start.add_argument("--configs", metavar="A,B,...", help="configs of a sweep; each task of an array takes one run")
    start.add_argument("--seeds", metavar="1,2,...", default="0", help="seeds of a sweep")
    write = result.add_argument_group("write a batch script")
    write.add_argument("--sbatch", nargs="?", const="", metavar="FILE", help="by default CONFIG.sbatch; - prints it")
    write.add_argument("--nodes", type=int, metavar="N")
    write.add_argument("--cpus-per-rank", type=int, metavar="N")
    write.add_argument("--gpus-per-node", type=int, metavar="N", help="one rank for each")
    write.add_argument("--time", metavar="D-H:M:S", help="24:00:00 unless given")
    write.add_argument("--signal-seconds", type=int, metavar="N", help="told to stop so long before the end: 300")
    write.add_argument("--partition", metavar="NAME")
    write.add_argument("--account", metavar="NAME")
    write.add_argument("--qos", metavar="NAME")
    write.add_argument("--modules", metavar="A,B,...", help="what the script loads first")
    write.add_argument("--venv", metavar="DIR", help="virtual environment of the ranks; by default the one in use")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Launch. Returns 0 when finished, 75 when stopped on request, 2 when refused, else the launcher's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(words, os.environ)
    except HvdbsError as error:
        sys.stderr.write(f"hvdbs: error: {error}\n")
        return 2


def _main(words: Sequence[str], variables: Mapping[str, str]) -> int:
    own, program = _split(words)
    options, rest = parser().parse_known_args(own)
    if rest and program:
        raise refusal("command line", rest[0], "stands before --, after which a whole command is given", "--help")
    _check_paired(options)
    if options.sbatch is not None:
        return _write(options, rest, program)
    host_file = None if options.hostfile is None else (options.hostfile, _text(options.hostfile))
    there = allocation.find(variables, options.np, options.ranks_per_node, options.hosts, host_file)
    out = None
    if not program:
        words, out = with_run_directory(rest, options.configs, options.seeds, variables)
        config = value_of(words, "--config")
        if config is not None:
            recipe_path(config)
        if "SLURM_JOB_ID" in variables:
            words = going_on(words, begun=job.newest(out) is not None)
        program = [sys.executable, "-m", "hvdbs.train", *words]
    if options.nic is not None:
        network.address_of(options.nic)
    launcher = options.launcher or commands.default_launcher(there)
    choice = commands.Choice(launcher, sys.executable, options.nic, as_root=os.geteuid() == 0)
    folder = str(Path(sys.executable).parent)  # of the environment's launchers, for a python called by its path
    path = variables.get("PATH", os.defpath)
    if folder not in path.split(os.pathsep):
        variables = {**variables, "PATH": f"{folder}{os.pathsep}{path}"}
    limits = attempts.limits(options.max_restarts, options.min_np, there, out)

    def start(where: allocation.Allocation, restarted: bool, saved: bool) -> commands.Launch:
        whole = [*program[:3], *resuming(program[3:], saved)] if restarted else program
        return commands.launch(where, choice, whole, variables)

    if options.print_command:
        print(start(there, False, False))
        return 0
    return attempts.run(start, there, out, _again(options, program), variables, limits)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def _check_paired(options: argparse.Namespace) -> None:
    """Options that would be ignored are refused. Raises HvdbsError."""
    only_written = ("nodes", "cpus_per_rank", "gpus_per_node", "time", "signal_seconds", "partition", "account", "qos")
    for name in (*only_written, "modules", "venv"):
        if options.sbatch is None and getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise refusal(option, getattr(options, name), "is for the script that --sbatch writes", "sbatch has it too")
    if options.sbatch is not None and (options.max_restarts is not None or options.min_np is not None):
        raise HvdbsError(f"--sbatch: --max-restarts and --min-np do not go with it; {attempts.SLURM_RESTARTS}")
    if options.sbatch is not None and (options.hosts or options.hostfile or options.np):
        raise HvdbsError("--sbatch: --hosts, --hostfile and --np do not go with it; Slurm chooses the hosts of --nodes")


def _again(options: argparse.Namespace, program: Sequence[str]) -> list[str]:
    """The command of a job that goes on after this one: the same launch, with the run directory that it had."""
    named = {"--launcher": options.launcher, "--np": options.np, "--ranks-per-node": options.ranks_per_node}
    named |= {"--nic": options.nic}
    return [sys.executable, "-m", "hvdbs.launch", *_words(named), *program[3:]]


def _words(named: Mapping[str, object]) -> list[str]:
    """The options that are given, as a command line has them."""
    return [word for option, value in named.items() if value is not None for word in (option, str(value))]


def _write(options: argparse.Namespace, rest: Sequence[str], program: Sequence[str]) -> int:
    config = value_of(rest, "--config")
    if config is not None:
        recipe_path(config)
    elif not program and options.configs is None:
        raise HvdbsError("--config: none given; a file or a packaged recipe, or -- and a whole command")
    if options.nodes is None:
        raise HvdbsError("--nodes: none given; how many nodes the job asks for")
    name = Path(config).stem if config else "hvdbs"
    given = {"time": options.time, "signal_seconds": options.signal_seconds}
    venv = options.venv or (sys.prefix if sys.prefix != sys.base_prefix else None)
    request = sbatch.Request(
        name=name,
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        cpus_per_rank=options.cpus_per_rank,
        gpus_per_node=options.gpus_per_node,
        partition=options.partition,
        account=options.account,
        qos=options.qos,
        modules=tuple(options.modules.split(",")) if options.modules else (),
        environment=venv,
        runs=None if options.configs is None else count(options.configs.split(","), options.seeds.split(",")),
        **{key: value for key, value in given.items() if value is not None},
    )
    named = {"--launcher": options.launcher, "--nic": options.nic}
    if options.configs is not None:
        named |= {"--configs": options.configs, "--seeds": options.seeds}
    arguments = _words(named)
    text = sbatch.script(request, [*arguments, *rest, *(["--", *program] if program else [])])
    if options.sbatch == "-":
        sys.stdout.write(text)
        return 0
    path = Path(options.sbatch or f"{name}.sbatch")
    if path.exists() and path.read_bytes() != text.encode(errors="surrogateescape"):
        raise refusal("--sbatch", path, "exists and says something else", "remove it, or --sbatch other.sbatch")
    path.write_bytes(text.encode(errors="surrogateescape"))
    print(f"wrote {path}; submit it with: sbatch {path}")
    return 0


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        raise refusal("--hostfile", path, f"cannot be read ({reason})") from None


if __name__ == "__main__":
    sys.exit(entry.run(main))
