"""Compute digests of a project's code, and find the packages that it imports."""

from __future__ import annotations

import ast
import bz2
import contextlib
import functools
import gzip
import importlib
import importlib.util
import lzma
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_ops import plugins
from onnx_ops.config.functions import find_module_file, parse_python, resolve_import
from onnx_ops.domain.artifact import Digest, digest_file, digest_json
from onnx_ops.errors import NotFoundError, UserError

CODE = "code.json"
"""Name of the file that describes the code of a trained model.

The file lists the modules of the model's classes, with their project files and packages.
"""

_OURS = __name__.partition(".")[0]

_JOBLIB = "joblib"
"""Package that writes its name into files, but is not part of a model's code."""

_NAME_PATTERN = re.compile(
    # In a pickle, the length of a string precedes the string.
    rb"(?=\x8c(?P<short>.)(?P<a>[^\W\d][\w.]*)"
    rb"|X(?P<long>.{4})(?P<b>[^\W\d][\w.]*)"
    # Pickle protocols below 4 end the name of a class's module with a newline.
    rb"|c(?P<c>[^\W\d][\w.]*)\n"
    rb'|"(?P<d>[^\W\d][\w.]*)")',  # In JSON, a string is quoted.
    re.DOTALL,
)

_SECOND_TEXT = re.compile(rb"\x94?\x8c(.)", re.DOTALL)

_DECOMPRESSORS: Mapping[bytes, Callable[[bytes], bytes]] = {
    b"\x78": zlib.decompress,
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ": lzma.decompress,
    b"\x5d\x00": lzma.decompress,
}
"""Decompressors for joblib's formats except LZ4, by the first bytes of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """The code of some modules: source files with digests, and packages with versions."""

    files: Mapping[str, Digest]
    packages: Mapping[str, str]

    def digest(self) -> Digest:
        """Return one digest of all files and packages."""
        return digest_json([dict(self.files), dict(self.packages)])


def collect_user_code(
    references: Iterable[str],
    root: Path,
    depends: tuple[str, ...] = (),
    *,
    where: str = "train.depends",
) -> UserCode:
    """Collect the code that modules can import, and the files of `depends`.

    Imports are followed in the project and in packages under development (an editable installation,
    `PYTHONPATH`). The version of an installed package represents its code. onnx-ops and the
    standard library are left out. Keys contain the revisions of stages and the version of Python.
    joblib is also left out. `where` is the place of `depends`, which errors show.

    Raises:
        NotFoundError: a module or a file of `depends` does not exist.
        UserError: a file is not valid Python.
    """
    files: dict[str, Digest] = {}
    packages: dict[str, str] = {}
    for reference in references:
        module = reference.partition(":")[0]
        if _find_source(module, root) is None and not find_distributions(module.partition(".")[0]):
            remedy = "Put the module below the project's root, or install it."
            raise NotFoundError(
                f"module {module} is neither in the project nor installed",
                where=str(root),
                remedy=remedy,
            )
        # The import of a module also runs the `__init__` of its parent packages.
        for package in _with_packages(module):
            _collect_module(package, root, files, packages)
    for name in depends:
        file = root / name
        if not file.is_file():
            remedy = "Paths are relative to the project's root."
            raise NotFoundError(f"no file {name}", where=where, remedy=remedy)
        files[name] = digest_file(file)
    return UserCode(files=files, packages=packages)


def find_code_file(name: str, root: Path) -> Path:
    """Return the path of a file that `UserCode` names.

    The file is in the project, or in a package under development.
    """
    folder = _find_development_folder(name.partition("/")[0].removesuffix(".py"))
    return root / name if folder is None or (root / name).is_file() else folder / name


def find_referenced_modules(path: Path, root: Path) -> frozenset[str]:
    """Return the modules that a trained model's files name.

    For an installed package, only the top-level name is returned. The files are not loaded, since
    this would need their framework and run their code. Strings that are not names of modules are
    ignored.
    """
    if not path.is_file():
        return frozenset(
            name
            for file in path.rglob("*")
            if file.is_file()
            for name in find_referenced_modules(file, root)
        )
    modules = set()
    for name, is_module in set(_list_names(_read_unpacked(path))):
        first = name.partition(".")[0]
        if _find_module_file(name, root) is not None or (
            is_module and _find_source(name, root) is not None
        ):
            modules.add(name)
        elif is_module and find_distributions(first):
            modules.add(first)
    return frozenset(modules)


def _read_unpacked(path: Path) -> bytes:
    """Return a file's decompressed content; of an archive, its pickle and JSON files."""
    content = path.read_bytes()
    if zipfile.is_zipfile(path):
        # For a damaged or encrypted archive, zipfile raises errors of many types. The file is then
        # read as a plain one.
        with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
            named = [name for name in archive.namelist() if name.endswith((".pkl", ".json"))]
            content = b"\n".join(archive.read(name) for name in named)
    elif decompress := next(
        (call for first, call in _DECOMPRESSORS.items() if content.startswith(first)), None
    ):
        # If the decompression fails, the file is read as a plain one: its first bytes can look like
        # those of a compressed file.
        with contextlib.suppress(OSError, EOFError, zlib.error, lzma.LZMAError):
            content = decompress(content)
    return content


