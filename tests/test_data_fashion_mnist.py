"""``python -m hvdbs.data fashion-mnist``, on small IDX files made here."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvdbs.data import fashion_mnist
from hvdbs.data.__main__ import main
from hvdbs.data.fashion_mnist import CLASSES, Bytes, parse, write
from hvdbs.data.index import parse as parse_index
from hvdbs.data.kept import load_or_scan
from hvdbs.errors import HvdbsError


def idx(array: Bytes) -> bytes:
    shape = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + shape + array.tobytes()


def small_files(folder: Path, packed: bool) -> tuple[dict[str, str], dict[str, tuple[Bytes, Bytes]]]:
    """Four IDX files of 5 x 4 pixels, their digests, and what is in them: 40 images to train, 10 to validate."""
    generator = np.random.default_rng(0)
    known, truth = {}, {}
    for prefix, count in (("train", 40), ("t10k", 10)):
        images = generator.integers(256, size=(count, 5, 4)).astype(np.uint8)
        labels = generator.permutation(np.arange(count) % 10).astype(np.uint8)
        truth[prefix] = (images, labels)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            data = idx(array)
            known[f"{prefix}-{name}-ubyte"] = hashlib.sha256(data).hexdigest()
            place = folder / f"{prefix}-{name}-ubyte{'.gz' if packed else ''}"
            place.write_bytes(gzip.compress(data) if packed else data)
    return known, truth


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "idx"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("packed", [True, False])
def test_every_image_comes_out_as_it_went_in_under_the_name_of_its_class(
    tmp_path: Path, source: Path, packed: bool
) -> None:
    known, truth = small_files(source, packed)
    out = tmp_path / "new" / "folder"
    assert write(str(out), str(source), known=known) == (40, 10)
    for split, prefix in (("train", "train"), ("val", "t10k")):
        files = sorted((out / split).glob("*/*"), key=lambda path: path.name)
        images, labels = truth[prefix]
        for path, pixels, label in zip(files, images, labels, strict=True):
            assert path.parent.name == CLASSES[label]
            with Image.open(path) as image:
                assert image.format == "PNG" and image.mode == "L"
                assert np.array_equal(np.asarray(image), pixels)
    assert [path.name for path in out.parent.iterdir()] == ["folder"]


def test_the_labels_of_a_run_are_those_of_the_files(tmp_path: Path, source: Path) -> None:
    known, truth = small_files(source, True)
    write(str(tmp_path / "out"), str(source), known=known)
    index = parse_index(load_or_scan(str(tmp_path / "out"), None).data, str(tmp_path / "out"))
    assert sorted(index.train.labels.tolist()) == sorted(truth["train"][1].tolist())
    assert sorted(CLASSES) == list(CLASSES)


def test_a_part_holds_the_first_of_each_class_and_equally_many(tmp_path: Path, source: Path) -> None:
    known, truth = small_files(source, True)
    assert write(str(tmp_path / "out"), str(source), samples=20, known=known) == (20, 10)
    for label, name in enumerate(CLASSES):
        first = np.flatnonzero(truth["train"][1] == label)[:2]
        assert sorted(path.stem for path in (tmp_path / "out/train" / name).iterdir()) == [f"{n:05d}" for n in first]
    with pytest.raises(HvdbsError, match="--samples: 50 needs 5 of each class, of which one has 4"):
        write(str(tmp_path / "more"), str(source), samples=50, known=known)


@pytest.mark.parametrize("samples", [0, -10, 15, 60_010])
def test_a_part_that_cannot_be_balanced_is_refused(tmp_path: Path, samples: int) -> None:
    with pytest.raises(HvdbsError, match=f"--samples: {samples} must be a multiple of 10"):
        write(str(tmp_path / "out"), "nowhere", samples=samples)


def test_what_is_there_is_left_and_anything_else_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, _ = small_files(source, True)
    monkeypatch.setattr(fashion_mnist, "VAL", 10)
    out = str(tmp_path / "out")
    write(out, str(source), samples=20, known=known)
    assert write(out, "nowhere", samples=20, known=known) is None
    with pytest.raises(HvdbsError, match="holds 2 entries that are not these images"):
        write(out, str(source), samples=30, known=known)
    next((tmp_path / "out").rglob("*.png")).unlink()
    with pytest.raises(HvdbsError, match="holds 2 entries that are not these images"):
        write(out, str(source), samples=20, known=known)


def damaged(name: str, source: Path) -> str:
    """Damage one of the four files as ``name`` says; what the refusal must then say."""
    images = source / "train-images-idx3-ubyte"
    data = images.read_bytes()
    if name == "cut":
        images.write_bytes(data[:-3])
        return "holds 797 bytes where its header says 40 x 5 x 4"
    if name == "other type":
        images.write_bytes(b"\0\0\x0d\x03" + data[4:])
        return "does not begin like IDX data of unsigned bytes in 3 dimensions: 00 00 0d 03"
    if name == "empty":
        images.write_bytes(b"")
        return "it is empty"
    if name == "other pixels":
        images.write_bytes(data[:-1] + bytes((data[-1] ^ 1,)))
        return "is not Fashion-MNIST's: sha256"
    if name == "cut archive":
        images.unlink()
        images.with_name(f"{images.name}.gz").write_bytes(gzip.compress(data)[:-20])
        return "cannot be read"
    images.unlink()
    return f"holds neither {images.name} nor {images.name}.gz"


@pytest.mark.parametrize("name", ["cut", "other type", "empty", "other pixels", "cut archive", "missing"])
def test_a_damaged_file_is_one_line_and_leaves_nothing(tmp_path: Path, source: Path, name: str) -> None:
    known, _ = small_files(source, False)
    rule = damaged(name, source)
    with pytest.raises(HvdbsError) as refused:
        write(str(tmp_path / "out"), str(source), known=known)
    assert rule in str(refused.value) and "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["idx"]


def test_images_without_their_labels_are_refused(tmp_path: Path, source: Path) -> None:
    known, truth = small_files(source, False)
    short = idx(truth["train"][1][:-1])
    (source / "train-labels-idx1-ubyte").write_bytes(short)
    known["train-labels-idx1-ubyte"] = hashlib.sha256(short).hexdigest()
    with pytest.raises(HvdbsError, match="has 40 train images, 39 labels"):
        write(str(tmp_path / "out"), str(source), known=known)


def test_the_command_takes_no_other_data_for_fashion_mnist(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_files(source, True)
    assert main(["fashion-mnist", "--out", str(tmp_path / "out"), "--from", str(source)]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1) and "is not Fashion-MNIST's" in error


def tool(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("echo 'W: old' >&2; echo 'E: Unable to locate package x' >&2; exit 100", "E: Unable to locate package x"),
        ("exit 3", "exit code 3"),
        ("exit 0", "left no dataset-fashion-mnist"),
        (None, "apt-get download cannot be run"),
    ],
)
def test_a_package_that_cannot_be_had_is_one_line_that_names_the_other_way(
    tmp_path: Path, text: str | None, rule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    if text is not None:
        tool(tools, "apt-get", text)
    monkeypatch.setenv("PATH", str(tools))
    assert main(["fashion-mnist", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert rule in error and "--from" in error and error.count("\n") == 1
    assert os.listdir(tmp_path) == ["bin"]


def test_a_header_says_how_many_dimensions_are_read() -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    assert np.array_equal(parse(Path("images"), idx(array)), array)
    assert np.array_equal(parse(Path("labels"), idx(array[0, 0])), array[0, 0])
