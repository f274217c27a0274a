"""The contenders of benchmarks.communication do what is timed: the same sums, by each of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import communication as bench
from hvdbs.comm import Communicator

pytestmark = pytest.mark.parallel


def test_every_pass_leaves_the_sum_over_ranks_in_every_gradient(comm: Communicator) -> None:
    """Gradients are ones, so the sums are the number of ranks; but the one that reduces nothing, which keeps them."""
    for entrant in bench.passes(comm, 64, 5):
        for _ in range(2):
            entrant.operation()
        model = entrant.model
        assert model is not None
        expected = 1.0 if entrant.name == "none" else float(comm.world_size)
        for weight in model.weights:
            assert weight.grad is not None and torch.equal(weight.grad, torch.full((16,), expected)), entrant.name


def test_our_reducer_reduces_a_message_as_the_step_does(comm: Communicator) -> None:
    (entrant,) = [one for one in bench.messages(comm, bench.LARGE) if one.name == "reducer"]
    entrant.prepare()
    entrant.operation()
    assert entrant.model is not None
    (weight,) = entrant.model.weights
    assert weight.grad is not None and torch.equal(weight.grad, torch.full_like(weight, comm.world_size))


def test_there_is_a_row_for_each_round_and_contender(comm: Communicator) -> None:
    entrants = [one for one in bench.messages(comm, 4096) if one.name != "torch-gloo"]  # which needs a group
    rows = bench.in_turn(comm, entrants, 2, 1e-4)
    assert len(rows) == 2 * len(entrants) and all(row["seconds"] > 0 for row in rows)
    assert {one.name for one in entrants} >= {"horovod", "copy"}
