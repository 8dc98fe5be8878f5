"""An extension of Markdown, for what pages leave to the site.

``[examples](../examples/fork.py)`` is a link that works in a checkout and on the forge, also in a fork. The site has no
such file, so there it becomes a link to ``repo_url``, which mkdocs.yml has once, at the branch of its ``edit_uri``. A
paragraph that begins with ``Also called:`` gets a class, for site.css.
"""

from __future__ import annotations

import posixpath
from pathlib import Path
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from zensical.extensions.context import ContextPreprocessor

__all__ = ["Pages", "on_the_forge"]

ROOT = Path(__file__).resolve().parents[1]


def on_the_forge(target: str, page: str, repo_url: str, edit_uri: str) -> str:
    """Where a link of a page leads on the site.

    Args:
        target: as the page has it.
        page: its path from docs/.
        repo_url: of mkdocs.yml.
        edit_uri: of mkdocs.yml, ``edit/BRANCH/docs/``.

    Returns:
        The address of the file on the forge for a relative link that leaves docs/, and the target for all others.
    """
    path, hash_, anchor = target.partition("#")
    inside = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    if not path or path.startswith("/") or inside == "docs" or inside.startswith("docs/"):
        return target
    kind = "tree" if (ROOT / inside).is_dir() else "blob"
    return f"{repo_url.rstrip('/')}/{kind}/{edit_uri.split('/')[1]}/{inside}{hash_}{anchor}"


class _Pages(Treeprocessor):
    def run(self, root: Element) -> None:
        context = ContextPreprocessor.from_markdown(self.md)
        if context is None:
            return
        for link in root.iter("a"):
            href = link.get("href")
            if href is not None:
                config = context.config
                link.set("href", on_the_forge(href, context.page.path, config["repo_url"], config["edit_uri"]))
        for paragraph in root.iter("p"):
            if (paragraph.text or "").startswith("Also called: "):
                paragraph.set("class", "also-called")


class Pages(Extension):
    """What Markdown loads for ``docs.pages:Pages`` of mkdocs.yml."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  Markdown's name
        """Called by Markdown for each page."""
        md.treeprocessors.register(_Pages(md), "pages_of_the_site", 0)
