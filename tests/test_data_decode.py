"""Both back-ends: the same cuts, pixels within half a level of each other, and the same bits every time."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from image_folders import encode, photo, two_classes, variants, with_orientation, write
from PIL import Image, ImageOps

from hvdbs.batching import MicroBatch, Window
from hvdbs.comm.local import Solo
from hvdbs.config import AugmentConfig, Config, DataConfig
from hvdbs.data import Batch, Source, augment, order
from hvdbs.data.sources import open_source

BACKENDS = ["dali", "pillow"]
PLAIN = AugmentConfig(crop="none", flip=False)
CPU = torch.device("cpu")


def open_folder(root: Path, backend: str = "dali", micro_batch: int = 8, seed: int = 0, **data: object) -> Source:
    settings = {"image_size": 224, "resize": 256, "threads": 2} | data
    config = Config(seed=seed, micro_batch=micro_batch, data=DataConfig(root=str(root), backend=backend, **settings))
    return open_source(config, Solo(), CPU)


def cut(begin: int, *sizes: int) -> Iterator[MicroBatch]:
    """Consecutive micro-batches of these sizes."""
    for size in sizes:
        yield MicroBatch(0, begin, size)
        begin += size


def together(batches: Iterator[Batch]) -> Batch:
    parts = list(batches)
    return Batch(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))


def threads() -> int:
    """Threads of this process, native ones included, once those that are ending have ended."""
    counts = []
    for _ in range(20):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.005)
    return min(counts)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every variant in train and in val."""
    root = tmp_path_factory.mktemp("photographs")
    return write(root, {f"{split}/one/{name}": data for split in ("train", "val") for name, data in variants().items()})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_classes(tmp_path_factory.mktemp("tiny"), train=17, val=7)


# --- what the pixels are


