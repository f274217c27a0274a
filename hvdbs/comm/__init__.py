"""The few verbs between ranks. Everything above is handed a Communicator; only ``comm/horovod.py`` knows Horovod."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NoReturn, Protocol

import torch

from hvdbs.errors import HvdbsError, refusal

AUTOTUNE_LOG = "HOROVOD_AUTOTUNE_LOG"  # a file, of rank 0


class PeerFailure(Exception):
    """Another rank is gone; its own message says why."""


class AgreedError(HvdbsError):
    """An error that every rank raises at the same place, so that all can end in good order."""


class Handle(Protocol):
    """A reduction under way."""

    def wait(self) -> None:
        """Block until the tensor holds the result. Raises PeerFailure if a rank is gone."""
        ...


class Gathering(Protocol):
    """A collection of rows under way."""

    def wait(self) -> torch.Tensor:
        """Block until the rows of all ranks are there; a new tensor. Raises PeerFailure if a rank is gone."""
        ...


class Communicator(Protocol):
    """Collectives over all ranks. Every rank calls the same ones with the same names; tensors are changed in place."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def local_size(self) -> int: ...

    @property
    def backend(self) -> str:
        """What moves the bytes: solo, threads, horovod-mpi, horovod-gloo or horovod-nccl."""
        ...

    def start_sum(self, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. Begin summing ``tensor`` over ranks; nobody touches it until ``wait`` returns."""
        ...

    def start_gather(self, rows: torch.Tensor, name: str) -> Gathering:
        """Collective. Begin collecting the ``rows`` [R, ...] of every rank, which may be of unequal number, or none,
        one after the other by rank; nobody touches them until ``wait`` returns."""
        ...

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Collective. Overwrite ``tensor`` with rank 0's."""
        ...

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Collective. Rank 0's ``data``, whatever the others pass."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Collective. Every rank's ``data`` by rank, on every rank. For errors and digests, not for the hot path."""
        ...

    def barrier(self) -> None:
        """Collective. Wait for every rank."""
        ...

    def close(self) -> None:
        """Collective. Leave in good order."""
        ...

    def abort(self, code: int) -> NoReturn:
        """End every rank at once with ``code``; needs no answer from any of them."""
        ...


def agree(comm: Communicator, error: str | None) -> None:
    """Collective. Go on if no rank has an ``error``; else every rank raises AgreedError with the lowest rank's text.

    Called at the end of each step of preparation, so that a mistake seen by one rank alone ends all in good order.
    """
    flag = torch.tensor([0.0 if error is None else 1.0], dtype=torch.float64)
    comm.start_sum(flag, "agree").wait()
    if flag.item() == 0:
        return
    texts = [json.loads(text) for text in comm.gather_bytes(json.dumps(error).encode())]
    rank = next(index for index, text in enumerate(texts) if text is not None)
    same = sum(text == texts[rank] for text in texts)
    raise AgreedError(texts[rank] if same == comm.world_size else f"rank {rank}: {texts[rank]}")


def first_number(variables: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The value of the first of ``names`` that holds a number."""
    return next((int(variables[name]) for name in names if variables.get(name, "").isdigit()), None)


def launched_processes() -> int | None:
    """How many processes the launcher says it started, or None for a plain process.

    Open MPI's and Horovod's variables come before Slurm's: under mpirun inside a job Slurm's describe the daemon, not
    the rank. SLURM_STEP_NUM_TASKS exists in srun's tasks but not in the batch script itself.
    """
    return first_number(os.environ, ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"))


def launched_rank() -> int:
    """This process's rank as the launcher's variables have it; 0 for a plain process."""
    names = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
    number = first_number(os.environ, names)
    if number is None and "SLURM_STEP_NUM_TASKS" in os.environ:
        number = first_number(os.environ, ("SLURM_PROCID",))
    return number or 0


def connect(timeline: bool = False, autotune: bool = False) -> Communicator:
    """The ranks of this job: Horovod under a launcher, a single rank in a plain process.

    ``timeline``: so that Horovod's can be written, which every rank must know before the first collective.
    ``autotune``: with its own search for its settings under way.

    Raises HvdbsError if the launcher started several processes but they cannot see each other.
    """
    from hvdbs.comm.local import Solo

    expected = launched_processes()
    if expected is None:
        return Solo()
    try:
        from hvdbs.comm.horovod import Horovod
    except ImportError as error:
        if expected == 1:
            return Solo()
        raise refusal(
            "processes", expected, f"were started, but Horovod cannot be imported ({error})", "run make setup"
        ) from None
    ranks = Horovod(timeline, autotune)
    if ranks.world_size != expected:
        raise refusal(
            "processes",
            expected,
            f"were started, but Horovod sees {ranks.world_size}: it was built without what this launcher speaks",
            f"relaunch with horovodrun -np {expected} python -m hvdbs.train ..., or the mpirun it was built with",
        )
    return ranks
