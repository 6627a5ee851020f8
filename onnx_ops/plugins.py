"""Plugins by name: entry points, and what to install when one is missing."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, entry_points
from typing import Any

from onnx_ops.errors import MissingPackage, NotFound

KINDS = ("exporters", "optimizers", "runtimes", "data", "endpoints", "metrics", "notifiers", "pools")
"""Kinds of plugin; the entry-point group is `onnx_ops.<kind>`."""


_EXTRAS = {
    "azure": "azure",
    "boto3": "aws",
    "botocore": "aws",
    "keras": "keras",
    "lightgbm": "lightgbm",
    "onnxmltools": "xgboost",
    "netron": "view",
    "onnxoptimizer": "passes",
    "onnxscript": "torch",
    "onnxsim": "passes",
    "onnxslim": "passes",
    "skl2onnx": "sklearn",
    "sklearn": "sklearn",
    "torch": "torch",
    "transformers": "huggingface",
    "uvicorn": "serve",
    "xgboost": "xgboost",
}
"""Extras that bring a package, by the name it is imported under."""


MISSING = "not installed"
"""Version of a distribution that is not there."""


@functools.lru_cache(maxsize=4)
def _points(path: tuple[str, ...]) -> Mapping[str, EntryPoints]:
    """Entry points by kind. Looking for them reads the metadata of every distribution on the path."""
    del path
    found = entry_points()
    return {kind: found.select(group=f"onnx_ops.{kind}") for kind in KINDS}


def names(kind: str) -> tuple[str, ...]:
    """Names of the installed plugins of a kind."""
    return tuple(sorted({point.name for point in _points(tuple(sys.path))[kind]}))


def load(kind: str, name: str, *arguments: object) -> Any:
    """A new instance of the plugin, made with the arguments that its kind takes (an endpoint: its state
    folder, and that of trusted public keys).

    Raises:
        NotFound: no installed distribution offers it.
        MissingPackage: it is there, but a package that it needs is not.
    """
    point = find(kind, name)
    try:
        return point.load()(*arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise MissingPackage(
            f"package {package} is not installed",
            where=f"{kind} plugin {name}",
            remedy=install_hint(package),
        ) from error


def find(kind: str, name: str) -> EntryPoint:
    """The entry point itself, without importing it.

    Raises:
        NotFound: no installed distribution offers it.
    """
    for point in _points(tuple(sys.path))[kind]:
        if point.name == name:
            return point
    known = names(kind)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"installed: {', '.join(known)}"
    raise NotFound(f"no {kind} plugin is called {name!r}", remedy=hint)


def distribution(kind: str, name: str) -> str | None:
    """Name of the distribution that offers a plugin; None if there is none.

    Raises:
        NotFound: as for `find`.
    """
    return _distribution(tuple(sys.path), kind, name)


@functools.lru_cache(maxsize=256)
def _distribution(path: tuple[str, ...], kind: str, name: str) -> str | None:
    """Read once: every question to a distribution parses its metadata, and a plan asks for each of its stages."""
    del path
    found = find(kind, name).dist
    return None if found is None else found.name


@functools.cache
def version(name: str) -> str:
    """Version of a distribution, or of what brings its package instead, such as onnxruntime-gpu.

    Nothing is imported. Read once: a plan asks very often.
    """
    try:
        return metadata.version(name)
    except PackageNotFoundError:
        others = bringing(name.replace("-", "_"))
        return ", ".join(f"{other} {found}" for other, found in others.items()) or MISSING


def bringing(package: str) -> Mapping[str, str]:
    """The distributions that bring an importable package, with their versions."""
    return {name: version(name) for name in sorted(set(_packages().get(package, ())))}


@functools.cache
def _packages() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def install_hint(package: str) -> str:
    """What to type to get a package that is missing: an extra of onnx-ops where there is one."""
    extra = _EXTRAS.get(package)
    wanted = f"'onnx-ops[{extra}]'" if extra else package
    return f"Install it with: pip install {wanted}"
