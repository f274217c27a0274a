"""Images made from the seed, with no files: to measure everything but the data, and for tests that must learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hvdbs.batching import MicroBatch
from hvdbs.data import Batch, streams
from hvdbs.data.ahead import look_ahead
from hvdbs.data.reader import Sample, training_samples, validation_samples

_TRAIN, _VAL, _PATTERN = 0, 1, 2
_GRID = 4  # a class is 4 x 4 coloured fields, half of each pixel; the other half is noise of the sample's own


@dataclass(frozen=True)
class SyntheticSource:
    """A Source (see ``hvdbs.data``) of any size. ``image_size``: pixels.

    A sample is a function of (``seed``, split, index) alone: the same in every epoch, without augmentation.
    """

    seed: int
    image_size: int
    classes: tuple[str, ...]
    train_samples: int
    val_samples: int
    threads: int
    read_ahead: int

    backend = "synthetic"

    def train(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        return self._batches(training_samples(requests, self.seed, self.train_samples))

    def validation(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        return self._batches(validation_samples(requests, self.val_samples))

    def sample(self, sample: Sample) -> tuple[NDArray[np.uint8], int]:
        """Pixels uint8 [S, S, 3] and the label, uniform over the classes."""
        size, split = self.image_size, _VAL if sample.epoch is None else _TRAIN
        bits = streams.synthetic_bits(self.seed, split, sample.index, 1 + -(-size * size * 3 // 8))
        label = int(bits[0] % np.uint64(len(self.classes)))
        pixels = bits[1:].view(np.uint8)[: size * size * 3].reshape(size, size, 3)
        pixels >>= 1
        pixels += self._pattern(label)
        return pixels, label

    def _pattern(self, label: int) -> NDArray[np.uint8]:
        bits = streams.synthetic_bits(self.seed, _PATTERN, label, _GRID * _GRID * 3 // 8)
        colours = bits.view(np.uint8)
        colours >>= 1
        field = np.arange(self.image_size) * _GRID // self.image_size
        return colours.reshape(_GRID, _GRID, 3)[:, field][field]

    def _batches(self, requests: Iterable[list[Sample]]) -> Iterator[Batch]:
        with closing(look_ahead(requests, self.sample, self.threads, self.read_ahead)) as ready:
            for made in ready:
                inputs = torch.from_numpy(np.stack([pixels for pixels, _ in made]))
                yield Batch(inputs, torch.tensor([label for _, label in made], dtype=torch.int64))
