"""The one way hvdbs refuses something: a line with the value, the rule it breaks and what would do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 1200  # characters of a message
_MOST_NAMES = 24  # in a list of what is known


class HvdbsError(Exception):
    """A mistake the user can mend. Its text is one line; entries print it without a traceback and exit with 2.

    What cannot be printed is escaped, lest a path or a value moves the cursor of a terminal; of a very long text the
    middle is left out.
    """

    def __init__(self, message: str) -> None:
        text = "".join(c if c.isprintable() else _escaped(c) for c in " ".join(message.splitlines()))
        if len(text) > _LONGEST:
            text = f"{text[: 2 * _LONGEST // 3]} [...] {text[-_LONGEST // 3 :]}"
        super().__init__(text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def refusal(what: str, value: object, rule: str, nearest: str = "") -> HvdbsError:
    """``what: value`` breaks ``rule``; ``nearest`` names the values that would do. The caller raises it."""
    shown = "''" if str(value) == "" else value
    return HvdbsError(f"{what}: {shown} {rule}" + (f"; {nearest}" if nearest else ""))


def suggestion(word: str, known: Iterable[str]) -> str:
    """``did you mean X?`` for the closest known word, else the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names[:_MOST_NAMES])}{more}"
