"""Work ahead of its consumer: in order, bounded, and without threads left behind."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hvdbs.data.ahead import THREAD_NAME, look_ahead


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def square(x: int) -> int:
    time.sleep(0.001 * (x % 3))
    return x * x


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_results_come_in_the_order_of_requests_of_any_size(threads: int, depth: int) -> None:
    requests = [list(range(k, k + size)) for k, size in enumerate([1, 20, 3, 8, 9, 0, 2])]
    expected = [[x * x for x in request] for request in requests]
    assert list(look_ahead(requests, square, threads, depth)) == expected
    assert not workers()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_endless_supply_is_taken_only_so_far_ahead_and_by_the_consumer_alone(depth: int) -> None:
    taken, takers = [], set()

    def requests() -> Iterator[list[int]]:
        for k in itertools.count():
            taken.append(k)
            takers.add(threading.current_thread())
            yield [k]

    ready = look_ahead(requests(), square, 2, depth)
    assert not taken
    for k in range(5):
        next(ready)
        assert len(taken) == k + 1 + depth
    ready.close()
    assert takers == {threading.current_thread()}
    assert not workers()


def test_the_work_of_later_requests_goes_on_while_the_consumer_does_something_else() -> None:
    started = threading.Event()
    ready = look_ahead([[0], [1]], lambda x: started.set() if x else None, 1, 1)
    next(ready)
    assert started.wait(10)
    ready.close()


def test_an_error_is_raised_in_its_turn_and_ends_the_threads() -> None:
    def work(x: int) -> int:
        if x >= 2:
            raise ValueError(x)
        time.sleep(0.02)
        return x

    ready = look_ahead([[0], [1], [2], [3]], work, 2, 3)
    assert [next(ready), next(ready)] == [[0], [1]]
    with pytest.raises(ValueError, match="2"):
        next(ready)
    assert not workers()


def test_close_waits_for_work_begun_and_drops_the_rest() -> None:
    done = []

    def work(x: int) -> None:
        time.sleep(0.02)
        done.append(x)

    ready = look_ahead(([k] for k in itertools.count()), work, 1, 50)
    next(ready)
    ready.close()
    assert not workers()
    assert len(done) < 10


def test_a_forgotten_iterator_ends_its_threads() -> None:
    ready = look_ahead(([k] for k in itertools.count()), square, 2, 2)
    next(ready)
    assert workers()
    del ready
    gc.collect()
    assert not workers()


def test_an_iterator_collected_by_one_of_its_own_threads_does_not_wait_for_itself() -> None:
    holder: list[object] = []
    collected = threading.Event()

    def work(x: int) -> int:
        if x == 1:
            while len(holder) < 2:
                time.sleep(0.001)
            holder.clear()
            gc.collect()
            collected.set()
        return x

    ready = look_ahead([[0], [1]], work, 1, 1)
    next(ready)
    cycle: list[object] = [ready]
    cycle.append(cycle)
    holder.append(cycle)
    del ready, cycle
    holder.append(None)
    assert collected.wait(10)
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_NAME):
            thread.join(10)
    assert not workers()


def test_the_interpreter_ends_while_iterators_are_open() -> None:
    program = """
import itertools, time
from hvdbs.data.ahead import look_ahead
open_one = look_ahead(([k] for k in itertools.count()), lambda k: time.sleep(0.05), 2, 5)
next(open_one)
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
