"""Output of all commands: consoles, markup, paragraphs and tables that break no word, path or interval."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from onnx_ops.cli.common import collected_output
from onnx_ops.domain.decision import Verdict
from onnx_ops.errors import ConfigError, OnnxOpsError

_COLOURS = {Verdict.PASS: "green", Verdict.INCONCLUSIVE: "yellow", Verdict.ERROR: "magenta", Verdict.FAIL: "red"}
_GAP = 2
"""Columns between the columns of a table."""

_WORD = re.compile(r"(?:\[[^\]\n]{1,40}\]|[^ \n])+")
"""An unbreakable unit: a word, with an interval such as `[1.2, 1.3] ms` up to its bracket."""

_LINE = re.compile(r".+")

KEEP = "\u00a0"
"""A space at which no line breaks; printed as a plain one."""


class Markup(str):
    """Text in Rich's markup; any other string is printed literally."""

    __slots__ = ()


def markup(template: str, *values: object) -> Markup:
    """Return a template in Rich's markup with values at its `{}`, of which only `Markup` is styled."""
    return Markup(template.format(*(value if isinstance(value, Markup) else escape(str(value)) for value in values)))


def console() -> Console:
    """Return standard output; 120 columns where it is not a terminal, so that tables in logs stay whole."""
    coloured = True if collected_output.get() is not None else None
    return Console(width=None if sys.stdout.isatty() else 120, force_terminal=coloured, highlight=False, emoji=False)


def error_console() -> Console:
    """Return a console on standard error."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 120, highlight=False, emoji=False)


def verdict_markup(verdict: Verdict, *, advisory: bool = False, text: str = "") -> Markup:
    """Return a verdict, or another text for it, in its colour; an advisory one is dim."""
    colour = "dim" if advisory else _COLOURS[verdict]
    return markup(f"[{colour}]{{}}[/{colour}]", text or verdict.value.upper())


def say(text: object, *, err: bool = False, indent: int = 0) -> None:
    """Print plain text as `print_text` does, on standard output or standard error."""
    print_text("{}", text, out=error_console() if err else None, indent=indent)


def print_text(template: str, *values: object, out: Console | None = None, indent: int = 0, hang: int = 2) -> None:
    """Print a paragraph that a terminal wraps between words; elsewhere it is one line.

    Args:
        template: text as for `markup`.
        values: of the template.
        out: where to; standard output by default.
        indent: spaces before the first line.
        hang: further spaces before the other lines.
    """
    _print_paragraph(out or console(), _parsed(markup(template, *values)), indent, hang)


def render_error(out: Console, error: OnnxOpsError, head: str = "error") -> None:
    """Print an error: what happened where, then why, then the remedy."""
    if isinstance(error, ConfigError):
        for problem in error.problems:
            print_text("{}", problem, out=out)
        return
    where = f"{error.where}: " if error.where and not head.startswith(error.where) else ""
    print_text("[red]{}[/red]: {}", head, where + error.what, out=out)
    for name, text in (("why", error.why), ("try", error.remedy)):
        if text:
            print_text("{}: {}", name, text, out=out, indent=2, hang=5)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str] | str], *, out: Console | None = None) -> None:
    """Print rows of cells, or each row as a list of its cells where the columns would break words.

    Args:
        heads: names of the columns.
        rows: plain text or `Markup` for each head; a single text is a heading inside the table.
        out: where to; standard output by default.
    """
    out = out or console()
    titles = [Text(head, style="dim") for head in heads]
    parsed = [_parsed(row) if isinstance(row, str) else [_parsed(cell) for cell in row] for row in rows]
    columns = list(zip(titles, *(row for row in parsed if isinstance(row, list)), strict=True))
    least, most = ([max(_longest(cell, part) for cell in column) for column in columns] for part in (_WORD, _LINE))
    room = out.width - _GAP * (len(heads) - 1)
    fits = sum(least) <= room
    widths = _shared(least, most, room)
    for row in [titles, *parsed] if fits and any(heads) else parsed:
        if isinstance(row, Text):
            _print_paragraph(out, row)
        elif fits:
            _print_row(out, row, widths)
        else:
            _print_paragraph(out, row[0])
            for title, cell in zip(titles[1:], row[1:], strict=True):
                if cell.plain:
                    _print_paragraph(out, Text.assemble(title, " ", cell), indent=2)


def _parsed(cell: str) -> Text:
    return Text.from_markup(cell, emoji=False) if isinstance(cell, Markup) else Text(cell)


def _longest(cell: Text, pattern: re.Pattern[str]) -> int:
    """Return the columns that the longest match takes."""
    return max((Text(part).cell_len for part in pattern.findall(cell.plain)), default=0)


def _shared(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Return widths between `least` and `most`; the remaining room is divided evenly among columns that need more."""
    widths = list(least)
    for _ in range(room - sum(widths)):
        wanting = [n for n, width in enumerate(widths) if width < most[n]]
        if not wanting:
            break
        widths[min(wanting, key=lambda n: widths[n])] += 1
    return widths


def _print_row(out: Console, cells: Sequence[Text], widths: Sequence[int]) -> None:
    parts = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for number in range(max(map(len, parts))):
        line = Text()
        for part, width in zip(parts, widths, strict=True):
            cell = part[number] if number < len(part) else Text()
            line.append_text(cell).append(" " * (width - cell.cell_len + _GAP))
        line.rstrip()
        _print_line(out, line)


def _print_paragraph(out: Console, text: Text, indent: int = 0, hang: int = 2) -> None:
    lines = _wrapped(text, out.width - indent - hang, first=out.width - indent) if out.is_terminal else [text]
    for number, line in enumerate(lines):
        _print_line(out, Text(" " * (indent + (hang if number else 0))).append_text(line))


def _wrapped(text: Text, width: int, *, first: int | None = None) -> list[Text]:
    """Return lines of at most `width`, broken at spaces and line ends only; a longer word has a separate line."""
    lines: list[Text] = []
    for paragraph in text.split("\n", allow_blank=True):
        breaks: list[int] = []
        start = 0
        for word in _WORD.finditer(paragraph.plain):
            limit = first if first is not None and not lines and not breaks else width
            if word.start() > start and Text(paragraph.plain[start : word.end()]).cell_len > limit:
                breaks.append(word.start())
                start = word.start()
        for line in paragraph.divide(breaks):
            line.rstrip()
            lines.append(line)
    return lines or [Text()]


def _print_line(out: Console, line: Text) -> None:
    line.plain = line.plain.replace(KEEP, " ")
    out.print(line, no_wrap=True, overflow="ignore", crop=False)
