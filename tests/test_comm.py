"""The communicator's verbs with threads as ranks, and what a process knows of its launcher."""

from __future__ import annotations

import pytest
import torch

from hvdbs.comm import (
    AgreedError,
    Communicator,
    PeerFailure,
    agree,
    connect,
    launched_processes,
    launched_rank,
)
from hvdbs.comm.local import Solo, ThreadWorld
from hvdbs.errors import HvdbsError
from hvdbs.replicas import compare
from hvdbs.schedule import Decision

LAUNCHER_VARIABLES = (
    "HOROVOD_SIZE",
    "HOROVOD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_SIZE",
    "PMI_RANK",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_verbs_mean_the_same_for_every_number_of_ranks(world_size: int) -> None:
    def main(comm: Communicator) -> None:
        tensor = torch.full((3,), float(comm.rank + 1))
        comm.start_sum(tensor, "t").wait()
        assert tensor.tolist() == [world_size * (world_size + 1) / 2] * 3
        rows = torch.full((comm.rank, 2), float(comm.rank))
        expected = [[float(rank)] * 2 for rank in range(world_size) for _ in range(rank)]
        assert comm.start_gather(rows, "g").wait().tolist() == expected
        mine = torch.full((2,), float(comm.rank + 7))
        comm.broadcast(mine, "b")
        assert mine.tolist() == [7.0, 7.0]
        assert comm.broadcast_bytes(b"hello" if comm.rank == 0 else None) == b"hello"
        assert comm.gather_bytes(b"x" * comm.rank) == [b"x" * rank for rank in range(world_size)]

    if world_size == 1:
        main(Solo())
    ThreadWorld(world_size).run(main)


def test_one_ranks_error_is_every_ranks_error() -> None:
    def main(comm: Communicator) -> str:
        with pytest.raises(AgreedError) as raised:
            agree(comm, "the disk is full" if comm.rank == 2 else None)
        return str(raised.value)

    assert set(ThreadWorld(3).run(main)) == {"rank 2: the disk is full"}


def test_an_error_that_all_ranks_see_is_said_once_without_a_rank() -> None:
    with pytest.raises(AgreedError, match=r"^no such recipe$"):
        ThreadWorld(3).run(lambda comm: agree(comm, "no such recipe"))


def test_replicas_that_differ_are_named_with_both_values() -> None:
    def main(comm: Communicator) -> str:
        with pytest.raises(AgreedError) as raised:
            compare(comm, Decision(1, 64, 0.1, 0.0), "bad" if comm.rank in (1, 3) else "good")
        return str(raised.value)

    texts = set(ThreadWorld(4).run(main))
    assert len(texts) == 1
    text = texts.pop()
    assert "stage 1: ranks 1, 3 have" in text and '"bad"' in text and "rank 0 has" in text and '"good"' in text


def test_a_rank_that_fails_ends_the_others() -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("the first cause")
        with pytest.raises(PeerFailure):
            comm.barrier()

    with pytest.raises(ValueError, match="the first cause"):
        ThreadWorld(3).run(main)


def test_a_plain_process_is_alone(plain: pytest.MonkeyPatch) -> None:
    assert launched_processes() is None
    assert launched_rank() == 0
    assert isinstance(connect(), Solo)


@pytest.mark.parametrize(
    ("variables", "processes", "rank"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, 4, 3),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, 2, 1),
        # mpirun inside a Slurm job: Slurm's variables describe the daemon that mpirun started
        (
            {
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_RANK": "3",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
            },
            4,
            3,
        ),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "PMIX_RANK": "2"}, 4, 2),
        ({"SLURM_PROCID": "0"}, None, 0),  # the batch script itself
    ],
)
def test_launchers_are_read_from_their_variables(
    plain: pytest.MonkeyPatch, variables: dict[str, str], processes: int | None, rank: int
) -> None:
    for name, value in variables.items():
        plain.setenv(name, value)
    assert (launched_processes(), launched_rank()) == (processes, rank)


def test_several_processes_without_horovod_are_refused(plain: pytest.MonkeyPatch) -> None:
    import sys

    plain.setenv("OMPI_COMM_WORLD_SIZE", "2")
    plain.setitem(sys.modules, "hvdbs.comm.horovod", None)
    with pytest.raises(HvdbsError, match=r"processes: 2 were started, but Horovod cannot be imported.*make setup"):
        connect()


def test_two_timelines_at_once_are_refused(plain: pytest.MonkeyPatch) -> None:
    """Before Horovod starts: what it writes, and where, is settled when it does."""
    plain.setenv("HOROVOD_SIZE", "2")
    plain.setenv("HOROVOD_TIMELINE", "/tmp/other.json")
    with pytest.raises(HvdbsError, match=r"HOROVOD_TIMELINE: /tmp/other\.json has Horovod write a timeline"):
        connect(timeline=True)
