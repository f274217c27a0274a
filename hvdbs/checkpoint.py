"""Checkpoints: folders that are either whole or not there, read safely.

``checkpoints/step-N/model.pt`` holds the replicated state, written by rank 0; ``rank-R.pt``, where a method has such,
what rank R alone holds. A folder is whole once its ``manifest.json`` stands, with the size and sha256 of each file;
each file is written under a temporary name, synced and renamed. The ``latest`` pointer moves last.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from types import UnionType
from typing import Any, get_origin, get_type_hints

import torch

from hvdbs.comm import Communicator, agree
from hvdbs.config import Config, training_fields
from hvdbs.errors import HvdbsError, refusal
from hvdbs.extrapolation import WHOLE
from hvdbs.files import atomic_writer, write_atomically
from hvdbs.progress import Progress
from hvdbs.step import Replica

FORMAT = 1
_POINTERS = ("latest", "best")
_STEP = re.compile(r"step-[0-9]+")


@dataclass(frozen=True)
class State:
    """What a checkpoint holds.

    ``model``, ``optimizer`` and ``scaler`` are state_dicts; ``anchor`` is where the stage began, one tensor for each
    trained parameter, empty without a proximal term; ``extrapolation`` the gradient by parameter name that all ranks
    keep for the next window, if any; ``training`` the config's training fields by name, to compare with; ``totals``
    what rank 0 has counted and timed so far; ``engine`` what the auto-tuning engine knows, empty without one;
    ``best_merit`` the best of all evaluations (see ``Scores.merit``), or None.
    """

    progress: Progress
    model: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    anchor: list[torch.Tensor]
    extrapolation: dict[str, torch.Tensor]
    training: dict[str, Any]
    world_size: int
    best_merit: float | None
    totals: dict[str, Any]
    engine: dict[str, Any]


class Saver:
    """Writes a run's checkpoints under ``folder`` and knows the newest; rank 0 keeps the clock of every_minutes."""

    def __init__(self, folder: Path, config: Config, comm: Communicator, latest: Path | None) -> None:
        self.latest = latest
        self._folder = folder
        self._config = config
        self._comm = comm
        self._saved_at = monotonic()

    def minutes_are_up(self) -> bool:
        """Whether rank 0's clock asks for a checkpoint; the answer reaches the others with the next window's carry."""
        minutes = self._config.checkpoint.every_minutes
        return self._comm.rank == 0 and minutes > 0 and monotonic() - self._saved_at >= 60 * minutes

    def save(
        self,
        replica: Replica,
        progress: Progress,
        best_merit: float | None,
        totals: dict[str, Any],
        better: bool,
        engine: dict[str, Any],
    ) -> None:
        """Collective. Write ``step-N``, move ``latest`` (if ``better`` also ``best``), drop what is old.

        Raises AgreedError on every rank if one cannot write; the checkpoints before it are still whole then.
        """
        target = self._folder / f"step-{progress.step}"
        own = self._save_own(target, replica) if replica.extrapolation.per_rank else {}
        error = None
        if self._comm.rank == 0:
            state = State(
                progress,
                replica.model.state_dict(),
                replica.optimizer.state_dict(),
                replica.scaler.state_dict(),
                replica.anchor,
                replica.extrapolation.replicated_state(),
                training_fields(self._config),
                self._comm.world_size,
                best_merit,
                totals,
                engine,
            )
            error = self._attempt(target, lambda: self._write(target, state, own, better))
        agree(self._comm, error)
        self.latest = target
        self._saved_at = monotonic()

    def _attempt(self, target: Path, write: Callable[[], None]) -> str | None:
        """Why ``write`` did not succeed, or None."""
        try:
            write()
        except (OSError, RuntimeError) as problem:
            return (
                f"checkpoint {target}: cannot be written ({_cause(problem)}); last whole one: {self.latest or 'none'}"
            )
        return None

    def _save_own(self, target: Path, replica: Replica) -> dict[str, Any]:
        """Collective. Every rank writes what it alone holds; returns the fingerprints by file name."""
        # No manifest may vouch for files that are about to change.
        rank = self._comm.rank
        agree(self._comm, None if rank else self._attempt(target, lambda: _begin(target)))
        name = _rank_file(rank)

        def write() -> None:
            target.mkdir(parents=True, exist_ok=True)
            with atomic_writer(target / name) as file:
                torch.save({"format": FORMAT, "extrapolation": replica.extrapolation.own_state()}, file)

        agree(self._comm, self._attempt(target, write))
        everyone = self._comm.gather_bytes(json.dumps({name: _fingerprint(target / name)}).encode())
        return {name: mark for text in everyone for name, mark in json.loads(text).items()}

    def _write(self, target: Path, state: State, own: dict[str, Any], better: bool) -> None:
        if not own:
            _begin(target)
        for name, mark in own.items():
            if not (target / name).is_file() or (target / name).stat().st_size != mark["bytes"]:
                raise OSError(f"{name} is not where rank 0 looks: --out must be on a file system that all nodes share")
        content = {"format": FORMAT, **{name: getattr(state, name) for name in State.__dataclass_fields__}}
        content["progress"] = asdict(state.progress)
        with atomic_writer(target / "model.pt") as file:
            torch.save(content, file)
        manifest = {"format": FORMAT, "files": {"model.pt": _fingerprint(target / "model.pt"), **own}}
        write_atomically(target / "manifest.json", json.dumps(manifest, indent=2).encode())
        write_atomically(self._folder / "latest", f"{target.name}\n".encode())
        if better and self._config.checkpoint.keep_best:
            write_atomically(self._folder / "best", f"{target.name}\n".encode())
        _drop_old(self._folder, self._config.checkpoint.keep_last)


