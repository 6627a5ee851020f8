"""Finds a function by `package.module:function` in source text. Nothing is imported, so nothing of it runs."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from onnx_ops.spec.text import MAX_BYTES, shown_path
from onnx_ops.spec.words import did_you_mean, shorten

_REFERENCE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)
_PARSING = threading.Lock()


def parse_python(source: bytes) -> ast.Module:
    """Parse one source at a time: Python 3.11 counts the depth of the trees of all threads together (CPython #106905).

    Raises:
        SyntaxError: it is not Python.
        ValueError: it has a null byte.
    """
    with _PARSING:
        return ast.parse(source)


def function_problem(reference: str, root: Path) -> str | None:
    """Why the reference leads to no function, or None if it leads to one.

    Modules are looked for below the project's root, then on `sys.path`. A module that takes names from elsewhere by
    `from … import *` is trusted to have the function.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        return f"'{shorten(reference)}' is not of the form package.module:function"
    module, function = match.groups()
    path = _source(module, root)
    if path is None:
        hint = did_you_mean(module, _siblings(module, root))
        return f"no module '{module}' in the project or on sys.path{hint}"
    try:
        with path.open("rb") as stream:
            tree = parse_python(stream.read(MAX_BYTES))
    except SyntaxError as error:
        return f"{shown_path(path)}, line {error.lineno}, is not valid Python: {error.msg}"
    except (OSError, ValueError, RecursionError) as error:
        return f"{shown_path(path)} cannot be read: {error}"
    known = set(_names(tree.body))
    if function in known or "*" in known:
        return None
    return f"no function '{function}' in {shown_path(path)}{did_you_mean(function, known)}"


def _source(module: str, root: Path) -> Path | None:
    relative = Path(*module.split("."))
    for base in (root, *map(Path, sys.path)):
        for candidate in (base / relative.with_suffix(".py"), base / relative / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _siblings(module: str, root: Path) -> list[str]:
    package = module.rpartition(".")[0]
    folder = root.joinpath(*package.split(".")) if package else root
    stems = [path.stem for path in folder.glob("*.py")] if folder.is_dir() else []
    return [f"{package}.{stem}" if package else stem for stem in stems]


def _names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that a module binds at its top level, inside `if` and `try` too."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If(body=inner, orelse=other):
                yield from _names([*inner, *other])
            case ast.Try(body=inner, orelse=other, handlers=handlers):
                yield from _names([*inner, *other, *(line for handler in handlers for line in handler.body)])
            case ast.With(body=inner):
                yield from _names(inner)
            case _:
                pass
