"""Lines of the page: one for each thing that was looked at, in groups, and several nodes' lines made one."""

from __future__ import annotations

import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Word = Literal["ok", "note", "FAIL"]
WIDTH = 100  # characters of the page
_INDENT = 28  # in front of what was found
_GRAVITY: dict[Word, int] = {"ok": 0, "note": 1, "FAIL": 2}


@dataclass(frozen=True)
class Finding:
    """``text``: what was found; ``fix``: what to do, empty where nothing is to be done.

    ``FAIL``: training on several ranks does not start here, or fails; ``note``: it goes, but slower, or without
    something. ``alike``: what nodes of one job must not differ in, in words that can be compared; None where they may.
    ``nodes``: of whom this is said; empty where it is of this machine.
    """

    group: str
    name: str
    word: Word
    text: str
    fix: str = ""
    alike: str | None = None
    nodes: tuple[str, ...] = ()


def looked_at(group: str, name: str, look: Callable[[], Finding | None]) -> list[Finding]:
    """What ``look`` finds. Nothing that a machine may be like ends the page: an exception is a note."""
    try:
        found = look()
    except Exception as problem:
        return [Finding(group, name, "note", f"could not be looked at ({type(problem).__name__}: {problem})")]
    return [] if found is None else [found]


Look = tuple[str, str, Callable[[], Finding | None]]  # group, name, and what looks


def all_looked_at(looks: Sequence[Look], seconds: float) -> list[Finding]:
    """What each of them finds, in their order, looked at side by side in at most so many ``seconds``.

    A dead file server holds whoever asks it for ever: that is a note, and its thread does not keep the process alive.
    """
    found: dict[int, list[Finding]] = {}

    def take(at: int) -> None:
        found[at] = looked_at(*looks[at])

    threads = [threading.Thread(target=take, args=(at,), daemon=True) for at in range(len(looks))]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    fix = "what it waits for: a file system (df), a server of names (getent hosts), a driver; or a longer --timeout"
    late = f"no answer in {seconds:g} s"
    unanswered = [Finding(group, name, "note", late, fix) for group, name, _ in looks]
    return [line for at, none in enumerate(unanswered) for line in found.get(at, [none])]


def merged(by_node: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """The lines of all nodes: one where nodes agree, one for each kind where not, the first node's words for its kind.

    A thing of which one node says nothing and others do is a kind too. Different ``alike`` on two nodes is at least a
    note, which says so.
    """
    names: dict[tuple[str, str], None] = {}
    for findings in by_node.values():
        names |= dict.fromkeys((finding.group, finding.name) for finding in findings)
    return [line for group, name in names for line in _of_all(group, name, by_node)]


def _of_all(group: str, name: str, by_node: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    kinds: dict[tuple[str, str | None], Finding] = {}
    for node, findings in by_node.items():
        nothing = Finding(group, name, "ok", "nothing of the kind")
        own = next((one for one in findings if (one.group, one.name) == (group, name)), nothing)
        kind = (own.word, own.alike)
        kinds[kind] = replace(kinds.get(kind, own), nodes=(*kinds.get(kind, nothing).nodes, node))
    if len({alike for _, alike in kinds}) == 1:
        return list(kinds.values())
    lines = []
    for finding in kinds.values():
        differs = finding.fix or "nodes differ: the same on all of them, or leave some out"
        lines.append(replace(finding, word="note" if finding.word == "ok" else finding.word, fix=differs))
    return lines


def worst(findings: Sequence[Finding]) -> Word:
    return max((finding.word for finding in findings), key=_GRAVITY.__getitem__, default="ok")


def page(findings: Sequence[Finding], title: str, nodes: int = 1) -> str:
    """The findings by group, no line longer than WIDTH, with a closing line that counts them. ``nodes``: there are."""
    lines = [title]
    for group in dict.fromkeys(finding.group for finding in findings):
        lines += ["", group]
        for finding in findings:
            if finding.group == group:
                lines += _lines(finding, nodes)
    failures, notes = (sum(finding.word == word for finding in findings) for word in ("FAIL", "note"))
    tried = any(finding.group == "communication" for finding in findings)
    lines += ["", closing(failures, notes, tried)]
    return "\n".join(lines)


def closing(failures: int, notes: int, tried: bool) -> str:
    """The last line; ``tried``: whether ranks were started."""
    said = f"{failures} {'failure' if failures == 1 else 'failures'}, {notes} {'note' if notes == 1 else 'notes'}"
    if failures:
        return f"{said}: training on several ranks will not work here until the failures are mended"
    if not tried:
        return f"{said}: nothing speaks against training on several ranks, and none were started"
    return f"{said}: training on several ranks works here"


def _lines(finding: Finding, nodes: int) -> list[str]:
    text = finding.text
    if finding.nodes and len(finding.nodes) < nodes:
        text = f"{shortened(finding.nodes)}: {text}"
    head = f"  {finding.word:<4}  {finding.name:<{_INDENT - 10}}  "
    lines = textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
    )
    if finding.fix:
        fix = " ".join(finding.fix.split())
        lines += textwrap.wrap(
            fix,
            WIDTH,
            initial_indent=f"{' ' * (_INDENT - 3)}-> ",
            subsequent_indent=" " * _INDENT,
            break_on_hyphens=False,
        )
    return lines


def shortened(names: Sequence[str], most: int = 4) -> str:
    """A few of the names, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def amount(size: float) -> str:
    """Bytes in the unit that reads best: 24 GB, 64 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB" if size < 1000 else f"{size:,.0f} TB"
