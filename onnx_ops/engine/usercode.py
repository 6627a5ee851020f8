"""Digest of a user's function: its module and the project's modules that it imports, found without importing any."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from onnx_ops.domain.artifact import Digest, digest_file, digest_json
from onnx_ops.errors import NotFound, UserError
from onnx_ops.spec.functions import parse_python

_OURS = __name__.partition(".")[0]


def code_digest(reference: str, root: Path, depends: tuple[str, ...] = ()) -> Digest:
    """Digest of all the project's source that `package.module:function` can reach, and of `depends`.

    Raises:
        NotFound, UserError: as for `code_files`.
    """
    return digest_json(code_files(reference, root, depends))


def code_files(reference: str, root: Path, depends: tuple[str, ...] = ()) -> dict[str, Digest]:
    """Each of the project's files that `package.module:function` can reach by import statements, and `depends`.

    By path relative to `root`, with its digest.

    Modules outside `root` are left to the versions of installed packages, and this product's own to the revisions of
    its stages, wherever it lies.

    Raises:
        NotFound: the module, or a file in `depends`, does not exist below `root`.
        UserError: a file is not Python.
    """
    module = reference.partition(":")[0]
    path = _module_file(module, root)
    if path is None:
        raise NotFound(
            f"module {module} is not in the project", where=str(root), remedy="It must lie below the project's root."
        )
    seen: dict[str, Digest] = {}
    for package in _with_packages(module):  # importing a module runs its packages too
        if (file := _module_file(package, root)) is not None:
            _collect(file, root, seen)
    for name in depends:
        file = root / name
        if not file.is_file():
            raise NotFound(f"no file {name}", where="train.depends", remedy="Paths are relative to the project's root.")
        seen[name] = digest_file(file)
    return seen


def _collect(path: Path, root: Path, seen: dict[str, Digest]) -> None:
    name = path.relative_to(root).as_posix()
    if name in seen:
        return
    seen[name] = digest_file(path)
    for imported in _imports(path, root):
        file = _module_file(imported, root)
        if file is not None:
            _collect(file, root, seen)


def _imports(path: Path, root: Path) -> Iterator[str]:
    """Every dotted name that an import statement of the file might mean; names that are no modules do no harm."""
    package = list(path.relative_to(root).parts[:-1])
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names = [prefix, *(f"{prefix}.{alias.name}".lstrip(".") for alias in node.names)]
        else:
            continue
        for name in names:
            yield from _with_packages(name)


def _with_packages(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts) + 1))


def _parsed(path: Path) -> ast.Module:
    try:
        return parse_python(path.read_bytes())
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError("not Python", where=f"{path}{line}", why=str(error)) from error


def _module_file(module: str, root: Path) -> Path | None:
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts) or parts[0] == _OURS:
        return None
    base = root.joinpath(*parts)
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None
