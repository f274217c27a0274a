"""A figure as a piece of a page: SVG whose names are its own and whose colours are the page's."""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Drawn in these, shown in what the page's style makes of them: it has a light scheme and a dark one.
INK, GRID, PAPER = "#1a1b1c", "#c7c8c9", "#fcfdfe"

RC: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "hvdbs", "path.simplify": True, "text.parse_math": False}


def inline(figure: Figure, name: str, title: str, variables: dict[str, str]) -> str:
    """``figure`` as an <svg> element that scales with its container.

    Every id begins with ``name``, so that two pictures of a page never share one; ``title`` is what a screen reader
    says. ``variables``: by colour, the CSS variable that takes its place. Nothing in it refers to another file.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(RC):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    body = text.getvalue()
    body = body[body.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<style[^>]*>.*?</style>\s*", "", body, flags=re.DOTALL)  # would be the whole page's
    body = re.sub(r"font-family: [^;]+; ?", "", body)  # the page's
    used = {*re.findall(r'href="#([^"]+)"', body), *re.findall(r"url\(#([^)]+)\)", body)}
    body = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    for colour, variable in variables.items():
        body = re.sub(re.escape(colour), f"var({variable})", body, flags=re.IGNORECASE)
    view = re.search(r'viewBox="([^"]+)"', body)
    assert view is not None
    head = f'<svg class="chart" viewBox="{view[1]}" role="img" aria-label="{html.escape(title, quote=True)}">'
    return re.sub(r"<svg[^>]*>", lambda _: head, body, count=1)
