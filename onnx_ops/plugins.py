"""Load plugins by entry point, and name the packages to install if one is missing."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops.domain.execution import Environment
from onnx_ops.errors import MissingPackageError, NotFoundError, UserError, suggest

if TYPE_CHECKING:
    from onnx_ops.ports.plugin import Plugin

KINDS = {
    "exporters": "Exporter",
    "optimizers": "Optimizer",
    "runtimes": "Runtime",
    "data": "DataSource",
    "endpoints": "EndpointProvider",
    "metrics": "MetricsSource",
    "notifiers": "Notifier",
    "pools": "Pools",
}
"""Names of the base classes in `onnx_ops.ports`, by kind of plugin.

The entry-point group of a kind is `onnx_ops.<kind>`.
"""


EXTRAS: Mapping[str, tuple[str, ...]] = {
    "aws": ("boto3",),
    "azure": ("azure-ai-ml", "azure-identity", "azure-storage-blob"),
    "blob": ("adlfs",),
    "console": ("starlette", "uvicorn"),
    "grpc": ("grpcio", "grpcio-health-checking", "grpcio-reflection"),
    "hub": ("huggingface-hub",),
    "huggingface": ("transformers",),
    "images": ("onnxruntime-extensions", "pillow"),
    "keras": ("keras",),
    "lightgbm": ("lightgbm", "onnxmltools"),
    "mlflow": ("mlflow",),
    "otel": ("opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"),
    "passes": ("onnxoptimizer", "onnxslim"),
    "prefect": ("prefect",),
    "s3": ("s3fs",),
    "serve": ("httptools", "orjson", "pysimdjson", "uvloop"),
    "sklearn": ("scikit-learn", "skl2onnx"),
    "tables": ("pandas", "pyarrow"),
    "text-metrics": ("jiwer", "sacrebleu"),
    "torch": ("onnxscript", "torch"),
    "view": ("netron",),
    "vision-metrics": ("pycocotools",),
    "xgboost": ("onnxmltools", "xgboost"),
}
"""Distributions that onnx-ops imports, by extra.

pyproject.toml has their versions.
"""

_BROUGHT_BY = {
    "azure": "azure-ai-ml",
    "botocore": "boto3",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "huggingface_hub": "huggingface-hub",
    "onnx-ir": "onnxscript",
    "onnx_ir": "onnxscript",
    "onnxruntime_extensions": "onnxruntime-extensions",
    "simdjson": "pysimdjson",
    "sklearn": "scikit-learn",
    "sqlalchemy": "mlflow",
}
"""Distribution to install for a package with another name, or for a dependency."""


_CUDA = frozenset(
    {"CUDAExecutionProvider", "NvTensorRTRTXExecutionProvider", "TensorrtExecutionProvider"}
)
"""Execution providers that need CUDA's libraries."""

MISSING = "not installed"
"""Text in place of the version of a distribution that is not installed."""


@functools.lru_cache(maxsize=4)
def _points(path: tuple[str, ...]) -> Mapping[str, EntryPoints]:
    """Return the entry points of the plugins, by kind.

    The result is cached, since the metadata of every distribution on the path is parsed.
    """
    found = entry_points()
    return {kind: found.select(group=f"onnx_ops.{kind}") for kind in KINDS}


def names(kind: str) -> tuple[str, ...]:
    """Return the names of the installed plugins of a kind."""
    return tuple(sorted({point.name for point in _points(tuple(sys.path))[kind]}))


def load(kind: str, name: str, *arguments: object) -> Any:
    """Return a new instance of a plugin, created with the given arguments.

    The arguments depend on the kind. An endpoint provider takes its state folder and the folder of
    trusted public keys.

    Raises:
        NotFoundError: no installed distribution offers the plugin.
        MissingPackageError: a package that the plugin needs is missing.
        UserError: the plugin does not derive from the base class of its kind, or refuses the
            arguments.
    """
    from onnx_ops import ports

    point = find(kind, name)
    try:
        plugin = point.load()(*arguments)
    except ModuleNotFoundError as error:
        raise missing_package(imported(error), where=f"{kind} plugin {name}") from error
    if not isinstance(plugin, getattr(ports, KINDS[kind])):
        raise UserError(
            f"{point.value} does not create an instance of {KINDS[kind]}",
            where=f"{kind} plugin {name}",
            remedy=f"Derive its class from onnx_ops.ports.{KINDS[kind]}.",
        )
    return plugin


def find(kind: str, name: str) -> EntryPoint:
    """Return the entry point of a plugin without importing it.

    Raises:
        NotFoundError: no installed distribution offers the plugin.
    """
    for point in _points(tuple(sys.path))[kind]:
        if point.name == name:
            return point
    known = names(kind)
    remedy = suggest(name, known, f"Installed: {', '.join(known)}.")
    raise NotFoundError(f"no {kind} plugin is called {name!r}", remedy=remedy)


def distribution(kind: str, name: str) -> str | None:
    """Return the name of the distribution that offers a plugin.

    The result is None if the plugin's entry point does not belong to a distribution.

    Raises:
        NotFoundError: there is no such plugin.
    """
    return _distribution(tuple(sys.path), kind, name)


@functools.lru_cache(maxsize=256)
def _distribution(path: tuple[str, ...], kind: str, name: str) -> str | None:
    """Return the name of the distribution that offers a plugin; None if it is unknown.

    The result is cached, since each access parses the distribution's metadata, and a plan needs the
    name for each stage.
    """
    found = find(kind, name).dist
    return None if found is None else found.name


