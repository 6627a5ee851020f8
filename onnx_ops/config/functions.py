"""Find a function by `package.module:function` in source text.

The source is only parsed, so no code runs.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from onnx_ops.config.folders import list_source_folders
from onnx_ops.config.messages import did_you_mean, quote_names, shorten
from onnx_ops.config.yaml_reader import MAX_BYTES, format_path

_REFERENCE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)
_PARSING = threading.Lock()


def parse_python(source: bytes) -> ast.Module:
    """Return the syntax tree of a source; one thread parses at a time.

    Python 3.11 adds up the depths of the trees that several threads parse (CPython #106905).

    Raises:
        SyntaxError: the source is not Python, or has a null byte.
        ValueError: the source has a null byte (in the first releases of Python 3.11).
        RecursionError: the source is nested too deeply.
    """
    with _PARSING:
        return ast.parse(source)


def explain_missing_function(reference: str, root: Path) -> str | None:
    """Return why the reference names no function; None if it names one.

    Modules are searched below the project's root, then on `sys.path`. A name is accepted even
    if the module binds it to a class or another value. A module that imports `*` is assumed to have
    the function.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        return f"'{shorten(reference)}' is not of the form package.module:function"
    module, function = match.groups()
    path = find_source(module, root)
    if path is None:
        hint = did_you_mean(module, list_siblings(module, root))
        return f"no source of module '{module}' in the project or on sys.path{hint}"
    try:
        tree = _parsed(path)
    except SyntaxError as error:
        return f"{format_path(path)}, line {error.lineno}, is not valid Python: {error.msg}"
    except (OSError, ValueError, RecursionError) as error:
        return f"{format_path(path)} cannot be read: {error}"
    known = set(_names(tree.body))
    if function in known or "*" in known:
        return None
    return f"no function '{function}' in {format_path(path)}{did_you_mean(function, known)}"


def check_arguments(reference: str, given: Iterable[str], root: Path) -> list[tuple[str, str]]:
    """Return why the function cannot be called with its data and the given parameters.

    The data sets are its first positional parameter. A function without positional parameters loads
    its own data. A decorated function is not checked, since a decorator can change its parameters.
    The result is also empty for a function that is not found.

    Returns:
        The parameter of each problem (empty if a parameter is missing), and its message.
    """
    definition = _definition(reference, root)
    if definition is None or definition[1].decorator_list:
        return []
    path, function = definition
    takes = function.args
    place = f"{function.name}() in {format_path(path)}, line {function.lineno},"
    known = [
        argument.arg
        for argument in [*takes.args[0 if takes.posonlyargs else 1 :], *takes.kwonlyargs]
    ]
    problems = []
    for name in given:
        if name not in known and takes.kwarg is None:
            hint = did_you_mean(name, known) or f"; it takes {quote_names(known) or 'none'}"
            problems.append((name, f"{place} takes no parameter '{name}'{hint}"))
    if missing := [name for name in _list_needed(takes) if name not in set(given)]:
        problems.append(("", f"{place} needs {quote_names(missing)}, which 'with' does not set"))
    return problems


def has_parameter(reference: str, name: str, root: Path) -> bool:
    """Return whether the function has a parameter of this name.

    The result is False for a decorated function, and for a function that is not found.
    """
    definition = _definition(reference, root)
    if definition is None or definition[1].decorator_list:
        return False
    takes = definition[1].args
    return name in {a.arg for a in (*takes.posonlyargs, *takes.args, *takes.kwonlyargs)}


def _list_needed(takes: ast.arguments) -> list[str]:
    """Return the parameters without a default, except the one for the data sets."""
    positional = [*takes.posonlyargs, *takes.args][1:]
    # Defaults belong to the last positional parameters. `positional` omits the first parameter, for
    # the data sets, but `defaults` can contain its default.
    first_optional = len(positional) - min(len(positional), len(takes.defaults))
    needed = [argument.arg for argument in positional[:first_optional]]
    keywords = zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
    return [*needed, *(argument.arg for argument, default in keywords if default is None)]


def find_missing_imports(reference: str, root: Path) -> list[tuple[str, str]]:
    """Return the failing imports of a function's module.

    The project's modules that it imports are included. Only statements at the top level of a module
    are checked, since others might never run.

    Returns:
        Each missing module, and where it is first imported.
    """
    problems: dict[str, str] = {}
    pending, seen = [reference.partition(":")[0]], set[Path]()
    while pending:
        name = pending.pop()
        path = find_source(name, root)
        if path is None or path in seen or not path.is_relative_to(root):
            continue
        # A virtual environment below the root is not part of the project.
        if {"site-packages", "dist-packages"}.intersection(path.parts):
            continue
        seen.add(path)
        try:
            tree = _parsed(path)
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for line, module in _imported_modules(tree.body, package):
            if _is_importable(module, root):
                pending.append(module)
            else:
                problems.setdefault(module, f"{format_path(path)}, line {line}, imports '{module}'")
    return list(problems.items())


def _imported_modules(
    body: Iterable[ast.stmt], package: Sequence[str]
) -> Iterator[tuple[int, str]]:
    for statement in body:
        match statement:
            case ast.Import(names=names):
                yield from ((statement.lineno, alias.name) for alias in names)
            case ast.ImportFrom():
                yield statement.lineno, resolve_import(statement, package)
            case _:
                pass


def resolve_import(statement: ast.ImportFrom, package: Sequence[str]) -> str:
    """Return the module from which a `from` statement imports.

    The statement is in a module of this package.
    """
    above = package[: len(package) - statement.level + 1] if statement.level else ()
    return ".".join([*above, *([statement.module] if statement.module else [])])


def _is_importable(module: str, root: Path) -> bool:
    """Return whether a module belongs to the project or is installed.

    A module is treated as installed if its top-level package is installed. Nothing is imported.
    """
    first = module.partition(".")[0]
    if (
        (root / first).is_dir()
        and not (root / f"{first}.py").is_file()
        and any((root / first).glob("*.py"))
    ):
        relative = root.joinpath(*module.split("."))
        return relative.is_dir() or relative.with_suffix(".py").is_file()
    if (
        find_source(first, root) is not None
        or first in sys.builtin_module_names
        or first in sys.stdlib_module_names
    ):
        return True
    try:
        return first in sys.modules or importlib.util.find_spec(first) is not None
    except (ImportError, ValueError):
        return False


def _definition(
    reference: str, root: Path, deep: int = 8
) -> tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef] | None:
    """Return the file and the syntax tree of a function, or None.

    The named module is searched, and the modules from which it imports the function. Relative
    imports are not followed. At most `deep` modules are searched.
    """
    module, _, function = reference.partition(":")
    path = find_source(module, root)
    if path is None or not deep:
        return None
    try:
        tree = _parsed(path)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    for statement in reversed(tree.body):
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name == function:
                return path, statement
            case ast.ImportFrom(module=str(source), level=0, names=names):
                for alias in names:
                    if (alias.asname or alias.name) == function:
                        return _definition(f"{source}:{alias.name}", root, deep - 1)
            case _ if function in _names([statement]):
                return None
    return None


