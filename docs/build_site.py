"""Build the site into ``site/``, and fail where anything is not as it should be: ``make docs-site``.

zensical's strict mode fails on links to pages, headings and names of the API that there are not. It doesn't fail on
missing pictures and other files, on what mkdocstrings and Griffe print about docstrings, nor on docstrings that kept
their Sphinx markup; this script does.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["complaints", "dangling", "main"]

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


def main() -> int:
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = _COLOUR.sub("", built.stdout + built.stderr)
    problems = _SAID.findall(said)
    if built.returncode == 0:
        for path in sorted(SITE.rglob("*.html")):
            page = path.read_text()
            found = [*complaints(page), *([] if path.name == "404.html" else dangling(page, path))]
            problems += [f"{path.relative_to(SITE)}: {text}" for text in found]
    if built.returncode or problems:
        print(said, *problems, sep="\n")
        return 1
    print(f"{len(list(SITE.rglob('index.html')))} pages in {SITE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
