"""Files that are whole at every moment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdbs.files import atomic_writer, whole_lines, write_atomically


def test_an_atomic_write_syncs_the_file_renames_and_syncs_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        done.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def spy_replace(source: Path, target: Path) -> None:
        done.append(("rename", str(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write_atomically(tmp_path / "a.json", b"1")
    temporary = done[0][1]
    assert Path(temporary).parent == tmp_path
    assert done == [("fsync", temporary), ("rename", temporary), ("fsync", str(tmp_path))]


def test_an_interrupted_atomic_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"old")

    def killed_in_between() -> None:
        with atomic_writer(tmp_path / "a") as file:
            file.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed_in_between()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_a_line_without_an_end_is_no_line() -> None:
    assert [whole_lines(data) for data in (b"", b"a", b"a\n", b"a\nb")] == [b"", b"", b"a\n", b"a\n"]
