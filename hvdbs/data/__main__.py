"""``python -m hvdbs.data``: make, list and check image folders."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

import numpy as np

from hvdbs import entry
from hvdbs.data import digits, fashion_mnist
from hvdbs.data.folder import shown
from hvdbs.data.index import Files, parse
from hvdbs.data.kept import load_or_scan
from hvdbs.errors import HvdbsError, refusal
from hvdbs.rules import MOST_THREADS

EXAMPLES = """\
examples:
  python -m hvdbs.data digits --out data/digits      write 1,797 real 8 x 8 digits as JPEGs
  python -m hvdbs.data fashion-mnist --out data/fashion-mnist --samples 20000
                                                     fetch Debian's package of it, unpack it, write PNGs
  python -m hvdbs.data index /scratch/imagenet       list the folder again and keep the list
  python -m hvdbs.data check /scratch/imagenet       decode every file once; name the bad ones, and those of val
                                                     that are in train too

An image folder holds train/<class>/* and val/<class>/*: JPEG or PNG files, whatever their names' case.
"""


_MOST_COPIES = 20  # that are named


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0, 1 if ``check`` found something, 2 for a mistake (one line on stderr)."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except HvdbsError as error:
        print(f"hvdbs.data: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdbs.data",
        description="Make, list and check image folders.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("digits", help="write scikit-learn's digits as an image folder, unless they are there")
    one.add_argument("--out", required=True, metavar="DIR", help="the folder to make; new, empty or already the digits")
    one.set_defaults(run=_digits)
    one = commands.add_parser("fashion-mnist", help="write Fashion-MNIST as an image folder, unless it is there")
    one.add_argument("--out", required=True, metavar="DIR", help="the folder to make; new, empty or already that")
    one.add_argument(
        "--from", dest="source", metavar="DIR", help="its four IDX files (.gz or not), not Debian's package"
    )
    one.add_argument("--samples", type=int, metavar="N", help="train on N, equally many of each class (all 60,000)")
    one.set_defaults(run=_fashion_mnist)
    one = commands.add_parser("index", help="list an image folder and keep the list for later runs")
    one.add_argument("root", metavar="ROOT", help="the image folder")
    one.add_argument("--index-dir", metavar="DIR", help="keep the list there, not beside the data (data.index_dir)")
    one.set_defaults(run=_index)
    one = commands.add_parser("check", help="decode every file of an image folder once, compare train and val")
    one.add_argument("root", metavar="ROOT", help="the image folder")
    one.add_argument("--index-dir", metavar="DIR", help="where its list is kept, if not beside the data")
    one.add_argument("--backend", choices=("auto", "dali", "pillow"), default="auto", help="who decodes (auto)")
    one.add_argument("--threads", type=int, metavar="N", help="decoding threads (all cores)")
    one.set_defaults(run=_check)
    return parser


def _digits(arguments: argparse.Namespace) -> int:
    written = digits.write(arguments.out)
    if written:
        print(f"wrote {written} images ({digits.TRAIN} to train, the rest to val) to {shown(arguments.out)}")
        print(f"train on them: python -m hvdbs.train --config digits --data.root {shown(arguments.out)}")
    return 0


def _fashion_mnist(arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    written = fashion_mnist.write(arguments.out, arguments.source, arguments.samples)
    if written:
        train, val = written
        seconds = time.perf_counter() - start
        print(f"wrote {train} images to train and {val} to val of {shown(arguments.out)} in {seconds:.1f} seconds")
        print(f"train on them: python -m hvdbs.train --config fashion-mnist --data.root {shown(arguments.out)}")
    return 0


def _index(arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    # A file that was overwritten in place changes no folder, so whoever asks for a list gets a new one.
    made = load_or_scan(arguments.root, arguments.index_dir, rescan=True)
    seconds = time.perf_counter() - start
    index = parse(made.data, arguments.root)
    print(f"{'split':<7}{'images':>12}{'classes':>10}{'bytes':>20}")
    for name, files in (("train", index.train), ("val", index.val)):
        print(f"{name:<7}{len(files):>12,}{_classes(files):>10,}{int(files.sizes.sum()):>20,}")
    if index.ignored:
        print(f"{index.ignored:,} other entries are not taken for images (their suffix, hidden, folders)")
    print(*index.warnings(), sep="\n", end="\n" if index.warnings() else "")
    where = shown(str(made.path)) if made.path else "no file, since none can be written"
    print(f"listed in {seconds:.1f} seconds; kept in {where}")
    return 0


def _classes(files: Files) -> int:
    return len(np.unique(files.labels))


def _check(arguments: argparse.Namespace) -> int:
    from hvdbs.comm.local import Solo
    from hvdbs.data import check
    from hvdbs.data.sources import agreed_backend

    start = time.perf_counter()
    if arguments.threads is not None and not 1 <= arguments.threads <= MOST_THREADS:
        rule = "must be at least 1" if arguments.threads < 1 else f"must be at most {MOST_THREADS}"
        raise refusal("--threads", arguments.threads, rule)
    threads = arguments.threads or len(os.sched_getaffinity(0))
    made = load_or_scan(arguments.root, arguments.index_dir, write=False)
    index = parse(made.data, arguments.root)
    backend = agreed_backend(arguments.backend, Solo())
    decode_all = check.with_dali if backend == "DALI" else check.with_pillow
    bad, digests = 0, check.Digests(index)
    for problem in decode_all(index, threads, digests):
        bad += 1
        print(problem, flush=True)
    copies = digests.copies()
    for val, train in copies[:_MOST_COPIES]:
        print(refusal("data", shown(val), f"holds the same bytes as {shown(train)}", "take it out of one of them"))
    if len(copies) > _MOST_COPIES:
        print(f"data: {len(copies) - _MOST_COPIES:,} more images of val are in train too")
    files, seconds = len(index.train) + len(index.val), time.perf_counter() - start
    found = f"{bad or 'none'} bad, {len(copies) or 'none'} of val also in train"
    print(f"{files:,} files decoded by {backend} in {seconds:.1f} seconds: {found}")
    return 1 if bad or copies else 0


if __name__ == "__main__":
    sys.exit(entry.run(main))
