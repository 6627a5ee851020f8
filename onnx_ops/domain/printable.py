"""Texts of others, shown so that no terminal, runner or browser takes a part of them for a command."""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed, and those that reorder a line or end it."""

_COMMAND = re.compile(r"^(\s*:)(?=:)|(#)(?=#(?:\[|vso))", re.MULTILINE)
"""Where a runner of GitHub Actions, or an agent of Azure Pipelines, begins to read a command."""


def show_controls(text: str) -> str:
    """Return text whose control characters are visible, such as `\\x1b`; tabs and ends of lines stay."""
    return _CONTROL.sub(_name, text.replace("\r\n", "\n"))


def disarm(text: str) -> str:
    """Return text as `show_controls` does, without commands of CI services, whose signs get a space between them."""
    return _COMMAND.sub(lambda found: f"{found[0]} ", show_controls(text))


def _name(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
