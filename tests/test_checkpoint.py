"""Checkpoints: whole or not there, found again, read safely."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hvdbs.checkpoint import Saver, State, fault, find, load, same_training
from hvdbs.comm import AgreedError
from hvdbs.comm.local import Solo
from hvdbs.config import CheckpointConfig, Config, ModelConfig, training_fields
from hvdbs.errors import HvdbsError
from hvdbs.model import build_model
from hvdbs.progress import Progress
from hvdbs.step import Replica

CONFIG = Config(model=ModelConfig("resnet8", width=2), checkpoint=CheckpointConfig(keep_last=2))


@pytest.fixture
def replica() -> Replica:
    torch.manual_seed(0)
    return Replica(build_model(CONFIG.model, 3), CONFIG, Solo())


def saver(out: Path, config: Config = CONFIG) -> Saver:
    return Saver(out / "checkpoints", config, Solo(), None)


def save(replica: Replica, out: Path, step: int, better: bool = False) -> Path:
    saver(out).save(replica, Progress(step, 8 * step), 0.5, {"run": {"steps": step}}, better, {})
    return out / "checkpoints" / f"step-{step}"


def read(folder: Path) -> State:
    return load((folder / "model.pt").read_bytes(), torch.device("cpu"))


def refuse(text: str) -> None:
    raise AssertionError(f"nothing was to be said: {text}")


def test_what_is_saved_is_what_is_loaded(replica: Replica, tmp_path: Path) -> None:
    state = read(save(replica, tmp_path, 3))
    assert state.progress == Progress(3, 24)
    assert (state.best_merit, state.world_size, state.totals) == (0.5, 1, {"run": {"steps": 3}})
    for name, tensor in replica.model.state_dict().items():
        assert torch.equal(tensor, state.model[name])
    same_training(state, training_fields(CONFIG), tmp_path)


def test_the_newest_and_the_best_are_kept(replica: Replica, tmp_path: Path) -> None:
    for step in range(1, 7):
        save(replica, tmp_path, step, better=step == 2)
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {"step-2", "step-5", "step-6", "latest", "best"}
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-2\n"
    assert find(tmp_path, "auto", refuse) == tmp_path / "checkpoints" / "step-6"


def damage_nothing(folder: Path) -> None:
    (folder / "note.txt").write_text("a stray file does not matter")


def truncate(folder: Path) -> None:
    data = (folder / "model.pt").read_bytes()
    (folder / "model.pt").write_bytes(data[: len(data) // 2])


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.pt").write_bytes(data)


def lose_model(folder: Path) -> None:
    (folder / "model.pt").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def break_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files": [')


def point_outside(folder: Path) -> None:
    (folder / "manifest.json").write_text(json.dumps({"files": {"../../secret": {"bytes": 1, "sha256": ""}}}))


DAMAGES = [truncate, flip_a_bit, lose_model, lose_manifest, break_manifest, point_outside]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_whole_one_before(
    damage: Callable[[Path], None], replica: Replica, tmp_path: Path
) -> None:
    before, newest = save(replica, tmp_path, 1), save(replica, tmp_path, 2)
    damage(newest)
    said: list[str] = []
    assert find(tmp_path, "auto", said.append) == before
    assert len(said) == 1 and "step-2" in said[0]
    with pytest.raises(HvdbsError, match="no whole checkpoint"):
        find(tmp_path, str(newest), refuse)


@pytest.mark.parametrize("damage", DAMAGES)
def test_with_nothing_whole_left_auto_refuses_to_start_anew(
    damage: Callable[[Path], None], replica: Replica, tmp_path: Path
) -> None:
    damage(save(replica, tmp_path, 1))
    with pytest.raises(HvdbsError, match="no whole checkpoint"):
        find(tmp_path, "auto", refuse)


def test_a_stray_file_does_no_harm(replica: Replica, tmp_path: Path) -> None:
    folder = save(replica, tmp_path, 1)
    damage_nothing(folder)
    assert fault(folder) is None


def test_auto_without_any_checkpoint_starts_anew(tmp_path: Path) -> None:
    assert find(tmp_path, "auto", refuse) is None
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)  # killed before the first one was whole
    assert find(tmp_path, "auto", refuse) is None


def test_a_path_may_name_the_run_its_checkpoints_or_one_of_them(replica: Replica, tmp_path: Path) -> None:
    newest = save(replica, tmp_path / "a", 4)
    for path in (tmp_path / "a", newest.parent, newest):
        assert find(tmp_path / "b", str(path), refuse) == newest


def test_an_older_checkpoint_of_the_same_run_is_refused(replica: Replica, tmp_path: Path) -> None:
    older, _ = save(replica, tmp_path, 1), save(replica, tmp_path, 2)
    with pytest.raises(HvdbsError, match=r"older than step-2.*another --out"):
        find(tmp_path, str(older), refuse)
    assert find(tmp_path / "other", str(older), refuse) == older


def test_a_disk_that_refuses_leaves_the_last_one_whole(replica: Replica, tmp_path: Path) -> None:
    first = save(replica, tmp_path, 1)
    (tmp_path / "checkpoints" / "step-2").write_text("a file where the folder should be")
    with pytest.raises(AgreedError, match="cannot be written"):
        save(replica, tmp_path, 2)
    assert find(tmp_path, "auto", lambda text: None) == first


@pytest.mark.parametrize("room", [50, 29360, 39130])
def test_a_disk_that_is_full_is_called_so(replica: Replica, tmp_path: Path, room: int) -> None:
    first = save(replica, tmp_path, 1)
    size = (first / "model.pt").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - room, before[1]))  # a file that cannot grow, as on a full disk
    try:
        with pytest.raises(AgreedError, match=r"cannot be written \(\[Errno 27\] File too large\)"):
            save(replica, tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert find(tmp_path, "auto", lambda text: None) == first


def test_another_training_is_refused_with_the_fields_that_differ(replica: Replica, tmp_path: Path) -> None:
    state = read(save(replica, tmp_path, 1))
    other = training_fields(replace(CONFIG, seed=5, micro_batch=64))
    with pytest.raises(HvdbsError, match=r"micro_batch: 32 there, 64 here, seed: 0 there, 5 here"):
        same_training(state, other, tmp_path)


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path(self.path),)  # type: ignore[return-value]


def test_a_pickle_with_code_is_not_executed(tmp_path: Path) -> None:
    torch.save({"format": 1, "model": Bomb(str(tmp_path / "made"))}, tmp_path / "model.pt")
    with pytest.raises(HvdbsError, match=r"model\.pt is not one of hvdbs") as refused:
        read(tmp_path)
    assert not (tmp_path / "made").exists()
    assert "\n" not in str(refused.value)