def _cause(problem: BaseException) -> BaseException:
    """The system's own error: torch.save hides a full disk behind one of its own, before or behind which it may be."""
    chain: BaseException | None = problem
    while chain is not None and not isinstance(chain, OSError):
        chain = chain.__context__
    return chain or problem


def _begin(target: Path) -> None:
    """A folder of that name without a manifest is what a killed job left; with one, it is this state written before."""
    (target / "manifest.json").unlink(missing_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    for left in target.glob("rank-*.pt"):
        left.unlink()


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _drop_old(folder: Path, keep_last: int) -> None:
    kept = {_pointed(folder, name) for name in _POINTERS}
    # Folders without a manifest, which killed jobs left, neither count nor stay.
    folders = _newest_first(folder)
    whole = [path for path in folders if (path / "manifest.json").exists()]
    for old in folders:
        if old not in whole[:keep_last] and old.name not in kept:
            # The manifest first, so that a half-deleted folder is never taken for whole.
            (old / "manifest.json").unlink(missing_ok=True)
            shutil.rmtree(old, ignore_errors=True)


def _pointed(folder: Path, name: str) -> str | None:
    try:
        return (folder / name).read_text().strip()
    except (OSError, ValueError):
        return None


def _newest_first(folder: Path) -> list[Path]:
    steps = [p for p in folder.glob("step-*") if _STEP.fullmatch(p.name)]
    return sorted(steps, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None if it is whole.

    Files of single ranks are looked at, not read: whoever needs one reads it (``take_back``), and there may be many.
    """
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        for name, expected in {"model.pt": None, **manifest["files"]}.items():
            own = name != "model.pt" and (checkpoint / name).stat().st_size == expected["bytes"]
            if "/" in name or not (own or _fingerprint(checkpoint / name) == expected):
                return f"{name} is not what manifest.json says"
    except OSError as error:
        return f"{Path(str(error.filename)).name} is missing or unreadable"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is damaged"
    return None


def find(out: Path, resume: str, say: Callable[[str], None], option: str = "--resume") -> Path | None:
    """The checkpoint folder that ``--resume`` means: ``auto``, the newest whole one of run ``out``, or a path.

    A path names a checkpoint, the file ``latest`` or ``best`` that points to one, a run directory or its checkpoints.
    None if ``auto`` finds no checkpoint at all. Raises HvdbsError if there are some but none is whole, if the path is
    no whole checkpoint, or if it is not the newest of ``out`` itself, whose later ones would stand in the way.
    """
    if resume == "auto":
        return _newest_whole(out / "checkpoints", say, option)
    path, whole_one = Path(resume), "--resume auto takes the newest whole one of --out"
    if option != "--resume":
        whole_one = "name a folder checkpoints/step-N, or a run for its newest"
    if not path.exists():
        raise refusal(option, path, "does not exist", whole_one)
    if path.is_file():
        path = _target(path, option, whole_one)
    for folder in (path / "checkpoints", path):
        if (whole := _newest_whole(folder, say, option)) is not None:
            path = whole
            break
    if (problem := fault(path)) is not None:
        raise refusal(option, path, f"is no whole checkpoint ({problem})", whole_one)
    newest = _newest_whole(out / "checkpoints", say, option)
    if newest is not None and path.parent.resolve() == newest.parent.resolve() and path.name != newest.name:
        raise refusal(
            option,
            path,
            f"is older than {newest.name} of the same run",
            "name another --out, or use --resume auto",
        )
    return path


def _target(file: Path, option: str, nearest: str) -> Path:
    """The checkpoint that ``file`` points to. Raises HvdbsError for any other file."""
    if file.name in _POINTERS and _STEP.fullmatch(name := _pointed(file.parent, file.name) or ""):
        return file.parent / name
    if (file.parent / "manifest.json").is_file():
        nearest = f"did you mean {file.parent}?"
    raise refusal(option, file, "is a file that points to no checkpoint", nearest)


def _newest_whole(folder: Path, say: Callable[[str], None], option: str) -> Path | None:
    faults: list[str] = []
    for checkpoint in _newest_first(folder):
        if (problem := fault(checkpoint)) is None:
            if faults:
                say(f"resuming from {checkpoint}; passed over {', '.join(faults)}")
            return checkpoint
        faults.append(f"{checkpoint.name} ({problem})")
    if _pointed(folder, "latest") is not None:
        raise HvdbsError(f"{option}: no whole checkpoint in {folder}: {', '.join(faults) or 'all are gone'}")
    return None


def load(data: bytes, device: torch.device) -> State:
    """The State in the bytes of a model.pt. Nothing in it is executed. Raises HvdbsError if it is not one of hvdbs."""
    try:
        content = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        if content["format"] != FORMAT:
            raise refusal("checkpoint: format", content["format"], "is not known", f"{FORMAT}")
        content["progress"] = Progress(**content["progress"])
        for name, hint in get_type_hints(State).items():
            kind = hint if isinstance(hint, UnionType) else get_origin(hint) or hint
            if not isinstance(content[name], kind):
                raise TypeError(f"{name} is of type {type(content[name]).__name__}")
        return State(**{name: content[name] for name in State.__dataclass_fields__})
    except HvdbsError:
        raise
    except Exception as error:  # whatever torch makes of bytes that are something else
        # torch goes on to tell how a file that is not trusted could be loaded all the same.
        reason = str(error).split(". ")[0]
        raise HvdbsError(f"checkpoint: model.pt is not one of hvdbs ({type(error).__name__}: {reason})") from None


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """What libraries make of a state that is not this run's, though the manifest vouches for it, as HvdbsError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise HvdbsError(f"checkpoint: {folder} does not fit this run ({type(error).__name__}: {reason})") from None


def take_back(replica: Replica, state: State, folder: Path, say: Callable[[str], None]) -> None:
    """Give ``replica`` the ``state`` of the checkpoint in ``folder``, and what this rank is to hold alone.

    Each virtual worker's gradient is read by the rank that has it now from the file of the one that had it. Raises
    HvdbsError for a file that is not what the manifest says.
    """
    replica.model.load_state_dict(state.model)
    replica.optimizer.load_state_dict(state.optimizer)
    replica.scaler.load_state_dict(state.scaler)
    replica.anchor = state.anchor
    away = replica.extrapolation
    here = {name: value for name, value in training_fields(replica.config).items() if name.startswith("extrapolation.")}
    if any(state.training.get(name) != value for name, value in here.items()):  # a branch that extrapolates otherwise
        return
    if state.extrapolation:
        away.load({WHOLE: state.extrapolation})
    files = json.loads((folder / "manifest.json").read_text())["files"]
    if _rank_file(0) not in files:
        return
    if away.config.depends_on_ranks and state.world_size != replica.comm.world_size:
        say(
            f"extrapolation: the gradients kept by {state.world_size} ranks are dropped, because virtual_workers is "
            f"world_size and there are {replica.comm.world_size} now; the next update is a plain one"
        )
        return
    for rank, workers in away.wanted(state.world_size).items():
        name = _rank_file(rank)
        try:
            data = (folder / name).read_bytes()
        except OSError as error:
            raise HvdbsError(f"checkpoint: {folder / name} cannot be read: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != files.get(name, {}).get("sha256"):
            raise refusal("checkpoint", folder / name, "is not what manifest.json says", f"remove {folder.name}")
        kept = torch.load(io.BytesIO(data), map_location=replica.carry.device, weights_only=True)["extrapolation"]
        away.load({worker: kept[worker] for worker in workers if worker in kept})


def same_training(state: State, training: dict[str, Any], checkpoint: Path) -> None:
    """Raises HvdbsError listing the fields in which the checkpoint's config differs from ``training``."""
    names = sorted({*state.training, *training})
    differ = [n for n in names if state.training.get(n) != training.get(n)]
    if differ:
        listed = ", ".join(f"{n}: {state.training.get(n)} there, {training.get(n)} here" for n in differ[:5])
        more = f" and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise HvdbsError(
            f"--resume: {checkpoint} is of another training ({listed}{more}); start anew with another --out, or go on "
            "from its weights with --branch-from"
        )
