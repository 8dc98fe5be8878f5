"""Build the site into ``site/``, and fail where anything is not as it should be: ``make docs-site``.

zensical's strict mode fails on links to pages, headings and names of the API that there are not. It doesn't fail on
missing pictures and other files, on what mkdocstrings and Griffe print about docstrings, on docstrings that kept their
Sphinx markup, on a page that begins with code, nor on what a reader's browser would fetch from another host; this
script does.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["beginning", "complaints", "dangling", "fetched", "main"]

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SAID = re.compile(r"^(?:WARNING|ERROR|griffe|mkdocstrings|mkdocs_autorefs)\b.*$", re.MULTILINE | re.IGNORECASE)
_CODE = re.compile(r"<(pre|code|script|svg)\b.*?</\1>", re.DOTALL)
_LEFT = {
    "a Sphinx role": re.compile(r":(?:class|func|meth|mod|attr|data|exc):"),
    "a literal block": re.compile(r"::\s*$", re.MULTILINE),
    "a doctest": re.compile(r">>> "),
    "a reference to what is not documented": re.compile(r"\]\[[\w.]*\]"),
    "a fence": re.compile(r"```"),
    "a directive": re.compile(r"^:::", re.MULTILINE),
}
# What a browser fetches without being asked. The scripts of the theme draw diagrams and ask for the repository's stars
# where they find these elements; `canonical` is an address and no file.
_FETCHED = {
    "a file of another host": re.compile(
        r"""<(?:link(?![^>]*\brel="canonical")|script|img|iframe|source|video|audio|object|embed)\b[^>]*?"""
        r"""\b(?:href|src|srcset|data)="((?:https?:)?//[^"]*)"""
    ),
    "a style of another host": re.compile(r"""(?:@import\s*|\burl\(\s*)["']?((?:https?:)?//[^"')\s]*)"""),
    "a script that draws diagrams": re.compile(r"""\bclass="(mermaid)\b"""),
    "the repository's stars": re.compile(r"""data-md-component="(source)\""""),
}


def complaints(page: str) -> Iterator[str]:
    """What is left of markup in the text of a page's HTML, outside of code."""
    article = page.partition("<article")[2].partition("</article>")[0]
    text = html.unescape(re.sub(r"<[^>]+>", "", _CODE.sub("", article)))
    for what, pattern in _LEFT.items():
        for found in pattern.finditer(text):
            context = " ".join(text[max(0, found.start() - 50) : found.end() + 50].split())
            yield f"{what} was left: ...{context}..."


def dangling(page: str, path: Path, site: Path = SITE) -> Iterator[str]:
    """The links and pictures of a page's HTML that lead to no file of the site."""
    article = page.partition("<article")[2].partition("</article>")[0]
    for target in re.findall(r'\b(?:href|src)="([^"#?]+)', _CODE.sub("", article)):
        if re.match(r"[a-z]+:|//", target):
            continue
        file = (path.parent / html.unescape(target)).resolve()
        if not file.exists() or not file.is_relative_to(site):
            yield f"there is no {target}"


def fetched(text: str) -> Iterator[str]:
    """What a page's HTML or a style sheet has a browser fetch from other hosts; links to them are none of it."""
    for what, pattern in _FETCHED.items():
        yield from (f"fetches {what}: {found}" for found in pattern.findall(text))


def beginning(page: str) -> Iterator[str]:
    """What is wrong with the beginning of a page's HTML: one heading of the first level, then a sentence."""
    article = page.partition("<article")[2].partition("</article>")[0]
    headings = len(re.findall(r"<h1\b", article))
    if headings != 1:
        yield f"has {headings} headings of the first level"
    after = re.sub(r"<!--.*?-->", "", article.partition("</h1>")[2], flags=re.DOTALL)
    if not re.match(r"""\s*(?:<p class="also-called">[^<]*</p>\s*)?<p>(?!<img)""", after):
        yield f"begins with {' '.join(after.split())[:50]}, and not with a sentence"


def main() -> int:
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = _COLOUR.sub("", built.stdout + built.stderr)
    problems = _SAID.findall(said)
    if built.returncode == 0:
        for path in sorted(SITE.rglob("*.html")):
            page = path.read_text()
            found = [*complaints(page), *fetched(page)]
            found += [] if path.name == "404.html" else [*dangling(page, path), *beginning(page)]
            problems += [f"{path.relative_to(SITE)}: {text}" for text in found]
        for path in sorted(SITE.rglob("*.css")):
            problems += [f"{path.relative_to(SITE)}: {text}" for text in fetched(path.read_text())]
    if built.returncode or problems:
        print(said, *problems, sep="\n")
        return 1
    print(f"{len(list(SITE.rglob('index.html')))} pages in {SITE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
