"""One GPU for each rank and NCCL between them: laws 1, 2, 4 and 5 there. ``tools/run_tests.py --only gpu`` starts as
many ranks as there are GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
import rig
import torch
from image_folders import encode, photo, write
from torch import nn

from hvdbs.assembly import settle
from hvdbs.batching import MicroBatch, Window
from hvdbs.comm import Communicator
from hvdbs.config import Config, DataConfig
from hvdbs.data.sources import open_source
from hvdbs.devices import choose_device
from hvdbs.schedule import Decision
from hvdbs.step import Replica, Requests

pytestmark = [pytest.mark.parallel, pytest.mark.gpu]


@pytest.fixture
def gpu(comm: Communicator) -> Iterator[torch.device]:
    """This rank's, with what a run sets by default; undone at the end."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    device = choose_device(Config(device="cuda"), comm)
    settle(Config(), 1.0, device)
    yield device
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


def still() -> nn.Module:
    """The conv net without dropout: a GPU's generator draws other numbers than the CPU's."""
    return rig.ConvNet(dropout=0.0)


def test_every_rank_has_a_gpu_of_its_own_and_nccl_sums_over_them(comm: Communicator, gpu: torch.device) -> None:
    assert comm.backend == "horovod-nccl"
    uuids = rig.everywhere(comm, str(torch.cuda.get_device_properties(gpu).uuid))
    assert len(set(uuids)) == comm.world_size
    for dtype in (torch.float16, torch.float32, torch.float64):
        ranks = torch.full((1000,), float(comm.rank), dtype=dtype, device=gpu)
        comm.start_sum(ranks, f"ranks.{dtype}").wait()
        assert torch.equal(ranks, torch.full_like(ranks, sum(range(comm.world_size))))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gpus_stay_bitwise_equal_repeat_their_bits_and_train_as_the_plain_loop(
    comm: Communicator, gpu: torch.device, shared: Path, dtype: str
) -> None:
    """Laws 2 and 4: sha256 of the whole state after each of 10 updates in three stages, the same on all ranks and in
    two runs. Law 1 in float64: 1e-12 against one plain process on the CPU."""
    source = rig.memory(rig.IMAGE, dtype=dtype)
    config = rig.settings(rig.SHORT_STAGES, dtype=dtype, clip_norm=0.4, bucket_bytes=500)
    runs = []
    for k in range(2):
        watch, model = rig.Watch(), rig.built(still, dtype).to(gpu)
        rig.trained(comm, config, model, source, shared / str(k), watch)
        runs.append(watch.digests)
    assert len(set(runs[0])) == len(runs[0]) == 10
    assert runs[0] == runs[1]
    assert rig.everywhere(comm, runs[0]) == [runs[0]] * comm.world_size
    if dtype == "float64":
        expected = rig.built(still, dtype)
        order = source.stream(1500)
        reference.train(expected, source.inputs, source.labels, order, rig.SHORT_STAGES, micro_batch=8, clip_norm=0.4)
        assert rig.distance(rig.snapshot(model.cpu()), rig.snapshot(expected)) < 1e-12


@pytest.mark.parametrize("global_batch", [8, 131, 400])
def test_gpus_reduce_once_per_update_and_begin_before_backward_ends(
    comm: Communicator, gpu: torch.device, global_batch: int
) -> None:
    """Law 5: the carry and each bucket once, whatever the accumulation; the first bucket is on its way before the last
    gradient has arrived, on every rank that has a micro-batch."""
    counted = rig.Counted(comm)
    model = rig.built(rig.ConvNet).to(gpu)
    counted.watch(model)
    replica = Replica(model, rig.settings(rig.SHORT_STAGES, bucket_bytes=500), counted)
    window = Window(0, global_batch, 8)
    batches = rig.memory(rig.IMAGE).train(window.dealt_to(comm.rank, comm.world_size))
    replica.run(window, Decision(0, global_batch, 0.1, 1e-3), 0, batches, Requests())
    names = [event.name for event in counted.events if event.kind == "sum"]
    assert sorted(names) == sorted(["carry", *(bucket.name for bucket in replica.reducer.buckets)])
    assert len(replica.reducer.buckets) > 1
    kinds = [event.kind for event in counted.events]
    if "arrived" in kinds:
        last = len(kinds) - 1 - kinds[::-1].index("arrived")
        assert counted.events.index(next(e for e in counted.events if e.name == "gradients.0")) < last


def test_mixed_decoding_on_each_gpu_agrees_with_the_cpu(comm: Communicator, gpu: torch.device, tmp_path: Path) -> None:
    """Mean deviation below one level, as on one GPU (tests/test_data_decode.py)."""
    pytest.importorskip("nvidia.dali", reason="make setup installs it")
    images = {f"{split}/a/{k}.jpg": encode(photo(), quality=80 + k) for split in ("train", "val") for k in range(8)}
    root = str(write(tmp_path / "images", images))
    pixels = []
    for decode, device in (("mixed", gpu), ("cpu", torch.device("cpu"))):
        data = DataConfig(root=root, backend="dali", decode=decode, threads=2)  # type: ignore[arg-type]  # one of two
        (batch,) = open_source(Config(micro_batch=8, data=data), comm, device).train([MicroBatch(0, 0, 8)])
        assert batch.inputs.device == device
        pixels.append(batch.inputs.cpu().to(torch.int16))
    assert (pixels[0] - pixels[1]).abs().float().mean() < 1
