"""Reference page of all commands, generated from the command line's tree."""

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

All commands and their options. This page is generated from the program. [Exit codes and errors](../exit-codes.md) lists
the exit codes.
"""  # noqa: E501
_WORDS: dict[type, str] = {
    bool: "",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
}


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every executable command with its full name, such as `keys new`.

    The order is that of the help.
    """
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            for below, deeper in command.commands.items():
                yield f"{name} {below}", deeper
        else:
            yield name, command


def flags(command: Any) -> tuple[str, ...]:
    """Return every spelling of a command's options, `--help` included."""
    spelled = [
        text
        for parameter in command.params
        for text in (*parameter.opts, *parameter.secondary_opts)
        if text.startswith("-")
    ]
    return (*spelled, "--help", "-h")


def cli_page() -> str:
    """Return the page as Markdown."""
    return HEAD + "\n".join(_command(name, command) for name, command in commands())


def _command(name: str, command: Any) -> str:
    description, examples = _split(command.help or "")
    arguments = [
        parameter for parameter in command.params if parameter.param_type_name == "argument"
    ]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    lines = [f"\n## onnx-ops {name}\n", f"{description}\n"]
    if arguments:
        lines += _table(
            "argument", [(f"`{_argument(parameter)}`", parameter) for parameter in arguments]
        )
    lines += _table("option", [(_spelling(parameter), parameter) for parameter in options])
    lines.append("| `--help`, `-h` |  |  | Show this message and exit. |")
    if examples:
        lines += ["\n```bash", *examples, "```"]
    return "\n".join(lines)


def _split(text: str) -> tuple[str, list[str]]:
    """Split a command's help into description and examples.

    A wrapped example ends at an empty line.
    """
    examples = [
        " ".join(example.split())
        for example in re.findall(r"Examples?: (.+?)(?:\n\n|\Z)", text, re.S)
    ]
    return re.sub(r"Examples?: .+?(?:\n\n|\Z)", "", text, flags=re.S).strip(), examples


def _table(kind: str, rows: list[tuple[str, Any]]) -> list[str]:
    lines = [f"\n| {kind} | type | default | description |", "|---|---|---|---|"]
    return lines + [
        f"| {name} | {_takes(parameter)} | {_default(parameter)} | {_cell(parameter.help or '')} |"
        for name, parameter in rows
    ]


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _spelling(parameter: Any) -> str:
    return ", ".join(f"`{text}`" for text in (*parameter.opts, *parameter.secondary_opts))


def _takes(parameter: Any) -> str:
    kind, several = (
        _plain(parameter.type_descriptor.annotation),
        parameter.multiple or parameter.nargs != 1,
    )
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        words = ", ".join(f"`{member.value}`" for member in kind)
    else:
        words = (
            f"`{parameter.metavar}`"
            if parameter.metavar and parameter.param_type_name == "option"
            else _WORDS.get(kind, "text")
        )
    return f"{words}; repeatable" if several and words else words


def _plain(kind: Any) -> Any:
    """Return the type of one value, without lists and `| None`."""
    while typing.get_origin(kind) in (list, tuple, typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if (
        value is None
        or value is False
        or value in ("", [])
        or not parameter.show_default
        or callable(value)
    ):
        return ""
    return f"`{value.value if isinstance(value, enum.Enum) else value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
