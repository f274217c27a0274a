"""What the documentation prints is what the commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdbs import plan

DOCS = Path(__file__).parent.parent / "docs"
PLANS = re.findall(r"```\n\$ python -m hvdbs\.plan ([^\n]+)\n(.*?)```", (DOCS / "plans.md").read_text(), re.DOTALL)


def test_every_plan_of_the_page_is_found() -> None:
    assert len(PLANS) == (DOCS / "plans.md").read_text().count("$ python") == 12


@pytest.mark.parametrize(("words", "printed"), PLANS, ids=[words for words, _ in PLANS])
def test_a_plan_is_printed_as_the_page_has_it(words: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(words.split()) == 0
    assert capsys.readouterr().out == printed
