"""From a config to its data: who decodes, what is refused, the same on every rank; and synthetic data."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path

import pytest
import torch
from image_folders import two_classes
from test_data_decode import cut, together

from hvdbs.batching import MicroBatch
from hvdbs.comm.local import Solo, ThreadRank, ThreadWorld
from hvdbs.config import AugmentConfig, Config, DataConfig, ModelConfig
from hvdbs.data import Source, sources
from hvdbs.data.ahead import THREAD_NAME
from hvdbs.data.sources import open_source
from hvdbs.errors import HvdbsError
from hvdbs.rules import check

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_classes(tmp_path_factory.mktemp("data"))


def settings(root: Path | None, **data: object) -> Config:
    return Config(micro_batch=4, data=DataConfig(root=root and str(root), image_size=8, resize=8, threads=1, **data))


def test_the_source_tells_its_sizes_classes_and_who_decodes(root: Path) -> None:
    for backend, words in (("auto", "DALI, cpu decoding"), ("dali", "DALI, cpu decoding"), ("pillow", "Pillow")):
        source = open_source(settings(root, backend=backend), Solo(), CPU)
        assert (source.train_samples, source.val_samples, source.classes) == (10, 6, ("cat", "dog"))
        assert source.backend == words


def without_dali(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hvdbs.data.imagenet", raising=False)
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)


def test_without_dali_auto_takes_pillow_and_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_dali(monkeypatch)
    source = open_source(settings(root), Solo(), CPU)
    assert source.backend.startswith("Pillow (DALI cannot be imported: ")
    assert together(source.train(cut(0, 4))).inputs.shape == (4, 8, 8, 3)


def test_without_dali_asking_for_it_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_dali(monkeypatch)
    with pytest.raises(HvdbsError, match=r"data\.backend: dali cannot be imported .* pip install nvidia-dali"):
        open_source(settings(root, backend="dali"), Solo(), CPU)


@pytest.mark.parametrize("lacking", [0, 2])
def test_all_ranks_decode_alike_or_not_at_all(root: Path, monkeypatch: pytest.MonkeyPatch, lacking: int) -> None:
    here = threading.local()
    monkeypatch.setattr(sources, "_dali_import_error", lambda: "none" if here.rank == lacking else "")

    def main(rank: ThreadRank) -> str:
        here.rank = rank.rank
        try:
            return open_source(settings(root), rank, CPU).backend
        except HvdbsError as error:
            return str(error)

    texts = ThreadWorld(3).run(main)
    assert len(set(texts)) == 1
    assert ("Pillow (DALI" if lacking == 0 else "rank 2: data.backend: dali cannot be imported") in texts[0]


def test_a_rank_that_does_not_see_the_folder_ends_all(root: Path, tmp_path: Path) -> None:
    def main(rank: ThreadRank) -> str:
        with pytest.raises(HvdbsError) as refused:
            open_source(settings(root if rank.rank == 0 else tmp_path / "unmounted"), rank, CPU)
        return str(refused.value)

    texts = ThreadWorld(2).run(main)
    assert len(set(texts)) == 1
    assert "unmounted/train/cat/0.jpg cannot be read" in texts[0]
    assert "is data.root mounted everywhere?" in texts[0]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"train_samples": 11}, "data.train_samples: 11 is not what .*train holds: 10 images; set 10 or leave"),
        ({"val_samples": 5}, "data.val_samples: 5 is not what .*val holds: 6 images; set 6 or leave"),
        ({"decode": "mixed", "backend": "pillow"}, "data.decode: mixed needs DALI, not Pillow"),
        ({"decode": "mixed"}, "data.decode: mixed needs a GPU, not device cpu"),
        ({"augment": AugmentConfig(scale=(0, 1))}, "data.augment.scale"),
        ({"augment": AugmentConfig(scale=(0.5, 0.2))}, "data.augment.scale"),
        ({"augment": AugmentConfig(scale=(0.5, 1.5))}, "data.augment.scale"),
        ({"augment": AugmentConfig(ratio=(0, 1))}, "data.augment.ratio"),
        ({"augment": AugmentConfig(ratio=(2, 1))}, "data.augment.ratio"),
        ({"augment": AugmentConfig(ratio=(float("nan"), 1))}, "data.augment.ratio"),
    ],
)
def test_settings_that_break_a_rule_are_refused_in_one_line(root: Path, data: dict[str, object], text: str) -> None:
    def prepare() -> None:
        check(settings(root, **data))
        open_source(settings(root, **data), Solo(), CPU)

    with pytest.raises(HvdbsError, match=text) as refused:
        prepare()
    assert "\n" not in str(refused.value)


def test_a_validation_image_cannot_be_larger_than_what_it_is_cut_from(root: Path) -> None:
    config = Config(data=DataConfig(root=str(root), image_size=224, resize=200))
    with pytest.raises(HvdbsError, match=r"data\.resize: 200 must be at least data\.image_size 224"):
        check(config)


def test_images_need_a_folder() -> None:
    with pytest.raises(HvdbsError, match=r"data\.root: none given"):
        open_source(settings(None), Solo(), CPU)


def test_the_home_folder_may_be_written_as_a_tilde(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root.parent))
    assert open_source(settings(Path("~") / root.name), Solo(), CPU).train_samples == 10


# --- synthetic data


def made(seed: int = 0, size: int = 8, classes: int = 5, n: int = 100) -> Source:
    data = DataConfig(kind="synthetic", image_size=size, resize=size, train_samples=n, val_samples=n, threads=2)
    return open_source(Config(seed=seed, data=data, model=ModelConfig(classes=classes)), Solo(), CPU)


@pytest.mark.parametrize("size", [1, 3, 8, 33])
def test_synthetic_images_of_any_size(size: int) -> None:
    batch = together(made(size=size).train(cut(0, 4, 3)))
    assert (batch.inputs.shape, batch.inputs.dtype) == ((7, size, size, 3), torch.uint8)
    assert (batch.labels.shape, batch.labels.dtype) == ((7,), torch.int64)


def test_a_synthetic_sample_is_a_function_of_seed_split_and_index() -> None:
    n = 100
    first, again, other = together(made().validation(cut(0, n))), made(), made(seed=1)
    assert torch.equal(together(again.validation(cut(0, *[7] * 14, 2))).inputs, first.inputs)
    assert not torch.equal(together(other.validation(cut(0, n))).inputs, first.inputs)
    assert len({bytes(image.numpy()) for image in first.inputs}) == n
    # Two epochs of training: the same images in other orders, none of them a validation image.
    epochs = [together(again.train(cut(k * n, n))) for k in range(2)]
    seen = [[bytes(image.numpy()) for image in epoch.inputs] for epoch in epochs]
    assert sorted(seen[0]) == sorted(seen[1])
    assert seen[0] != seen[1]
    assert not set(seen[0]) & {bytes(image.numpy()) for image in first.inputs}


def test_synthetic_classes_can_be_learnt_from_one_half_and_told_in_the_other() -> None:
    source = made(n=400, size=8)
    train, val = together(source.train(cut(0, 400))), together(source.validation(cut(0, 400)))
    means = torch.stack([train.inputs[train.labels == k].double().mean(0) for k in range(5)])
    guess = torch.cdist(val.inputs.double().flatten(1), means.flatten(1)).argmin(1)
    assert (guess == val.labels).double().mean() > 0.99
    assert (torch.bincount(val.labels, minlength=5) > 40).all()


def test_closing_synthetic_batches_ends_their_threads() -> None:
    batches = made().train(MicroBatch(0, 4 * k, 4) for k in itertools.count())
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@pytest.mark.parametrize("name", ["data.train_samples", "data.val_samples", "model.classes"])
def test_synthetic_data_needs_its_sizes(name: str) -> None:
    sizes = {"data.train_samples": 4, "data.val_samples": 4, "model.classes": 2} | {name: None}
    train, val, classes = sizes.values()
    data = DataConfig(kind="synthetic", train_samples=train, val_samples=val)
    with pytest.raises(HvdbsError, match=f"{name}: none given"):
        open_source(Config(data=data, model=ModelConfig(classes=classes)), Solo(), CPU)
