"""`onnx-ops docs`: the pages of the documentation in the installed package."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from onnx_ops.cli.common import AsJson, console, print_json, say
from onnx_ops.errors import NotFoundError

PAGES = Path(__file__).parent.parent / "templates" / "docs"


def docs(
    topic: Annotated[
        str | None,
        typer.Argument(
            help="Page, such as rollback or runbooks/ledger-damaged. Default: list all."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a page of the documentation, or list all pages.

    Error messages refer to pages by this command.

    Example: onnx-ops docs runbooks/ledger-damaged
    """
    if topic is None:
        titles = {name: _read_title(text) for name, text in _read_pages().items()}
        if as_json:
            print_json(titles)
            return
        width = max(map(len, titles))
        for name, title in titles.items():
            say(f"{name:<{width}}  {title}")
        return
    pages = _read_pages()
    name = topic.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        similar = (
            difflib.get_close_matches(name, pages, n=3)
            or [page for page in pages if name in page][:3]
        )
        remedy = (
            f"Similar: {', '.join(similar)}." if similar else "`onnx-ops docs` lists all pages."
        )
        raise NotFoundError("the documentation has no such page", where=topic, remedy=remedy)
    if as_json:
        print_json({"topic": name, "text": pages[name]})
        return
    out = console()
    if out.is_terminal:
        from rich.markdown import Markdown

        with out.pager(styles=True):
            out.print(Markdown(pages[name]))
    else:
        typer.echo(pages[name], nl=False)


def _read_pages() -> dict[str, str]:
    """Return the text of all pages by topic, sorted by topic."""
    found = (*PAGES.glob("*.md"), *PAGES.glob("runbooks/*.md"))
    return {
        path.relative_to(PAGES).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(found)
    }


def _read_title(text: str) -> str:
    return next(
        (line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), ""
    )
