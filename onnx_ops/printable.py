"""Show untrusted text without parts that another program interprets as commands.

Other programs are terminals, runners of CI services, and browsers.
"""

from __future__ import annotations

import re
from contextlib import suppress
from urllib.parse import parse_qsl, quote, unquote, urlsplit

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and characters that reorder or end a line.

Tabs and line feeds are not included.
"""

_COMMAND = re.compile(r"^(\s*:)(?=:)|(#)(?=#(?:\[|vso))", re.MULTILINE)
"""Start of a command for GitHub Actions' runner or Azure Pipelines' agent."""


_SHORTEST = 6
"""Minimum length of a hidden text; shorter texts occur elsewhere by chance."""

_hidden: dict[str, str] = {}


def hide(text: str, name: str) -> None:
    """Replace a string by a name in all later output, unless the string is very short.

    For example, `${env:NAME}` replaces the value of a variable.
    """
    if len(text) >= _SHORTEST:
        _hidden[text] = name


def hide_secrets_of(url: str) -> None:
    """Hide the secrets of a URL in all later output.

    The secrets are the URL's password and the values of its query.
    """
    with suppress(ValueError):
        parts = urlsplit(url)
        user, _, password = parts.netloc.rpartition("@")[0].partition(":")
        if password:
            _hidden[f"{user}:{password}@"] = f"{user}:***@"
            hide(password, "***")
            hide(unquote(password), "***")
        for _, value in parse_qsl(parts.query):
            hide(value, "***")
            hide(quote(value, safe=""), "***")


def show_controls(text: str) -> str:
    """Return text whose control characters are visible, such as `\\x1b`.

    Tabs and line feeds are unchanged. CR LF becomes a line feed.
    """
    return _CONTROL.sub(_name, text.replace("\r\n", "\n"))


def show(text: str) -> str:
    """Return text as `show_controls` does, with names in place of hidden texts."""
    for value, name in _hidden.items():
        text = text.replace(value, name)
    return show_controls(text)


def disarm(text: str) -> str:
    """Return text as `show` does, without commands for CI services.

    A space separates the characters that would start a command.
    """
    return _COMMAND.sub(lambda found: f"{found[0]} ", show(text))


def show_json(text: str) -> str:
    """Return a JSON text with names in place of hidden texts.

    The control characters in its strings become escapes.
    """
    for value, name in _hidden.items():
        text = text.replace(value, name)
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _name(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
