"""The index as a file: where it is kept, and how ranks share it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from image_folders import two_classes

from hvdbs.comm.local import Solo, ThreadRank, ThreadWorld
from hvdbs.data import index as index_module
from hvdbs.data import kept
from hvdbs.data.kept import NAME, load_or_scan, share_index
from hvdbs.errors import HvdbsError


def test_it_is_kept_beside_the_data_or_in_a_cache_or_where_asked(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    beside, cache = kept.places(root, None, {"XDG_CACHE_HOME": "/xdg"})
    assert beside == tmp_path / "data" / NAME
    assert cache.parent == Path("/xdg/hvdbs/index")
    assert kept.places(root, None, {"HVDBS_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"})[1].parent == Path("/own/index")
    assert kept.places(root, None, {"HOME": "/h"})[1].parent == Path.home() / ".cache/hvdbs/index"
    (asked,) = kept.places(root, str(tmp_path / "lists"))
    assert asked == tmp_path / "lists" / cache.name


def test_two_names_of_a_folder_share_a_cache_and_two_folders_do_not(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    a, b, link = (kept.places(str(tmp_path / name), "x") for name in ("a", "b", "link"))
    assert a == link != b


def test_where_the_data_cannot_be_written_the_cache_is(tmp_path: Path) -> None:
    # Nothing can be created in /proc, whoever asks, so this is the kernel's own refusal even for root.
    read_only, cache = Path("/proc/hvdbs") / NAME, tmp_path / "cache/index/x.npz"
    assert kept.keep(b"data", [read_only, cache]) == cache
    assert cache.read_bytes() == b"data"
    assert kept.keep(b"data", [read_only]) is None
    assert list(cache.parent.iterdir()) == [cache]


def test_a_run_goes_on_where_nothing_can_be_kept_and_uses_the_cache_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = two_classes(tmp_path / "data")
    (root / NAME).mkdir()  # in the way of the file
    monkeypatch.setenv("HVDBS_CACHE", "/proc/hvdbs")
    assert load_or_scan(str(root), None).path is None
    monkeypatch.setenv("HVDBS_CACHE", str(tmp_path / "cache"))
    first, second = load_or_scan(str(root), None), load_or_scan(str(root), None)
    assert first.listed
    assert not second.listed
    assert second.path == first.path
    assert second.path.is_relative_to(tmp_path / "cache/index")


def test_a_cache_is_made_readable_for_others_who_use_the_data(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    mask = os.umask(0o022)
    try:
        load_or_scan(str(root), None)
    finally:
        os.umask(mask)
    assert (root / NAME).stat().st_mode & 0o777 == 0o644


# --- how ranks share it


def test_only_rank_0_looks_at_the_folder(tmp_path: Path) -> None:
    root = two_classes(tmp_path / "data")

    def main(rank: ThreadRank) -> tuple[tuple[str, ...], list[str], int]:
        own = str(root) if rank.rank == 0 else f"/not/mounted/on/{rank.rank}"
        index = share_index(own, None, rank)
        return (
            index.classes,
            [path.removeprefix(own) for path in [index.train.path(i) for i in range(len(index.train))]],
            int(index.val.sizes.sum()),
        )

    results = ThreadWorld(3).run(main)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == ("cat", "dog")


@pytest.mark.parametrize("foreseen", [True, False])
def test_an_error_of_rank_0_reaches_every_rank_with_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreseen: bool
) -> None:
    if not foreseen:

        def broken(root: str) -> bytes:
            raise MemoryError

        two_classes(tmp_path)
        monkeypatch.setattr(kept, "scan", broken)

    def main(rank: ThreadRank) -> str:
        with pytest.raises(HvdbsError) as refused:
            share_index(str(tmp_path), None, rank)
        return str(refused.value)

    texts = ThreadWorld(3).run(main)
    assert len(set(texts)) == 1
    assert ("has no train folder" if foreseen else "MemoryError") in texts[0]


def test_a_listing_is_announced_and_a_kept_index_is_not(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    said: list[str] = []
    for _ in range(2):
        share_index(str(root), None, Solo(), said.append)
    assert said == [f"listing {root}"]


def test_a_million_files_fit_into_a_hundred_megabytes() -> None:
    n = 50_000
    names = [b"n01440764_%08d.JPEG" % k for k in range(n)]
    packed, offsets = index_module._packed(names)
    each = (packed.nbytes + offsets.nbytes + 4 * n + 8 * n) / n
    assert each * 1e6 < 100e6


@pytest.mark.parametrize(
    "odd", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)]
)
def test_a_pipe_or_a_device_in_place_of_the_list_is_not_read(tmp_path: Path, odd: Callable[[Path], None]) -> None:
    root, lists = two_classes(tmp_path / "data"), tmp_path / "lists"
    made = load_or_scan(str(root), str(lists))
    assert made.path is not None
    made.path.unlink()
    odd(made.path)
    assert load_or_scan(str(root), str(lists)).data == made.data
