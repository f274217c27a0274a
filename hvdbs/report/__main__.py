"""python -m hvdbs.report DIR|FILE...: a page, pictures and a few tables of runs and of benchmarks, from their CSV
files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdbs import entry
from hvdbs.errors import HvdbsError
from hvdbs.report.writing import report

_EXAMPLES = """examples:
  python -m hvdbs.report runs/demo-20260101-120000        writes report.html and report.png into the run
  python -m hvdbs.report runs/constant runs/growing --out plots
  python -m hvdbs.report benchmarks/results/throughput.csv runs/growing --out plots

report.html is one file that needs no network. A run may still be going on. Several runs share their axes; what is
written then goes to --out, by default here."""


def main(arguments: Sequence[str] | None = None) -> int:
    command = argparse.ArgumentParser(
        prog="python -m hvdbs.report",
        description="Compare runs by score and communication, and benchmarks by medians: a page, pictures, tables.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "paths", metavar="DIR|FILE", nargs="+", type=Path, help="run directories, and CSV files of benchmarks"
    )
    command.add_argument("--out", metavar="DIR", type=Path, help="folder for report.html and the pictures")
    options = command.parse_args(arguments)
    only = options.paths[0] if len(options.paths) == 1 and options.paths[0].is_dir() else Path()
    try:
        print(report(options.paths, options.out or only))
    except HvdbsError as error:
        print(f"hvdbs.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main))
