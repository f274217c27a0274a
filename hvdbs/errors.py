"""The one way hvdbs refuses something: a line with the value, the rule it breaks and what would do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HvdbsError(Exception):
    """A mistake the user can mend. Its text is one line; entries print it without a traceback and exit with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def refusal(what: str, value: object, rule: str, nearest: str = "") -> HvdbsError:
    """``what: value`` breaks ``rule``; ``nearest`` names the values that would do. The caller raises it."""
    return HvdbsError(f"{what}: {value} {rule}" + (f"; {nearest}" if nearest else ""))


def suggestion(word: str, known: Iterable[str]) -> str:
    """``did you mean X?`` for the closest known word, else the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
