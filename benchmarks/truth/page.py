"""Results of a run, written into the page that quotes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.truth.claims import Claim


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def promises(claims: Sequence[Claim]) -> str:
    rows = [(c.gate, c.what, c.bound, c.figure, c.outcome) for c in claims]
    return markdown(("", "promise", "bound", "measured", ""), rows)


def fill(page: Path, name: str, text: str) -> None:
    """Replace the text between `<!-- NAME -->` and `<!-- /NAME -->`.

    Raises:
        SystemExit: the page has no such place.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{page} has no place between {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