@pytest.mark.parametrize("exif", ["ignore", "apply"])
def test_both_back_ends_agree_to_half_a_level_on_every_kind_of_photograph(photographs: Path, exif: str) -> None:
    n = len(variants())
    sizes = [8, 8, n - 16]
    for split, count in (("train", 3 * n), ("val", n)):
        both = []
        for backend in BACKENDS:
            source = open_folder(photographs, backend, exif=exif)
            requests = cut(0, *sizes * (count // n))
            batch = together(source.train(requests) if split == "train" else source.validation(requests))
            assert (batch.inputs.shape, batch.inputs.dtype) == ((count, 224, 224, 3), torch.uint8)
            both.append(batch.inputs.to(torch.int16))
        means = (both[0] - both[1]).abs().float().mean((1, 2, 3))
        index = order.positions(0, n, 0, count).index if split == "train" else range(n)
        names = sorted(variants(), key=os.fsencode)
        worst = {names[i]: round(mean, 3) for i, mean in zip(index, means.tolist(), strict=True) if mean > 0.5}
        assert not worst


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_shows_the_drawn_crop_resized_and_mirrored(tmp_path: Path, backend: str) -> None:
    image = photo()
    root = write(tmp_path, {"train/a/x.png": encode(image, "PNG"), "val/a/x.png": encode(image, "PNG")})
    inputs = together(open_folder(root, backend, seed=4).train(cut(0, 6))).inputs
    mirrored = []
    for epoch in range(6):
        (x, y, w, h), flip = augment.training(4, epoch, 0, 640, 427, AugmentConfig())
        expected = image.crop((x, y, x + w, y + h)).resize((224, 224), Image.Resampling.BILINEAR)
        expected = ImageOps.mirror(expected) if flip else expected
        assert np.abs(inputs[epoch].numpy().astype(int) - np.asarray(expected)).mean() < 0.5
        mirrored.append(flip)
    assert len(set(mirrored)) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_validation_is_near_to_the_usual_resize_and_centre_crop(tmp_path: Path, backend: str) -> None:
    root = write(tmp_path, {f"{split}/a/x.png": encode(photo(), "PNG") for split in ("train", "val")})
    (found,) = together(open_folder(root, backend).validation(cut(0, 1))).inputs.numpy()
    scaled = photo().resize((round(640 * 256 / 427), 256), Image.Resampling.BILINEAR)
    left = (scaled.width - 224) // 2
    usual = np.asarray(scaled.crop((left, 16, left + 224, 240)))
    # Not the same: the usual way rounds the resized width and the crop's place to whole pixels of the result.
    assert np.abs(found.astype(int) - usual).mean() < 4
    assert np.corrcoef(found.ravel(), usual.ravel())[0, 1] > 0.995


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_images_pass_untouched(tmp_path: Path, backend: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    png = encode(Image.fromarray(pixels), "PNG")
    root = write(tmp_path, {"train/a/x.png": png, "val/a/x.png": png})
    source = open_folder(root, backend, image_size=8, resize=8, augment=PLAIN)
    for batches in (source.train(cut(0, 1)), source.validation(cut(0, 1))):
        assert np.array_equal(together(batches).inputs[0].numpy(), pixels)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (2, 3)])
def test_images_of_one_pixel_and_of_one_row_work(tmp_path: Path, backend: str, size: tuple[int, int]) -> None:
    image = photo().resize(size)
    root = write(tmp_path, {"train/a/x.jpg": encode(image), "val/a/x.png": encode(image, "PNG")})
    source = open_folder(root, backend, image_size=16, resize=20)
    assert together(source.train(cut(0, 4))).inputs.shape == (4, 16, 16, 3)
    assert together(source.validation(cut(0, 1))).inputs.shape == (1, 16, 16, 3)


BACK = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_exif_applied_a_turned_photograph_gives_what_the_upright_one_gives(tmp_path: Path, backend: str) -> None:
    upright = photo().resize((320, 213))
    results = {}
    for orientation in range(1, 9):
        stored = upright.transpose(BACK[orientation]) if orientation > 1 else upright
        data = with_orientation(stored, orientation)
        root = write(tmp_path / str(orientation), {"train/a/x.png": data, "val/a/x.png": data})
        source = open_folder(root, backend, exif="apply", image_size=112, resize=128)
        inputs = torch.cat([together(source.train(cut(0, 4))).inputs, together(source.validation(cut(0, 1))).inputs])
        results[orientation] = inputs.to(torch.int16)
    for orientation, found in results.items():
        assert (found - results[1]).abs().float().mean() < 0.3, orientation


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_exif_ignored_the_tag_changes_nothing(tmp_path: Path, backend: str) -> None:
    results = []
    for orientation in (1, 6):
        data = with_orientation(photo(), orientation, "JPEG")
        root = write(tmp_path / str(orientation), {"train/a/x.jpg": data, "val/a/x.jpg": data})
        results.append(together(open_folder(root, backend).train(cut(0, 3))).inputs)
    assert torch.equal(*results)


# --- what decides them


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_positions_give_the_same_bits_whatever_came_before_and_however_they_are_cut(
    photographs: Path, backend: str
) -> None:
    def run(*requests: MicroBatch, **other: int) -> Batch:
        return together(open_folder(photographs, backend, image_size=64, resize=64, **other).train(requests))

    whole = run(*cut(0, 8, 8, 8, 8))
    for again in (run(*cut(0, 8, 8, 8, 8)), run(*cut(0, *[3] * 10, 2)), run(*cut(0, 8, 8, 8, 8), threads=1)):
        assert torch.equal(again.inputs, whole.inputs)
        assert torch.equal(again.labels, whole.labels)
    assert torch.equal(run(MicroBatch(0, 20, 7)).inputs, whole.inputs[20:27])
    assert not torch.equal(run(*cut(0, 8, 8, 8, 8), seed=1).inputs, whole.inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_see_together_what_one_rank_sees(tiny: Path, backend: str, world_size: int) -> None:
    source = open_folder(tiny, backend, image_size=16, resize=16)
    windows = [Window(0, 20, 8), Window(20, 5, 8), Window(25, 31, 8)]

    def seen(rank: int, of: int) -> Iterator[Batch]:
        return source.train(piece for window in windows for piece in window.dealt_to(rank, of))

    alone, parts = seen(0, 1), [seen(rank, world_size) for rank in range(world_size)]
    for window in windows:
        for part, rank in zip(parts, range(world_size), strict=True):
            for _ in window.dealt_to(rank, world_size):
                mine, expected = next(part), next(alone)
                assert torch.equal(mine.inputs, expected.inputs)
                assert torch.equal(mine.labels, expected.labels)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(14,), (5, 5, 4), (1,) * 14])
