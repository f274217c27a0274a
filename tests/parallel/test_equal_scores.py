"""Law 8: the scores of given weights have the same bits at every world_size, and every sample counts exactly once."""

from __future__ import annotations

import pytest
import rig
import torch

from hvdbs.comm import Communicator
from hvdbs.comm.local import Solo
from hvdbs.evaluation import Scores, evaluate
from hvdbs.loss import summed_loss
from hvdbs.step import Preprocess

pytestmark = pytest.mark.parallel

LOSS = summed_loss(rig.settings(rig.SHORT_STAGES), 0.0)


def scored(comm: Communicator, source: rig.Memory, micro_batch: int, dtype: str) -> Scores:
    model = rig.built(rig.ConvNet, dtype)
    preprocess = Preprocess(rig.settings(rig.SHORT_STAGES, dtype=dtype), torch.device("cpu"))
    result = evaluate(model, preprocess, source, comm, micro_batch, LOSS)
    assert model.training
    return result


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("val_samples", "micro_batch"), [(1, 8), (2, 1), (3, 1), (5, 2), (59, 8), (64, 8), (203, 7)])
def test_scores_are_bitwise_those_of_one_process(
    comm: Communicator, val_samples: int, micro_batch: int, dtype: str
) -> None:
    """Law 8: loss, top-1 and top-5 over all ranks against a Solo evaluation in the same process, bit for bit; fewer
    micro-batches than ranks, a short last one, a single sample; and each sample asked for exactly once over all
    ranks."""
    source = rig.memory(rig.IMAGE, val_samples=val_samples, dtype=dtype)
    scores = scored(comm, source, micro_batch, dtype)
    asked = rig.everywhere(comm, [[r.begin, r.size] for r in source.asked_validation])
    seen = sorted(place for rank in asked for begin, size in rank for place in range(begin, begin + size))
    assert seen == list(range(val_samples))
    assert scores == scored(Solo(), source, micro_batch, dtype)
    assert scores.samples == val_samples
    assert len({tuple(other) for other in rig.everywhere(comm, [scores.loss, scores.top1, scores.top5])}) == 1


def test_scores_are_what_a_plain_count_gives(comm: Communicator) -> None:
    """Against the whole set in one forward, float64: counts exactly, mean loss 1e-12; 59 samples, 5 classes (so
    top-5 is 1), weights of seed 3 with running statistics of their own."""
    source = rig.memory(rig.IMAGE, val_samples=59)
    scores = scored(comm, source, 8, "float64")
    model = rig.built(rig.ConvNet).eval()
    with torch.no_grad():
        logits = model(source.val_inputs)
        loss = torch.nn.functional.cross_entropy(logits, source.val_labels).item()
    right = (logits.argmax(1) == source.val_labels).sum().item()
    assert scores.top1 == right / 59
    assert scores.top5 == 1.0
    assert abs(scores.loss - loss) < 1e-12 * loss
    assert 0 < right < 59


def test_an_evaluation_leaves_the_training_as_it_was(comm: Communicator) -> None:
    """Parameters, running statistics and their count: bit for bit."""
    model = rig.built(rig.ConvNet)
    before = rig.snapshot(model)
    preprocess = Preprocess(rig.settings(rig.SHORT_STAGES), torch.device("cpu"))
    evaluate(model, preprocess, rig.memory(rig.IMAGE), comm, 8, LOSS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
