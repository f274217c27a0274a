"""``python -m hvdbs.data``: digits, index and check."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from image_folders import encode, photo, settle, small, two_classes, write
from PIL import Image
from sklearn.datasets import load_digits

from hvdbs.data.__main__ import main
from hvdbs.data.kept import NAME


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in root.rglob("*")}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "digits"
    assert main(["digits", "--out", str(out)]) == 0
    return out


def test_digits_are_the_first_1437_to_train_and_the_last_360_to_val(digits: Path) -> None:
    source = load_digits()
    files = sorted(digits.rglob("*.jpg"), key=lambda path: path.name)
    assert len(files) == 1797
    assert [path.parts[-3] for path in files] == ["train"] * 1437 + ["val"] * 360
    assert [int(path.parts[-2]) for path in files] == source.target.tolist()
    levels = np.stack([np.asarray(Image.open(path)) for path in files])
    loss = np.abs(levels - source.images * 255 / 16)
    assert loss.mean() < 0.3
    assert loss.max() < 2


def test_digits_say_what_they_wrote_and_nothing_when_there_is_nothing_to_do(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["digits", "--out", str(tmp_path / "new/folder")]) == 0
    assert f"wrote 1797 images (1437 to train, the rest to val) to {tmp_path}/new/folder" in capsys.readouterr().out
    (digits / NAME).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # not needed any more
    before = snapshot(digits)
    assert main(["digits", "--out", str(digits)]) == 0
    assert capsys.readouterr() == ("", "")
    assert snapshot(digits) == before
    assert [path.name for path in digits.parent.iterdir()] == ["digits"]


def test_digits_refuse_a_folder_with_anything_else(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["digits", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"--out: {tmp_path} holds 1 entries that are not the digits" in error
    assert snapshot(tmp_path).keys() == {str(tmp_path / "notes.txt")}

    part = tmp_path / "part"
    shutil.copytree(digits, part)
    next(part.rglob("*.jpg")).unlink()
    assert main(["digits", "--out", str(part)]) == 2


def test_digits_without_scikit_learn_say_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["digits", "--out", str(tmp_path / "digits")]) == 2
    assert "pip install scikit-learn" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_digits_fill_an_empty_folder_and_refuse_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["digits", "--out", str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty/train/0").is_dir()
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert main(["digits", "--out", str(tmp_path / "file")]) == 2
    assert f"{tmp_path}/file cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.glob("*partial*"))


def test_index_prints_what_it_found_and_where_it_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = two_classes(tmp_path)
    (root / "train/cat/notes.txt").write_text("")
    settle(root)
    assert main(["index", str(root)]) == 0
    text = capsys.readouterr().out
    size = sum(os.path.getsize(path) for path in root.glob("train/*/*.jpg"))
    assert ["train", "10", "2", f"{size:,}"] in [line.split() for line in text.splitlines()]
    assert "1 other entries" in text
    assert f"kept in {root / NAME}" in text
    # It always lists: a file that was overwritten in place shows in no folder's time.
    with (root / "train/cat/0.jpg").open("ab") as file:
        file.write(b"more")
    assert main(["index", str(root)]) == 0
    assert f"{size + 4:,}" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["dali", "pillow"])
def test_check_names_each_bad_file_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    png = encode(photo().resize((40, 30)), "PNG")
    place = png.index(b"IDAT") + 4
    bad = {
        "train/cat/1 empty.jpg": (b"", "is empty"),
        "train/cat/2 text.jpg": (b"text", "is neither JPEG nor PNG"),
        "train/dog/3 short.jpg": (small()[:-2], "is truncated"),
        "train/dog/4 damaged.png": (png[:place] + bytes(80) + png[place + 80 :], "cannot be decoded"),
        "val/cat/5 damaged.PNG": (png[:-400], "cannot be decoded"),
    }
    root = write(two_classes(tmp_path, train=40), {name: data for name, (data, _) in bad.items()})
    before = snapshot(root)
    assert main(["check", str(root), "--backend", backend]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(bad)
    for name, (_, reason) in bad.items():
        (line,) = [line for line in lines if str(root / name) in line]
        assert reason in line
    assert last.startswith(f"91 files decoded by {'DALI' if backend == 'dali' else 'Pillow'}")
    assert last.endswith(": 5 bad, none of val also in train")
    assert snapshot(root) == before

    for name in bad:
        (root / name).unlink()
    assert main(["check", str(root), "--backend", backend]) == 0
    assert capsys.readouterr().out.endswith(": none bad, none of val also in train\n")


def test_check_finds_copies_whatever_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = two_classes(tmp_path, train=4, val=3)
    for number, name in enumerate(("val/cat/a.jpg", "val/dog/b.jpg")):
        (root / name).write_bytes((root / f"train/cat/{number + 1}.jpg").read_bytes())
    settle(root)
    assert main(["check", str(root), "--backend", "pillow"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        f"data: {root}/val/{val} holds the same bytes as {root}/train/cat/{train}.jpg"
        for val, train in (("cat/a.jpg", 1), ("dog/b.jpg", 2))
    ]
    assert last.endswith(": none bad, 2 of val also in train")


@pytest.mark.parametrize("arguments", [["index", "nowhere"], ["check", "nowhere"], ["check", ".", "--threads", "0"]])
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "python -m hvdbs.data check /scratch/imagenet" in capsys.readouterr().out
