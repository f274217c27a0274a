"""Horovod's autotune: when its search is over, read off its log. The search itself: tests/jobs/test_traces.py."""

from __future__ import annotations

import dataclasses

import pytest

from hvdbs.config import CommunicationConfig, Config
from hvdbs.core_tuning import Search, most_updates
from hvdbs.errors import HvdbsError
from hvdbs.rules import check

# As Horovod 0.28.1 writes it, its blank included.
HEADER = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
HEADER += "tensor_fusion_threshold,score\n"
SCORES = ["0,0,0, 0,5,4,1.1\n", "0,0,0, 0,50,32,0.7\n", "0,0,0, 1,5,4,1.0\n"]
BEST = "0,1,0, 1,5,4,1.2\n"


@pytest.mark.parametrize("torn", [0, 4])
@pytest.mark.parametrize("apart", [0, 1])
def test_a_search_is_over_when_the_best_follows_the_last_score(torn: int, apart: int) -> None:
    """Scores after every fifth update, the best with the last of them or, read in between, an update later; what was
    read in the middle of a line does not count before its end is there."""
    search, log = Search(), HEADER
    for update in range(1, 30):
        if update % 5 == 0 and update <= 15:
            log += SCORES[update // 5 - 1]
        if update == 15 + apart:
            log += BEST[: len(BEST) - torn]
        if update == 17:
            log = log.removesuffix(BEST[: len(BEST) - torn]) + BEST
        over = search.over(update, log)
        assert over == (update == (17 if torn else 15 + apart))
        if over:
            break
    assert search.found["cycle_time_ms"] == "5"
    assert search.found["hierarchical_allgather"] == search.found["cache_enabled"] == "1"
    assert search.found["score"] == "1.2"


def test_a_search_has_an_end() -> None:
    assert most_updates({}) == 5 * 11 * (3 + 21 + 8)
    few = {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "0"}
    assert most_updates({**few, "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "2"}) == 5 * 2 * (3 + 8)


def test_autotune_is_refused_with_deterministic() -> None:
    config = Config(communication=CommunicationConfig(autotune=True))
    with pytest.raises(HvdbsError, match=r"communication\.autotune: True regroups sums by their timing"):
        check(config)
    check(dataclasses.replace(config, deterministic=False))