@functools.cache
def version(name: str) -> str:
    """Return the version of a distribution.

    Without a distribution of that name, the result lists those that provide a package of that name.
    Each is listed with its version, such as `onnxruntime-gpu 1.31.0`. The result is `MISSING` if no
    distribution provides such a package.

    Nothing is imported. The result is cached, since a plan calls this often.
    """
    try:
        return metadata.version(name)
    except PackageNotFoundError:
        others = find_distributions(name.replace("-", "_"))
        return ", ".join(f"{other} {found}" for other, found in others.items()) or MISSING


def find_distributions(package: str) -> Mapping[str, str]:
    """Return the distributions that provide an importable package, and their versions."""
    named = _find_namesake(package)
    return {
        name: version(name)
        for name in ([named] if named else sorted(set(_packages().get(package, ()))))
    }


_NAMESAKES = {"sklearn": "scikit-learn", "yaml": "PyYAML"}
"""Distributions of common packages whose distribution has another name."""


@functools.cache
def _find_namesake(package: str) -> str:
    """Return the distribution of a package, if both have the same name.

    `_NAMESAKES` lists exceptions, which are found too. The result is empty for any other package.
    The function avoids the table of all packages. To build the table, Python reads the files of
    every distribution, which takes half a second.
    """
    try:
        found = metadata.distribution(_NAMESAKES.get(package, package))
    except (PackageNotFoundError, ValueError):  # metadata raises ValueError for an empty name.
        return ""
    has_package = Path(str(found.locate_file(package)), "__init__.py").is_file()
    return str(found.metadata["Name"]) if has_package else ""


def load_cuda(ort: Any, providers: Collection[str]) -> None:
    """Load CUDA's libraries from their Python packages, if a provider needs them.

    The dynamic linker does not search these packages. ONNX Runtime's messages about missing
    libraries are discarded: callers check which execution providers the session really uses.
    """
    if _CUDA.intersection(providers) and hasattr(ort, "preload_dlls"):
        ort.set_default_logger_severity(4)
        with contextlib.redirect_stdout(io.StringIO()):
            ort.preload_dlls()


def packages() -> frozenset[str]:
    """Return the names of the importable packages of installed distributions."""
    return frozenset(_packages())


@functools.cache
def _packages() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def require(*distributions: str, where: str) -> None:
    """Raise MissingPackageError if distributions are not installed.

    Nothing is imported.
    """
    if missing := absent(distributions):
        raise missing_package(*missing, where=where)


def absent(distributions: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct distributions that are not installed."""
    return tuple(name for name in dict.fromkeys(distributions) if version(name) == MISSING)


def tools(plugin: Plugin) -> tuple[str, ...]:
    """Return the distributions that a plugin needs."""
    return (*plugin.tools, *plugin.converters)


def missing_package(*packages: str, where: str, why: str = "") -> MissingPackageError:
    """Return an error that names missing packages and how to install them."""
    what = (
        f"package {packages[0]} is" if len(packages) == 1 else f"packages {', '.join(packages)} are"
    )
    return MissingPackageError(
        f"{what} not installed", where=where, why=why, remedy=install_hint(*packages)
    )


def imported(error: ImportError) -> str:
    """Return the top-level package whose import failed.

    The name is taken from the error or its cause. The result is empty if neither has a name.
    """
    cause = error.__cause__
    name = error.name or (cause.name if isinstance(cause, ImportError) else "") or ""
    return name.partition(".")[0]


def has_extra(package: str) -> bool:
    """Return whether an extra of onnx-ops provides the package."""
    return bool(_extras_of(package))


def distribution_of(package: str) -> str:
    """Return the distribution that provides a package, as `EXTRAS` names it.

    A package that is not in `_BROUGHT_BY` is assumed to have a distribution of the same name.
    """
    return _BROUGHT_BY.get(package, package)


def _extras_of(package: str) -> set[str]:
    wanted = distribution_of(package)
    return {extra for extra, distributions in EXTRAS.items() if wanted in distributions}


def install_hint(*packages: str) -> str:
    """Return an instruction with the command that installs missing packages.

    The command names extras of onnx-ops if they install the packages.
    """
    offers = sorted(map(_extras_of, packages), key=len)
    extras: set[str] = set()
    # Packages that only one extra provides come first, since this extra can provide other packages
    # of the list too.
    for offer in offers:
        if offer and extras.isdisjoint(offer):
            extras.add(min(offer))
    words = [f"'onnx-ops[{','.join(sorted(extras))}]'"] if extras else []
    words += sorted({package for package in packages if not has_extra(package)})
    return f"Install {'it' if len(packages) == 1 else 'them'} with: pip install {' '.join(words)}"


def select_environment(plugin: Plugin, env: Environment | None) -> Environment | None:
    """Return the environment in which an exporter or optimizer runs.

    The result is None if it runs in this installation.

    Raises:
        UserError: `env` requests packages or a Python version in this installation, which stages
            never change. The same error is raised if both the environment and the plugin lack
            requirements.
    """
    own = plugin.requirements
    if env is not None and not env.isolated:
        if env.requirements or env.python:
            raise UserError(
                "`isolated: false` uses this installation, in which onnx-ops installs no packages",
                where="env",
                remedy="Leave out `requirements` and `python`, or leave out `isolated`.",
            )
        return None
    if env is None:
        return Environment(requirements=own) if own else None
    requirements = env.requirements or own
    if not requirements:
        raise UserError(
            "the environment has no requirements",
            where="env",
            remedy="List the packages that the plugin needs in `requirements`.",
        )
    return Environment(
        requirements=requirements, python=env.python, memory=env.memory, timeout=env.timeout
    )
