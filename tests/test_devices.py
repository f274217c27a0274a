"""One GPU for each rank: which one, and what is refused. The driver's answers are given as data."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hvdbs.comm.local import Solo, ThreadRank, ThreadWorld
from hvdbs.config import Config
from hvdbs.devices import Seat, assign, choose_device
from hvdbs.errors import HvdbsError


def node(host: str, ranks: int, gpus: Sequence[str], visible: str | None = None, own: bool = False) -> list[Seat]:
    """``ranks`` seats that all see ``gpus``, or each its ``own`` alone, as number 0."""
    return [
        Seat(host, rank, [gpus[rank]] if own else list(gpus), str(rank) if own else visible) for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("seats", "indices"),
    [
        (node("a", 2, "xy") + node("b", 2, "zw"), [0, 1, 0, 1]),
        (node("a", 2, "xyzw"), [0, 1]),
        (node("a", 3, "xyz", own=True), [0, 0, 0]),
        ([Seat("a", 0, "xy", "0,1"), Seat("a", 1, "zw", "2,3"), Seat("a", 2, "uv", "4,5")], [0, 1, 0]),
    ],
    ids=["whole nodes", "more GPUs than ranks", "one for each task", "two for each task"],
)
def test_each_rank_takes_a_gpu_of_its_own_by_local_rank(seats: list[Seat], indices: list[int]) -> None:
    for asked in ("auto", "cuda"):
        assert assign(asked, seats) == indices
    taken = {seat.gpus[index] for seat, index in zip(seats, indices, strict=True)}
    assert len(taken) == len(seats)
    assert assign("cpu", seats) == [None] * len(seats)


@pytest.mark.parametrize(
    ("seats", "line"),
    [
        (
            node("n1", 4, "xy", "0,1"),
            "device: cuda:0 of n1 (CUDA_VISIBLE_DEVICES 0,1) is taken by ranks 0, 2, and a GPU is for one of them; "
            "2 ranks on that node, or another CUDA_VISIBLE_DEVICES for each (srun --gpus-per-task=1 sets it), or "
            "device: cpu",
        ),
        (
            node("n0", 1, "w") + node("n1", 2, "x"),
            "device: cuda:0 of n1 (CUDA_VISIBLE_DEVICES unset) is taken by ranks 1, 2, and a GPU is for one of "
            "them; 1 rank on that node, or another CUDA_VISIBLE_DEVICES for each (srun --gpus-per-task=1 sets it), or "
            "device: cpu",
        ),
        (
            # Enough GPUs, shown so that local_rank picks one twice.
            [Seat("n1", 0, "xy", "0,1"), Seat("n1", 1, "yx", "1,0")],
            "device: cuda:0 of n1 (CUDA_VISIBLE_DEVICES 0,1) is taken by ranks 0, 1, and a GPU is for one of them; "
            "another CUDA_VISIBLE_DEVICES for each (srun --gpus-per-task=1 sets it), or device: cpu",
        ),
        (
            [*node("n0", 1, "x"), Seat("n1", 0, "", "")],
            "device: auto finds GPUs for rank 0 on n0 (CUDA_VISIBLE_DEVICES unset) and none for rank 1 on n1 "
            "(CUDA_VISIBLE_DEVICES empty); show every rank a GPU, or device: cpu",
        ),
    ],
    ids=["more ranks than GPUs", "one GPU on another node", "overlapping", "a rank without"],
)
def test_a_gpu_taken_twice_or_missing_is_named_with_its_ranks(seats: list[Seat], line: str) -> None:
    with pytest.raises(HvdbsError) as refused:
        assign("auto", seats)
    assert str(refused.value) == line
    assert assign("cpu", seats) == [None] * len(seats)


def test_without_any_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    seats = node("a", 2, "")
    assert assign("auto", seats) == [None, None]
    with pytest.raises(HvdbsError, match="device: cuda is asked for, but torch sees no GPU; device: cpu"):
        assign("cuda", seats)


def test_ranks_agree_on_who_sits_where_and_all_refuse_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads on one host: each sees the GPU that the driver is made to show, and takes it; two on the same one are
    refused by every rank with one text."""

    class Properties:
        uuid = "GPU-x"

    assert choose_device(Config(device="cpu"), Solo()) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    assert choose_device(Config(), Solo()) == torch.device("cuda", 0)
    assert choose_device(Config(device="cpu"), Solo()) == torch.device("cpu")

    def main(rank: ThreadRank) -> str:
        with pytest.raises(HvdbsError) as refused:
            choose_device(Config(), rank)
        return str(refused.value)

    texts = ThreadWorld(3).run(main)
    assert len(set(texts)) == 1
    assert "is taken by ranks 0, 1, 2" in texts[0]
