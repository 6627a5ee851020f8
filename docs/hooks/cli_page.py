"""The page of all commands, from the command line's own tree."""

from __future__ import annotations

import enum
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from onnx_ops.cli.main import app

HEAD = """# Commands

Every command takes `--help`. This page is written from the program itself whenever the site is built.

What the exit codes mean: [exit codes and errors](../exit-codes.md).
"""
_WORDS: dict[type, str] = {bool: "", int: "whole number", float: "number", str: "text", Path: "path"}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it (`keys new`), in the order of the help."""
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            for below, deeper in command.commands.items():
                yield f"{name} {below}", deeper
        else:
            yield name, command


def flags(command: Any) -> tuple[str, ...]:
    """Every spelling of a command's options, `--help` included."""
    spelled = [text for one in command.params for text in (*one.opts, *one.secondary_opts) if text.startswith("-")]
    return (*spelled, "--help", "-h")


def cli_page() -> str:
    """The page as Markdown."""
    return HEAD + "\n".join(_command(name, command) for name, command in commands())


def _command(name: str, command: Any) -> str:
    told, examples = _split(command.help or "")
    places = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    lines = [f"\n## onnx-ops {name}\n", f"{told}\n"]
    if places:
        lines += _table("argument", [(f"`{_place(one)}`", one) for one in places])
    lines += _table("option", [(_spelling(one), one) for one in options])
    lines.append("| `--help`, `-h` |  |  | Show this and exit. |")
    if examples:
        lines += ["\n```bash", *examples, "```"]
    return "\n".join(lines)


def _split(text: str) -> tuple[str, list[str]]:
    """What a command's help tells, and its examples. A wrapped example ends at an empty line."""
    examples = [" ".join(found.split()) for found in re.findall(r"Examples?: (.+?)(?:\n\n|\Z)", text, re.S)]
    return re.sub(r"Examples?: .+?(?:\n\n|\Z)", "", text, flags=re.S).strip(), examples


def _table(kind: str, rows: list[tuple[str, Any]]) -> list[str]:
    lines = [f"\n| {kind} | takes | default | meaning |", "|---|---|---|---|"]
    return lines + [f"| {name} | {_takes(one)} | {_default(one)} | {_cell(one.help or '')} |" for name, one in rows]


def _place(one: Any) -> str:
    name = one.metavar or one.name.upper()
    return name if one.required else f"[{name}]"


def _spelling(one: Any) -> str:
    return ", ".join(f"`{text}`" for text in (*one.opts, *one.secondary_opts))


def _takes(one: Any) -> str:
    kind, several = _plain(one.type_descriptor.annotation), one.multiple or one.nargs != 1
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        words = ", ".join(f"`{member.value}`" for member in kind)
    else:
        words = f"`{one.metavar}`" if one.metavar and one.param_type_name == "option" else _WORDS.get(kind, "text")
    return f"{words}; repeatable" if several and words else words


def _plain(kind: Any) -> Any:
    """The type of one value: lists and `| None` taken off."""
    while typing.get_origin(kind) in (list, tuple, typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def _default(one: Any) -> str:
    value = one.default
    if one.required:
        return "needed"
    if value is None or value is False or value in ("", []) or not one.show_default or callable(value):
        return ""
    return f"`{value.value if isinstance(value, enum.Enum) else value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
