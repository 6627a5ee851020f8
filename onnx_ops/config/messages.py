"""Wording of messages: values as written, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 60
_CLOSE = 0.65


def describe(value: object) -> str:
    """Return the text that shows a YAML value in a message, cut to a readable length."""
    match value:
        case None:
            return "nothing"
        case True:
            return "true"
        case False:
            return "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the string '{shorten(value)}'"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            return "an unreadable value"


def shorten(text: str) -> str:
    """Return a text cut to a readable length."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def did_you_mean(written: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if a known name is similar, else an empty string.

    A name that differs only in letter case is always similar.
    """
    names = sorted(known)
    close = [name for name in names if name.lower() == written.lower()]
    close = close or difflib.get_close_matches(written, names, n=1, cutoff=_CLOSE)
    return f"; did you mean '{close[0]}'?" if close else ""


def quote_names(names: Iterable[str]) -> str:
    """Return quoted names in one line, in the order given."""
    return ", ".join(f"'{name}'" for name in names)
