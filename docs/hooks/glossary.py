"""MkDocs hook: link the first use of each glossary term on a page to the glossary."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from xml.etree import ElementTree

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

GLOSSARY = "glossary.md"
AMBIGUOUS = frozenset(
    [
        *("alias", "cell", "choice", "deployment", "epoch", "export", "generation", "key"),
        *("leader", "outcome", "plan", "session", "stable", "store", "unit", "version", "watch"),
    ]
)
"""Terms that pages also use with their everyday or upstream meaning; they are not linked."""

_UNLINKED_TAGS = frozenset(["a", "code", "pre", "strong", "h1", "h2", "h3", "h4", "h5", "h6", "th"])
_PRIORITY = 10
"""After the inline patterns (20), and before MkDocs resolves and checks links (0)."""


class GlossaryLinks(Extension, Treeprocessor):
    """Markdown extension that links the first use of each term."""

    def __init__(self, terms: frozenset[str]) -> None:
        super().__init__()
        self.terms = terms
        self.address = ""
        """Address of the glossary from the current page; empty for pages that are not linked."""
        self._missing: dict[str, None] = {}

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (Markdown's name)
        """Add this processor to those of Markdown."""
        self.md = md
        md.treeprocessors.register(self, "glossary", _PRIORITY)

    def run(self, root: ElementTree.Element) -> None:
        """Insert the links into the tree of a page."""
        if self.address:
            self._missing = dict.fromkeys(self.terms)
            self._link_in(root)

    def _link_in(self, element: ElementTree.Element) -> None:
        """Insert the links into the text of an element and of its descendants."""
        position = self._link_text(element, -1)
        while position < len(element):
            child = element[position]
            if child.tag not in _UNLINKED_TAGS:
                self._link_in(child)
            elif child.tag == "a":
                self._missing.pop((child.text or "").lower(), None)
            position = self._link_text(element, position)

    def _link_text(self, parent: ElementTree.Element, position: int) -> int:
        """Insert links into the text after the child at a position, or before the first (-1).

        Returns:
            The position of the first child after this text.
        """
        owner, field = (parent, "text") if position < 0 else (parent[position], "tail")
        while term := find_term(getattr(owner, field) or "", self._missing):
            text = getattr(owner, field)
            link = ElementTree.Element("a", href=self.address)
            link.text, link.tail = text[slice(*term.span())], text[term.end() :]
            setattr(owner, field, text[: term.start()])
            position += 1
            parent.insert(position, link)
            owner, field = link, "tail"
        return position + 1


def find_term(text: str, missing: dict[str, None]) -> re.Match[str] | None:
    """Return the first use of a term that is still missing, and remove the term.

    The plural is a use too, but not a part of a compound such as "execution provider". Of two terms
    that begin at the same place, the longer one is used.
    """
    if not missing:
        return None
    longest_first = "|".join(map(re.escape, sorted(missing, key=len, reverse=True)))
    pattern = rf"(?<![\w-])(?<!execution )({longest_first})s?(?![\w-])"
    found = re.search(pattern, text, re.IGNORECASE)
    if found:
        del missing[found[1].lower()]
    return found


def read_terms(page: Path) -> frozenset[str]:
    """Return the terms of the glossary's table that are linked."""
    rows = re.findall(r"^\| ([^|]+?) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    terms = {term for cell in rows[1:] for term in cell.split(", ")}
    return frozenset(terms - AMBIGUOUS)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the extension to those of the site."""
    links = GlossaryLinks(read_terms(Path(config.docs_dir) / GLOSSARY))
    config.markdown_extensions.append(links)  # type: ignore[arg-type]
    config.extra["glossary_links"] = links
    return config


def on_page_markdown(text: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Set the address of the glossary from this page."""
    uri, links = page.file.src_uri, config.extra["glossary_links"]
    is_linked = uri != GLOSSARY and not uri.startswith("reference/")
    links.address = posixpath.relpath(GLOSSARY, posixpath.dirname(uri)) if is_linked else ""
    return text
