"""COMPLAINTS.md and README.md name tests; those must exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_that_the_table_of_complaints_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (TESTS / "COMPLAINTS.md").read_text()))
    written = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(named) > 30
    assert not named - written


def test_every_file_that_the_readme_names_as_a_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", (TESTS.parent / "README.md").read_text())
    assert named
    assert all((TESTS.parent / name).is_file() for name in named)