def test_validation_gives_every_sample_once_in_index_order(tiny: Path, backend: str, sizes: tuple[int, ...]) -> None:
    source = open_folder(tiny, backend, micro_batch=14, image_size=16, resize=16)
    batch = together(source.validation(cut(0, *sizes)))
    assert batch.labels.tolist() == [0] * 7 + [1] * 7
    assert batch.labels.dtype == torch.int64
    assert torch.equal(batch.inputs, together(source.validation(cut(0, 14))).inputs)
    with pytest.raises(ValueError, match="of 14 validation samples"):
        next(source.validation(cut(10, 5)))


# --- memory, threads, ends


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_keeps_its_pixels_while_later_ones_are_decoded_and_after_the_end(tiny: Path, backend: str) -> None:
    batches = open_folder(tiny, backend, image_size=16, resize=16).train(cut(0, *[8] * 20))
    held = [(batch.inputs, batch.inputs.clone()) for batch in batches]
    del batches
    gc.collect()
    assert len(held) == 20
    assert all(torch.equal(inputs, copy) for inputs, copy in held)
    held[0][0].fill_(7)  # the caller's own


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_thread_is_left_after_close_or_the_end_or_when_forgotten(tiny: Path, backend: str) -> None:
    source = open_folder(tiny, backend, image_size=16, resize=16)
    together(source.train(cut(0, 8)))  # what the libraries start once and for all
    before = threads()

    def ended(end: str) -> None:
        batches = source.train(MicroBatch(0, 8 * k, 8) for k in (range(3) if end == "end" else itertools.count()))
        next(batches)
        assert threads() > before
        if end == "close":
            batches.close()
        elif end == "end":
            assert len(list(batches)) == 2

    gc.disable()  # nothing here may need the collector
    try:
        for end in ("close", "end", "forget"):
            ended(end)
            assert threads() == before, end
    finally:
        gc.enable()


@pytest.mark.parametrize("number", [1, 3])
def test_dali_decodes_on_as_many_threads_as_it_is_told(tiny: Path, number: int) -> None:
    pytest.importorskip("nvidia.dali")
    batches = open_folder(tiny, "dali", image_size=16, resize=16, threads=number).train(cut(0, 8, 8))
    next(batches)
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert sum(name.startswith("[DALI][TP") for name in names) == number
    batches.close()


def test_the_interpreter_ends_with_open_iterators_and_cpu_dali_needs_no_driver(tiny: Path) -> None:
    program = f"""
import itertools, torch
from hvdbs.batching import MicroBatch
from hvdbs.comm.local import Solo
from hvdbs.config import Config, DataConfig
from hvdbs.data.sources import open_source
kept = []
for backend in ("dali", "pillow"):
    data = DataConfig(root={str(tiny)!r}, backend=backend, image_size=16, resize=16)
    source = open_source(Config(micro_batch=8, data=data), Solo(), torch.device("cpu"))
    batches = source.train(MicroBatch(0, 8 * k, 8) for k in itertools.count())
    next(batches)
    kept.append(batches)
print("still here")
"""
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run([sys.executable, "-c", program], timeout=90, capture_output=True, text=True, env=hidden)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "still here\n", "")


@pytest.mark.gpu
def test_mixed_decoding_agrees_with_the_cpu(photographs: Path) -> None:
    data = DataConfig(root=str(photographs), backend="dali", decode="mixed", threads=2)
    source = open_source(Config(micro_batch=8, data=data), Solo(), torch.device("cuda", 0))
    found = together(source.train(cut(0, 8, 8)))
    assert found.inputs.is_cuda
    expected = together(open_folder(photographs, "dali").train(cut(0, 8, 8))).inputs
    # nvJPEG rounds otherwise than libjpeg; the limit is the one between the CPU back-ends, doubled.
    assert (found.inputs.cpu().to(torch.int16) - expected.to(torch.int16)).abs().float().mean() < 1
