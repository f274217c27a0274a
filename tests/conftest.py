"""For every test below: this folder and tools/ are on the path (``reference``, ``rig`` and ``ranks`` are imported by
name), and what needs a GPU is skipped where torch sees none."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(1, str(Path(__file__).parents[1] / "tools"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU")


@pytest.fixture(scope="module")
def parsers() -> Iterator[None]:
    """Each entry's parser is made once, for modules that call entries hundreds of times: making it takes 80 ms."""
    from hvdbs import plan, train

    with pytest.MonkeyPatch.context() as patch:
        for entry in (plan, train):
            patch.setattr(entry, "parser", functools.cache(entry.parser))
        yield
