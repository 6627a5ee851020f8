"""A user's code: the modules of a function or of a model's classes, and those of the project that they import, found
without importing any."""

from __future__ import annotations

import ast
import bz2
import contextlib
import gzip
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from onnx_ops.domain.artifact import Digest, digest_file, digest_json
from onnx_ops.errors import NotFound, UserError
from onnx_ops.spec.functions import parse_python

_OURS = __name__.partition(".")[0]

_NAMED = re.compile(
    rb"(?=\x8c(?P<short>.)(?P<a>[^\W\d][\w.]*)"  # texts of pickles, with their lengths
    rb"|X(?P<long>.{4})(?P<b>[^\W\d][\w.]*)"
    rb"|c(?P<c>[^\W\d][\w.]*)\n"  # a class in a pickle of an old protocol
    rb'|"(?P<d>[^\W\d][\w.]*)")',  # JSON
    re.DOTALL,
)

_UNPACKED: Mapping[bytes, Callable[[bytes], bytes]] = {
    b"\x78": zlib.decompress,
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ": lzma.decompress,
    b"\x5d\x00": lzma.decompress,
}
"""How joblib may have compressed a file, by its first bytes."""


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


def referred_modules(path: Path, root: Path) -> frozenset[str]:
    """The project's modules that a trained model's file, or its folder's files, name, as pickles and JSON documents do
    those of classes.

    The file is not loaded: that would take its framework, and run its code. A name that stands there for another reason
    does no harm.
    """
    if not path.is_file():
        return frozenset(name for file in path.rglob("*") if file.is_file() for name in referred_modules(file, root))
    content = path.read_bytes()
    if zipfile.is_zipfile(path):
        with contextlib.suppress(zipfile.BadZipFile, zlib.error), zipfile.ZipFile(path) as archive:
            named = [name for name in archive.namelist() if name.endswith((".pkl", ".json"))]
            content = b"\n".join(archive.read(name) for name in named)
    elif unpack := next((call for first, call in _UNPACKED.items() if content.startswith(first)), None):
        with contextlib.suppress(OSError, EOFError, zlib.error, lzma.LZMAError):  # else it only looks like one
            content = unpack(content)
    return frozenset(module for module in set(_named(content)) if _module_file(module, root) is not None)


def _named(content: bytes) -> Iterator[str]:
    for match in _NAMED.finditer(content):
        kind = match.lastgroup
        name = match[kind or 0]
        if kind == "a":
            name = name[: match["short"][0]]
        elif kind == "b":
            name = name[: int.from_bytes(match["long"], "little")]
        yield name.decode("ascii")


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
