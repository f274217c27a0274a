"""Threads, Horovod's cycle and MPI's waiting, from the cores that a rank has."""

from __future__ import annotations

import pytest

from hvdbs.comm.cores import choose, cores_before_start, own_cores, share
from hvdbs.comm.local import Solo, ThreadWorld
from hvdbs.launch.commands import CORES


def test_ranks_that_may_use_the_same_cores_have_an_equal_part_of_them() -> None:
    assert share(range(8), [range(8)] * 4) == 2
    assert share(range(2), [range(2)] * 3) == pytest.approx(2 / 3)


def test_ranks_that_are_bound_have_the_cores_they_are_bound_to() -> None:
    bound = [range(0, 8), range(8, 16), range(16, 24)]
    assert [share(cores, bound) for cores in bound] == [8, 8, 8]
    assert share([0, 1], [[0, 1], [1, 2]]) == 1.5


def test_ranks_of_one_node_divide_its_cores() -> None:
    alone = own_cores(Solo())
    assert ThreadWorld(4).run(own_cores) == [pytest.approx(alone / 4)] * 4


def test_a_rank_has_no_more_cores_than_it_was_launched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = own_cores(Solo())
    for given, cores in (("1", 1), ("1000", alone)):
        monkeypatch.setenv(CORES, given)
        assert own_cores(Solo()) == cores


@pytest.mark.parametrize(
    ("variables", "allowed", "cores"),
    [
        ({}, 16, 16),
        ({"HOROVOD_LOCAL_SIZE": "4"}, 16, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "16"}, 16, 1),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 16, 2),
        ({"SLURM_CPUS_PER_TASK": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8, 8),  # bound to cores of its own
        ({CORES: "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 16, 3),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "many"}, 16, 16),
    ],
)
def test_the_cores_of_a_rank_are_told_by_its_launcher(variables: dict[str, str], allowed: int, cores: float) -> None:
    assert cores_before_start(variables, allowed) == cores


def test_a_rank_without_a_core_for_horovod_yields_while_it_waits() -> None:
    variables = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    choose(variables, 2)
    assert variables["OMPI_MCA_mpi_yield_when_idle"] == "1"


def test_what_is_given_stays_and_a_rank_with_spare_cores_keeps_the_defaults() -> None:
    given = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_mpi_yield_when_idle": "0"}
    kept = dict(given)
    choose(kept, 2)
    assert kept == given
    spare = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    choose(spare, 16)
    assert spare == {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
