"""Where samples come from. A source turns stream positions into batches and knows nothing of ranks or windows.

``order`` says which sample stands at a position, ``augment`` how it is cropped; ``index`` lists an image folder once,
``reader`` reads files ahead, ``imagenet`` (DALI) and ``fallback`` (Pillow) decode them; ``synthetic`` and
``analytic`` need no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hvdbs.batching import MicroBatch

if TYPE_CHECKING:  # listing an image folder needs no torch
    import torch


@dataclass(frozen=True)
class Batch:
    """One micro-batch. ``inputs``: uint8 [B, H, W, C] for images, normalised on the device by the model's side;
    a floating-point tensor [B, ...] otherwise. ``labels``: int64 [B], or float64 [B] where there are no classes."""

    inputs: torch.Tensor
    labels: torch.Tensor


class Source(Protocol):
    """A training and a validation set of known size."""

    @property
    def train_samples(self) -> int:
        """N: the length of an epoch."""
        ...

    @property
    def val_samples(self) -> int: ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names; none where targets are numbers."""
        ...

    def train(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        """One batch for each request, in order, decoded ahead of the caller.

        ``requests`` is consumed lazily and may be endless; positions are those of the training stream. Closing the
        iterator (``close()``) ends its threads. Raises HvdbsError with the path of a file that cannot be decoded.
        """
        ...

    def validation(self, requests: Iterable[MicroBatch]) -> Iterator[Batch]:
        """The same for the validation set: positions are sample indices, in index order, without augmentation."""
        ...
