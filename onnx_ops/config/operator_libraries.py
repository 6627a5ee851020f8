"""Find the libraries of custom operators that a target declares.

A library is a file that the target names by its path, or a file in the folder of an installed
Python package. Packages are only located, and files only read: nothing is imported or loaded.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from onnx_ops.config.document import Document, Issue, Loc
from onnx_ops.domain.artifact import Digest, digest_file
from onnx_ops.domain.target import CustomOps
from onnx_ops.plugins import install_hint

_ENDINGS = frozenset({".so", ".dylib", ".dll", ".pyd"})
_ENTRY = b"RegisterCustomOps"
"""Function that ONNX Runtime calls in a library of custom operators."""


def resolve_libraries(
    declared: Iterable[CustomOps], root: Path, document: Document
) -> tuple[tuple[CustomOps, ...], tuple[Issue, ...]]:
    """Return the libraries of a target, and the issues of all libraries.

    Relative paths are joined to `root`. A library of a package is left out unless exactly one is
    found there.
    """
    libraries: list[CustomOps] = []
    issues: list[Issue] = []
    for index, library in enumerate(declared):
        loc: Loc = ("custom_ops", index)
        found = list(_check_form(library, loc))
        if found or not library.package:
            libraries.append(replace(library, path=str(root / library.path)))
        elif isinstance(packaged := _find_library(library, loc), Issue):
            found.append(packaged)
        else:
            libraries.append(packaged)
        issues += (replace(issue, loc=document.written(issue.loc)) for issue in found)
    return tuple(libraries), tuple(issues)


def _check_form(library: CustomOps, loc: Loc) -> Iterator[Issue]:
    """Yield issues unless the library has a path and a digest, or only a package."""
    given = {"path": library.path, "digest": library.digest}
    if library.package:
        for key in (key for key, value in given.items() if value):
            yield Issue((*loc, key), f"'package' and '{key}' exclude each other; keep one")
    elif not any(given.values()):
        yield Issue(loc, "a library needs 'path' and 'digest', or 'package'")
    else:
        for key in (key for key, value in given.items() if not value):
            yield Issue((*loc, key), f"missing key '{key}'", on_key=True)


def _find_library(library: CustomOps, loc: Loc) -> CustomOps | Issue:
    """Return a library with the path and digest of the library file in its package.

    The result is an issue unless the package has exactly one such file.
    """
    package, place = library.package, (*loc, "package")
    folders = _find_folders(package)
    if folders is None:
        text = f"package {package} is not installed. {install_hint(package)}"
        return Issue(place, text, environment=True)
    paths = [path for folder in folders for path in _list_libraries(folder)]
    if not paths:
        text = (
            f"package {package} has no library of custom operators: no shared library directly in "
            f"its folder has the function {_ENTRY.decode()}"
        )
        return Issue(place, text)
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        return Issue(
            place,
            f"package {package} has several libraries of custom operators: {names}; copy one into "
            "the project, and name it with 'path' and 'digest'",
        )
    return replace(library, path=str(paths[0]), digest=_read_file(paths[0])[1])


def _find_folders(package: str) -> Sequence[Path] | None:
    """Return the folders of an installed package; None if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        # `find_spec` raises ValueError for a loaded module without a specification.
        return None
    if spec is None:
        return None
    return [Path(folder) for folder in spec.submodule_search_locations or ()]


def _list_libraries(folder: Path) -> list[Path]:
    """Return the libraries of custom operators in a folder."""
    if not folder.is_dir():
        return []
    candidates = (path for path in sorted(folder.iterdir()) if path.suffix in _ENDINGS)
    return [path for path in candidates if path.is_file() and _read_file(path)[0]]


def _read_file(path: Path) -> tuple[bool, Digest]:
    """Return whether a file registers operators, and its digest."""
    status = path.stat()
    return _read_version(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=64)
def _read_version(path: Path, modified: int, size: int) -> tuple[bool, Digest]:
    """Return the results of `_read_file`; read a file again only after a change.

    A command loads a target several times.
    """
    return _ENTRY in path.read_bytes(), digest_file(path)
