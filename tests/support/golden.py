"""Texts for people, stored in one file for each surface.

`--regenerate` writes the texts that the tests produce. This is a pytest plugin, loaded by
`tests/conftest.py`. A test calls `golden("errors", text)`. The text is stored in
`tests/golden/errors.txt` under the name of the test. It is indented, so that no text looks like a
name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.processes import ROOT

FOLDER = ROOT / "tests/golden"
_INDENT = "    "
_FIGURE = re.compile(r"(?<![A-Za-z0-9_])\d+(\.\d+)*(e[+-]?\d+)?")
_RUNS = re.compile(r"([ ━─])\1+")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Texts = dict[str, dict[str, str]]
"""Texts by surface and entry."""


@dataclass(frozen=True, slots=True)
class Golden:
    """Comparison of a test's texts with the stored ones.

    Args:
        test: id of the test.
        made: texts that the tests produced, to be written at the end; None to compare.
        folder: folder of this test alone, which the texts call FOLDER.
    """

    test: str
    made: Texts | None
    folder: Path | None = None
    seen: set[tuple[str, str]] = field(default_factory=set)

    def __call__(self, surface: str, text: str, part: str = "") -> None:
        """Fail unless the text equals the stored one.

        Args:
            surface: name of the file.
            part: name of the text, for a test with several texts.
        """
        name = f"{self.test} {part}".strip()
        assert (surface, name) not in self.seen, "two texts of one name"
        self.seen.add((surface, name))
        found = plain(text, {} if self.folder is None else {str(self.folder): "FOLDER"})
        if self.made is not None:
            self.made.setdefault(surface, {})[name] = found
            return
        stored = read(surface).get(name)
        if stored == found:
            return
        lines = difflib.unified_diff(
            (stored or "").splitlines(),
            found.splitlines(),
            f"tests/golden/{surface}.txt",
            "found",
            lineterm="",
        )
        remedy = f"pytest {self.test.partition('::')[0]} --regenerate"
        what = "has another text" if stored is not None else "has no text"
        pytest.fail(f"{name} {what}; write it with: {remedy}\n" + "\n".join(lines), pytrace=False)


def plain(text: str, replaced: Mapping[str, str] | None = None) -> str:
    """Return a text without parts that differ from run to run.

    Colours and spaces at ends of lines are removed; `replaced` replaces other parts.
    """
    text = _COLOUR.sub("", text)
    for old, new in (replaced or {}).items():
        text = text.replace(old, new)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def without_figures(text: str) -> str:
    """Return a text with `#` for every number.

    Units and signs are kept. Several spaces that align columns become one.
    """
    return _RUNS.sub(r"\1", _FIGURE.sub("#", plain(text)))


def read(surface: str) -> dict[str, str]:
    """Return the stored texts of a surface by entry."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    path = FOLDER / f"{surface}.txt"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        if line and not line.startswith((_INDENT, "#")):
            lines = found[line] = []
        else:
            lines.append(line.removeprefix(_INDENT))
    return {name: "\n".join(lines).strip("\n") for name, lines in found.items()}


def write(surface: str, texts: Mapping[str, str]) -> None:
    head = (
        "# Texts of tests, checked to the letter. Written by: "
        f"pytest tests --regenerate (surface {surface!r}).\n"
    )
    entries = []
    for name, text in sorted(texts.items()):
        body = "\n".join(f"{_INDENT}{line}".rstrip() for line in text.splitlines())
        entries.append(f"{name}\n{body}\n")
    path = FOLDER / f"{surface}.txt"
    path.write_text(head + "\n" + "\n".join(entries), encoding="utf-8")


_MADE = pytest.StashKey[Texts]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate",
        action="store_true",
        help="write the texts of tests/golden as the chosen tests find them; "
        "then read the difference in git",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.regenerate:
        if getattr(config.option, "numprocesses", None):
            raise pytest.UsageError("--regenerate needs one process: leave out --numprocesses")
        config.stash[_MADE] = {}


@pytest.fixture
def golden(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Golden:
    """Compare texts with those stored in tests/golden.

    With `--regenerate`, store them instead.
    """
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    return Golden(request.node.nodeid, pytestconfig.stash.get(_MADE, None), folder)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the texts that were produced.

    Other texts of a test function that ran are removed. So are other texts of a test file that ran
    completely, including those of nightly tests.
    """
    made = session.config.stash.get(_MADE, None)
    if made is None:
        return
    ran = {_function(item.nodeid) for item in session.items}
    options = session.config.option
    whole = (
        not options.keyword
        and not options.markexpr
        and not any("::" in word for word in session.config.args)
    )
    files = {name.partition("::")[0] for name in ran} if whole else set()
    for surface in made.keys() | {path.stem for path in FOLDER.glob("*.txt")}:
        stored = read(surface)
        kept = {
            name: text
            for name, text in stored.items()
            if _function(name) not in ran and name.partition("::")[0] not in files
        }
        if stored != kept | made.get(surface, {}):
            write(surface, kept | made.get(surface, {}))


def _function(name: str) -> str:
    return re.split(r"[\[ ]", name, maxsplit=1)[0]
