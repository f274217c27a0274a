"""For every test below: this folder and tools/ are on the path (``reference``, ``rig`` and ``ranks`` are imported by
name), and what needs a GPU is skipped where torch sees none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(1, str(Path(__file__).parents[1] / "tools"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU")
