"""Decoding with NVIDIA DALI. The only module that imports it; the package works without.

The pipeline has no reader and no randomness of its own: it is fed encoded bytes, rectangles and mirrorings
for each sample (``external_source``), so what comes out is a function of what goes in, whatever came before.
Nothing is reset at an epoch's end, and a short micro-batch is a smaller batch of the same pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from traceback import clear_frames
from typing import Any

import numpy as np
import nvidia.dali as _dali
import torch
from torch.utils.dlpack import from_dlpack

from hvdbs.data import Batch
from hvdbs.data.ahead import look_ahead
from hvdbs.data.reader import Encoded, Sample, undecodable
from hvdbs.errors import HvdbsError

dali: Any = _dali  # its type hints cover a part of it only
_READERS = 32  # reading threads wait for the file system; more would only queue there
Feed = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Decoder:
    """Squares of ``image_size`` pixels, at most ``largest`` at a time, on ``threads`` CPU threads.

    ``gpu`` is the CUDA device that takes part ("mixed" decoding); None for the CPU alone, where no driver is
    needed.
    """

    image_size: int
    largest: int
    threads: int
    gpu: int | None = None


def batches(
    read: Callable[[Sample], Encoded], requests: Iterable[list[Sample]], decoder: Decoder, read_ahead: int
) -> Generator[Batch, None, None]:
    """One batch for each request, in order; ``read_ahead`` more are decoded meanwhile, and as many read.

    ``requests`` is advanced by the consumer's thread alone, up to twice ``read_ahead`` beyond what it was
    given. Inputs are uint8 [B, S, S, 3] on the CPU, or on ``decoder.gpu``. They own their memory. Closing the
    iterator ends the threads. Raises HvdbsError with the path of a file that cannot be read or decoded.
    """
    ready: deque[list[Encoded]] = deque()  # read, and to be taken by the pipeline when it next asks
    under_way: deque[list[Encoded]] = deque()  # taken, and not yet handed over
    failure: Exception | None = None

    def feed() -> tuple[Any, ...]:
        if not ready:
            raise StopIteration
        under_way.append(ready.popleft())
        return _inputs(under_way[-1])

    readers = min(_READERS, 2 * decoder.threads)
    with closing(look_ahead(requests, read, readers, read_ahead)) as encoded:
        pipeline = _pipeline(feed, decoder, read_ahead)
        wanted = read_ahead  # a pipeline fills itself at its first run and takes one more at each later one
        try:
            while True:
                try:
                    if failure is None:
                        ready.extend(islice(encoded, wanted))
                except Exception as error:
                    failure = error  # raised in its turn: what was read before is decoded first
                wanted = 1
                try:
                    squares = _tensor(pipeline.run()[0], decoder)
                except StopIteration:
                    break
                except RuntimeError as error:
                    clear_frames(error.__traceback__)  # they would keep the pipeline and its threads
                    raise _blame(under_way, decoder) or error from None
                items = under_way.popleft()
                labels = torch.tensor([item.label for item in items], dtype=torch.int64)
                yield Batch(_transposed(squares, items), labels)
            if failure is not None:
                raise failure
        finally:
            del pipeline  # its threads end with it


class Trial:
    """Decoding for the sake of its errors: DALI says that a batch is bad, this which of its samples."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._slot: list[Sequence[Encoded]] = []
        self._pipeline: Any = None

    def errors(self, items: Sequence[Encoded]) -> list[HvdbsError]:
        """One error, with its path, for each of ``items`` (at most ``largest``) that cannot be decoded."""
        if not items or self._decodes(items):
            return []
        if len(items) == 1:
            return [undecodable(items[0].path, "cannot be decoded by DALI")]
        return [error for item in items for error in self.errors([item])]

    def _decodes(self, items: Sequence[Encoded]) -> bool:
        slot = self._slot
        if self._pipeline is None:
            self._pipeline = _pipeline(lambda: _inputs(slot.pop()), self._decoder, 1)
        slot.append(items)
        try:
            self._pipeline.run()
        except RuntimeError:
            self._pipeline = None  # it is of no use after an error
            return False
        return True


def _blame(under_way: Iterable[Sequence[Encoded]], decoder: Decoder) -> HvdbsError | None:
    trial = Trial(decoder)
    return next((error for items in under_way for item in items for error in trial.errors([item])), None)


def _pipeline(feed: Feed, decoder: Decoder, depth: int) -> Any:
    fn, types = dali.fn, dali.types
    pipeline = dali.Pipeline(
        batch_size=decoder.largest,
        num_threads=decoder.threads,
        device_id=decoder.gpu,  # None, not 0 or -1: those look for a driver
        prefetch_queue_depth=depth,
        seed=0,  # nothing draws from it
    )
    with pipeline:
        data, start, shape, mirror_x, mirror_y = fn.external_source(
            source=feed, num_outputs=5, dtype=[types.UINT8] + 4 * [types.INT32]
        )
        images = fn.decoders.image_slice(
            data,
            start=start,
            shape=shape,
            axes=[1, 0],  # x, y
            device="cpu" if decoder.gpu is None else "mixed",
            output_type=types.RGB,
            adjust_orientation=False,  # part of the cut
            jpeg_fancy_upsampling=True,  # on the GPU as the CPU decoders do it
        )
        size = [decoder.image_size, decoder.image_size]
        squares = fn.resize(images, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
        pipeline.set_outputs(fn.flip(squares, horizontal=mirror_x, vertical=mirror_y))
    return pipeline


def _inputs(items: Sequence[Encoded]) -> tuple[Any, ...]:
    cuts = [item.cut for item in items]
    return (
        [np.frombuffer(item.data, np.uint8) for item in items],
        np.array([(cut.rectangle.x, cut.rectangle.y) for cut in cuts], np.int32),
        np.array([(cut.rectangle.width, cut.rectangle.height) for cut in cuts], np.int32),
        np.array([cut.mirror_x for cut in cuts], np.int32),
        np.array([cut.mirror_y for cut in cuts], np.int32),
    )


def _tensor(output: Any, decoder: Decoder) -> torch.Tensor:
    if decoder.gpu is None:
        # The default executor gives each output memory of its own, which the tensor keeps alive: no copy.
        return from_dlpack(output.as_tensor())
    # On a GPU that memory would go back to DALI in its stream's order, not torch's, while kernels may still
    # read it.
    stream = torch.cuda.Stream(decoder.gpu)
    with torch.cuda.stream(stream):
        own = from_dlpack(output.as_tensor()).clone()
    stream.synchronize()
    own.record_stream(torch.cuda.current_stream(decoder.gpu))
    return own


def _transposed(squares: torch.Tensor, items: Sequence[Encoded]) -> torch.Tensor:
    for i, item in enumerate(items):
        if item.cut.transpose:
            squares[i] = squares[i].transpose(0, 1).clone()
    return squares
