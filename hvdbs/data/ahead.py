"""Work done ahead of its consumer by a few threads: bounded, in order, over when the iterator is closed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

THREAD_NAME = "hvdbs-data"
# Items of one task: few enough that threads end together, many enough that queueing costs nothing.
_LARGEST_PART = 8


def look_ahead(
    requests: Iterable[Sequence[S]], work: Callable[[S], T], threads: int, depth: int
) -> Generator[list[T], None, None]:
    """``[work(item) for item in request]`` for each request, in order, on ``threads`` threads.

    ``requests`` may be endless; it is advanced by the consumer's thread alone, and never more than ``depth``
    requests beyond the one whose result is handed over. An exception of ``work`` is raised in its request's
    turn. The iterator's end, an exception and ``close()`` all end the threads.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=THREAD_NAME)
    under_way: deque[list[Future[list[T]]]] = deque()
    source = iter(requests)
    try:
        while True:
            while len(under_way) <= depth and (request := next(source, None)) is not None:
                under_way.append([pool.submit(_all, work, part) for part in _parts(request, threads)])
            if not under_way:
                return
            yield [result for part in under_way.popleft() for result in part.result()]
    finally:
        # An iterator that is part of a cycle may be collected by one of its own threads, which cannot wait
        # for itself.
        own = threading.current_thread().name.startswith(THREAD_NAME)
        pool.shutdown(wait=not own, cancel_futures=True)


def _all(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    return [work(item) for item in items]


def _parts(items: Sequence[S], threads: int) -> Iterator[Sequence[S]]:
    size = min(_LARGEST_PART, max(1, -(-len(items) // threads)))
    return (items[k : k + size] for k in range(0, len(items), size))
