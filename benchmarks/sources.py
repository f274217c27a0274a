"""The sources that the loader's benchmark compares. Each is an endless iterator of (images, labels) on the CPU.

All give uint8 tensors: random resized crops (area 8 to 100 %, ratio 3/4 to 4/3, bilinear, antialiased) of every image
once an epoch in a random order, mirrored half of the time. Normalisation belongs to the model's side in hvdbs, and is
left out for all. [B, S, S, 3] where the decoder gives that, [B, 3, S, S] from torchvision: nobody is made to transpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from hvdbs.batching import MicroBatch
from hvdbs.comm.local import Solo
from hvdbs.config import Config, DataConfig
from hvdbs.data.sources import open_source

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # what hvdbs's AugmentConfig has by default
ENDLESS = 10**9


@dataclass(frozen=True)
class Setting:
    """``root`` of an image folder; B images of ``image_size`` pixels a batch; ``cores``: threads or workers.

    ``read_ahead``: batches that are decoded before they are asked for, where a source can be told.
    """

    root: Path
    micro_batch: int
    image_size: int
    cores: int
    read_ahead: int
    seed: int


def hvdbs_source(setting: Setting, backend: str) -> Batches:
    """Ours, opened as a run opens it."""
    data = DataConfig(
        root=str(setting.root),
        backend=backend,  # type: ignore[arg-type]
        image_size=setting.image_size,
        threads=setting.cores,
        read_ahead=setting.read_ahead,
    )
    config = Config(seed=setting.seed, micro_batch=setting.micro_batch, data=data)
    source = open_source(config, Solo(), torch.device("cpu"))
    size = setting.micro_batch
    requests = (MicroBatch(k, k * size, size) for k in itertools.count())
    return ((batch.inputs, batch.labels) for batch in source.train(requests))


def dali_reader(setting: Setting) -> Batches:
    """DALI alone, in the fastest form that was found: its file reader, and its decoder that crops at random.

    Outputs are taken without a copy, as hvdbs takes them; ``shuffle_after_epoch`` needs no buffer of encoded images.
    """
    import nvidia.dali as dali

    fn: Any = dali.fn
    types: Any = dali.types
    pipeline: Any = dali.Pipeline(
        batch_size=setting.micro_batch,
        num_threads=setting.cores,
        device_id=None,
        prefetch_queue_depth=setting.read_ahead,
        seed=setting.seed,
    )
    with pipeline:
        data, labels = fn.readers.file(
            file_root=str(setting.root / "train"), shuffle_after_epoch=True, prefetch_queue_depth=setting.read_ahead
        )
        images = fn.decoders.image_random_crop(
            data,
            device="cpu",
            output_type=types.RGB,
            random_area=SCALE,
            random_aspect_ratio=RATIO,
            adjust_orientation=False,
            jpeg_fancy_upsampling=True,
        )
        size = [setting.image_size, setting.image_size]
        squares = fn.resize(images, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
        pipeline.set_outputs(fn.flip(squares, horizontal=fn.random.coin_flip()), labels)
    while True:
        images, labels = pipeline.run()
        yield from_dlpack(images.as_tensor()), from_dlpack(labels.as_tensor()).flatten().long()


def data_loader(setting: Setting, decode: str) -> Batches:
    """torch's DataLoader with a worker process for each core; ``decode``: pillow or io, torchvision's own decoder."""
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    crop = [v2.RandomResizedCrop(setting.image_size, scale=SCALE, ratio=RATIO, antialias=True)]
    transform = v2.Compose([*crop, v2.RandomHorizontalFlip(), *([v2.PILToTensor()] if decode == "pillow" else [])])
    options: dict[str, Any] = {} if decode == "pillow" else {"loader": _decode_jpeg}
    folder = ImageFolder(setting.root / "train", transform, **options)
    generator = torch.Generator().manual_seed(setting.seed)
    loader: Any = DataLoader(
        folder,
        batch_size=setting.micro_batch,
        # One endless epoch: ends of epochs, at which its queues run empty, would be frequent in so small a folder.
        sampler=RandomSampler(folder, num_samples=ENDLESS, generator=generator),
        num_workers=setting.cores,
        prefetch_factor=max(1, -(-setting.read_ahead // setting.cores)),
        generator=generator,
    )
    return iter(loader)


def _decode_jpeg(path: str) -> torch.Tensor:
    from torchvision import io

    return io.decode_jpeg(io.read_file(path), mode=io.ImageReadMode.RGB)


OURS, REFERENCE = "hvdbs (DALI)", "DALI file reader"
SOURCES: dict[str, Callable[[Setting], Batches]] = {
    OURS: lambda setting: hvdbs_source(setting, "dali"),
    REFERENCE: dali_reader,
    "hvdbs (Pillow)": lambda setting: hvdbs_source(setting, "pillow"),
    "DataLoader (torchvision.io)": lambda setting: data_loader(setting, "io"),
    "DataLoader (Pillow)": lambda setting: data_loader(setting, "pillow"),
}
