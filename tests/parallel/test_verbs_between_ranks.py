"""The verbs of ``hvdbs.comm`` between real ranks: what they promise, at the edges that the training does not visit."""

from __future__ import annotations

import hashlib

import pytest
import rig
import torch

from hvdbs.comm import AgreedError, Communicator, agree, launched_processes, launched_rank

pytestmark = pytest.mark.parallel

MEGABYTES = 5 * 2**20


def some_bytes(rank: int, size: int) -> bytes:
    return (hashlib.sha256(str(rank).encode()).digest() * (size // 32 + 1))[:size]


def test_ranks_are_numbered_from_0_and_know_how_many_they_are(comm: Communicator) -> None:
    everyone = rig.everywhere(comm, [comm.rank, comm.world_size, comm.local_rank, comm.local_size, comm.backend])
    n = comm.world_size
    assert everyone == [[rank, n, rank, n, comm.backend] for rank in range(n)]
    assert comm.backend in ("solo", "horovod-mpi", "horovod-gloo", "horovod-nccl")
    if comm.backend != "solo":
        assert (launched_processes(), launched_rank()) == (n, comm.rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (MEGABYTES // 8,)])
def test_sums_are_in_place_and_exact_on_integers(
    comm: Communicator, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Of rank + 1 and of a ramp: whole numbers, so exact in every dtype."""
    n = comm.world_size
    tensor = (torch.arange(torch.Size(shape).numel()).view(shape) % 1000 + comm.rank + 1).to(dtype)
    expected = ((torch.arange(torch.Size(shape).numel()).view(shape) % 1000) * n + n * (n + 1) // 2).to(dtype)
    place = tensor.data_ptr()
    comm.start_sum(tensor, f"test.sum.{dtype}.{tuple(shape)}").wait()
    assert torch.equal(tensor, expected)
    assert tensor.data_ptr() == place


def test_sums_may_be_started_and_waited_for_in_any_order(comm: Communicator) -> None:
    """Ranks start in opposite orders and wait in a third one; 20 sums of float64."""
    tensors = [torch.full((100 + k,), float(k + comm.rank), dtype=torch.float64) for k in range(20)]
    turn = range(20) if comm.rank % 2 else reversed(range(20))
    handles = {k: comm.start_sum(tensors[k], f"test.order.{k}") for k in turn}
    for k in sorted(handles, key=lambda k: (k % 7, k)):
        handles[k].wait()
    n = comm.world_size
    for k, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, k * n + n * (n - 1) / 2))


def test_infinities_and_nans_reach_every_rank(comm: Communicator) -> None:
    tensor = torch.zeros(4, dtype=torch.float64)
    if comm.rank == comm.world_size - 1:
        tensor[1], tensor[2] = float("inf"), float("nan")
    comm.start_sum(tensor, "test.nonfinite").wait()
    assert tensor[0] == tensor[3] == 0
    assert tensor[1] == float("inf")
    assert tensor[2].isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (3, 0, 0, 0), (0, 0, 5, 1), (0, 7, 0, 0), (1, 2, 3, 4), (2, 2, 2, 2)])
def test_rows_of_all_ranks_are_gathered_by_rank_whatever_their_numbers(
    comm: Communicator, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """None on all ranks or some, unequal, equal; twice under one name with other numbers; what is sent stays as it
    is."""
    for turn in (0, 1):
        numbers = [counts[(rank + turn) % 4] for rank in range(comm.world_size)]
        everyone = [(torch.arange(n * 6).view(n, 6) + 100 * rank).to(dtype) for rank, n in enumerate(numbers)]
        rows = everyone[comm.rank].clone()
        gathered = comm.start_gather(rows, f"test.gather.{dtype}").wait()
        assert gathered.dtype == dtype
        assert torch.equal(gathered, torch.cat(everyone))
        assert torch.equal(rows, everyone[comm.rank])


def test_gathers_may_be_started_and_waited_for_in_any_order_among_sums(comm: Communicator) -> None:
    """Ranks start in opposite orders and wait in a third one."""
    n = comm.world_size
    turn = range(12) if comm.rank % 2 else reversed(range(12))
    sums = [torch.full((50,), float(k + comm.rank), dtype=torch.float64) for k in range(12)]
    sent = [torch.full((k + comm.rank, 3), float(comm.rank)) for k in range(12)]
    started = {k: (comm.start_sum(sums[k], f"test.s.{k}"), comm.start_gather(sent[k], f"test.g.{k}")) for k in turn}
    for k in sorted(started, key=lambda k: (k % 5, k)):
        gathered = started[k][1].wait()
        started[k][0].wait()
        assert gathered[:, 0].tolist() == [float(rank) for rank in range(n) for _ in range(k + rank)]
        assert torch.equal(sums[k], torch.full_like(sums[k], k * n + n * (n - 1) / 2))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "scalar", "int64 scalar", "empty"])
def test_broadcast_gives_everyone_rank_0s_values_in_any_layout(comm: Communicator, layout: str) -> None:
    def make(value: float) -> torch.Tensor:
        ramp = torch.arange(120.0) + value
        return {
            "contiguous": ramp,
            "channels_last": ramp.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "transposed": ramp.view(12, 10).t(),
            "scalar": torch.tensor(value),
            "int64 scalar": torch.tensor(int(value)),
            "empty": torch.empty(0),
        }[layout]

    tensor = make(1000.0 * (comm.rank + 1))
    stride = tensor.stride()
    comm.broadcast(tensor, f"test.broadcast.{layout}")
    assert torch.equal(tensor, make(1000.0))
    assert tensor.stride() == stride


@pytest.mark.parametrize("size", [0, 1, 31, MEGABYTES])
def test_broadcast_bytes_gives_everyone_rank_0s_data(comm: Communicator, size: int) -> None:
    """Empty to 5 MB; the others pass nothing, something shorter, something longer: it does not matter."""
    data = some_bytes(0, size)
    for others in (None, b"", some_bytes(9, 40)):
        assert comm.broadcast_bytes(data if comm.rank == 0 else others) == data


@pytest.mark.parametrize(
    "sizes",
    [(0, 0, 0, 0), (3, 0, 0, 0), (0, 0, 5, 1), (0, 7, 0, 0), (1, 2, 3, 4), (MEGABYTES, 0, 1, MEGABYTES + 3)],
)
def test_gather_bytes_gives_everyone_everyones_data(comm: Communicator, sizes: tuple[int, ...]) -> None:
    """Empty on all ranks or some, unequal, 5 MB."""
    everyone = [some_bytes(rank, sizes[rank % 4]) for rank in range(comm.world_size)]
    assert comm.gather_bytes(everyone[comm.rank]) == everyone


def test_agree_goes_on_where_nobody_has_an_error(comm: Communicator) -> None:
    agree(comm, None)


@pytest.mark.parametrize("who", ["first", "last", "all, alike", "all, each its own"])
def test_agree_raises_the_first_error_on_every_rank(comm: Communicator, who: str) -> None:
    last = comm.world_size - 1
    error: str | None = {
        "first": "disk full: ü" if comm.rank == 0 else None,
        "last": "disk full: ü" if comm.rank == last else None,
        "all, alike": "disk full: ü",
        "all, each its own": f"disk {comm.rank} full: ü",
    }[who]
    rank, text = {"last": (last, "disk full: ü"), "all, each its own": (0, "disk 0 full: ü")}.get(
        who, (0, "disk full: ü")
    )
    alone = comm.world_size == 1 or who == "all, alike"
    with pytest.raises(AgreedError) as caught:
        agree(comm, error)
    assert str(caught.value) == (text if alone else f"rank {rank}: {text}")
    comm.barrier()  # and the next collective finds everyone


def test_an_error_without_words_is_an_error_all_the_same(comm: Communicator) -> None:
    with pytest.raises(AgreedError):
        agree(comm, "" if comm.rank == comm.world_size - 1 else None)