def _list_names(content: bytes) -> Iterator[tuple[str, bool]]:
    """Yield possible names of modules, and whether each is treated as a module.

    A string is treated as a module if it has a dot, or if a pickle uses it as the module of a
    class. Any other string can be an ordinary word.
    """
    for match in _NAME_PATTERN.finditer(content):
        kind = match.lastgroup
        name, is_class = match[kind or 0], kind == "c"
        if kind == "a":
            name = name[: match["short"][0]]
            # In a pickle, a string is the name of a module if a second string and the opcode for a
            # class follow it.
            second = _SECOND_TEXT.match(content, match.start("a") + match["short"][0])
            after = content[second.end() + second[1][0] :][:2] if second else b""
            is_class = after in (b"\x94\x93", b"\x93\x94", b"\x93")
        elif kind == "b":
            name = name[: int.from_bytes(match["long"], "little")]
        yield name.decode("ascii"), is_class or b"." in name


def _collect_module(
    module: str, root: Path, files: dict[str, Digest], packages: dict[str, str]
) -> None:
    source = _find_source(module, root)
    if source is None:
        first = module.partition(".")[0]
        if not any((root / first).glob("*.py")):
            # If the project has a folder of this name with modules, the name is an attribute of one
            # of these modules.
            packages.update(find_distributions(first))
        return
    path, base = source
    name = path.relative_to(root if path.is_relative_to(root) else base).as_posix()
    if name in files:
        return
    files[name] = digest_file(path)
    for name in set(_list_imports(path, base)):
        _collect_module(name, root, files, packages)


def _list_imports(path: Path, base: Path) -> Iterator[str]:
    """Yield the dotted names to which import statements and import calls can refer.

    Calls with a computed name are left out. Some names are not modules; the caller ignores them.
    """
    package = list(path.relative_to(base).parts[:-1])
    try:
        tree = parse_python(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        # Early releases of Python 3.11 raise ValueError for a null byte. Deep nesting causes
        # RecursionError.
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError("not Python", where=f"{path}{line}", why=str(error)) from error
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                prefix = resolve_import(node, package)
                names = [prefix, *(f"{prefix}.{alias.name}".lstrip(".") for alias in node.names)]
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                names = [".".join([*package, name.lstrip(".")]) if name.startswith(".") else name]
            case _:
                continue
        for name in names:
            yield from _with_packages(name)


def _with_packages(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts) + 1))


def _find_source(module: str, root: Path) -> tuple[Path, Path] | None:
    """Return a module's file and its base folder, or None.

    The result is None for an installed or unknown module.
    """
    first = module.partition(".")[0]
    for base in (root, _find_development_folder(first)):
        if base is not None and (file := _find_module_file(module, base)) is not None:
            return file, base
    return None


def _find_module_file(module: str, base: Path) -> Path | None:
    return None if module.partition(".")[0] == _OURS else find_module_file(module, base)


@functools.cache
def _find_development_folder(package: str) -> Path | None:
    """Return the folder that contains a package under development, or None.

    A package under development is imported from a folder outside the installation.
    """
    spec = None
    if package.isidentifier() and package not in sys.stdlib_module_names:
        # `find_spec` raises ValueError for a module whose `__spec__` is None.
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(package)
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin]
    place = next((Path(place) for place in places if place is not None), None)
    if place is None or {"site-packages", "dist-packages"}.intersection(place.parts):
        return None
    return place.parent


def find_distributions(package: str) -> Mapping[str, str]:
    """Return the distributions of an importable package, with versions.

    The result is empty for onnx-ops, joblib and the standard library.
    """
    if package in (_OURS, _JOBLIB) or package in sys.stdlib_module_names:
        return {}
    return plugins.find_distributions(package)
