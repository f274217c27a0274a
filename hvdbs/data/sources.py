"""From a Config to the Source it asks for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from hvdbs.batching import MicroBatch
from hvdbs.comm import Communicator, agree
from hvdbs.comm.cores import own_cores
from hvdbs.config import Config, DataConfig
from hvdbs.data import Batch, fallback, folder
from hvdbs.data.analytic import AnalyticSource, open_analytic
from hvdbs.data.index import Files, Index
from hvdbs.data.kept import share_index
from hvdbs.data.reader import Encoded, Rules, Sample, encoded, training_samples, validation_samples
from hvdbs.data.synthetic import SyntheticSource
from hvdbs.errors import refusal

DALI_PACKAGE = "nvidia-dali-cuda130"


class Decode(Protocol):
    """A back-end: one batch for each request, in order, ahead of the caller. Closing it ends its threads."""

    def __call__(self, read: Callable[[Sample], Encoded], requests: Iterable[list[Sample]], /) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class ImageSource:
    """A Source (see ``hvdbs.data``) over an image folder. ``backend``: who decodes, in words."""

    index: Index
    rules: Rules
    decode: Decode
    backend: str

    @property
    def train_samples(self) -> int:
        return len(self.index.train)

    @property
    def val_samples(self) -> int:
        return len(self.index.val)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.index.classes

    def train(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        return self.decode(
            self._reader(self.index.train), training_samples(requests, self.rules.seed, self.train_samples)
        )

    def validation(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        return self.decode(self._reader(self.index.val), validation_samples(requests, self.val_samples))

    def _reader(self, files: Files) -> Callable[[Sample], Encoded]:
        return partial(encoded, files, self.index.root, self.rules)


def open_source(
    config: Config, comm: Communicator, device: torch.device, notice: Callable[[str], None] = lambda text: None
) -> ImageSource | SyntheticSource | AnalyticSource:
    """Collective. The training and validation data that ``config`` describes, the same on every rank.

    ``device`` is where this rank's model lives; ``notice`` is told before rank 0 lists a folder, which may
    take minutes, and what is odd about it. Raises HvdbsError on every rank: settings that break a rule, a folder
    without the right layout, sizes other than expected, a back-end that is missing on some rank.
    """
    data = config.data
    threads = data.threads or max(1, int(own_cores(comm)))
    if data.kind == "analytic":
        return open_analytic(config)
    if data.kind == "synthetic":
        return _synthetic(config, threads)
    if data.root is None:
        raise refusal("data.root", "none given", "but images need a folder", "give one, or data.kind synthetic")
    index = share_index(os.path.expanduser(data.root), data.index_dir, comm, notice)
    for line in index.warnings():
        notice(line)
    _check_sizes(data, index)
    _check_every_rank_sees(index, comm)
    rules = Rules(config.seed, data.image_size, data.resize, data.exif, data.augment)
    backend = agreed_backend(data.backend, comm)
    if backend.startswith("Pillow"):
        if data.decode == "mixed":
            raise refusal("data.decode", "mixed", f"needs DALI, not {backend}", "use data.decode cpu")
        decode: Decode = partial(
            fallback.batches, image_size=data.image_size, threads=threads, read_ahead=data.read_ahead
        )
        return ImageSource(index, rules, decode, backend)
    return ImageSource(index, rules, _dali(config, device, threads), f"{backend}, {data.decode} decoding")


def _synthetic(config: Config, threads: int) -> SyntheticSource:
    data, classes = config.data, config.model.classes
    for name, value in (
        ("data.train_samples", data.train_samples),
        ("data.val_samples", data.val_samples),
        ("model.classes", classes),
    ):
        if value is None:
            raise refusal(name, "none given", "but synthetic data has no size of its own", "for example 1000")
    assert data.train_samples
    assert data.val_samples
    assert classes
    names = tuple(str(number) for number in range(classes))
    return SyntheticSource(
        config.seed, data.image_size, names, data.train_samples, data.val_samples, threads, data.read_ahead
    )


def _check_sizes(data: DataConfig, index: Index) -> None:
    for name, expected, files in (
        ("train_samples", data.train_samples, index.train),
        ("val_samples", data.val_samples, index.val),
    ):
        if expected is not None and expected != len(files):
            raise refusal(
                f"data.{name}",
                expected,
                f"is not what {folder.shown(files.place)} holds: {len(files)} images",
                f"set {len(files)} or leave it out",
            )


def _check_every_rank_sees(index: Index, comm: Communicator) -> None:
    first = index.train.path(0)
    try:
        os.stat(first)
        error = None
    except OSError as problem:
        error = f"{folder.unreadable(first, problem)} on this rank's node; is data.root mounted everywhere?"
    agree(comm, error)


def agreed_backend(asked: str, comm: Communicator) -> str:
    """Collective. DALI or Pillow, in words, the same on every rank; ``asked``: auto, dali or pillow.

    Raises HvdbsError on every rank if DALI is asked for, or chosen by rank 0, and some rank cannot import it.
    """
    missing = "" if asked == "pillow" else _dali_import_error()
    if asked == "auto":
        # Rank 0 chooses for all: pixels differ a little between the two.
        choice = f"Pillow (DALI cannot be imported: {missing})" if missing else "DALI"
        choice = comm.broadcast_bytes(choice.encode()).decode()
    else:
        choice = {"dali": "DALI", "pillow": "Pillow"}[asked]
    problem = None
    if choice == "DALI" and missing:
        install = f"pip install {DALI_PACKAGE}, or use pillow"
        problem = str(refusal("data.backend", "dali", f"cannot be imported ({missing})", install))
    agree(comm, problem)
    return choice


def _dali_import_error() -> str:
    """Why DALI cannot be imported; empty if it can."""
    try:
        importlib.import_module("hvdbs.data.imagenet")
    except (ImportError, OSError) as error:  # OSError: a shared library is missing or for another machine
        return str(error)
    return ""


def _dali(config: Config, device: torch.device, threads: int) -> Decode:
    from hvdbs.data import imagenet

    data, gpu = config.data, None
    if data.decode == "mixed":
        if device.type != "cuda":
            raise refusal("data.decode", "mixed", f"needs a GPU, not device {device}", "use data.decode cpu")
        gpu = device.index or 0
    largest = max(config.micro_batch, config.evaluation.micro_batch or 0)
    decoder = imagenet.Decoder(data.image_size, largest, threads, gpu)
    return partial(imagenet.batches, decoder=decoder, read_ahead=data.read_ahead)
