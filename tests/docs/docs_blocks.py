"""Fenced blocks of the documentation, and the commands in them.

A comment directly above a block describes a special property of the block:

- `<!-- not run: REASON -->`: it cannot run in a test; its commands and options must exist anyway.
- `<!-- breaks: WHAT -->`: something is broken while it runs.
- `<!-- output of another machine -->`: it runs, and its output is not compared.
- `<!-- scratch: empty -->`: the page begins in an empty folder, not in a project that has released.
- `<!-- scratch: machine -->`: it begins on a machine without anything, not even this package.
- `<!-- soon -->`: the shown output comes after a while.
- `<!-- after: WHAT -->`: a person does something before it.
- `<!-- with: WHAT -->`: something exists from the block to the end of the page.
- `<!-- file: NAME -->`: it is the content of a file.
- `<!-- runs on: TEXT or URL -->`: its servers print the text or answer at the URL; all servers
  except those that begin with `&` end then.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SHELL = ("bash", "console")
_FENCE = re.compile(r"^ *```(\w*)$")
_COMMENT = re.compile(r"^<!-- (.+) -->$")
_SEPARATORS = "();<>|&\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block.

    `line` is the line of its fence, from 1. `notes` are the comments directly above it.
    """

    page: Path
    line: int
    language: str
    text: str
    notes: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def note(self, kind: str) -> str | None:
        """Return the text of a comment `kind: …`.

        It is "" for a bare `kind`, and None without such a comment.
        """
        for text in self.notes:
            name, _, said = text.partition(":")
            if name == kind:
                return said.strip()
        return None

    @property
    def runs(self) -> bool:
        return self.language in (*SHELL, "python") and self.note("not run") is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command as it is written, and the output that the page shows.

    The output is None if the page shows none.
    """

    text: str
    shown: tuple[str, ...] | None


def blocks_of(page: Path) -> tuple[Block, ...]:
    """Return all fenced blocks of a page in their order."""
    lines, found, number = page.read_text(encoding="utf-8").splitlines(), [], 0
    while number < len(lines):
        if opening := _FENCE.match(lines[number]):
            end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == "```")
            text = "\n".join(lines[number + 1 : end])
            notes = tuple(_notes(lines, number))
            found.append(
                Block(page=page, line=number + 1, language=opening[1], text=text, notes=notes)
            )
            number = end
        number += 1
    return tuple(found)


def _notes(lines: list[str], fence: int) -> Iterator[str]:
    for line in reversed(lines[:fence]):
        if not (comment := _COMMENT.match(line)):
            return
        yield comment[1]


def commands_of(block: Block) -> tuple[Command, ...]:
    """Return the commands of a shell block.

    In a console block they are the lines after `$`, each with the lines that follow it.
    """
    if block.language == "bash":
        return tuple(Command(text=text, shown=None) for text in _joined(block.text.splitlines()))
    found: list[Command] = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, *shown = _joined(part.splitlines())
        found.append(Command(text=command, shown=tuple(shown)))
    return tuple(found)


def _joined(lines: list[str]) -> list[str]:
    """Return the lines without empty lines and comments.

    A line that ends in a backslash is joined with the next one.
    """
    text = "\n".join(lines).replace("\\\n", " ")
    return [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("# ")
    ]


def calls(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell text.

    Commands are separated by `&&`, `|`, `;` and ends of lines.
    """
    text = re.sub(r"(^|\s)#\s.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in (*lexer, "\n"):
        if word and set(word) <= set(_SEPARATORS):
            if words:
                yield words
            words = []
        else:
            words.append(word)
