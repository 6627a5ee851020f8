"""Links of the site from the first use of each glossary term on a page."""

from __future__ import annotations

import re

import pytest
from glossary import AMBIGUOUS, GLOSSARY, GlossaryLinks, read_terms
from markdown import Markdown

from tests.docs.docs_blocks import ROOT

TERMS = frozenset({"gate", "canary", "provider", "routing table", "table"})


@pytest.mark.parametrize(
    ("text", "linked"),
    [
        ("A gate judges. The gate fails.", ["gate"]),
        ("Gates judge each canary.", ["Gates", "canary"]),
        ("The routing table of a provider, and a table.", ["routing table", "provider", "table"]),
        ("- the *gate*\n- `canary` and a canary", ["gate", "canary"]),
        ("# The gate\n\nIt is investigated by a sub-gate.", []),
        ("An execution provider, then a provider.", ["provider"]),
        ("See [gate](gates.md). The gate fails.", []),
        ("| gate |\n|---|\n| a gate |", ["gate"]),
    ],
)
def test_glossary_links_of_text_mark_first_use_of_each_term(text: str, linked: list[str]) -> None:
    links = GlossaryLinks(TERMS)
    links.address = "../glossary.md"
    html = Markdown(extensions=["tables", links]).convert(text)
    assert re.findall(r'<a href="../glossary.md">([^<]+)</a>', html) == linked
    without = Markdown(extensions=["tables"]).convert(text)
    assert re.sub(r'<a href="../glossary.md">([^<]+)</a>', r"\1", html) == without


def test_glossary_links_of_page_without_address_leave_text_unchanged() -> None:
    html = Markdown(extensions=[GlossaryLinks(TERMS)]).convert("A gate.")
    assert html == "<p>A gate.</p>"


def test_read_terms_excludes_ambiguous_terms_that_glossary_defines() -> None:
    page = ROOT / "docs" / GLOSSARY
    terms = read_terms(page)
    assert {"design effect", "intent", "target"} <= terms
    text = page.read_text(encoding="utf-8")
    assert [
        term for term in AMBIGUOUS if not re.search(rf"^\| .*\b{term}\b.* \|", text, re.M)
    ] == []
    assert not terms & AMBIGUOUS
