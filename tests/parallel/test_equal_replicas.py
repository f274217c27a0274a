"""Law 2 and the comparison over ranks: replicas are bitwise equal after every update, and a difference ends all
ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import rig
import torch

from hvdbs.comm import AgreedError, Communicator
from hvdbs.replicas import compare, parameter_digest, state_digest
from hvdbs.schedule import Decision
from hvdbs.step import Replica

pytestmark = pytest.mark.parallel

DECISION = Decision(stage=1, global_batch=77, lr=0.1, weight_decay=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("clip_norm", [None, 0.4])
def test_replicas_stay_bitwise_equal_when_the_stage_changes(
    comm: Communicator, shared: Path, dtype: str, clip_norm: float | None
) -> None:
    """Law 2: sha256 over parameters, buffers and momentum after each of 10 updates in three stages (50, 77, 131
    samples, micro_batch 8; batch norm, dropout), the same on all ranks; also loss, norm and lr of each update."""
    watch = rig.Watch()
    config = rig.settings(rig.SHORT_STAGES, dtype=dtype, clip_norm=clip_norm, bucket_bytes=500)
    rig.trained(comm, config, rig.built(rig.ConvNet, dtype), rig.memory(rig.IMAGE, dtype=dtype), shared, watch)
    seen = rig.everywhere(comm, [watch.digests, watch.losses, watch.gradient_norms, watch.lrs, watch.stages])
    assert len(set(watch.digests)) == len(watch.digests) == 10
    assert watch.stages == [0] * 4 + [1] * 3 + [2] * 3
    for rank, other in enumerate(seen):
        assert other == seen[0], f"rank {rank} differs from rank 0"


def a_replica(comm: Communicator, model: torch.nn.Module) -> Replica:
    return Replica(model, rig.settings(rig.SHORT_STAGES), comm)


def test_equal_replicas_with_equal_decisions_pass(comm: Communicator) -> None:
    replica = a_replica(comm, rig.built(rig.ConvNet))
    compare(comm, DECISION, state_digest(replica.model, replica.optimizer))


@pytest.mark.parametrize("what", ["parameter", "buffer", "momentum", "decision"])
def test_a_rank_that_differs_ends_all_ranks_with_its_number_and_both_values(comm: Communicator, what: str) -> None:
    """Each kind of state, changed in its last bit (the decision: its lr) on the last rank: every rank raises
    AgreedError."""
    if comm.world_size == 1:
        pytest.skip("one rank cannot differ from itself")
    last = comm.world_size - 1
    replica = a_replica(comm, rig.built(rig.ConvNet))
    for p in replica.model.parameters():
        replica.optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)
    right = state_digest(replica.model, replica.optimizer)
    decision = DECISION
    if comm.rank == last:
        if what == "decision":
            decision = dataclasses.replace(DECISION, lr=0.1000001)
        else:
            parameter = next(replica.model.parameters())
            tensor = {
                "parameter": parameter.detach(),
                "buffer": dict(replica.model.named_buffers())["bn2.running_var"],
                "momentum": replica.optimizer.state[parameter]["momentum_buffer"],
            }[what]
            first = tensor.view(-1)[:1]
            first.copy_(torch.nextafter(first, first + 1))
    mine = state_digest(replica.model, replica.optimizer)
    digests = rig.everywhere(comm, mine)
    assert (digests[last] != right) == (what != "decision")
    with pytest.raises(AgreedError) as caught:
        compare(comm, decision, mine)
    message = str(caught.value)
    assert f"rank {last} has" in message or f"ranks {last} have" in message
    for value in ("0.1", "0.1000001") if what == "decision" else (right, digests[last]):
        assert value in message
    assert "stage 1" in message
    assert len(set(rig.everywhere(comm, message))) == 1


def test_two_ranks_that_differ_in_two_ways_are_both_named_with_their_own_values(comm: Communicator) -> None:
    """Ranks 1 and 2 each have a value of their own: the message must not say of one what holds for the other."""
    if comm.world_size < 3:
        pytest.skip("needs three ranks")
    with pytest.raises(AgreedError) as caught:
        compare(comm, DECISION, f"digest-of-{min(comm.rank, 2)}" if comm.rank < 3 else "digest-of-0")
    for text in ("1", "2", "digest-of-0", "digest-of-1", "digest-of-2"):
        assert text in str(caught.value)


def test_a_difference_is_found_when_the_next_stage_begins(comm: Communicator, shared: Path) -> None:
    """In the loop itself: one bit of rank 0's first parameter is changed after update 5, in stage 1; training ends
    at the beginning of stage 2, after update 7."""
    if comm.world_size == 1:
        pytest.skip("one rank cannot differ from itself")
    watch = rig.Watch()
    model = rig.built(rig.mlp)

    def disturb(progress: object) -> None:
        if len(watch.digests) == 5 and comm.rank == 0:
            with torch.no_grad():
                first = next(model.parameters()).view(-1)[:1]
                first.copy_(torch.nextafter(first, first + 1))

    watch.after = disturb
    with pytest.raises(AgreedError, match="replicas differ at stage 2"):
        rig.trained(comm, rig.settings(rig.SHORT_STAGES), model, rig.memory(rig.FLAT), shared, watch)
    assert watch.stages == [0] * 4 + [1] * 3


def test_digests_see_every_kind_of_state_and_do_not_depend_on_memory_layout(comm: Communicator) -> None:
    """parameter_digest reads float32 values in name order: the layout in memory and the dtype above it do not count."""
    model = rig.built(rig.ConvNet, "float32")
    plain = parameter_digest(model)
    assert parameter_digest(model.to(memory_format=torch.channels_last)) == plain
    assert parameter_digest(model.double()) == plain
    with torch.no_grad():
        model.get_parameter("fc.bias")[0] += 1e-3
    assert parameter_digest(model) != plain
