"""The file list: what it holds, when it is made again, where it is kept, how ranks share it."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_folders import LONG_AGO, settle, small, two_classes, write

from hvdbs.data.index import Files, parse, scan
from hvdbs.data.kept import NAME, load_or_scan
from hvdbs.errors import HvdbsError


def listed(root: Path, **options: object) -> bool:
    """Whether a start now lists the folder, rather than using the kept index."""
    return load_or_scan(str(root), None, **options).listed


def paths(files: Files) -> list[str]:
    return [files.path(i) for i in range(len(files))]


# --- what it holds


def test_it_lists_images_in_byte_order_with_labels_and_sizes(tmp_path: Path) -> None:
    names = ["a.jpg", "B.JPG", "c d.Jpeg", "é.png", "ñandú.PNG", "日本.jpeg"]
    folders = enumerate(["ä b", "z", "A"])
    files = {f"train/{folder}/{name}": small((9 * k, 0, 0)) for k, folder in folders for name in names}
    root = write(tmp_path, files | {"val/z/x.jpg": small()})
    index = parse(scan(str(root)), str(root))
    assert index.classes == ("A", "z", "ä b")
    expected = sorted((str(root / name) for name in files), key=os.fsencode)
    assert paths(index.train) == expected
    assert index.train.labels.tolist() == np.repeat([0, 1, 2], len(names)).tolist()
    assert index.train.sizes.tolist() == [os.path.getsize(path) for path in expected]
    assert (paths(index.val), index.val.labels.tolist()) == ([str(root / "val/z/x.jpg")], [1])


def test_names_that_are_no_utf_8_are_listed_and_can_be_opened(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    folder = os.fsencode(root) + b"/train/caf\xe9"
    os.mkdir(folder)
    with open(folder + b"/\xff\xfe.jpg", "wb") as file:
        file.write(small())
    index = parse(scan(str(root)), str(root))
    (path,) = [path for path in paths(index.train) if "\udcff" in path]
    assert Path(path).read_bytes() == small()
    assert os.fsencode(index.classes[0]) == b"caf\xe9"


def test_other_entries_are_counted_not_taken(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    write(root, {f"train/cat/{name}": b"" for name in ("boxes.txt", ".hidden.jpg", "folder.jpg/x.jpg", "a.gif")})
    index = parse(scan(str(root)), str(root))
    assert (len(index.train), index.ignored) == (10, 4)


def test_links_are_followed(tmp_path: Path) -> None:
    root = two_classes(tmp_path / "data")
    (root / "train/cat/link.jpg").symlink_to(root / "train/dog/0.jpg")
    (root / "train/wolf").symlink_to(root / "train/dog", target_is_directory=True)
    (tmp_path / "alias").symlink_to(root, target_is_directory=True)
    index = parse(scan(str(tmp_path / "alias")), str(tmp_path / "alias"))
    assert index.classes == ("cat", "dog", "wolf")
    assert np.bincount(index.train.labels).tolist() == [6, 5, 5]


def test_a_class_may_lack_validation_images(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    shutil.rmtree(root / "val/cat")
    assert set(parse(scan(str(root)), str(root)).val.labels.tolist()) == {1}


# --- what is refused: always one line with the path


def remove(name: str) -> Callable[[Path], None]:
    return lambda root: shutil.rmtree(root / name)


def put(name: str) -> Callable[[Path], None]:
    def harm(root: Path) -> None:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(small())

    return harm


def dangling(root: Path) -> None:
    (root / "train/cat/x.jpg").symlink_to(root / "nowhere")


def only_loose_files(root: Path) -> None:
    shutil.rmtree(root / "val")
    write(root, {"val/a.jpg": small(), "val/b.JPEG": small()})


def empty_classes(root: Path) -> None:
    (root / "train/ape").mkdir()
    (root / "train/bee").mkdir()


def nested(root: Path) -> None:
    write(root, {"train/ape/images/a.jpg": small()})


@pytest.mark.parametrize(
    ("harm", "where", "reason"),
    [
        (remove(""), "", "does not exist"),
        (lambda root: (shutil.rmtree(root), root.write_bytes(b"")), "", "is not a folder"),
        (remove("train"), "", "has no train folder"),
        (remove("val"), "", "has no val folder"),
        (
            lambda root: [shutil.rmtree(root / "train" / name) for name in ("cat", "dog")],
            "train",
            "no class folders",
        ),
        (only_loose_files, "val", "holds 2 images but no class folders"),
        (empty_classes, "train/ape (and 1 more)", "has no images"),
        (nested, "train/ape", "images stand directly in a class folder"),
        (put("val/cta/x.jpg"), "val/cta", "did you mean cat?"),
        (dangling, "train/cat/x.jpg", "cannot be read: No such file"),
    ],
)
def test_a_folder_without_the_layout_is_refused_in_one_line_with_the_path(
    tmp_path: Path, harm: Callable[[Path], object], where: str, reason: str
) -> None:
    root = two_classes(tmp_path / "data")
    harm(root)
    with pytest.raises(HvdbsError) as refused:
        load_or_scan(str(root), None)
    text = str(refused.value)
    assert "\n" not in text
    assert (str(root / where) if where else str(root)) in text
    assert reason in text


# --- when it is made again


def test_nothing_is_listed_again_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = two_classes(tmp_path)
    for k, one in enumerate(sorted(root.glob("*/*"), reverse=True)):
        os.utime(one, (LONG_AGO + k, LONG_AGO + k))
    first = load_or_scan(str(root), None)
    assert (first.listed, first.path) == (True, root / NAME)
    opened: list[bytes] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: opened.append(path) or scandir(path))
    second = load_or_scan(str(root), None)
    assert (second.listed, second.path, second.data) == (False, root / NAME, first.data)
    assert sorted(opened) == [os.fsencode(root / split) for split in ("train", "val")]


def renamed_class(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "cat").rename(root / split / "tiger")


@pytest.mark.parametrize(
    "change",
    [
        put("train/cat/new.jpg"),
        put("val/dog/new.jpg"),
        lambda root: (root / "train/dog/0.jpg").unlink(),
        lambda root: (root / "train/dog/0.jpg").rename(root / "train/dog/zero.jpg"),
        lambda root: (root / "train/dog/0.jpg").rename(root / "train/cat/zero.jpg"),
        put("train/bird/0.jpg"),
        renamed_class,
        remove("val/cat"),
    ],
)
def test_a_change_of_files_or_classes_is_noticed(tmp_path: Path, change: Callable[[Path], object]) -> None:
    root = two_classes(tmp_path)
    assert listed(root)
    assert not listed(root)
    change(root)
    assert listed(root)
    found = parse(load_or_scan(str(root), None).data, str(root))
    on_disk = sorted((str(path) for path in root.glob("train/*/*")), key=os.fsencode)
    assert paths(found.train) == on_disk


def test_a_folder_that_changed_a_moment_ago_is_listed_again_next_time(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    os.utime(root / "train/cat")
    assert listed(root)
    assert listed(root)
    settle(root)
    assert listed(root)
    assert not listed(root)


def test_asking_for_a_new_list_makes_one(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    assert listed(root)
    (root / "train/cat/0.jpg").write_bytes(small() + b"more")
    assert not listed(root)
    assert listed(root, rescan=True)
    index = parse(load_or_scan(str(root), None).data, str(root))
    assert index.train.sizes[0] == len(small()) + 4


def test_the_index_survives_a_move_that_keeps_times(tmp_path: Path) -> None:
    root = two_classes(tmp_path / "here")
    assert listed(root)
    root.rename(tmp_path / "there")
    moved = load_or_scan(str(tmp_path / "there"), None)
    assert not moved.listed
    path = parse(moved.data, str(tmp_path / "there")).train.path(0)
    assert path == str(tmp_path / "there/train/cat/0.jpg")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_index_is_made_again(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.getbasetemp() / "damaged"
    if not root.exists():
        two_classes(root)
    good = load_or_scan(str(root), None, rescan=True).data
    bad = bytearray(good)
    if data.draw(st.booleans()):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del bad[data.draw(st.integers(0, len(bad) - 1)) :]
    (root / NAME).write_bytes(bad)
    again = load_or_scan(str(root), None)
    # A bit of the archive's own padding may not matter: then the index reads as before.
    assert again.data == good if again.listed else parse(again.data, "").classes == parse(good, "").classes


def rewritten(data: bytes, **changes: np.ndarray) -> bytes:
    with np.load(io.BytesIO(data)) as stored:
        arrays = dict(stored)
    out = io.BytesIO()
    np.savez(out, **(arrays | changes))
    return out.getvalue()


def test_a_foreign_index_is_made_again(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    good = load_or_scan(str(root), None).data
    with np.load(io.BytesIO(good)) as stored:
        names, offsets = stored["train_names"].copy(), stored["train_name_offsets"].copy()
    names[0] = ord("/")
    offsets[1] += 1000
    foreign = {
        "empty": b"",
        "text": b"hello",
        "another archive": rewritten(good, about=np.array([99, 0])),
        "a path out of the folder": rewritten(good, train_names=names),
        "offsets out of range": rewritten(good, train_name_offsets=offsets),
        "labels out of range": rewritten(good, train_labels=np.full(10, 2, np.int32)),
        "negative labels": rewritten(good, train_labels=np.full(10, -1, np.int32)),
        "too few sizes": rewritten(good, train_sizes=np.zeros(3, np.int64)),
        "another type": rewritten(good, train_sizes=np.zeros(10, np.float64)),
        "objects": rewritten(good, train_sizes=np.array([None] * 10)),
    }
    for name, data in foreign.items():
        (root / NAME).write_bytes(data)
        again = load_or_scan(str(root), None)
        assert (again.listed, again.data) == (True, good), name