def _parsed(path: Path) -> ast.Module:
    with path.open("rb") as stream:
        return parse_python(stream.read(MAX_BYTES))


def find_source(module: str, root: Path) -> Path | None:
    """Return the source of a module; None if there is none.

    A module of the project takes precedence over one on `sys.path`.
    """
    folders = (*list_source_folders(root), *map(Path, sys.path))
    files = (find_module_file(module, base) for base in folders)
    return next((file for file in files if file is not None), None)


def find_module_file(module: str, base: Path) -> Path | None:
    """Return the source of a module below a folder, or None."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    path = base.joinpath(*parts)
    return next(
        (file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None
    )


def list_siblings(module: str, root: Path) -> list[str]:
    """Return the modules below the root in the package that a name belongs to."""
    package = module.rpartition(".")[0]
    folder = root.joinpath(*package.split(".")) if package else root
    stems = [path.stem for path in folder.glob("*.py")] if folder.is_dir() else []
    return [f"{package}.{stem}" if package else stem for stem in stems]


def _names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module binds at its top level.

    Names in the blocks of compound statements are included, and names of match patterns left out.
    """
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.partition(".")[0]
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Lambda() | ast.comprehension():
                pass  # They bind only local names.
            case _:
                pending += ast.iter_child_nodes(node)
