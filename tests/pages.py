"""An HTML page held to what a page may be, and Chromium's view of it where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "img", "br", "hr"}
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


class Page(HTMLParser):
    """The tags, ids, references and text of a page; raises AssertionError for tags that do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> at {self.getpos()} closes {self._open[-3:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
                self.references.append(value or "")
            self.references += [f"url({inner})" for inner in re.findall(r"url\(([^)]*)\)", value or "")]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def checked(html: str) -> Page:
    """The page: balanced, ids unique, every reference within it, no script, no handler, nothing imported."""
    page = Page(html)
    assert len(set(page.ids)) == len(page.ids), "an id stands twice"
    for reference in page.references:
        inner = reference.removeprefix("url(").removesuffix(")")
        assert inner.startswith("data:") or (inner[1:] in page.ids and inner[0] == "#"), reference
    assert "script" not in page.tags
    assert not [name for name in page.attributes if name.startswith("on")]
    assert "@import" not in html
    return page


def in_chromium(html: str, width: int, folder: Path) -> tuple[list[str], int]:
    """What Chromium writes to the console of the page, and how wide its content is in a window of ``width`` pixels."""
    assert CHROMIUM is not None
    base = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    base += [f"--window-size={width},900", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    (folder / "page.html").write_text(html)
    seen = _output([*base, (folder / "page.html").as_uri()])
    console = [line for line in seen.stderr.splitlines() if "CONSOLE" in line]
    # The page itself allows no script, so its width is asked of a copy that does.
    copy = re.sub(r"<meta http-equiv=[^>]*>", "", html)
    ask = "<script>document.title = 'width=' + document.documentElement.scrollWidth + '/' + innerWidth</script></body>"
    (folder / "copy.html").write_text(copy.replace("</body>", ask))
    told = re.search(r"<title>width=(\d+)/(\d+)", _output([*base, (folder / "copy.html").as_uri()]).stdout)
    assert told is not None and int(told[2]) == width
    return console, int(told[1])


def _output(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
