"""Decoding with Pillow, for machines without DALI: the same reader and cuts, pixels within half a level of DALI's."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterable
from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from hvdbs.data import Batch
from hvdbs.data.ahead import look_ahead
from hvdbs.data.augment import turned
from hvdbs.data.reader import Encoded, Sample, undecodable


def square(item: Encoded, image_size: int) -> NDArray[np.uint8]:
    """Decode, cut, resize (bilinear, antialiased) and turn one image: uint8 [S, S, 3], S = ``image_size`` pixels.

    Raises HvdbsError with the path of an image that is truncated or that Pillow cannot decode.
    """
    x, y, width, height = item.cut.rectangle
    try:
        with Image.open(io.BytesIO(item.data), formats=("JPEG", "PNG")) as image:
            # Transparency is dropped, not blended, as DALI does; Pillow would warn of it for palettes.
            image.info.pop("transparency", None)
            # Cut before the resize, so that no pixel outside shines in at the edges. Converted before the
            # resize too: palette indices cannot be averaged, and Pillow would weigh colours by their alpha.
            part = image.crop((x, y, x + width, y + height)).convert("RGB")
    except Exception as error:  # Pillow's plugins raise many kinds for damaged files
        raise undecodable(item.path, f"cannot be decoded by Pillow: {error}") from None
    resized = part.resize((image_size, image_size), Image.Resampling.BILINEAR)
    return turned(np.asarray(resized), item.cut)


def batches(
    read: Callable[[Sample], Encoded],
    requests: Iterable[list[Sample]],
    image_size: int,
    threads: int,
    read_ahead: int,
) -> Generator[Batch, None, None]:
    """One batch for each request, in order; ``threads`` threads read and decode ``read_ahead`` more meanwhile.

    Inputs are uint8 [B, S, S, 3]. Closing the iterator ends the threads. Raises HvdbsError with the path of a file
    that cannot be read or decoded.
    """
    Image.preinit()  # once and here, not by several threads at the same time

    def work(sample: Sample) -> tuple[NDArray[np.uint8], int]:
        item = read(sample)
        return square(item, image_size), item.label

    with closing(look_ahead(requests, work, threads, read_ahead)) as ready:
        for results in ready:
            squares = torch.from_numpy(np.stack([pixels for pixels, _ in results]))
            yield Batch(squares, torch.tensor([label for _, label in results], dtype=torch.int64))
